"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("view"), pen = view.getContext("2d"), gap = 12;
const [left, right] = data.images, K = data.strongest, H = data.heads, L = data.layers.length;
const COLOURS = ["#56b4e9", "#d55e00", "#f0e442", "#cc79a7", "#009e73", "#e69f00", "#0072b2", "#ffffff"];
view.width = left.size[0] + gap + right.size[0];
view.height = Math.max(left.size[1], right.size[1]);
const offset = [0, left.size[0] + gap];
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
for (const image of data.images) {
  image.heard = image.heard.map(blocks => blocks.map(([points, weights]) =>
    [new Uint16Array(bytes(points).buffer), bytes(weights)]));
  image.row = new Map(image.asked.map((point, row) => [point, row]));
  image.drawn = new Image();
  image.partner = new Map();
}
data.matches.forEach((match, k) => { left.partner.set(match[0], k); right.partner.set(match[1], k); });

const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const control = (text, type, attributes) => {
  const label = make("label", text + " ", document.getElementById("controls"));
  const input = make("input", undefined, label);
  Object.assign(input, { type, ...attributes });
  const shown = make("span", "", label);
  input.addEventListener("input", draw);
  return { input, shown };
};
const least = control("least confidence", "range", { min: 0, max: 100, value: 0 });
const layer = control("attention of layer", "range", { min: 1, max: L, value: L });
const head = control("head (0: all)", "range", { min: 0, max: H, value: 0 });
const inner = control("inliers only", "checkbox", {});
const every = control("all lines", "checkbox", {});
const pruned = control("pruned after layer", "range", { min: 0, max: L, value: 0 });
let chosen = data.chosen === null ? null : [0, data.chosen];

const at = (side, point) => {
  const [x, y] = data.images[side].points[point];
  return [x + offset[side], y];
};
const dot = (place, radius, colour) => {
  pen.beginPath();
  pen.arc(place[0], place[1], radius, 0, 7);
  pen.fillStyle = colour;
  pen.fill();
};
const line = (from, to, colour, width) => {
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.stroke();
};
const visible = match => match[2] * 100 >= +least.input.value && (match[3] || !inner.input.checked);
const fateColour = fate => fate < 0 ? "#56b4e9" : fate === 0 ? "#d55e00" : "#ffffff";

function drawPoints() {
  data.images.forEach((image, side) => image.points.forEach((_, point) => {
    const fate = image.fates[point], wanted = +pruned.input.value;
    if (wanted && fate !== wanted) return;
    if (fate < 0 && !visible(data.matches[image.partner.get(point)])) return;
    dot(at(side, point), 2.6, "#000000");
    dot(at(side, point), 1.8, fateColour(fate));
  }));
}
function drawAttention(side, point) {
  const image = data.images[side], row = image.row.get(point);
  if (row === undefined) return "attention not kept for this point";
  const blocks = image.heard[+layer.input.value - 1];
  let strongest = 0;
  blocks.forEach(([points, weights], across) => {
    for (let h = 0; h < H; h++) {
      if (+head.input.value && h + 1 !== +head.input.value) continue;
      for (let k = 0; k < K; k++) {
        const slot = (row * H + h) * K + k;
        if (points[slot] === 65535) continue;
        const place = at(across ? 1 - side : side, points[slot]), colour = COLOURS[h % COLOURS.length];
        strongest = Math.max(strongest, weights[slot]);
        line(at(side, point), place, colour, 1);
        dot(place, 2 + 8 * Math.sqrt(weights[slot] / 255), colour);
      }
    }
  });
  return strongest ? `strongest weight ${(strongest / 255).toFixed(2)}` : "it was pruned before this layer";
}
function describe(side, point, attention) {
  const image = data.images[side], k = image.partner.get(point), fate = image.fates[point];
  const name = `keypoint ${point} of image ${side}`;
  if (k !== undefined) {
    const [i, j, p, inlier] = data.matches[k], verdict = inlier ? "inlier" : "outlier";
    return `${name}: matched to keypoint ${side ? i : j} of image ${1 - side}, ` +
      `probability ${p.toFixed(3)}, ${verdict}; ${attention}`;
  }
  return `${name}: ` + (fate > 0 ? `pruned after layer ${fate}: surely unmatchable` : "kept, without a partner") +
    `; ${attention}`;
}
function draw() {
  least.shown.textContent = (least.input.value / 100).toFixed(2);
  layer.shown.textContent = `${layer.input.value} of ${L}`;
  head.shown.textContent = +head.input.value || "all";
  pruned.shown.textContent = +pruned.input.value || "show all";
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, view.width, view.height);
  data.images.forEach((image, side) => pen.drawImage(image.drawn, offset[side], 0));
  if (every.input.checked) {
    for (const match of data.matches.filter(visible)) {
      pen.globalAlpha = .35;
      line(at(0, match[0]), at(1, match[1]), match[3] ? "#56b4e9" : "#d55e00", 1);
    }
    pen.globalAlpha = 1;
  }
  drawPoints();
  if (!chosen) return;
  const [side, point] = chosen, attention = drawAttention(side, point);
  const k = data.images[side].partner.get(point);
  if (k !== undefined) {
    const [i, j] = data.matches[k];
    line(at(0, i), at(1, j), "#ffffff", 3);
    dot(at(1 - side, side ? i : j), 5, "#ffffff");
  }
  dot(at(side, point), 7, "#000000");
  dot(at(side, point), 5, "#ffffff");
  document.getElementById("info").textContent = describe(side, point, attention);
}
view.addEventListener("click", event => {
  const box = view.getBoundingClientRect(), scale = view.width / box.width;
  const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
  let best = Infinity;
  data.images.forEach((image, side) => image.points.forEach((_, point) => {
    const place = at(side, point), away = (place[0] - x) ** 2 + (place[1] - y) ** 2;
    if (away < best) { best = away; chosen = [side, point]; }
  }));
  draw();
});

function table(title, header, rows) {
  const parent = document.getElementById("tables");
  make("h2", title, parent);
  const body = make("table", undefined, parent), first = make("tr", undefined, body);
  header.forEach(text => make("th", text, first));
  for (const row of rows) {
    const line = make("tr", undefined, body);
    row.forEach(text => make("td", String(text), line));
  }
}
const legend = make("p", "Dots: blue matched, orange kept without a partner, white pruned. All lines: blue " +
  "inliers, orange outliers. Of the chosen point: white its match, colours what each head attends to " +
  "(larger dot: larger weight).");
view.after(legend);
table("Layers", ["layer", "matches", "appeared", "vanished", "confident", "no partner (0 / 1)",
  "pruned (0 / 1)", "exit"], data.layers);
table("Seconds", Object.keys(data.seconds), [Object.values(data.seconds)]);
table("Origin", ["what", "value"], [["preset", data.preset], ["weights", data.weights],
  ["geometry", data.geometry], ["image 0", left.name], ["image 1", right.name]]);
make("pre", JSON.stringify(data.configuration, null, 1), document.getElementById("tables"));
let waiting = 2;
data.images.forEach(image => {
  image.drawn.onload = () => { if (!--waiting) { draw(); document.body.dataset.ready = "yes"; } };
  image.drawn.src = image.jpeg;
});
