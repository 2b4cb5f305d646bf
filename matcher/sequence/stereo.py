"""Rectified pairs: where the right image shows the left one's points, and how far away they are.

A link is located exactly by correlation along its row, and a point without one is searched where the surfaces
of its neighbours predict it. Around each point the surface is a plane: its disparity and how that changes.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from matcher.geometry import resize_points
from matcher.sequence.frames import FrameLinks
from matcher.sequence.linking import nearest
from matcher.types import Image

MIN_LINKS = 6  # located exactly, from which other points are predicted
_WINDOW = 11  # pixels, the side of what is compared
_REACH = 4  # pixels that a link may be off, and that a point may be off what its neighbours predict
_TEXTURE = 2.0  # grey levels that a window must deviate by, or it has no texture


def partners(points0: np.ndarray, points1: np.ndarray, links: FrameLinks) -> np.ndarray:
    """(N, 2) float32 pixels in the right image of the left one's points, NaN where there is none.

    Args:
        points0: (N, 2) keypoints of the left image.
        points1: (M, 2) of the right one.
        links: left → right; the consistent ones count.
    """
    found = np.full((len(points0), 2), np.nan, np.float32)
    found[links.inliers[:, 0]] = points1[links.inliers[:, 1]]
    return found


def within(points0: np.ndarray, right: np.ndarray, window: float) -> np.ndarray:
    """The same, NaN also where rows differ by more than `window` pixels, and behind the cameras."""
    step = points0 - right
    with np.errstate(invalid="ignore"):
        good = (np.abs(step[:, 1]) <= window) & (step[:, 0] > 0)
    return np.where(good[:, None], right, np.float32(np.nan))


def depths_of(points0: np.ndarray, right: np.ndarray, focal: float, baseline: float) -> np.ndarray:
    """(N,) depth along z of the left image's points, in units of the baseline; NaN where unknown.

    z = f·b / (x_left − x_right). Only points have one whose rows agree within 2 pixels, and whose disparity
    is half a pixel at least; below it a depth says little more than "far".

    Args:
        points0: (N, 2) in pixels of images with one focal length and one principal point.
        right: (N, 2) the same points in the right image, NaN where unknown.
        focal: fx in pixels.
        baseline: distance between the cameras.
    """
    step = points0.astype(np.float64) - right
    with np.errstate(invalid="ignore"):
        good = (np.abs(step[:, 1]) <= 2.0) & (step[:, 0] >= 0.5)
    return np.where(good, focal * baseline / np.where(good, step[:, 0], 1.0), np.nan)


def complete_partners(images: tuple[Image, Image], points: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The points in the right image, located exactly where they were linked and searched for where not.

    A link whose windows do not correlate or that lies on a depth discontinuity is left out; where a window
    has no texture it stays as it was. Rows are those of the links: nothing is assumed of the images but that
    the rows of neighbouring points differ equally.

    Args:
        images: left and right, with their pixels. Images that lie on their side are left as they are.
        points: (N, 2) pixels in the left image.
        right: (N, 2) float32 pixels in the right one, NaN where there is no link.

    Returns:
        (N, 2) float32; `right` itself where fewer than `MIN_LINKS` are linked.
    """
    linked = np.isfinite(right[:, 0])
    if any(image.orientation != 1 for image in images) or np.count_nonzero(linked) < MIN_LINKS:
        return right
    grey = (_grey(images[0]), _grey(images[1]))
    there, back = images[1].scale, (1 / images[1].scale[0], 1 / images[1].scale[1])
    seen = resize_points(points.astype(np.float64), images[0].scale)
    found = resize_points(right.astype(np.float64), there)
    # A link whose row differs from its neighbours' would be compared along the wrong one.
    known, rise = seen[linked], found[linked, 1] - seen[linked, 1]
    around = nearest(known, known, min(MIN_LINKS + 1, len(known)))
    rise = np.median(rise[around], axis=1)
    found[linked, 1] = known[:, 1] + rise
    surfaces = _fit(*grey, known, found[linked])
    textured = _deviation(_cut(grey[0], known)) >= _TEXTURE
    # Points of the learned front end often lie on contours, where windows show two surfaces: this is strict.
    good = (surfaces.correlation >= 0.8) & (np.abs(surfaces.x - found[linked, 0]) <= _REACH) & textured
    good &= _of_one_surface(*grey, known, found[linked, 1], surfaces)
    good &= _confirmed(known, surfaces, good)
    x = np.where(good, surfaces.x, np.where(textured, np.nan, found[linked, 0]))
    if np.count_nonzero(good) >= MIN_LINKS and not linked.all():
        exact = _Surfaces(*(each[good] for each in surfaces))
        found[~linked] = _search(grey, seen[~linked], known[good], exact, rise[good])
    found[linked, 0] = x
    found[np.isnan(found[:, 0])] = np.nan
    return resize_points(found, back).astype(np.float32)


