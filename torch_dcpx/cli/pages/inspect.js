// The page of `dcpx inspect`: sizes by module, where each tensor lies, bytes of files and ranks.
"use strict";

const SHOWN = 100; // rows of a table
const FIRST = 20; // of these, the largest tensors that show at once
const MAX_RESULTS = 50; // names that a search lists
const MAX_DRAWN = 4000; // chunks of one tensor

/** Returns the chunks of an item: [offsets, sizes, number of the file, byte in it, bytes] each. */
function chunksOf({ items, layouts }, item) {
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
  const tensorTable = (chosen) => table("Largest tensors", ["name", "#bytes", "dtype", "shape", "#chunks"], chosen.map((item) => [
    link(item), bytesText(items.nbytes[item]), items.dtype[item], listText(items.shape[item]), countText(items.at[item].length)]));
  const largest = [...tensors].sort((a, b) => items.nbytes[b] - items.nbytes[a]);
  const most = largest.slice(0, SHOWN);
  if (all.length) where.choose(largest.length ? largest[0] : all[0]);
  return el("div", {},
    facts([
      ["written by", found.written_by], ["saved", found.saved], ["save id", found.save_id],
      ["tensors", countText(tensors.length)], ["objects", countText(objects.length)],
      ["ranks", ranks.length ? countText(ranks.length) : ""], ["files", countText(files.name.length)],
      ["bytes of the files", bytesText(sum(files.found))], ["keys", found.keys.join(", ")],
    ]),
    ...faultsOf(found.faults),
    el("section", {}, el("h2", {}, "Sizes by module"),
      el("p", { class: "hint" }, "A box is as large as its bytes. Click a module to go into it, a tensor to see where it lies."),
      treemap(modulesOf(items.name, items.nbytes), {
        caption: "Bytes by module", mark: () => "", pick: choose,
        base: (_node, nth) => PALETTE[nth % PALETTE.length],
        lines: (node, view) => [
          [bytesText(node.bytes), share(node.bytes, view.bytes)],
          isModule(node) ? ["", counted(node.count, "name")] : ["", formOf(items, node.item)],
        ],
      })),
    where.section,
    el("section", { class: "two" }, ...byFileAndRank(files, ranks)),
    el("section", {}, el("h2", {}, "Largest tensors"),
      tensorTable(most.slice(0, FIRST)),
      ...(most.length > FIRST ? [details(`The next ${most.length - FIRST}`, tensorTable(most.slice(FIRST)))] : []),
      ...moreThan(most.length, tensors.length, "the search above finds every one")),
    ...(objects.length ? [el("section", {}, el("h2", {}, "Objects"),
      el("p", { class: "hint" }, "What is no tensor, such as step counts."),
      table("Objects", ["name", "#bytes"], objects.slice(0, SHOWN).map((item) => [link(item), bytesText(items.nbytes[item])])),
      ...moreThan(SHOWN, objects.length, "the search above finds every one"))] : []));
}

function moreThan(shown, all, way) {
  return all > shown ? [el("p", { class: "hint" }, `${countText(all - shown)} more: ${way}.`)] : [];
}

