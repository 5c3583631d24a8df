// The page of `dcpx trace`: what each thread and worker of each rank did, and how long phases took.
"use strict";

const MOST_ROWS = 128; // of the timeline
const MOST_LISTED = 200; // rows of a table
const BAR = 18; // pixels
const AXIS = 26;
const LETTER = 6.5; // of a label: what a font measures would move the whole timeline
const NARROW = 700;
const WAITING = ["wait", "vote"]; // for other saves, for other ranks: no work, and pale
const NAME_HUES = {
  exchange: "#ddcc77", plan: "#8878c3", metadata: "#88ccee", locate: "#999933", snapshot: "#aa4499",
  copy: "#cc6677", write: "#44aa99", read: "#3d8fc9", sync: "#117733", upload: "#3d8fc9", commit: "#5566dd", verify: "#d18f3c", apply: "#aa4499",
};

function timeText(us) {
  if (us === 0) return "0 s";
  if (us < 1000) return `${Math.round(us)} µs`;
  const [value, unit] = us < 1e6 ? [us / 1000, "ms"] : [us / 1e6, "s"];
  return `${Number(value.toPrecision(4))} ${unit}`;
}

const endOf = (row) => row.boxes.reduce((end, [, begin, length]) => Math.max(end, begin + length), 0);

function showTrace() {
  const names = data.operations.map((one) => `${one.operation} of ${one.path} (${one.id.slice(0, 12)})`);
  const older = data.left_out ? [el("p", { class: "hint" }, `${countText(data.left_out)} older ones are left out: --save-id names one.`)] : [];
  document.title = `${data.operations[0].path} - dcpx trace`;
  page.replaceChildren(el("h1", {}, "Where the time went"), ...older,
    ...oneOf("Save or load", names, names.length - 1, (at) => operation(data.operations[at])));
}

