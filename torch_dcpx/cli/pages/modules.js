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

/** Returns the boxes in a module: those that matter by themselves, the others in groups. */
function boxesIn(node) {
  if (node.boxes) return node.boxes;
  const all = node.children.filter((one) => one.bytes > 0);
  node.boxes = all;
  if (all.length > 3 * MOST) {
    const large = all.filter((one) => one.bytes * 200 >= node.bytes).sort((a, b) => b.bytes - a.bytes).slice(0, MOST);
    const chosen = new Set(large);
    const rest = all.filter((one) => !chosen.has(one));
    const part = sum(rest.map((one) => one.bytes)) / node.bytes;
    const groups = Math.min(MOST, Math.max(1, Math.round(MOST * part)));
    const length = Math.ceil(rest.length / groups);
    for (let at = 0; at < rest.length; at += length) {
      const children = rest.slice(at, at + length);
      const ends = `${children[0].label} … ${children[children.length - 1].label}`;
      const label = children.length === 1 ? children[0].label : `${countText(children.length)}: ${ends}`;
      const group = { label, parent: node, children, item: -1, isGroup: true };
      group.bytes = sum(children.map((one) => one.bytes));
      group.count = sum(children.map((one) => one.count));
      large.push(children.length === 1 ? children[0] : group);
    }
    node.boxes = large;
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
 * Makes the treemap with the way to its module above and the same as a list beneath.
 *
 * options: caption; base(node, nth of the view): a colour; mark(node): text before a label;
 * lines(node): pairs for the tooltip; pick(item): called for a tensor that is clicked.
 */
function treemap(root, options) {
  const way = el("nav", { class: "path", "aria-label": "the module that is shown" });
  const holder = el("div", { class: "chart modules", style: "height:clamp(320px,60vh,640px)" });
  const list = details("The same as a list");
  let view = lastModule(root).node;
  let nodes = [];
  const go = (node) => {
    const { node: last } = node.parent ? lastOfChain(node) : lastModule(node);
    if (!isModule(last)) return options.pick(last.item);
    view = last;
    describe();
    return drawing.redraw();
  };
  const link = (node, label) => el("button", { type: "button", onclick: () => go(node) }, label);
  function describe() {
    const chain = [];
    for (let node = view; node; node = node.parent) {
      const isPassed = node !== view && lastModule(node).node !== node;
      if (isPassed) chain[0].label = node.parent ? joined(node.label, chain[0].label) : chain[0].label;
      else chain.unshift({ node, label: node.label });
    }
    const steps = chain.map(({ node, label }) => (node === view ? el("strong", { class: "name" }, label) : link(node, label)));
    way.replaceChildren(...steps.flatMap((one, at) => (at ? ["›", one] : [one])), ` ${bytesText(view.bytes)}, ${counted(view.count, "name")}`);
    const largest = [...boxesIn(view)].sort((a, b) => b.bytes - a.bytes);
    const rows = largest.map((one) => [link(one, options.mark(lastOfChain(one).node) + lastOfChain(one).label), countText(one.count), bytesText(one.bytes), share(one.bytes, view.bytes)]);
    list.replaceChildren(list.firstChild, table(`Inside ${view.label}`, ["name", "#names", "#bytes", "#share"], rows));
    const named = largest.slice(0, 5).map((one) => `${lastOfChain(one).label} ${bytesText(one.bytes)}`);
    holder.setAttribute("aria-label", `${options.caption}, inside ${view.label}: ${named.join(", ")}; the list below has all`);
  }
  function option(width, height) {
    nodes = [];
    const opened = openedModules(view, Math.min(360, Math.max(40, (width * height) / 2400)));
    const made = (node, base, depth) => {
      const { node: last, label } = lastOfChain(node);
      const side = Math.sqrt((node.bytes / view.bytes) * width * height);
      const isOpen = opened.has(node);
      const hue = base || (isOpen ? "#888888" : options.base(last));
      const tone = mixed(fill(hue), color("toward"), Math.min(0.3, 0.12 * depth));
      const box = { name: (isOpen ? "" : options.mark(last)) + label, value: node.bytes, id: `${nodes.push(node)}` };
      if (isOpen) box.children = boxesIn(last).map((one) => made(one, base, depth + 1));
      box.upperLabel = { show: isOpen && side > 56 };
      box.label = { show: side > 30 };
      box.itemStyle = { color: tone, borderColor: isOpen ? tone : color("paper"), borderWidth: side > 18 && !isOpen ? 0.5 : 0, gapWidth: isOpen && side > 56 ? 1 : 0 };
      return box;
    };
    const shown = boxesIn(view).map((node, nth) => made(node, options.isByKind ? null : options.base(node, nth), 0));
    const text = { color: color("box-ink"), fontSize: 12, lineHeight: 15, overflow: "truncate", ellipsis: "…" };
    return {
      tooltip: tooltip(({ data: box }) => {
        const node = box.id && nodes[box.id - 1];
        return node && [["", fullName(node)], ...options.lines(lastOfChain(node).node, view)];
      }),
      series: [{
        type: "treemap", data: shown, roam: false, nodeClick: false, breadcrumb: { show: false }, sort: "desc", visibleMin: 0, childrenVisibleMin: 0,
        left: 0, right: 0, top: 0, bottom: 0, itemStyle: { borderWidth: 0, gapWidth: 1, borderColor: color("paper") },
        label: { ...text, position: [4, 3], verticalAlign: "top", formatter: ({ data: box }) => `${box.name}\n${bytesText(box.value)}` },
        upperLabel: { ...text, show: false, height: 19, position: [4, 3], verticalAlign: "top", formatter: ({ data: box }) => `${box.name}   ${bytesText(box.value)}` },
        emphasis: { itemStyle: { borderColor: color("ink") } },
      }],
    };
  }
  const drawing = chart(holder, option);
  drawing.drawn.on("click", ({ data: box }) => box && box.id && go(nodes[box.id - 1]));
  describe();
  const empty = root.bytes ? [] : [el("p", {}, "Nothing here has bytes.")];
  return el("div", {}, way, holder, ...empty, list);
}

/** Returns the whole name of a node's box. */
function fullName(node) {
  const parts = [lastOfChain(node).label];
  for (let each = node.parent; each && each.parent; each = each.parent) if (!each.isGroup) parts.unshift(each.label);
  return parts.join(".");
}
