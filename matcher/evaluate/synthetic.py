"""Pairs with exact homographies made of photos: warps, zooms, two sensors; and pairs of unrelated photos.

A pair is made when it is asked for, and depends on the seed and its own number only, not on which other pairs
are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from matcher.errors import ImageError
from matcher.evaluate.protocols import HomographyPair, PairImage, UnrelatedPair
from matcher.geometry import inside, warp_points
from matcher.images import read_image


@dataclass(frozen=True)
class Level:
    """How much a view may differ from its photo."""

    rotation: float  # degrees, in both directions
    perspective: float  # corners move by up to this share of the sides
    scale: float  # zoom in or out by up to this factor
    shift: float  # share of the sides
    light: float  # strength of the photometric changes, see `degrade`


LEVELS = {
    0: Level(rotation=0, perspective=0, scale=1, shift=0, light=2.0),  # only lighting, but strong
    1: Level(rotation=15, perspective=0.10, scale=1.3, shift=0.05, light=0.5),
    2: Level(rotation=25, perspective=0.16, scale=1.5, shift=0.08, light=0.8),
    3: Level(rotation=35, perspective=0.22, scale=1.8, shift=0.10, light=1.1),
    4: Level(rotation=180, perspective=0.26, scale=2.0, shift=0.10, light=1.4),
}
SENSOR_WARP = Level(rotation=15, perspective=0.1, scale=1.2, shift=0.05, light=0)
ZOOM_TILT = Level(rotation=20, perspective=0.06, scale=1, shift=0, light=0.5)


def _photo(photos: Sequence[Path], number: int, seed: int) -> tuple[Path, np.ndarray]:
    """Every photo once in random order before any again; at most 640 pixels, so that a level means the same
    for all folders."""
    turn, index = divmod(number, len(photos))
    path = photos[np.random.default_rng([seed, turn]).permutation(len(photos))[index]]
    pixels = read_image(path, resize=640, upright=False).pixels
    if min(pixels.shape[:2]) < 32:  # less leaves nothing to match when it is zoomed
        raise ImageError(f"{path}: too small for synthetic pairs; photos need at least 32 pixels a side")
    return path, pixels


def warped_pair(photos: Sequence[Path], number: int, seed: int, levels: Sequence[int]) -> HomographyPair:
    """A photo and a warp of it in other light, cycling through the levels, which use the same photos."""
    turn, level = number // len(levels), levels[number % len(levels)]
    path, pixels = _photo(photos, turn, seed)
    rng = np.random.default_rng([seed, level, turn])
    homography = draw_homography(pixels.shape[1::-1], LEVELS[level], rng)
    view = degrade(warp(pixels, homography), LEVELS[level].light, rng)
    name = f"{path.parent.name}/{path.name} level {level} number {turn}"
    sides = PairImage(path, pixels), PairImage(path, view)
    return HomographyPair(name, f"level {level}", *sides, homography)


def sensor_pair(photos: Sequence[Path], number: int, seed: int) -> HomographyPair:
    """A photo and a warp of it, as of two sensors."""
    path, photo = _photo(photos, number, seed)
    rng = np.random.default_rng([seed, number, 3])
    homography = draw_homography(photo.shape[1::-1], SENSOR_WARP, rng)
    sides = [PairImage(path, recoloured(view, rng)) for view in (photo, warp(photo, homography))]
    name = f"{path.parent.name}/{path.name} number {number}"
    return HomographyPair(name, "two sensors", *sides, homography)


def zoomed_pair(photos: Sequence[Path], number: int, seed: int) -> HomographyPair:
    """A photo made smaller and a part of it at its own resolution; in odd pairs that first."""
    path, photo = _photo(photos, number, seed)
    rng = np.random.default_rng([seed, number, 2])
    zoom = float(2.5 * (6.0 / 2.5) ** rng.uniform())  # resolution of the part / of the whole photo
    size = np.array(photo.shape[1::-1])
    small = tuple(np.maximum(np.rint(size / zoom), 16).astype(int).tolist())
    wide = cv2.resize(photo, small, interpolation=cv2.INTER_AREA)
    part_size = np.rint(size * rng.uniform(0.5, 0.9)).astype(int)
    x, y = rng.integers(0, size - part_size + 1)
    tilt = draw_homography(photo.shape[1::-1], ZOOM_TILT, rng)
    view = warp(photo, tilt)[y : y + part_size[1], x : x + part_size[0]]
    part = degrade(np.ascontiguousarray(view), ZOOM_TILT.light, rng)
    sx, sy = size / small
    shift = np.array([[1, 0, -x], [0, 1, -y], [0, 0, 1]], dtype=np.float64)
    homography = shift @ tilt @ [[sx, 0, 0.5 * sx - 0.5], [0, sy, 0.5 * sy - 0.5], [0, 0, 1]]
    images = (PairImage(path, wide), PairImage(path, part))
    if number % 2:
        images, homography = images[::-1], np.linalg.inv(homography)
    name = f"{path.parent.name}/{path.name} zoom {zoom:.1f} number {number}"
    return HomographyPair(name, f"zoom {'2.5-4' if zoom < 4 else '4-6'}", *images, homography)


def hard_pair(photos: Sequence[Path], number: int, seed: int) -> HomographyPair:
    """A photo and a view of it from 45 to 75 degrees to the side, up to twice as near or far, in each kind of
    `WEATHER` in turn."""
    turn, weather = number // len(WEATHER), WEATHER[number % len(WEATHER)]
    path, photo = _photo(photos, number, seed)
    rng = np.random.default_rng([seed, number, 4])
    homography = oblique_view(
        photo.shape[1::-1], rng.uniform(45, 75), rng.uniform(0, 360), 2 ** rng.uniform(-1, 1)
    )
    view = degrade(weathered(warp(photo, homography), weather, rng), 0.5, rng)
    name = f"{path.parent.name}/{path.name} {weather} number {turn}"
    return HomographyPair(name, weather, PairImage(path, photo), PairImage(path, view), homography)


def unrelated_pair(photos: Sequence[Path], number: int, seed: int) -> UnrelatedPair:
    """Different photos, from different folders if there are several."""
    rng = np.random.default_rng([seed, number])
    path0 = photos[rng.integers(len(photos))]
    others = [path for path in photos if path.parent != path0.parent]
    others = others or [path for path in photos if path != path0]
    path1 = others[rng.integers(len(others))]
    return UnrelatedPair(f"{path0.name} {path1.name}", "", PairImage(path0), PairImage(path1))


# --- Changes of an image.


def draw_homography(size: tuple[int, int], level: Level, rng: np.random.Generator) -> np.ndarray:
    """A random H_1_from_0 (3, 3) that keeps 40 % of a photo of this (width, height) visible, or more."""
    width, height = size
    centre = (np.array(size, dtype=np.float64) - 1) / 2
    corners = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], dtype=np.float64)
    grid = np.stack(np.meshgrid(np.linspace(0, width - 1, 9), np.linspace(0, height - 1, 9)), -1)
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
        if inside(warp_points(grid.reshape(-1, 2), homography), size).mean() >= 0.4:
            return homography


def oblique_view(size: tuple[int, int], tilt: float, azimuth: float, zoom: float) -> np.ndarray:
    """H_1_from_0 (3, 3) of a photo (width, height) on a plane, seen by a camera that was before its centre,
    has moved around it by `tilt` degrees, about an axis at `azimuth`, and is `zoom` times as near."""
    focal, (x, y) = float(max(size)), (np.array(size) - 1) / 2
    axis = np.array([np.cos(np.deg2rad(azimuth)), np.sin(np.deg2rad(azimuth)), 0.0])
    turn = cv2.Rodrigues(axis * np.deg2rad(tilt))[0]
    camera = np.array([[focal, 0, x], [0, focal, y], [0, 0, 1]])
    plane = np.column_stack([turn[:, :2], [0, 0, focal / zoom]])
    return camera @ plane @ [[1, 0, -x], [0, 1, -y], [0, 0, 1]]


def warp(pixels: np.ndarray, H_1_from_0: np.ndarray) -> np.ndarray:
    """The image (H, W[, 3]) uint8 warped by a homography, of the same size and black outside.

    If the homography shrinks the image, it is blurred first to avoid aliasing.
    """
    height, width = pixels.shape[:2]
    area = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], dtype=np.float64)
    warped = cv2.contourArea(warp_points(area, H_1_from_0).astype(np.float32))
    shrink = warped / max((width - 1) * (height - 1), 1)
    if shrink < 1:
        pixels = cv2.GaussianBlur(pixels, (0, 0), max(0.5 * np.sqrt(1 / shrink - 1), 0.05))
    return cv2.warpPerspective(pixels, H_1_from_0, (width, height), flags=cv2.INTER_CUBIC)


def degrade(pixels: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """(H, W[, 3]) uint8 with other gain, gamma, shading, blur, noise and JPEG compression."""
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
    encoded = cv2.imencode(".jpg", view, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE if pixels.ndim == 2 else cv2.IMREAD_COLOR)


def recoloured(photo: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The photo (H, W) or (H, W, 3) uint8 as another sensor might see it, (H, W) uint8: channels weighed
    anew, blurred, any tone curve, noise."""
    channels = photo if photo.ndim == 3 else photo[..., None]
    weights = rng.normal(1 / 3, 0.7, channels.shape[2])
    grey = channels.astype(np.float32) @ (weights / max(0.2, abs(weights.sum()))).astype(np.float32)
    grey = cv2.normalize(grey, None, 0, 255, cv2.NORM_MINMAX)
    grey = cv2.GaussianBlur(grey, (0, 0), rng.uniform(0.3, 1.5))
    knots = rng.integers(3, 7)
    values = np.interp(grey, [0, *np.sort(rng.uniform(0, 255, knots)), 255], rng.uniform(0, 255, knots + 2))
    noise = rng.normal(0, rng.uniform(1, 8), grey.shape)
    return np.clip(values + noise, 0, 255).astype(np.uint8)


