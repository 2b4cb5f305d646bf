"""Accuracy and time of a preset with each of its parts switched off, on the same pairs.

python scripts/compare_parts.py kitchen bookstore oxford_graf zoom --pairs 12
python scripts/compare_parts.py synthetic --decisions --pairs 20
"""

import argparse
import sys

import torch

from matcher.errors import MatcherError
from matcher.evaluate.calibration import ALL, decision_time, without_each
from matcher.evaluate.run import as_markdown, as_object, evaluate
from matcher.evaluate.sets import SetOptions, find_sets
from matcher.loading import load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "sets", nargs="+", metavar="SET", help="sets or folders, as `matcher evaluate` takes them"
)
parser.add_argument("--pairs", type=int, help="pairs of each set, at most, evenly spread over it")
parser.add_argument("--preset", default="hybrid-learned")
parser.add_argument("--decisions", action="store_true", help="only the time of decisions on easy pairs")
parser.add_argument("--threads", type=int, default=1)
arguments = parser.parse_args()
torch.set_num_threads(arguments.threads)
try:
    found = [one for name in arguments.sets for one in find_sets(name, SetOptions(pairs=arguments.pairs))]
    for one in found:
        if arguments.decisions:
            time = decision_time(load(arguments.preset, device="cpu"), one.pairs)
            print(
                f"{one.name}: {time.pairs} of {len(one)} pairs need one pass: {time.whole:.1f} ms, of which "
                f"working size {time.size:.2f}, further passes {time.further:.3f}: {time.share:+.2%}"
            )
        else:
            table = evaluate(one, without_each(arguments.preset, {"device": "cpu"}))
            print(as_markdown(as_object(table, baseline=ALL)), flush=True)
except MatcherError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
