"""Matches on what lies over both pictures, a stamp, logo, display or frame: they tell nothing of the scene.

They do not move by a pixel. So do all matches of a camera that stands still; but these lie everywhere, and
keypoints without a match are in the same places of both pictures, too.
"""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np

from matcher.arrays import to_numpy
from matcher.types import Features, Matches

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
