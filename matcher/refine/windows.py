"""Windows around matches in two images, sampled on one grid in a frame halfway between the two views."""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

SIGMA = 0.7  # standard deviation of the window's Gaussian weights, as a share of half its side
_BORDER = {"borderMode": cv2.BORDER_REPLICATE}


class Grid(NamedTuple):
    """The samples of a window, row by row."""

    side: int  # samples along one side
    offsets: np.ndarray  # (3, n) float32: (1, x, y) of every sample relative to the centre
    outer: np.ndarray  # (3, m) the same with one more sample on every side, for derivatives
    weights: np.ndarray  # (n,) float32, sum 1; isotropic, so that they do not depend on rotation

    @staticmethod
    def of(side: int) -> Grid:
        """A square window with an odd number of samples along one side."""
        inner, outer = (_offsets(n) for n in (side, side + 2))
        sigma = SIGMA * (side - 1) / 2
        weights = np.exp(-(inner[1] ** 2 + inner[2] ** 2) / (2 * sigma**2))
        return Grid(side, inner, outer, weights / weights.sum())


def _offsets(side: int) -> np.ndarray:
    y, x = np.mgrid[:side, :side].reshape(2, -1).astype(np.float32) - np.float32((side - 1) / 2)
    return np.stack([np.ones_like(x), x, y])


def middle_frames(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maps (K, 2, 2) from a frame halfway between the views to image 0 and to image 1, for maps 1 from 0.

    Half of the deformation lies on either side, and a pixel of the frame is one of the image that shows the
    surface at the lower resolution. Swapping the images rotates the frame and changes nothing else.
    """
    half = _square_root(_square_root(np.swapaxes(maps, 1, 2) @ maps))  # V √S Vᵀ of maps U S Vᵀ
    inverse, area = np.linalg.inv(half), zoom_of(maps) ** 2
    zoom = np.maximum(area, 1 / area)[:, None, None] ** 0.25
    return zoom * inverse, zoom * maps @ inverse


def _square_root(matrices: np.ndarray) -> np.ndarray:
    """Of symmetric positive definite matrices (K, 2, 2), in closed form."""
    product = zoom_of(matrices)  # of the two roots of its eigenvalues
    both = np.sqrt(matrices[:, 0, 0] + matrices[:, 1, 1] + 2 * product)  # their sum
    return (matrices + product[:, None, None] * np.eye(2)) / both[:, None, None]


def zoom_of(maps: np.ndarray) -> np.ndarray:
    """(K,) scale of maps (K, 2, 2): the geometric mean of their singular values."""
    return np.sqrt(np.abs(maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0]))


class Pyramid:
    """An image at full, half, quarter … resolution, computed on first use."""

    def __init__(self, grey: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Grey values (H, W) of uint8, uint16 or float32, and (H, W) bool, True where they may be used."""
        self._grey = grey
        self._levels: list[np.ndarray] = []
        self.mask = None if mask is None else mask.astype(np.uint8)
        self.shape = grey.shape

    def release(self) -> None:
        """Free the memory of all levels; they are computed again when they are needed."""
        self._levels = []

    @property
    def in_memory(self) -> bool:
        """Whether any level is."""
        return bool(self._levels)

    def level(self, index: int) -> np.ndarray:
        """The image at 2^-index times the size; its pixel (x, y) is at (x, y) · 2^index of level 0."""
        if not self._levels:
            values = np.ascontiguousarray(self._grey, dtype=np.float32)
            self._levels = [values / np.float32(257) if self._grey.dtype == np.uint16 else values]
        while len(self._levels) <= index:
            self._levels.append(cv2.pyrDown(self._levels[-1]))
        return self._levels[index]

    def level_of(self, maps: np.ndarray) -> np.ndarray:
        """(K,) the level whose pixel size is nearest to the scale of maps (K, 2, 2)."""
        most = max(0, int(np.log2(min(self.shape))) - 3)
        return np.rint(np.log2(zoom_of(maps).clip(1e-9))).clip(0, most).astype(np.int64)

    def sample(self, affine: np.ndarray, level: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(K, n) float32 values by bilinear interpolation; the edge is replicated beyond the image.

        Args:
            affine: (K, 2, 3), from (1, x, y) in the frame to pixels of level 0.
            level: (K,) to sample, from `level_of`.
            offsets: (3, n) of a grid.
        """
        affine = (affine * np.exp2(-level)[:, None, None]).astype(np.float32)
        first = int(level[0]) if len(level) else 0
        if (level == first).all():
            return cv2.remap(self.level(first), *_coordinates(affine, offsets), cv2.INTER_LINEAR, **_BORDER)
        found = np.empty((len(affine), offsets.shape[1]), np.float32)
        for index in np.unique(level).tolist():
            chosen = np.flatnonzero(level == index)
            coordinates = _coordinates(affine[chosen], offsets)
            found[chosen] = cv2.remap(self.level(index), *coordinates, cv2.INTER_LINEAR, **_BORDER)
        return found

    def usable(self, affine: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(K, n) float32: 1 for samples on the image and in its mask, else 0; arguments as in `sample`."""
        x, y = _coordinates(affine.astype(np.float32), offsets)
        height, width = self.shape
        found = (x >= 0) & (y >= 0) & (x <= width - 1) & (y <= height - 1)
        if self.mask is not None:
            found &= cv2.remap(self.mask, x, y, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT) > 0
        return found.astype(np.float32)

    def contains(self, affine: np.ndarray, half: float) -> np.ndarray:
        """(K,) bool: windows of half side `half` entirely inside the image; all False if there is a mask."""
        if self.mask is not None:
            return np.zeros(len(affine), dtype=bool)
        reach = np.abs(affine[:, :, 1:]).sum(axis=2) * half
        most = np.array([self.shape[1] - 1, self.shape[0] - 1])
        return ((affine[:, :, 0] >= reach) & (affine[:, :, 0] + reach <= most)).all(axis=1)


def _coordinates(affine: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return affine[:, 0] @ offsets, affine[:, 1] @ offsets