function faultsOf(faults) {
  if (!faults.length) return [];
  const lines = faults.slice(0, SHOWN).map((one) => el("li", {}, one));
  const more = moreThan(SHOWN, faults.length, "dcpx inspect lists all");
  return [el("div", { class: "faults" }, el("strong", {}, counted(faults.length, "fault")), el("ul", {}, ...lines), ...more)];
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

/** Makes the map of one tensor: a search for its name, its chunks as boxes and as a table. */
function whereItLies(found) {
  const { items, files } = found;
  const lower = items.name.map((name) => name.toLowerCase());
  const input = el("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
  const results = el("ul", { class: "found", "aria-live": "polite" });
  const title = el("h3", { class: "name", id: "chosen" });
  const text = el("p", {});
  const holder = el("div", { class: "chart shards", style: "height:320px" });
  const rows = el("div", {});
  const ownerOf = (chunk) => (chunk[2] < 0 ? "no file" : files.rank[chunk[2]] === null ? `file ${chunk[2]}` : `rank ${files.rank[chunk[2]]}`);
  const hueOf = (chunk) => (chunk[2] < 0 ? "#999999" : PALETTE[(files.rank[chunk[2]] ?? chunk[2]) % PALETTE.length]);
  const fileOf = (chunk) => (chunk[2] < 0 ? "no file" : files.name[chunk[2]]);
  let item = -1;
  let drawing = null;
  const map = () => shardMap(found, item, { hueOf, ownerOf, fileOf });
  function choose(chosen) {
    item = chosen;
    const chunks = chunksOf(found, item);
    title.textContent = items.name[item] || NO_NAME;
    const { note } = map();
    text.textContent = `${formOf(items, item)}, ${bytesText(items.nbytes[item])}, ${counted(chunks.length, "chunk")}. ${note}`;
    const isDrawn = items.dtype[item] !== null && chunks.length > 0 && !items.shape[item].includes(0);
    holder.hidden = !isDrawn;
    holder.setAttribute("aria-label", `Chunks of ${items.name[item]}; the table below lists them`);
    const lines = chunks.slice(0, SHOWN).map((chunk) => [ownerOf(chunk), listText(chunk[0]), listText(chunk[1]), fileOf(chunk), countText(chunk[3]), countText(chunk[4])]);
    rows.replaceChildren(table("Chunks", ["held by", "offsets", "sizes", "file", "#at byte", "#bytes"], lines), ...moreThan(SHOWN, chunks.length, "dcpx inspect --chunks lists all"));
    if (!isDrawn) return;
    if (drawing) drawing.redraw();
    else drawing = chart(holder, (width, height) => map().option(width, height));
  }
  function search() {
    const wanted = input.value.trim().toLowerCase();
    const fitting = wanted ? [...lower.keys()].filter((at) => lower[at].includes(wanted)) : [];
    const buttons = fitting.slice(0, MAX_RESULTS).map((at) => el("li", {}, el("button", { type: "button", class: "name", onclick: () => choose(at) }, items.name[at] || NO_NAME)));
    results.replaceChildren(...buttons, ...(fitting.length > MAX_RESULTS ? [el("li", { class: "hint" }, `${countText(fitting.length - MAX_RESULTS)} more`)] : []),
      ...(wanted && !fitting.length ? [el("li", { class: "hint" }, "No name holds this text.")] : []));
    if (fitting.length) choose(fitting.find((at) => lower[at] === wanted) ?? fitting[0]);
  }
  input.addEventListener("input", search);
  const section = el("section", {}, el("h2", {}, "Where a tensor lies"),
    el("div", { class: "fields" }, el("label", {}, "Part of a name", input)), results, title, text, holder, rows);
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
  const chunks = chunksOf(found, item);
  const shape = items.shape[item] || [];
  const { dims, hidden } = shownDims(shape, chunks);
  const [rowDim, columnDim] = dims.length === 2 ? dims : [undefined, dims[0]];
  const extent = (dim) => (dim === undefined ? 1 : shape[dim]);
  const span = (chunk, dim) => (dim === undefined ? [0, 1] : [chunk[0][dim], chunk[0][dim] + chunk[1][dim]]);
  const axisName = (dim) => (dim === undefined ? "" : `dimension ${dim} (${countText(shape[dim])})`);
  const notes = shape.includes(0) ? ["It has no elements."] : [];
  if (dims.length === 2 && !shape.includes(0)) notes.push(`Rows are dimension ${dims[0]}, columns dimension ${dims[1]}.`);
  if (hidden.length) notes.push(`Chunks that differ in dimension ${hidden.join(", ")} lie upon each other.`);
  if (chunks.length > MAX_DRAWN) notes.push(`The map shows the first ${countText(MAX_DRAWN)}.`);
  const bounds = (dim) => {
    if (dim === undefined) return [];
    const begins = [...new Set(chunks.slice(0, MAX_DRAWN).map((chunk) => chunk[0][dim]))].sort((a, b) => a - b);
    const step = Math.ceil(begins.length / 8);
    return [...begins.filter((at, nth) => nth % step === 0 && at < 0.95 * shape[dim]), shape[dim]];
  };
  const axis = (dim, more) => ({
    type: "value", min: 0, max: extent(dim), name: axisName(dim), nameLocation: "middle", nameGap: 28, nameTextStyle: { color: color("soft") },
    axisLabel: { show: dim !== undefined, color: color("soft"), hideOverlap: true, customValues: bounds(dim), formatter: countText }, axisTick: { customValues: bounds(dim) }, splitLine: { show: false },
    axisLine: { show: true, lineStyle: { color: color("soft") } }, ...more,
  });
  const option = () => ({
    grid: { left: rowDim === undefined ? 16 : 40, right: 24, top: 16, bottom: 44, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    tooltip: tooltip((one) => {
      const chunk = chunks[one.dataIndex];
      return [["", ownerOf(chunk)], ["file", fileOf(chunk)], ["offsets", listText(chunk[0])], ["sizes", listText(chunk[1])],
        ["dtype", items.dtype[item]], ["of shape", listText(shape)], ["at byte", countText(chunk[3])], ["bytes", countText(chunk[4])]];
    }),
    xAxis: axis(columnDim), yAxis: axis(rowDim, { inverse: true, nameGap: 48 }),
    series: [{
      type: "custom", clip: true, data: chunks.slice(0, MAX_DRAWN).map((_, at) => [at]), encode: { x: [], y: [] },
      renderItem: (params, api) => {
        const chunk = chunks[params.dataIndex];
        const [left, right] = span(chunk, columnDim);
        const [top, bottom] = span(chunk, rowDim);
        const [x, y] = api.coord([left, top]);
        const [endX, endY] = api.coord([right, bottom]);
        const width = Math.max(1, endX - x);
        const height = Math.max(1, endY - y);
        const isLarge = Math.min(width, height) > 6;
        return {
          type: "rect", shape: { x, y, width, height },
          style: { fill: fill(hueOf(chunk)), stroke: color("paper"), lineWidth: isLarge ? 1 : 0 },
          textContent: { type: "text", style: { text: width > 50 && height > 16 ? ownerOf(chunk) : "", fill: color("box-ink"), fontSize: 12 } },
          textConfig: { position: "inside" },
        };
      },
    }],
  });
  return { option, note: notes.join(" ") };
}

function showInspected() {
  const pick = el("select", {});
  const place = el("div", {});
  const show = () => place.replaceChildren(inspected(data.checkpoints[pick.selectedIndex]));
  pick.append(...data.checkpoints.map((one) => el("option", {}, one.metadata_file)));
  pick.addEventListener("change", show);
  const several = data.checkpoints.length > 1 ? [el("div", { class: "fields" }, el("label", {}, "Metadata of", pick))] : [];
  document.title = `${data.path} - dcpx inspect`;
  page.replaceChildren(el("h1", {}, "Checkpoint ", el("span", { class: "name" }, data.path)), ...several, place);
  show();
}
