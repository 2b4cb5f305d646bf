// Beside the view: entropy by layer and head, partners by layer, histogram, Sinkhorn's error.
const plots = {}, FROM = 46, WIDE = 384, FLOOR = 150, TALL = 140;
function plot(name, title, parent) {
  const box = make("div", undefined, parent);
  make("h2", title, box);
  const canvas = make("canvas", undefined, box);
  Object.assign(canvas, { id: name, width: 480, height: 212 });
  plots[name] = canvas.getContext("2d");
}
function axes(ink, x, y, others = []) {
  ink.fillStyle = WHITE;
  ink.fillRect(0, 0, 480, 212);
  ink.fillStyle = "#222222";
  ink.font = "12px system-ui, sans-serif";
  line(ink, [FROM, FLOOR - TALL], [FROM, FLOOR], "#222222", 1);
  line(ink, [FROM, FLOOR], [FROM + WIDE, FLOOR], "#222222", 1);
  ink.textAlign = "center";
  x.forEach(([place, text]) => ink.fillText(text, FROM + WIDE * place, FLOOR + 16));
  ink.textAlign = "right";
  y.forEach(([place, text]) => ink.fillText(text, FROM - 6, FLOOR + 4 - TALL * place));
  ink.textAlign = "left";
  others.forEach(([place, text]) => ink.fillText(text, FROM + WIDE + 6, FLOOR + 4 - TALL * place));
}
function key(ink, row, colour, text) {
  ink.fillStyle = colour;
  ink.fillRect(FROM, FLOOR + 28 + 18 * row, 11, 11);
  ink.fillStyle = "#222222";
  ink.fillText(text, FROM + 18, FLOOR + 38 + 18 * row);
}
function bars(ink, counts, most, colour, shift, width) {
  counts.forEach((count, bin) => {
    const tall = TALL * count / most;
    ink.fillStyle = colour;
    ink.fillRect(FROM + 1 + WIDE * (bin + shift) / counts.length, FLOOR - tall, WIDE * width / counts.length, tall);
  });
}
function paintHistogram() {
  const ink = plots.histogram, now = data.layers[+layer.input.value - 1], BINS = 20;
  const counts = new Array(BINS).fill(0);
  now.found.forEach(match => counts[Math.min(BINS - 1, Math.floor(match[2] * BINS))]++);
  const sure = now.confidences, most = Math.max(1, ...counts), mostSure = Math.max(1, ...(sure || [0]));
  axes(ink, [[0, "0"], [.5, "0.5"], [1, "1"]], [[0, "0"], [1, most]], sure ? [[1, mostSure]] : []);
  bars(ink, counts, most, BLUE, .05, .45);
  const limit = FROM + WIDE * policy.match_threshold;
  line(ink, [limit, FLOOR - TALL], [limit, FLOOR], BLACK, 1, [3, 3]);
  key(ink, 0, BLUE, `${now.found.length} matches of layer ${layer.input.value} by probability (dotted: threshold)`);
  if (!sure) return;
  bars(ink, sure, mostSure, ORANGE, .5, .45);
  const total = sure.reduce((sum, count) => sum + count);
  key(ink, 1, ORANGE, `${total} points by confidence (numbers on the right)`);
}
function paintErrors() {
  const ink = plots.sinkhorn, errors = data.marginal, logs = errors.map(error => Math.log10(error + 1e-9));
  const low = Math.floor(Math.min(...logs, Math.log10(assignment.tolerance || 1))), high = Math.ceil(Math.max(...logs));
  const span = Math.max(1, high - low), last = Math.max(1, errors.length - 1);
  axes(ink, [[0, data.looks], [1, data.looks * errors.length]], [[0, `1e${low}`], [(high - low) / span, `1e${high}`]]);
  const spot = (value, k) => [FROM + WIDE * k / last, FLOOR - TALL * (value - low) / span];
  logs.forEach((value, k) => { if (k) line(ink, spot(logs[k - 1], k - 1), spot(value, k), BLUE, 2); });
  if (assignment.tolerance) {
    const height = Math.log10(assignment.tolerance);
    line(ink, spot(height, 0), spot(height, last), BLACK, 1, [3, 3]);
  }
  key(ink, 0, BLUE, "relative error of the masses by iteration" + (assignment.tolerance ? " (dotted: tolerance)" : ""));
}

