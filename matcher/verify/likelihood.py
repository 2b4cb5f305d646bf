"""How likely a two-view geometry makes the matches: what chooses between hypotheses of several thresholds.

A match is right with its match probability, and then lies off its epipolar line by a normal distribution as
wide as its position is uncertain; else it is wrong, and lies anywhere (MLESAC, Torr and Zisserman 2000, with
each match's own probability and variance). Numbers of inliers of different thresholds cannot be compared,
likelihoods can.
"""

from __future__ import annotations

from math import pi, sqrt

import numpy as np

from matcher.verify.adjustment import Spread
from matcher.verify.distances import sampson

_PROBABLE = (0.02, 0.95)  # match probabilities are not taken for smaller or larger: none is certain
_UNKNOWN = 0.5  # of a match without one
_TINY = 1e-300
_REACH = 500.0  # pixels of the resized image: how far from its epipolar line a wrong match may lie


def probabilities(scores: np.ndarray | None, count: int) -> np.ndarray:
    """(count,) match probabilities from scores; the same for all where there are none."""
    if scores is None:
        return np.full(count, _UNKNOWN)
    return np.nan_to_num(np.asarray(scores, dtype=np.float64)).clip(*_PROBABLE)


def log_likelihood(
    fundamental: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    spread: Spread,
    probable: np.ndarray,
    possible: np.ndarray | None = None,
) -> float:
    """Logarithm of how much likelier the matches are with this epipolar geometry than if all were wrong.

    Args:
        fundamental: (3, 3), pixels of the resized images, as all that follow.
        points0, points1: (N, 2).
        spread: of these points.
        probable: (N,) match probabilities below 1.
        possible: (N,) bool, False for a match that this geometry excludes, as one behind a camera.
    """
    distance = sampson(points0, points1, fundamental)
    deviation = _deviations(fundamental, points0, points1, spread)
    with np.errstate(over="ignore", under="ignore"):
        density = 2 / sqrt(2 * pi) / deviation * np.exp(-0.5 * (distance / deviation) ** 2)
    if possible is not None:
        density = density * possible
    return float(np.log1p(probable * (density * _REACH - 1)).sum())


def _deviations(
    fundamental: np.ndarray, points0: np.ndarray, points1: np.ndarray, spread: Spread
) -> np.ndarray:
    """(N,) standard deviations of Sampson's distances, pixels."""
    lines1 = points0 @ fundamental[:, :2].T + fundamental[:, 2]
    across0 = np.sum((points1 @ fundamental[:2] + fundamental[2])[:, :2] ** 2, axis=1)
    a, b = lines1[:, 0], lines1[:, 1]
    variance = a**2 * spread.xx + 2 * a * b * spread.xy + b**2 * spread.yy + across0 * spread.first
    return np.sqrt(np.maximum(variance, _TINY) / np.maximum(a**2 + b**2 + across0, _TINY))
