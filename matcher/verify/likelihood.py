"""How likely a geometry is, which chooses between hypotheses, and whether chance explains its inliers."""

from __future__ import annotations

from math import lgamma, log, pi, sqrt

import numpy as np

from matcher.verify.adjustment import TINY, MatchedPoints, sampson

_PROBABLE = (0.02, 0.95)  # match probabilities are not taken for smaller or larger: none is certain
_UNKNOWN = 0.5  # of a match without one
SCORE_STEPS = 65535  # of a run's scores; no finer ones count here, so that its pairs verify again as they did
_REACH = 500.0  # pixels of the resized image: how far from its place a wrong match may lie


def probabilities(scores: np.ndarray | None, count: int) -> np.ndarray:
    """(count,) match probabilities from scores, the same for all where there are none."""
    if scores is None:
        return np.full(count, _UNKNOWN)
    known = np.nan_to_num(np.asarray(scores, dtype=np.float32)).clip(0, 1)
    return (np.rint(known * np.float32(SCORE_STEPS)).astype(np.float64) / SCORE_STEPS).clip(*_PROBABLE)


def epipolar_likelihood(
    fundamental: np.ndarray, matched: MatchedPoints, possible: np.ndarray | None = None
) -> float:
    """Logarithm of how much likelier N matches are with this fundamental matrix than if all were wrong.

    `possible` (N,) is False for a match that this geometry excludes, as one behind a camera.
    """
    density = half_normal(*epipolar_residuals(fundamental, matched))
    return _of_mixture((density if possible is None else density * possible) * _REACH, matched)


def epipolar_residuals(fundamental: np.ndarray, matched: MatchedPoints) -> tuple[np.ndarray, np.ndarray]:
    """Sampson's distances (N,) and their standard deviations (N,), pixels."""
    distance, variances = sampson(*matched.sides, fundamental), matched.variances
    lines1 = matched.points0 @ fundamental[:, :2].T + fundamental[:, 2]
    across0 = np.sum((matched.points1 @ fundamental[:2] + fundamental[2])[:, :2] ** 2, axis=1)
    a, b = lines1[:, 0], lines1[:, 1]
    variance = a**2 * variances.xx + 2 * a * b * variances.xy + b**2 * variances.yy
    variance += across0 * variances.image0
    return distance, np.sqrt(np.maximum(variance, TINY) / np.maximum(a**2 + b**2 + across0, TINY))


def half_normal(distance: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Densities (N,) of distances (N,) of right matches, per pixel."""
    with np.errstate(over="ignore", under="ignore"):
        return 2 / sqrt(2 * pi) / deviation * np.exp(-0.5 * (distance / deviation) ** 2)


def homography_likelihood(homography: np.ndarray, matched: MatchedPoints) -> float:
    """As `epipolar_likelihood`, of a homography (3, 3) that has the points of image 0 before its horizon."""
    moved = matched.points0 @ homography[:, :2].T + homography[:, 2]
    before, variances = moved[:, 2] > 0, matched.variances
    dx, dy = (moved[:, :2] / np.where(before, moved[:, 2], 1.0)[:, None] - matched.points1).T
    determinant = np.maximum(variances.xx * variances.yy - variances.xy**2, TINY)
    with np.errstate(over="ignore", under="ignore"):
        exponent = (variances.yy * dx**2 - 2 * variances.xy * dx * dy + variances.xx * dy**2) / determinant
        density = np.exp(-0.5 * exponent) / (2 * pi * np.sqrt(determinant)) * before
    return _of_mixture(density * _REACH**2, matched)


def _of_mixture(relative_density: np.ndarray, matched: MatchedPoints) -> float:
    """From each match's density if it is right, divided by that of wrong ones."""
    return float(matched.weights @ np.log1p(matched.probable * (relative_density - 1)))


def chance_inlier(points0: np.ndarray, points1: np.ndarray, threshold: float, homography: bool) -> float:
    """Probability that a random match is an inlier: its region's share of the area that the points span."""
    shares = []
    for points in (points0, points1):
        width, height = np.maximum(np.ptp(points, axis=0), 1.0)
        band = 2 * sqrt(2) * threshold * np.hypot(width, height)  # Sampson: √2 times the distance to the line
        shares.append((pi * threshold**2 if homography else band) / (width * height))
    return float(min(1.0, shares[1] if homography else max(shares)))


def log_false_alarms(count: int, inliers: int, minimum: int, chance: float) -> float:
    """Logarithm of how many models with that many inliers `count` random matches would give.

    Moisan and Stival, A probabilistic criterion to detect rigid point matches, IJCV 2004, section 3.
    """
    if inliers <= minimum:
        return 0.0

    def log_choose(n: int, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    models = log(count - minimum) + log_choose(count, inliers) + log_choose(inliers, minimum)
    return models + (inliers - minimum) * log(chance)
