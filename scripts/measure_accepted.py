"""Accuracy of the geometries that `Pipeline.match` accepts, by the least verdict that several passes ask for.

python scripts/measure_accepted.py kitchen sensors --pairs 37
python scripts/measure_accepted.py --wrong ../shared --pairs 50 --seed 7   # how probable wrong pairs get
"""

import argparse
import sys
from pathlib import Path

import torch

from matcher.errors import MatcherError
from matcher.evaluate.calibration import (
    THRESHOLDS,
    TrialSize,
    as_markdown_accepted,
    judge_set,
    most_probable,
    trial_pairs,
)
from matcher.evaluate.run import GEOMETRY
from matcher.evaluate.sets import SetOptions, find_sets
from matcher.loading import load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("sets", nargs="*", metavar="SET", help="sets of poses or homographies")
parser.add_argument("--wrong", type=Path, metavar="DATA", help="also pairs of different places, of DATA")
parser.add_argument("--pairs", type=int, help="pairs of each set or kind, at most, evenly spread")
parser.add_argument("--seed", type=int, default=0, help="of the wrong pairs (0)")
parser.add_argument("--preset", default="hybrid-learned")
parser.add_argument("--threads", type=int, default=1)
arguments = parser.parse_args()
if not arguments.sets and arguments.wrong is None:
    parser.error("name a set, or give --wrong DATA")
torch.set_num_threads(arguments.threads)
try:
    for name in arguments.sets:
        for pair_set in find_sets(name, SetOptions(pairs=arguments.pairs)):
            pipeline = load(arguments.preset, geometry=GEOMETRY[pair_set.protocol], device="cpu")
            judged = judge_set(pair_set, pipeline)
            print(as_markdown_accepted(pair_set.name, judged, THRESHOLDS[pair_set.protocol]), flush=True)
    if arguments.wrong is not None:
        count = arguments.pairs or 50
        for kind in ("fundamental", "homography"):
            pairs = trial_pairs(arguments.wrong, TrialSize(count, count, 0), arguments.seed)
            wrong = (pair for pair in pairs if not pair.same)
            for of, values in most_probable(wrong, load(arguments.preset, geometry=kind)).items():
                largest = ", ".join(f"{value:.2f}" for value in values[:3])
                print(f"{kind}, {of} ({len(values)}): {largest}", flush=True)
except MatcherError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
