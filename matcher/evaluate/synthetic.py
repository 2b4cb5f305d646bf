"""Pairs made of photos: with exact homographies, unrelated, and such as are easily wrong and look sure.

A pair is made when it is asked for, and depends on the seed and its own number only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from matcher.errors import ImageError
from matcher.evaluate.protocols import (
    DepthCamera,
    DepthPair,
    HomographyPair,
    Pair,
    PairImage,
    UnrelatedPair,
)
from matcher.geometry import inside, warp_points
from matcher.images import read_image


class Level(NamedTuple):
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
WEATHER = ("night", "fog", "snow", "glare", "infrared")


def _photo(photos: Sequence[Path], number: int, seed: int) -> tuple[Path, str, np.ndarray]:
    """Path, name and pixels of a photo, at most 640 long: a level means the same for all folders. Every photo
    once in random order before any again."""
    turn, index = divmod(number, len(photos))
    path = photos[np.random.default_rng([seed, turn]).permutation(len(photos))[index]]
    pixels = read_image(path, resize=640, upright=False).pixels
    if min(pixels.shape[:2]) < 32:  # less leaves nothing to match when it is zoomed
        raise ImageError(f"{path}: too small for synthetic pairs; photos need at least 32 pixels a side")
    return path, f"{path.parent.name}/{path.name}", pixels


def warped_pair(photos: Sequence[Path], number: int, seed: int, levels: Sequence[int]) -> HomographyPair:
    """A photo and a warp of it in other light, cycling through the levels, which use the same photos."""
    turn, level = number // len(levels), levels[number % len(levels)]
    (path, name, pixels), rng = _photo(photos, turn, seed), np.random.default_rng([seed, level, turn])
    homography = draw_homography(pixels.shape[1::-1], LEVELS[level], rng)
    view = degrade(warp(pixels, homography), LEVELS[level].light, rng)
    sides = PairImage(path, pixels), PairImage(path, view)
    return HomographyPair(f"{name} level {level} number {turn}", f"level {level}", *sides, homography)


def sensor_pair(photos: Sequence[Path], number: int, seed: int) -> HomographyPair:
    """A photo and a warp of it, as of two sensors."""
    (path, name, photo), rng = _photo(photos, number, seed), np.random.default_rng([seed, number, 3])
    homography = draw_homography(photo.shape[1::-1], SENSOR_WARP, rng)
    sides = [PairImage(path, recoloured(view, rng)) for view in (photo, warp(photo, homography))]
    return HomographyPair(f"{name} number {number}", "two sensors", *sides, homography)


def zoomed_pair(photos: Sequence[Path], number: int, seed: int) -> HomographyPair:
    """A photo made smaller and a part of it at its own resolution; in odd pairs that first."""
    (path, name, photo), rng = _photo(photos, number, seed), np.random.default_rng([seed, number, 2])
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
    group = "zoom 2.5-4" if zoom < 4 else "zoom 4-6"
    return HomographyPair(f"{name} zoom {zoom:.1f} number {number}", group, *images, homography)


def hard_pair(photos: Sequence[Path], number: int, seed: int) -> HomographyPair:
    """A photo, and it on a plane seen by a camera that was before its centre and has moved around it by 45 to
    75 degrees, up to twice as near or far, in each kind of `WEATHER` in turn."""
    turn, weather = number // len(WEATHER), WEATHER[number % len(WEATHER)]
    (path, name, photo), rng = _photo(photos, number, seed), np.random.default_rng([seed, number, 4])
    size = np.array(photo.shape[1::-1])
    tilt, azimuth = np.deg2rad(rng.uniform(45, 75)), np.deg2rad(rng.uniform(0, 360))
    focal, (x, y) = float(max(size)), (size - 1) / 2
    turned = cv2.Rodrigues(np.array([np.cos(azimuth), np.sin(azimuth), 0.0]) * tilt)[0]
    camera = np.array([[focal, 0, x], [0, focal, y], [0, 0, 1]])
    plane = np.column_stack([turned[:, :2], [0, 0, focal / 2 ** rng.uniform(-1, 1)]])
    homography = camera @ plane @ [[1, 0, -x], [0, 1, -y], [0, 0, 1]]
    view = degrade(weathered(warp(photo, homography), weather, rng), 0.5, rng)
    sides = PairImage(path, photo), PairImage(path, view)
    return HomographyPair(f"{name} {weather} number {turn}", weather, *sides, homography)


def unrelated_pair(photos: Sequence[Path], number: int, seed: int) -> UnrelatedPair:
    """Different photos, from different folders if there are several."""
    rng = np.random.default_rng([seed, number])
    path0 = photos[rng.integers(len(photos))]
    others = [path for path in photos if path.parent != path0.parent]
    others = others or [path for path in photos if path != path0]
    path1 = others[rng.integers(len(others))]
    return UnrelatedPair(f"{path0.name} {path1.name}", "", PairImage(path0), PairImage(path1))


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


def warp(pixels: np.ndarray, H_1_from_0: np.ndarray) -> np.ndarray:
    """The image (H, W[, 3]) uint8 warped, of the same size and black outside; blurred first if it shrinks."""
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
    """A photo (H, W[, 3]) uint8 as another sensor might see it, (H, W) uint8."""
    channels = photo if photo.ndim == 3 else photo[..., None]
    weights = rng.normal(1 / 3, 0.7, channels.shape[2])
    grey = channels.astype(np.float32) @ (weights / max(0.2, abs(weights.sum()))).astype(np.float32)
    grey = cv2.normalize(grey, None, 0, 255, cv2.NORM_MINMAX)
    grey = cv2.GaussianBlur(grey, (0, 0), rng.uniform(0.3, 1.5))
    knots = rng.integers(3, 7)
    values = np.interp(grey, [0, *np.sort(rng.uniform(0, 255, knots)), 255], rng.uniform(0, 255, knots + 2))
    noise = rng.normal(0, rng.uniform(1, 8), grey.shape)
    return np.clip(values + noise, 0, 255).astype(np.uint8)


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
        glare = np.exp(-((x - sun_x) ** 2 + (y - sun_y) ** 2) / rng.uniform(0.05, 0.2))
        light = light * 0.7 + glare[..., None]
    return np.rint(255 * light.clip(0, 1)).astype(np.uint8).reshape(pixels.shape)


# --- Pairs that are easily wrong and look sure: planes, repeated patterns, overlays.

SIZE = (640, 480)  # of views of walls
OVERLAID = (448, 336)  # of parts of photos with an overlay
_PIXEL = 1 / 400  # length of a pixel of a texture; a wall is some 3 long
REPEATING = ("wallpaper", "façade", "tiles", "text", "table")
# From pair 100 on, so that earlier ones stay as they are: least and largest (width, height) of one thing.
_OTHERS = {"shelf": ((60, 80), (110, 130)), "keyboard": (44, 60), "brick": ((70, 25), (110, 40))}
_ALIKE = ("rooms", "symmetry")  # equal things before other walls; two sides of one building
OVERLAYS = ("stamp", "logo", "display", "frame")
_K = np.array([[560.0, 0, 319.5], [0, 560.0, 239.5], [0, 0, 1]])


class Board(NamedTuple):
    """A rectangle parallel to the wall z = 0, seen from negative z."""

    texture: np.ndarray  # (h, w, 3) uint8
    centre: tuple[float, float, float]


def looking(position: Sequence[float], target: Sequence[float], roll: float = 0.0) -> np.ndarray:
    """cam_from_world (4, 4) of a camera that looks at a target, the y axis of the world downwards."""
    ahead = np.subtract(target, position) / np.linalg.norm(np.subtract(target, position))
    right = np.cross([math.sin(roll), math.cos(roll), 0.0], ahead)
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, :3] = [right, np.cross(ahead, right), ahead]
    pose[:3, 3] = -pose[:3, :3] @ position
    return pose


def photo(paths: Sequence[Path], rng: np.random.Generator, size: Sequence[int]) -> np.ndarray:
    """A part of a photo in colour, of this (width, height)."""
    return cut_out(paths[rng.integers(len(paths))], rng, size)


def cut_out(path: Path, rng: np.random.Generator, size: Sequence[int]) -> np.ndarray:
    """A part of this photo in colour, of this (width, height)."""
    wide, high = map(int, size)
    pixels = read_image(path, resize=640, upright=False).pixels
    pixels = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)
    grow = max(wide / pixels.shape[1], high / pixels.shape[0])
    if grow > 1:
        pixels = cv2.resize(pixels, None, fx=grow * 1.01, fy=grow * 1.01, interpolation=cv2.INTER_CUBIC)
    y, x = (int(rng.integers(0, n + 1)) for n in (pixels.shape[0] - high, pixels.shape[1] - wide))
    return np.ascontiguousarray(pixels[y : y + high, x : x + wide])


def _sides(name: str, *views: np.ndarray) -> tuple[PairImage, ...]:
    return tuple(PairImage(Path(f"{name} {side}.png"), view) for side, view in enumerate(views))


def _posed(name: str, group: str, scenes: Sequence[Sequence[Board]], rng: np.random.Generator) -> DepthPair:
    """Views of two scenes of boards, earlier ones behind, from before the wall, 12 to 50 degrees apart."""
    between, middle = np.radians(rng.uniform(12.0, 50.0)), np.radians(rng.uniform(-15, 15))
    poses = []
    for side in rng.permutation([-0.5, 0.5]):
        across, up = middle + side * between, np.radians(rng.uniform(-20, 20))
        target = np.array([rng.uniform(-0.15, 0.15), rng.uniform(-0.1, 0.1), 0.0])
        away = np.array([math.sin(across), math.sin(up), -math.cos(across)]) * rng.uniform(1.3, 2.1)
        poses.append(looking(target + away, target, np.radians(rng.uniform(-6, 6))))
    views, cameras = [], []
    pixels = np.append(np.indices(SIZE[::-1])[::-1].reshape(2, -1), np.ones((1, math.prod(SIZE))), axis=0)
    for boards, pose in zip(scenes, poses, strict=True):
        view, depth = np.full((*SIZE[::-1], 3), 90, np.uint8), np.zeros(SIZE[::-1], np.float32)
        for texture, centre in boards:
            height, width = texture.shape[:2]
            corner = np.array(centre) - _PIXEL * np.array([(width - 1) / 2, (height - 1) / 2, 0])
            axes = np.column_stack([[_PIXEL, 0, 0], [0, _PIXEL, 0], corner])
            H = _K @ (pose[:3, :3] @ axes + np.outer(pose[:3, 3], [0, 0, 1]))
            nearness = _PIXEL * _K[0, 0] / np.linalg.norm(pose[:3, :3] @ centre + pose[:3, 3])
            if nearness < 1:
                texture = cv2.GaussianBlur(texture, (0, 0), max(0.5 * math.sqrt(nearness**-2 - 1), 0.05))
            seen = cv2.warpPerspective(texture, H, SIZE, flags=cv2.INTER_CUBIC)
            extent = np.ones((height, width), np.uint8)
            covered = cv2.warpPerspective(extent, H, SIZE, flags=cv2.INTER_NEAREST)
            view[covered > 0] = seen[covered > 0]
            away = 1 / (np.linalg.inv(H)[2] @ pixels).reshape(depth.shape)  # H's last row is depth
            depth[covered > 0] = away[covered > 0]
        views.append(degrade(view, 0.5, rng))
        cameras.append(DepthCamera(depth, 1, _K, pose))
    relative = poses[1] @ np.linalg.inv(poses[0])
    return DepthPair(name, group, *_sides(name, *views), _K, _K, relative, *cameras)


def _boards(paths: Sequence[Path], rng: np.random.Generator, count: int, near: float = 0.3) -> list[Board]:
    """Small boards up to so far before the wall, the farthest from the camera first; 0: on the wall."""
    depths = np.sort(rng.uniform(0.1, near, count)) if near else np.zeros(count)
    places = rng.uniform((-0.45, -0.3), (0.45, 0.3), (count, 2))
    sizes = rng.integers((70, 60), (150, 120), (count, 2))
    rows = zip(places.tolist(), depths.tolist(), sizes, strict=True)
    return [Board(photo(paths, rng, size), (*place, -depth)) for place, depth, size in rows]


def _photos(paths: Sequence[Path], rng: np.random.Generator) -> np.ndarray:
    """A wall (960, 1280, 3) uint8 of four photos."""
    return np.vstack([np.hstack([photo(paths, rng, (640, 480)) for _ in range(2)]) for _ in range(2)])


def planes_pair(paths: Sequence[Path], number: int, seed: int) -> DepthPair:
    """A wall of photos, with known pose, and 0 to 4 boards before it that show other photos."""
    rng = np.random.default_rng([seed, number, 11])
    wall = _photos(paths, rng)
    before = (0, 0, 1, 2, 4)[number % 5]
    boards = [Board(wall, (0.0, 0.0, 0.0)), *_boards(paths, rng, before)]
    group = "one plane" if not before else f"a plane and {before} board{'s' * (before > 1)}"
    return _posed(f"planes {number}", group, (boards, boards), rng)


def repeating(kind: str, paths: Sequence[Path], rng: np.random.Generator) -> np.ndarray:
    """A wall (960, 1280, 3) uint8: one motif, plaster with equal windows, tiles of two colours, equal boxes,
    keys, bricks, or a page of words or numbers, whose layout is always the same."""
    if kind == "wallpaper":
        motif = photo(paths, rng, rng.integers(90, 200, 2))
        if rng.random() < 0.3:
            motif = np.hstack([motif, motif[:, ::-1]])
        return np.tile(motif, (-(-960 // motif.shape[0]), -(-1280 // motif.shape[1]), 1))[:960, :1280]
    if kind == "façade":
        wall = np.full((960, 1280, 3), rng.integers(90, 220, 3), np.uint8)
        grain = rng.normal(0, 6, (960, 1280, 1))
        wall = np.clip(wall + cv2.GaussianBlur(grain, (0, 0), 1.5)[..., None] * 3, 0, 255).astype(np.uint8)
        window = photo(paths, rng, rng.integers((50, 80), (90, 130)))
        colour = rng.integers(0, 255, 3).tolist()
        window = cv2.copyMakeBorder(window, 5, 12, 5, 5, cv2.BORDER_CONSTANT, value=colour)
        step = (window.shape[1] + int(rng.integers(20, 60)), window.shape[0] + int(rng.integers(25, 70)))
        for y in range(10, 960 - window.shape[0], step[1]):
            for x in range(10, 1280 - window.shape[1], step[0]):
                wall[y : y + window.shape[0], x : x + window.shape[1]] = window
        return wall
    if kind == "tiles":
        side, colours = int(rng.integers(35, 70)), rng.integers(0, 255, (2, 3))
        y, x = np.indices((960, 1280)) // side
        return colours[(x + y) % 2].astype(np.uint8)
    if kind in _OTHERS:
        wide, high = rng.integers(*_OTHERS[kind], 2).tolist()
        wall = np.full((960, 1280, 3), rng.integers(60, 200, 3), np.uint8)
        thing = photo(paths, rng, (wide - 6, high - 6)) if kind == "shelf" else rng.integers(60, 230, 3)
        for row, y in enumerate(range(4, 960 - high, high)):
            start = 4 if kind == "shelf" else 4 + row % 2 * wide // 2
            for column, x in enumerate(range(start, 1280 - wide, wide)):
                wall[y : y + high - 6, x : x + wide - 6] = thing
                if kind == "keyboard":  # four rows of ten keys, again and again
                    key = chr(65 + (7 * (row % 4) + column % 10) % 26)
                    cv2.putText(wall, key, (x + 8, y + 26), 0, 0.6, (20, 20, 20), 2, cv2.LINE_AA)
        grain = cv2.GaussianBlur(rng.normal(0, 6, (960, 1280, 1)), (0, 0), 1.5)[..., None]
        return np.clip(wall + 3 * grain, 0, 255).astype(np.uint8)
    sheet, font = np.full((960, 1280, 3), 240, np.uint8), cv2.FONT_HERSHEY_COMPLEX
    for y in range(40, 950, 34):
        if kind == "table":
            words = [f"{rng.integers(0, 10 ** rng.integers(2, 6))}" for _ in range(9)]
            cv2.line(sheet, (20, y + 9), (1260, y + 9), (60, 60, 60), 1)
        else:
            letters = list("etaoinshrdlucmfwygpbvk")
            words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(11)]
        x = 30
        for word in words:
            cv2.putText(sheet, word, (x, y), font, 0.7, (25, 25, 25), 1, cv2.LINE_AA)
            x += 137 if kind == "table" else cv2.getTextSize(word, font, 0.7, 1)[0][0] + 14
    for x in range(20, 1261, 137) if kind == "table" else ():
        cv2.line(sheet, (x, 10), (x, 950), (60, 60, 60), 1)
    return sheet


def repeats_pair(paths: Sequence[Path], number: int, seed: int) -> Pair:
    """A wall with a pattern that repeats, and a few things that do not, or equal things and another wall;
    odd pairs show another instance."""
    kinds, other = REPEATING if number < 100 else (*_OTHERS, *_ALIKE), number % 2 == 1
    kind = kinds[(number // 2) % len(kinds)]
    rng = np.random.default_rng([seed, number // 2, 12])  # both of a kind with one wall
    several = kind in ("text", "table", *_ALIKE)
    make = partial(_photos, paths) if kind in _ALIKE else partial(repeating, kind, paths)
    walls = [make(rng) for _ in range(1 + several)]
    scenes = [[Board(wall, (0.0, 0.0, 0.0))] for wall in (walls[0], walls[-1])]
    equal = _boards(paths, rng, int(rng.integers(2, 7))) if kind == "rooms" else []
    if kind == "symmetry":
        half = photo(paths, rng, rng.integers((180, 240), (260, 400)))
        equal = [Board(np.hstack([half, half[:, ::-1]]), (0.0, 0.0, -0.2))]
    for scene in scenes:
        scene += equal
        if not several:  # posters on the wall and boards before it
            scene += _boards(paths, rng, int(rng.integers(2, 5)), near=0.0)
            scene += _boards(paths, rng, int(rng.integers(0, 3)))
    if not other:
        return _posed(f"repeats {number}", f"{kind}, the same", (scenes[0], scenes[0]), rng)
    pair = _posed(f"repeats {number}", kind, scenes, rng)
    return UnrelatedPair(pair.name, f"{kind}, another", pair.image0, pair.image1)


def overlay(kind: str, paths: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Colours (h, w, 3) and opacity (h, w) in [0, 1]: a date or a picture in a corner, perhaps half
    transparent; numbers, scales and a cross all over, as of a drone or a camera; a patterned frame."""
    ink, alpha = np.zeros((*SIZE[::-1], 3), np.uint8), np.zeros(SIZE[::-1], np.uint8)
    if kind == "stamp":
        y, size = (int(rng.choice([35, 460])), float(rng.uniform(0.6, 1.1)))
        day = f"20{rng.integers(10, 27)}-{rng.integers(10, 13)}-{rng.integers(10, 29)}"
        text = f"{day} {rng.integers(10, 24)}:17:45"
        cv2.putText(alpha, text, (int(rng.integers(10, 200)), y), 0, size, 255, 2, cv2.LINE_AA)
        ink[:] = ((255, 255, 255), (255, 220, 0), (255, 120, 20))[rng.integers(3)]
    elif kind == "logo":
        width, height = rng.integers((90, 60), (200, 130)).tolist()
        x, y = (int(rng.choice([10, n])) for n in (SIZE[0] - width - 10, SIZE[1] - height - 10))
        ink[y : y + height, x : x + width] = photo(paths, rng, (width, height))
        alpha = np.zeros(SIZE[::-1])
        alpha[y : y + height, x : x + width] = 255 * rng.choice([0.5, 0.8, 1.0])
    elif kind == "display":
        for place in ((15, 30), (15, 60), (500, 30), (500, 60), (15, 440), (15, 468), (480, 440), (480, 468)):
            text = f"{rng.choice(['H', 'D', 'V', 'ISO', 'BAT'])} {rng.integers(10, 999)}"
            cv2.putText(alpha, text, place, 0, 0.65, 255, 2)
        for step in range(-5, 6):
            cv2.line(alpha, (600, 240 + 30 * step), (620 + 10 * (step % 2), 240 + 30 * step), 255, 2)
        cv2.drawMarker(alpha, (320, 240), 255, cv2.MARKER_CROSS, 60, 2)
        cv2.rectangle(alpha, (220, 160), (420, 320), 255, 1)
        ink[:] = (60, 255, 60) if rng.random() < 0.5 else (255, 255, 255)
    else:
        wide = int(rng.integers(25, 60))
        alpha[:] = 255
        alpha[wide:-wide, wide:-wide] = 0
        ink = photo(paths, rng, SIZE)
    return ink, alpha / 255


