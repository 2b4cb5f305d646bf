"""One picture as front ends take it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, eq=False)
class Image:
    """One picture, upright and resized, ready for a front end."""

    pixels: np.ndarray  # (H, W) or (H, W, 3) RGB, uint8
    size: tuple[int, int]  # (width, height) as stored in the file, before orientation and resize
    scale: tuple[float, float] = (1.0, 1.0)  # (sx, sy) = resized / upright size, after rounding
    orientation: int = 1  # EXIF 1-8: how the stored pixels were turned to become upright
    path: Path | None = None
    mask: np.ndarray | None = None  # (H, W) bool, True where keypoints may lie

    @property
    def stored_scale(self) -> np.ndarray:
        """(2,) float32: `scale` along the stored picture's x and y axes, as `Features.scale` holds it."""
        turned = self.orientation >= 5
        return np.asarray(self.scale[::-1] if turned else self.scale, dtype=np.float32)
