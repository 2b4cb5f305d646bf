"""Reconstruct photos from our matches and from COLMAP's own SIFT, by the same mapper.

    python scripts/compare_reconstructions.py ../shared/multiview/train/dim_cyprus --output compared

Prints, for the largest model of each: images registered, points, mean track length, and mean reprojection
error in pixels. Needs `pip install matcher-vision[sfm]`.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="a new folder for runs and models")
    parser.add_argument("--preset", action="append", help="may be repeated; hybrid-learned")
    parser.add_argument("--max-keypoints", type=int, default=2048)
    parser.add_argument("--one-camera", action="store_true", help="all photos share one")
    parser.add_argument("--camera-model", default="SIMPLE_RADIAL", help="COLMAP's name; SIMPLE_RADIAL")
    parser.add_argument("--max-deviation", type=float, metavar="PX", help="as of `matcher sfm`; of ours only")
    parser.add_argument("--no-refine", action="store_true")
    parser.add_argument("--threads", type=int, default=-1)
    args = parser.parse_args()

    from matcher.benchmark.rows import compare_reconstructions
    from matcher.errors import MatcherError

    given = {"threads": args.threads, "one_camera": args.one_camera, "max_keypoints": args.max_keypoints}
    given |= {"camera_model": args.camera_model, "max_deviation": args.max_deviation}
    given |= {"refine": False} if args.no_refine else {}
    try:
        found = compare_reconstructions(args.photos, args.output, args.preset or ["hybrid-learned"], **given)
    except MatcherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{'':32} {'images':>6} {'points':>7} {'track':>6} {'error':>6}")
    for name, row in found.items():
        numbers = f"{row['track_length']:6.2f} {row['reprojection_error']:6.3f}"
        print(f"{name:32} {row['registered']:6d} {row['points']:7d} {numbers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
