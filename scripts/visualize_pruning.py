"""Draw which keypoints were matched or pruned, or plot layers, match confidences or Sinkhorn errors.

    python scripts/visualize_pruning.py assets/view0.jpg assets/view1.jpg pruning.png
    python scripts/visualize_pruning.py assets/view0.jpg assets/view1.jpg layers.png --plot layers

The suffix of the output decides its format.
"""

from pair_arguments import load_pipeline, pair_parser

import matcher
from matcher.explain.explain import explain, network_of, rules
from matcher.viz.drawings import draw_fates, save_figure
from matcher.viz.plots import draw_confidences, draw_decisions, draw_marginal_errors

parser = pair_parser("Matched, unmatched and pruned keypoints, or plots of the layers.")
parser.add_argument("--plot", choices=["fates", "layers", "confidences", "sinkhorn"], default="fates")
args = parser.parse_args()
try:
    pipeline = load_pipeline(args)
    images = [pipeline.read(path) for path in (args.image0, args.image1)]
    features = [pipeline.extract(image) for image in images]
    explained = explain(network_of(pipeline), *features)
except matcher.MatcherError as error:
    parser.exit(error.exit_code, f"{error}\n")
config = pipeline.config.matcher
print(*rules(config), sep="\n")
found = f"{len(explained.matches)} matches, {len(explained.layers)} of {pipeline.layers} layers"
title = f"{args.plot}: {pipeline.preset}, {found}"
if args.plot == "fates":
    points = [f.keypoints.numpy() for f in features]
    fates = {"layers": pipeline.layers, "stacked": args.stacked, "title": title}
    figure = draw_fates(*images, *points, *explained.fates, **fates)
elif args.plot == "layers":
    figure = draw_decisions(
        [len(layer.matches) for layer in explained.layers],
        [layer.appeared for layer in explained.layers],
        [layer.vanished for layer in explained.layers],
        {
            "confident, for early exit": [layer.certain for layer in explained.layers],
            "unmatched, image 0": [layer.unmatched[0] for layer in explained.layers],
            "unmatched, image 1": [layer.unmatched[1] for layer in explained.layers],
        },
        [sum(map(len, layer.pruned)) for layer in explained.layers],
        exited=explained.layers[-1].exited,
        title=title,
    )
elif args.plot == "confidences":
    chosen = {f"layer {number}": explained.layers[number - 1].scores for number in {1, len(explained.layers)}}
    figure = draw_confidences(chosen, threshold=config.policy.match_threshold, title=title)
else:
    tolerance = config.assignment.tolerance
    figure = draw_marginal_errors(explained.layers[-1].marginal_errors, tolerance=tolerance, title=title)
save_figure(figure, args.output)
