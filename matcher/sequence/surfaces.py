"""The piece of surface around a point, as a rectified pair shows it: its disparity and how that changes.

Near ground, and near walls seen from the side, change their disparity by up to half a pixel per pixel, so the
same window has another shape in the right image. A window that may not slant finds such points badly and
drops them, and those that it drops are the near ones. Here the window's slant is estimated along with its
position, by least squares over its pixels (Gruen 1985; Baker and Matthews 2004, inverse compositional).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from matcher.sequence.windows import TEXTURE, WINDOW, correlate, cut, deviation, peaks

_ROUNDS = 6  # of least squares; four are enough for nearly all
_STEP = 1.0  # pixels that a round may move a window
_STEEPEST = 0.7  # change of disparity per pixel beyond which surfaces are hardly seen by both cameras
_DAMPING = 1e-3  # share added to the squares, for windows that show texture in one direction only
_HALF_ERROR = 0.5  # pixels that half a window may be off the whole
_HALF_REACH = 4  # pixels to either side in which the half is searched
_STEEP = 0.15  # change of disparity per pixel from which a slant must be confirmed by points around it
_NEIGHBOURS, _CONFIRMING = 8, 3  # of so many points around, so many must confirm it
_CONFIRMED = 1.0  # pixels that a confirming surface may be off


class Surfaces(NamedTuple):
    """Where N left windows are in the right image, and how they slant there."""

    x: np.ndarray  # (N,) pixels
    slants: np.ndarray  # (N, 2) minus the change of disparity per pixel to the right, and per pixel down
    correlation: np.ndarray  # (N,) correlation there, −1 to 1


def fit(
    left: np.ndarray,
    right: np.ndarray,
    points: np.ndarray,
    positions: np.ndarray,
    slants: np.ndarray | None = None,
) -> Surfaces:
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
        return Surfaces(x, slants, np.zeros(0))
    template, slopes, inverse = _template(left, points)
    for _ in range(_ROUNDS):
        seen = _normalised(cut(right, np.column_stack([x, positions[:, 1]]), slants=slants))
        step = np.einsum("nij,nj->ni", inverse, np.einsum("nki,nk->ni", slopes, seen - template))
        shift = np.clip(step[:, 0], -_STEP, _STEP)
        change = np.clip(step[:, 1:], -0.2, 0.2)
        # The window is moved by the inverse of the step that would move the template.
        stretch = (1 + slants[:, 0]) / (1 + change[:, 0])
        x = x - stretch * shift
        slants = np.column_stack([stretch - 1, slants[:, 1] - stretch * change[:, 1]])
        slants = np.clip(slants, -_STEEPEST, _STEEPEST)
    seen = _normalised(cut(right, np.column_stack([x, positions[:, 1]]), slants=slants))
    return Surfaces(x, slants, np.einsum("nk,nk->n", template, seen))


def of_one_surface(
    left: np.ndarray, right: np.ndarray, points: np.ndarray, y: np.ndarray, found: Surfaces
) -> np.ndarray:
    """(N,) bool: each half of the window is found where the whole is.

    Beside an edge in depth the window shows two surfaces and is found where the more textured one is, which
    need not be that of the point. `y` (N,) are the rows in the right image.
    """
    windows = cut(left, points)
    strips = cut(right, np.column_stack([found.x, y]), WINDOW + 2 * _HALF_REACH, found.slants)
    one = np.ones(len(points), bool)
    if len(points) == 0:
        return one
    low, high, whole = (0, WINDOW // 2 + 1), (WINDOW // 2, WINDOW), (0, WINDOW)
    for (top, bottom), (begin, end) in ((whole, low), (whole, high), (low, whole), (high, whole)):
        half = windows[:, top:bottom, begin:end]
        scores = correlate(half, strips[:, top:bottom, begin : end + 2 * _HALF_REACH])
        one &= (np.abs(peaks(scores) - _HALF_REACH) <= _HALF_ERROR) | (deviation(half) < TEXTURE)
    return one


def predict(points: np.ndarray, known: np.ndarray, found: Surfaces, rows: np.ndarray) -> np.ndarray:
    """(N, k) x in the right image at which surfaces of other points would show left points (N, 2).

    Args:
        points: (N, 2) in the left image.
        known: (K, 2) left points whose surfaces `found` are.
        found: of the known points.
        rows: (N, k) of `known`, those asked for each point.
    """
    step = points[:, None] - known[rows]
    return found.x[rows] + step[..., 0] + np.einsum("nki,nki->nk", found.slants[rows], step)


def confirmed(points: np.ndarray, found: Surfaces, good: np.ndarray) -> np.ndarray:
    """(N,) bool: the surface hardly slants, or surfaces around it, of points that are `good` (N,), agree.

    A window across an edge in depth is fitted by a steep plane where there is none.
    """
    flat = np.hypot(*found.slants.T) <= _STEEP
    others = np.flatnonzero(good)
    if len(others) <= _CONFIRMING:
        return flat
    distance = np.linalg.norm(points[:, None] - points[None, others], axis=2)
    distance[distance < WINDOW / 4] = np.inf  # itself, and points whose windows are the same
    count = min(_NEIGHBOURS, len(others))
    rows = np.argpartition(distance, count - 1, axis=1)[:, :count]
    known = Surfaces(*(each[others] for each in found))
    error = np.abs(predict(points, points[others], known, rows) - found.x[:, None])
    error[~np.isfinite(np.take_along_axis(distance, rows, axis=1))] = np.inf
    return flat | ((error <= _CONFIRMED).sum(axis=1) >= _CONFIRMING)


def _template(left: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normalised windows (N, P), their change with shift and slant (N, P, 3), inverse squares (N, 3, 3)."""
    wide = cut(left, points, WINDOW + 2)
    windows = wide[:, :, 1:-1]
    slope = (wide[:, :, 2:] - wide[:, :, :-2]) / 2
    length = np.maximum(np.linalg.norm(_centred(windows), axis=1), 1e-3)
    reach = np.arange(WINDOW, dtype=np.float32) - (WINDOW - 1) / 2
    parts = (slope, slope * reach, slope * reach[:, None])
    slopes = np.stack([_centred(part) / length[:, None] for part in parts], axis=2)
    squares = np.einsum("nki,nkj->nij", slopes, slopes)
    diagonal = np.arange(3)
    squares[:, diagonal, diagonal] *= 1 + _DAMPING
    squares[:, diagonal, diagonal] += 1e-9
    return _normalised(windows), slopes, np.linalg.inv(squares)


def _centred(windows: np.ndarray) -> np.ndarray:
    """(N, P) with mean 0."""
    flat = windows.reshape(len(windows), -1)
    return flat - flat.mean(axis=1, keepdims=True)


def _normalised(windows: np.ndarray) -> np.ndarray:
    """(N, P) with mean 0 and length 1."""
    centred = _centred(windows)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-3)
