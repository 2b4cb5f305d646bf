"""Images of gradient magnitude, for pairs whose grey values have little in common.

Visible light and infrared, day and night, a photo and a map show the same edges, but which side of an edge is
the brighter one differs from place to place; no inversion of the whole image undoes that. The magnitude of
the gradient does not depend on it.
"""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np

from matcher.data.image import Image

# Chosen on photos whose colours went through random non-monotonic curves, among 1.2, 2 and 3, and 10, 20, 40;
# magnitudes matched better than their logarithms and their square roots.
_SMOOTHING = 2.0  # pixels of the matched image, of the Gaussian before the derivatives
_NEIGHBOURHOOD = 20.0  # pixels, of the Gaussian that averages the magnitudes around a pixel
_FLOOR = 0.1  # of the mean magnitude, so that noise in flat areas stays dark
_LEAST = 0.1  # of an average; smaller ones are rounding errors
_GREY = 90  # grey value of a magnitude equal to the average around it


def gradient_image(image: Image) -> Image:
    """The gradient magnitude of an image relative to the average around each pixel, (h, w) uint8."""
    pixels = image.pixels
    grey = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    smooth = cv2.GaussianBlur(grey.astype(np.float32), (0, 0), _SMOOTHING)
    magnitude = cv2.magnitude(*(cv2.Sobel(smooth, cv2.CV_32F, dx, 1 - dx) for dx in (1, 0)))
    around = cv2.GaussianBlur(magnitude, (0, 0), _NEIGHBOURHOOD)
    relative = magnitude / np.maximum(around + _FLOOR * around.mean(), _LEAST)
    return replace(image, pixels=np.clip(_GREY * relative, 0, 255).astype(np.uint8))
