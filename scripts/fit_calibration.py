"""Fits the calibration of a preset's match probabilities, and says how well it holds on other sets.

python scripts/fit_calibration.py --fit 1 ../shared/photos/train --fit 3 renders/* --test bookstore

That of what the network gives is fitted in one pass. On all passes: with --stage refinement that of the prior
scores by which geometry weighs refined matches, with --stage geometry that of scores given the geometry.
"""

import argparse

from matcher.config import CalibrationConfig, RefinedCalibrationConfig, VerifiedCalibrationConfig
from matcher.evaluate.calibration import errors_of, fit_calibration, judge, uncalibrated
from matcher.evaluate.sets import SetOptions, find_sets

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--fit",
    nargs="+",
    action="append",
    required=True,
    metavar=("WEIGHT", "SET"),
    help="sets or folders, as `matcher evaluate` takes them, and how much they weigh together",
)
parser.add_argument("--test", nargs="+", default=[], metavar="SET", help="sets that are only measured")
parser.add_argument("--pairs", type=int, default=60, help="pairs of each set, at most (60)")
parser.add_argument("--seed", type=int, default=5, help="of everything that is drawn (5)")
parser.add_argument("--preset", default="hybrid-learned", help="preset whose network is calibrated")
KINDS = {
    "network": CalibrationConfig,
    "refinement": RefinedCalibrationConfig,
    "geometry": VerifiedCalibrationConfig,
}
parser.add_argument("--stage", choices=KINDS, default="network", help="what is fitted (network)")
arguments = parser.parse_args()

stage = arguments.stage
pipeline = uncalibrated(arguments.preset, stage)
options = SetOptions(pairs=arguments.pairs, seed=arguments.seed)


def judged(names: list[str]) -> list:
    """The matches of all sets of these names."""
    sets = [find_sets(name, options)[0] for name in names]
    return [pair for each in sets for pair in judge(pipeline, each, stage)]


fitted = [(judged(names), float(weight), names) for weight, *names in arguments.fit]
numbers = fit_calibration([(pairs, weight) for pairs, weight, _ in fitted])
print(KINDS[stage](*numbers.tolist()))
tested = [(judged([name]), [name]) for name in arguments.test]
for pairs, names in [*((pairs, names) for pairs, _, names in fitted), *tested]:
    before, after = errors_of(pairs, None), errors_of(pairs, numbers)
    print(f"{' '.join(names)}: expected calibration error {before:.3f}, calibrated {after:.3f}")
