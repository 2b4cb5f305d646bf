"""Fits the model behind `Result.verdict` on warps of training photos and on pairs of different photos.

python scripts/fit_verdict.py ../shared/photos/train --pairs 300
"""

import argparse
from pathlib import Path

from matcher.lab.evaluate.verdicts import fit, gather, report

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("photos", type=Path, help="folder of training photos, in folders by source")
parser.add_argument("--multiview", type=Path, help="folder of folders, each with several views of one place")
parser.add_argument("--pairs", type=int, default=300, help="pairs of each kind (300)")
parser.add_argument("--preset", default="hybrid-learned", help="preset that matches them")
arguments = parser.parse_args()
values, same = gather(arguments.photos, arguments.pairs, arguments.preset, arguments.multiview)
print(report(values, same, fit(values, same)))
