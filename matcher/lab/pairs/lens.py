"""Smooth distortions of an image: radial, as of lenses, and free-form, interpolated between coarse knots."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

GRID = (13, 17)  # rows and columns of the coarse field
ITERATIONS = 4  # of the inverse; each reduces its error to about a tenth (the slope of the field)


@dataclass(frozen=True, eq=False)
class Lens:
    """A lens distortion: pixel p of the image corresponds to pixel p + field(p) of a pinhole camera."""

    field: np.ndarray  # (H, W, 2) float32, pixels

    def to_pinhole(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions (float32 arrays of one shape) in this image → positions in the pinhole image."""
        offset = _sampled(self.field, x, y)
        return x + offset[..., 0], y + offset[..., 1]

    def from_pinhole(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions in the pinhole image → positions in this image, to about 0.01 pixels."""
        u, v = x, y
        for _ in range(ITERATIONS):
            offset = _sampled(self.field, u, v)
            u, v = x - offset[..., 0], y - offset[..., 1]
        return u, v


def _sampled(field: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(…, 2) field at positions of any shape; outside the image that of its border."""
    flat = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(-1, 1)
    found = cv2.remap(
        field,
        np.ascontiguousarray(flat, np.float32),
        np.ascontiguousarray(y.reshape(flat.shape), np.float32),
        cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return found.reshape(*x.shape, 2)


def draw_lens(size: tuple[int, int], rng: np.random.Generator) -> Lens:
    """A radial distortion, a free-form one, or both, for images of `size` (width, height)."""
    width, height = size
    rows, columns = GRID
    x, y = np.meshgrid(np.linspace(-1, 1, columns) * width / 2, np.linspace(-1, 1, rows) * height / 2)
    field = np.zeros((rows, columns, 2))
    kind = rng.random()
    if kind < 0.7:
        radius = np.hypot(width, height) / 2
        square = (x * x + y * y) / radius**2
        factor = rng.uniform(-0.1, 0.1) * square + rng.uniform(-0.04, 0.04) * square**2
        field += np.stack([x * factor, y * factor], -1)
    if kind > 0.5:
        knots = rng.uniform(-0.012, 0.012, (4, 5, 2)) * max(size)
        field += cv2.resize(knots, (columns, rows), interpolation=cv2.INTER_CUBIC)
    return Lens(cv2.resize(field.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC))
