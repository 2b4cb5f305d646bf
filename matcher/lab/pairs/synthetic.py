"""Synthetic pairs with exact homographies: image 0 is a photo, image 1 a warped view with other lighting.

The view has the size of the photo and is black outside it. A pair depends on the seed and its own number
only, not on which other pairs are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np

from matcher.data.geometry import inside, warp_points
from matcher.data.images import read_image
from matcher.errors import ImageError, UsageError
from matcher.lab.pairs.photometric import degrade
from matcher.lab.pairs.protocols import HomographyPair, PairImage, PairSet, UnrelatedPair

P = TypeVar("P", HomographyPair, UnrelatedPair)

LONGER_SIDE = 640  # of photos, so that a level means the same for all folders
_MIN_OVERLAP = 0.4  # share of the photo that is visible in the view
_MIN_SIDE = 32


@dataclass(frozen=True)
class Level:
    """How much a view may differ from its photo."""

    rotation: float  # degrees, in both directions
    perspective: float  # corners move by up to this share of the sides
    scale: float  # zoom in or out by up to this factor
    shift: float  # share of the sides
    light: float  # strength of the photometric augmentation, see `degrade`


LEVELS = {
    0: Level(rotation=0, perspective=0, scale=1, shift=0, light=2.0),  # only lighting, but strong
    1: Level(rotation=15, perspective=0.10, scale=1.3, shift=0.05, light=0.5),
    2: Level(rotation=25, perspective=0.16, scale=1.5, shift=0.08, light=0.8),
    3: Level(rotation=35, perspective=0.22, scale=1.8, shift=0.10, light=1.1),
    4: Level(rotation=180, perspective=0.26, scale=2.0, shift=0.10, light=1.4),
}


@dataclass(frozen=True, eq=False)
class PairsOnAccess(Sequence[P]):
    """Pairs made of photos when they are asked for; a pair depends on the seed and its own number only."""

    photos: tuple[Path, ...]
    total: int
    seed: int

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, position: int) -> P:
        if not 0 <= position < self.total:
            raise IndexError(position)
        return self.make(position)

    def make(self, position: int) -> P:
        """The pair of that number."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class SyntheticPairs(PairsOnAccess[HomographyPair]):
    """Warped pairs; pair i has level i modulo the number of levels."""

    levels: tuple[int, ...]

    def make(self, position: int) -> HomographyPair:
        """A photo and a warped view of it."""
        turn, index = divmod(position, len(self.levels))
        level = self.levels[index]
        # All levels use the same photos, in an order that depends on the seed.
        order = np.random.default_rng([self.seed, turn // len(self.photos)]).permutation(len(self.photos))
        path = self.photos[order[turn % len(self.photos)]]
        pixels = read_image(path, resize=LONGER_SIDE, upright=False).pixels
        if min(pixels.shape[:2]) < _MIN_SIDE:
            raise ImageError(
                f"{path}: too small for synthetic pairs; photos need at least {_MIN_SIDE} pixels a side"
            )
        rng = np.random.default_rng([self.seed, level, turn])
        homography = draw_homography((pixels.shape[1], pixels.shape[0]), LEVELS[level], rng)
        view = degrade(warp(pixels, homography), LEVELS[level].light, rng)
        return HomographyPair(
            name=f"{path.parent.name}/{path.name} level {level} number {turn}",
            group=f"level {level}",
            image0=PairImage(path, pixels),
            image1=PairImage(path, view),
            H_1_from_0=homography,
        )


def synthetic_set(
    photos: Sequence[Path], *, count: int = 400, levels: Sequence[int] = (1, 2, 3, 4), seed: int = 0
) -> PairSet:
    """`count` warped pairs, cycling through the levels.

    Raises:
        UsageError: an unknown level or a count below 1.
    """
    unknown = [level for level in levels if level not in LEVELS]
    if unknown or not levels:
        raise UsageError(f"levels must be among {', '.join(map(str, LEVELS))}, not {list(levels)}")
    if count < 1:
        raise UsageError(f"the number of pairs must be at least 1, not {count}")
    return PairSet(
        name="synthetic",
        protocol="homography",
        pairs=SyntheticPairs(tuple(photos), count, seed, tuple(levels)),
        oracle=True,
        note=f"{len(photos)} photos, resized to at most {LONGER_SIDE} pixels. Image 0 is the photo, image 1 "
        f"a warped view of the same size with a black border. Seed {seed}",
    )


def draw_homography(size: tuple[int, int], level: Level, rng: np.random.Generator) -> np.ndarray:
    """A random H_1_from_0 (3, 3) under which enough of the photo stays visible.

    Args:
        size: (width, height) of the photo in pixels.
        level: bounds of the change.
        rng: the source of randomness.
    """
    width, height = size
    centre = (np.array(size, dtype=np.float64) - 1) / 2
    corners = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], dtype=np.float64)
    grid = np.stack(np.meshgrid(np.linspace(0, width - 1, 9), np.linspace(0, height - 1, 9)), -1).reshape(
        -1, 2
    )
    while True:
        angle = np.deg2rad(rng.uniform(-level.rotation, level.rotation))
        factor = level.scale ** rng.uniform(-1, 1)
        turn = factor * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        distorted = corners + rng.uniform(-level.perspective, level.perspective, (4, 2)) * size
        shift = rng.uniform(-level.shift, level.shift, 2) * size
        target = (distorted - centre) @ turn.T + centre + shift
        if not cv2.isContourConvex(target.astype(np.float32)):
            continue
        homography = cv2.getPerspectiveTransform(corners.astype(np.float32), target.astype(np.float32))
        if inside(warp_points(grid, homography), size).mean() >= _MIN_OVERLAP:
            return homography


