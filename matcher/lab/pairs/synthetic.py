"""Photos → pairs with an exact homography: image 0 is the photo, image 1 a warped, disturbed view of it.

The view has the photo's size; what lies outside the photo is black. Everything follows from a seed and the
pair's number, so a pair is the same whatever else is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from matcher.data.geometry import inside, warp_points
from matcher.data.images import read_image
from matcher.errors import ImageError, UsageError
from matcher.lab.pairs.protocols import HomographyPair, PairSet, Picture, UnrelatedPair

LONGER_SIDE = 640  # larger photos are shrunk to it, so that a level means the same on every folder
_LEAST_OVERLAP = 0.4  # share of the photo that the view still shows
_LEAST_SIDE = 32


@dataclass(frozen=True)
class Level:
    """How far a view may be from its photo."""

    rotation: float  # degrees, either way
    perspective: float  # corners move by up to this share of the side
    scale: float  # size changes by up to this factor, either way
    shift: float  # share of the side
    light: float  # strength of the photometric change, see `disturb`


LEVELS = {
    0: Level(rotation=0, perspective=0, scale=1, shift=0, light=2.0),  # the light alone, and much of it
    1: Level(rotation=15, perspective=0.10, scale=1.3, shift=0.05, light=0.5),
    2: Level(rotation=25, perspective=0.16, scale=1.5, shift=0.08, light=0.8),
    3: Level(rotation=35, perspective=0.22, scale=1.8, shift=0.10, light=1.1),
    4: Level(rotation=180, perspective=0.26, scale=2.0, shift=0.10, light=1.4),
}


@dataclass(frozen=True, eq=False)
class SyntheticPairs(Sequence[HomographyPair]):
    """Warped pairs, rendered when they are asked for; pair i has level i modulo the number of levels."""

    photos: tuple[Path, ...]
    levels: tuple[int, ...]
    total: int
    seed: int

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, position: int) -> HomographyPair:
        if not 0 <= position < self.total:
            raise IndexError(position)
        turn, place = divmod(position, len(self.levels))
        level = self.levels[place]
        # Every level sees the same photos, in an order of the seed's own.
        order = np.random.default_rng([self.seed, turn // len(self.photos)]).permutation(len(self.photos))
        path = self.photos[order[turn % len(self.photos)]]
        pixels = read_image(path, resize=LONGER_SIDE, upright=False).pixels
        if min(pixels.shape[:2]) < _LEAST_SIDE:
            raise ImageError(
                f"{path}: too small to be warped; photos of {_LEAST_SIDE} pixels or more are needed"
            )
        rng = np.random.default_rng([self.seed, level, turn])
        homography = draw_homography((pixels.shape[1], pixels.shape[0]), LEVELS[level], rng)
        view = disturb(warp(pixels, homography), LEVELS[level].light, rng)
        return HomographyPair(
            name=f"{path.parent.name}/{path.name} level {level} number {turn}",
            group=f"level {level}",
            image0=Picture(path, pixels),
            image1=Picture(path, view),
            H_1_from_0=homography,
        )


def synthetic_set(
    photos: Sequence[Path], *, count: int = 400, levels: Sequence[int] = (1, 2, 3, 4), seed: int = 0
) -> PairSet:
    """`count` warped pairs, the levels in turn.

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
        pairs=SyntheticPairs(tuple(photos), tuple(levels), count, seed),
        oracle=True,
        note=f"{len(photos)} photos, shrunk to at most {LONGER_SIDE} pixels; image 0 is the photo, image 1 a "
        f"warped view of the photo's size with a black border; seed {seed}",
    )


def draw_homography(size: tuple[int, int], level: Level, rng: np.random.Generator) -> np.ndarray:
    """(3, 3) photo to view, drawn again until the view shows enough of the photo."""
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
        moved = corners + rng.uniform(-level.perspective, level.perspective, (4, 2)) * size
        shift = rng.uniform(-level.shift, level.shift, 2) * size
        target = (moved - centre) @ turn.T + centre + shift
        if not cv2.isContourConvex(target.astype(np.float32)):
            continue
        homography = cv2.getPerspectiveTransform(corners.astype(np.float32), target.astype(np.float32))
        if inside(warp_points(grid, homography), size).mean() >= _LEAST_OVERLAP:
            return homography


