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
const VALUES = EQUAL - 1;
// In a module's sums: bytes of known relative change, that times them, names that are not finite.
const [KNOWN, CHANGED, BROKEN] = [0, 1, 2].map((at) => 2 * KINDS.length + at);
const NOT_FINITE = "NaN or ∞";
const MEANS = {
  "only in B": "appeared", "only in A": "gone", shape: "another shape", dtype: "another dtype",
  kind: "a tensor here, an object there", values: "other values", equal: "equal",
};

// Relative change |a - b| / |a| from the first of these powers of ten to the last, by scheme.
const LEAST = -6;
const RAMPS = { light: ["#bcd9f0", "#5ba3d9", "#1f6cb0", "#0b3f7a", "#4b1a73"], dark: ["#17374f", "#235f8c", "#3d8fc9", "#86c0ee", "#e3d4ff"] };

/** Returns the colour of a relative change; of one that nobody knows, as by checksums, undefined. */
function rampAt(rel) {
  const ramp = RAMPS[isDark.matches ? "dark" : "light"];
  if (rel === null || rel === undefined) return undefined;
  if (Number.isNaN(rel)) return color("alarm");
  const part = Number.isFinite(rel) ? Math.min(1, Math.max(0, 1 - Math.log10(rel || 1e-99) / LEAST)) : 1;
  const at = Math.min(ramp.length - 2, Math.floor(part * (ramp.length - 1)));
  return mixed(ramp[at], ramp[at + 1], part * (ramp.length - 1) - at);
}

/** Returns a number of the data: null where there is none; infinities and NaN are texts there. */
const numberOf = (value) => (value === null || value === undefined ? null : Number({ inf: Infinity, "-inf": -Infinity }[value] ?? value));
const digits = (value) => (value === null ? "" : (value && Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)))));

function showDiff() {
  const { items } = data;
  const rels = items.name.map((_, item) => numberOf(items.rel?.[item]));
  const maxima = items.name.map((_, item) => numberOf(items.max_abs?.[item]));
  maxima.forEach((value, item) => { if (value !== null && !Number.isFinite(value)) rels[item] = NaN; });
  const kinds = items.what.map((what) => KINDS.findIndex((one) => one.what === what));
  const sizes = items.bytes_a.map((nbytes, item) => Math.max(nbytes, items.bytes_b[item]));
  const root = modulesOf(items.name, sizes);
  const totalOf = tallied(BROKEN + 1, (total, item) => {
    total[kinds[item]] += 1;
    total[KINDS.length + kinds[item]] += sizes[item];
    if (kinds[item] !== VALUES || rels[item] === null) return;
    if (Number.isNaN(rels[item])) total[BROKEN] += 1;
    total[KNOWN] += sizes[item];
    total[CHANGED] += sizes[item] * Math.min(1, rels[item] || 0);
  });
  const paintOf = (kind, rel) => (kind === EQUAL ? color("equal") : (kind === VALUES && rampAt(rel)) || fill(KINDS[kind].hue));
  const relOf = (node) => {
    const total = totalOf(node);
    if (!isModule(node)) return rels[node.item];
    if (total[BROKEN]) return NaN;
    return total[KNOWN] ? total[CHANGED] / total[KNOWN] : null;
  };
  const kindOf = (node) => (totalOf(node)[BROKEN] ? VALUES : mainKind(totalOf(node)));
  const markOf = (kind, rel = null) => swatch(() => paintOf(kind, rel), KINDS[kind].mark);
  const counts = totalOf(root);
  const summary = KINDS.map((kind, at) => [el("span", { class: "marked" }, markOf(at), MEANS[kind.what]), countText(counts[at]), bytesText(counts[KINDS.length + at])]);
  const hasRels = rels.some((rel) => rel !== null);
  const hasUnknown = rels.some((rel, item) => rel === null && kinds[item] === VALUES && sizes[item]); // an object has no box
  const listed = changes({ kinds, rels, maxima, markOf });
  document.title = `${data.a} | ${data.b} - dcpx diff`;
  page.replaceChildren(
    el("h1", {}, "Difference of two checkpoints"),
    facts([["A", data.a], ["B", data.b], ["names that differ", countText(sum(counts.slice(0, EQUAL)))], ["equal names", countText(data.equal)],
      ["values that were read", `${bytesText(data.read_bytes)}${data.by_sums ? "; the rest by recorded checksums" : ""}`]]),
    el("section", {}, el("h2", {}, "What changed"), table("What changed", ["from A to B", "#names", "#bytes"], summary),
      el("p", { class: "hint" }, "Bytes are those of tensors, the larger of both sides; an object counts none.")),
    el("section", {}, el("h2", {}, "Changes by module"),
      el("p", { class: "hint" }, `A box is as large as its bytes. A module has the sign and colour of its largest change${hasRels ? ", of other values by their mean" : ""}. Click a module to go into it, a tensor to list it.`),
      legend([...KINDS.map((kind, at) => [() => paintOf(at, null), MEANS[kind.what], kind.mark]).filter((_, at) => counts[at] && !(at === VALUES && !hasUnknown)),
        ...(counts[BROKEN] ? [[() => color("alarm"), `other values, ${NOT_FINITE}`, KINDS[VALUES].mark]] : [])]),
      ...(hasRels ? [el("p", {}, "Other values, |A − B| / |A|: 10⁻⁶ or less", ramp(), "1 or more")] : []),
      treemap(root, {
        caption: "Changes by module", pick: listed.show,
        paint: (node) => paintOf(kindOf(node), relOf(node)),
        mark: (node) => `${KINDS[kindOf(node)].mark} `,
        detail: (node) => (kindOf(node) === VALUES && relOf(node) !== null ? relText(relOf(node)) : bytesText(node.bytes)),
        lines: (node) => (isModule(node)
          ? [...KINDS.map((kind, at) => [MEANS[kind.what], `${counted(totalOf(node)[at], "name")}, ${bytesText(totalOf(node)[KINDS.length + at])}`]).filter((_, at) => totalOf(node)[at]), ...relLine(relOf(node), "mean relative change")]
          : [["", MEANS[items.what[node.item]]], ["A", items.a[node.item]], ["B", items.b[node.item]], ["", bytesText(node.bytes)],
            ...relLine(rels[node.item], "relative change"), ...relLine(maxima[node.item], "largest difference")]),
      }).element),
    listed.section);
}

