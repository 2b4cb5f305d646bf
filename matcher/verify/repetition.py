"""Repeated and equal things, wallpaper, windows, furniture: matches that agree but say nothing of the place.

Such matches agree with a geometry though the images may show other ones of the same things. A keypoint that
repeats has its like elsewhere in its image. In images of one place keypoints without their like find partners
as often as the others; between walls with one paper, or rooms furnished alike, they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from matcher.types import Features, Matches, Repetition, TwoViewGeometry, thinned, to_numpy

SAME_POINT = 1.5  # pixels of the resized images within which points are one
# Similarity to the most similar descriptor elsewhere, of a keypoint that does not repeat and of one that
# does; each front end has its own scale.
_SIMILAR = {"learned": (0.7, 0.9), "sift": (0.92, 0.99), "xfeat": (0.87, 0.95), "aliked": (0.7, 0.9)}
_ELSEWHERE = 16.0  # pixels of the resized image
_CELL = 64.0  # pixels of the resized image: what lies around inliers, and the width of a place
_SAMPLE = 400  # keypoints, or inliers, of an image that are compared with all others
_GLANCE = 64  # matches that give a first impression
_UNREPEATED = (0.75, 0.8)  # of inliers on average: no closer look; of a keypoint: it does not repeat
_FEW = 20  # keypoints around inliers, or inliers, of fewer of which nothing follows
# What is around the inliers and what lies in its place: similarity above chance, divided by that of inliers,
# that views of one place exceed, and the weight of what is less; others' are not known.
_LIKENESS = {"learned": (0.4, 1.0), "sift": (0.15, 2.0)}
# The more keypoints match, and the more are left around each of these, the more alike these are in views of
# one place: weight of log(s / usual), and the usual s, the share of keypoints that match · √(left for each);
# of what does not repeat, share · left / `Repetition.found`. Fitted to training pairs, from one pass.
_UNUSUAL = {"learned": ((0.045, 0.35), (0.06, 3.0)), "sift": ((0.0, 1.0), (0.06, 3.0))}
_LEFT = (0.5, 0.8)  # keypoints around, for each matched one: up to the first they say nothing, then more
_CLOSER = 800  # keypoints near inliers among which those are looked for that do not repeat
# Share of inliers that do not repeat: up to the first only such keypoints around count, from the second all
_MOSTLY = (0.5, 0.65)
_PSEUDO = 8.0  # keypoints added to the unrepeated ones that are counted, matched as often as repeated ones


def repetition(
    features0: Features, features1: Features, matches: Matches, inliers: np.ndarray
) -> Repetition | None:
    """What the inliers (K,) bool of a pair repeat; None where nothing is known.

    The keypoints of the features count that are inliers, or that lie where further passes found some.
    """
    if not {features0.kind, features1.kind} <= _SIMILAR.keys() or not inliers.any():
        return None
    own = np.all(matches.indices[inliers] < [len(features0), len(features1)], axis=1)
    inlying, indices = (matches.points0[inliers], matches.points1[inliers]), matches.indices[inliers].T
    sides = [_Side(*each, own) for each in zip((features0, features1), inlying, indices, strict=True)]
    if not all(len(side.around) and side.descriptors.shape[1] for side in sides):
        return None
    # Keypoints of an overlay are around, too, but do not move with the inliers.
    known = features0.kind == features1.kind and features0.kind in _LIKENESS and not len(matches.overlay)
    if own.all():  # of several passes the closer look takes no time that matters
        glance = float(min(side.unrepeated(thinned(side.index, _GLANCE)).mean() for side in sides))
        if glance > _UNREPEATED[0]:
            return Repetition(glance, 1.0, differing=_differing(sides) if known else 0.0)
    alone, found, share = np.min([_counted(side) for side in sides], axis=0).tolist()
    weight = float(np.interp(alone, _MOSTLY, (0, 1)))
    parts = ((weight, None), (1 - weight, found))
    differing = sum(part * _differing(sides, of) for part, of in parts if known and part)
    return Repetition(alone, found, share, float(differing))


def beside_overlay(geometry: TwoViewGeometry) -> TwoViewGeometry:
    """The geometry without what is around its inliers: near an overlay of many images that differs anyway."""
    found = geometry.repetition
    return geometry if found is None else replace(geometry, repetition=found._replace(differing=0.0))


def repeated_groups(features: Features) -> np.ndarray:
    """(N,) int64 groups of keypoints that look alike all over an image, the largest 0; −1: none."""
    points = to_numpy(features.keypoints) * to_numpy(features.scale)
    descriptors, groups = to_numpy(features.descriptors), np.full(len(points), -1)
    if features.kind not in _SIMILAR or not len(points):
        return groups
    alike = descriptors @ descriptors.T >= np.mean(_SIMILAR[features.kind])
    alike &= squared_distances(points, points) > _ELSEWHERE**2
    counts, number = alike.sum(axis=1), 0
    while counts.any():
        members = alike[counts.argmax()].copy()
        members[counts.argmax()] = True
        groups[members] = number
        counts, number = (counts - alike[:, members].sum(axis=1)) * ~members, number + 1
        alike[members], alike[:, members] = False, False
    return groups


def _differing(sides: Sequence[_Side], found: float | None = None) -> float:
    """`Repetition.differing`; of what does not repeat, with `Repetition.found`.

    Where a keypoint should be in the other image, its nearest inlier and an affine map of all tell. Of images
    turned against each other the descriptors say nothing: there inliers are hardly more similar than chance.
    Where most is matched, what is left is no sample of the place; where little is, the views are far apart.
    """
    less, left = [], []
    least, weight = _LIKENESS[sides[0].kind]
    for one, other in (sides, sides[::-1]):
        rows = np.arange(len(one.keypoints))
        if found is None:
            rows, places = one.placed(other, thinned(rows, _SAMPLE))
        else:
            rows, places = (thinned(each, _CLOSER) for each in one.placed(other, rows))
            unlike = one.unrepeated(rows) >= _UNREPEATED[1]
            rows, places = rows[unlike], places[unlike]
        matched = np.isin(rows, one.index)
        apart = squared_distances(one.keypoints[rows], other.keypoints).min(axis=1, initial=np.inf)
        rest = ~matched & (apart >= SAME_POINT**2)  # without what may be of an overlay
        around = one.likeness(other, rows[rest], places[rest])
        inliers = one.likeness(other, *one.placed(other, thinned(one.index, _SAMPLE)))
        if around and inliers:
            count, there, elsewhere = around
            less.append(least * (inliers[1] - elsewhere) - (there - elsewhere))
            left.append(count / (np.count_nonzero(matched) + 1))
    if not less:
        return 0.0
    share = len(sides[0].inliers) / min(len(side.keypoints) for side in sides)
    more, usual = _UNUSUAL[sides[0].kind][found is not None]
    kept = np.sqrt(min(left)) if found is None else min(left) / max(found, 0.1)
    unusual = more * np.log(share * kept / usual)
    return float((weight * np.mean(less) + unusual) * np.interp(min(left), _LEFT, (0, 1)))


class _Side:
    """One image: keypoints (N, 2) and inliers (K, 2) in pixels of the resized image, descriptors (N, D); rows
    of the keypoints that are inliers, `index`, and of those in the cells `around` inliers."""

    def __init__(self, features: Features, points: np.ndarray, index: np.ndarray, own: np.ndarray) -> None:
        self.kind, scale = features.kind, to_numpy(features.scale)
        self.keypoints, self.inliers = to_numpy(features.keypoints) * scale, points * scale
        self.descriptors, self.index = to_numpy(features.descriptors).astype(np.float32), index[own]
        if not own.all():
            near = squared_distances(self.keypoints, self.inliers[~own]).min(axis=1) < SAME_POINT**2
            self.index = np.union1d(self.index, np.flatnonzero(near))
        cells, near = (np.floor(each / _CELL) @ [1 << 20, 1] for each in (self.keypoints, self.inliers))
        self.around = np.flatnonzero(np.isin(cells, near))

    def unrepeated(self, rows: np.ndarray) -> np.ndarray:
        """How little keypoints in some rows (R,) resemble others elsewhere in the image, (R,) in [0, 1]."""
        similar = self.descriptors[rows] @ self.descriptors.T
        near = squared_distances(self.keypoints[rows], self.keypoints) <= _ELSEWHERE**2
        unique, repeated = _SIMILAR[self.kind]
        return ((repeated - similar.max(axis=1, where=~near, initial=-1.0)) / (repeated - unique)).clip(0, 1)

    def placed(self, other: _Side, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of some rows (R,) that lie near an inlier, and their places in the other image (R, 2)."""
        source, target = thinned(self.inliers, _SAMPLE), thinned(other.inliers, _SAMPLE)
        affine = np.linalg.lstsq(source - source.mean(axis=0), target - target.mean(axis=0), rcond=None)[0]
        apart = squared_distances(self.keypoints[rows], source)
        nearest, near = apart.argmin(axis=1), apart.min(axis=1) < (2 * _CELL) ** 2
        places = target[nearest] + (self.keypoints[rows] - source[nearest]) @ affine
        return rows[near], places[near]

    def likeness(self, other: _Side, rows: np.ndarray, places: np.ndarray) -> tuple[int, float, float] | None:
        """How many keypoints in some rows (R,) have others in their place (R, 2) in the other image, and the
        medians of the largest similarity to one there, and in the place of another one; None of too few."""
        near = squared_distances(places, other.keypoints) < (_CELL / 2) ** 2
        known = np.flatnonzero(near.any(axis=1))
        if len(known) < _FEW:
            return None
        similar, near = self.descriptors[rows[known]] @ other.descriptors.T, near[known]
        places = near, np.roll(near, -(len(known) // 2), axis=0)
        found = (float(np.median(similar.max(axis=1, where=each, initial=-1.0))) for each in places)
        return len(known), *found


def squared_distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N, M) of points (N, 2) and (M, 2), by one product, which is fast; of equal points perhaps below 0."""
    (x, y), (u, v) = points.astype(np.float64).T, others.astype(np.float64).T
    return np.stack([-2 * x, -2 * y, x**2 + y**2, x**0], axis=1) @ np.stack([u, v, u**0, u**2 + v**2])


def _counted(side: _Side) -> tuple[float, float, float]:
    """`Repetition` of one image, from keypoints near inliers."""
    rows = thinned(side.around, _SAMPLE)
    alone, matched = side.unrepeated(rows), np.isin(rows, side.index)
    often = ((1 - alone) @ matched + 1e-6) / ((1 - alone).sum() + 1e-6)
    # Corners of windows are a little alike; what is like nothing tells which façade it is (a fitted power).
    wholly = alone**4
    found = (wholly @ matched + _PSEUDO * often) / ((wholly.sum() + _PSEUDO) * often)
    share = alone @ matched / alone.sum() if alone.sum() >= _PSEUDO else 0.0  # of fewer it says nothing
    return float(alone @ matched / max(matched.sum(), 1)), float(found), float(share)
