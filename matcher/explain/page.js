const view = byId("view"), pen = view.getContext("2d"), base = document.createElement("canvas");
const { context, assignment, policy, match_probability } = data.configuration ? data.configuration.matcher : {};
const gap = 12, [left, right] = data.images, L = data.layers.length, H = context && context.heads, K = data.strongest;
// What the first of a point's reasons is: predicted by heads of its own, or the dustbin's logit.
const PARTNER = match_probability ? "predicted probability of a partner" : "matchability";
const BLUE = "#56b4e9", RED = "#d55e00", GREEN = "#009e73", ORANGE = "#e69f00", PINK = "#cc79a7", WHITE = "#ffffff", BLACK = "#000000";
const COLOURS = [BLUE, RED, "#f0e442", PINK, GREEN, ORANGE, "#0072b2", WHITE];
const CROWD = 2048; // points of an image beyond which dots are smaller, so that they never cover it
const NONE = data.wide ? 0xffffffff : 0xffff;
view.width = base.width = left.size[0] + gap + right.size[0];
view.height = base.height = Math.max(left.size[1], right.size[1]);
const offset = [0, left.size[0] + gap];

const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const numbers = text => data.wide ? new Uint32Array(bytes(text).buffer) : new Uint16Array(bytes(text).buffer);
for (const image of data.images) {
  image.drawn = new Image();
  image.partner = new Map();
  image.row = new Map(image.asked.map((point, row) => [point, row]));
  image.trace = new Map(image.traced.map((point, row) => [point, row]));
  if (!L) continue;
  image.attention = image.attention.map(blocks => blocks.map(([points, weights, entropy]) =>
    [numbers(points), bytes(weights), bytes(entropy)]));
  image.sources = [numbers(image.sources[0]), bytes(image.sources[1])];
}
data.matches.forEach((match, k) => { left.partner.set(match[0], k); right.partner.set(match[1], k); });
for (const layer of data.layers) {
  const pairs = numbers(layer.matches), scores = bytes(layer.scores);
  layer.found = Array.from(scores, (score, k) => [pairs[2 * k], pairs[2 * k + 1], score / 255]);
  layer.keys = new Set(layer.found.map(match => match[0] + "," + match[1]));
  layer.partners = [0, 1].map(side => new Map(layer.found.map(m => [m[side], [m[1 - side], m[2]]])));
}

const control = (id, text, type, attributes, needed = true) => {
  const label = make("label", text + " "), input = make("input", undefined, label);
  Object.assign(input, { id, type, ...attributes });
  const shown = make("span", "", label);
  input.addEventListener("input", () => { paint(); draw(); });
  if (needed) byId("controls").append(label);
  return { input, shown };
};
const least = control("least", "minimum match probability", "range", { min: 0, max: 100, value: 0 });
const inner = control("inliers", "inliers only", "checkbox", {});
const every = control("lines", "lines of all matches", "checkbox", { checked: true });
const refined = data.images.some(image => image.ellipses.length);
const uncertain = control("ellipses", `uncertainty, enlarged ${data.enlarged} times`, "checkbox", {}, refined);
const layer = control("layer", "layer", "range", { min: 1, max: L || 1, value: L || 1 }, L);
const head = control("head", "head", "range", { min: 0, max: H || 0, value: 0 }, L);
const changes = control("changes", "matches of this layer", "checkbox", {}, L);
const flow = control("rollout", "rollout instead of attention", "checkbox", {}, L);
const pruned = control("pruned", "pruned after layer", "range", { min: 0, max: L, value: 0 }, L);
let chosen = data.chosen === null ? null : [0, data.chosen], hovered = null;

const at = (side, point) => {
  const [x, y] = data.images[side].points[point];
  return [x + offset[side], y];
};
const dot = (ink, place, radius, colour) => {
  ink.beginPath();
  ink.arc(place[0], place[1], radius, 0, 7);
  ink.fillStyle = colour;
  ink.fill();
};
const ellipse = (ink, place, [long, short, angle]) => {
  ink.beginPath();
  ink.ellipse(place[0], place[1], long, short, angle, 0, 7);
  ink.strokeStyle = "#f0e442";
  ink.lineWidth = 1;
  ink.stroke();
};
const line = (ink, from, to, colour, width, dash = []) => {
  ink.beginPath();
  ink.setLineDash(dash);
  ink.moveTo(...from);
  ink.lineTo(...to);
  ink.strokeStyle = colour;
  ink.lineWidth = width;
  ink.stroke();
  ink.setLineDash([]);
};
const visible = match => match[2] * 100 >= +least.input.value && (match[3] || !inner.input.checked);
const GROUPS = ["#f0e442", PINK, GREEN, "#0072b2"]; // none that is like an outlier's
const refused = !data.matches.some(match => match[3]); // then those of other instances show
const alike = match => (match[3] || refused) && match[4] >= 0 && GROUPS[match[4] % 4]; // of a group of like things
const fateColour = fate => fate === 0 ? BLUE : fate < 0 ? RED : WHITE;

