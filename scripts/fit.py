"""Fit what makes probabilities of a preset true: of its matches, or of its verdicts.

python scripts/fit.py calibration --fit 1 ../shared/photos/train --fit 3 renders/* --test bookstore
python scripts/fit.py verdict ../shared/photos/train --pairs 300 [--multiview ../shared/multiview/train]
python scripts/fit.py verdict ../shared/photos/train --pairs 30 --seed 1 --test   # the shipped model

Calibration of what the network gives is fitted in one pass. On all passes: with --stage refinement that of
the prior scores by which geometry weighs refined matches, with --stage geometry that of scores given the
geometry.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from matcher.config import CalibrationConfig, RefinedCalibrationConfig, VerifiedCalibrationConfig
from matcher.errors import MatcherError
from matcher.evaluate import calibration
from matcher.evaluate.protocols import UnrelatedPair
from matcher.evaluate.sets import SetOptions, find_sets, made_set
from matcher.images import find_images
from matcher.loading import load
from matcher.verify.verdict import COEFFICIENTS, EVIDENCE, NOT, SAME, evidence

STAGES = {
    "network": CalibrationConfig,
    "refinement": RefinedCalibrationConfig,
    "geometry": VerifiedCalibrationConfig,
}


def fit_calibration(given: argparse.Namespace) -> None:
    """Print the numbers of a stage and how well they hold on each set."""
    pipeline = calibration.uncalibrated(given.preset, given.stage)
    options = SetOptions(pairs=given.pairs, seed=given.seed)

    def judged(names: list[str]) -> list[calibration.JudgedPair]:
        sets = [find_sets(name, options)[0] for name in names]
        return [pair for each in sets for pair in calibration.judge(pipeline, each, given.stage)]

    fitted = [(judged(names), float(weight), names) for weight, *names in given.fit]
    numbers = calibration.fit_calibration([(pairs, weight) for pairs, weight, _ in fitted])
    print(STAGES[given.stage](*numbers.tolist()))
    tested = [(judged([name]), [name]) for name in given.test]
    for pairs, names in [*((pairs, names) for pairs, _, names in fitted), *tested]:
        before, after = (calibration.error_under(pairs, each) for each in (None, numbers))
        print(f"{' '.join(names)}: expected calibration error {before:.3f}, calibrated {after:.3f}")


def fit_verdict(given: argparse.Namespace) -> None:
    """Print the coefficients, fitted or shipped, and how they do on the pairs."""
    pipeline, rows, truths = load(given.preset), [], []
    for images, same in training_pairs(given.photos, given.pairs, given.multiview, given.seed):
        result = pipeline.match(*images)
        sizes = (features.image_size for features in (result.features0, result.features1))
        rows.append(evidence(result.matches, result.geometry.rejected or result.geometry, *sizes))
        truths.append(same)
    values, same = np.stack(rows), np.array(truths)
    model = np.array(COEFFICIENTS) if given.test else calibration.fit_verdict(values, same)
    said = 1 / (1 + np.exp(-np.clip(model[0] + values @ model[1:], -50, 50)))
    print(f"COEFFICIENTS = ({', '.join(f'{value:.3f}' for value in model)})  # bias, {', '.join(EVIDENCE)}")
    print(f"{len(same)} pairs, {int(same.sum())} of the same place")
    for word, called in (("the same", said >= SAME), ("different", said <= NOT)):
        print(f"called {word}: {called[same].mean():.4f} of these, {called[~same].mean():.4f} of the others")
    print(f"expected calibration error {calibration.reliability(said, same).error:.3f}")


def training_pairs(
    photos: Path, count: int, multiview: Path | None, seed: int
) -> Iterator[tuple[tuple, bool]]:
    """Two images to fit the verdict on, and whether they show the same place.

    Same: `count` warps of photos, a quarter as many zooms, half as many views of one wall with a pattern that
    repeats, and views of each multi-view scene at most three images apart. Not: `count` unrelated photos,
    half as many photos of one source (which may look alike), views of walls with like patterns, and views of
    different scenes.
    """
    paths = find_images(photos)
    for name in ("synthetic", "zoom", "unrelated", "repeats"):
        number = -(-count // 4) if name == "zoom" else count
        for pair in made_set(name, paths, count=number, seed=seed).pairs:
            yield (pair.image0.given(), pair.image1.given()), not isinstance(pair, UnrelatedPair)
    rng = np.random.default_rng([seed, 1])
    sources = [list(group) for _, group in groupby(sorted(paths), lambda path: path.parent)]
    sources = [group for group in sources if len(group) > 1]
    sizes = np.array([len(group) for group in sources], dtype=np.float64)
    for _ in range(count // 2):
        group = sources[rng.choice(len(sources), p=sizes / sizes.sum())]
        yield tuple(group[i] for i in rng.choice(len(group), 2, replace=False)), False
    if multiview is None:
        return
    scenes = [find_images(folder) for folder in sorted(multiview.iterdir()) if folder.is_dir()]
    for _ in range(count // 4):
        scene, other = (scenes[i] for i in rng.choice(len(scenes), 2, replace=False))
        first = int(rng.integers(len(scene) - 1))
        second = min(first + int(rng.integers(1, 4)), len(scene) - 1)
        yield (scene[first], scene[second]), True
        yield (scene[first], other[rng.integers(len(other))]), False


def main() -> int:
    """Fit one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    matches, verdict = (kinds.add_parser(name) for name in ("calibration", "verdict"))
    matches.add_argument(
        "--fit",
        nargs="+",
        action="append",
        required=True,
        metavar=("WEIGHT", "SET"),
        help="sets or folders, as `matcher evaluate` takes them, and how much they weigh together",
    )
    matches.add_argument("--test", nargs="+", default=[], metavar="SET", help="sets that are only measured")
    matches.add_argument("--pairs", type=int, default=60, help="pairs of each set, at most (60)")
    matches.add_argument("--seed", type=int, default=5, help="of everything that is drawn (5)")
    matches.add_argument("--stage", choices=STAGES, default="network", help="what is fitted (network)")
    verdict.add_argument("photos", type=Path, help="folder of training photos, in folders by source")
    verdict.add_argument("--multiview", type=Path, help="folder of folders, each with views of one place")
    verdict.add_argument("--pairs", type=int, default=300, help="pairs of each kind (300)")
    verdict.add_argument("--seed", type=int, default=0, help="of everything that is drawn (0)")
    verdict.add_argument("--test", action="store_true", help="report how the shipped model does")
    for each in (matches, verdict):
        each.add_argument("--preset", default="hybrid-learned", help="what matches the pairs")
    given = parser.parse_args()
    try:
        {"calibration": fit_calibration, "verdict": fit_verdict}[given.kind](given)
    except MatcherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
