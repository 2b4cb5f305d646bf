const BLUE = "#56b4e9", RED = "#d55e00", DARK = "#222222";
const { nodes, edges } = data.graph, graph = byId("graph"), pen = graph.getContext("2d");
let chosen = null;

const pairRow = ([name0, name1, matches, inliers, status, probability, seconds, link]) =>
  [name0, name1, matches, inliers, status, probability === null ? "" : probability.toFixed(2), seconds.toFixed(3), link ? { link, text: "page" } : ""];
const PAIR = ["image 0", "image 1", "matches", "inliers", "geometry", "same place", "seconds", ""];

// The graph.
const slider = make("label", "minimum inliers of a pair ", byId("controls"));
const least = make("input", undefined, slider), shown = make("span", "", slider);
const most = Math.max(1, ...edges.map(edge => edge[2]));
Object.assign(least, { type: "range", id: "least", min: 0, max: most, value: 0 });
const at = node => [40 + 880 * nodes[node][1], 30 + 580 * nodes[node][2]];
const shade = inliers => {
  const share = Math.min(1, Math.log1p(inliers) / Math.log1p(most));
  return `hsl(${210 - 20 * share} ${45 + 45 * share}% ${82 - 54 * share}%)`;
};
function drawGraph() {
  shown.textContent = least.value;
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, graph.width, graph.height);
  for (const [a, b, inliers] of [...edges].reverse()) {
    if (inliers < +least.value) continue;
    const near = chosen === null || a === chosen || b === chosen;
    pen.globalAlpha = near ? 1 : .12;
    pen.strokeStyle = shade(inliers);
    pen.lineWidth = 1 + 3 * inliers / most;
    pen.beginPath();
    pen.moveTo(...at(a));
    pen.lineTo(...at(b));
    pen.stroke();
  }
  pen.globalAlpha = 1;
  pen.font = "12px system-ui, sans-serif";
  nodes.forEach(([name, , , status, degree], node) => {
    const [x, y] = at(node);
    pen.beginPath();
    pen.arc(x, y, node === chosen ? 8 : 5, 0, 7);
    pen.fillStyle = status === "failed" ? RED : degree ? BLUE : "#ffffff";
    pen.fill();
    pen.lineWidth = 1;
    pen.strokeStyle = DARK;
    pen.stroke();
    if (nodes.length > 60 && node !== chosen) return;
    const text = name.length > 18 ? "…" + name.slice(-17) : name, wide = pen.measureText(text).width;
    const left = Math.min(Math.max(2, x - wide / 2), graph.width - wide - 2);
    pen.globalAlpha = .75;
    pen.fillStyle = "#ffffff";
    pen.fillRect(left - 1, y + 8, wide + 2, 14);
    pen.globalAlpha = 1;
    pen.fillStyle = DARK;
    pen.fillText(text, left, y + 19);
  });
}
function describe() {
  byId("rows").replaceChildren();
  if (chosen === null) {
    byId("info").textContent = "Click an image.";
    return;
  }
  const own = edges.filter(edge => edge[0] === chosen || edge[1] === chosen).sort((a, b) => b[2] - a[2]);
  byId("info").textContent = `${nodes[chosen][0]}: ${nodes[chosen][4]} verified pairs`;
  table(`Pairs of ${nodes[chosen][0]}`, ["with", "inliers", "matches"], own.map(([a, b, inliers, matches]) =>
    [nodes[a === chosen ? b : a][0], inliers, matches]), byId("rows"), "words");
}
graph.addEventListener("click", event => {
  const box = graph.getBoundingClientRect(), scale = graph.width / box.width;
  const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
  let best = 400, found = null;
  nodes.forEach((_, node) => {
    const [px, py] = at(node), away = (px - x) ** 2 + (py - y) ** 2;
    if (away < best) { best = away; found = node; }
  });
  chosen = found;
  drawGraph();
  describe();
});
least.addEventListener("input", drawGraph);

// Histograms of matches and inliers.
function histogram(title, counts) {
  const box = make("div", undefined, byId("details"));
  make("h2", title, box);
  const canvas = make("canvas", undefined, box), ink = canvas.getContext("2d");
  canvas.width = 460;
  canvas.height = 190;
  const high = Math.max(1, ...counts), wide = 430 / counts.length;
  ink.font = "12px system-ui, sans-serif";
  ink.textAlign = "center";
  counts.forEach((count, bin) => {
    const tall = 130 * count / high, x = 20 + wide * bin;
    ink.fillStyle = BLUE;
    ink.fillRect(x + 2, 155 - tall, wide - 4, tall);
    ink.fillStyle = DARK;
    if (count) ink.fillText(count, x + wide / 2, 150 - tall);
    const lowest = data.bins[bin];
    ink.fillText((lowest < 1000 ? lowest : lowest / 1000 + "k") + (bin ? "+" : ""), x + wide / 2, 170);
  });
  ink.fillText("number of pairs (above each bar) by their count, at least", 235, 187);
}

const STATUS = {
  ok: "verified", low_inliers: "with too few inliers", too_few: "with too few matches", degenerate: "degenerate", mirrored: "mirrored", ambiguous: "on one plane, ambiguous",
  no_model: "without a model", not_estimated: "not verified",
};
const [images, pairs] = data.counts;
byId("summary").textContent = pairs[1]
  ? `${pairs[1]} pairs were matched in ${data.seconds} s: ` +
    data.statuses.map(([[status, usable], count]) =>
      `${count} ${usable && status === "degenerate" ? "on one plane, without a pose" : STATUS[status] || status}`).join(", ") + "."
  : "No pair has been matched yet: run `matcher collection IMAGES --run RUN_DIR`.";
table("Run", ["quantity", "value"], data.origin, undefined, "words");
table("Progress", ["", "done", "failed", "waiting"], data.counts);
byId("legend").textContent = `${nodes.length} of ${data.graph.images} images, ${edges.length} of ` +
  `${data.graph.pairs} verified pairs; darker and thicker: more inliers (most: ${most}). ` +
  "White: an image without a verified pair, orange: one that failed.";
drawGraph();
describe();
if (pairs[1]) {
  histogram("Matches", data.histograms[0]);
  histogram("Inliers", data.histograms[1]);
}
const rest = make("div", undefined, document.body);
if (data.tracks && data.tracks.count) {
  const { count, mean, conflicts, lengths } = data.tracks;
  table("Tracks", ["images per track", "tracks"], lengths, rest).id = "tracks";
  make("p", `${count} tracks of ${mean} images on average, joined from the verified matches; ` +
    `${conflicts} conflicting matches are left out.`, rest);
}
if (data.overlays.length) make("h2", "Overlays on most images, whose keypoints are left out", rest).id = "overlays";
for (const [text, picture] of data.overlays) {
  make("p", text, rest);
  Object.assign(make("img", undefined, rest), { src: picture, alt: text, width: 480 });
}
if (data.weakest.length) table("Weakest pairs", PAIR, data.weakest.map(pairRow), rest, "words").id = "weakest";
for (const [what, title] of [["images", "Images that failed"], ["pairs", "Pairs that failed"],
  ["contradicted", "Pairs that others contradict"], ["pages", "Pairs without a page"]]) {
  const [count, rows] = data.failures[what];
  const more = count > rows.length ? ` (${rows.length} of ${count})` : "";
  if (count) table(title + more, ["item", "reason"], rows, rest, "words").id = `failed-${what}`;
}
if (data.alone.length)
  table("Images with the fewest verified pairs first", ["image", "keypoints", "pairs", "verified"],
    data.alone, rest, "words").id = "images";
document.body.dataset.ready = "yes";