// What does not depend on the chosen point: images, lines, keypoints.
function paint() {
  const ink = base.getContext("2d");
  least.shown.textContent = (least.input.value / 100).toFixed(2);
  layer.shown.textContent = `${layer.input.value} of ${L}`;
  head.shown.textContent = +head.input.value || "all";
  pruned.shown.textContent = +pruned.input.value || "show all";
  ink.fillStyle = WHITE;
  ink.fillRect(0, 0, base.width, base.height);
  data.images.forEach((image, side) => ink.drawImage(image.drawn, offset[side], 0));
  if (every.input.checked) {
    ink.globalAlpha = .4;
    if (changes.input.checked) paintChanges(ink);
    else for (const match of data.matches.filter(visible))
      line(ink, at(0, match[0]), at(1, match[1]), alike(match) || (match[3] ? BLUE : RED), 1);
    ink.globalAlpha = 1;
  }
  data.images.forEach((image, side) => {
    const unit = Math.min(1, Math.sqrt(CROWD / image.points.length));
    image.points.forEach((_, point) => {
      const fate = image.fates[point], wanted = +pruned.input.value;
      if (wanted && fate !== wanted) return;
      if (fate === 0 && !visible(data.matches[image.partner.get(point)])) return;
      dot(ink, at(side, point), 2.6 * unit, BLACK);
      dot(ink, at(side, point), 1.8 * unit, fateColour(fate));
    });
  });
  data.images.forEach((image, side) => {
    for (const [x, y] of image.overlay) dot(ink, [x + offset[side], y], 2, PINK);
  });
  if (uncertain.input.checked) data.images.forEach((image, side) => {
    for (const [point, ...shape] of image.ellipses)
      if (visible(data.matches[image.partner.get(point)])) ellipse(ink, at(side, point), shape);
  });
  if (L) paintHistogram();
}
function paintChanges(ink) {
  const now = data.layers[+layer.input.value - 1], before = data.layers[+layer.input.value - 2];
  const enough = match => match[2] * 100 >= +least.input.value;
  for (const match of now.found.filter(enough)) {
    const fresh = before && !before.keys.has(match[0] + "," + match[1]);
    line(ink, at(0, match[0]), at(1, match[1]), fresh ? GREEN : BLUE, fresh ? 3 : 1);
  }
  for (const match of before ? before.found.filter(enough) : [])
    if (!now.keys.has(match[0] + "," + match[1]))
      line(ink, at(0, match[0]), at(1, match[1]), RED, 3, [8, 6]);
}

