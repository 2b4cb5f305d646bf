"""Draw the matches of two pictures: `python scripts/visualize_matches.py A B matches.png`."""

import argparse
from pathlib import Path

import numpy as np

import matcher
from matcher.drawing.canvas import save_figure
from matcher.drawing.matches import match_errors
from matcher.drawing.overlay import draw_epipolar_lines, draw_overlay

parser = argparse.ArgumentParser(description="Draw matches, an overlay by a homography, or epipolar lines.")
parser.add_argument("image0", type=Path)
parser.add_argument("image1", type=Path)
parser.add_argument("output", type=Path, help=".png, .jpg, .pdf or .svg")
parser.add_argument("--preset", default="hybrid")
parser.add_argument("--resize", type=int, default=1024)
parser.add_argument("--picture", choices=["matches", "checkerboard", "blend", "epipolar"], default="matches")
parser.add_argument("--colour-by", choices=["confidence", "inliers", "error"], default="confidence")
parser.add_argument("--homography", type=Path, help="text file of the known 3 x 3 matrix, for errors")
parser.add_argument("--stacked", action="store_true")
parser.add_argument("--lines", type=int, default=200)
args = parser.parse_args()
planar = args.homography is not None or args.picture in ("checkerboard", "blend")
pipeline = matcher.load(
    args.preset, resize=args.resize, geometry="homography" if planar else "fundamental", device="cpu"
)
result = pipeline.match(args.image0, args.image1)
images = pipeline.read(args.image0), pipeline.read(args.image1)
known = result.geometry.matrix if args.homography is None else np.loadtxt(args.homography)
if known is None and (args.picture != "matches" or args.colour_by == "error"):
    parser.exit(4, f"no geometry was found ({result.geometry.status})\n")
if args.picture == "matches":
    kind = {"H_0to1" if planar else "fundamental": known}
    errors = match_errors(result.points0, result.points1, **kind) if args.colour_by == "error" else None
    matcher.plot_result(
        result,
        *images,
        args.output,
        colour_by=args.colour_by,
        errors=errors,
        stacked=args.stacked,
        max_lines=args.lines,
    )
elif args.picture == "epipolar":
    inner = (points[result.geometry.inliers] for points in (result.points0, result.points1))
    save_figure(draw_epipolar_lines(*images, *inner, known, stacked=args.stacked), args.output)
else:
    save_figure(draw_overlay(*images, known, kind=args.picture), args.output)
