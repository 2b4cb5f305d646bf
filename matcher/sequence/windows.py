"""Windows cut from an image, and how similar they are: zero-mean normalised correlation along rows."""

from __future__ import annotations

import cv2
import numpy as np

WINDOW = 11  # pixels, the side of what is compared
TEXTURE = 2.0  # grey levels that a window must deviate by, or it has no texture


def cut(
    image: np.ndarray, centres: np.ndarray, width: int = WINDOW, slants: np.ndarray | None = None
) -> np.ndarray:
    """(N, WINDOW, width) float32 of an image around centres (N, 2) at any fraction of a pixel.

    Beyond its edge the image's last pixels are repeated.

    Args:
        image: (H, W) float32.
        centres: (N, 2) xy.
        width: columns of a window.
        slants: (N, 2) a, b: the sample at column u and row v from the centre is taken at x + (1 + a)·u + b·v,
            y + v. None: no slant.
    """
    shape = (len(centres), WINDOW, width)
    if len(centres) == 0:
        return np.zeros(shape, np.float32)
    u = np.arange(width, dtype=np.float32) - (width - 1) / 2
    v = np.arange(WINDOW, dtype=np.float32)[:, None] - (WINDOW - 1) / 2
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


def correlate(windows: np.ndarray, strips: np.ndarray) -> np.ndarray:
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


def peaks(scores: np.ndarray) -> np.ndarray:
    """(N,) where the scores (N, S) are highest, between steps by a parabola."""
    best, last = scores.argmax(axis=1), scores.shape[1] - 1
    rows = np.arange(len(scores))
    before, at, after = (scores[rows, np.clip(best + k, 0, last)] for k in (-1, 0, 1))
    curve = np.minimum(before - 2 * at + after, -1e-6)
    inside = (best > 0) & (best < last)
    return best + np.where(inside, np.clip(0.5 * (before - after) / curve, -0.5, 0.5), 0.0)


def deviation(windows: np.ndarray) -> np.ndarray:
    """(N,) standard deviation of the values of (N, h, w)."""
    return windows.std(axis=(1, 2))
