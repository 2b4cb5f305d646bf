"""Pairs whose scales differ by 2.5 to 6 times, with exact homographies: a photo and a zoomed part of it.

The wide image is the photo made smaller, the other one a part of it at the photo's own resolution, turned and
tilted a little under other light; it is image 1 and image 0 in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from matcher.data.images import read_image
from matcher.errors import UsageError
from matcher.lab.pairs.photometric import degrade
from matcher.lab.pairs.protocols import HomographyPair, PairImage, PairSet
from matcher.lab.pairs.synthetic import LONGER_SIDE, Level, PairsOnAccess, draw_homography, warp

ZOOM = (2.5, 6.0)  # resolution of the part / that of the whole photo
SHARE = (0.5, 0.9)  # side of the part / side of the photo
_TILT = Level(rotation=20, perspective=0.06, scale=1, shift=0, light=0.5)


@dataclass(frozen=True, eq=False)
class ZoomedPairs(PairsOnAccess[HomographyPair]):
    """A photo made smaller, and a part of it at its own resolution."""

    def make(self, position: int) -> HomographyPair:
        """The wide image first in pairs of even number, the part first in the others."""
        turn, index = divmod(position, len(self.photos))
        path = self.photos[np.random.default_rng([self.seed, turn]).permutation(len(self.photos))[index]]
        photo = read_image(path, resize=LONGER_SIDE, upright=False).pixels
        rng = np.random.default_rng([self.seed, position, 2])
        zoom = float(ZOOM[0] * (ZOOM[1] / ZOOM[0]) ** rng.uniform())
        size = np.array([photo.shape[1], photo.shape[0]])
        small = tuple(np.maximum(np.rint(size / zoom), 16).astype(int).tolist())
        wide = cv2.resize(photo, small, interpolation=cv2.INTER_AREA)
        part_size = np.rint(size * rng.uniform(*SHARE)).astype(int)
        corner = rng.integers(0, size - part_size + 1)
        tilt = draw_homography((photo.shape[1], photo.shape[0]), _TILT, rng)
        shift = np.array([[1, 0, -corner[0]], [0, 1, -corner[1]], [0, 0, 1]], dtype=np.float64)
        view = warp(photo, tilt)[corner[1] : corner[1] + part_size[1], corner[0] : corner[0] + part_size[0]]
        part = degrade(np.ascontiguousarray(view), _TILT.light, rng)
        sx, sy = size / small
        photo_from_wide = np.array([[sx, 0, 0.5 * sx - 0.5], [0, sy, 0.5 * sy - 0.5], [0, 0, 1]])
        homography = shift @ tilt @ photo_from_wide
        images = (PairImage(path, wide), PairImage(path, part))
        if position % 2:
            images, homography = images[::-1], np.linalg.inv(homography)
        name = f"{path.parent.name}/{path.name} zoom {zoom:.1f} number {position}"
        return HomographyPair(name, f"zoom {'2.5-4' if zoom < 4 else '4-6'}", *images, homography)


def zoomed_set(photos: Sequence[Path], *, count: int = 100, seed: int = 0) -> PairSet:
    """`count` pairs of a photo and a zoomed part of it.

    Raises:
        UsageError: a count below 1.
    """
    if count < 1:
        raise UsageError(f"the number of pairs must be at least 1, not {count}")
    note = (
        f"{len(photos)} photos, resized to at most {LONGER_SIDE} pixels, and parts of them that have "
        f"{ZOOM[0]:g} to {ZOOM[1]:g} times the resolution. Seed {seed}"
    )
    return PairSet("zoom", "homography", ZoomedPairs(tuple(photos), count, seed), oracle=True, note=note)
