"""Draw what a keypoint attends to: `python scripts/visualize_attention.py A B out.png --point x,y`."""

import argparse
from pathlib import Path

import numpy as np

import matcher
from matcher.drawing.attention import draw_attention
from matcher.drawing.canvas import save_figure
from matcher.explain.explain import explain, nearest_keypoint

parser = argparse.ArgumentParser(
    description="Self- and cross-attention of the keypoint of image 0 at a point."
)
parser.add_argument("image0", type=Path)
parser.add_argument("image1", type=Path)
parser.add_argument("output", type=Path, help=".png, .jpg, .pdf or .svg")
parser.add_argument("--point", required=True, metavar="x,y", help="in pixels of image 0")
parser.add_argument("--layer", type=int, help="1 is the first; the last that ran when absent")
parser.add_argument("--rollout", action="store_true", help="over all layers instead of one")
parser.add_argument("--preset", default="hybrid")
parser.add_argument("--resize", type=int, default=1024)
args = parser.parse_args()
pipeline = matcher.load(args.preset, resize=args.resize, device="cpu")
features = [pipeline.extract(path) for path in (args.image0, args.image1)]
asked = nearest_keypoint(features[0], tuple(float(part) for part in args.point.split(",")))
told = explain(pipeline.matcher, *features, [asked], strongest=20)
places = [f.keypoints.numpy() for f in features]
partner = dict(told.matches.tolist()).get(asked)
found = "no match" if partner is None else f"matched to {np.round(places[1][partner]).astype(int).tolist()}"
if args.rollout:
    flow, count = told.rollout[0][0], len(places[0])
    heads = []
    for part, side in ((flow[:count], places[0]), (flow[count:], places[1])):
        best = np.argsort(-part)[:40]
        heads.append([(side[best], part[best])])
    title = f"attention rollout over {len(told.layers)} layers, {found}"
else:
    number = args.layer or len(told.layers)
    if not 1 <= number <= len(told.layers):
        parser.error(f"layers 1 to {len(told.layers)} ran")
    layer, heads = told.layers[number - 1], []
    for attention, side in ((layer.within[0], places[0]), (layer.across[0], places[1])):
        pairs = zip(attention.points[0], attention.weights[0], strict=True)
        heads.append([(side[points[points >= 0]], weights[points >= 0]) for points, weights in pairs])
    entropy = "/".join(f"{value:.1f}" for value in layer.across[0].entropy[0])
    title = f"layer {number}, {found}, entropy of cross-attention by head {entropy} nats"
images = [pipeline.read(path) for path in (args.image0, args.image1)]
point = tuple(places[0][asked])
save_figure(draw_attention(*images, point, *heads, title=title), args.output)
