"""Images of gradient magnitude as ONNX operations: the same as `matcher.images`."""

from __future__ import annotations

import numpy as np

from matcher.images import FLOOR, GREY, LEAST, NEIGHBOURHOOD
from matcher.onnx.builder import Builder, Value

WHITE = 255.0  # the grey value that is 1 in our models
_DIFFERENCE, _SMOOTH = np.array([-1, 0, 1], np.float32), np.array([1, 2, 1], np.float32)  # Sobel's


def gradient_image(g: Builder, grey: Value, smoothing: float) -> Value:
    """The gradient magnitude of grey values (1, 1, H, W) relative to the average around each pixel.

    Grey values are from 0 to 1, also those of what is returned.
    """
    smooth = _filtered(g, g.Round(grey * WHITE), *[_gaussian(smoothing)] * 2)
    across = _filtered(g, smooth, _DIFFERENCE, _SMOOTH)
    down = _filtered(g, smooth, _SMOOTH, _DIFFERENCE)
    magnitude = g.Sqrt(across * across + down * down)
    around = _filtered(g, magnitude, *[_gaussian(NEIGHBOURHOOD)] * 2)
    # Row by row, because one sum of so many pixels loses digits.
    around = around + g.ReduceMean(g.ReduceMean(around, [3]), [2]) * FLOOR
    return g.Floor(g.Min(magnitude / g.Max(around, LEAST) * float(GREY), WHITE)) / WHITE


def _gaussian(deviation: float) -> np.ndarray:
    """As long as OpenCV makes it for float32."""
    reach = round(deviation * 8 + 1) // 2
    values = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
    return (values / values.sum()).astype(np.float32)


def _filtered(g: Builder, image: Value, along_x: np.ndarray, along_y: np.ndarray) -> Value:
    """Correlated with one filter along x and one along y; beyond the edge the image is mirrored."""
    for axis, taps in ((3, along_x), (2, along_y)):
        shape = [1, 1, 1, 1]
        shape[axis] = len(taps)
        image = g.Conv(_mirrored(g, image, axis, len(taps) // 2), taps.reshape(shape))
    return image


def _mirrored(g: Builder, image: Value, axis: int, reach: int) -> Value:
    """More samples on both sides, the edge's own not repeated; of any number, as Pad has them not."""
    side = g.size(image, axis)
    place = g.range(side + 2 * reach) - reach
    period = g.Max((side - 1) * 2, 1)
    place = g.Mod(place, period)  # not negative
    return g.Gather(image, g.Min(place, period - place), axis=axis)
