"""Whether two images show the same place, as a probability: logistic regression on the inliers of a pair.

Numbers of inliers alone cannot tell: dozens of matches along like edges agree on some geometry. So each
inlier counts with its match probability.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import Literal

import numpy as np

from matcher.config import GeometryKind
from matcher.types import Matches, Repetition, TwoViewGeometry
from matcher.verify.adjustment import MatchedPoints, sampson

VerdictWord = Literal["same", "unsure", "not"]

# Bias and coefficients of `EVIDENCE`, fitted by scripts/fit.py; the last one with the others as they are, as
# most pairs show nothing that repeats.
COEFFICIENTS = (-7.331, 1.336, 4.232, 1.388, 6.0)
EVIDENCE = ("probable inliers", "inlier ratio", "coverage", "unrepeated keypoints found")
SAME, NOT = 0.9, 0.1  # thresholds on the probability; between them the word is "unsure"
# Below it a geometry from several passes is not accepted. A match has two
# coordinates to agree with a homography, one with an epipolar line, so chance and like edges reach less.
ACCEPTED: dict[GeometryKind, float] = {
    "fundamental": 0.5,
    "essential": 0.32,
    "homography": 0.2,
    "homographies": 0.2,
}
_SENTENCES: dict[VerdictWord, str] = {
    "same": "the images show the same place",
    "unsure": "the images may show the same place",
    "not": "the images show different places, or too little of one",
}


@dataclass(frozen=True)
class Verdict:
    """Whether two images show the same place.

    >>> Verdict(0.97)
    Verdict(same, probability 0.97)
    """

    probability: float  # that they do
    repetitive: bool = False  # whether most that agrees is of things that occur several times

    @property
    def word(self) -> VerdictWord:
        """ "same" from a probability of 0.9, "not" up to 0.1, else "unsure"."""
        if self.probability >= SAME:
            return "same"
        return "not" if self.probability <= NOT else "unsure"

    def __str__(self) -> str:
        repetitive = "; repetitive: most matches are of things that occur several times" * self.repetitive
        return f"{_SENTENCES[self.word]} (probability of the same place {self.probability:.2f}{repetitive})"

    def __repr__(self) -> str:
        return f"Verdict({self.word}, probability {self.probability:.2f})"


def verdict_of(
    matches: Matches, geometry: TwoViewGeometry, size0: tuple[float, float], size1: tuple[float, float]
) -> Verdict | None:
    """The verdict on a pair whose images have these stored (width, height); None without an estimate."""
    if geometry.status == "not_estimated":
        return None
    repeated = geometry.repetition
    repetitive = repeated is not None and repeated.repetitive
    return Verdict(probability(evidence(matches, geometry, size0, size1)), repetitive)


def probability(values: np.ndarray) -> float:
    """That two images show the same place, from the `evidence`."""
    logit = COEFFICIENTS[0] + float(np.dot(COEFFICIENTS[1:], values))
    return float(1 / (1 + np.exp(-np.clip(logit, -50, 50))))


def reject_improbable(
    geometry: TwoViewGeometry,
    matches: Matches,
    size0: tuple[float, float],
    size1: tuple[float, float],
    least: float | None = None,
) -> TwoViewGeometry:
    """The geometry, with status `low_inliers` if the probability of the same place is below `least`.

    The default, `ACCEPTED` for its kind, is for several passes: each is a chance for wrong matches to agree.
    """
    if not geometry.verified:
        return geometry
    least = ACCEPTED[geometry.kind] if least is None else least
    if verdict_of(matches, geometry, size0, size1).probability >= least:
        return geometry
    return replace(geometry, status="low_inliers")


def evidence(
    matches: Matches, geometry: TwoViewGeometry, size0: tuple[float, float], size1: tuple[float, float]
) -> np.ndarray:
    """(4,) what the verdict depends on, in the order of `EVIDENCE`.

    log(1 + the sum of the inliers' match probabilities); the inlier ratio; the square root of the share of
    the image area that the inliers span, the smaller one of both images; log of how often keypoints that do
    not repeat are found, divided by that of repeated ones, times the share of inliers that repeat. Where
    these are most, only those that do not repeat count for the first.
    """
    inliers = geometry.inliers
    if not inliers.any():
        return np.zeros(len(EVIDENCE))
    scores = np.nan_to_num(np.asarray(matches.prior_scores[inliers], dtype=np.float64)).clip(0, 1)
    sides = ((matches.points0, size0), (matches.points1, size1))
    spans = []  # roots of the shares of both images that boxes around the middle 90 % of the inliers cover
    for points, size in sides:
        low, high = np.percentile(points[inliers], [5.0, 95.0], axis=0)
        spans.append(float(np.sqrt(np.prod((high - low) / np.asarray(size)))))
    repeated = geometry.repetition or Repetition(1.0, 1.0)
    support = scores.sum() * min(1.0, 2 * repeated.unrepeated)
    found = (1 - repeated.unrepeated) * np.log(np.clip(repeated.found, 0.1, 1.0))
    return np.array([np.log1p(support), inliers.mean(), min(spans), found])


# Likelihood of a geometry, which chooses between hypotheses

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
    fundamental: np.ndarray, matched: MatchedPoints, possible: np.ndarray | None = None
) -> float:
    """Logarithm of how much likelier N matches are with this fundamental matrix than if all were wrong.

    `possible` (N,) is False for a match that this geometry excludes, as one behind a camera.
    """
    density = half_normal(*epipolar_residuals(fundamental, matched))
    return _of_mixture((density if possible is None else density * possible) * _REACH, matched)


def epipolar_residuals(fundamental: np.ndarray, matched: MatchedPoints) -> tuple[np.ndarray, np.ndarray]:
    """Sampson's distances (N,) and their standard deviations (N,), pixels."""
    distance, spread = sampson(*matched.sides, fundamental), matched.spread
    lines1 = matched.points0 @ fundamental[:, :2].T + fundamental[:, 2]
    across0 = np.sum((matched.points1 @ fundamental[:2] + fundamental[2])[:, :2] ** 2, axis=1)
    a, b = lines1[:, 0], lines1[:, 1]
    variance = a**2 * spread.xx + 2 * a * b * spread.xy + b**2 * spread.yy + across0 * spread.first
    return distance, np.sqrt(np.maximum(variance, _TINY) / np.maximum(a**2 + b**2 + across0, _TINY))


def half_normal(distance: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Densities (N,) of distances (N,) of right matches, per pixel."""
    with np.errstate(over="ignore", under="ignore"):
        return 2 / sqrt(2 * pi) / deviation * np.exp(-0.5 * (distance / deviation) ** 2)


def homography_likelihood(homography: np.ndarray, matched: MatchedPoints) -> float:
    """The same with a homography (3, 3) that has the points of image 0 before its horizon."""
    moved = matched.points0 @ homography[:, :2].T + homography[:, 2]
    before, spread = moved[:, 2] > 0, matched.spread
    dx, dy = (moved[:, :2] / np.where(before, moved[:, 2], 1.0)[:, None] - matched.points1).T
    determinant = np.maximum(spread.xx * spread.yy - spread.xy**2, _TINY)
    with np.errstate(over="ignore", under="ignore"):
        exponent = (spread.yy * dx**2 - 2 * spread.xy * dx * dy + spread.xx * dy**2) / determinant
        density = np.exp(-0.5 * exponent) / (2 * pi * np.sqrt(determinant)) * before
    return _of_mixture(density * _REACH**2, matched)


def _of_mixture(relative_density: np.ndarray, matched: MatchedPoints) -> float:
    """From each match's density if it is right, divided by that of wrong ones."""
    return float(matched.weights @ np.log1p(matched.probable * (relative_density - 1)))
