"""Two images as one: image 0 warped onto image 1, and pictures of both in which misalignment shows."""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from matcher.errors import UsageError
from matcher.geometry import FROM_CORNER, upright_matrix
from matcher.images import at_one_depth
from matcher.types import Image

LARGEST_SIDE = 32_000  # pixels; OpenCV warps no image whose side needs more than 15 bits


class Laid(NamedTuple):
    """Two images on the pixels of the second."""

    below: np.ndarray  # (H, W, 3) RGB, image 1, of its type
    above: np.ndarray  # (H, W, 3) RGB, image 0 warped; beyond its edge undefined
    covered: np.ndarray  # (H, W) bool, where image 0 lies


def lay_over(first: Image, second: Image, H_1_from_0: np.ndarray) -> Laid:
    """Warp image 0 onto the pixels of image 1, both upright, by a (3, 3) of stored pixels; `UsageError`: a
    matrix of another shape, not finite or singular, or images too large to warp."""
    matrix = np.asarray(H_1_from_0, dtype=np.float64)
    if matrix.shape != (3, 3) or not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix) < 3:
        raise UsageError("H_1_from_0 must be an invertible (3, 3) matrix of finite numbers")
    shape = second.pixels.shape[1::-1]
    if max(*shape, *first.pixels.shape[:2]) > LARGEST_SIDE:
        raise UsageError(f"images of more than {LARGEST_SIDE} pixels a side cannot be warped; shrink them")
    warp = stored_to_pixels(second) @ matrix @ np.linalg.inv(stored_to_pixels(first))
    # Image 0 at about the size at which it is shown, so that warping it does not alias, and the warp of the
    # sign that puts its middle before the horizon.
    rows, columns = first.pixels.shape[:2]
    pixels, lifted = first.pixels, warp @ [(columns - 1) / 2, (rows - 1) / 2, 1.0]
    if lifted[2] < 0:
        warp, lifted = -warp, -lifted
    if lifted[2] >= 1e-9:
        jacobian = (warp[:2, :2] - np.outer(lifted[:2] / lifted[2], warp[2, :2])) / lifted[2]
        factor = float(np.sqrt(abs(np.linalg.det(jacobian))))
        right, bottom = shape
        *seen, ahead = np.linalg.inv(warp) @ [[0, right, right, 0], [0, 0, bottom, bottom], [1, 1, 1, 1]]
        if ahead.min() > 1e-9:  # the part that is shown, which is bounded
            seen, margin = np.array(seen) / ahead, 4 / min(factor, 1)
            start = np.clip(seen.min(axis=1) - margin, 0, (columns - 1, rows - 1)).astype(int)
            stop = np.clip(seen.max(axis=1) + margin, start + 1, (columns, rows)).astype(int)
            pixels = pixels[start[1] : stop[1], start[0] : stop[0]]
            warp = warp @ [[1, 0, start[0]], [0, 1, start[1]], [0, 0, 1]]
            columns, rows = stop - start
        if factor <= 0.7:
            size = (max(1, round(columns * factor)), max(1, round(rows * factor)))
            pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
            warp = warp @ np.linalg.inv(resizing((size[0] / columns, size[1] / rows)))
    above = cv2.warpPerspective(as_colour(pixels), warp, shape, borderMode=cv2.BORDER_REPLICATE)
    covered = cv2.warpPerspective(np.full(pixels.shape[:2], 255, np.uint8), warp, shape) > 127
    # What lies beyond the warp's horizon would be a mirror image.
    back, x, y = np.linalg.inv(warp), np.arange(shape[0]), np.arange(shape[1])
    return Laid(
        as_colour(second.pixels), above, covered & (back[2, 0] * x + back[2, 1] * y[:, None] + back[2, 2] > 0)
    )


def checkerboard(laid: Laid) -> np.ndarray:
    """(H, W, 3): squares that alternate between the two, eight of them along the longer side."""
    below, above, covered = laid
    side = max(1.0, max(covered.shape) / 8)
    rows, columns = (np.arange(length) // side for length in covered.shape)
    board = (rows[:, None] + columns) % 2 == 0
    canvas = np.where((board & covered)[..., None], above, below)
    edges = np.diff(board, axis=0, append=board[-1:]) | np.diff(board, axis=1, append=board[:, -1:])
    edges &= covered
    canvas[edges] = canvas[edges] // 2 + 127  # where the two agree no square could be seen
    return canvas


def blend(laid: Laid) -> np.ndarray:
    """(H, W, 3): red from image 0, blue from image 1, green from both, so grey where they agree."""
    grey0, grey1 = (cv2.cvtColor(x, cv2.COLOR_RGB2GRAY) for x in (laid.above, laid.below))
    both = np.stack([grey0, (grey0.astype(np.uint16) + grey1) // 2, grey1], axis=-1).astype(np.uint8)
    return np.where(laid.covered[..., None], both, grey1[..., None] // 2)


def difference(laid: Laid) -> np.ndarray:
    """(H, W, 3): the absolute difference of each channel; black where the two agree or only one lies."""
    return cv2.absdiff(*at_one_depth(laid[:2])) * laid.covered[..., None]


def stored_to_pixels(image: Image) -> np.ndarray:
    """(3, 3) stored pixels → pixels of `image.pixels`, which is upright and resized."""
    return resizing(image.scale) @ upright_matrix(image.size, image.orientation)


def resizing(scale: tuple[float, float]) -> np.ndarray:
    """(3, 3) that maps points of an image to those of the resized one."""
    return np.linalg.inv(FROM_CORNER) @ np.diag([*scale, 1.0]) @ FROM_CORNER


def as_colour(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) of a grey or RGB image."""
    return cv2.cvtColor(pixels, cv2.COLOR_GRAY2RGB) if pixels.ndim == 2 else pixels
