"""Fit what makes probabilities of a preset true: of its matches, or of its verdicts.

python scripts/fit.py calibration --fit 1 ../shared/photos/train --fit 3 renders/* --test bookstore
python scripts/fit.py verdict ../shared/photos/train --pairs 300 [--multiview ../shared/multiview/train]
python scripts/fit.py verdict ../shared/photos/train --pairs 30 --seed 1 --test   # the shipped model

Calibration of what the network gives is fitted in one pass. On all passes: with --stage refinement that of
the prior scores by which geometry weighs refined matches, with --stage geometry that of scores given the
geometry.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from matcher import config
from matcher.errors import MatcherError, UsageError
from matcher.evaluate.measure import errors_of, scales_of
from matcher.evaluate.methods import Method
from matcher.evaluate.protocols import PairSet, UnrelatedPair
from matcher.evaluate.run import CORRECT, matched, reliability
from matcher.evaluate.sets import SetOptions, find_sets, made_set
from matcher.images import find_images
from matcher.loading import load
from matcher.match import calibration
from matcher.match.network import AttentionMatcher
from matcher.pipeline import Pipeline
from matcher.verify.verdict import COEFFICIENTS, NOT, REGRESSORS, SAME, regressors

STAGES = {
    "network": config.CalibrationConfig,  # of what a network gives
    "refinement": config.RefinedCalibrationConfig,  # of the prior scores of refined matches
    "geometry": config.VerifiedCalibrationConfig,  # of the probabilities given a geometry
}


def logistic_regression(values: np.ndarray, right: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the regression of `right` (P,) on `values` (P, E), of a mean `weight`
    of 1, by Newton's method; coefficients of standardised values are drawn to zero a little."""
    mean, deviation = values.mean(axis=0), values.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(values)), (values - mean) / deviation])
    ridge = np.diag([0.0, *np.full(values.shape[1], 1e-3 * len(values))])  # for classes told apart perfectly
    found = np.zeros(design.shape[1])
    for _ in range(50):
        probability = 1 / (1 + np.exp(-np.clip(design @ found, -30, 30)))
        gradient = design.T @ (weight * (probability - right)) + ridge @ found
        curvature = design.T @ (design * (weight * probability * (1 - probability))[:, None]) + ridge
        found -= np.linalg.solve(curvature + 1e-9 * np.eye(len(found)), gradient)
    coefficients = found[1:] / deviation
    return np.array([found[0] - coefficients @ mean, *coefficients])


class JudgedPair(NamedTuple):
    """What is known of the matches of a pair before calibration, and which of them are right."""

    scores: np.ndarray  # (K,) of all matches, before this calibration
    regressors: np.ndarray  # (K, E) what the calibration goes by
    known: np.ndarray  # (K,) bool: the ground truth can tell
    right: np.ndarray  # (K,) bool


def uncalibrated(preset: str, stage: str = "network") -> Pipeline:
    """A preset, for the first stage one pass of it, without the calibration of a stage and of later ones."""
    pipeline = load(preset, further_passes=False) if stage == "network" else load(preset)
    network, kept = pipeline.config.matcher, None
    if not isinstance(network, config.NetworkConfig) or not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"the preset {preset!r} has no network whose probabilities could be calibrated")
    if stage != "network":
        kept = network.policy.calibration
        if kept is None:
            raise UsageError(f"{preset!r} is not calibrated before {stage}: calibrate its scores first")
        kept = replace(kept, refined=kept.refined if stage == "geometry" else None, verified=None)
    policy = replace(network.policy, calibration=kept)
    return replace(pipeline, matcher=pipeline.matcher.with_policy(policy))


def judge(pipeline: Pipeline, pair_set: PairSet, stage: str = "network") -> list[JudgedPair]:
    """The matches of every pair by the pipeline of `uncalibrated`; geometries have to tell of single
    matches."""
    found = []
    for pair, (result,) in matched(pair_set, [Method(pipeline.preset, pipeline)], None, []):
        matches = result.matches
        if not len(matches) or (stage == "geometry" and not calibration.judges_matches(result.geometry)):
            continue
        if stage == "refinement":
            scale = result.features1.scale.tolist()
            values = calibration.refinement_regressors(matches, scale, len(result.passes) > 1)
        elif stage == "geometry":
            values = calibration.geometry_regressors(matches, result.geometry)
        else:
            counts = len(result.features0), len(result.features1)
            values = calibration.regressors(result.scores, counts)
        errors = errors_of(pair, matches.points0, matches.points1, *scales_of(result))
        known = ~np.isnan(errors)
        found.append(JudgedPair(result.scores, values, known, known & (errors < CORRECT)))
    return found