def warp(pixels: np.ndarray, H_1_from_0: np.ndarray) -> np.ndarray:
    """The picture under a homography, on a canvas of its own size, black outside.

    Where the view is smaller than the photo, the photo is blurred first, so that nothing aliases.
    """
    height, width = pixels.shape[:2]
    area = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], dtype=np.float64)
    shrink = cv2.contourArea(warp_points(area, H_1_from_0).astype(np.float32)) / max(
        (width - 1) * (height - 1), 1
    )
    if shrink < 1:
        pixels = cv2.GaussianBlur(pixels, (0, 0), max(0.5 * np.sqrt(1 / shrink - 1), 0.05))
    return cv2.warpPerspective(pixels, H_1_from_0, (width, height), flags=cv2.INTER_CUBIC)


def disturb(pixels: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Another camera and light: gain, gamma, a shading from one side, blur, noise, JPEG; uint8 as given."""
    height, width = pixels.shape[:2]
    gain, gamma = 1 + 0.35 * strength * rng.uniform(-1, 1), 2 ** (0.6 * strength * rng.uniform(-1, 1))
    direction, depth = rng.uniform(0, 2 * np.pi), 0.4 * strength * rng.random()
    blur, noise = 1.2 * strength * rng.random(), 8 * strength * rng.random()
    quality = round(95 - 40 * strength * rng.random())
    x, y = np.linspace(-0.5, 0.5, width), np.linspace(-0.5, 0.5, height)[:, None]
    shading = 1 - depth * (0.5 + x * np.cos(direction) + y * np.sin(direction))
    shading = shading.astype(np.float32) if pixels.ndim == 2 else shading.astype(np.float32)[..., None]
    light = (pixels.astype(np.float32) / 255) ** np.float32(gamma) * np.float32(255 * gain) * shading
    if blur > 0.2:
        light = cv2.GaussianBlur(light, (0, 0), blur)
    light += rng.standard_normal(light.shape, dtype=np.float32) * np.float32(noise)
    view = np.clip(np.rint(light), 0, 255).astype(np.uint8)
    coded = cv2.imencode(".jpg", view, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return cv2.imdecode(coded, cv2.IMREAD_GRAYSCALE if view.ndim == 2 else cv2.IMREAD_COLOR)


@dataclass(frozen=True, eq=False)
class UnrelatedPairs(Sequence[UnrelatedPair]):
    """Pairs of different photos, of different folders where there are several."""

    photos: tuple[Path, ...]
    total: int
    seed: int

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, position: int) -> UnrelatedPair:
        if not 0 <= position < self.total:
            raise IndexError(position)
        rng = np.random.default_rng([self.seed, position])
        path0 = self.photos[rng.integers(len(self.photos))]
        others = [path for path in self.photos if path.parent != path0.parent]
        others = others or [path for path in self.photos if path != path0]
        path1 = others[rng.integers(len(others))]
        return UnrelatedPair(f"{path0.name} {path1.name}", "", Picture(path0), Picture(path1))


def unrelated_set(photos: Sequence[Path], *, count: int = 200, seed: int = 0) -> PairSet:
    """`count` pairs of photos that have nothing to do with each other.

    Raises:
        UsageError: fewer than two photos, or a count below 1.
    """
    if len(photos) < 2 or count < 1:
        raise UsageError(
            f"unrelated pairs need two photos and a count of at least 1, not {len(photos)}, {count}"
        )
    folders = len({path.parent for path in photos})
    note = f"{len(photos)} photos of {folders} folders; seed {seed}"
    return PairSet("unrelated", "unrelated", UnrelatedPairs(tuple(photos), count, seed), note=note)
