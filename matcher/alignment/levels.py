"""An image at several sizes, each cut into overlapping windows whose features are extracted separately."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import cv2
import numpy as np

from matcher.data.features import Features
from matcher.data.geometry import warp_points
from matcher.data.image import Image
from matcher.data.tensors import to_numpy
from matcher.drawing.composites import stored_to_pixels
from matcher.pipeline import Pipeline

WINDOW, OVERLAP = 1024, 256  # pixels


@dataclass(frozen=True, eq=False)
class Window:
    """Features of a part of an image, in pixels of that part."""

    features: Features
    from_stored: np.ndarray  # (3, 3) stored pixels of the image → pixels of the part

    def outside(self, quads: list[np.ndarray]) -> Window:
        """The window without the keypoints inside of quadrilaterals (4, 2) of stored pixels."""
        keep = np.ones(len(self.features), dtype=bool)
        points = to_numpy(self.features.keypoints).astype(np.float32)
        for quad in quads:
            corners = warp_points(quad, self.from_stored).astype(np.float32)
            keep &= [cv2.pointPolygonTest(corners, point.tolist(), False) < 0 for point in points]
        if keep.all():
            return self
        return replace(self, features=self.features.select(keep))


def windows(image: Image, factor: float, pipeline: Pipeline) -> Iterator[Window]:
    """The features of an image whose pixels are resized by `factor`, window by window."""
    shown, from_stored = resized_by(image, factor)
    height, width = shown.pixels.shape[:2]
    for top, bottom in _cuts(height):
        for left, right in _cuts(width):
            part = np.s_[top:bottom, left:right]
            mask = None if shown.mask is None else shown.mask[part]
            if mask is not None and not mask.any():
                continue
            cut = as_it_is(np.ascontiguousarray(shown.pixels[part]), mask)
            shift = np.array([[1.0, 0, -left], [0, 1, -top], [0, 0, 1]])
            yield Window(pipeline.extract(cut), shift @ from_stored)


def resized_by(image: Image, factor: float) -> tuple[Image, np.ndarray]:
    """An image of its own, upright and resized, and the (3, 3) map from stored pixels to its pixels."""
    shown = image.resized(factor)
    return as_it_is(shown.pixels, shown.mask), stored_to_pixels(shown)


def as_it_is(pixels: np.ndarray, mask: np.ndarray | None = None) -> Image:
    """Pixels as an image that is neither rotated nor resized."""
    return Image(pixels, size=(pixels.shape[1], pixels.shape[0]), mask=mask)


def _cuts(length: int) -> list[tuple[int, int]]:
    """Overlapping parts of a side, of equal length and at most `WINDOW`."""
    if length <= WINDOW:
        return [(0, length)]
    count = -(-(length - OVERLAP) // (WINDOW - OVERLAP))
    starts = np.linspace(0, length - WINDOW, count).round().astype(int)
    return [(int(start), int(start) + WINDOW) for start in starts]
