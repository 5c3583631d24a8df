// Text goes into the page as text alone: no name of a checkpoint is ever taken for markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
// Two sets of colours, which colour-blind people can tell apart: of ranks and files (Okabe and Ito),
// and of what has no rank (Tol's muted ones).
const RANKS = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#999999"];
const HUES = ["#44aa99", "#ddcc77", "#cc6677", "#8878c3", "#999933", "#aa4499", "#88ccee", "#117733"];
const NO_HUE = "#8a8f98"; // of what belongs to several
const FONT = "12px system-ui, sans-serif"; // of drawings

/** Makes an element; strings among the children become text. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const NO_NAME = "(no name)";

/** Makes a name that a narrow table folds behind its dots. */
function nameText(name) {
  const parts = (name || NO_NAME).split(".");
  return el("span", { class: "name" }, ...parts.flatMap((part, at) => (at + 1 < parts.length ? [`${part}.`, el("wbr")] : [part])));
}

function bytesText(nbytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (Math.abs(nbytes) >= 1000 && at < 4) [nbytes, at] = [nbytes / 1000, at + 1];
  return at === 0 ? `${nbytes} B` : `${nbytes.toFixed(2)} ${units[at]}`;
}

const countText = (count) => count.toLocaleString("en");
const counted = (count, noun) => `${countText(count)} ${noun}${count === 1 ? "" : "s"}`;
const listText = (values) => `[${values.join(", ")}]`;
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "");
const sum = (values) => values.reduce((total, each) => total + each, 0);

/** Makes the facts at the head of a page out of pairs of a name and a text. */
function facts(pairs) {
  const shown = pairs.filter(([, text]) => text !== "");
  return el("dl", { class: "facts" }, ...shown.map(([name, text]) => el("div", { class: text.length > 18 ? "wide" : "" }, el("dt", {}, name), el("dd", {}, text))));
}

/**
 * Makes a table; columns that begin with "#" are numbers, a cell is a text or an element. In a
 * narrow window a row of many columns becomes a few lines, each cell behind its column's name.
 */
function table(caption, columns, rows) {
  const kind = (column) => (column[0] === "#" ? "number" : column === "name" || column === "file" ? "name" : "text");
  const label = (column) => column.replace("#", "");
  const cells = (row) => row.map((cell, at) => el("td", { role: "cell", class: kind(columns[at]), "data-label": label(columns[at]) }, cell));
  const head = columns.map((one) => el("th", { role: "columnheader", scope: "col", class: kind(one) }, label(one)));
  const lines = rows.map((row) => el("tr", { role: "row" }, ...cells(row)));
  const whole = el("table", { role: "table", "aria-label": caption }, el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...head)), el("tbody", { role: "rowgroup" }, ...lines));
  const isTall = rows.length > 25;
  const folds = columns.length > 3 || columns.includes("value");
  return el("div", { class: `scroll${folds ? " folds" : ""}${isTall ? " tall" : ""}`, ...(isTall ? { tabindex: 0, role: "region", "aria-label": caption } : {}) }, whole);
}

