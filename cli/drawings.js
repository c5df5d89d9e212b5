// What pages of steps share: elements with text, and drawings as SVG (the tree of a step, bars over all steps). The
// drawings read what StepView.to_dict makes.
// Texts become text nodes and never markup, so no token can add to the page.

const part = id => document.getElementById(id);

function add(parent, name, text, kind = "") {
  const element = document.createElement(name);
  element.textContent = text;
  element.className = kind;
  parent.append(element);
  return element;
}

function svg(name, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

const tint = depth => `d${Math.min(depth, 6)}`;

// A token on one line, with its spaces, line breaks and control characters made visible.
function shown(text) {
  const names = {" ": "\u00b7", "\n": "\u23ce", "\t": "\u21e5"};
  const hidden = c => names[c] || "\\u" + c.codePointAt(0).toString(16).padStart(4, "0");
  return text.replace(/[\s\p{C}]/gu, hidden) || "\u2205";
}

function shortened(text, most) {
  const characters = Array.from(text);
  return characters.length > most ? characters.slice(0, most - 1).join("") + "\u2026" : text;
}

const KINDS = {root: "the last token of the text before this step", accepted: "drafted and accepted",
  rejected: "drafted and rejected", own: "the model's own token, which was not drafted below the accepted ones"};

const isDrafted = node => node.kind == "accepted" || node.kind == "rejected";

// The colour of token j of a step, by its depth in the tree. The model's own token has none.
const tintOf = (step, j) => step.own && j == step.kept.length - 1 ? "d0" : tint(j + 1);

// A step in words.
function inWords(step) {
  const first = step.nodes.some(isDrafted) ? `${step.kept.length - step.own} drafted and accepted` : "no draft";
  const own = step.own ? `then the model's own ${shortened(shown(step.nodes.at(-1).text), 14)}` : "the text ends here";
  return `${first}, ${own}`;
}

// The tree of a step. A node's first child lies in the node's own row, so the accepted path is a straight line.
function drawTree(step) {
  const column = 152, row = 27, box = 124, height = 21, nodes = step.nodes;
  const children = nodes.map(() => []), rows = [];
  nodes.forEach((node, i) => { if (node.parent >= 0) children[node.parent].push(i); });
  const rank = i => nodes[i].kind == "rejected" ? 1 - (nodes[i].score || 0) : -1;
  children.forEach(below => below.sort((a, b) => rank(a) - rank(b) || a - b));
  let used = 0;
  const place = (i, at) => {
    rows[i] = at;
    used = Math.max(used, at + 1);
    children[i].forEach((child, k) => place(child, k ? used : at));
  };
  place(0, 0);
  const x = i => 2 + nodes[i].depth * column, y = i => 4 + rows[i] * row;
  const width = Math.max(...nodes.map((node, i) => x(i))) + box + 4;
  const out = svg("svg", {class: "drawing tree", width, height: used * row + 4, role: "img"});
  out.append(svg("title", {}, "the tree of this step"));
  const edges = nodes.map((node, i) => i).filter(i => i > 0).sort((a, b) => rank(b) - rank(a));
  for (const i of edges) {
    const from = x(nodes[i].parent) + box, to = x(i), y0 = y(nodes[i].parent) + height / 2, y1 = y(i) + height / 2;
    const curve = `M${from} ${y0} C${from + 16} ${y0} ${to - 16} ${y1} ${to} ${y1}`;
    out.append(svg("path", {class: `edge ${nodes[i].kind} ${nodes[i].kind == "own" ? "d0" : tint(nodes[i].depth)}`, d: curve}));
  }
  nodes.forEach((node, i) => {
    const group = svg("g", {class: `node ${node.kind} ${node.kind == "accepted" ? tint(node.depth) : "d0"}`});
    const score = node.score === null ? "" : node.score >= .005 ? node.score.toFixed(2) : "<.01";
    group.append(svg("title", {}, `${shown(node.text)}\n${KINDS[node.kind]}`));
    group.append(svg("rect", {x: x(i), y: y(i), width: box, height, rx: 6}));
    group.append(svg("text", {class: "token", x: x(i) + 8, y: y(i) + 15}, shortened(shown(node.text), score ? 10 : 14)));
    if (score) group.append(svg("text", {class: "soft", x: x(i) + box - 7, y: y(i) + 15, "text-anchor": "end"}, score));
    out.append(group);
  });
  return out;
}

// One bar for each step, with a line at `mean`. A bar far above the others is cut off at the top; its title has the value.
function drawBars({values, mean, meanName, digits, width, chosen, choose, name}) {
  const left = 44, right = 8, top = 20, bottom = 34, height = 150, sorted = [...values].sort((a, b) => a - b);
  const usual = sorted[Math.floor(.95 * (sorted.length - 1))];
  const most = Math.max(mean * 1.15, sorted.at(-1) > 3 * usual ? 1.5 * usual : sorted.at(-1)) || 1;
  const w = Math.max(width, left + right + 3 * values.length), slot = (w - left - right) / values.length;
  const y = value => top + (height - top - bottom) * (1 - Math.min(value, most) / most);
  const out = svg("svg", {class: "drawing", width: w, height, role: "img", "aria-label": name});
  const unit = 10 ** Math.max(digits ? -3 : 0, Math.floor(Math.log10(most / 2)));
  const step = [1, 2, 5, 10].map(k => k * unit).find(k => most / k <= 4);
  for (let value = 0; value <= most * 1.001; value += step) {
    out.append(svg("line", {class: "axis", x1: left, x2: w - right, y1: y(value), y2: y(value)}));
    out.append(svg("text", {class: "soft", x: left - 6, y: y(value) + 4, "text-anchor": "end"}, +value.toPrecision(3)));
  }
  const gap = slot > 6 ? Math.min(6, slot / 4) : slot > 3 ? 1 : 0;
  values.forEach((value, i) => {
    const at = left + i * slot;
    out.append(svg("rect", {class: i == chosen ? "bar on" : "bar", x: at + gap / 2, y: y(value),
      width: Math.min(slot - gap, 40), height: height - bottom - y(value)}));
    if (value > most) out.append(svg("text", {class: "soft", x: at + Math.min(slot, 40) / 2, y: top - 3,
      "text-anchor": i ? "middle" : "start"}, `\u2191${value.toFixed(0)}`));
    const hit = svg("rect", {class: "hit", x: at, y: top, width: slot, height: height - top - bottom});
    hit.append(svg("title", {}, `step ${i + 1}: ${value.toFixed(digits)}`));
    hit.onclick = () => choose(i);
    out.append(hit);
  });
  out.append(svg("line", {class: "mean", x1: left, x2: w - right, y1: y(mean), y2: y(mean)}));
  const ends = new Set([0, values.length - 1, Math.floor((values.length - 1) / 2)]);
  for (const i of ends) out.append(svg("text", {class: "soft", x: left + i * slot + Math.min(slot - gap, 40) / 2,
    y: height - bottom + 14, "text-anchor": "middle"}, i + 1));
  out.append(svg("text", {class: "soft", x: left, y: height - 4}, `step   (dashed: ${meanName} ${mean.toFixed(2)})`));
  return out;
}
