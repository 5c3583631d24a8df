// The treemap: names cut at their dots. However many tensors there are, a few hundred boxes are drawn.
"use strict";

const MOST = 40; // boxes of one module; the rest of them form groups
const MAX_DEPTH = 32; // dots of a name that count

/** Returns the root of the modules: nodes of {label, parent, children, bytes, count, item}. */
function modulesOf(names, sizes) {
  const made = (label, parent) => ({ label, parent, children: [], below: new Map(), bytes: 0, count: 0, item: -1 });
  const root = made("all", null);
  names.forEach((name, item) => {
    const parts = name.split(".", MAX_DEPTH);
    if (parts.join(".").length < name.length) parts.push(name.slice(parts.join(".").length + 1));
    let node = root;
    for (const part of parts.slice(0, -1)) {
      if (!node.below.has(part)) {
        node.below.set(part, made(part || NO_NAME, node));
        node.children.push(node.below.get(part));
      }
      node = node.below.get(part);
    }
    const leaf = { label: parts[parts.length - 1] || NO_NAME, parent: node, children: [], bytes: 0, count: 0, item };
    node.children.push(leaf);
    for (let each = leaf; each; each = each.parent) {
      each.bytes += sizes[item];
      each.count += 1;
    }
  });
  return root;
}

const isModule = (node) => node.item < 0;
const joined = (one, two) => (one ? `${one}.${two}` : two);

/** Returns what the box of a node shows: of a chain of modules with one name each, the last. */
function lastOfChain(node) {
  const { node: last, label } = lastModule(node);
  const [only] = last.children;
  const isOne = isModule(last) && last.children.length === 1;
  return isOne ? { node: only, label: joined(label, only.label) } : { node: last, label };
}

/** Returns the same without its tensor. */
function lastModule(node) {
  let label = node.parent ? node.label : "";
  while (isModule(node) && node.children.length === 1 && isModule(node.children[0])) {
    node = node.children[0];
    label = joined(label, node.label);
  }
  return { node, label: label || node.label };
}

/** Orders siblings as numbers count: 2 before 10. */
const byLabel = new Intl.Collator("en", { numeric: true }).compare;
const firstLabel = (node) => (node.isGroup ? node.children[0].label : node.label);

const areNumbered = (nodes) => nodes.length > 1 && nodes.every((one) => /^\d/.test(firstLabel(one)));

/** Returns siblings in the order of their numbers, others the largest first. */
function ordered(nodes) {
  const natural = [...nodes].sort((one, two) => byLabel(firstLabel(one), firstLabel(two)));
  return areNumbered(nodes) ? natural : natural.sort((one, two) => two.bytes - one.bytes);
}

/** Returns the boxes in a module, in order: those that matter by themselves, the others in groups. */
function boxesIn(node) {
  if (node.boxes) return node.boxes;
  const all = ordered(node.children.filter((one) => one.bytes > 0));
  node.boxes = all;
  if (all.length > 3 * MOST) {
    const large = all.filter((one) => one.bytes * 200 >= node.bytes).sort((a, b) => b.bytes - a.bytes).slice(0, MOST);
    const chosen = new Set(large);
    const rest = all.filter((one) => !chosen.has(one)).sort((one, two) => byLabel(one.label, two.label));
    const part = sum(rest.map((one) => one.bytes)) / node.bytes;
    const groups = Math.min(MOST, Math.max(1, Math.round(MOST * part)));
    const length = Math.ceil(rest.length / groups);
    for (let at = 0; at < rest.length; at += length) {
      const children = rest.slice(at, at + length);
      const ends = `${children[0].label} … ${children[children.length - 1].label}`;
      const group = { label: `${countText(children.length)}: ${ends}`, parent: node, children, item: -1, isGroup: true };
      group.bytes = sum(children.map((one) => one.bytes));
      group.count = sum(children.map((one) => one.count));
      large.push(children.length === 1 ? children[0] : group);
    }
    node.boxes = ordered(large);
  }
  return node.boxes;
}

