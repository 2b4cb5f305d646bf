"""The model behind `Result.verdict`: its training pairs, its fit, and how well its probabilities hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from matcher.data.photos import find_images
from matcher.lab.evaluate.calibration import calibration_error
from matcher.lab.pairs.protocols import Pair, PairImage, UnrelatedPair
from matcher.lab.pairs.synthetic import synthetic_set, unrelated_set
from matcher.lab.pairs.zooms import zoomed_set
from matcher.loading import load
from matcher.pipeline import Pipeline
from matcher.verify.verdict import EVIDENCE, evidence

_RIDGE = 1e-3  # weight of the squared coefficients, for pairs that are told apart perfectly
_STEPS = 50
_NEIGHBOURS = 3  # images on within which two of a sequence show the same place


def training_pairs(
    photos: Path, count: int, multiview: Path | None = None, seed: int = 0
) -> Iterator[tuple[Pair, bool]]:
    """Pairs, each with whether it shows the same place.

    Same: `count` warps of photos, a quarter as many zooms, and neighbouring views of each multi-view scene.
    Not: `count` unrelated photos, half as many photos of one source (which may look alike), and views of
    different scenes.

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
        second = min(first + int(rng.integers(1, _NEIGHBOURS + 1)), len(scene) - 1)
        yield _unlabelled(scene[first], scene[second]), True
        yield _unlabelled(scene[first], other[rng.integers(len(other))]), False


def gather(
    photos: Path, count: int, preset: str, multiview: Path | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Evidence (P, E) of the training pairs, matched by a preset, and which show the same place (P,)."""
    pipeline = load(preset)
    rows = [
        (pair_evidence(pipeline, pair), same) for pair, same in training_pairs(photos, count, multiview, seed)
    ]
    return np.stack([row for row, _ in rows]), np.array([same for _, same in rows])


def pair_evidence(pipeline: Pipeline, pair: Pair) -> np.ndarray:
    """The evidence of one pair."""
    sources = (pair.image0, pair.image1)
    result = pipeline.match(*(s.path if s.pixels is None else s.pixels for s in sources))
    sizes = (features.image_size for features in (result.features0, result.features1))
    return evidence(result.matches, result.geometry, *sizes)


def fit(values: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the logistic regression of `same` (P,) on `values` (P, E).

    Both classes weigh the same.
    """
    return logistic_regression(values, same, np.where(same, 0.5 / same.mean(), 0.5 / (1 - same.mean())))


def logistic_regression(values: np.ndarray, same: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the regression of `same` (P,) on `values` (P, E), by Newton's method.

    Coefficients of the standardised evidence are drawn to zero a little; `weight` (P,) has a mean of about 1.
    """
    mean, deviation = values.mean(axis=0), values.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(values)), (values - mean) / deviation])
    ridge = np.diag([0.0, *np.full(values.shape[1], _RIDGE * len(values))])
    found = np.zeros(design.shape[1])
    for _ in range(_STEPS):
        probability = 1 / (1 + np.exp(-np.clip(design @ found, -30, 30)))
        gradient = design.T @ (weight * (probability - same)) + ridge @ found
        curvature = design.T @ (design * (weight * probability * (1 - probability))[:, None]) + ridge
        found -= np.linalg.solve(curvature + 1e-9 * np.eye(len(found)), gradient)
    coefficients = found[1:] / deviation
    return np.array([found[0] - coefficients @ mean, *coefficients])


def report(values: np.ndarray, same: np.ndarray, coefficients: np.ndarray) -> str:
    """The model as it stands in the library, and how it does on these pairs."""
    logits = coefficients[0] + values @ coefficients[1:]
    probability = 1 / (1 + np.exp(-np.clip(logits, -50, 50)))
    rows = zip(("bias", *EVIDENCE), coefficients, strict=True)
    return "\n".join(
        [
            f"COEFFICIENTS = ({', '.join(f'{value:.3f}' for value in coefficients)})",
            *(f"  {name}: {value:.3f}" for name, value in rows),
            f"{len(same)} pairs, {int(same.sum())} of the same place",
            f"called the same (p >= 0.9): {(probability[same] >= 0.9).mean():.3f} of these, "
            f"{(probability[~same] >= 0.9).mean():.4f} of the others",
            f"called different (p <= 0.1): {(probability[same] <= 0.1).mean():.4f} of these, "
            f"{(probability[~same] <= 0.1).mean():.3f} of the others",
            f"expected calibration error {calibration_error(probability, same):.3f}",
        ]
    )


def _by_folder(paths: list[Path]) -> list[list[Path]]:
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return list(folders.values())


def _unlabelled(path0: Path, path1: Path) -> UnrelatedPair:
    """Two files without ground truth."""
    return UnrelatedPair(f"{path0.name} {path1.name}", "", PairImage(path0), PairImage(path1))
