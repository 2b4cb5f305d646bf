"""Whether two images show the same place, as a probability: logistic regression on the inliers of a pair.

Numbers of inliers alone cannot tell: dozens of matches along like edges agree on some geometry. So each
inlier counts with its match probability.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from matcher.config import GeometryKind
from matcher.data.matches import Matches, TwoViewGeometry

VerdictWord = Literal["same", "unsure", "not"]

# Bias and coefficients of `EVIDENCE`, fitted by scripts/fit_verdict.py; see measurements/verdict.md.
COEFFICIENTS = (-7.331, 1.336, 4.232, 1.388)
EVIDENCE = ("probable inliers", "inlier ratio", "coverage")
SAME, NOT = 0.9, 0.1  # thresholds on the probability; between them the word is "unsure"
# Below it a geometry from several passes is not accepted (measurements/verdict.md). A match has two
# coordinates to agree with a homography, one with an epipolar line, so chance and like edges reach less.
ACCEPTED: dict[GeometryKind, float] = {
    "fundamental": 0.5,
    "essential": 0.32,
    "homography": 0.2,
    "homographies": 0.2,
}
_TAIL = 5.0  # percent of the inliers on each side that are ignored in the coverage
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

    @property
    def word(self) -> VerdictWord:
        """ "same" from a probability of 0.9, "not" up to 0.1, else "unsure"."""
        if self.probability >= SAME:
            return "same"
        return "not" if self.probability <= NOT else "unsure"

    def __str__(self) -> str:
        return f"{_SENTENCES[self.word]} (probability of the same place {self.probability:.2f})"

    def __repr__(self) -> str:
        return f"Verdict({self.word}, probability {self.probability:.2f})"


def verdict_of(
    matches: Matches, geometry: TwoViewGeometry, size0: tuple[float, float], size1: tuple[float, float]
) -> Verdict | None:
    """The verdict on a pair; None if no geometry was estimated.

    Args:
        matches: of the pair.
        geometry: that was estimated from them.
        size0, size1: stored (width, height) of the images.
    """
    if geometry.status == "not_estimated":
        return None
    return Verdict(probability(evidence(matches, geometry, size0, size1)))


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

    The default, `ACCEPTED` for its kind, is meant for several passes, because each is another chance for
    wrong matches to agree. The other arguments are those of `verdict_of`.
    """
    if geometry.status != "ok":
        return geometry
    least = ACCEPTED[geometry.kind] if least is None else least
    if verdict_of(matches, geometry, size0, size1).probability >= least:
        return geometry
    return replace(geometry, status="low_inliers")


def evidence(
    matches: Matches, geometry: TwoViewGeometry, size0: tuple[float, float], size1: tuple[float, float]
) -> np.ndarray:
    """What the verdict depends on, in the order of `EVIDENCE`.

    Returns:
        (3,) log(1 + the sum of the inliers' match probabilities); the inlier ratio; the square root of the
        share of the image area that the inliers span, the smaller one of both images.
    """
    inliers = geometry.inliers
    if not inliers.any():
        return np.zeros(len(EVIDENCE))
    scores = np.nan_to_num(np.asarray(matches.prior_scores[inliers], dtype=np.float64)).clip(0, 1)
    sides = ((matches.points0, size0), (matches.points1, size1))
    coverage = min(_span(points[inliers], size) for points, size in sides)
    return np.array([np.log1p(scores.sum()), inliers.mean(), coverage])


def _span(points: np.ndarray, size: tuple[float, float]) -> float:
    """Root of the share of an image's area that a box around most of the points covers."""
    low, high = np.percentile(points, [_TAIL, 100 - _TAIL], axis=0)
    return float(np.sqrt(np.prod((high - low) / np.asarray(size))))
