"""How likely a two-view geometry makes the matches: what chooses between hypotheses of several thresholds.

A match is right with its match probability, and then lies off its epipolar line by a normal distribution as
wide as its position is uncertain; else it is wrong, and lies anywhere (MLESAC, Torr and Zisserman 2000, with
each match's own probability and variance). Matches close together count less than others, as their errors are
alike (`MatchedPoints.weights`). Likelihoods can be compared where numbers of inliers of different thresholds
cannot.
"""

from __future__ import annotations

from math import pi, sqrt

import numpy as np

from matcher.verify.adjustment import Spread
from matcher.verify.distances import sampson
from matcher.verify.hypotheses import MatchedPoints

_PROBABLE = (0.02, 0.95)  # match probabilities are not taken for smaller or larger: none is certain
_UNKNOWN = 0.5  # of a match without one
_STEPS = 65535  # as exactly as a run keeps scores, so that its pairs verify again as they did
_TINY = 1e-300
_REACH = 500.0  # pixels of the resized image: how far from its place a wrong match may lie


def probabilities(scores: np.ndarray | None, count: int) -> np.ndarray:
    """(count,) match probabilities from scores; the same for all where there are none."""
    if scores is None:
        return np.full(count, _UNKNOWN)
    known = np.nan_to_num(np.asarray(scores, dtype=np.float32)).clip(0, 1)
    return (np.rint(known * np.float32(_STEPS)).astype(np.float64) / _STEPS).clip(*_PROBABLE)


def epipolar_likelihood(
    fundamental: np.ndarray, matched: MatchedPoints, spread: Spread, possible: np.ndarray | None = None
) -> float:
    """Logarithm of how much likelier the matches are with this epipolar geometry than if all were wrong.

    Args:
        fundamental: (3, 3), resized pixels.
        matched: the N matches.
        spread: of their points.
        possible: (N,) bool, False for a match that this geometry excludes, as one behind a camera.
    """
    distance = sampson(*matched.sides, fundamental)
    deviation = _deviations(fundamental, *matched.sides, spread)
    with np.errstate(over="ignore", under="ignore"):
        density = 2 / sqrt(2 * pi) / deviation * np.exp(-0.5 * (distance / deviation) ** 2)
    density = density if possible is None else density * possible
    return _of_mixture(density * _REACH, matched)


def homography_likelihood(homography: np.ndarray, matched: MatchedPoints, spread: Spread) -> float:
    """The same with a homography (3, 3) that has the points of image 0 before its horizon."""
    moved = matched.points0 @ homography[:, :2].T + homography[:, 2]
    before = moved[:, 2] > 0
    dx, dy = (moved[:, :2] / np.where(before, moved[:, 2], 1.0)[:, None] - matched.points1).T
    determinant = np.maximum(spread.xx * spread.yy - spread.xy**2, _TINY)
    with np.errstate(over="ignore", under="ignore"):
        exponent = (spread.yy * dx**2 - 2 * spread.xy * dx * dy + spread.xx * dy**2) / determinant
        density = np.exp(-0.5 * exponent) / (2 * pi * np.sqrt(determinant)) * before
    return _of_mixture(density * _REACH**2, matched)


def _of_mixture(relative_density: np.ndarray, matched: MatchedPoints) -> float:
    """From each match's density if it is right, divided by that of wrong ones."""
    return float(matched.weights @ np.log1p(matched.probable * (relative_density - 1)))


def _deviations(
    fundamental: np.ndarray, points0: np.ndarray, points1: np.ndarray, spread: Spread
) -> np.ndarray:
    """(N,) standard deviations of Sampson's distances, pixels."""
    lines1 = points0 @ fundamental[:, :2].T + fundamental[:, 2]
    across0 = np.sum((points1 @ fundamental[:2] + fundamental[2])[:, :2] ** 2, axis=1)
    a, b = lines1[:, 0], lines1[:, 1]
    variance = a**2 * spread.xx + 2 * a * b * spread.xy + b**2 * spread.yy + across0 * spread.first
    return np.sqrt(np.maximum(variance, _TINY) / np.maximum(a**2 + b**2 + across0, _TINY))
