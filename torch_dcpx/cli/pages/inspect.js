// The page of `dcpx inspect`: sizes by module, where each tensor lies, bytes of files and ranks.
"use strict";

const SHOWN = 100; // rows of a table
const FIRST = 20; // of these, the largest tensors that show at once
const MAX_RESULTS = 50; // names that a search lists
const MAX_DRAWN = 4000; // parts of one tensor

/** Returns the parts of an item: [offsets, sizes, number of the file, byte in it, bytes] each. */
function partsOf({ items, layouts }, item) {
  return layouts[items.layout[item]].map(([offsets, sizes, file, nbytes], nth) => [offsets, sizes, file, items.at[item][nth], nbytes]);
}

function inspected(found) {
  const { items, files } = found;
  const isTensor = (item) => items.dtype[item] !== null;
  const all = [...items.name.keys()];
  const tensors = all.filter(isTensor);
  const objects = all.filter((item) => !isTensor(item));
  const known = files.rank.filter((rank) => rank !== null);
  const ranks = [...new Set(known)].sort((a, b) => a - b);
  const where = whereItLies(found);
  const choose = (item) => {
    where.choose(item);
    where.section.scrollIntoView({ block: "start" });
  };
  const link = (item) => el("button", { type: "button", onclick: () => choose(item) }, nameText(items.name[item]));
  const tensorTable = (chosen) => table("Largest tensors", ["name", "#bytes", "dtype", "shape", "#parts"], chosen.map((item) => [
    link(item), bytesText(items.nbytes[item]), items.dtype[item], listText(items.shape[item]), countText(items.at[item].length)]));
  const largest = [...tensors].sort((a, b) => items.nbytes[b] - items.nbytes[a]);
  const most = largest.slice(0, SHOWN);
  const values = valuesOf(found);
  if (all.length) where.choose(largest.length ? largest[0] : all[0]);
  return el("div", {},
    facts([
      ["step", found.step ?? ""], ["parameters", countText(found.parameters)], ["dtypes", dtypesOf(items, tensors)],
      ["bytes of the files", bytesText(sum(files.found))],
      ["tensors", countText(tensors.length)], ["objects", countText(objects.length)],
      ["ranks", ranks.length ? countText(ranks.length) : ""], ["files", countText(files.name.length)],
      ["written by", found.written_by], ["saved", found.saved], ["save id", found.save_id], ["keys", found.keys.join(", ")],
    ]),
    ...faultsOf(counted(found.faults.length, "fault"), found.faults, "dcpx inspect lists all"),
    el("section", {}, el("h2", {}, "Sizes by module"),
      el("p", { class: "hint" }, "A box is as large as its bytes. Click a module to go into it, a tensor to see where it lies."),
      ...coloredModules(found, values, choose)),
    ...(all.length ? [where.section] : []),
    ...(files.name.length ? [el("section", { class: "two" }, ...byFileAndRank(files, ranks))] : []),
    ...(tensors.length ? [el("section", {}, el("h2", {}, "Largest tensors"),
      tensorTable(most.slice(0, FIRST)),
      ...(most.length > FIRST ? [details(`The next ${most.length - FIRST}`, tensorTable(most.slice(FIRST)))] : []),
      ...moreThan(most.length, tensors.length, "the search above finds every one"))] : []),
    ...(objects.length ? [el("section", {}, el("h2", {}, "Objects"),
      el("p", { class: "hint" }, "What is no tensor, such as step counts. Values of the first few small ones are shown."),
      table("Objects", ["name", "value", "#bytes"], objects.slice(0, SHOWN).map((item) => [link(item), el("span", { class: "name" }, values.get(item) ?? ""), bytesText(items.nbytes[item])])),
      ...moreThan(SHOWN, objects.length, "the search above finds every one"))] : []));
}

/** Returns the values that the page has, by number of the name. */
const valuesOf = ({ values }) => new Map(values.item.map((item, at) => [item, values.text[at]]));