function details(summary, ...children) {
  return el("details", {}, el("summary", {}, summary), ...children);
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Mixes two colours such as "#56b4e9"; a part of 0 is the first. */
function mixed(one, two, part) {
  const at = (text, index) => parseInt(text.slice(1 + 2 * index, 3 + 2 * index), 16);
  const channel = (index) => Math.round(at(one, index) * (1 - part) + at(two, index) * part);
  return `#${[0, 1, 2].map((index) => channel(index).toString(16).padStart(2, "0")).join("")}`;
}

const isDark = matchMedia("(prefers-color-scheme: dark)");
const fill = (base) => mixed(base, color("toward"), isDark.matches ? 0.4 : 0.3);

/** Returns the colour of a text upon a colour, black or white: whichever of them stands out more. */
function inkOn(back) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(back.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

/** Makes a square of a colour, drawn again when the scheme changes; `paint` gives the colour. */
function swatch(paint, mark = "") {
  const made = el("span", { class: "swatch", "aria-hidden": "true" }, mark);
  made.paint = () => {
    const back = paint();
    made.style.background = back;
    made.style.color = inkOn(back);
  };
  made.paint();
  return made;
}
isDark.addEventListener("change", () => document.querySelectorAll(".swatch").forEach((one) => one.paint()));

const MAX_LEGEND = 16; // colours that a legend names

/** Makes a legend of [paint, text, mark] each, the first of `entries` and all of `last`. */
function legend(entries, last = []) {
  const made = ([paint, text, mark]) => el("li", {}, swatch(paint, mark), text);
  const more = entries.length > MAX_LEGEND ? [el("li", {}, `${countText(entries.length - MAX_LEGEND)} more`)] : [];
  return el("ul", { class: "legend" }, ...entries.slice(0, MAX_LEGEND).map(made), ...more, ...last.map(made));
}

/** Makes a place for one of several things, which `make` gives by number, and the choice of it if there are. */
function oneOf(label, texts, first, make) {
  const pick = el("select", {}, ...texts.map((text) => el("option", {}, text)));
  const place = el("div", {});
  const show = () => place.replaceChildren(...make(pick.selectedIndex));
  pick.selectedIndex = first;
  pick.addEventListener("change", show);
  show();
  return [...(texts.length > 1 ? [el("div", { class: "fields" }, el("label", {}, label, pick))] : []), place];
}

/** Makes a list of faults, the first 100; `way` says where the others are. */
function faultsOf(title, faults, way) {
  const lines = faults.slice(0, 100).map((one) => el("li", {}, one));
  return faults.length ? [el("div", { class: "faults" }, el("strong", {}, title), el("ul", {}, ...lines), ...moreThan(100, faults.length, way))] : [];
}

function moreThan(shown, all, way) {
  return all > shown ? [el("p", { class: "hint" }, `${countText(all - shown)} more: ${way}.`)] : [];
}

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, font = FONT) {
  pen.font = font;
  return pen.measureText(text).width;
}

const LINE = 15; // pixels of a line of text

/**
 * Draws in `holder`, again whenever its width or the colour scheme changes. Returns what redraws it.
 *
 * draw(width, height): gives boxes, those behind first: x, y, width, height; tone, a colour; lines of
 * text in ink and font, at [4, 4] or `at`, to the right of it or `align`ed, or `turned` upwards;
 * tip(), pairs of a name and a text; act(), on a click.
 */
function drawing(holder, draw) {
  const canvas = el("canvas");
  const brush = canvas.getContext("2d");
  const tip = el("div", { class: "tip", hidden: "" });
  let boxes = [];
  let hovered = null;
  let width = 0;
  if (!holder.hasAttribute("role")) holder.setAttribute("role", "img");
  holder.append(canvas, tip);
  function paint() {
    const ratio = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [holder.clientWidth, holder.clientHeight].map((each) => Math.round(each * ratio));
    brush.scale(ratio, ratio);
    brush.textBaseline = "middle";
    for (const { x, y, width: wide, height, tone, lines = [], at: [right, down] = [4, 4], ink, font = FONT, align = "left", turned } of boxes) {
      if (tone) {
        brush.fillStyle = tone;
        brush.fillRect(x, y, wide, height);
      }
      if (!lines.length) continue;
      [brush.fillStyle, brush.font, brush.textAlign] = [ink, font, align];
      brush.save();
      brush.translate(x + right, y + down + LINE / 2);
      if (turned) brush.rotate(-Math.PI / 2);
      lines.forEach((line, nth) => brush.fillText(line, 0, nth * LINE));
      brush.restore();
    }
    if (!hovered) return;
    [brush.strokeStyle, brush.lineWidth] = [color("ink"), 1.5];
    brush.strokeRect(hovered.x, hovered.y, hovered.width, hovered.height);
  }
  function redraw() {
    if (!holder.clientWidth) return; // not on the page yet
    hovered = null;
    tip.hidden = true;
    boxes = draw(holder.clientWidth, holder.clientHeight);
    paint();
  }
  function boxAt({ clientX, clientY }) {
    const { left, top } = canvas.getBoundingClientRect();
    const [x, y] = [clientX - left, clientY - top];
    return boxes.findLast((one) => one.tip && x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height) ?? null;
  }
  function hover(event) {
    const box = event && boxAt(event);
    if (box !== hovered) {
      hovered = box;
      paint();
      tip.replaceChildren(...(box ? box.tip() : []).map(([name, text]) => el("div", {}, el("strong", {}, name && `${name} `), text)));
      tip.hidden = !box;
    }
    if (!box) return;
    const room = [innerWidth - tip.offsetWidth - 4, innerHeight - tip.offsetHeight - 4];
    [tip.style.left, tip.style.top] = [event.clientX, event.clientY].map((at, nth) => `${Math.max(4, Math.min(room[nth], at + 14))}px`);
  }
  for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, hover);
  canvas.addEventListener("pointerleave", ({ pointerType }) => pointerType === "touch" || hover(null)); // a tap shows it
  canvas.addEventListener("pointercancel", () => hover(null));
  addEventListener("scroll", () => hover(null), { passive: true });
  canvas.addEventListener("click", (event) => boxAt(event)?.act?.());
  new ResizeObserver(() => {
    if (holder.clientWidth !== width) requestAnimationFrame(redraw);
    width = holder.clientWidth;
  }).observe(holder);
  isDark.addEventListener("change", redraw);
  return redraw;
}

