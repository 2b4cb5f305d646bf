"""Fits the model behind `Result.verdict` on warps of training photos and on pairs of different photos.

python scripts/fit_verdict.py ../shared/photos/train --pairs 300
python scripts/fit_verdict.py ../shared/photos/train --pairs 30 --seed 1 --test   # the shipped model
"""

import argparse
from pathlib import Path

import numpy as np

from matcher.evaluate.calibration import fit, gather, report
from matcher.verify.verdict import COEFFICIENTS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("photos", type=Path, help="folder of training photos, in folders by source")
parser.add_argument("--multiview", type=Path, help="folder of folders, each with several views of one place")
parser.add_argument("--pairs", type=int, default=300, help="pairs of each kind (300)")
parser.add_argument("--preset", default="hybrid-learned", help="preset that matches them")
parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (0)")
parser.add_argument("--test", action="store_true", help="do not fit: report how the shipped model does")
arguments = parser.parse_args()
folders = {"photos": arguments.photos, "multiview": arguments.multiview, "preset": arguments.preset}
values, same = gather(count=arguments.pairs, seed=arguments.seed, **folders)
model = np.array(COEFFICIENTS) if arguments.test else fit(values, same)
print(report(values, same, model))