const relText = (rel) => (Number.isNaN(rel) ? NOT_FINITE : digits(rel));
const relLine = (value, name) => (value === null ? [] : [[name, relText(value)]]);

/** Makes the bar of colours that the legend explains. */
function ramp() {
  const bar = el("span", { class: "ramp swatch", "aria-hidden": "true" });
  bar.paint = () => { bar.style.background = `linear-gradient(to right, ${RAMPS[isDark.matches ? "dark" : "light"].join(", ")})`; };
  bar.paint();
  return bar;
}

/** Returns the kind of the largest change of [names of each kind, bytes of each kind]. */
function mainKind(total) {
  let main = EQUAL;
  for (let at = 0; at < EQUAL; at += 1) {
    if (total[at] && (main === EQUAL || total[KINDS.length + at] > total[KINDS.length + main])) main = at;
  }
  return main;
}

/** Makes the table of names, which a text and a kind narrow; of other values the largest change first. */
function changes({ kinds, rels, maxima, markOf }) {
  const { items } = data;
  const lower = items.name.map((name) => name.toLowerCase());
  const input = el("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
  const pick = el("select", { id: "kind" }, el("option", { value: "changed" }, "all that differ"), el("option", { value: "all" }, "all"),
    ...KINDS.map((kind) => el("option", { value: kind.what }, MEANS[kind.what])));
  const place = el("div", {});
  const hasNumbers = [...rels, ...maxima].some((value) => value !== null);
  const weightOf = (item) => (Number.isNaN(rels[item]) ? Infinity : Math.min(Number.MAX_VALUE, rels[item] ?? -1));
  const order = [...kinds.keys()].sort((one, two) => kinds[one] - kinds[two] || weightOf(two) - weightOf(one) || one - two);
  function list() {
    const wanted = input.value.trim().toLowerCase();
    const isShown = (item) => (pick.value === "all" || (pick.value === "changed" ? kinds[item] !== EQUAL : items.what[item] === pick.value)) && lower[item].includes(wanted);
    const fitting = order.filter(isShown);
    const rows = fitting.slice(0, LISTED).map((item) => [el("span", { class: "marked" }, markOf(kinds[item], rels[item]), MEANS[items.what[item]]), nameText(items.name[item]), items.a[item], items.b[item],
      ...(hasNumbers ? [relText(rels[item]), digits(maxima[item])] : [])]);
    const more = fitting.length > LISTED ? `; the first ${LISTED} are listed` : "";
    place.replaceChildren(el("p", { class: "hint", "aria-live": "polite" }, `${countText(fitting.length)} of ${counted(kinds.length, "name")}${more}.`),
      table("Names", ["change", "name", "A", "B", ...(hasNumbers ? ["#relative", "#max |A − B|"] : [])], rows));
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