function drawAttention(side, point) {
  const image = data.images[side], row = image.row.get(point), fate = image.fates[point];
  if (row === undefined) return "attention not kept for this point";
  // Of a point that was pruned before this layer: the last one that it lived through.
  const pruned = fate > 0 && fate < +layer.input.value, number = pruned ? fate : +layer.input.value;
  let strongest = 0, there = false;
  image.attention[number - 1].forEach(([points, weights], isCross) => {
    for (let h = 0; h < H; h++) {
      if (+head.input.value && h + 1 !== +head.input.value) continue;
      for (let k = 0; k < K; k++) {
        const slot = (row * H + h) * K + k;
        if (points[slot] === NONE) continue;
        const colour = COLOURS[h % COLOURS.length], turn = 2 * Math.PI * h / H;
        const share = (weights[slot] / 255) ** 2;
        const [x, y] = at(isCross ? 1 - side : side, points[slot]);
        const place = H > 1 ? [x - 4 * Math.cos(turn), y + 4 * Math.sin(turn)] : [x, y];
        there = true;
        strongest = Math.max(strongest, share);
        pen.globalAlpha = .2 + .8 * share;
        line(pen, at(side, point), place, colour, .7 + 1.5 * share);
        pen.globalAlpha = 1;
        dot(pen, place, 2.8 + 8 * Math.sqrt(share), BLACK);
        dot(pen, place, 2 + 8 * Math.sqrt(share), colour);
      }
    }
  });
  const where = `layer ${number}` + (pruned ? ", its last" : "");
  return there ? `strongest weight ${strongest.toPrecision(2)} at ${where}` : `nothing to attend to at ${where}`;
}
function drawRollout(side, point) {
  const image = data.images[side], row = image.trace.get(point), R = data.origins;
  if (row === undefined) return "rollout not kept for this point";
  for (let k = 0; k < R; k++) {
    const through = image.sources[0][row * R + k], share = image.sources[1][row * R + k] / 255;
    const other = through >= left.points.length;
    const place = at(other ? 1 : 0, other ? through - left.points.length : through);
    line(pen, at(side, point), place, "#f0e442", .5 + 2 * share);
    dot(pen, place, 2.8 + 8 * Math.sqrt(share), BLACK);
    dot(pen, place, 2 + 8 * Math.sqrt(share), "#f0e442");
  }
  return `rollout over ${L} layers: the strongest ${R} sources, the first with ` +
    `${(image.largest[row] * 100).toFixed(2)} % of its information`;
}
function fateOf(side, point) {
  const image = data.images[side], fate = image.fates[point], k = image.partner.get(point);
  if (k !== undefined) {
    const [i, j, p, inlier] = data.matches[k];
    return `matched to keypoint ${side ? i : j} of image ${1 - side}, ` +
      `probability ${p.toFixed(3)}, ${inlier ? "inlier" : "outlier"}`;
  }
  if (!(fate > 0)) return "kept, unmatched" + whyNot(side, point);
  const [partner, confidence] = image.reasons[point];
  return `pruned after layer ${fate}: ${PARTNER} ${partner.toPrecision(2)}, confidence ${confidence.toFixed(2)} ` +
    `(confident above ${data.confident[fate - 1].toFixed(2)})` + whyNot(side, point);
}
// The best candidates of a point without a partner, and what beat them.
function whyNot(side, point) {
  if (!L) return "";
  const [alone, candidates] = data.images[side].candidates[point], own = `image ${side}`;
  const told = candidates.map(([other, p, rival, q]) => `keypoint ${other} (${p.toFixed(3)}` +
    (rival === point ? (p < policy.match_threshold ? `, below the threshold of ${policy.match_threshold}` : "")
      : `; it is likelier keypoint ${rival} of ${own}: ${q.toFixed(3)}`) + ")");
  return (assignment.dustbin !== "none" ? `; probability of no partner ${alone.toFixed(3)}` : "") +
    (told.length ? `; best candidates in image ${1 - side}: ${told.join(", ")}` : "");
}
const describe = (side, point) => `keypoint ${point} of image ${side}: ${fateOf(side, point)}`;

function draw() {
  pen.drawImage(base, 0, 0);
  if (hovered) dot(pen, at(...hovered), 4, "#f0e442");
  const words = [];
  if (hovered && String(hovered) !== String(chosen)) words.push("under the pointer: " + describe(...hovered));
  if (chosen) {
    const [side, point] = chosen, k = data.images[side].partner.get(point);
    const more = !L ? [] : [(flow.input.checked ? drawRollout : drawAttention)(side, point)];
    if (k !== undefined) {
      const [i, j] = data.matches[k];
      line(pen, at(0, i), at(1, j), BLACK, 5);
      line(pen, at(0, i), at(1, j), WHITE, 3);
      dot(pen, at(1 - side, side ? i : j), 7, BLACK);
      dot(pen, at(1 - side, side ? i : j), 5, WHITE);
    }
    dot(pen, at(side, point), 7, BLACK);
    dot(pen, at(side, point), 5, WHITE);
    words.unshift([describe(side, point), ...more].join("; "));
    byId("info").dataset.point = chosen;
  }
  byId("info").textContent = words.join(" · ") ||
    "Each line joins a point with its match in the other image. Click a point to see why it was matched or not.";
}
function nearest(event) {
  const box = view.getBoundingClientRect(), scale = view.width / box.width;
  const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
  let best = Infinity, found = null;
  data.images.forEach((image, side) => image.points.forEach(([px, py], point) => {
    const away = (px + offset[side] - x) ** 2 + (py - y) ** 2;
    if (away < best) { best = away; found = [side, point]; }
  }));
  return [found, Math.sqrt(best)];
}
view.addEventListener("click", event => {
  chosen = nearest(event)[0];
  draw();
  if (L && chosen) showReasons();
});
view.addEventListener("mousemove", event => {
  const [found, away] = nearest(event), now = away < 10 ? found : null;
  if (String(now) === String(hovered)) return;
  hovered = now;
  draw();
});
