"""Repeated and equal things, wallpaper, windows, furniture: matches that agree but say nothing of the place.

They agree with a geometry though the images may show other ones of the same things. An image says by itself
what it repeats: a keypoint with nearly the same descriptor elsewhere. In images of one place the keypoints
that do not repeat find their partners as often as the repeated ones around them; between two walls with one
paper they do not. Rooms furnished alike differ in what is between the furniture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from matcher.types import Features, Matches, Repetition, TwoViewGeometry, to_numpy

SAME_POINT = 1.5  # pixels of the resized images within which points are one
# Similarity to the most similar descriptor elsewhere, of a keypoint that does not repeat and of one that
# does; each front end has its own scale.
_SIMILAR = {"learned": (0.7, 0.9), "sift": (0.92, 0.99), "xfeat": (0.87, 0.95), "aliked": (0.7, 0.9)}
_ELSEWHERE = 16.0  # pixels of the resized image
_CELL = 64.0  # pixels of the resized image: what lies around inliers, and the width of a place
_SAMPLE = 400  # keypoints, or inliers, of an image that are compared with all others
_GLANCE = 64  # matches that give a first impression
_SCARCELY = 0.75  # share of unrepeated ones above which no closer look is needed
_FEW = 20  # keypoints around inliers, or inliers, of fewer of which nothing follows
# What is around the inliers and what lies in its place: similarity above chance, divided by that of inliers,
# that views of one place exceed, and the weight of what is less; others' are not known. The more keypoints
# match, and the more are left around them, the more alike these are in views of one place: by the third for
# e times as many. Fitted to training pairs, from one pass.
_LIKENESS = {"learned": (0.4, 1.0, 0.045), "sift": (0.15, 2.0, 0.0)}
_LEFT = (0.5, 0.8)  # keypoints around, for each matched one: up to the first they say nothing, then more
_USUAL = 0.35  # share of keypoints that match, times the square root of those left around each of these
ALONE = (0.3, 0.5)  # share of inliers that do not repeat, from which on others around them count, and wholly
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
    sides = []
    pair, inlying = (features0, features1), (matches.points0[inliers], matches.points1[inliers])
    for features, index, points in zip(pair, matches.indices[inliers].T, inlying, strict=True):
        scale, index = to_numpy(features.scale), index[own]
        keypoints = to_numpy(features.keypoints) * scale
        places = keypoints[index]
        if not own.all():
            others = points[~own] * scale
            apart = np.linalg.norm(keypoints[:, None] - others, axis=2)
            index = np.union1d(index, np.flatnonzero(apart.min(axis=1) < SAME_POINT))
            places = np.concatenate([places, others])
        cells, near = (np.floor(each / _CELL).astype(int) @ [1 << 20, 1] for each in (keypoints, places))
        around = np.flatnonzero(np.isin(cells, near))
        if not len(around) or not features.descriptors.shape[1]:
            return None
        sides.append((features, keypoints, index, around))
    known = features0.kind == features1.kind and features0.kind in _LIKENESS
    # Keypoints of an overlay are around, too, but do not move with the inliers.
    differing = _differing(pair, inlying) if known and not len(matches.overlay) else 0.0
    if own.all():  # of several passes the closer look takes no time that matters
        glance = [unrepeated(*side[:2], side[2][:: -(-len(side[2]) // _GLANCE)]).mean() for side in sides]
        if min(glance) > _SCARCELY:
            return Repetition(float(min(glance)), 1.0, differing=differing)
    alone, found, share = np.min([_counted(*side) for side in sides], axis=0).tolist()
    return Repetition(alone, found, share, differing * float(np.interp(alone, ALONE, (0, 1))))


def beside_overlay(geometry: TwoViewGeometry) -> TwoViewGeometry:
    """The geometry without what is around its inliers: near an overlay of many images that differs anyway."""
    found = geometry.repetition
    return geometry if found is None else replace(geometry, repetition=found._replace(differing=0.0))


def unrepeated(features: Features, points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How little keypoints in some rows (R,) resemble others elsewhere in their image, (R,) in [0, 1]; the
    points (N, 2) of all are pixels of the resized image."""
    descriptors = to_numpy(features.descriptors).astype(np.float32)
    similar = descriptors[rows] @ descriptors.T
    points = points.astype(np.float32)
    similar[_squared_distances(points[rows], points) <= _ELSEWHERE**2] = -1.0
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


