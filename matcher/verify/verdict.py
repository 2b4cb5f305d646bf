"""Whether two images show the same place, as a probability: logistic regression on the inliers of a pair.

Numbers of inliers alone cannot tell: dozens of matches along like edges agree on some geometry. So each
inlier counts with its match probability, and matches of repeated things or of an overlay are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import Literal

import cv2
import numpy as np

from matcher.config import GeometryKind
from matcher.types import Features, Matches, Repetition, TwoViewGeometry, to_numpy
from matcher.verify.adjustment import MatchedPoints, sampson

VerdictWord = Literal["same", "unsure", "not"]

# Bias and coefficients of `REGRESSORS`, fitted by scripts/fit.py; the last one with the others as they are,
# as most pairs show nothing that repeats.
COEFFICIENTS = (-7.331, 1.336, 4.232, 1.388, 6.0)
REGRESSORS = ("probable inliers", "inlier ratio", "coverage", "unrepeated keypoints found")
SAME, NOT = 0.9, 0.1  # thresholds on the probability; between them the word is "unsure"
# Below it a geometry from several passes is not accepted. A match has two
# coordinates to agree with a homography, one with an epipolar line, so chance and like edges reach less.
ACCEPTED: dict[GeometryKind, float] = {
    "fundamental": 0.5,
    "essential": 0.32,
    "homography": 0.2,
    "homographies": 0.2,
}
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
    found = probability(regressors(matches, geometry, size0, size1))
    return Verdict(min(found, UNSURE) if geometry.status == "mirrored" else found, repetitive)


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
    least = ACCEPTED[geometry.kind] if least is None else least
    if verdict_of(matches, geometry, size0, size1).probability >= least:
        return geometry
    return replace(geometry, status="low_inliers")


def regressors(
    matches: Matches, geometry: TwoViewGeometry, size0: tuple[float, float], size1: tuple[float, float]
) -> np.ndarray:
    """(4,) what the verdict depends on, in the order of `REGRESSORS`.

    log(1 + the sum of the inliers' match probabilities); the inlier ratio; the square root of the share of
    the image area that the inliers span, the smaller one of both images; log of how often keypoints that do
    not repeat are found, divided by that of repeated ones, times the share of inliers that repeat. Where
    these are most, only those that do not repeat count for the first, unless of such keypoints so many are
    found that the place around the repeated ones is certain.
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
    certain = (repeated.share - _SHARE[0]) / (_SHARE[1] - _SHARE[0]) * (repeated.found >= ANOTHER)
    support = scores.sum() * min(1.0, 2 * max(repeated.unrepeated, certain))
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
    distance, variances = sampson(*matched.sides, fundamental), matched.variances
    lines1 = matched.points0 @ fundamental[:, :2].T + fundamental[:, 2]
    across0 = np.sum((matched.points1 @ fundamental[:2] + fundamental[2])[:, :2] ** 2, axis=1)
    a, b = lines1[:, 0], lines1[:, 1]
    variance = a**2 * variances.xx + 2 * a * b * variances.xy + b**2 * variances.yy
    variance += across0 * variances.image0
    return distance, np.sqrt(np.maximum(variance, _TINY) / np.maximum(a**2 + b**2 + across0, _TINY))


def half_normal(distance: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Densities (N,) of distances (N,) of right matches, per pixel."""
    with np.errstate(over="ignore", under="ignore"):
        return 2 / sqrt(2 * pi) / deviation * np.exp(-0.5 * (distance / deviation) ** 2)


def homography_likelihood(homography: np.ndarray, matched: MatchedPoints) -> float:
    """The same with a homography (3, 3) that has the points of image 0 before its horizon."""
    moved = matched.points0 @ homography[:, :2].T + homography[:, 2]
    before, variances = moved[:, 2] > 0, matched.variances
    dx, dy = (moved[:, :2] / np.where(before, moved[:, 2], 1.0)[:, None] - matched.points1).T
    determinant = np.maximum(variances.xx * variances.yy - variances.xy**2, _TINY)
    with np.errstate(over="ignore", under="ignore"):
        exponent = (variances.yy * dx**2 - 2 * variances.xy * dx * dy + variances.xx * dy**2) / determinant
        density = np.exp(-0.5 * exponent) / (2 * pi * np.sqrt(determinant)) * before
    return _of_mixture(density * _REACH**2, matched)


def _of_mixture(relative_density: np.ndarray, matched: MatchedPoints) -> float:
    """From each match's density if it is right, divided by that of wrong ones."""
    return float(matched.weights @ np.log1p(matched.probable * (relative_density - 1)))


# Matches that agree but say nothing of the place: of repeated things, and of an overlay over both pictures.
#
# Repeated things, wallpaper, equal windows, tiles, letters, agree with a geometry though the images may show
# other ones of the same things. An image says by itself what it repeats: a keypoint with nearly the same
# descriptor elsewhere. In images of one place the keypoints that do not repeat find their partners as often
# as the repeated ones around them; between two walls with one paper they do not.
#
# What lies over both pictures, a stamp, logo, display or frame, does not move by a pixel. So do all matches
# of a camera that stands still; but these lie everywhere, and so do keypoints without a match.

SAME_POINT = 1.5  # pixels of the resized images within which points are one
# Similarity to the most similar descriptor elsewhere, of a keypoint that does not repeat and of one that
# does; each front end has its own scale.
_SIMILAR = {"learned": (0.7, 0.9), "sift": (0.92, 0.99), "xfeat": (0.87, 0.95), "aliked": (0.7, 0.9)}
_ELSEWHERE = 16.0  # pixels of the resized image
_CELL = 64.0  # pixels of the resized image, around inliers, in which keypoints are counted
_SAMPLE = 400  # keypoints of an image that are compared with all others
_GLANCE = 64  # matches that give a first impression
_SCARCELY = 0.75  # share of unrepeated ones above which no closer look is needed
_PSEUDO = 8.0  # keypoints added to the unrepeated ones that are counted, matched as often as repeated ones
_SHARE = (0.3, 0.4)  # found of the unrepeated ones: less between other things of a kind, else often more


def repetition(
    features0: Features, features1: Features, matches: Matches, inliers: np.ndarray
) -> Repetition | None:
    """That of a pair with inliers (K,) bool; None where nothing is known.

    The keypoints of the features count that are inliers, or that lie where further passes found some.
    """
    if not {features0.kind, features1.kind} <= _SIMILAR.keys() or not inliers.any():
        return None
    own = np.all(matches.indices[inliers] < [len(features0), len(features1)], axis=1)
    sides = []
    for features, index, points in zip(
        (features0, features1), matches.indices[inliers].T, (matches.points0, matches.points1), strict=True
    ):
        scale, index = to_numpy(features.scale), index[own]
        keypoints = to_numpy(features.keypoints) * scale
        places = keypoints[index]
        if not own.all():
            others = points[inliers][~own] * scale
            apart = np.linalg.norm(keypoints[:, None] - others, axis=2)
            index = np.union1d(index, np.flatnonzero(apart.min(axis=1) < SAME_POINT))
            places = np.concatenate([places, others])
        cells, near = (np.floor(each / _CELL).astype(int) @ [1 << 20, 1] for each in (keypoints, places))
        around = np.flatnonzero(np.isin(cells, near))
        if not len(around) or not features.descriptors.shape[1]:
            return None
        sides.append((features, keypoints, index, around))
    if own.all():  # of several passes the closer look takes no time that matters
        glance = [unrepeated(*side[:2], side[2][:: -(-len(side[2]) // _GLANCE)]).mean() for side in sides]
        if min(glance) > _SCARCELY:
            return Repetition(float(min(glance)), 1.0)
    found = [_counted(*side) for side in sides]
    return Repetition(*(float(min(values)) for values in zip(*found, strict=True)))


def unrepeated(features: Features, points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How little keypoints in some rows (R,) resemble others elsewhere in their image, (R,) in [0, 1]; the
    points (N, 2) of all are pixels of the resized image."""
    descriptors = to_numpy(features.descriptors).astype(np.float32)
    similar = descriptors[rows] @ descriptors.T
    x, y = points.astype(np.float32).T
    near = (x[rows, None] - x) ** 2 + (y[rows, None] - y) ** 2 <= _ELSEWHERE**2
    similar[near] = -1.0
    unique, repeated = _SIMILAR[features.kind]
    return ((repeated - similar.max(axis=1)) / (repeated - unique)).clip(0, 1)


def repeated_groups(features: Features) -> np.ndarray:
    """(N,) int64 groups of keypoints that look alike all over an image, the largest 0; −1: none."""
    descriptors, points = to_numpy(features.descriptors), to_numpy(features.keypoints)
    groups = np.full(len(points), -1)
    if features.kind not in _SIMILAR or not len(points):
        return groups
    scaled = points * to_numpy(features.scale)
    alike = descriptors @ descriptors.T >= _SIMILAR[features.kind][1]
    alike &= np.linalg.norm(scaled[:, None] - scaled, axis=2) > _ELSEWHERE
    counts, number = alike.sum(axis=1), 0
    while counts.any():
        members = alike[counts.argmax()].copy()
        members[counts.argmax()] = True
        groups[members] = number
        counts, number = (counts - alike[:, members].sum(axis=1)) * ~members, number + 1
        alike[members], alike[:, members] = False, False
    return groups


def _counted(
    features: Features, points: np.ndarray, index: np.ndarray, around: np.ndarray
) -> tuple[float, float, float]:
    """`Repetition` of one image: `around` are the keypoints near inliers, `index` those that are inliers."""
    rows = around[:: -(-len(around) // _SAMPLE)]
    alone, matched = unrepeated(features, points, rows), np.isin(rows, index)
    often = ((1 - alone) @ matched + 1e-6) / ((1 - alone).sum() + 1e-6)
    # Corners of windows are a little alike, and other façades have their like: only what is like nothing
    # tells which one it is. By a power of 4 three of 150 wrong training pairs are sure no more.
    wholly = alone**4
    found = (wholly @ matched + _PSEUDO * often) / ((wholly.sum() + _PSEUDO) * often)
    share = alone @ matched / alone.sum() if alone.sum() >= _PSEUDO else 0.0  # of fewer it says nothing
    return float(alone @ matched / max(matched.sum(), 1)), float(found), float(share)


# Where what does not repeat is found less often than this share of what does, the things may be others of
# their kind, and the verdict must not be against it.
ANOTHER, UNSURE = 0.6, 0.5
_REVERSED = 0.15  # share of small triangles; accepted right pairs have below .1, nearly all below .05


def reversed_share(points0: np.ndarray, points1: np.ndarray) -> float:
    """How many small triangles of matched points (K, 2) are turned over in image 1, in [0, 1].

    Two cameras see a surface from the same side, so that none of its triangles is; some are at edges in
    depth. Each triangle counts by the sines of its angles at one corner in both images.
    """
    if len(points0) < _GLANCE / 2:  # fewer say nothing
        return 0.0
    corners = np.arange(len(points0))[:: -(-len(points0) // _GLANCE)]
    apart = ((points0[corners, None] - points0) ** 2).sum(axis=2)
    near, weight = np.argpartition(apart, 8, axis=1)[:, :8], 1.0
    for points in (points0, points1):
        sides = points[near] - points[corners, None]
        sides = sides / (np.linalg.norm(sides, axis=2, keepdims=True) + 1e-6)
        one, other = np.split(sides, 2, axis=1)
        weight = weight * (one[..., 0] * other[..., 1] - one[..., 1] * other[..., 0])
    return float(-weight.clip(max=0).sum() / (np.abs(weight).sum() + 1e-6))


def judged(
    geometry: TwoViewGeometry, features0: Features, features1: Features, matches: Matches
) -> TwoViewGeometry:
    """The geometry with what its inliers repeat; refused where that says that the place is another one, or
    where the matches are mirrored."""
    if geometry.status == "not_estimated":
        return geometry
    agreeing = geometry.inliers & geometry.verified
    for kept, most in ((agreeing, _REVERSED), (np.ones_like(agreeing), 4 * _REVERSED)):
        if reversed_share(matches.points0[kept], matches.points1[kept]) > most:
            return replace(geometry, status="mirrored", inliers=kept)
    if not geometry.verified or not geometry.inliers.any():
        return geometry
    found = repetition(features0, features1, matches, geometry.inliers)
    rejected = geometry.rejected and replace(geometry.rejected, repetition=found)
    geometry = replace(geometry, repetition=found, rejected=rejected)
    if found is None or not found.repetitive or found.found >= ANOTHER:
        return geometry
    return reject_improbable(geometry, matches, features0.image_size, features1.image_size, UNSURE)


_MOVING = 4.0  # as many matches that move less than this are of a scene that moves a little
_FEWEST = 6  # matches that do not move; fewer say nothing
_AROUND = 16.0  # pixels around these that may belong to the overlay
_EVERYWHERE = 0.1  # share of the keypoints; where so many do not move in most blocks, nothing moves
_IN_MIDDLE = 0.02  # share of the keypoints within a mount that may seem to move as it does
_CONTROLS = ((9, 4), (-5, 8), (4, -9), (-8, -5))  # pixels: where keypoints coincide by chance only


def on_overlay(features0: Features, features1: Features, matches: Matches) -> np.ndarray:
    """(K,) bool: matches on an overlay that both pictures have; none where they were taken from one place.

    It does not move; on scans it may be a mount around the pictures, which moves by a similarity.
    """
    none = np.zeros(len(matches), dtype=bool)
    if len(matches) < _FEWEST:
        return none
    scale0, scale1 = (to_numpy(f.scale).astype(np.float64) for f in (features0, features1))
    every = [to_numpy(features0.keypoints) * scale0, to_numpy(features1.keypoints) * scale1]
    points0, points1 = matches.points0 * scale0, matches.points1 * scale1
    size = np.ceil(np.array(features1.image_size) * scale1).astype(int) + 1
    low, high = np.full(2, -0.5), size - 0.5
    moved = np.linalg.norm(points1 - points0, axis=1)
    if mount := features0.image_size != features1.image_size or np.sum(moved < SAME_POINT) < _FEWEST:
        low, high = points1.min(axis=0), points1.max(axis=0)
        middle = np.all(np.abs(points1 - (low + high) / 2) < 0.3 * (high - low), axis=1)
        if middle.mean() > 0.3 or (motion := cv2.estimateAffinePartial2D(points0, points1)[0]) is None:
            return none
        every[0], points0 = (each @ motion[:, :2].T + motion[:, 2] for each in (every[0], points0))
        every = [each[np.all((each >= low) & (each <= high), axis=1)] for each in every]
        moved = np.linalg.norm(points1 - points0, axis=1)
    still = moved < SAME_POINT
    little = moved < _MOVING
    if np.count_nonzero(still) < max(_FEWEST, np.count_nonzero(little & ~still)):
        return none
    # What a camera drives towards moves as little, but less exactly, while most of the scene moves.
    if np.median(moved[still]) > SAME_POINT / 2 and np.count_nonzero(little) < len(matches) / 2:
        return none
    overlay = _around(points0[still], size, _AROUND)
    others0, others1 = (points[~_inside(points, overlay)] for points in every)
    # Numbers of points in 25 equal parts of the image
    edges = dict(bins=5, range=np.c_[low, high])
    counted = [np.histogram2d(*points.T, **edges)[0] for points in (every[0], points0[still])]
    if mount:  # all around, and nothing in the middle, where there is something
        middle, on_mount = (each[1:4, 1:4].sum() for each in counted)
        sides = [each.sum() for each in (counted[1][0], counted[1][4], *counted[1][:, [0, 4]].T)]
        if middle < _GLANCE or on_mount > _IN_MIDDLE * middle or min(sides) < _FEWEST or still.mean() < 0.25:
            return none
    shares = (counted[1] / np.maximum(counted[0], 1))[counted[0] >= 5]
    if len(shares) and np.percentile(shares, 25) > _EVERYWHERE:
        return none
    found = _around(others1, size, SAME_POINT)
    if not len(others0):
        return little
    share, *by_chance = (_inside(others0 + shift, found).mean() for shift in ((0, 0), *_CONTROLS))
    return none if share > 0.05 + 2 * float(np.mean(by_chance)) else little


def without_overlay(features0: Features, features1: Features, matches: Matches) -> Matches:
    """The matches that are not `on_overlay`; `overlay` counts those left out."""
    left_out = on_overlay(features0, features1, matches)
    if not left_out.any():
        return matches
    return replace(matches.select(~left_out), overlay=matches.overlay + int(np.count_nonzero(left_out)))


def _around(points: np.ndarray, size: np.ndarray, radius: float) -> np.ndarray:
    """(H, W) bool: pixels of an image of this size up to a radius from a point."""
    marked = np.ones(size[::-1], np.uint8)
    x, y = np.rint(points).astype(int).clip(0, size - 1).T
    marked[y, x] = 0
    return cv2.distanceTransform(marked, cv2.DIST_L2, 3) <= radius


def _inside(points: np.ndarray, mask: np.ndarray) -> np.ndarray:
    x, y = np.rint(points).astype(int).clip(0, np.array(mask.shape[::-1]) - 1).T
    return mask[y, x]
