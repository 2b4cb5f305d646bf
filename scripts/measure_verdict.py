"""Count wrong verdicts on pairs that the verdict was not fitted on: unrelated photos, lookalikes, warps.

python scripts/measure_verdict.py ../shared --unrelated 3000 --lookalikes 300 --related 300
python scripts/measure_verdict.py ../shared --findings trial.jsonl   # can be stopped, and continued so
"""

import argparse
import sys
from pathlib import Path

from matcher.evaluate.calibration import (
    Findings,
    KindResult,
    TrialSize,
    as_markdown_verdict_trial,
    trial_pairs,
    try_verdicts,
)
from matcher.loading import load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", type=Path, help="folder with photos/val, multiview and bench/kitti_mini")
parser.add_argument("--unrelated", type=int, default=TrialSize.unrelated, help="pairs of unrelated photos")
parser.add_argument(
    "--lookalikes", type=int, default=TrialSize.lookalikes, help="pairs of each kind of these"
)
parser.add_argument(
    "--related", type=int, default=TrialSize.related, help="pairs of the same place, per kind"
)
parser.add_argument("--preset", default="hybrid-learned", help="preset that matches them")
parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (0)")
parser.add_argument(
    "--findings",
    type=Path,
    help="file that keeps the evidence of each pair; those in it are not matched again",
)
arguments = parser.parse_args()


def show(kind: KindResult) -> None:
    """Say after every hundredth pair how far it is."""
    if len(kind.names) % 100 == 0:
        print(f"{kind.kind}: {len(kind.names)} pairs, {len(kind.wrong)} wrong", file=sys.stderr, flush=True)


counts = TrialSize(arguments.unrelated, arguments.lookalikes, arguments.related)
pairs = trial_pairs(arguments.data, counts, arguments.seed)
print(
    as_markdown_verdict_trial(
        try_verdicts(load(arguments.preset), pairs, show, Findings(arguments.findings))
    ),
    end="",
)
