// Beside the view: entropy by layer and head, partners by layer, histogram, Sinkhorn's error.
const plots = {};
function plot(name, title, parent) {
  const box = make("div", undefined, parent);
  make("h2", title, box);
  const canvas = make("canvas", undefined, box);
  Object.assign(canvas, { id: name, width: 480, height: 190 });
  plots[name] = canvas.getContext("2d");
}
function axes(ink, x, y) {
  ink.fillStyle = WHITE;
  ink.fillRect(0, 0, 480, 190);
  ink.fillStyle = "#222222";
  ink.font = "12px system-ui, sans-serif";
  line(ink, [46, 10], [46, 150], "#222222", 1);
  line(ink, [46, 150], [450, 150], "#222222", 1);
  ink.textAlign = "center";
  x.forEach(([place, text]) => ink.fillText(text, 46 + 404 * place, 166));
  ink.textAlign = "right";
  y.forEach(([place, text]) => ink.fillText(text, 40, 154 - 140 * place));
  ink.textAlign = "left";
}
function bars(ink, counts, most, colour, shift, width) {
  counts.forEach((count, bin) => {
    const tall = 140 * count / most;
    ink.fillStyle = colour;
    ink.fillRect(47 + 404 * (bin + shift) / counts.length, 150 - tall, 404 * width / counts.length, tall);
  });
}
function paintHistogram() {
  const ink = plots.histogram, now = data.layers[+layer.input.value - 1], BINS = 20;
  const counts = new Array(BINS).fill(0);
  now.found.forEach(match => counts[Math.min(BINS - 1, Math.floor(match[2] * BINS))]++);
  const sure = now.confidences, most = Math.max(1, ...counts), mostSure = Math.max(1, ...(sure || [0]));
  axes(ink, [[0, "0"], [.5, "0.5"], [1, "1"]], [[0, "0"], [1, String(most)]]);
  bars(ink, counts, most, BLUE, .05, .45);
  if (sure) bars(ink, sure, mostSure, "#e69f00", .5, .45);
  const limit = 46 + 404 * data.threshold;
  line(ink, [limit, 10], [limit, 150], BLACK, 1, [3, 3]);
  ink.fillStyle = "#222222";
  ink.fillText(`layer ${layer.input.value}: blue ${now.found.length} matches by probability (dotted: threshold)` +
    (sure ? "," : ""), 46, 182);
  byId("sure").textContent = sure ? `orange: points by confidence, most in a bin ${mostSure}` : "";
}
function paintErrors() {
  const ink = plots.sinkhorn, errors = data.marginal, logs = errors.map(error => Math.log10(error + 1e-9));
  const low = Math.floor(Math.min(...logs, Math.log10(data.tolerance || 1))), high = Math.ceil(Math.max(...logs));
  const span = Math.max(1, high - low), last = Math.max(1, errors.length - 1);
  axes(ink, [[0, "1"], [1, String(errors.length)]], [[0, `1e${low}`], [(high - low) / span, `1e${high}`]]);
  const spot = (value, k) => [46 + 404 * k / last, 150 - 140 * (value - low) / span];
  logs.forEach((value, k) => { if (k) line(ink, spot(logs[k - 1], k - 1), spot(value, k), BLUE, 2); });
  if (data.tolerance) {
    const height = Math.log10(data.tolerance);
    line(ink, spot(height, 0), spot(height, last), BLACK, 1, [3, 3]);
  }
  ink.fillStyle = "#222222";
  ink.fillText("iteration; largest relative error of a mass (dotted: tolerance)", 46, 182);
}

const entropyOf = (side, row) => data.images[side].heard.map(blocks => blocks.flatMap(block =>
  Array.from({ length: H }, (_, h) => block[2][row * H + h] / data.entropyStep)));
function meanEntropy() {
  let total = null, count = 0;
  data.images.forEach((image, side) => image.asked.forEach((_, row) => {
    const values = entropyOf(side, row);
    total = total ? total.map((line, l) => line.map((x, h) => x + values[l][h])) : values;
    count++;
  }));
  return total && total.map(line => line.map(x => x / count));
}
function tell() {
  const parent = byId("reasons");
  parent.replaceChildren();
  const row = chosen ? data.images[chosen[0]].row.get(chosen[1]) : undefined;
  const values = row === undefined ? meanEntropy() : entropyOf(chosen[0], row);
  const names = ["self", "cross"].flatMap(kind => Array.from({ length: H }, (_, h) => `${kind} ${h + 1}`));
  if (values) {
    const whose = row === undefined ? "mean of the points kept" : `keypoint ${chosen[1]} of image ${chosen[0]}`;
    const body = table(`Entropy of attention by layer and head, nats (${whose})`, ["layer", ...names],
      values.map((line, l) => [l + 1, ...line.map(x => x.toFixed(1))]), parent);
    body.id = "entropy";
    const most = Math.log(Math.max(2, left.points.length, right.points.length));
    values.forEach((line, l) => line.forEach((x, h) => {
      const cell = body.rows[l + 1].cells[h + 1], share = Math.min(1, x / most);
      cell.style.background = `hsl(201 75% ${100 - 60 * share}%)`;
    }));
  }
  if (!chosen) return;
  const [side, point] = chosen;
  table("Partner of this keypoint by layer", ["layer", "keypoint", "probability"],
    data.layers.map((known, l) => {
      const found = known.partners[side].get(point);
      return [l + 1, found ? found[0] : "none", found ? found[1].toFixed(2) : "–"];
    }), parent);
}
if (data.back) make("a", "back to the run", byId("controls")).href = data.back;
if (L) {
  make("div", undefined, byId("told")).id = "reasons";
  const aside = make("div", undefined, byId("told"));
  plot("histogram", "Confidences", aside);
  make("p", "", aside).id = "sure";
  if (data.marginal.length) { plot("sinkhorn", "Sinkhorn's marginal error", aside); paintErrors(); }
}
byId("legend").textContent = "Dots: blue matched, orange kept without a partner, white pruned. All lines: blue " +
  "inliers, orange outliers" + (L ? "; matches of this layer: blue kept, green appeared, orange dashed vanished. Of " +
  "the chosen point: white its match, colours what each head attends to (larger dot: larger weight), yellow where " +
  "what it knows came from." : "; white the match of the chosen point.");
if (L) {
  table("Layers", ["layer", "matches", "appeared", "vanished", "sure", "expected matches", "no partner (0 / 1)",
    "pruned (0 / 1)", ""], data.layers.map((known, l) => [l + 1, ...known.row]));
  data.rules.forEach(rule => make("p", rule, byId("tables")));
}
if (data.seconds) table("Seconds", Object.keys(data.seconds), [Object.values(data.seconds)]);
table("Origin", ["what", "value"], data.origin, undefined, "words");
if (data.configuration) make("pre", JSON.stringify(data.configuration, null, 1), byId("tables"));
let waiting = 2;
data.images.forEach(image => {
  image.drawn.onload = () => {
    if (--waiting) return;
    paint();
    draw();
    if (L) tell();
    document.body.dataset.ready = "yes";
  };
  image.drawn.src = image.jpeg;
});
