// The page of `dcpx trace`: what each thread and worker of each rank did, and how long phases took.
"use strict";

const MOST_ROWS = 128; // of the timeline
const MOST_LISTED = 200; // boxes of the list
const BAR = 18; // pixels
const AXIS = 26;
const LETTER = 6.5; // of a label: what a font measures would move the whole timeline
const WAITING = ["wait", "vote"]; // for other saves, for other ranks: no work, and pale
const NAME_HUES = {
  exchange: "#ddcc77", plan: "#8878c3", metadata: "#88ccee", locate: "#999933", snapshot: "#aa4499",
  copy: "#cc6677", write: "#44aa99", read: "#44aa99", sync: "#117733", upload: "#3d8fc9", commit: "#5566dd", verify: "#d18f3c", apply: "#aa4499",
};

function timeText(us) {
  if (us === 0) return "0 s";
  if (us < 1000) return `${Math.round(us)} µs`;
  const [value, unit] = us < 1e6 ? [us / 1000, "ms"] : [us / 1e6, "s"];
  return `${Number(value.toPrecision(4))} ${unit}`;
}

const endOf = (row) => row.boxes.reduce((end, [, begin, length]) => Math.max(end, begin + length), 0);

function showTrace() {
  const pick = el("select", { id: "operation" });
  const place = el("div", {});
  const show = () => place.replaceChildren(...operation(data.operations[pick.selectedIndex]));
  pick.append(...data.operations.map((one) => el("option", {}, `${one.operation} of ${one.path} (${one.id.slice(0, 12)})`)));
  pick.selectedIndex = data.operations.length - 1;
  pick.addEventListener("change", show);
  const several = data.operations.length > 1 ? [el("div", { class: "fields" }, el("label", {}, "Save or load", pick))] : [];
  const older = data.left_out ? [el("p", { class: "hint" }, `${countText(data.left_out)} older ones are left out: --save-id names one.`)] : [];
  document.title = `${data.operations[0].path} - dcpx trace`;
  page.replaceChildren(el("h1", {}, "Where the time went"), ...several, ...older, place);
  show();
}

function operation(one) {
  const end = Math.max(1, ...one.rows.map(endOf));
  const work = one.phases.filter((row) => !row.phase.includes(":") && !WAITING.includes(row.phase));
  const slowest = work.reduce((most, row) => (!most || row.max_s > most.max_s ? row : most), null);
  const rows = one.phases.map((row) => [el("span", { class: "marked" }, swatch(() => paintOf(row.phase.replace("worker: ", ""))), row.phase),
    countText(row.ranks), row.min_s.toFixed(3), row.median_s.toFixed(3), row.max_s.toFixed(3), `rank ${row.slowest}`]);
  return [
    facts([[one.operation, one.path], ["id", one.id], ["ranks", countText(one.ranks)], ["from first to last", timeText(end)],
      ["longest phase", slowest ? `${slowest.phase}, ${slowest.max_s.toFixed(3)} s on rank ${slowest.slowest}` : ""]]),
    ...(one.errors.length ? [el("div", { class: "faults" }, el("strong", {}, "failed"), el("ul", {}, ...one.errors.map((text) => el("li", {}, text))))] : []),
    timeline(one, end),
    el("section", {}, el("h2", {}, "Seconds by phase"),
      el("p", { class: "hint" }, "A worker's row is the mean over the workers of a rank."),
      table("Seconds by phase", ["phase", "#ranks", "#min s", "#median s", "#max s", "slowest"], rows)),
  ];
}

const paintOf = (name) => (WAITING.includes(name) ? color("waits") : fill(NAME_HUES[name] || NO_HUE));

/** Returns the choices of rows: [text, rows]. */
function choicesOf(one) {
  const phases = one.rows.filter((row) => !row.is_worker);
  const longest = [...phases].sort((a, b) => endOf(b) - endOf(a)).slice(0, MOST_ROWS);
  const shown = new Set(longest);
  const choices = [[longest.length < phases.length ? `the ${MOST_ROWS} threads that ended last` : "threads of all ranks", phases.filter((row) => shown.has(row))]];
  if (phases.length < one.rows.length) {
    if (one.rows.length <= MOST_ROWS / 2) choices.unshift(["threads and workers of all ranks", one.rows]);
    for (const rank of new Set(one.rows.filter((row) => row.is_worker).map((row) => row.rank))) {
      choices.push([`rank ${rank} and its workers`, one.rows.filter((row) => row.rank === rank).slice(0, MOST_ROWS)]);
    }
  }
  return choices;
}

