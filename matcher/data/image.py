"""One image as front ends take it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from matcher.data.geometry import (
    UPRIGHT,
    resize_points,
    resized,
    stored_to_upright,
    upright_size,
    upright_to_stored,
)


@dataclass(frozen=True, eq=False, repr=False)
class Image:
    """One image, upright and resized, ready for a front end; `read_image` makes one of a file.

    >>> import numpy as np
    >>> from matcher import Image
    >>> image = Image(np.zeros((60, 80), np.uint8), size=(160, 120), scale=(0.5, 0.5))
    >>> image.to_stored(np.array([[0.0, 0.0]])).tolist()
    [[0.5, 0.5]]
    """

    pixels: np.ndarray  # (H, W) or (H, W, 3) RGB, uint8
    size: tuple[int, int]  # (width, height) as stored in the file, before orientation and resize
    scale: tuple[float, float] = (1.0, 1.0)  # (sx, sy) = resized / upright size, after rounding
    orientation: int = 1  # EXIF 1-8: how the stored pixels were turned to become `pixels`
    path: Path | None = None
    mask: np.ndarray | None = None  # (H, W) bool, True where keypoints may lie
    exif_orientation: int | None = None  # of the file, if it was not applied; else `orientation`
    # (H, W) grey, stored pixels at the file's resolution and depth: uint8, uint16 or float32 up to 255;
    # refinement reads it. And (H, W) bool, where it may.
    stored: np.ndarray | None = None
    stored_mask: np.ndarray | None = None

    @property
    def stored_scale(self) -> np.ndarray:
        """(2,) float32: `scale` along the stored image's x and y axes, as `Features.scale` holds it."""
        turned = self.orientation >= 5
        return np.asarray(self.scale[::-1] if turned else self.scale, dtype=np.float32)

    @property
    def axes_to_stored(self) -> np.ndarray:
        """(2, 2) float64: the linear map from vectors of `pixels` to vectors of the stored image."""
        return UPRIGHT[self.orientation].T @ np.diag([1 / self.scale[0], 1 / self.scale[1]])

    def grey(self) -> np.ndarray:
        """(H, W) uint8: `pixels` without colour."""
        if self.pixels.ndim == 2:
            return self.pixels
        return cv2.cvtColor(self.pixels, cv2.COLOR_RGB2GRAY)

    def to_stored(self, points: np.ndarray) -> np.ndarray:
        """Points (…, 2) of `pixels` → stored pixels, float64."""
        upright = resize_points(points, (1 / self.scale[0], 1 / self.scale[1]))
        return upright_to_stored(upright, self.size, self.orientation)

    def from_stored(self, points: np.ndarray) -> np.ndarray:
        """Stored pixels (…, 2) → points of `pixels`, float64; the inverse of `to_stored`."""
        return resize_points(stored_to_upright(points, self.size, self.orientation), self.scale)

    def resized(self, factor: float) -> Image:
        """The same image with fewer or more pixels, and its mask."""
        import cv2

        height, width = self.pixels.shape[:2]
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        how = cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC
        mask = self.mask
        if mask is not None:
            mask = cv2.resize(mask * np.uint8(255), size, interpolation=cv2.INTER_AREA) > 127
        scale = (self.scale[0] * size[0] / width, self.scale[1] * size[1] / height)
        return replace(self, pixels=cv2.resize(self.pixels, size, interpolation=how), mask=mask, scale=scale)

    def is_reduced(self, resize: int | None) -> bool:
        """Whether it was made smaller than to this longer side, because it was soft."""
        height, width = self.pixels.shape[:2]
        full, _ = resized(upright_size(self.size, self.orientation), resize)
        return width * height < full[0] * full[1]

    def features_fields(self) -> dict[str, Any]:
        """What `Features` take from their image: size, scale and orientations, as keyword arguments."""
        exif = self.orientation if self.exif_orientation is None else self.exif_orientation
        return {
            "size": np.asarray(self.size, dtype=np.float32),
            "scale": self.stored_scale,
            "exif_orientation": np.asarray(exif),
            "view_orientation": None if exif == self.orientation else np.asarray(self.orientation),
        }

    def __repr__(self) -> str:
        height, width = self.pixels.shape[:2]
        colour = "grey" if self.pixels.ndim == 2 else "RGB"
        parts = [f"{self.size[0]} x {self.size[1]} stored", f"{width} x {height} {colour}"]
        parts += [f"EXIF {self.orientation}"] * (self.orientation != 1)
        parts += ["masked"] * (self.mask is not None)
        return f"Image({', '.join(parts)}{'' if self.path is None else f', {str(self.path)!r}'})"
