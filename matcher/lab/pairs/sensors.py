"""Pairs as of two different sensors, with exact homographies: a photo and a warp of it, both recoloured.

Each image mixes the colours of the photo with weights of its own, of either sign, as sensors of other
wavelengths would, and its grey values go through a random curve that rises and falls. So edges stay, but
which side of them is the brighter one differs from place to place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from matcher.data.images import read_image
from matcher.errors import UsageError
from matcher.lab.pairs.protocols import HomographyPair, PairImage, PairSet
from matcher.lab.pairs.synthetic import Level, PairsOnAccess, draw_homography, warp

_SIDE = 640  # pixels of the longer side
_WARP = Level(rotation=15, perspective=0.1, scale=1.2, shift=0.05, light=0)
_KNOTS = (3, 7)  # of a curve, between its ends
_WEIGHT_SPREAD = 0.7  # standard deviation of a colour's weight, 1/3 on average
_LEAST_SUM = 0.2  # of the weights


@dataclass(frozen=True, eq=False)
class SensorPairs(PairsOnAccess[HomographyPair]):
    """A photo and a warp of it, each seen by a sensor of its own."""

    def make(self, position: int) -> HomographyPair:
        """The photo first."""
        turn, index = divmod(position, len(self.photos))
        path = self.photos[np.random.default_rng([self.seed, turn]).permutation(len(self.photos))[index]]
        photo = read_image(path, resize=_SIDE, upright=False).pixels
        rng = np.random.default_rng([self.seed, position, 3])
        homography = draw_homography((photo.shape[1], photo.shape[0]), _WARP, rng)
        images = (PairImage(path, recoloured(view, rng)) for view in (photo, warp(photo, homography)))
        return HomographyPair(
            f"{path.parent.name}/{path.name} number {position}", "two sensors", *images, homography
        )


def recoloured(photo: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The photo (H, W) or (H, W, 3) uint8 as another sensor might see it, (H, W) uint8."""
    channels = photo if photo.ndim == 3 else photo[..., None]
    weights = rng.normal(1 / 3, _WEIGHT_SPREAD, channels.shape[2])
    grey = channels.astype(np.float32) @ (weights / max(_LEAST_SUM, abs(weights.sum()))).astype(np.float32)
    grey = cv2.normalize(grey, None, 0, 255, cv2.NORM_MINMAX)
    grey = cv2.GaussianBlur(grey, (0, 0), rng.uniform(0.3, 1.5))
    knots = rng.integers(*_KNOTS)
    values = np.interp(grey, [0, *np.sort(rng.uniform(0, 255, knots)), 255], rng.uniform(0, 255, knots + 2))
    noise = rng.normal(0, rng.uniform(1, 8), grey.shape)
    return np.clip(values + noise, 0, 255).astype(np.uint8)


def sensor_set(photos: Sequence[Path], *, count: int = 100, seed: int = 0) -> PairSet:
    """`count` pairs of a photo and a warp of it, as of two sensors.

    Raises:
        UsageError: a count below 1.
    """
    if count < 1:
        raise UsageError(f"the number of pairs must be at least 1, not {count}")
    note = f"{len(photos)} photos, recoloured at random as if by two sensors. Seed {seed}"
    return PairSet("sensors", "homography", SensorPairs(tuple(photos), count, seed), oracle=True, note=note)
