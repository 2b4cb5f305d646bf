"""Draw how a pair was decided: `python scripts/visualize_pruning.py A B out.png --picture layers`."""

import argparse
from pathlib import Path

import matcher
from matcher.drawing.canvas import save_figure
from matcher.drawing.keypoints import draw_fates
from matcher.drawing.plots import draw_confidences, draw_decisions, draw_marginal_errors
from matcher.explain.explain import explain
from matcher.explain.rules import exit_rule, pruning_rule

parser = argparse.ArgumentParser(description="Keypoints coloured by fate, or plots of how they were decided.")
parser.add_argument("image0", type=Path)
parser.add_argument("image1", type=Path)
parser.add_argument("output", type=Path, help=".png, .jpg, .pdf or .svg")
parser.add_argument("--picture", choices=["fates", "layers", "confidences", "sinkhorn"], default="fates")
parser.add_argument("--preset", default="hybrid")
parser.add_argument("--weights", help="a file, or a name from `matcher weights list`")
parser.add_argument("--resize", type=int, default=1024)
parser.add_argument("--stacked", action="store_true")
args = parser.parse_args()
try:
    pipeline = matcher.load(args.preset, weights=args.weights, resize=args.resize, device="cpu")
    images = [pipeline.read(path) for path in (args.image0, args.image1)]
    features = [pipeline.extract(image) for image in images]
    told = explain(pipeline.matcher, *features)
except matcher.MatcherError as error:
    parser.exit(error.exit_code, f"{error}\n")
config = pipeline.config.matcher
print(exit_rule(config), pruning_rule(config), sep="\n")
found = f"{len(told.matches)} matches, {len(told.layers)} of {pipeline.layers} layers"
title = f"{args.picture}: {pipeline.preset}, {found}"
if args.picture == "fates":
    points = [f.keypoints.numpy() for f in features]
    fates = {"layers": pipeline.layers, "stacked": args.stacked, "title": title}
    figure = draw_fates(*images, *points, *told.fates, **fates)
elif args.picture == "layers":
    figure = draw_decisions(
        [len(layer.matches) for layer in told.layers],
        [layer.appeared for layer in told.layers],
        [layer.vanished for layer in told.layers],
        {
            "sure, for early exit": [layer.certain for layer in told.layers],
            "no partner, image 0": [layer.unmatched[0] for layer in told.layers],
            "no partner, image 1": [layer.unmatched[1] for layer in told.layers],
        },
        [sum(map(len, layer.pruned)) for layer in told.layers],
        exited=told.layers[-1].exited,
        title=title,
    )
elif args.picture == "confidences":
    chosen = {f"layer {number}": told.layers[number - 1].scores for number in {1, len(told.layers)}}
    figure = draw_confidences(chosen, threshold=config.match_threshold, title=title)
else:
    tolerance = config.assignment.tolerance
    figure = draw_marginal_errors(told.layers[-1].marginal_errors, tolerance=tolerance, title=title)
save_figure(figure, args.output)