def _grey(image: Image) -> np.ndarray:
    """(H, W) float32 of the image as the front end saw it."""
    pixels = image.pixels
    return (pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)).astype(np.float32)


# --- Windows cut from an image, and how similar they are: zero-mean normalised correlation along rows.


def _cut(
    image: np.ndarray, centres: np.ndarray, width: int = _WINDOW, slants: np.ndarray | None = None
) -> np.ndarray:
    """(N, 11, width) float32 of an image (H, W) around centres (N, 2) at any fraction of a pixel.

    Beyond its edge the image's last pixels are repeated. With `slants` (N, 2) a, b, the sample at column u
    and row v from the centre is taken at x + (1 + a)·u + b·v, y + v.
    """
    shape = (len(centres), _WINDOW, width)
    if len(centres) == 0:
        return np.zeros(shape, np.float32)
    u = np.arange(width, dtype=np.float32) - (width - 1) / 2
    v = np.arange(_WINDOW, dtype=np.float32)[:, None] - (_WINDOW - 1) / 2
    x, y = centres.astype(np.float32).T[:, :, None, None]
    columns = x + u
    if slants is not None:
        stretch, shear = slants.astype(np.float32).T[:, :, None, None]
        columns = columns + stretch * u + shear * v
    flat = (
        np.ascontiguousarray(np.broadcast_to(each, shape)).reshape(len(centres), -1)
        for each in (columns, y + v)
    )
    return cv2.remap(image, *flat, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE).reshape(shape)


def _correlate(windows: np.ndarray, strips: np.ndarray) -> np.ndarray:
    """(N, S) zero-mean normalised correlation of (N, h, w) at the S positions of strips (N, h, w + S − 1)."""
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


def _centred(windows: np.ndarray) -> np.ndarray:
    """(N, P) with mean 0."""
    flat = windows.reshape(len(windows), -1)
    return flat - flat.mean(axis=1, keepdims=True)


def _normalised(windows: np.ndarray) -> np.ndarray:
    """(N, P) with mean 0 and length 1."""
    centred = _centred(windows)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-3)


# --- Surfaces: least-squares matching (Gruen 1985) along the row, with a slant.


class _Surfaces(NamedTuple):
    """Where N left windows are in the right image, and how they slant there."""

    x: np.ndarray  # (N,) pixels
    slants: np.ndarray  # (N, 2) minus the change of disparity per pixel to the right, and per pixel down
    correlation: np.ndarray  # (N,) correlation there, −1 to 1


