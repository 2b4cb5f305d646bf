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

from matcher.errors import ImageError, UsageError
from matcher.evaluate.posed import HIDDEN
from matcher.evaluate.protocols import HomographyPair, PairImage, PairSet, UnrelatedPair, degrade
from matcher.geometry import inside, warp_points
from matcher.images import read_image

# --- synthetic: Synthetic pairs with exact homographies: image 0 is a photo, image 1 a warped view with
# other lighting.

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


# --- sensors: Pairs as of two different sensors, with exact homographies: a photo and a warp of it, both
# recoloured.

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


# --- zooms: Pairs whose scales differ by 2.5 to 6 times, with exact homographies: a photo and a zoomed part
# of it.

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


# --- planes: Scenes made of photo-textured planes, rendered from moving cameras with exact correspondences.

NOTHING = 255  # label of pixels without a plane of the scene


@dataclass(frozen=True)
class SceneRecipe:
    """Views to train on: photos on one plane, or on several planes in space, seen by moving cameras."""

    scenes: int = 4000
    views: int = 5  # of each scene
    spatial_share: float = 0.4  # scenes of several planes, tilted and at different depths; else one plane
    full_rotation_share: float = 0.12  # views turned by any angle; the others by at most `max_roll`
    max_roll: float = 30.0  # degrees
    max_tilt: float = 60.0  # degrees between a plane and the image plane
    max_zoom: float = 2.2  # largest change of scale of a view
    width: int = 640
    height: int = 480
    max_keypoints: int = 1024


@dataclass(frozen=True, eq=False)
class Plane:
    """A photo in space: texture pixel (u, v) lies at origin + u·right + v·down."""

    texture: np.ndarray  # (h, w) uint8
    origin: np.ndarray  # (3,)
    right: np.ndarray  # (3,) per texture pixel
    down: np.ndarray  # (3,)


@dataclass(frozen=True, eq=False)
class View:
    """A rendered image, and the plane of the scene at each of its pixels."""

    pixels: np.ndarray  # (H, W) uint8
    labels: np.ndarray  # (H, W) uint8, index of the visible plane, or NOTHING
    homographies: np.ndarray  # (P, 3, 3) float64, texture pixels → image pixels; third coordinate is depth


def build_planes(textures: list[np.ndarray], recipe: SceneRecipe, rng: np.random.Generator) -> list[Plane]:
    """One upright plane at depth 1 (its longer side 1 wide) or, for several textures, planes in space.

    The first of several is a wall behind the others.
    """
    if len(textures) == 1:
        return [_plane(textures[0], centre=np.array([0, 0, 1.0]), longer=1.0, tilt=0.0, rng=rng)]
    wall = _plane(textures[0], np.array([0, 0, rng.uniform(1.5, 2.5)]), rng.uniform(3.0, 4.5), 20.0, rng)
    planes = [wall]
    for texture in textures[1:]:
        depth = rng.uniform(0.7, 1.5)
        centre = np.array([rng.uniform(-0.5, 0.5) * depth, rng.uniform(-0.4, 0.4) * depth, depth])
        planes.append(_plane(texture, centre, rng.uniform(0.4, 1.1) * depth, recipe.max_tilt, rng))
    return planes


def _plane(
    texture: np.ndarray, centre: np.ndarray, longer: float, tilt: float, rng: np.random.Generator
) -> Plane:
    height, width = texture.shape
    rotation = _tilt(tilt, rng)
    step = longer / max(height, width)
    right, down = rotation[:, 0] * step, rotation[:, 1] * step
    return Plane(texture, centre - right * (width - 1) / 2 - down * (height - 1) / 2, right, down)


def _tilt(limit: float, rng: np.random.Generator) -> np.ndarray:
    """A rotation about a random axis in the image plane by up to `limit` degrees, uniformly distributed."""
    direction, angle = rng.uniform(0, 2 * np.pi), np.deg2rad(limit) * rng.random()
    return cv2.Rodrigues(angle * np.array([np.cos(direction), np.sin(direction), 0.0]))[0]


