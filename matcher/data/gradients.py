"""Images of gradient magnitude, for pairs whose grey values have little in common.

Visible light and infrared, day and night, a photo and a map show the same edges, but which side of an edge is
the brighter one differs from place to place; no inversion of the whole image undoes that. The magnitude of
the gradient does not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import cv2
import numpy as np

from matcher.data.image import Image

# Chosen on photos whose colours went through random non-monotonic curves; magnitudes matched better than
# their logarithms and their square roots.
NEIGHBOURHOOD = 20.0  # pixels, of the Gaussian that averages the magnitudes around a pixel; among 10 and 40
FLOOR = 0.1  # of the mean magnitude, so that noise in flat areas stays dark
LEAST = 0.1  # of an average; smaller ones are rounding errors
GREY = 90  # grey value of a magnitude equal to the average around it
_ROWS = 256  # whose derivatives are computed at a time


def gradient_image(image: Image, smoothing: float) -> Image:
    """The gradient magnitude of an image relative to the average around each pixel, (H, W) uint8.

    It takes about 8 bytes a pixel while it is computed, because images may be large (`matcher.tiled`).

    Args:
        image: resized; what it keeps of the file (`Image.stored`) is left out.
        smoothing: standard deviation in pixels of the Gaussian before the derivatives.
    """
    magnitude = _magnitudes(image.grey(), smoothing)
    around = cv2.GaussianBlur(magnitude, (0, 0), NEIGHBOURHOOD)
    around += FLOOR * around.mean()
    magnitude /= np.maximum(around, LEAST, out=around)
    magnitude *= GREY
    pixels = np.minimum(magnitude, 255, out=magnitude).astype(np.uint8)
    return replace(image, pixels=pixels, stored=None, stored_mask=None)


def _magnitudes(grey: np.ndarray, smoothing: float) -> np.ndarray:
    """(H, W) float32 gradient magnitudes of a smoothed image (H, W) uint8, some rows at a time."""
    found = np.empty(grey.shape, np.float32)
    reach = math.ceil(4 * smoothing) + 2  # pixels that OpenCV's Gaussian and Sobel's derivatives look away
    for top in range(0, len(grey), _ROWS):
        low = max(0, top - reach)
        smooth = cv2.GaussianBlur(grey[low : top + _ROWS + reach].astype(np.float32), (0, 0), smoothing)
        derivatives = (cv2.Sobel(smooth, cv2.CV_32F, dx, 1 - dx) for dx in (1, 0))
        found[top : top + _ROWS] = cv2.magnitude(*derivatives)[top - low : top - low + _ROWS]
    return found