def _fit(
    left: np.ndarray,
    right: np.ndarray,
    points: np.ndarray,
    positions: np.ndarray,
    slants: np.ndarray | None = None,
) -> _Surfaces:
    """Position and slant of least difference, from a first guess that is off by a few pixels at most.

    Args:
        left, right: (H, W) float32.
        points: (N, 2) in the left image.
        positions: (N, 2) guessed in the right one; the row is taken as it is.
        slants: (N, 2) guessed; none when absent.
    """
    x = positions[:, 0].astype(np.float64)
    slants = np.zeros((len(points), 2)) if slants is None else slants.astype(np.float64)
    if len(points) == 0:
        return _Surfaces(x, slants, np.zeros(0))
    wide = _cut(left, points, _WINDOW + 2)
    windows, slope = wide[:, :, 1:-1], (wide[:, :, 2:] - wide[:, :, :-2]) / 2
    template = _normalised(windows)
    length = np.maximum(np.linalg.norm(_centred(windows), axis=1), 1e-3)
    reach = np.arange(_WINDOW, dtype=np.float32) - (_WINDOW - 1) / 2
    parts = (slope, slope * reach, slope * reach[:, None])  # change with shift, stretch and shear
    slopes = np.stack([_centred(part) / length[:, None] for part in parts], axis=2)
    squares = np.einsum("nki,nkj->nij", slopes, slopes)
    diagonal = np.arange(3)
    squares[:, diagonal, diagonal] *= 1 + 1e-3  # for windows that show texture in one direction only
    squares[:, diagonal, diagonal] += 1e-9
    inverse = np.linalg.inv(squares)
    for _ in range(6):  # four are enough for nearly all
        seen = _normalised(_cut(right, np.column_stack([x, positions[:, 1]]), slants=slants))
        step = np.einsum("nij,nj->ni", inverse, np.einsum("nki,nk->ni", slopes, seen - template))
        shift, change = np.clip(step[:, 0], -1.0, 1.0), np.clip(step[:, 1:], -0.2, 0.2)
        # The window is moved by the inverse of the step that would move the template.
        stretch = (1 + slants[:, 0]) / (1 + change[:, 0])
        x = x - stretch * shift
        slants = np.column_stack([stretch - 1, slants[:, 1] - stretch * change[:, 1]])
        slants = np.clip(slants, -0.7, 0.7)  # steeper surfaces are hardly seen by both cameras
    seen = _normalised(_cut(right, np.column_stack([x, positions[:, 1]]), slants=slants))
    return _Surfaces(x, slants, np.einsum("nk,nk->n", template, seen))


