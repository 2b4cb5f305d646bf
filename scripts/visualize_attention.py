"""Draw the attention of a keypoint of image 0: of one layer, its rollout over all layers, or its entropy.

    python scripts/visualize_attention.py assets/view0.jpg assets/view1.jpg out.png --point 400,300
    python scripts/visualize_attention.py A.jpg B.jpg rollout.png --point 400,300 --plot rollout

The keypoint nearest to the point is used. The suffix of the output decides its format.
"""

import numpy as np
from pair_arguments import load_pipeline, pair_parser

import matcher
from matcher.explain.explain import explain, nearest_keypoint, network_of
from matcher.viz.drawings import save_figure
from matcher.viz.plots import draw_attention, draw_entropies

parser = pair_parser("Self- and cross-attention of the keypoint of image 0 nearest to a point.")
parser.add_argument("--point", required=True, metavar="x,y", help="in pixels of image 0")
parser.add_argument("--plot", choices=["layer", "rollout", "entropy"], default="layer")
parser.add_argument("--layer", type=int, help="from 1; by default the last layer that ran")
args = parser.parse_args()
try:
    position = tuple(map(float, args.point.split(",")))
    x, y = position
except ValueError:
    parser.error(f"--point must be x,y in pixels of {args.image0}, not {args.point!r}")
try:
    pipeline = load_pipeline(args)
    network = network_of(pipeline)
    features = [pipeline.extract(path) for path in (args.image0, args.image1)]
    asked = nearest_keypoint(features[0], position)
    explained = explain(
        network,
        *features,
        [asked],
        strongest=max(5, 40 // network.model.config.context.heads),  # the more heads, the fewer of each
        traced=None if args.plot == "rollout" else ([], []),
    )
except matcher.MatcherError as error:
    parser.exit(error.exit_code, f"{error}\n")
keypoints = [f.keypoints.numpy() for f in features]
partner = dict(explained.matches.tolist()).get(asked)
pruned_after = explained.fates[0][asked]
found = f"pruned after layer {pruned_after}" if pruned_after > 0 else "no match"
if partner is not None:
    found = f"matched to {np.round(keypoints[1][partner]).astype(int).tolist()}"
title = f"{pipeline.preset}, keypoint at {np.round(keypoints[0][asked]).astype(int).tolist()}, {found}"
number = args.layer or len(explained.layers)
if not 1 <= number <= len(explained.layers):
    parser.error(f"layers 1 to {len(explained.layers)} ran")
if args.plot == "entropy":
    tables = [
        [getattr(layer, kind)[0].entropy[0] for layer in explained.layers]
        for kind in ("self_attention", "cross_attention")
    ]
    limit = float(np.log(max(2, *map(len, features))))
    save_figure(draw_entropies(*tables, limit=limit, title=f"entropy of attention: {title}"), args.output)
    parser.exit()
if args.plot == "rollout":
    flow, count, heads = explained.rollout[0][0], len(keypoints[0]), []
    for part, side in ((flow[:count], keypoints[0]), (flow[count:], keypoints[1])):
        best = np.argsort(-part)[:40]
        heads.append([(side[best], part[best])])
    names, title = (
        ["share of the final state"],
        f"rollout over {len(explained.layers)} layers: {title}",
    )
else:
    layer, heads, names = explained.layers[number - 1], [], None
    for attention, side in (
        (layer.self_attention[0], keypoints[0]),
        (layer.cross_attention[0], keypoints[1]),
    ):
        pairs = zip(attention.points[0], attention.weights[0], strict=True)
        heads.append([(side[points[points >= 0]], weights[points >= 0]) for points, weights in pairs])
    title = f"attention at layer {number} of {pipeline.layers}: {title}"
images = [pipeline.read(path) for path in (args.image0, args.image1)]
point = tuple(keypoints[0][asked])
save_figure(
    draw_attention(*images, point, *heads, names=names, stacked=args.stacked, title=title), args.output
)
