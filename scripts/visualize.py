"""Draw a pair of images: matches, their errors, epipolar lines.

    python scripts/visualize.py assets/view0.jpg assets/view1.jpg out.png [--plot epipolar]

The suffix of the output decides its format. `matcher explain` shows attention and what became of every
keypoint, `matcher align` one image over the other.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import matcher
from matcher.cameras import as_camera
from matcher.evaluate.measure import distances
from matcher.geometry import warp_points
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose
from matcher.viz.drawings import draw_header, save_figure, two_images


def draw_pair(args: argparse.Namespace) -> None:
    """Matches, their errors, or what shows whether the geometry is right."""
    planar = args.homography is not None
    options = {"weights": args.weights, "resize": args.resize, "device": "cpu"}
    pipeline = matcher.load(args.preset, geometry="homography" if planar else "fundamental", **options)
    result = pipeline.match(args.image0, args.image1)
    images = pipeline.read(args.image0), pipeline.read(args.image1)
    known = result.geometry.matrix if args.homography is None else np.loadtxt(args.homography)
    if args.pose is not None:
        K = as_camera([float(value) for value in args.camera.split(",")]).K
        known = fundamental_from_pose(K, K, np.loadtxt(args.pose))
    if known is None and (args.plot != "matches" or args.colour_by == "error"):
        raise SystemExit(f"no geometry was found ({result.geometry.status})")
    how = {"stacked": args.stacked, "title": result.heading()}
    if args.plot == "matches":
        points, errors = (result.points0, result.points1), None
        if args.colour_by == "error" and planar:  # infinite beyond the horizon
            errors = distances(warp_points(points[0], known), points[1])
        elif args.colour_by == "error":
            errors = epipolar_distance(*points, known)
        how |= {"colour_by": args.colour_by, "errors": errors, "max_lines": args.lines}
        result.plot(args.output, *images, overwrite=True, **how)
    else:
        inliers = (points[result.geometry.inliers] for points in (result.points0, result.points1))
        save_figure(draw_epipolar_lines(*images, *inliers, known, **how), args.output)


def draw_epipolar_lines(
    image0: matcher.Image,
    image1: matcher.Image,
    points0: np.ndarray,
    points1: np.ndarray,
    fundamental: np.ndarray,
    *,
    stacked: bool,
    title: str,
    max_lines: int = 20,
) -> Figure:
    """Matched points, (K, 2) stored pixels, each with the epipolar line that its partner draws in the other
    image by the (3, 3) matrix with x1ᵀ F x0 = 0; at most `max_lines`, spread evenly over all of them.
    """
    chosen = np.unique(np.linspace(0, len(points0) - 1, min(max_lines, len(points0))).astype(int))
    placed, figure, axes = two_images(image0, image1, stacked=stacked)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.3, 1.0, max(1, len(chosen))))[: len(chosen)]
    sides = (points0, points1)
    matrices = (fundamental.T, fundamental)
    for side, here, there, matrix in zip(placed, sides, sides[::-1], matrices, strict=True):
        lines = np.c_[there[chosen], np.ones(len(chosen))] @ matrix.T
        normal, size = lines[:, :2], np.array(side.image.size)
        with np.errstate(divide="ignore", invalid="ignore"):  # where a partner is the epipole
            length = np.linalg.norm(normal, axis=1, keepdims=True)
            nearest = size / 2 - (lines @ [*size / 2, 1.0])[:, None] * normal / length**2  # to the middle
            along = normal[:, ::-1] * (1, -1) / length * size.sum()
        ends = side.points(np.stack([nearest - along, nearest + along], axis=1).reshape(-1, 2))
        segments = LineCollection(ends.reshape(-1, 2, 2), colors=colours, linewidths=1.2)
        axes.add_collection(segments, autolim=False)
        edge = Rectangle(np.subtract(side.offset, 0.5), *side.shape, transform=axes.transData)
        segments.set_clip_path(edge)
        ends = side.points(here[chosen])
        axes.scatter(ends[:, 0], ends[:, 1], s=40, c=colours, edgecolors="black", linewidths=0.8, zorder=3)
    text = f"{len(chosen)} of {len(points0)} matches; a point lies on the line of its colour where they agree"
    draw_header(figure, title, [(text, "none")])
    return figure


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("image0", type=Path)
parser.add_argument("image1", type=Path)
parser.add_argument("output", type=Path, help=".png, .jpg, .pdf or .svg")
parser.add_argument("--plot", choices=["matches", "epipolar"], default="matches")
parser.add_argument("--preset", default="hybrid-learned", help="see `matcher presets`")
parser.add_argument("--weights", help="a file, or a name from `matcher weights list`")
parser.add_argument("--resize", type=int, default=1024, help="longer side in pixels")
parser.add_argument("--stacked", action="store_true", help="one image above the other")
parser.add_argument("--colour-by", choices=["confidence", "inliers", "error"], default="confidence")
parser.add_argument("--homography", type=Path, help="text file of the known 3 x 3 matrix, for errors")
parser.add_argument("--pose", type=Path, help="text file of the known 4 x 4 cam1_from_cam0; needs --camera")
parser.add_argument("--camera", metavar="fx,fy,cx,cy", help="of both images, in pixels of the files")
parser.add_argument("--lines", type=int, default=200, help="at most so many matches")
args = parser.parse_args()
if args.pose is not None and args.camera is None:
    parser.error("--pose needs --camera fx,fy,cx,cy")
try:
    draw_pair(args)
except matcher.MatcherError as error:
    parser.exit(error.exit_code, f"{error}\n")