def _of_one_surface(
    left: np.ndarray, right: np.ndarray, points: np.ndarray, y: np.ndarray, found: _Surfaces
) -> np.ndarray:
    """(N,) bool: each half of the window is found where the whole is, within half a pixel.

    Beside an edge in depth the window shows two surfaces and is found where the more textured one is, which
    need not be that of the point. `y` (N,) are the rows in the right image.
    """
    windows = _cut(left, points)
    strips = _cut(right, np.column_stack([found.x, y]), _WINDOW + 2 * _REACH, found.slants)
    one = np.ones(len(points), bool)
    if len(points) == 0:
        return one
    low, high, whole = (0, _WINDOW // 2 + 1), (_WINDOW // 2, _WINDOW), (0, _WINDOW)
    for (top, bottom), (begin, end) in ((whole, low), (whole, high), (low, whole), (high, whole)):
        half = windows[:, top:bottom, begin:end]
        scores = _correlate(half, strips[:, top:bottom, begin : end + 2 * _REACH])
        one &= (np.abs(_peaks(scores) - _REACH) <= 0.5) | (_deviation(half) < _TEXTURE)
    return one


def _predict(points: np.ndarray, known: np.ndarray, found: _Surfaces, rows: np.ndarray) -> np.ndarray:
    """(N, k) x in the right image at which surfaces of other points would show left points (N, 2).

    Args:
        points: (N, 2) in the left image.
        known: (K, 2) left points whose surfaces `found` are.
        found: of the known points.
        rows: (N, k) of `known`, those asked for each point.
    """
    step = points[:, None] - known[rows]
    return found.x[rows] + step[..., 0] + np.einsum("nki,nki->nk", found.slants[rows], step)


def _confirmed(points: np.ndarray, found: _Surfaces, good: np.ndarray) -> np.ndarray:
    """(N,) bool: the surface hardly slants, or three of the eight around it that are `good` (N,) agree.

    A window across an edge in depth is fitted by a steep plane where there is none.
    """
    flat = np.hypot(*found.slants.T) <= 0.15
    others = np.flatnonzero(good)
    if len(others) <= 3:
        return flat
    distance = np.linalg.norm(points[:, None] - points[None, others], axis=2)
    distance[distance < _WINDOW / 4] = np.inf  # itself, and points whose windows are the same
    count = min(8, len(others))
    rows = np.argpartition(distance, count - 1, axis=1)[:, :count]
    known = _Surfaces(*(each[others] for each in found))
    error = np.abs(_predict(points, points[others], known, rows) - found.x[:, None])
    error[~np.isfinite(np.take_along_axis(distance, rows, axis=1))] = np.inf
    return flat | ((error <= 1.0).sum(axis=1) >= 3)


# --- Points without a link, searched along their row.


def _search(
    images: tuple[np.ndarray, np.ndarray],
    points: np.ndarray,
    known: np.ndarray,
    surfaces: _Surfaces,
    rise: np.ndarray,
) -> np.ndarray:
    """(N, 2) positions in the right image of left points (N, 2) without a link, NaN where none is certain.

    Args:
        images: left and right.
        points: those without a link; each is searched where the surfaces around it predict it.
        known: (K, 2) left points whose surfaces are known.
        surfaces: of the known points.
        rise: (K,) rows that the known points are lower in the right image.
    """
    rows = nearest(known, points, MIN_LINKS)
    y = points[:, 1] + np.median(rise[rows], axis=1)
    predicted = _predict(points, known, surfaces, rows)
    middle = np.median(predicted, axis=1)
    start = np.maximum(predicted.min(axis=1) - _REACH, middle - 32)  # 64 pixels are searched at most
    stop = np.minimum(predicted.max(axis=1) + _REACH, middle + 32)
    x, correlation, clear = _along_rows(*images, points, y, start, stop, surfaces.slants[rows[:, 0]])
    found = _Surfaces(x, surfaces.slants[rows[:, 0]].copy(), correlation)
    likely = np.flatnonzero(clear & (correlation >= 0.6))  # while the slant is that of a neighbour
    seen, guess = points[likely], np.column_stack([x[likely], y[likely]])
    fitted = _fit(*images, seen, guess, found.slants[likely])
    good = (fitted.correlation >= 0.9) & (np.abs(fitted.x - guess[:, 0]) <= _REACH / 2)
    good &= _of_one_surface(*images, seen, guess[:, 1], fitted)
    # The same disparities, seen from the positions found, must lead back within a pixel.
    stretch, offset = 1 + fitted.slants[:, :1], guess[:, 0] + seen[:, 0]
    back, _, _ = _along_rows(
        *images[::-1],
        np.column_stack([fitted.x, guess[:, 1]]),
        seen[:, 1],
        offset - stop[likely],
        offset - start[likely],
        np.hstack([1 / stretch - 1, -fitted.slants[:, 1:] / stretch]),
    )
    good &= np.abs(back - seen[:, 0]) <= 1.0
    for whole, part in zip(found, fitted, strict=True):
        whole[likely] = part
    certain = np.zeros(len(points), bool)
    certain[likely[good]] = True
    both = _Surfaces(*(np.concatenate(pair) for pair in zip(found, surfaces, strict=True)))
    trusted = np.concatenate([certain, np.ones(len(known), bool)])
    certain &= _confirmed(np.concatenate([points, known]), both, trusted)[: len(points)]
    return np.where(certain[:, None], np.column_stack([found.x, y]), np.nan)


def _along_rows(
    image: np.ndarray,
    other: np.ndarray,
    points: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    slants: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best positions of points (N, 2) on rows `y` (N,) of the other image, `start` to `stop` (N,).

    Returns:
        x (N,), correlation (N,), and (N,) bool: not at an end of the range, clearly better than any other
        position, and of enough texture.
    """
    if len(points) == 0:
        return np.zeros(0), np.zeros(0), np.zeros(0, bool)
    windows = _cut(image, points)
    # A strip is cut in steps of one column of the slanted window.
    step = 1 + slants[:, 0]
    counts = np.ceil((stop - start) / step).astype(int) + 1
    most = int(counts.max())
    middles = np.column_stack([start + step * (most - 1) / 2, y])
    scores = _correlate(windows, _cut(other, middles, most + _WINDOW - 1, slants))
    number = np.arange(most)
    scores[number >= counts[:, None]] = -1.0
    best, correlation = scores.argmax(axis=1), scores.max(axis=1)
    # A smooth surface has one broad peak, which is no rival of itself: only another peak is, 3 pixels away.
    beside = np.pad(scores, ((0, 0), (1, 1)), constant_values=-1.0)
    peaked = (scores >= beside[:, :-2]) & (scores >= beside[:, 2:])
    rival = np.where(peaked & (np.abs(number - best[:, None]) >= 3), scores, -1.0).max(axis=1)
    clear = (best > 0) & (best < counts - 1) & (correlation - rival >= 0.1)
    return start + step * _peaks(scores), correlation, clear & (_deviation(windows) >= _TEXTURE)
