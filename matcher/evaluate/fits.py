"""Fits of match probabilities and verdicts, and the pairs that verdicts are fitted to and tried on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path
from typing import Literal

import numpy as np

from matcher.config import NetworkConfig
from matcher.errors import UsageError
from matcher.evaluate.calibration import CORRECT, errors_of, reliability
from matcher.evaluate.folders import distant_frames
from matcher.evaluate.methods import Method
from matcher.evaluate.protocols import Pair, PairImage, PairSet, UnrelatedPair
from matcher.evaluate.run import PairLoop
from matcher.evaluate.synthetic import synthetic_set, unrelated_set, zoomed_set
from matcher.images import find_images
from matcher.loading import load
from matcher.match import calibration
from matcher.match.network import AttentionMatcher
from matcher.pipeline import Pipeline

# What a network gives, the prior scores of refined matches, and the probabilities given a geometry.
Stage = Literal["network", "refinement", "geometry"]
_FEW = 50  # judged matches; a pair with fewer weighs less
_RIDGE = 1e-3  # weight of the squared coefficients, for classes that are told apart perfectly


def logistic_regression(values: np.ndarray, right: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the regression of `right` (P,) on `values` (P, E).

    By Newton's method. Coefficients of the standardised evidence are drawn to zero a little; `weight` (P,)
    has a mean of about 1.
    """
    mean, deviation = values.mean(axis=0), values.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(values)), (values - mean) / deviation])
    ridge = np.diag([0.0, *np.full(values.shape[1], _RIDGE * len(values))])
    found = np.zeros(design.shape[1])
    for _ in range(50):
        probability = 1 / (1 + np.exp(-np.clip(design @ found, -30, 30)))
        gradient = design.T @ (weight * (probability - right)) + ridge @ found
        curvature = design.T @ (design * (weight * probability * (1 - probability))[:, None]) + ridge
        found -= np.linalg.solve(curvature + 1e-9 * np.eye(len(found)), gradient)
    coefficients = found[1:] / deviation
    return np.array([found[0] - coefficients @ mean, *coefficients])


@dataclass(frozen=True, eq=False)
class JudgedPair:
    """What is known of the matches of a pair before calibration, and which of them are right."""

    scores: np.ndarray  # (K,) of all matches, before this calibration
    evidence: np.ndarray  # (K, E) what the calibration goes by
    known: np.ndarray  # (K,) bool: the ground truth can tell
    right: np.ndarray  # (K,) bool


def uncalibrated(preset: str, stage: Stage = "network") -> Pipeline:
    """A preset without the calibration of a stage and of those after it.

    At the first stage it is one pass, whose scores are what the network gives; else the whole preset.
    Geometry needs the numbers of refinement before it.

    Raises:
        UsageError: a preset without a network, or without the calibration that a later stage adds to.
    """
    pipeline = load(preset, further_passes=False) if stage == "network" else load(preset)
    config = pipeline.config.matcher
    if not isinstance(config, NetworkConfig) or not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"the preset {preset!r} has no network whose probabilities could be calibrated")
    kept = config.policy.calibration
    if stage == "network":
        kept = None
    elif kept is None:
        raise UsageError(f"the scores of {preset!r} are not calibrated before {stage}: calibrate these first")
    else:
        kept = replace(kept, refined=kept.refined if stage == "geometry" else None, verified=None)
    policy = replace(config.policy, calibration=kept)
    return replace(pipeline, matcher=pipeline.matcher.adjusted(policy=policy))


def judge(pipeline: Pipeline, pair_set: PairSet, stage: Stage = "network") -> list[JudgedPair]:
    """The matches of every pair of a set that has any; `pipeline` is that of `uncalibrated` at this stage.

    For geometry without the pairs whose geometry says nothing about single matches.
    """
    found = []
    for pair, (result,) in PairLoop(pair_set, [Method(pipeline.preset, pipeline)]):
        matches, errors = result.matches, errors_of(pair, result)
        if not len(errors) or (stage == "geometry" and not calibration.judges_matches(result.geometry)):
            continue
        if stage == "refinement":
            scale = result.features1.scale.tolist()
            evidence = calibration.refinement_evidence(matches, scale, len(result.passes) > 1)
        elif stage == "geometry":
            evidence = calibration.geometry_evidence(matches, result.geometry)
        else:
            counts = len(result.features0), len(result.features1)
            evidence = calibration.evidence(result.scores, counts)
        known = ~np.isnan(errors)
        found.append(JudgedPair(result.scores, evidence, known, known & (errors < CORRECT)))
    return found


def fit_calibration(sets: Sequence[tuple[Sequence[JudgedPair], float]]) -> np.ndarray:
    """The calibration under which the matches of all sets are most likely, each set with its weight.

    Returns:
        (1 + E,) the offset and the coefficients of the pairs' evidence, in two decimals: the numbers of the
        configuration of a stage, as `CalibrationConfig`.
    """
    values, right, weights = [], [], []
    for pairs, share in sets:
        weight = []
        for pair in pairs:
            judged = int(pair.known.sum())
            weight.append(
                np.full(judged, min(1.0, judged / _FEW) / max(1, judged))
            )  # a pair weighs 1 at most
            values.append(pair.evidence[pair.known])
            right.append(pair.right[pair.known])
        weights.append(share * np.concatenate(weight) / np.concatenate(weight).sum())
    weight = np.concatenate(weights)
    found = logistic_regression(np.concatenate(values), np.concatenate(right), weight / weight.mean())
    return np.round(np.asarray(found, dtype=np.float64), 2)


