"""Draw the matches of two images, one image warped onto the other, or epipolar lines.

    python scripts/visualize_matches.py assets/view0.jpg assets/view1.jpg matches.png
    python scripts/visualize_matches.py assets/view0.jpg assets/view1.jpg lines.png --plot epipolar

The suffix of the output decides its format.
"""

from pathlib import Path

import numpy as np
from pair_arguments import load_pipeline, pair_parser

import matcher
from matcher.cli.options import parse_camera
from matcher.verify.adjustment import fundamental_from_pose
from matcher.viz.drawings import match_errors, save_figure
from matcher.viz.overlays import draw_epipolar_lines, draw_overlay

parser = pair_parser("Draw matches, an overlay by the homography, or epipolar lines.")
parser.add_argument("--plot", choices=["matches", "checkerboard", "blend", "epipolar"], default="matches")
parser.add_argument("--colour-by", choices=["confidence", "inliers", "error"], default="confidence")
parser.add_argument("--homography", type=Path, help="text file of the known 3 x 3 matrix, for errors")
parser.add_argument("--pose", type=Path, help="text file of the known 4 x 4 cam1_from_cam0; needs --camera")
parser.add_argument("--camera", metavar="fx,fy,cx,cy", help="of both images, in pixels of the files")
parser.add_argument("--lines", type=int, default=200, help="at most so many matches")
args = parser.parse_args()
if args.pose is not None and args.camera is None:
    parser.error("--pose needs --camera fx,fy,cx,cy")
planar = args.homography is not None or args.plot in ("checkerboard", "blend")
try:
    camera = parse_camera(args.camera, "--camera")
    kind = "homography" if planar else "fundamental"
    pipeline = load_pipeline(args, geometry=kind)
    result = pipeline.match(args.image0, args.image1)
    images = pipeline.read(args.image0), pipeline.read(args.image1)
except matcher.MatcherError as error:
    parser.exit(error.exit_code, f"{error}\n")
known = result.geometry.matrix if args.homography is None else np.loadtxt(args.homography)
if args.pose is not None:
    matrix = camera.K
    known = fundamental_from_pose(matrix, matrix, np.loadtxt(args.pose))
if known is None and (args.plot != "matches" or args.colour_by == "error"):
    parser.exit(4, f"no geometry was found ({result.geometry.status})\n")
if args.plot == "matches":
    given = {"H_1_from_0" if planar else "fundamental": known}
    errors = match_errors(result.points0, result.points1, **given) if args.colour_by == "error" else None
    drawing = {"colour_by": args.colour_by, "errors": errors, "max_lines": args.lines}
    heading, known_by = result.heading(), args.homography or args.pose
    if errors is not None and known_by is not None:
        heading += f", errors against {known_by.name}"
    result.plot(args.output, *images, title=heading, overwrite=True, stacked=args.stacked, **drawing)
elif args.plot == "epipolar":
    inliers = (points[result.geometry.inliers] for points in (result.points0, result.points1))
    drawing = {"stacked": args.stacked, "title": result.heading()}
    save_figure(draw_epipolar_lines(*images, *inliers, known, **drawing), args.output)
else:
    drawn = draw_overlay(*images, known, kind=args.plot, title=result.heading())
    save_figure(drawn, args.output)