/** Returns the modules to open under `view`, the largest first, so that about `most` boxes show. */
function openedModules(view, most) {
  const opened = new Set([view]);
  let count = boxesIn(view).length;
  const closed = boxesIn(view).filter(isModule);
  while (closed.length) {
    const at = closed.reduce((best, one, index) => (one.bytes > closed[best].bytes ? index : best), 0);
    const [largest] = closed.splice(at, 1);
    if (largest.bytes * 60 < view.bytes) break;
    const { node: last } = lastOfChain(largest);
    if (!isModule(last)) continue;
    const inside = boxesIn(last);
    if (count + inside.length > most) continue;
    opened.add(largest);
    count += inside.length;
    closed.push(...inside.filter(isModule));
  }
  return opened;
}

/**
 * Returns a function that gives, for a node, `length` numbers: the sums of what `add(numbers, item)`
 * adds for each of its names.
 */
function tallied(length, add) {
  const known = new Map();
  return function of(node) {
    const total = known.get(node) || new Array(length).fill(0);
    if (!isModule(node)) add(total, node.item);
    else if (!known.has(node)) {
      for (const child of node.children) of(child).forEach((amount, at) => { total[at] += amount; });
      known.set(node, total);
    }
    return total;
  };
}

/**
 * Cuts a rectangle into one for each node, in their order, each as square as that allows: numbered
 * ones in rows as a text is read, others in strips along the shorter side of what is left.
 */
function cutUp(nodes, x, y, width, height) {
  const rects = [];
  const isText = areNumbered(nodes);
  const scale = (width * height) / Math.max(1, sum(nodes.map((one) => one.bytes)));
  const areas = nodes.map((one) => one.bytes * scale);
  let at = 0;
  while (at < nodes.length) {
    const isColumn = !isText && width >= height; // of the next strip
    const side = Math.max(1e-9, isColumn ? height : width);
    let [end, area, worst] = [at, 0, Infinity];
    while (end < nodes.length) {
      const grown = area + areas[end];
      const strip = areas.slice(at, end + 1);
      const ratio = Math.max((side * side * Math.max(...strip)) / (grown * grown), (grown * grown) / (side * side * Math.min(...strip)));
      if (ratio > worst) break;
      [end, area, worst] = [end + 1, grown, ratio];
    }
    const depth = area / side;
    let along = isColumn ? y : x;
    for (; at < end; at += 1) {
      const length = areas[at] / Math.max(1e-9, depth);
      rects.push(isColumn ? [x, along, depth, length] : [along, y, length, depth]);
      along += length;
    }
    if (isColumn) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
  }
  return rects;
}

const HEAD = 19; // pixels of the head of an open module
const HEAD_FONT = `600 ${FONT}`;

/** Returns about the pixels of a head: what opens must not be the choice of a machine's font. */
const aboutWide = (label) => sum([...label].map((char) => (char < "\u2e80" ? 7 : 13)));

/** Returns the lines of a label that a box has place for: whole, or none. */
function linesThatFit(label, detail, width, height) {
  const fits = (lines) => lines.length * LINE + 4 <= height && lines.every((line) => widthOf(line) <= width - 8);
  const folded = [];
  for (const part of label.split(/(?<=\.)/)) {
    const last = folded.length - 1;
    if (last >= 0 && widthOf(folded[last] + part) <= width - 8) folded[last] += part;
    else folded.push(part);
  }
  return [[label, detail], [...folded, detail], [label], folded].find(fits) || [];
}

/**
 * Makes the treemap with the way to its module above and the same as a list beneath.
 *
 * options: caption; paint(node): a colour; mark(node): a text before a label; detail(node): one
 * behind it; lines(node): pairs for the tooltip; pick(item): called for a tensor that is clicked.
 */
