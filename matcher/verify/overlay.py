"""What lies over both pictures, a stamp, logo, display or frame: matches on it say nothing of the place.

It does not move by a pixel. Nor do any matches of a camera that stands still; but these lie everywhere, and
so do keypoints without a match.
"""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np

from matcher.types import Features, Matches, to_numpy
from matcher.verify.repetition import SAME_POINT

_MOVING = 4.0  # as many matches that move less than this are of a scene that moves a little
_FEWEST = 6  # matches that do not move; fewer say nothing
_AROUND = 16.0  # pixels around these that may belong to the overlay
_EVERYWHERE = 0.1  # share of the keypoints; where so many do not move in most blocks, nothing moves
_IN_MIDDLE = 0.02  # share of the keypoints within a mount that may seem to move as it does
_INSIDE = 64  # keypoints within a mount; fewer say nothing
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
    overlay, near = (_around(points0[still], size, radius) for radius in (_AROUND, 3 * _AROUND))
    others0, others1 = (points[~_inside(points, overlay)] for points in every)
    # Numbers of points in 25 equal parts of the image
    edges = dict(bins=5, range=np.c_[low, high])
    counted = [np.histogram2d(*points.T, **edges)[0] for points in (every[0], points0[still])]
    if mount:  # all around, and nothing in the middle, where there is something
        middle, on_mount = (each[1:4, 1:4].sum() for each in counted)
        sides = [each.sum() for each in (counted[1][0], counted[1][4], *counted[1][:, [0, 4]].T)]
        if middle < _INSIDE or on_mount > _IN_MIDDLE * middle or min(sides) < _FEWEST or still.mean() < 0.25:
            return none
    shares = (counted[1] / np.maximum(counted[0], 1))[counted[0] >= 5]
    if len(shares) and np.percentile(shares, 25) > _EVERYWHERE:
        return none
    found = _around(others1, size, SAME_POINT)
    if not len(others0):
        return little
    share, *by_chance = (_inside(others0 + shift, found).mean() for shift in ((0, 0), *_CONTROLS))
    # Letters and edges of a stamp are matched with like ones beside them, too.
    little |= (moved < 3 * _AROUND) & _inside(points0, near) & _inside(points1, near)
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