function dtypesOf(items, tensors) {
  const totals = new Map();
  for (const item of tensors) totals.set(items.dtype[item], (totals.get(items.dtype[item]) || 0) + items.nbytes[item]);
  const largest = [...totals].sort((one, two) => two[1] - one[1]);
  const more = largest.length > 4 ? `, ${largest.length - 4} more` : "";
  return largest.slice(0, 4).map(([dtype, nbytes]) => `${dtype} ${bytesText(nbytes)}`).join(", ") + more;
}

/** Makes the treemap, with the choice of what its colours mean and their legend. */
function coloredModules(found, values, choose) {
  const { items } = found;
  const ways = { "part of the name": byPart, dtype: byDtype, "rank or file": byHolder };
  const pick = el("select", { id: "color" }, ...Object.keys(ways).map((way) => el("option", {}, way)));
  const place = el("div", {});
  let paint;
  function recolor() {
    const { keyOf, labels, hues, others } = ways[pick.value](found);
    const totalOf = tallied(labels.length, (total, item) => { total[keyOf(item)] += items.nbytes[item]; });
    const totals = totalOf(root);
    paint = (node) => {
      const total = totalOf(node);
      const main = total.indexOf(total.reduce((one, two) => Math.max(one, two), 0));
      return fill(total[main] >= 0.8 * sum(total) ? hues[main] : NO_HUE); // else it is of several
    };
    const order = [...labels.keys()].filter((key) => totals[key]).sort((one, two) => (one === others) - (two === others) || totals[two] - totals[one]);
    const entries = order.map((key) => [() => fill(hues[key]), `${labels[key]} ${bytesText(totals[key])}`]);
    place.replaceChildren(legend(entries, order.length > 1 ? [[() => fill(NO_HUE), "a module of several"]] : []));
  }
  const root = modulesOf(items.name, items.nbytes);
  recolor();
  const map = treemap(root, {
    caption: "Bytes by module", mark: () => "", pick: choose, paint: (node) => paint(node), detail: (node) => bytesText(node.bytes),
    lines: (node, view) => [
      [bytesText(node.bytes), share(node.bytes, view.bytes)],
      isModule(node) ? ["", counted(node.count, "name")] : ["", formOf(items, node.item)],
      ...(values.has(node.item) ? [["value", values.get(node.item)]] : []),
    ],
  });
  pick.addEventListener("change", () => {
    recolor();
    map.redraw();
  });
  return [el("div", { class: "fields" }, el("label", {}, "Colour", pick)), place, map.element];
}

/**
 * Returns parts such as "model.layers.*.mlp": the largest is cut further while it is more than two
 * thirds. Those that are small, or for which hues run out, are "others".
 */
function byPart({ items }) {
  const split = items.name.map((name) => name.split(".", MAX_DEPTH).map((part) => (/^\d+$/.test(part) ? "*" : part)));
  const made = (own, depth) => ({ own, depth, bytes: sum(own.map((item) => items.nbytes[item])) });
  const largestFirst = (one, two) => two.bytes - one.bytes;
  let parts = [made([...items.name.keys()], 0)];
  const all = parts[0].bytes;
  const matters = (part) => part.bytes * 100 >= all;
  for (;;) {
    const [largest, ...rest] = parts.sort(largestFirst);
    if (rest.length && largest.bytes * 3 < all * 2) break;
    if (largest.own.every((item) => split[item].length === largest.depth)) break;
    const groups = new Map();
    for (const item of largest.own) {
      const key = split[item][largest.depth] ?? "";
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(item);
    }
    const next = [...groups.values()].map((own) => made(own, largest.depth + 1)).sort(largestFirst);
    const places = Math.max(0, HUES.length - 1 - rest.filter(matters).length);
    if (sum(next.slice(0, places).map((part) => part.bytes)) * 2 < largest.bytes) break; // most would be others
    parts = [...rest, ...next];
  }
  let kept = parts.filter(matters);
  if (kept.length < parts.length || kept.length > HUES.length) kept = kept.slice(0, HUES.length - 1);
  const others = parts.slice(kept.length);
  const keys = new Int32Array(items.name.length).fill(kept.length);
  kept.forEach(({ own }, at) => own.forEach((item) => { keys[item] = at; }));
  const labels = [...kept, ...(others.length === 1 ? others : [])].map(({ own, depth }) => {
    const isShared = (item) => split[item].length > depth + 1 && split[item][depth] === split[own[0]][depth];
    while (own.length && own.every(isShared)) depth += 1; // what all its names begin with
    return (own.length && split[own[0]].slice(0, depth).join(".")) || "all";
  });
  if (others.length > 1) labels.push("others");
  return { keyOf: (item) => keys[item], labels, hues: HUES, others: kept.length };
}