def warp(pixels: np.ndarray, H_1_from_0: np.ndarray) -> np.ndarray:
    """The image (H, W[, 3]) uint8 warped by a homography, of the same size and black outside.

    If the homography shrinks the image, it is blurred first to avoid aliasing.
    """
    height, width = pixels.shape[:2]
    area = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], dtype=np.float64)
    shrink = cv2.contourArea(warp_points(area, H_1_from_0).astype(np.float32)) / max(
        (width - 1) * (height - 1), 1
    )
    if shrink < 1:
        pixels = cv2.GaussianBlur(pixels, (0, 0), max(0.5 * np.sqrt(1 / shrink - 1), 0.05))
    return cv2.warpPerspective(pixels, H_1_from_0, (width, height), flags=cv2.INTER_CUBIC)


@dataclass(frozen=True, eq=False)
class UnrelatedPairs(PairsOnAccess[UnrelatedPair]):
    """Pairs of different photos, from different folders if there are several."""

    def make(self, position: int) -> UnrelatedPair:
        """Two photos."""
        rng = np.random.default_rng([self.seed, position])
        path0 = self.photos[rng.integers(len(self.photos))]
        others = [path for path in self.photos if path.parent != path0.parent]
        others = others or [path for path in self.photos if path != path0]
        path1 = others[rng.integers(len(others))]
        return UnrelatedPair(f"{path0.name} {path1.name}", "", PairImage(path0), PairImage(path1))


def unrelated_set(photos: Sequence[Path], *, count: int = 200, seed: int = 0) -> PairSet:
    """`count` pairs of unrelated photos.

    Raises:
        UsageError: fewer than two photos, or a count below 1.
    """
    if len(photos) < 2 or count < 1:
        raise UsageError(
            f"unrelated pairs need at least two photos and a count of at least 1, not {len(photos)}, {count}"
        )
    folders = len({path.parent for path in photos})
    note = f"{len(photos)} photos from {folders} folders. Seed {seed}"
    return PairSet("unrelated", "unrelated", UnrelatedPairs(tuple(photos), count, seed), note=note)