/** Draws one bar for each label; the axis has its tick. */
function bars(caption, labels, values, noun, ticks) {
  const holder = el("div", { class: "chart", style: "height:240px" });
  const most = values.reduce((one, two) => Math.max(one, two), 1);
  const least = values.reduce((one, two) => Math.min(one, two), most);
  holder.setAttribute("aria-label", `${caption}: ${counted(values.length, noun)}, ${bytesText(least)} to ${bytesText(most)} each`);
  const power = 10 ** Math.floor(Math.log10(most / 4));
  const step = Math.max(1, [1, 2, 5, 10].find((each) => each * power * 4 >= most) * power);
  const top = step * Math.ceil(most / step);
  const steps = [...new Array(Math.round(top / step) + 1).keys()].map((nth) => nth * step);
  const text = (nbytes) => bytesText(nbytes).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 ");
  drawing(holder, (width, height) => {
    const soft = { ink: color("soft"), width: 0, height: 0, at: [0, 0] };
    const left = 20 + Math.max(...steps.map((each) => widthOf(text(each))));
    const yOf = (nbytes) => height - 42 - (nbytes / top) * (height - 58);
    const wide = (width - left - 16) / values.length;
    const bar = Math.min(48, wide > 6 ? 0.8 * wide : wide);
    const every = Math.ceil((values.length * (10 + Math.max(...ticks.map((tick) => widthOf(`${tick}`))))) / (width - left - 16));
    return [
      ...steps.map((each) => ({ x: left, y: yOf(each), width: width - left - 16, height: 1, tone: color(each ? "line" : "soft"), lines: [text(each)], ink: color("soft"), align: "right", at: [-6, -LINE / 2] })),
      ...values.map((nbytes, nth) => ({ x: left + (nth + 0.5) * wide - bar / 2, y: yOf(nbytes), width: bar, height: yOf(0) - yOf(nbytes), tone: isDark.matches ? "#6f7b8c" : "#7c8798",
        tip: () => [["", labels[nth]], [bytesText(nbytes), share(nbytes, sum(values))]] })),
      ...ticks.map((tick, nth) => ({ ...soft, x: left + (nth + 0.5) * wide, y: yOf(0) + 5, lines: [`${tick}`], align: "center" })).filter((_, nth) => nth % every === 0),
      { ...soft, x: left + (width - left - 16) / 2, y: height - 19, lines: [noun], align: "center" },
    ];
  });
  return holder;
}