function timeline(one, end) {
  const choices = choicesOf(one);
  const areHosts = new Set(one.rows.map((row) => row.host)).size > 1;
  const labelOf = (row) => `rank ${row.rank}${areHosts ? ` on ${row.host}` : ""}, ${row.label}`;
  const pick = el("select", { id: "rows" }, ...choices.map(([text]) => el("option", {}, text)));
  const range = el("span", { "aria-live": "polite" });
  const holder = el("div", { class: "chart timeline" });
  const list = details("The same as a list");
  let rows = choices[0][1];
  let [from, to] = [0, end];
  let drawn = [];
  const zoom = (middle, length) => {
    const wanted = Math.min(end, Math.max(1, length));
    from = Math.min(end - wanted, Math.max(0, middle - wanted / 2));
    to = from + wanted;
    redraw();
  };
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const middle = () => (from + to) / 2;
  const buttons = [
    button("whole", "show all of the time", () => zoom(end / 2, end)),
    button("+", "nearer", () => zoom(middle(), (to - from) / 2)), button("−", "farther", () => zoom(middle(), (to - from) * 2)),
    button("←", "earlier", () => zoom(middle() - (to - from) / 2, to - from)), button("→", "later", () => zoom(middle() + (to - from) / 2, to - from)),
  ];
  function describe() {
    const boxes = rows.flatMap((row) => row.boxes.map((box) => [labelOf(row), ...box])).filter(([, , begin, length]) => begin < to && begin + length > from);
    const lines = boxes.slice(0, MOST_LISTED).map(([label, name, begin, length, nbytes]) => [label, one.names[name], timeText(begin), timeText(length), nbytes ? bytesText(nbytes) : ""]);
    list.replaceChildren(list.firstChild, table("Boxes", ["row", "phase", "#begins at", "#takes", "#bytes"], lines),
      ...(boxes.length > MOST_LISTED ? [el("p", { class: "hint" }, `${countText(boxes.length - MOST_LISTED)} more: go nearer.`)] : []));
    range.textContent = `${timeText(from)} to ${timeText(to)}`;
    holder.setAttribute("aria-label", `Timeline of ${counted(rows.length, "row")}, ${range.textContent}; the list below has its boxes`);
  }
  function option(width) {
    drawn = [];
    const gutter = width < 700 ? 0 : Math.min(260, LETTER * Math.max(...rows.map((row) => labelOf(row).length)) + 16);
    const high = BAR + 6 + (gutter ? 0 : 18);
    const at = (time) => gutter + 8 + ((time - from) / (to - from)) * (width - gutter - 24);
    const bottom = AXIS + rows.length * high + 4;
    const ticks = Math.max(2, Math.floor((width - gutter) / 110));
    const power = 10 ** Math.floor(Math.log10((to - from) / ticks));
    const step = [1, 2, 5, 10].find((each) => each * power * ticks >= to - from) * power;
    let band = 0;
    rows.forEach((row, nth) => {
      const y = AXIS + nth * high;
      band += nth && rows[nth - 1].rank !== row.rank ? 1 : 0;
      if (band % 2 === 0) drawn.push({ x: 0, y, width, height: high, tone: color("panel") });
    });
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const text = at(tick) + widthOf(timeText(tick)) + 8 < width ? timeText(tick) : "";
      drawn.push({ x: at(tick), y: 0, width: 1, height: bottom, tone: color("line"), text, ink: color("soft"), place: [4, 6] });
    }
    rows.forEach((row, nth) => {
      const y = AXIS + nth * high;
      drawn.push({ x: 0, y, width: gutter, height: high, text: labelOf(row), ink: color("ink"), place: gutter ? [8, 6] : [8, 3] });
      for (const [name, begin, length, nbytes] of row.boxes) {
        if (begin + length < from || begin > to) continue;
        const x = at(Math.max(from, begin));
        const wide = Math.max(1, at(Math.min(to, begin + length)) - x);
        const tone = paintOf(one.names[name]);
        const texts = [`${one.names[name]} ${timeText(length)}`, one.names[name], ""];
        drawn.push({ x, y: y + high - BAR - 3, width: wide, height: BAR, tone, text: texts.find((text) => widthOf(text) < wide - 8), ink: inkOn(tone), place: [4, 4],
          box: { row, name: one.names[name], begin, length, nbytes } });
      }
    });
    return {
      tooltip: tooltip(({ dataIndex }) => {
        const { box } = drawn[dataIndex];
        return box && [["", box.name], ["", labelOf(box.row)], ["takes", timeText(box.length)], ["begins at", timeText(box.begin)], ...(box.nbytes ? [["bytes", bytesText(box.nbytes)]] : [])];
      }),
      series: [{
        type: "custom", coordinateSystem: "none", data: drawn.map((_, nth) => [nth]),
        renderItem: ({ dataIndex }) => {
          const { x, y, width: wide, height, tone, text, ink, place, box } = drawn[dataIndex];
          return {
            type: "rect", shape: { x, y, width: wide, height }, silent: !box, style: { fill: tone || "none" },
            ...(box ? { emphasis: { style: { stroke: color("ink"), lineWidth: 1.5 } } } : {}),
            textContent: { type: "text", silent: true, style: { text: text || "", fill: ink, font: FONT } },
            textConfig: { position: place },
          };
        },
      }],
    };
  }
  const size = () => {
    holder.style.height = `${AXIS + 6 + rows.length * (BAR + 6 + (holder.clientWidth < 700 ? 18 : 0))}px`;
  };
  const drawing = chart(holder, (width) => {
    size();
    drawing?.drawn.resize();
    return option(width);
  });
  function redraw() {
    describe();
    drawing.redraw();
  }
  drawing.drawn.on("click", ({ dataIndex }) => {
    const { box } = drawn[dataIndex];
    if (box) zoom(box.begin + box.length / 2, box.length * 1.1);
  });
  pick.addEventListener("change", () => {
    rows = choices[pick.selectedIndex][1];
    redraw();
  });
  describe();
  const few = one.rows.some((row) => row.is_worker) && one.ranks_with_workers < one.ranks ? ` Workers are those of the ${one.ranks_with_workers} ranks whose workers took longest.` : "";
  return el("section", {}, el("h2", {}, "Timeline"),
    el("p", { class: "hint" }, `A row is a thread of a rank, or a worker of its engine. Click a box to go near it.${few}`),
    el("div", { class: "fields" }, el("label", {}, "Rows", pick)),
    legend(one.names.map((name) => [() => paintOf(name), name])),
    el("div", { class: "zoom" }, ...buttons, range), holder, list);
}