function operation(one) {
  const end = Math.max(1, ...one.rows.map(endOf));
  const work = one.phases.filter((row) => !row.phase.includes(":") && !WAITING.includes(row.phase));
  const slowest = work.reduce((most, row) => (!most || row.max_s > most.max_s ? row : most), null);
  const rows = one.phases.slice(0, MOST_LISTED).map((row) => [el("span", { class: "marked" }, swatch(() => paintOf(row.phase.replace("worker: ", ""))), row.phase),
    countText(row.ranks), row.min_s.toFixed(3), row.median_s.toFixed(3), row.max_s.toFixed(3), `rank ${row.slowest}`]);
  return [
    facts([[one.operation, one.path], ["id", one.id], ["ranks", countText(one.ranks)], ["from first to last", timeText(end)],
      ["longest phase", slowest ? `${slowest.phase}, ${slowest.max_s.toFixed(3)} s on rank ${slowest.slowest}` : ""]]),
    ...faultsOf("failed", one.errors, "dcpx trace lists all"),
    one.rows.length ? timeline(one, end) : el("p", {}, "It recorded no phase: there is no timeline."),
    ...(rows.length ? [el("section", {}, el("h2", {}, "Seconds by phase"),
      el("p", { class: "hint" }, "A worker's row is the mean over the workers of a rank."),
      table("Seconds by phase", ["phase", "#ranks", "#min s", "#median s", "#max s", "slowest"], rows),
      ...moreThan(MOST_LISTED, one.phases.length, "dcpx trace --json lists all"))] : []),
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

/** Returns a text, without its end where it is longer than so many pixels. */
function cutTo(room, text) {
  let { length } = text;
  const shown = () => (length < text.length ? `${text.slice(0, length)}…` : text);
  while (length && widthOf(shown()) > room) length = Math.floor(length * 0.95);
  return shown();
}

function timeline(one, end) {
  const choices = choicesOf(one);
  const labelOf = (row) => `rank ${row.rank}, ${row.label}`;
  const pick = el("select", { id: "rows" }, ...choices.map(([text]) => el("option", {}, text)));
  const range = el("span", { "aria-live": "polite" });
  const holder = el("div", { class: "chart timeline", role: "group", tabindex: 0 });
  const list = details("The same as a list");
  let rows = choices[0][1];
  let [from, to] = [0, end];
  let [left, wide] = [0, 1]; // pixels where the time begins, and of all of it
  /** Shows `length` of the time so that `time` comes to lie at `part` of it. */
  const show = (time, part, length) => {
    const shown = Math.min(end, Math.max(1, length));
    from = Math.min(end - shown, Math.max(0, time - part * shown));
    to = from + shown;
    redraw();
  };
  const zoom = (times) => show((from + to) / 2, 0.5, (to - from) * times);
  const move = (part) => show(from + part * (to - from), 0, to - from);
  const acts = [
    ["whole", "show all of the time", () => show(0, 0, end), "Home"], ["+", "nearer", () => zoom(0.5), "+", "="],
    ["−", "farther", () => zoom(2), "-", "_"], ["←", "earlier", () => move(-0.5), "ArrowLeft"], ["→", "later", () => move(0.5), "ArrowRight"],
  ];
  const buttons = acts.map(([text, label, act]) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text));
  function fillList() {
    if (!list.open) return;
    const boxes = rows.flatMap((row) => row.boxes.filter(([, begin, length]) => begin < to && begin + length > from).map((box) => [row, ...box]));
    const lines = boxes.slice(0, MOST_LISTED).map(([row, name, begin, length, nbytes]) => [labelOf(row), one.names[name], timeText(begin), timeText(length), nbytes ? bytesText(nbytes) : ""]);
    list.replaceChildren(list.firstChild, table("Boxes", ["row", "phase", "#begins at", "#takes", "#bytes"], lines),
      ...moreThan(MOST_LISTED, boxes.length, "go nearer"));
  }
  function draw(width) {
    const longest = LETTER * Math.max(0, ...rows.map((row) => labelOf(row).length)) + 16;
    const gutter = width < NARROW || longest > width / 3 ? 0 : longest; // else a label has a line of its own
    const high = BAR + 6 + (gutter ? 0 : LINE + 3);
    [left, wide] = [gutter + 8, width - gutter - 24];
    const at = (time) => left + ((time - from) / (to - from)) * wide;
    const bottom = AXIS + rows.length * high + 4;
    holder.style.height = `${bottom + 2}px`;
    const ticks = Math.max(2, Math.floor((width - gutter) / 110));
    const power = 10 ** Math.floor(Math.log10((to - from) / ticks));
    const step = [1, 2, 5, 10].find((each) => each * power * ticks >= to - from) * power;
    const tones = one.names.map(paintOf);
    const inks = tones.map(inkOn);
    const [ink, soft, line, panel] = ["ink", "soft", "line", "panel"].map(color);
    const [behind, front] = [[], []];
    let band = 0;
    rows.forEach((row, nth) => {
      const y = AXIS + nth * high;
      band += nth && rows[nth - 1].rank !== row.rank ? 1 : 0;
      behind.push({ x: 0, y, width, height: high, tone: band % 2 === 0 && panel, lines: [cutTo((gutter || width) - 12, labelOf(row))], ink, at: [8, gutter ? (high - LINE) / 2 : 3] });
      const box = (name, begin, length, nbytes, more) => ({
        y: y + high - BAR - 3, height: BAR, tone: tones[name],
        tip: () => [["", one.names[name]], ["", labelOf(row)], ["on", row.host], ["takes", timeText(length)], ["begins at", timeText(begin)], ...(nbytes ? [["bytes", bytesText(nbytes)]] : [])],
        act: () => hasMoved || show(begin + length / 2, 0.5, length * 1.1), ...more,
      });
      let fine = { place: -1 }; // what lies in two pixels, by name: they share the height by their times
      const flush = () => {
        const shares = [...(fine.names ?? [])].sort(([one], [two]) => one - two);
        const whole = sum(shares.map(([, [, length]]) => length));
        let down = 0;
        for (const [name, [begin, length, nbytes]] of shares) {
          const height = (BAR * length) / whole;
          front.push(box(name, begin, length, nbytes, { x: 2 * fine.place, width: 2, y: y + high - BAR - 3 + down, height }));
          down += height;
        }
      };
      for (const [name, begin, length, nbytes] of row.boxes) {
        if (begin + length < from || begin > to) continue;
        const [x, endX] = [at(Math.max(from, begin)), at(Math.min(to, begin + length))];
        if (endX - x < 2) {
          const place = Math.floor(x / 2);
          if (place !== fine.place) {
            flush();
            fine = { place, names: new Map() };
          }
          const known = fine.names.get(name) ?? [begin, 0, 0];
          fine.names.set(name, [known[0], known[1] + Math.max(1, length), known[2] + nbytes]);
          continue;
        }
        const texts = endX - x > 20 ? [`${one.names[name]} ${timeText(length)}`, one.names[name]] : [];
        const lines = texts.filter((text) => widthOf(text) < endX - x - 8).slice(0, 1);
        front.push(box(name, begin, length, nbytes, { x, width: endX - x, lines, ink: inks[name], at: [4, 2] }));
      }
      flush();
    });
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const text = at(tick) + widthOf(timeText(tick)) + 8 < width ? [timeText(tick)] : [];
      behind.push({ x: at(tick), y: 0, width: 1, height: bottom, tone: line, lines: text, ink: soft });
    }
    return [...behind, ...front];
  }
  const repaint = drawing(holder, draw);
  function redraw() {
    range.textContent = `${timeText(from)} to ${timeText(to)}`;
    holder.setAttribute("aria-label", `Timeline of ${counted(rows.length, "row")}, ${range.textContent}; keys + and - zoom, arrows move, Home shows all; the list below has its boxes`);
    fillList();
    repaint();
  }
  const shareAt = (x) => (x - holder.getBoundingClientRect().left - left) / wide;
  list.addEventListener("toggle", fillList);
  holder.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : acts.find(([, , , ...keys]) => keys.includes(event.key));
    if (!act) return;
    event.preventDefault();
    act[2]();
  });
  holder.addEventListener("wheel", (event) => {
    const [deltaX, deltaY] = [event.deltaX, event.deltaY].map((each) => each * (event.deltaMode ? 33 : 1)); // lines, pixels
    const part = shareAt(event.clientX);
    if (event.ctrlKey || event.metaKey) show(from + part * (to - from), part, (to - from) * 2 ** (Math.max(-50, Math.min(50, deltaY)) / 50));
    else if (event.shiftKey || Math.abs(deltaX) > Math.abs(deltaY)) move((deltaX || deltaY) / wide);
    else return; // the page scrolls
    event.preventDefault();
  }, { passive: false });
  const held = new Map(); // pointers that are down, one or a pinch: where each is
  let hasMoved = false; // then it is no click
  const middle = (places) => shareAt(sum(places) / places.length);
  const spread = (places) => Math.max(...places) - Math.min(...places) || 1;
  holder.addEventListener("pointerdown", ({ pointerId, clientX, button }) => {
    if (button) return;
    if (!held.size) hasMoved = false;
    held.set(pointerId, clientX);
  });
  holder.addEventListener("pointermove", ({ pointerId, clientX }) => {
    if (!held.has(pointerId) || (!hasMoved && Math.abs(clientX - held.get(pointerId)) < 4)) return;
    hasMoved = true;
    holder.setPointerCapture(pointerId);
    const before = [...held.values()];
    const after = [...held.set(pointerId, clientX).values()];
    show(from + middle(before) * (to - from), middle(after), ((to - from) * spread(before)) / spread(after));
  });
  for (const kind of ["pointerup", "pointercancel", "pointerleave"]) holder.addEventListener(kind, ({ pointerId }) => held.delete(pointerId));
  pick.addEventListener("change", () => {
    rows = choices[pick.selectedIndex][1];
    redraw();
  });
  redraw();
  const few = one.rows.some((row) => row.is_worker) && one.ranks_with_workers < one.ranks ? ` Workers are those of the ${one.ranks_with_workers} ranks whose workers took longest.` : "";
  return el("section", {}, el("h2", {}, "Timeline"),
    el("p", { class: "hint" }, `A row is a thread of a rank, or a worker of its engine. Click a box to go near it; Ctrl and the wheel or two fingers zoom, a drag moves.${few}`),
    el("div", { class: "fields" }, el("label", {}, "Rows", pick)),
    legend(one.names.map((name) => [() => paintOf(name), name])),
    el("div", { class: "zoom" }, ...buttons, range), holder, list);
}
