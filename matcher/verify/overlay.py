"""What lies over both pictures, a stamp, logo, display or frame: matches on it say nothing of the place.

It does not move by a pixel. Nor do any matches of a camera that stands still; but these lie everywhere, and
so do keypoints without a match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import cv2
import numpy as np

from matcher.types import Features, Matches, to_numpy
from matcher.verify.repetition import SAME_POINT

_MOVING = 4.0  # as many matches that move less than this are of a scene that moves a little
_FEWEST = 6  # matches that do not move; fewer say nothing
_AROUND = 16.0  # pixels around these that may belong to the overlay
_EVERYWHERE = 0.1  # share of the keypoints; where so many do not move in most blocks, nothing moves
_IN_MIDDLE = 0.02  # share of the keypoints within a frame or mount that may seem to move as it does
_INSIDE = 32  # keypoints within; fewer say nothing
_COINCIDING = 0.08  # share of the other keypoints that have one in their place, more than by chance: at rest
_PICTURES = 8  # fewer of one size do not tell what they have in common
_MOST = 0.7  # of them have a keypoint where the overlay is
_SOME = 0.4  # and around
_MOVING_SHARE = 0.5  # of the keypoints that are not on it; where fewer are, the camera stands still
_BURST = 2.0  # as many pairs of keypoints beside it coincide as by chance: the camera hardly moves
_GRID = 8  # pixels; that keypoints of most coincide is kept once for such a square
_LARGEST = 2048  # pixels of the longer side in which coinciding keypoints are looked for
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
    # Numbers of points in 25 equal parts of the image
    edges = dict(bins=5, range=np.c_[low, high])
    counted = [np.histogram2d(*points.T, **edges)[0] for points in (every[0], points0[still])]
    # A frame is all around, and nothing of it in the middle, where there is something.
    inside = max(each[1:4, 1:4].sum() for each in (counted[0], np.histogram2d(*every[1].T, **edges)[0]))
    sides = [each.sum() for each in (counted[1][0], counted[1][4], *counted[1][:, [0, 4]].T)]
    frame = inside >= _INSIDE and counted[1][1:4, 1:4].sum() <= _IN_MIDDLE * inside and min(sides) >= _FEWEST
    if mount and not (frame and still.mean() >= 0.25):
        return none
    shares = (counted[1] / np.maximum(counted[0], 1))[counted[0] >= 5]
    if not frame and len(shares) and np.percentile(shares, 25) > _EVERYWHERE:
        return none
    away = _away(points0[still], size)
    others0, others1 = (points[~_inside(points, away <= _AROUND)] for points in every)
    if not len(others0):
        return little
    found, near = _away(others1, size) <= SAME_POINT, away <= 3 * _AROUND
    share, *by_chance = (_inside(others0 + shift, found).mean() for shift in ((0, 0), *_CONTROLS))
    # Letters and edges of a stamp are matched with like ones beside them, too.
    little |= (moved < 3 * _AROUND) & _inside(points0, near) & _inside(points1, near)
    at_rest = not frame and share > _COINCIDING + 2 * float(np.mean(by_chance))
    return none if at_rest else little


def without_overlay(features0: Features, features1: Features, matches: Matches) -> Matches:
    """The matches that are not `on_overlay`; `overlay` has those left out."""
    left_out = on_overlay(features0, features1, matches)
    if not left_out.any():
        return matches
    points = np.stack([matches.points0, matches.points1], axis=1)[left_out]
    return replace(matches.select(~left_out), overlay=np.concatenate([matches.overlay, points]))


@dataclass(frozen=True, eq=False)
class CommonOverlay:
    """What lies over most pictures of one size."""

    size: tuple[int, int]  # (width, height) of the pictures as stored
    scale: tuple[float, float]  # in which their keypoints were found, per stored pixel
    points: np.ndarray  # (K, 2) stored pixels, at most 4 resized ones from where keypoints of most coincide

    @cached_property
    def mask(self) -> np.ndarray:
        """(H, W) bool: where it lies, in pictures of the size in which keypoints were found, or smaller."""
        factor, frame = _frame(self.size, self.scale)
        return _away(self.points * factor, frame) <= _AROUND

    def beside(self, keypoints: np.ndarray) -> np.ndarray:
        """(N,) bool: which keypoints (N, 2), stored pixels, are not on it."""
        return ~_inside(keypoints * _frame(self.size, self.scale)[0], self.mask)


def common_overlay(
    keypoints: Sequence[np.ndarray], size: tuple[int, int], scale: tuple[float, float]
) -> CommonOverlay | None:
    """What lies over most of these pictures of one size: keypoints of most of them coincide there, and
    elsewhere no more than by chance, as where every picture is shifted.

    `keypoints` (N, 2) of each in stored pixels. None where there is nothing, where there are too few pictures
    to tell, and where the camera stands still.
    """
    if (count := len(keypoints)) < _PICTURES:
        return None
    factor, frame = _frame(size, scale)
    each = [points * factor for points in keypoints]
    turns = 2.4 * np.arange(count)  # nearly the golden angle: all in different directions
    away = (24 + turns % 16)[:, None] * np.stack([np.cos(turns), np.sin(turns)], axis=1)
    found = _coinciding(each, frame)
    by_chance = _coinciding([points + shift for points, shift in zip(each, away, strict=True)], frame)
    core = found >= max(by_chance.max() + 1, math.ceil(_MOST * count))
    if np.count_nonzero(core) < _FEWEST:
        return None
    near = _away(np.argwhere(core)[:, ::-1], frame) <= 3 * _AROUND
    points = np.argwhere(near & (found > max(by_chance.max(), _SOME * count)))[:, ::-1]
    points = np.unique(points // _GRID, axis=0) * _GRID + _GRID // 2
    overlay = CommonOverlay(size, scale, points / factor)
    beside = overlay.beside(np.concatenate(keypoints))
    pairs, pairs_by_chance = (np.sum((n * (n - 1))[~overlay.mask]) for n in (found, by_chance))
    return None if beside.mean() < _MOVING_SHARE or pairs > _BURST * pairs_by_chance else overlay


def without_common_overlays(images: Sequence[Features]) -> tuple[Features, ...]:
    """Features of pictures without those on a `common_overlay` of the pictures of their size."""
    found = list(images)
    for size in {image.image_size for image in images}:
        alike = [number for number, image in enumerate(images) if image.image_size == size]
        points = {number: to_numpy(images[number].keypoints) for number in alike}
        scale = tuple(images[alike[0]].scale.tolist())
        if overlay := common_overlay(list(points.values()), size, scale):
            found = [f.select(overlay.beside(points[n])) if n in points else f for n, f in enumerate(found)]
    return tuple(found)


def _frame(size: tuple[int, int], scale: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """The factor of coordinates and the size of pictures as keypoints were found in them, or smaller."""
    factor = np.array(scale) * min(1.0, _LARGEST / max(np.multiply(size, scale)))
    return factor, np.ceil(factor * size).astype(int) + 1


def _coinciding(keypoints: Sequence[np.ndarray], size: np.ndarray) -> np.ndarray:
    """(H, W): how many pictures have a keypoint in a pixel or beside it."""
    found = np.zeros(size[::-1], np.int32)
    for points in keypoints:
        marked = np.zeros(size[::-1], np.uint8)
        whole = np.rint(points).astype(int)
        x, y = whole[np.all((whole >= 0) & (whole < size), axis=1)].T
        marked[y, x] = 1
        found += cv2.dilate(marked, cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3)))
    return found


def _away(points: np.ndarray, size: np.ndarray) -> np.ndarray:
    """(H, W) float32: how far the pixels of an image of this size are from the nearest point."""
    marked = np.ones(size[::-1], np.uint8)
    x, y = np.rint(points).astype(int).clip(0, size - 1).T
    marked[y, x] = 0
    return cv2.distanceTransform(marked, cv2.DIST_L2, 3)


def _inside(points: np.ndarray, mask: np.ndarray) -> np.ndarray:
    x, y = np.rint(points).astype(int).clip(0, np.array(mask.shape[::-1]) - 1).T
    return mask[y, x]
