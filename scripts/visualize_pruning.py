"""Draw what became of every keypoint: `python scripts/visualize_pruning.py A B out.png`."""

import argparse
from pathlib import Path

import matcher
from matcher.drawing.canvas import save_figure
from matcher.drawing.keypoints import draw_fates
from matcher.explain.explain import explain

parser = argparse.ArgumentParser(description="Keypoints coloured by fate; a line of figures for each layer.")
parser.add_argument("image0", type=Path)
parser.add_argument("image1", type=Path)
parser.add_argument("output", type=Path, help=".png, .jpg, .pdf or .svg")
parser.add_argument("--preset", default="hybrid")
parser.add_argument("--resize", type=int, default=1024)
parser.add_argument("--stacked", action="store_true")
args = parser.parse_args()
pipeline = matcher.load(args.preset, resize=args.resize, device="cpu")
features = [pipeline.extract(path) for path in (args.image0, args.image1)]
told = explain(pipeline.matcher, *features)
print("layer  matches  appeared  vanished  confident  no partner 0/1  pruned 0/1")
for number, layer in enumerate(told.layers, 1):
    sure = "-" if layer.confident is None else f"{layer.confident:.2f}"
    alone = "/".join(f"{share:.2f}" for share in layer.unmatched)
    pruned = "/".join(str(len(points)) for points in layer.pruned)
    counts = f"{len(layer.matches):7}  {layer.appeared:8}  {layer.vanished:8}"
    print(f"{number:5}  {counts}  {sure:>9}  {alone:>14}  {pruned:>10}{'  exit' if layer.exited else ''}")
if errors := told.layers[-1].marginal_errors:
    print("Sinkhorn's marginal error:", " ".join(f"{error:.2g}" for error in errors))
title = f"{pipeline.preset}, {len(told.matches)} matches, {len(told.layers)} of {pipeline.layers} layers"
save_figure(
    draw_fates(
        *(pipeline.read(path) for path in (args.image0, args.image1)),
        *(f.keypoints.numpy() for f in features),
        *told.fates,
        layers=pipeline.layers,
        stacked=args.stacked,
        title=title,
    ),
    args.output,
)