def fitted_calibration(sets: Sequence[tuple[Sequence[JudgedPair], float]]) -> np.ndarray:
    """(1 + E,) offset and coefficients of the regressors, as in the stage's configuration, under which the
    matches of all sets, each with its weight, are most likely."""
    weights = []
    for pairs, share in sets:
        # A pair weighs 1 at most, one of few judged matches less.
        counts = np.array([pair.known.sum() for pair in pairs])
        weight = np.repeat(np.minimum(1.0, counts / 50) / np.maximum(1, counts), counts)
        weights.append(share * weight / weight.sum())
    weight, every = np.concatenate(weights), [pair for pairs, _ in sets for pair in pairs]
    _, values, known, right = map(np.concatenate, zip(*every, strict=True))
    weight /= weight.mean()
    return np.round(logistic_regression(values[known], right[known], weight), 2)


def error_under(pairs: Sequence[JudgedPair], numbers: np.ndarray | None) -> float:
    """Expected calibration error of a set under a calibration of `fitted_calibration`, or without one."""
    scores, values, known, right = map(np.concatenate, zip(*pairs, strict=True))
    if numbers is not None:
        scores = calibration.probabilities(numbers[0] + values @ numbers[1:])
    return reliability(scores[known], right[known]).error


def fit_calibration(given: argparse.Namespace) -> None:
    """Print the numbers of a stage and how well they hold on each set."""
    pipeline = uncalibrated(given.preset, given.stage)
    options = SetOptions(pairs=given.pairs, seed=given.seed)

    def judged(names: list[str]) -> list[JudgedPair]:
        sets = [find_sets(name, options)[0] for name in names]
        return [pair for each in sets for pair in judge(pipeline, each, given.stage)]

    fitted = [(judged(names), float(weight), names) for weight, *names in given.fit]
    numbers = fitted_calibration([(pairs, weight) for pairs, weight, _ in fitted])
    print(STAGES[given.stage](*numbers.tolist()))
    tested = [(judged([name]), [name]) for name in given.test]
    for pairs, names in [*((pairs, names) for pairs, _, names in fitted), *tested]:
        before, after = (error_under(pairs, each) for each in (None, numbers))
        print(f"{' '.join(names)}: expected calibration error {before:.3f}, calibrated {after:.3f}")


def fit_verdict(given: argparse.Namespace) -> None:
    """Print the coefficients, fitted or shipped, and how they do on the pairs."""
    pipeline, rows, truths = load(given.preset), [], []
    for images, same in training_pairs(given.photos, given.pairs, given.multiview, given.seed):
        result = pipeline.match(*images)
        sizes = (features.image_size for features in (result.features0, result.features1))
        rows.append(regressors(result.matches, result.geometry.rejected or result.geometry, *sizes))
        truths.append(same)
    values, same = np.stack(rows), np.array(truths)
    alike = np.where(same, 0.5 / same.mean(), 0.5 / (1 - same.mean()))  # both classes weigh the same
    model = np.array(COEFFICIENTS) if given.test else logistic_regression(values, same, alike)
    said = 1 / (1 + np.exp(-np.clip(model[0] + values @ model[1:], -50, 50)))
    print(f"COEFFICIENTS = ({', '.join(f'{value:.3f}' for value in model)})  # bias, {', '.join(REGRESSORS)}")
    print(f"{len(same)} pairs, {int(same.sum())} of the same place")
    for word, called in (("the same", said >= SAME), ("different", said <= NOT)):
        print(f"called {word}: {called[same].mean():.4f} of these, {called[~same].mean():.4f} of the others")
    print(f"expected calibration error {reliability(said, same).error:.3f}")


def training_pairs(photos: Path, count: int, multiview: Path | None, seed: int) -> Iterator[tuple]:
    """Two images to fit the verdict on, and whether they show the same place.

    Same: `count` warps of photos, a quarter as many zooms, half as many views of one wall with a pattern that
    repeats, and views of each multi-view scene at most three images apart. Not: `count` unrelated photos,
    half as many photos of one source (which may look alike), views of walls with like patterns, and views of
    different scenes.
    """
    paths = find_images(photos)
    for name in ("synthetic", "zoom", "unrelated", "repeats"):
        number = -(-count // 4) if name == "zoom" else count
        for pair in made_set(name, paths, SetOptions(number, seed=seed)).pairs:
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


def main() -> None:
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
        parser.exit(error.exit_code, f"{error}\n")


if __name__ == "__main__":
    main()