def error_under(pairs: Sequence[JudgedPair], numbers: np.ndarray | None) -> float:
    """Expected calibration error of a set under a calibration of `fit_calibration`, or without one."""
    said = [
        pair.scores
        if numbers is None
        else calibration.probabilities(numbers[0] + pair.evidence @ numbers[1:])
        for pair in pairs
    ]
    known = [each[pair.known] for each, pair in zip(said, pairs, strict=True)]
    return reliability(np.concatenate(known), np.concatenate([p.right[p.known] for p in pairs])).error


def training_pairs(
    photos: Path, count: int, multiview: Path | None = None, seed: int = 0
) -> Iterator[tuple[Pair, bool]]:
    """Pairs to fit the verdict on, each with whether it shows the same place.

    Same: `count` warps of photos, a quarter as many zooms, and views of each multi-view scene at most three
    images apart. Not: `count` unrelated photos, half as many photos of one source (which may look alike), and
    views of different scenes.

    Args:
        photos: folder of photos, in folders by source.
        count: how many of the first kinds.
        multiview: folder of scenes, each with its views below.
        seed: of everything that is drawn.
    """
    paths = find_images(photos)
    yield from ((pair, True) for pair in synthetic_set(paths, count=count, seed=seed).pairs)
    yield from ((pair, True) for pair in zoomed_set(paths, count=max(1, count // 4), seed=seed).pairs)
    yield from ((pair, False) for pair in unrelated_set(paths, count=count, seed=seed).pairs)
    rng = np.random.default_rng([seed, 1])
    sources = [group for group in _by_folder(paths) if len(group) > 1]
    sizes = np.array([len(group) for group in sources], dtype=np.float64)
    for _ in range(count // 2):
        group = sources[rng.choice(len(sources), p=sizes / sizes.sum())]
        yield _unlabelled(*(group[i] for i in rng.choice(len(group), 2, replace=False))), False
    if multiview is None:
        return
    scenes = [find_images(folder) for folder in sorted(multiview.iterdir()) if folder.is_dir()]
    for _ in range(count // 4):
        scene, other = (scenes[i] for i in rng.choice(len(scenes), 2, replace=False))
        first = int(rng.integers(len(scene) - 1))
        second = min(first + int(rng.integers(1, 4)), len(scene) - 1)
        yield _unlabelled(scene[first], scene[second]), True
        yield _unlabelled(scene[first], other[rng.integers(len(other))]), False


def fit_verdict(values: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the regression of `same` (P,) on evidence (P, E).

    Both classes weigh the same.
    """
    weight = np.where(same, 0.5 / same.mean(), 0.5 / (1 - same.mean()))
    return logistic_regression(values, same, weight)


def _by_folder(paths: Sequence[Path]) -> list[list[Path]]:
    return [list(group) for _, group in groupby(sorted(paths, key=lambda p: p.parent), lambda p: p.parent)]


def _unlabelled(path0: Path, path1: Path) -> UnrelatedPair:
    """Two files without ground truth."""
    name = f"{path0.parent.name}/{path0.name} {path1.parent.name}/{path1.name}"
    return UnrelatedPair(name, "", PairImage(path0), PairImage(path1))


# Trials: verdicts on pairs of different places, and what a threshold on them costs


def different_places(data: Path, unrelated: int, lookalikes: int, seed: int = 0) -> list[PairSet]:
    """Pairs of different places on which the verdict was not fitted, by kind.

    Args:
        data: holds `photos/val` in folders by source, `multiview/*/SCENE`, perhaps `bench/kitti_mini`. Photos
            of a source with twenty or more are lookalikes, such as façades of one city, and so are frames of
            a street 40 m apart.
        unrelated: pairs of photos of different sources, at most.
        lookalikes: pairs of photos of one source, and of different scenes, at most.
        seed: of what is drawn.

    Raises:
        UsageError: there are not two scenes.
    """
    rng = np.random.default_rng(seed)
    photos = find_images(data / "photos" / "val")
    different = [(a, b) for a, b in combinations(photos, 2) if a.parent != b.parent]
    alike = [pair for group in _by_folder(photos) if len(group) >= 20 for pair in combinations(group, 2)]
    folders = [folder for folder in sorted(data.glob("multiview/*/*")) if folder.is_dir()]
    scenes = [
        [p for p in find_images(folder) if not p.stem.endswith("_depth") and p.parent.name != "depth"]
        for folder in folders
    ]
    if len(scenes) < 2:
        raise UsageError(f"{data / 'multiview'}: pairs of different scenes need at least two scenes")
    kinds = [
        ("photos of different sources", different, unrelated),
        ("photos of one source", alike, lookalikes),
    ]
    street = data / "bench" / "kitti_mini"
    if street.is_dir():
        kinds.append(("frames of a street 40 m apart", distant_frames(street, 40.0), lookalikes))
    found = []
    for kind, pairs, count in kinds:
        drawn = [pairs[i] for i in rng.permutation(len(pairs))[:count]]
        found.append(PairSet(kind, "unrelated", [_unlabelled(*pair) for pair in drawn]))
    between = []
    for _ in range(lookalikes):
        chosen = (scenes[i] for i in rng.choice(len(scenes), 2, replace=False))
        between.append(_unlabelled(*(scene[rng.integers(len(scene))] for scene in chosen)))
    return [*found, PairSet("different scenes", "unrelated", between)]


def upper_bound(wrong: int, total: int) -> float:
    """The share of errors that is not exceeded with a confidence of 95 % (Wilson's score interval)."""
    if not total:
        return 1.0
    z = 1.645  # one-sided 95 %
    share, z2 = wrong / total, z * z / total
    return float((share + z2 / 2 + z * math.sqrt((share * (1 - share) + z2 / 4) / total)) / (1 + z2))