function byDtype({ items }) {
  const labels = [...new Set(items.dtype)];
  return { keyOf: (item) => labels.indexOf(items.dtype[item]), labels: labels.map((one) => one ?? "object"), hues: labels.map((_, at) => HUES[at] || NO_HUE) };
}

/** Colours by the rank, else the file, that holds all of a tensor, as the map below does its parts. */
function byHolder({ items, files, layouts }) {
  const labels = ["several ranks or files"];
  const hues = [NO_HUE];
  const known = new Map();
  const keys = layouts.map((chunks) => {
    const holders = new Map(chunks.map((chunk) => [holderOf(files, chunk[2]).label, holderOf(files, chunk[2])]));
    if (holders.size !== 1) return 0;
    const [{ label, hue }] = holders.values();
    if (!known.has(label)) {
      known.set(label, labels.push(label) - 1);
      hues.push(hue);
    }
    return known.get(label);
  });
  return { keyOf: (item) => keys[items.layout[item]], labels, hues };
}

/** Returns who holds what lies in the file of this number: -1 is none. */
function holderOf(files, file) {
  if (file < 0) return { label: "no file", hue: NO_HUE };
  const rank = files.rank[file];
  return { label: rank === null ? `file ${file}` : `rank ${rank}`, hue: RANKS[(rank ?? file) % RANKS.length] };
}

const formOf = (items, item) => (items.dtype[item] === null ? "object" : `${items.dtype[item]} ${listText(items.shape[item])}`);

function byFileAndRank(files, ranks) {
  const label = (at) => (files.rank[at] === null ? files.name[at] : `${files.name[at]}, rank ${files.rank[at]}`);
  const rows = files.name.map((name, at) => [name, files.rank[at] === null ? "" : `${files.rank[at]}`, bytesText(files.found[at])]);
  const sections = [el("div", {}, el("h2", {}, "Bytes by file"),
    bars("Bytes by file", files.name.map((_, at) => label(at)), files.found, "file", [...files.name.keys()]),
    details("The same as a list", table("Files", ["file", "#rank", "#bytes"], rows)))];
  if (ranks.length) {
    const totals = new Map(ranks.map((rank) => [rank, 0]));
    files.rank.forEach((rank, at) => rank !== null && totals.set(rank, totals.get(rank) + files.found[at]));
    const pairs = [...totals];
    sections.push(el("div", {}, el("h2", {}, "Bytes by rank"),
      bars("Bytes by rank", pairs.map(([rank]) => `rank ${rank}`), pairs.map(([, nbytes]) => nbytes), "rank", ranks),
      details("The same as a list", table("Ranks", ["#rank", "#bytes"], pairs.map(([rank, nbytes]) => [`${rank}`, bytesText(nbytes)])))));
  }
  return sections;
}

