// The page of `dcpx diff`: what appeared, went and changed from A to B.
"use strict";

const LISTED = 200; // rows of the table
const KINDS = [
  { what: "only in B", mark: "+", hue: "#009e73" },
  { what: "only in A", mark: "−", hue: "#d55e00" },
  { what: "shape", mark: "⇔", hue: "#cc79a7" },
  { what: "dtype", mark: "◇", hue: "#e69f00" },
  { what: "kind", mark: "?", hue: "#f0e442" },
  { what: "values", mark: "≠", hue: "#56b4e9" },
  { what: "equal", mark: "=", hue: "#999999" },
];
const EQUAL = KINDS.length - 1;
const MEANS = {
  "only in B": "appeared", "only in A": "gone", shape: "another shape", dtype: "another dtype",
  kind: "a tensor here, an object there", values: "other values", equal: "equal",
};

function showDiff() {
  const { items } = data;
  const kinds = items.what.map((what) => KINDS.findIndex((one) => one.what === what));
  const sizes = items.bytes_a.map((nbytes, item) => Math.max(nbytes, items.bytes_b[item]));
  const root = modulesOf(items.name, sizes);
  const totals = totalsOf(root, kinds, sizes);
  const swatch = (kind) => el("span", { class: "swatch", "aria-hidden": "true", style: `background:${fill(kind.hue)}` }, kind.mark);
  const summary = KINDS.map((kind, at) => {
    const [count, nbytes] = totals.get(root)[at];
    return [el("span", {}, swatch(kind), MEANS[kind.what]), countText(count), bytesText(nbytes)];
  });
  const changed = sum(totals.get(root).slice(0, EQUAL).map(([count]) => count));
  const recolor = () => document.querySelectorAll(".swatch").forEach((one) => {
    one.style.background = fill(KINDS.find((kind) => kind.mark === one.textContent).hue);
  });
  const listed = changes(kinds, swatch);
  document.title = `${data.a} | ${data.b} - dcpx diff`;
  page.replaceChildren(
    el("h1", {}, "Difference of two checkpoints"),
    facts([["A", data.a], ["B", data.b], ["names that differ", countText(changed)], ["equal names", countText(data.equal)],
      ["values that were read", `${bytesText(data.read_bytes)}; the rest by checksums`]]),
    el("section", {}, el("h2", {}, "What changed"), table("What changed", ["from A to B", "#names", "#bytes"], summary),
      el("p", { class: "hint" }, "Bytes are those of tensors, the larger of both sides; an object counts none.")),
    el("section", {}, el("h2", {}, "Changes by module"),
      el("p", { class: "hint" }, "A box is as large as its bytes. A closed module has the colour and the sign of its largest change. Click a module to go into it, a tensor to list it."),
      el("ul", { class: "legend" }, ...KINDS.map((kind) => el("li", {}, swatch(kind), MEANS[kind.what]))),
      treemap(root, {
        caption: "Changes by module", isByKind: true, pick: listed.show,
        base: (node) => KINDS[mainKind(totalFor(totals, node, kinds, sizes))].hue,
        mark: (node) => `${KINDS[mainKind(totalFor(totals, node, kinds, sizes))].mark} `,
        lines: (node) => (isModule(node)
          ? totalFor(totals, node, kinds, sizes).map(([count, nbytes], at) => [MEANS[KINDS[at].what], `${counted(count, "name")}, ${bytesText(nbytes)}`, count]).filter((line) => line[2])
          : [["", MEANS[items.what[node.item]]], ["A", items.a[node.item]], ["B", items.b[node.item]], ["", bytesText(node.bytes)]]),
      })),
    listed.section);
  isDark.addEventListener("change", recolor);
}

/** Returns [names, bytes] of each kind for every module. */
function totalsOf(root, kinds, sizes) {
  const totals = new Map();
  const open = [root];
  while (open.length) {
    const node = open.pop();
    for (const child of node.children) {
      if (isModule(child)) {
        open.push(child);
        continue;
      }
      for (let each = node; each; each = each.parent) {
        if (!totals.has(each)) totals.set(each, KINDS.map(() => [0, 0]));
        const total = totals.get(each)[kinds[child.item]];
        total[0] += 1;
        total[1] += sizes[child.item];
      }
    }
  }
  if (!totals.has(root)) totals.set(root, KINDS.map(() => [0, 0]));
  return totals;
}

/** Returns the same of a module, a tensor or a group, which is made when it is drawn. */
function totalFor(totals, node, kinds, sizes) {
  if (!totals.has(node)) {
    const total = KINDS.map(() => [0, 0]);
    if (!isModule(node)) total[kinds[node.item]] = [1, sizes[node.item]];
    for (const child of node.children) {
      totalFor(totals, child, kinds, sizes).forEach(([count, nbytes], at) => {
        total[at][0] += count;
        total[at][1] += nbytes;
      });
    }
    totals.set(node, total);
  }
  return totals.get(node);
}

function mainKind(total) {
  let main = EQUAL;
  for (let at = 0; at < EQUAL; at += 1) {
    if (total[at][0] && (main === EQUAL || total[at][1] > total[main][1])) main = at;
  }
  return main;
}

/** Makes the table of names, which a text and a kind narrow. */
function changes(kinds, swatch) {
  const { items } = data;
  const lower = items.name.map((name) => name.toLowerCase());
  const input = el("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
  const pick = el("select", { id: "kind" }, el("option", { value: "changed" }, "all that differ"), el("option", { value: "all" }, "all"),
    ...KINDS.map((kind) => el("option", { value: kind.what }, MEANS[kind.what])));
  const place = el("div", {});
  const order = [...kinds.keys()].sort((one, two) => kinds[one] - kinds[two] || one - two);
  function list() {
    const wanted = input.value.trim().toLowerCase();
    const isShown = (item) => (pick.value === "all" || (pick.value === "changed" ? kinds[item] !== EQUAL : items.what[item] === pick.value)) && lower[item].includes(wanted);
    const fitting = order.filter(isShown);
    const rows = fitting.slice(0, LISTED).map((item) => [el("span", {}, swatch(KINDS[kinds[item]]), MEANS[items.what[item]]), nameText(items.name[item]), items.a[item], items.b[item]]);
    const more = fitting.length > LISTED ? `${countText(fitting.length - LISTED)} more: narrow the choice.` : "";
    place.replaceChildren(el("p", { class: "hint", "aria-live": "polite" }, `${counted(fitting.length, "name")}. ${more}`), table("Names", ["change", "name", "A", "B"], rows));
  }
  const section = el("section", {}, el("h2", {}, "Names"),
    el("div", { class: "fields" }, el("label", {}, "Part of a name", input), el("label", {}, "Change", pick)), place);
  const show = (item) => {
    [input.value, pick.value] = [items.name[item], "all"];
    list();
    section.scrollIntoView({ block: "start" });
  };
  input.addEventListener("input", list);
  pick.addEventListener("change", list);
  list();
  return { section, show };
}
