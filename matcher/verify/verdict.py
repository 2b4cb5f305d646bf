"""Whether two images show the same place, as a probability: logistic regression on the inliers of a pair.

Numbers of inliers alone cannot tell: dozens of matches along like edges agree on some geometry. So each
inlier counts with its match probability, and matches of repeated things or of an overlay are told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from matcher.config import GeometryKind
from matcher.types import Matches, Repetition, TwoViewGeometry, thinned
from matcher.verify.repetition import squared_distances

VerdictWord = Literal["same", "unsure", "not"]

# Bias and coefficients of `REGRESSORS`, fitted by scripts/fit.py; the last two each with the others as they
# are, as most pairs show nothing that repeats, and are sure without their neighbours.
COEFFICIENTS = (-7.331, 1.336, 4.232, 1.388, 6.0, 3.0)
REGRESSORS = ("probable inliers", "inlier ratio", "coverage", "unrepeated found", "neighbours agree")
SAME, NOT = 0.9, 0.1  # thresholds on the probability; between them the word is "unsure"
# Below it a geometry from several passes is not accepted. A match has two coordinates to agree with a
# homography, one with an epipolar line, so chance and like edges reach less.
ACCEPTED: dict[GeometryKind, float] = {
    "fundamental": 0.5,
    "essential": 0.32,
    "homography": 0.2,
    "homographies": 0.2,
}
# Where keypoints that do not repeat are found less often than this share of repeated ones, the things may be
# others of their kind, and the verdict must not be against it, below even odds.
SAME_THINGS, EVEN = 0.6, 0.5
_DOUBTED = 0.09  # `Repetition.differing` from which a verdict is unlikely at best; half of it is even odds
_UNLIKELY, _FROM_BEHIND = 0.05, 0.15  # of strange surroundings; of mirrored matches, as scans may be
_CERTAIN = (0.3, 0.4)  # share found of those that do not repeat: less of other things, else often more
_REVERSED = 0.15  # share of small triangles; accepted right pairs have below .1, nearly all below .05
_ALONE = (0.3, 0.5)  # share of inliers that do not repeat, from which their neighbours count, and wholly
_CORNERS = 64  # inliers whose neighbourhoods are looked at, and so many that chance seldom gathers them:
_OF_MANY = 0.3  # then of several passes, too, this is accepted; nearly all wrong ones of so many have less
_NEAR = 0.1  # error of an inlier foretold by its neighbours, divided by their distance from their mean
_AGREEING = (0.3, 0.6)  # share of such inliers that most wrong geometries stay below, and that says all
MIRRORED = "one image is mirrored (then flip it and match again), or they are wrong"  # of matches
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
    differing: bool = False  # whether what is around the matches is too unlike to be sure

    @property
    def word(self) -> VerdictWord:
        """ "same" from a probability of 0.9, "not" up to 0.1, else "unsure"."""
        if self.probability >= SAME:
            return "same"
        return "not" if self.probability <= NOT else "unsure"

    def __str__(self) -> str:
        why = "; repetitive: most matches are of things that occur several times" * self.repetitive
        why += "; what is around the matches differs" * self.differing
        return f"{_SENTENCES[self.word]} (probability of the same place {self.probability:.2f}{why})"

    def __repr__(self) -> str:
        return f"Verdict({self.word}, probability {self.probability:.2f})"


def verdict_of(
    matches: Matches, geometry: TwoViewGeometry, size0: tuple[float, float], size1: tuple[float, float]
) -> Verdict | None:
    """The verdict on a pair whose images have these stored (width, height); None without an estimate."""
    if geometry.status == "not_estimated":
        return None
    found, sure = probability(regressors(matches, geometry, size0, size1)), surest(geometry)
    found = min(found, _FROM_BEHIND if geometry.status == "mirrored" else sure)
    return Verdict(found, geometry.repetitive, found == sure < SAME)


def surest(geometry: TwoViewGeometry) -> float:
    """The largest probability of the same place that what is around the inliers allows."""
    doubt = _between(geometry.repetition.differing if geometry.repetition else 0.0, 0.0, _DOUBTED)
    return 1 - (1 - _UNLIKELY) * doubt**2 * (3 - 2 * doubt)


def probability(values: np.ndarray) -> float:
    """That two images show the same place, from the `regressors`."""
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
    if least is None:
        least = min(ACCEPTED[geometry.kind], _OF_MANY if geometry.inliers.sum() >= _CORNERS else 1.0)
    if probability(regressors(matches, geometry, size0, size1)) >= least:
        return geometry
    return replace(geometry, status="low_inliers")


def regressors(
    matches: Matches, geometry: TwoViewGeometry, size0: tuple[float, float], size1: tuple[float, float]
) -> np.ndarray:
    """(5,) what the verdict depends on, in the order of `REGRESSORS`.

    log(1 + the sum of the inliers' match probabilities); the inlier ratio; the square root of the share of
    the image area that the inliers span, the smaller one of both images; log of how often keypoints that do
    not repeat are found, divided by that of repeated ones, times the share of inliers that repeat. Where
    these are most, only those that do not repeat count for the first, unless of such keypoints so many are
    found that the place around the repeated ones is certain. By how much more inliers lie where their
    neighbours foretell than by chance, of what does not repeat; a homography foretells all.
    """
    inliers = geometry.inliers
    if not inliers.any():
        return np.zeros(len(REGRESSORS))
    scores = np.nan_to_num(np.asarray(matches.prior_scores[inliers], dtype=np.float64)).clip(0, 1)
    sides = ((matches.points0, size0), (matches.points1, size1))
    spans = []  # roots of the shares of both images that boxes around the middle 90 % of the inliers cover
    for points, size in sides:
        low, high = np.percentile(points[inliers], [5.0, 95.0], axis=0)
        spans.append(float(np.sqrt(np.prod((high - low) / np.asarray(size)))))
    repeated = geometry.repetition or Repetition(1.0, 1.0)
    certain = _between(repeated.share, *_CERTAIN) if repeated.found >= SAME_THINGS else 0.0
    support = scores.sum() * min(1.0, 2 * max(repeated.unrepeated, certain))
    found = (1 - repeated.unrepeated) * np.log(np.clip(repeated.found, 0.1, 1.0))
    agreeing = 0.0
    if geometry.repetition is not None and not geometry.kind.startswith("homograph"):
        share = _neighbour_agreement(matches.points0[inliers], matches.points1[inliers])
        agreeing = _between(share, *_AGREEING) * _between(repeated.unrepeated, *_ALONE)
    return np.array([np.log1p(support), inliers.mean(), min(spans), found, agreeing])


def _between(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on."""
    return float(np.clip((value - low) / (high - low), 0, 1))


def _neighbour_agreement(points0: np.ndarray, points1: np.ndarray) -> float:
    """Share of matched points (K, 2) that lie where an affine map of those around them has them in image 1.

    Matches of one surface agree locally, too; wrong ones that agree on a geometry are scattered along
    epipolar lines (GMS, Bian et al. 2017, section 3, counts neighbours). Of too few it says nothing: 0.
    """
    if len(points0) < _CORNERS:
        return 0.0
    corners, near = _neighbourhoods(points0)
    source, target = points0[near], points1[near]
    means = [side.mean(axis=1, keepdims=True) for side in (source, target)]
    source, target = source - means[0], target - means[1]
    spread = np.einsum("cki,ckj->cij", source, source)
    spread += (1e-2 * np.trace(spread, axis1=1, axis2=2)[:, None, None] + 1e-6) * np.eye(2)
    affine = np.linalg.solve(spread, np.einsum("cki,ckj->cij", source, target))
    foretold = means[1][:, 0] + np.einsum("ci,cij->cj", points0[corners] - means[0][:, 0], affine)
    radius = np.sqrt((target**2).sum(axis=2).mean(axis=1)) + 1e-6
    return float(np.mean(np.linalg.norm(foretold - points1[corners], axis=1) < _NEAR * radius))


def _neighbourhoods(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some of the points (K, 2), (C,), and the nearest others of each, (C, 8)."""
    corners = thinned(np.arange(len(points)), _CORNERS)
    apart = squared_distances(points[corners], points)
    apart[np.arange(len(corners)), corners] = np.inf
    return corners, np.argpartition(apart, 8, axis=1)[:, :8]


def reversed_share(points0: np.ndarray, points1: np.ndarray) -> float:
    """How many small triangles of matched points (K, 2) are turned over in image 1, in [0, 1].

    Two cameras see a surface from the same side, so that none of its triangles is; some are at edges in
    depth. Each triangle counts by the sines of its angles at one corner in both images.
    """
    if len(points0) < _CORNERS / 2:  # of so few it says nothing
        return 0.0
    (corners, near), weight = _neighbourhoods(points0), 1.0
    for points in (points0, points1):
        sides = points[near] - points[corners, None]
        sides = sides / (np.linalg.norm(sides, axis=2, keepdims=True) + 1e-6)
        one, other = np.split(sides, 2, axis=1)
        weight = weight * (one[..., 0] * other[..., 1] - one[..., 1] * other[..., 0])
    return float(-weight.clip(max=0).sum() / (np.abs(weight).sum() + 1e-6))


def judged(
    geometry: TwoViewGeometry,
    matches: Matches,
    size0: tuple[float, float],
    size1: tuple[float, float],
    repeated: Callable[[Matches, np.ndarray], Repetition | None],
) -> TwoViewGeometry:
    """The geometry with what its inliers (K,) bool repeat, which `repeated` tells; refused where that says
    that the place is another one, or where the matches are mirrored."""
    if geometry.status == "not_estimated":
        return geometry
    agreeing = geometry.inliers & geometry.verified
    for kept, most in ((agreeing, _REVERSED), (np.ones_like(agreeing), 4 * _REVERSED)):
        if reversed_share(matches.points0[kept], matches.points1[kept]) > most:
            return replace(geometry, status="mirrored", inliers=kept)
    if not geometry.verified or not geometry.inliers.any():
        return geometry
    found = repeated(matches, geometry.inliers)
    rejected = geometry.rejected and replace(geometry.rejected, repetition=found)
    geometry = replace(geometry, repetition=found, rejected=rejected)
    if found is None or not found.repetitive or found.found >= SAME_THINGS:
        return geometry
    return reject_improbable(geometry, matches, size0, size1, EVEN)
