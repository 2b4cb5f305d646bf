"""How sharp an image is: the blur of its edges, and the size below which shrinking it would lose detail.

Images of many sensors are stored with more pixels than their optics, demosaicing or compression resolve, and
others were enlarged. Networks see such an image best at about the size at which its edges become sharp.
"""

from __future__ import annotations

import cv2
import numpy as np

# Blur, in pixels, above which an image is soft, and that it has once resized. Chosen on photos and rendered
# views, enlarged, blurred, darkened, with noise and compression; sharp photos have at most .7.
SHARP = 0.65
_EDGES = 256  # of the image, the strongest ones at a coarse scale, where noise averages out
_FEWEST_EDGES = 20  # with fewer, nothing is known
_COARSE = 4  # pixels of the image to one of that scale
_BLOCK = 5  # coarse pixels a side of blocks, of which each has one edge at most
_RADIUS = 8  # pixels around an edge that are looked at
_SCALES = (1.0, 2.0)  # standard deviations of the Gaussians whose gradients are compared
_SHIFTS = 2  # pixels by which the coarse scale may misplace an edge
_LEAST_GRADIENT = 2.0  # grey values per pixel
_SHARPER_SHARE = 30.0  # percent of the edges that are sharper than the blur: depth of field, motion, shadows
_LEAST_BLUR = 0.1


def edge_blur(grey: np.ndarray) -> float:
    """The standard deviation, in pixels, of a Gaussian that blurs the sharper edges of an image.

    An edge blurred by σ and seen through Gaussians of σ₁ and σ₂ has gradients of the ratio
    √((σ² + σ₂²) / (σ² + σ₁²)) (after Zhuo and Sim 2011), whatever its contrast.

    Args:
        grey: (H, W) uint8.

    Returns:
        The blur; 0 if there are too few edges to tell.
    """
    patches = _patches(grey)
    if len(patches) < _FEWEST_EDGES:
        return 0.0
    fine, coarse = _gradients(patches)
    clear = coarse > _LEAST_GRADIENT
    if np.count_nonzero(clear) < _FEWEST_EDGES:
        return 0.0
    ratio = np.maximum((fine[clear] / coarse[clear]) ** 2, 1.02)  # 1 is an edge of infinite blur
    variance = (_SCALES[1] ** 2 - ratio * _SCALES[0] ** 2) / (ratio - 1)
    return float(np.percentile(np.sqrt(np.maximum(variance, _LEAST_BLUR**2)), _SHARPER_SHARE))


def without_blur(pixels: np.ndarray, least: int) -> float:
    """The factor, at most 1, by which an image can be made smaller with little loss of detail.

    Args:
        pixels: (H, W) grey or (H, W, 3) RGB, uint8.
        least: pixels that the longer side keeps; an image that is smaller stays as it is.
    """
    longer = max(pixels.shape)
    if longer <= least:
        return 1.0
    grey = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    return min(1.0, max(least / longer, SHARP / max(edge_blur(grey), SHARP)))


def _patches(grey: np.ndarray) -> np.ndarray:
    """(N, 2r + 1, 2r + 1) float32 around the strongest edges, N at most `_EDGES`."""
    height, width = grey.shape
    side = 2 * _RADIUS + 1
    small = (width // _COARSE, height // _COARSE)
    if min(small) < 2 * _BLOCK:
        return np.zeros((0, side, side), np.float32)
    shrunk = cv2.resize(grey, small, interpolation=cv2.INTER_AREA)
    edges = (cv2.Sobel(shrunk, cv2.CV_16S, *order) for order in ((1, 0), (0, 1)))
    strength = cv2.magnitude(*(edge.astype(np.float32) for edge in edges))
    rows, columns = (n // _BLOCK for n in strength.shape)
    blocks = strength[: rows * _BLOCK, : columns * _BLOCK].reshape(rows, _BLOCK, columns, _BLOCK)
    blocks = blocks.swapaxes(1, 2).reshape(rows * columns, -1)
    where = blocks.argmax(1)
    best = np.argsort(-blocks.max(1), kind="stable")[:_EDGES]
    block_y, block_x = np.divmod(best, columns)
    y, x = np.divmod(where[best], _BLOCK)
    at = np.stack([block_x * _BLOCK + x, block_y * _BLOCK + y], axis=1)
    at = np.round((at + 0.5) * np.divide([width, height], small) - 0.5).astype(np.int64)
    at = at[np.all((at >= _RADIUS) & (at < np.array([width, height]) - _RADIUS), axis=1)]
    offsets = np.arange(-_RADIUS, _RADIUS + 1)
    x, y = at.T
    return grey[y[:, None, None] + offsets[:, None], x[:, None, None] + offsets].astype(np.float32)


def _gradients(patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N,) gradient magnitudes at both scales, each the largest near the centre of the patch."""
    count, side, _ = patches.shape
    filters = np.concatenate([_filters(scale) for scale in _SCALES])
    # All filters along x, then all along y: two products of matrices are faster than many small ones.
    along = (patches.reshape(count * side, side) @ filters.T).reshape(count, side, -1)
    places = 2 * _SHIFTS + 1
    both = along.swapaxes(1, 2).reshape(-1, side) @ filters.T
    both = both.reshape(count, 2, 2, places, 2, 2, places)
    found = []
    for scale in range(len(_SCALES)):
        one = both[:, scale, :, :, scale]  # (N, filter along x, place, filter along y, place)
        magnitude = np.hypot(one[:, 1, :, 0], one[:, 0, :, 1])
        found.append(magnitude.reshape(count, -1).max(1))
    return found[0], found[1]


def _filters(scale: float) -> np.ndarray:
    """(2 · places, side): a Gaussian and its derivative, centred at places around the patch's centre."""
    places = np.arange(-_SHIFTS, _SHIFTS + 1)[:, None]
    x = np.arange(-_RADIUS, _RADIUS + 1) - places
    gaussian = np.exp(-(x**2) / (2 * scale**2))
    gaussian /= gaussian.sum(1, keepdims=True)
    derivative = gaussian * x
    derivative /= (derivative * x).sum(1, keepdims=True)
    return np.concatenate([gaussian, derivative]).astype(np.float32)
