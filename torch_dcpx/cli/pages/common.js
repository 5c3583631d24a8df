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
  return el("dl", { class: "facts" }, ...shown.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
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
  return el("div", { class: columns.length > 3 ? "scroll folds" : "scroll" }, whole);
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
const fill = (base) => mixed(base, color("toward"), isDark.matches ? 0.5 : 0.3);

/** Returns the colour of a text upon a colour. */
function inkOn(back) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(back.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 128 ? "#14161a" : "#ffffff";
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

/** Makes a legend of [paint, text, mark] each. */
function legend(entries) {
  return el("ul", { class: "legend" }, ...entries.map(([paint, text, mark]) => el("li", {}, swatch(paint, mark), text)));
}

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, font = FONT) {
  pen.font = font;
  return pen.measureText(text).width;
}

/** Makes the tooltip of a chart: `lines` gives pairs of a name and a text. */
function tooltip(lines) {
  return {
    confine: true,
    transitionDuration: 0,
    backgroundColor: color("panel"),
    borderColor: color("line"),
    textStyle: { color: color("ink"), fontSize: 13 },
    extraCssText: "max-width:min(92%,38rem);white-space:normal;overflow-wrap:anywhere",
    formatter: (params) => {
      const pairs = lines(params);
      return pairs && el("div", {}, ...pairs.map(([name, text]) => el("div", {}, el("strong", {}, name && `${name} `), text)));
    },
  };
}

/** Draws in `holder`, again whenever its width or the colour scheme changes. Returns the chart. */
function chart(holder, draw) {
  holder.setAttribute("role", "img");
  const drawn = echarts.init(holder);
  const redraw = () => {
    drawn.resize();
    drawn.setOption({ animation: false, ...draw(holder.clientWidth, holder.clientHeight) }, { notMerge: true });
  };
  let width = 0;
  new ResizeObserver(() => {
    if (holder.clientWidth !== width) requestAnimationFrame(redraw);
    width = holder.clientWidth;
  }).observe(holder);
  isDark.addEventListener("change", redraw);
  return { drawn, redraw };
}

/** Draws one bar for each label; the axis has its tick. */
function bars(caption, labels, values, noun, ticks) {
  const holder = el("div", { class: "chart", style: "height:240px" });
  const most = values.reduce((one, two) => Math.max(one, two), 1);
  const least = values.reduce((one, two) => Math.min(one, two), most);
  holder.setAttribute("aria-label", `${caption}: ${counted(values.length, noun)}, ${bytesText(least)} to ${bytesText(most)} each`);
  const power = 10 ** Math.floor(Math.log10(most / 4));
  const step = Math.max(1, [1, 2, 5, 10].find((each) => each * power * 4 >= most) * power);
  const axis = () => ({ axisLabel: { color: color("soft"), hideOverlap: true }, axisLine: { lineStyle: { color: color("soft") } } });
  chart(holder, () => ({
    grid: { left: 12, right: 16, top: 16, bottom: 30, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    tooltip: tooltip((one) => [["", labels[one.dataIndex]], [bytesText(values[one.dataIndex]), share(values[one.dataIndex], sum(values))]]),
    xAxis: { type: "category", data: ticks, name: noun, nameLocation: "middle", nameGap: 26, nameTextStyle: { color: color("soft") }, axisTick: { show: false }, ...axis() },
    yAxis: { type: "value", max: step * Math.ceil(most / step), interval: step, splitLine: { lineStyle: { color: color("line") } }, ...axis(),
      axisLabel: { color: color("soft"), formatter: (nbytes) => bytesText(nbytes).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 ") } },
    series: [{ type: "bar", data: values, barMaxWidth: 48, barCategoryGap: values.length > 60 ? "0%" : "20%", itemStyle: { color: isDark.matches ? "#6f7b8c" : "#7c8798" } }],
  }));
  return holder;
}