def overlays_pair(paths: Sequence[Path], number: int, seed: int) -> Pair:
    """The same overlay on unrelated photos, on parts of one photo, and on two of one place."""
    rng, size = np.random.default_rng([seed, number, 13]), np.array(OVERLAID)
    truth = ("unrelated", "moved", "moved", "still")[number % 4]
    kind = (*OVERLAYS, "nothing")[(number // 4) % 5]
    name, group, shift = f"overlays {number}", f"{truth}, {kind}", np.zeros(2, np.int64)
    path = other = paths[rng.integers(len(paths))]
    scene = cut_out(path, rng, (740, 520))
    if truth == "moved":
        turn = rng.choice([0.0, math.pi / 2]) + rng.uniform(-0.4, 0.4)
        away = rng.uniform(0.2, 0.6) * np.abs([math.cos(turn), math.sin(turn)])
        shift = np.minimum(np.rint(away * size), (740, 520) - size).astype(np.int64)
    start = rng.integers(0, (740, 520) - size - shift + 1)
    ends = [(scene, start), (scene, start + shift)]
    if truth == "unrelated":
        while other == path and len(paths) > 1:
            other = paths[rng.integers(len(paths))]
        ends[1] = cut_out(other, rng, (740, 520)), start
    views = [np.ascontiguousarray(p[y : y + size[1], x : x + size[0]]) for p, (x, y) in ends]
    views = [degrade(view, 0.6, rng) for view in views]
    if kind in OVERLAYS:
        ink, alpha = (cv2.resize(each, OVERLAID) for each in overlay(kind, paths, rng))
        views = [v + alpha[..., None] * (ink.astype(np.float64) - v) for v in views]
        views = [degrade(np.rint(view).astype(np.uint8), 0.1, rng) for view in views]
    if truth == "unrelated":
        return UnrelatedPair(name, group, *_sides(name, *views))
    homography = np.eye(3)
    homography[:2, 2] = -shift
    return HomographyPair(name, group, *_sides(name, *views), homography)


def facades_pair(photos: Sequence[Path], number: int, seed: int) -> UnrelatedPair:
    """Two photos of different things of one kind, one of them of a folder of `val`, if there is one."""
    photos = sorted(photos, key=lambda path: path.parent.parent.name != "val")
    known = sum(path.parent.parent.name == "val" for path in photos) or len(photos)
    first, second = np.triu_indices(len(photos), 1)
    total = np.count_nonzero(first < known)  # rows of those of `val` come first
    drawn = np.random.default_rng(seed).permutation(total)[number % total]
    path0, path1 = photos[first[drawn]], photos[second[drawn]]
    return UnrelatedPair(f"{path0.name} {path1.name}", "", PairImage(path0), PairImage(path1))