/** Makes the map of one tensor: a search for its name, its parts as boxes and as a table. */
function whereItLies(found) {
  const { items, files } = found;
  const values = valuesOf(found);
  const lower = items.name.map((name) => name.toLowerCase());
  const input = el("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
  const tally = el("p", { class: "hint", "aria-live": "polite", hidden: "" });
  const results = el("ul", { class: "found" });
  const title = el("h3", { class: "name", id: "chosen" });
  const text = el("p", {});
  const holder = el("div", { class: "chart shards", style: "height:320px" });
  const rows = el("div", {});
  const ownerOf = (chunk) => holderOf(files, chunk[2]).label;
  const hueOf = (chunk) => holderOf(files, chunk[2]).hue;
  const fileOf = (chunk) => (chunk[2] < 0 ? "no file" : files.name[chunk[2]]);
  let item = -1;
  let redraw = null;
  const map = () => shardMap(found, item, { hueOf, ownerOf, fileOf });
  function choose(chosen) {
    item = chosen;
    const chunks = partsOf(found, item);
    title.textContent = items.name[item] || NO_NAME;
    const { note } = map();
    text.textContent = `${formOf(items, item)}, ${bytesText(items.nbytes[item])}, ${counted(chunks.length, "part")}. ${note}`;
    if (values.has(item)) text.append(el("span", { class: "value name" }, values.get(item)));
    const isDrawn = items.dtype[item] !== null && chunks.length > 0 && !items.shape[item].includes(0);
    holder.hidden = !isDrawn;
    holder.setAttribute("aria-label", `Parts of ${items.name[item]}; the table below lists them`);
    const lines = chunks.slice(0, SHOWN).map((chunk) => [ownerOf(chunk), listText(chunk[0]), listText(chunk[1]), fileOf(chunk), countText(chunk[3]), countText(chunk[4])]);
    rows.replaceChildren(table("Parts", ["held by", "offsets", "sizes", "file", "#at byte", "#bytes"], lines), ...moreThan(SHOWN, chunks.length, "dcpx inspect --parts lists all"));
    if (!isDrawn) return;
    if (redraw) redraw();
    else redraw = drawing(holder, (width, height) => map().boxes(width, height));
  }
  function search() {
    const wanted = input.value.trim().toLowerCase();
    const fitting = wanted ? [...lower.keys()].filter((at) => lower[at].includes(wanted)) : [];
    const buttons = fitting.slice(0, MAX_RESULTS).map((at) => el("li", {}, el("button", { type: "button", class: "name", onclick: () => choose(at) }, items.name[at] || NO_NAME)));
    const listed = fitting.length > MAX_RESULTS ? `; the first ${MAX_RESULTS} are listed` : "";
    tally.textContent = `${countText(fitting.length)} of ${counted(lower.length, "name")}${listed}.`;
    tally.hidden = !wanted;
    results.replaceChildren(...buttons);
    if (fitting.length) choose(fitting.find((at) => lower[at] === wanted) ?? fitting[0]);
  }
  input.addEventListener("input", search);
  const section = el("section", {}, el("h2", {}, "Where a tensor lies"),
    el("div", { class: "fields" }, el("label", {}, "Part of a name", input)), tally, results, title, text, holder, rows);
  return { section, choose };
}

/** Returns the two dimensions of a tensor that its map shows: those that are cut, else the first. */
function shownDims(shape, chunks) {
  const isCut = (dim) => chunks.some((chunk) => chunk[1][dim] < shape[dim]);
  const wide = [...shape.keys()].filter((dim) => shape[dim] > 1);
  const cut = wide.filter(isCut);
  const dims = [...cut, ...wide.filter((dim) => !cut.includes(dim))].slice(0, 2).sort((a, b) => a - b);
  return { dims, hidden: cut.filter((dim) => !dims.includes(dim)) };
}

function shardMap(found, item, { hueOf, ownerOf, fileOf }) {
  const { items } = found;
  const chunks = partsOf(found, item);
  const shape = items.shape[item] || [];
  const { dims, hidden } = shownDims(shape, chunks);
  const [rowDim, columnDim] = dims.length === 2 ? dims : [undefined, dims[0]];
  const span = (chunk, dim) => (dim === undefined ? [0, 1] : [chunk[0][dim], chunk[0][dim] + chunk[1][dim]]);
  const axisName = (dim) => (dim === undefined ? "" : `dimension ${dim} (${countText(shape[dim])})`);
  const notes = shape.includes(0) ? ["It has no elements."] : [];
  if (dims.length === 2 && !shape.includes(0)) notes.push(`Rows are dimension ${dims[0]}, columns dimension ${dims[1]}.`);
  if (hidden.length) notes.push(`Parts that differ in dimension ${hidden.join(", ")} lie upon each other.`);
  if (chunks.length > MAX_DRAWN) notes.push(`The map shows the first ${countText(MAX_DRAWN)}.`);
  /** Returns where parts begin and the last ends, those whose texts lie `gap` of `size` pixels apart. */
  const bounds = (dim, size, gap) => {
    if (dim === undefined) return [];
    const begins = [...new Set(chunks.slice(0, MAX_DRAWN).map((chunk) => chunk[0][dim]))].sort((a, b) => a - b);
    let last = -Infinity;
    return [...begins.filter((at) => {
      const place = (at / shape[dim]) * size;
      const isApart = place - last >= gap && size - place >= gap;
      if (isApart) last = place;
      return isApart;
    }), shape[dim]];
  };
  const boxes = (width, height) => {
    const soft = { ink: color("soft"), tone: color("soft") };
    const labelOf = (dim) => (dim === undefined ? 0 : widthOf(countText(shape[dim])));
    const left = rowDim === undefined ? 16 : 40 + labelOf(rowDim);
    const [wide, high] = [width - left - Math.max(24, labelOf(columnDim) / 2 + 4), height - 60]; // of the tensor
    const at = (dim, size, index) => (dim === undefined ? index : index / shape[dim]) * size;
    return [
      ...chunks.slice(0, MAX_DRAWN).map((chunk) => {
        const [[x, endX], [y, endY]] = [span(chunk, columnDim).map((each) => left + at(columnDim, wide, each)), span(chunk, rowDim).map((each) => 16 + at(rowDim, high, each))];
        const gap = Math.min(endX - x, endY - y) > 6 ? 0.5 : 0;
        const tone = fill(hueOf(chunk));
        const isLabelled = widthOf(ownerOf(chunk)) < endX - x - 6 && endY - y > 16;
        return {
          x: x + gap, y: y + gap, width: Math.max(1, endX - x - 2 * gap), height: Math.max(1, endY - y - 2 * gap), tone,
          lines: isLabelled ? [ownerOf(chunk)] : [], ink: inkOn(tone), align: "center", at: [(endX - x) / 2, (endY - y - LINE) / 2],
          tip: () => [["", ownerOf(chunk)], ["file", fileOf(chunk)], ["offsets", listText(chunk[0])], ["sizes", listText(chunk[1])],
            ["dtype", items.dtype[item]], ["of shape", listText(shape)], ["at byte", countText(chunk[3])], ["bytes", countText(chunk[4])]],
        };
      }),
      ...bounds(columnDim, wide, labelOf(columnDim) + 8).map((index) => ({ ...soft, x: left + at(columnDim, wide, index), y: 16 + high, width: 1, height: 5, lines: [countText(index)], align: "center", at: [0, 6] })),
      ...bounds(rowDim, high, LINE + 3).map((index) => ({ ...soft, x: left - 5, y: 16 + at(rowDim, high, index), width: 5, height: 1, lines: [countText(index)], align: "right", at: [-3, -LINE / 2] })),
      { ...soft, x: left + wide / 2, y: height, width: 0, height: 0, lines: [axisName(columnDim)], align: "center", at: [0, -20] },
      { ...soft, x: 12, y: 16 + high / 2, width: 0, height: 0, lines: [axisName(rowDim)], align: "center", at: [0, -LINE / 2], turned: true },
    ];
  };
  return { boxes, note: notes.join(" ") };
}

function showInspected() {
  document.title = `${data.path} - dcpx inspect`;
  page.replaceChildren(el("h1", {}, "Checkpoint ", el("span", { class: "name" }, data.path)),
    ...oneOf("Metadata of", data.checkpoints.map((one) => one.metadata_file), 0, (at) => [inspected(data.checkpoints[at])]));
}