function treemap(root, options) {
  const way = el("nav", { class: "path", "aria-label": "the module that is shown" });
  const holder = el("div", { class: "chart modules", style: "height:clamp(320px,60vh,640px)" });
  const list = details("The same as a list");
  let view = lastModule(root).node;
  const go = (node) => {
    const { node: last } = node.parent ? lastOfChain(node) : lastModule(node);
    if (!isModule(last)) return options.pick(last.item);
    view = last;
    describe();
    return redraw();
  };
  const link = (node, label) => el("button", { type: "button", onclick: () => go(node) }, label);
  const labelOf = (node) => `${options.mark(lastOfChain(node).node)}${lastOfChain(node).label}`;
  function describe() {
    const chain = [];
    for (let node = view; node; node = node.parent) {
      const isPassed = node !== view && lastModule(node).node !== node;
      if (isPassed) chain[0].label = node.parent ? joined(node.label, chain[0].label) : chain[0].label;
      else chain.unshift({ node, label: node.label });
    }
    const steps = chain.map(({ node, label }) => (node === view ? el("strong", { class: "name" }, label) : link(node, label)));
    way.replaceChildren(...steps.flatMap((one, at) => (at ? ["›", one] : [one])), ` ${bytesText(view.bytes)}, ${counted(view.count, "name")}`);
    const rows = boxesIn(view).map((one) => [link(one, labelOf(one)), countText(one.count), bytesText(one.bytes), share(one.bytes, view.bytes)]);
    list.replaceChildren(list.firstChild, table(`Inside ${view.label}`, ["name", "#names", "#bytes", "#share"], rows));
    const largest = [...boxesIn(view)].sort((a, b) => b.bytes - a.bytes).slice(0, 5);
    const named = largest.map((one) => `${lastOfChain(one).label} ${bytesText(one.bytes)}`);
    holder.setAttribute("aria-label", `${options.caption}, inside ${view.label}: ${named.join(", ")}; the list below has all`);
  }
  /** Returns the boxes of nodes in a rectangle: a module's before those inside it. */
  function laid(nodes, rect, opened) {
    return cutUp(nodes, ...rect).flatMap(([x, y, width, height], nth) => {
      const node = nodes[nth];
      const { node: last } = lastOfChain(node);
      const [label, detail, tone] = [labelOf(node), options.detail(last), options.paint(last)];
      const gap = Math.min(width, height) > 6 ? 0.5 : 0; // of each side, to the next box
      const box = {
        x: x + gap, y: y + gap, width: Math.max(0.5, width - 2 * gap), height: Math.max(0.5, height - 2 * gap), tone, ink: inkOn(tone),
        tip: () => [["", fullName(node)], ...options.lines(last, view)], act: () => go(node),
      };
      if (!opened.has(node) || height <= 2 * HEAD || aboutWide(label) > width - 8) return [{ ...box, lines: linesThatFit(label, detail, width, height) }];
      const head = [`${label}   ${detail}`, label].find((text) => widthOf(text, HEAD_FONT) <= width - 8);
      const back = mixed(tone, color("paper"), 0.3);
      const inside = [x + 2, y + HEAD, Math.max(0, width - 4), Math.max(0, height - HEAD - 2)];
      return [{ ...box, tone: back, ink: inkOn(back), lines: head ? [head] : [], font: HEAD_FONT, at: [4, 3] }, ...laid(boxesIn(last), inside, opened)];
    });
  }
  const redraw = drawing(holder, (width, height) => {
    const most = Math.min(360, Math.max(40, (width * height) / 2400));
    return laid(boxesIn(view), [0, 0, width, height], openedModules(view, most));
  });
  describe();
  return { element: root.bytes ? el("div", {}, way, holder, list) : el("p", {}, "Nothing here has bytes."), redraw };
}

/** Returns the whole name of a node's box. */
function fullName(node) {
  const parts = [lastOfChain(node).label];
  for (let each = node.parent; each && each.parent; each = each.parent) if (!each.isGroup) parts.unshift(each.label);
  return parts.join(".");
}
