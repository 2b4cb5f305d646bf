"""Matches that agree but say nothing of the place: of repeated things, and of an overlay over both pictures.

Repeated things, wallpaper, equal windows, tiles, letters, agree with a geometry though the images may show
other ones of the same things. An image says by itself what it repeats: a keypoint with nearly the same
descriptor elsewhere. In images of one place the keypoints that do not repeat find their partners as often as
the repeated ones around them; between two walls with one paper they do not.

What lies over both pictures, a stamp, logo, display or frame, does not move by a pixel. So do all matches of
a camera that stands still; but these lie everywhere, and so do keypoints without a match.
"""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np

from matcher.types import Features, Matches, Repetition, to_numpy

_KIND = "learned"  # the front end whose similarities are known; others have their own scale
_ELSEWHERE = 16.0  # pixels of the resized image
_UNIQUE, _REPEATED = 0.7, 0.9  # similarity to the most similar descriptor elsewhere, of one or the other
_CELL = 64.0  # pixels of the resized image, around inliers, in which keypoints are counted
_SAMPLE = 400  # keypoints of an image that are compared with all others
_GLANCE = 64  # inliers that tell whether a closer look is worth its time
_SCARCELY = 0.75  # share of unrepeated ones above which no closer look is needed
_PSEUDO = 8.0  # keypoints added to the unrepeated ones that are counted, matched as often as repeated ones


def repetition(
    features0: Features, features1: Features, matches: Matches, inliers: np.ndarray
) -> Repetition | None:
    """That of a pair with inliers (K,), those of the features' own keypoints; None where nothing is known."""
    sides = []
    for side, features in enumerate((features0, features1)):
        descriptors = to_numpy(features.descriptors)
        index = matches.indices[inliers, side]
        index = index[index < len(descriptors)]
        if not len(index) or not descriptors.shape[1] or features.kind != _KIND:
            return None
        sides.append((descriptors, to_numpy(features.keypoints) * to_numpy(features.scale), index))
    glance = [unrepeated(*side[:2], side[2][:: -(-len(side[2]) // _GLANCE)]).mean() for side in sides]
    if min(glance) > _SCARCELY:
        return Repetition(float(min(glance)), 1.0)
    found = [_counted(*side) for side in sides]
    return Repetition(*(float(min(values)) for values in zip(*found, strict=True)))


def unrepeated(descriptors: np.ndarray, points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How little keypoints in some rows (R,) resemble others elsewhere in their image, (R,) in [0, 1]."""
    similar = descriptors[rows].astype(np.float32) @ descriptors.astype(np.float32).T
    x, y = points.astype(np.float32).T
    near = (x[rows, None] - x) ** 2 + (y[rows, None] - y) ** 2 <= _ELSEWHERE**2
    similar[near] = -1.0
    return ((_REPEATED - similar.max(axis=1)) / (_REPEATED - _UNIQUE)).clip(0, 1)


def repeated_groups(features: Features) -> np.ndarray:
    """(N,) int64 groups of keypoints that look alike all over an image, the largest 0; −1: none."""
    descriptors, points = to_numpy(features.descriptors), to_numpy(features.keypoints)
    groups = np.full(len(points), -1)
    if features.kind != _KIND or not len(points):
        return groups
    scaled = points * to_numpy(features.scale)
    alike = descriptors @ descriptors.T >= _REPEATED
    alike &= np.linalg.norm(scaled[:, None] - scaled, axis=2) > _ELSEWHERE
    counts, number = alike.sum(axis=1), 0
    while counts.any():
        members = alike[counts.argmax()].copy()
        members[counts.argmax()] = True
        groups[members] = number
        counts, number = (counts - alike[:, members].sum(axis=1)) * ~members, number + 1
        alike[members], alike[:, members] = False, False
    return groups


def _counted(descriptors: np.ndarray, points: np.ndarray, index: np.ndarray) -> tuple[float, float]:
    """`Repetition` of one image, of whose keypoints those in `index` are inliers."""
    cells = np.floor(points / _CELL).astype(np.int64) @ [1 << 20, 1]
    around = np.flatnonzero(np.isin(cells, cells[index]))
    rows = around[:: -(-len(around) // _SAMPLE)]
    alone, matched = unrepeated(descriptors, points, rows), np.isin(rows, index)
    often = ((1 - alone) @ matched + 1e-6) / ((1 - alone).sum() + 1e-6)
    found = (alone @ matched + _PSEUDO * often) / ((alone.sum() + _PSEUDO) * often)
    return float(alone @ matched / max(matched.sum(), 1)), float(found)


STILL = 1.5  # pixels of the resized images; keypoints of an overlay are found again as exactly
_MOVING = 4.0  # as many matches that move less than this are of a scene that moves a little
_FEWEST = 6  # matches that do not move; fewer say nothing
_AROUND = 16.0  # pixels around these that may belong to the overlay
_EVERYWHERE = 0.1  # share of the keypoints; where so many do not move in most blocks, nothing moves
_CONTROLS = ((9, 4), (-5, 8), (4, -9), (-8, -5))  # pixels: where keypoints coincide by chance only


def on_overlay(features0: Features, features1: Features, matches: Matches) -> np.ndarray:
    """(K,) bool: matches on an overlay that both pictures have; none where they were taken from one place."""
    none = np.zeros(len(matches), dtype=bool)
    if len(matches) < _FEWEST or features0.image_size != features1.image_size:
        return none
    scale = to_numpy(features0.scale).astype(np.float64)
    moved = np.linalg.norm((matches.points1 - matches.points0) * scale, axis=1)
    still = moved < STILL
    if np.count_nonzero(still) < max(_FEWEST, np.count_nonzero(~still & (moved < _MOVING))):
        return none
    size = np.ceil(np.array(features0.image_size) * scale).astype(int) + 1
    overlay = _around(matches.points0[still] * scale, size, _AROUND)
    every = [to_numpy(features.keypoints) * scale for features in (features0, features1)]
    others0, others1 = (points[~_inside(points, overlay)] for points in every)
    # Numbers of points in 25 equal parts of the image
    edges = dict(bins=5, range=[(-0.5, side) for side in size.tolist()])
    counted = [np.histogram2d(*points.T, **edges)[0] for points in (every[0], matches.points0[still] * scale)]
    shares = (counted[1] / np.maximum(counted[0], 1))[counted[0] >= 5]
    if len(shares) and np.percentile(shares, 25) > _EVERYWHERE:
        return none
    found = _around(others1, size, STILL)
    if not len(others0):
        return moved < _MOVING
    share, *by_chance = (_inside(others0 + shift, found).mean() for shift in ((0, 0), *_CONTROLS))
    return none if share > 0.05 + 2 * float(np.mean(by_chance)) else moved < _MOVING


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
