"""Compare two settings of a preset on the same synthetic pairs: identical matches, accuracy, time.

    python scripts/compare_settings.py precision PHOTOS [--max-keypoints 2048] [--pairs 400]
    python scripts/compare_settings.py adaptivity PHOTOS --levels 1,2

`precision` compares "auto" with float32, `adaptivity` early exit and pruning on with off.
"""

import argparse
import sys
from pathlib import Path

import torch

from matcher.benchmark.report import compare
from matcher.benchmark.timing import Stopwatch
from matcher.errors import MatcherError
from matcher.evaluate.synthetic import synthetic_set
from matcher.images import find_images
from matcher.loading import load

SETTINGS = {
    "precision": ({}, {"precision": "float32"}),
    "adaptivity": ({}, {"early_exit": False, "pruning": False}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=SETTINGS)
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--preset", default="hybrid-learned")
    parser.add_argument("--weights", help="a file or a name, instead of the shipped ones")
    parser.add_argument("--max-keypoints", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--levels", default="1,2,3,4", help="difficulty, from 0 to 4")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        levels = tuple(int(level) for level in options.levels.split(","))
        pairs = synthetic_set(find_images(options.photos), count=options.pairs, levels=levels).pairs
        common = {
            "device": options.device,
            "max_keypoints": options.max_keypoints,
            "geometry": "homography",
            "weights": options.weights,
        }
        pipelines = [load(options.preset, **common, **settings) for settings in SETTINGS[options.what]]
        found = compare(*pipelines, pairs, Stopwatch(torch.device(options.device)))
    except MatcherError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(found.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