// A line for each layer and kind of attention, a number for each head.
const entropyOf = (side, row) => data.images[side].attention.flatMap(blocks => blocks.map(block =>
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
function showReasons() {
  const parent = byId("reasons");
  parent.replaceChildren();
  const row = chosen ? data.images[chosen[0]].row.get(chosen[1]) : undefined;
  const values = row === undefined ? meanEntropy() : entropyOf(chosen[0], row);
  if (values) {
    const whose = row === undefined ? "mean of the points kept" : `keypoint ${chosen[1]} of image ${chosen[0]}`;
    const heads = Array.from({ length: H }, (_, h) => `head ${h + 1}`);
    const body = table(`Entropy of attention by layer and head, nats (${whose})`, ["layer", "attention", ...heads],
      values.map((line, k) => [1 + (k >> 1), k % 2 ? "cross" : "self", ...line.map(x => x.toFixed(1))]), parent);
    body.id = "entropy";
    const most = Math.log(Math.max(2, left.points.length, right.points.length));
    values.forEach((line, k) => line.forEach((x, h) => {
      const cell = body.rows[k + 1].cells[h + 2], share = Math.min(1, x / most);
      cell.style.background = `hsl(201 75% ${100 - 45 * share}%)`;
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
const percent = (share, digits) => share === null ? "–" : (100 * share).toFixed(digits) + "%";
const layerRow = ({ row: [matches, appeared, vanished, certain, expected, unmatched, pruned, exited] }, l) => [
  l + 1, matches, appeared, vanished, percent(certain, 1), expected === null ? "–" : expected.toFixed(0),
  unmatched.map(share => percent(share, 0)).join(" / "), pruned.join(" / "), exited ? "exit" : ""];
// When a pair exits and which points are pruned, a sentence each.
function rules() {
  const share = `${+(100 * policy.exit_share).toPrecision(6)} %`;
  const enough = match_probability ? `${share} of the expected matches are confident`
    : `more than ${share} of its points, including pruned ones, are confident of their assignment`;
  const sure = policy.prune_confident_only ? " and it is confident of its assignment" : ", whether it is confident or not";
  return [
    policy.early_exit ? `A pair stops when ${enough}.` : "All layers run: early exit is off.",
    policy.pruning ? `A point is pruned if its ${PARTNER} is at most ${policy.prune_matchability}${sure}.`
      : "No point is pruned: pruning is off.",
  ];
}
byId("said").textContent = data.said;
if (data.back) make("a", "back to the run", byId("controls")).href = data.back;
if (L) {
  make("div", undefined, byId("details")).id = "reasons";
  const aside = make("div", undefined, byId("details"));
  plot("histogram", "Confidences", aside);
  if (data.marginal.length) { plot("sinkhorn", "Sinkhorn's marginal error", aside); paintErrors(); }
}
byId("legend").textContent = "Dots: blue matched, orange kept but unmatched, white pruned. All lines: blue " +
  "inliers, orange outliers" + (data.matches.some(alike) ? ", other colours matches of things that look alike, a group each" : "") +
  (left.overlay.length ? "; pink dots: of an overlay on both, whose matches are left out" : "") +
  (L ? "; matches of this layer: blue kept, green appeared, orange dashed vanished. For " +
  "the chosen point: white its match, colours what each head attends to (larger dot: larger weight), yellow the " +
  "sources of its information (rollout)." : "; white the match of the chosen point.");
if (L) {
  table("Layers", ["layer", "matches", "appeared", "vanished", "confident", "expected matches", "unmatched (0 / 1)",
    "pruned (0 / 1)", ""], data.layers.map(layerRow));
  rules().forEach(rule => make("p", rule, byId("tables")));
}
if (data.answers) {
  make("h2", "Poses of the second camera that the plane allows", byId("tables"));
  const scroll = make("div", undefined, byId("tables"));
  scroll.className = "wide";
  Object.assign(make("img", undefined, scroll), { src: data.answers, alt: "the poses, from above" });
}
if (data.seconds) table("Seconds", Object.keys(data.seconds), [Object.values(data.seconds)]);
table("Origin", ["quantity", "value"], data.origin, undefined, "words");
if (data.configuration) make("h2", "Configuration", byId("tables"));
if (data.configuration) make("pre", JSON.stringify(data.configuration, null, 1), byId("tables"));
let waiting = 2;
data.images.forEach(image => {
  image.drawn.onload = () => {
    if (--waiting) return;
    paint();
    draw();
    if (L) showReasons();
    document.body.dataset.ready = "yes";
  };
  image.drawn.src = image.jpeg;
});