def place_camera(
    recipe: SceneRecipe, spatial: bool, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A camera (K, R, t) that looks at the middle of the scene from somewhere in front of it.

    For one plane the orbit angle is the tilt of the plane; for several it also changes the occlusions.
    """
    width, height = recipe.width, recipe.height
    focal = rng.uniform(0.8, 1.4) * max(width, height)
    K = np.array([[focal, 0, (width - 1) / 2], [0, focal, (height - 1) / 2], [0, 0, 1.0]])
    roll = 180.0 if rng.random() < recipe.full_rotation_share else recipe.max_roll
    spin = cv2.Rodrigues(np.array([0, 0, np.deg2rad(rng.uniform(-roll, roll))]))[0]
    orbit = _tilt(recipe.max_tilt * (0.6 if spatial else 1.0), rng)
    target = np.array([0, 0, 1.0]) + np.append(rng.uniform(-0.2, 0.2, 2), 0)
    # The distance from which a plane of width 1 more than fills the view.
    fitting = focal / max(width, height) * 0.8
    distance = fitting * recipe.max_zoom ** rng.uniform(-0.6, 0.6)
    R = spin @ orbit
    return K, R, np.array([0, 0, distance]) - R @ target


def project(plane: Plane, K: np.ndarray, R: np.ndarray, t: np.ndarray) -> np.ndarray:
    """(3, 3) texture pixels → image pixels; the third coordinate of the product is the depth."""
    return K @ np.column_stack([R @ plane.right, R @ plane.down, R @ plane.origin + t])


def render(
    planes: list[Plane], camera: tuple[np.ndarray, np.ndarray, np.ndarray], backdrop: np.ndarray
) -> View:
    """The nearest plane at each pixel; `backdrop` (H, W) uint8 where there is none."""
    height, width = backdrop.shape
    pixels, labels = backdrop.copy(), np.full(backdrop.shape, NOTHING, np.uint8)
    nearest = np.zeros(backdrop.shape, np.float32)
    ys, xs = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)[None]
    homographies = np.stack([project(plane, *camera) for plane in planes])
    for number, (plane, H) in enumerate(zip(planes, homographies, strict=True)):
        a, b, c = np.linalg.inv(H)[2].astype(np.float32)  # inverse depth is linear in the pixel
        inverse_depth = a * xs + b * ys + c
        warped = cv2.warpPerspective(_smoothed(plane.texture, H), H, (width, height), flags=cv2.INTER_LINEAR)
        extent = np.full(plane.texture.shape, 255, np.uint8)
        covered = cv2.warpPerspective(extent, H, (width, height), flags=cv2.INTER_NEAREST) > 0
        visible = covered & (inverse_depth > nearest)
        pixels[visible], labels[visible] = warped[visible], number
        nearest[visible] = inverse_depth[visible]
    return View(pixels, labels, homographies)


def _smoothed(texture: np.ndarray, H: np.ndarray) -> np.ndarray:
    """The texture, blurred to avoid aliasing where its projection is smaller than the texture."""
    height, width = texture.shape
    depth = H[2] @ [width / 2, height / 2, 1]
    area = abs(np.linalg.det(H)) / max(abs(depth), 1e-6) ** 3  # image pixels per texture pixel
    shrink = 1 / np.sqrt(max(area, 1e-6))
    return texture if shrink < 1.3 else cv2.GaussianBlur(texture, (0, 0), 0.4 * float(min(shrink, 8)))


def plane_positions(view: View, other: View) -> np.ndarray:
    """(2, H, W) float32: position of each pixel of `view` in `other`, or HIDDEN; none is unknown."""
    height, width = view.labels.shape
    positions = np.full((2, height, width), HIDDEN, np.float32)
    x, y = np.arange(width, dtype=np.float32)[None], np.arange(height, dtype=np.float32)[:, None]
    for plane, (H, other_H) in enumerate(zip(view.homographies, other.homographies, strict=True)):
        on_plane = view.labels == plane
        if not on_plane.any():
            continue
        other_from_own = (other_H @ np.linalg.inv(H)).astype(np.float32)
        u, v, w = (row[0] * x + (row[1] * y + row[2]) for row in other_from_own)
        front = w > 1e-9
        w = np.where(front, w, 1)
        u, v = u / w, v / w
        visible = on_plane & front & (u >= 0) & (v >= 0) & (u <= width - 1) & (v <= height - 1)
        labels = cv2.remap(other.labels, np.where(visible, u, 0), np.where(visible, v, 0), cv2.INTER_NEAREST)
        visible &= labels == plane
        positions[0][visible], positions[1][visible] = u[visible], v[visible]
    return positions