def _differing(features: Sequence[Features], points: Sequence[np.ndarray]) -> float:
    """`Repetition.differing`, from the inliers' (K, 2), (K, 2) stored pixels of both images.

    Where a keypoint should be in the other image, its nearest inlier and an affine map of all tell. Of images
    turned against each other the descriptors say nothing: there inliers are hardly more similar than chance.
    Where most is matched, what is left is no sample of the place; where little is, the views are far apart.
    """
    found, left = [], []
    least, weight, more = _LIKENESS[features[0].kind]
    sides = [_Side(*each) for each in zip(features, points, strict=True)]
    for one, other in (sides, sides[::-1]):
        source, target = (each.inliers[:: -(-len(each.inliers) // _SAMPLE)] for each in (one, other))
        affine = np.linalg.lstsq(source - source.mean(axis=0), target - target.mean(axis=0), rcond=None)[0]
        rows = np.arange(len(one.keypoints))[:: -(-len(one.keypoints) // _SAMPLE)]
        apart = _squared_distances(one.keypoints[rows], source)
        nearest, near = apart.argmin(axis=1), apart.min(axis=1) < (2 * _CELL) ** 2
        places = target[nearest] + (one.keypoints[rows] - source[nearest]) @ affine
        matched = _squared_distances(one.keypoints[rows], one.inliers).min(axis=1) < SAME_POINT**2
        rest = np.flatnonzero(near & ~matched)
        apart = _squared_distances(one.keypoints[rows[rest]], other.keypoints)
        rest = rest[apart.min(axis=1) >= SAME_POINT**2]  # without what may be of an overlay
        apart = _squared_distances(source, one.keypoints)
        own = apart.min(axis=1) < SAME_POINT**2  # those of further passes may be no keypoints of the first
        around = one.likeness(other, rows[rest], places[rest])
        inliers = one.likeness(other, apart.argmin(axis=1)[own], target[own])
        if around is None or inliers is None:
            continue
        chance = around.elsewhere
        found.append(least * (inliers.there - chance) - (around.there - chance))
        left.append(around.count / max((near & matched).sum(), 1))
    if not found:
        return 0.0
    many = len(points[0]) / min(len(side.keypoints) for side in sides) * np.sqrt(min(left))
    differing = weight * np.mean(found) + more * np.log(many / _USUAL)
    return float(differing * np.interp(min(left), _LEFT, (0, 1)))


class _Likeness(NamedTuple):
    """Medians over keypoints of the largest similarity to a keypoint of the other image."""

    count: int  # keypoints that have some in their place
    there: float  # in its place
    elsewhere: float  # in the place of another one


class _Side:
    """One image: keypoints (N, 2) and inliers (K, 2) in resized pixels, descriptors (N, D)."""

    def __init__(self, features: Features, points: np.ndarray) -> None:
        scale = to_numpy(features.scale).astype(np.float32)
        self.keypoints, self.inliers = to_numpy(features.keypoints) * scale, points.astype(np.float32) * scale
        self.descriptors = to_numpy(features.descriptors).astype(np.float32)

    def likeness(self, other: _Side, rows: np.ndarray, places: np.ndarray) -> _Likeness | None:
        """Of keypoints in some rows (R,) with their places (R, 2) in the other image; None of too few."""
        near = _squared_distances(places, other.keypoints) < (_CELL / 2) ** 2
        known = np.flatnonzero(near.any(axis=1))
        if len(known) < _FEW:
            return None
        similar, near = self.descriptors[rows[known]] @ other.descriptors.T, near[known]
        places = near, np.roll(near, -(len(known) // 2), axis=0)
        found = (float(np.median(similar.max(axis=1, where=each, initial=-1.0))) for each in places)
        return _Likeness(len(known), *found)


def _squared_distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N, M) of points (N, 2) and (M, 2)."""
    x, y = (np.subtract.outer(*axis) for axis in zip(points.T.copy(), others.T.copy(), strict=True))
    return np.add(np.square(x, out=x), np.square(y, out=y), out=x)


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
