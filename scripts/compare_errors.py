"""Whether two presets err alike: their directions of translation against the truth and each other.

    python scripts/compare_errors.py kitti_mini --pairs 60

Where two front ends that share nothing err by the same vector, the error is not theirs: it lies in the
truth, the calibration or the rectification, and no matches can take it away.
"""

import argparse
import sys

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("set", help="name or folder of a set with poses, as `matcher evaluate` takes it")
    parser.add_argument("--presets", nargs=2, default=["hybrid-learned", "nearest"], metavar="PRESET")
    parser.add_argument("--pairs", type=int, help="at most so many")
    args = parser.parse_args()

    import matcher
    from matcher.errors import MatcherError
    from matcher.evaluate.protocols import PosePair
    from matcher.evaluate.sets import SetOptions, find_sets

    errors: list[list[np.ndarray]] = [[], []]
    try:
        pipelines = [matcher.load(preset, geometry="essential") for preset in args.presets]
        for pair_set in find_sets(args.set, SetOptions(pairs=args.pairs)):
            for pair in pair_set.pairs:
                if not isinstance(pair, PosePair) or pair.image0.pixels is not None:
                    raise matcher.UsageError(f"{pair_set.name}: compare_errors needs files with poses")
                found = []
                for pipeline in pipelines:
                    sides = pair.image0.path, pair.image1.path
                    found.append(pipeline.match(*sides, camera0=pair.K0, camera1=pair.K1).geometry)
                if all(geometry.cam1_from_cam0 is not None for geometry in found):
                    for each, geometry in zip(errors, found, strict=True):
                        each.append(direction_error(geometry.cam1_from_cam0, pair.cam1_from_cam0))
        print(report(args.presets, *map(np.array, errors)))
    except MatcherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def direction_error(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(3,) the difference between two directions of translation, in degrees; the sign is free."""
    directions = [pose[:3, 3] / np.linalg.norm(pose[:3, 3]) for pose in (found, truth)]
    return np.degrees(directions[0] * (1 if directions[0] @ directions[1] >= 0 else -1) - directions[1])


def report(names: list[str], first: np.ndarray, second: np.ndarray) -> str:
    """Medians of the errors (P, 3), of their difference, and of the cosine between them."""
    sizes = [np.linalg.norm(each, axis=1) for each in (first, second, first - second)]
    cosines = np.sum(first * second, axis=1) / np.maximum(sizes[0] * sizes[1], 1e-12)
    lines = [f"{len(first)} pairs, medians of the error of the translation's direction:"]
    lines += [f"{name:16} {np.median(size):.3f}°" for name, size in zip(names, sizes, strict=False)]
    lines.append(
        f"from each other  {np.median(sizes[2]):.3f}°; cosine of both errors {np.median(cosines):.3f}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
