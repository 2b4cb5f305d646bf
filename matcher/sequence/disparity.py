"""Where the right picture of a rectified pair shows the left one's points, by correlation along the row.

Detectors do not find every point in both pictures, and place coarse ones some pixels off. The pictures say
more: zero-mean normalised correlation of windows along the row, to a fraction of a pixel by a parabola, and
checked from right to left (Fua 1993, section 2). ORB-SLAM2 places its stereo points so as well (Mur-Artal and
Tardós 2017, section III-A).
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from matcher.data.geometry import resize_points
from matcher.data.image import Image
from matcher.sequence.guided import Guide

_WINDOW = 11  # pixels, the side of what is compared
_TEXTURE = 2.0  # grey levels that a window must deviate by, or it says nothing
_REACH = 4  # pixels that a link may be off, and that a point may be off what its neighbours say
_LONGEST = 64  # pixels of a row that are searched at most
_BACK = 1.0  # pixels that the search back from the right may be off
_HALVES = 0.5  # pixels that half a window may be off the whole
_APART = 3  # pixels between the best place and its rival
# On Middlebury's Aloe, 1024 points, 99.9 % are within 2 px. Points of the learned front end often lie on
# contours, where the windows of two surfaces are hardly alike; it is for them that these are strict.
_LIKE_LINK, _LIKE_NEW = 0.8, 0.9  # least correlation of a link, and of a point that has none
_CLEAR = 0.1  # by which a point without a link must be better than its rival


class RowMatches(NamedTuple):
    """The best place on a stretch of row for each of N points."""

    x: np.ndarray  # (N,) pixels
    likeness: np.ndarray  # (N,) correlation there, −1 to 1
    rival: np.ndarray  # (N,) the best correlation elsewhere on the stretch
    good: np.ndarray  # (N,) bool: not at an end of the stretch, and the way back leads to the point
    textured: np.ndarray  # (N,) bool: there is something to compare


def complete_partners(
    images: tuple[Image, Image], points: np.ndarray, right: np.ndarray, guide: Guide
) -> np.ndarray:
    """The points in the right picture, placed exactly where they were linked and searched where not.

    A link whose surroundings are not alike, that the way back does not confirm or that lies on an edge in
    depth is left out; where a window has no texture it stays as it was. Rows are those of the links: nothing
    is assumed of the pictures but that the rows of neighbouring points differ alike.

    Args:
        images: left and right, with their pixels. Pictures that lie on their side are left as they are.
        points: (N, 2) pixels in the left picture.
        right: (N, 2) float32 pixels in the right one, NaN where there is no link.
        guide: from the links of the two.

    Returns:
        (N, 2) float32.
    """
    if any(image.orientation != 1 for image in images) or not guide.usable or len(points) == 0:
        return right
    left_grey, right_grey = (_grey(image) for image in images)
    there, back = images[1].scale, (1 / images[1].scale[0], 1 / images[1].scale[1])
    seen = resize_points(points.astype(np.float64), images[0].scale)
    found = resize_points(right.astype(np.float64), there)
    linked = np.isfinite(found[:, 0])

    x, y = found[linked].T
    rows = _both_ways(left_grey, right_grey, seen[linked], y, x - _REACH, x + _REACH)
    agree = rows.good & (rows.likeness >= _LIKE_LINK)
    found[linked, 0] = np.where(agree, rows.x, np.where(rows.textured, np.nan, x))

    ends = points[~linked, None] + guide.motions(points[~linked])
    x, y = np.moveaxis(resize_points(ends.reshape(-1, 2), there).reshape(ends.shape), 2, 0)
    middle = np.median(x, axis=1)
    start = np.maximum(x.min(axis=1) - _REACH, middle - _LONGEST / 2)
    stop = np.minimum(x.max(axis=1) + _REACH, middle + _LONGEST / 2)
    height = np.median(y, axis=1)
    rows = _both_ways(left_grey, right_grey, seen[~linked], height, start, stop)
    agree = rows.good & (rows.likeness >= _LIKE_NEW) & (rows.likeness - rows.rival >= _CLEAR)
    found[~linked] = np.where(agree[:, None], np.column_stack([rows.x, height]), np.nan)

    found[np.isnan(found[:, 0])] = np.nan
    return resize_points(found, back).astype(np.float32)


def _grey(image: Image) -> np.ndarray:
    """(H, W) float32 of the picture as the front end saw it."""
    pixels = image.pixels
    return (pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)).astype(np.float32)


def _both_ways(
    left: np.ndarray,
    right: np.ndarray,
    points: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
) -> RowMatches:
    """KeyframeIndex of left points (N, 2) on rows `y` (N,) of the right picture, `start` to `stop` (N,)."""
    there = _along_rows(left, right, points, y, start, stop)
    # The same disparities, seen from the places found.
    offset = there.x + points[:, 0]
    places = np.column_stack([there.x, y])
    again = _along_rows(right, left, places, points[:, 1], offset - stop, offset - start)
    near = np.abs(again.x - points[:, 0]) <= _BACK
    good = there.good & again.good & near & _of_one_depth(left, right, points, places)
    return there._replace(good=good)


def _along_rows(
    picture: np.ndarray,
    other: np.ndarray,
    points: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
) -> RowMatches:
    if len(points) == 0:
        nothing = np.zeros(0)
        return RowMatches(nothing, nothing, nothing, nothing > 0, nothing > 0)
    steps = np.ceil(stop - start).astype(int) + 1
    most = int(steps.max())
    windows = _cut(picture, points, _WINDOW)
    middles = np.column_stack([start + (most - 1) / 2, y])
    scores = _correlate(windows, _cut(other, middles, most + _WINDOW - 1))
    step = np.arange(most)
    scores[step >= steps[:, None]] = -1.0
    best = scores.argmax(axis=1)
    rival = np.where(np.abs(step - best[:, None]) >= _APART, scores, -1.0).max(axis=1)
    inside = (best > 0) & (best < steps - 1)
    return RowMatches(
        start + _peaks(scores), scores.max(axis=1), rival, inside, _deviation(windows) >= _TEXTURE
    )


def _of_one_depth(left: np.ndarray, right: np.ndarray, points: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(N,) bool: each half of the window is found where the whole is.

    Beside an edge in depth the window shows two surfaces and is found where the more textured one is, which
    need not be that of the point.
    """
    windows, strips = _cut(left, points, _WINDOW), _cut(right, places, _WINDOW + 2 * _REACH)
    one = np.ones(len(points), bool)
    if len(points) == 0:
        return one
    low, high, whole = (0, _WINDOW // 2 + 1), (_WINDOW // 2, _WINDOW), (0, _WINDOW)
    for (top, bottom), (begin, end) in ((whole, low), (whole, high), (low, whole), (high, whole)):
        half = windows[:, top:bottom, begin:end]
        shift = _peaks(_correlate(half, strips[:, top:bottom, begin : end + 2 * _REACH])) - _REACH
        one &= (np.abs(shift) <= _HALVES) | (_deviation(half) < _TEXTURE)
    return one


def _cut(picture: np.ndarray, centres: np.ndarray, width: int) -> np.ndarray:
    """(N, _WINDOW, width) float32 of a picture around centres (N, 2), of any fraction; its edge goes on."""
    shape = (len(centres), _WINDOW, width)
    if len(centres) == 0:
        return np.zeros(shape, np.float32)
    x = centres[:, 0, None, None] + np.arange(width) - (width - 1) / 2
    y = centres[:, 1, None, None] + np.arange(_WINDOW)[:, None] - (_WINDOW - 1) / 2
    flat = (np.broadcast_to(each, shape).reshape(len(centres), -1).astype(np.float32) for each in (x, y))
    return cv2.remap(picture, *flat, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE).reshape(shape)


def _correlate(windows: np.ndarray, strips: np.ndarray) -> np.ndarray:
    """(N, S) zero-mean normalised correlation of (N, h, w) at the S places of strips (N, h, w + S − 1)."""
    _, height, width = windows.shape
    views = np.lib.stride_tricks.sliding_window_view(strips, width, axis=2)
    centred = windows - windows.mean(axis=(1, 2), keepdims=True)
    product = np.einsum("nij,nisj->ns", centred, views)
    sums, squares = (
        np.lib.stride_tricks.sliding_window_view(each.sum(axis=1), width, axis=1).sum(axis=2)
        for each in (strips, strips * strips)
    )
    spread = np.maximum(squares - sums * sums / (height * width), 1e-3)
    length = np.maximum(np.square(centred).sum(axis=(1, 2)), 1e-3)
    return product / np.sqrt(length[:, None] * spread)


def _peaks(scores: np.ndarray) -> np.ndarray:
    """(N,) where the scores (N, S) are highest, between steps by a parabola."""
    best, last = scores.argmax(axis=1), scores.shape[1] - 1
    rows = np.arange(len(scores))
    before, at, after = (scores[rows, np.clip(best + k, 0, last)] for k in (-1, 0, 1))
    curve = np.minimum(before - 2 * at + after, -1e-6)
    inside = (best > 0) & (best < last)
    return best + np.where(inside, np.clip(0.5 * (before - after) / curve, -0.5, 0.5), 0.0)


def _deviation(windows: np.ndarray) -> np.ndarray:
    """(N,) standard deviation of the values of (N, h, w)."""
    return windows.std(axis=(1, 2))
