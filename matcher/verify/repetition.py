"""Repeated things, wallpaper, equal windows, tiles, letters: matches that agree but say nothing of the place.

They agree with a geometry though the images may show other ones of the same things. An image says by itself
what it repeats: a keypoint with nearly the same descriptor elsewhere. In images of one place the keypoints
that do not repeat find their partners as often as the repeated ones around them; between two walls with one
paper they do not.
"""

from __future__ import annotations

import numpy as np

from matcher.types import Features, Matches, Repetition, to_numpy

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