WEATHER = ("night", "fog", "snow", "glare", "infrared")


def weathered(pixels: np.ndarray, weather: str, rng: np.random.Generator) -> np.ndarray:
    """The image (H, W) or (H, W, 3) uint8 in weather or light of one of `WEATHER`, (H, W) if infrared."""
    if weather == "infrared":
        return recoloured(pixels, rng)
    height, width = pixels.shape[:2]
    y, x = np.mgrid[:height, :width].astype(np.float32) / max(height, width)
    light = pixels.reshape(height, width, -1).astype(np.float32) / 255
    if weather == "night":
        lamps = np.zeros((height, width), np.float32)
        for at_x, at_y in rng.uniform(0, [x.max(), y.max()], (3, 2)):
            lamps += np.exp(-((x - at_x) ** 2 + (y - at_y) ** 2) / 0.02)
        light = light**1.5 * (0.15 + 0.85 * lamps)[..., None]
        light += rng.normal(0, 0.03, light.shape)
    elif weather == "fog":
        clear = np.exp(-rng.uniform(1, 3) * (1 - y / y.max()))[..., None]  # what is far is at the top
        light = light * clear + 0.8 * (1 - clear)
    elif weather == "snow":
        soft = cv2.GaussianBlur(rng.standard_normal((height, width), dtype=np.float32), (0, 0), 12)
        lies = (soft > rng.uniform(-0.5, 0.5) * soft.std())[..., None] & (light > 0.2)
        light = np.where(lies, 0.75 + 0.25 * light, light)
        flakes = rng.random((height, width, 1)) > 0.995
        light = np.maximum(light, cv2.GaussianBlur(flakes.astype(np.float32), (0, 0), 1.0)[..., None] * 4)
    else:
        sun_x, sun_y = rng.uniform(0, [x.max(), y.max()])
        light = (
            light * 0.7 + np.exp(-((x - sun_x) ** 2 + (y - sun_y) ** 2) / rng.uniform(0.05, 0.2))[..., None]
        )
    return np.rint(255 * light.clip(0, 1)).astype(np.uint8).reshape(pixels.shape)
