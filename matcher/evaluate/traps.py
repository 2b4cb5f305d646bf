"""Pairs that are easily wrong and look sure: planes, repeated patterns, overlays; made of photos.

A pair is made when it is asked for, and depends on the seed and its own number only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from matcher.evaluate.protocols import HomographyPair, Pair, PairImage, PosePair, UnrelatedPair
from matcher.evaluate.synthetic import degrade
from matcher.images import read_image

SIZE = (640, 480)  # of views of walls
OVERLAID = (448, 336)  # of parts of photos with an overlay
_PIXEL = 1 / 400  # length of a pixel of a texture; a wall is some 3 long
_K = np.array([[560.0, 0, 319.5], [0, 560.0, 239.5], [0, 0, 1]])


class Board(NamedTuple):
    """A rectangle parallel to the wall z = 0, seen from negative z."""

    texture: np.ndarray  # (h, w, 3) uint8
    centre: tuple[float, float, float]


def rendered(boards: Sequence[Board], cam_from_world: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The boards, of which earlier ones lie behind, as a camera of `_K` sees them, in other light."""
    view = np.full((*SIZE[::-1], 3), 90, np.uint8)
    for texture, centre in boards:
        height, width = texture.shape[:2]
        corner = np.array(centre) - _PIXEL * np.array([(width - 1) / 2, (height - 1) / 2, 0])
        axes = np.column_stack([[_PIXEL, 0, 0], [0, _PIXEL, 0], corner])
        H = _K @ (cam_from_world[:3, :3] @ axes + np.outer(cam_from_world[:3, 3], [0, 0, 1]))
        nearness = _PIXEL * _K[0, 0] / np.linalg.norm(cam_from_world[:3, :3] @ centre + cam_from_world[:3, 3])
        if nearness < 1:
            texture = cv2.GaussianBlur(texture, (0, 0), max(0.5 * math.sqrt(nearness**-2 - 1), 0.05))
        seen = cv2.warpPerspective(texture, H, SIZE, flags=cv2.INTER_CUBIC)
        inside = cv2.warpPerspective(np.ones((height, width), np.uint8), H, SIZE, flags=cv2.INTER_NEAREST)
        view[inside > 0] = seen[inside > 0]
    return degrade(view, 0.5, rng)


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
    wide, high = map(int, size)
    pixels = read_image(paths[rng.integers(len(paths))], resize=640, upright=False).pixels
    pixels = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)
    grow = max(wide / pixels.shape[1], high / pixels.shape[0])
    if grow > 1:
        pixels = cv2.resize(pixels, None, fx=grow * 1.01, fy=grow * 1.01, interpolation=cv2.INTER_CUBIC)
    y, x = (int(rng.integers(0, n + 1)) for n in (pixels.shape[0] - high, pixels.shape[1] - wide))
    return np.ascontiguousarray(pixels[y : y + high, x : x + wide])


def _sides(name: str, *views: np.ndarray) -> tuple[PairImage, ...]:
    return tuple(PairImage(Path(f"{name} {side}.png"), view) for side, view in enumerate(views))


def _posed(name: str, group: str, scenes: Sequence[Sequence[Board]], rng: np.random.Generator) -> PosePair:
    """Views of two scenes of boards from before the wall, 12 to 50 degrees apart."""
    between, middle = np.radians(rng.uniform(12.0, 50.0)), np.radians(rng.uniform(-15, 15))
    poses = []
    for side in rng.permutation([-0.5, 0.5]):
        across, up = middle + side * between, np.radians(rng.uniform(-20, 20))
        target = np.array([rng.uniform(-0.15, 0.15), rng.uniform(-0.1, 0.1), 0.0])
        away = np.array([math.sin(across), math.sin(up), -math.cos(across)]) * rng.uniform(1.3, 2.1)
        poses.append(looking(target + away, target, np.radians(rng.uniform(-6, 6))))
    views = (rendered(boards, pose, rng) for boards, pose in zip(scenes, poses, strict=True))
    return PosePair(name, group, *_sides(name, *views), _K, _K, poses[1] @ np.linalg.inv(poses[0]))


def _boards(paths: Sequence[Path], rng: np.random.Generator, count: int, near: float = 0.3) -> list[Board]:
    """Small boards up to so far before the wall, the farthest from the camera first; 0: on the wall."""
    depths = np.sort(rng.uniform(0.1, near, count)) if near else np.zeros(count)
    places = rng.uniform((-0.45, -0.3), (0.45, 0.3), (count, 2))
    sizes = rng.integers((70, 60), (150, 120), (count, 2))
    rows = zip(places.tolist(), depths.tolist(), sizes, strict=True)
    return [Board(photo(paths, rng, size), (*place, -depth)) for place, depth, size in rows]


def planes_pair(paths: Sequence[Path], number: int, seed: int) -> PosePair:
    """A wall of photos, with known pose, and 0 to 4 boards before it that show other photos."""
    rng = np.random.default_rng([seed, number, 11])
    wall = np.vstack([np.hstack([photo(paths, rng, (640, 480)) for _ in range(2)]) for _ in range(2)])
    before = (0, 0, 1, 2, 4)[number % 5]
    boards = [Board(wall, (0.0, 0.0, 0.0)), *_boards(paths, rng, before)]
    group = "one plane" if not before else f"a plane and {before} board{'s' * (before > 1)}"
    return _posed(f"planes {number}", group, (boards, boards), rng)


# Walls with patterns that repeat, (960, 1280, 3) uint8


def wallpaper(paths: Sequence[Path], rng: np.random.Generator) -> np.ndarray:
    """One motif of a photo."""
    motif = photo(paths, rng, rng.integers(90, 200, 2))
    if rng.random() < 0.3:
        motif = np.hstack([motif, motif[:, ::-1]])
    return np.tile(motif, (-(-960 // motif.shape[0]), -(-1280 // motif.shape[1]), 1))[:960, :1280]


def facade(paths: Sequence[Path], rng: np.random.Generator) -> np.ndarray:
    """Plaster with equal windows in rows."""
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


def tiles(_: Sequence[Path], rng: np.random.Generator) -> np.ndarray:
    """Tiles of two colours."""
    side, colours = int(rng.integers(35, 70)), rng.integers(0, 255, (2, 3))
    y, x = np.indices((960, 1280)) // side
    return colours[(x + y) % 2].astype(np.uint8)


def page(rng: np.random.Generator, table: bool) -> np.ndarray:
    """Printed words in lines, or a table of numbers; the layout is always the same."""
    sheet, font = np.full((960, 1280, 3), 240, np.uint8), cv2.FONT_HERSHEY_COMPLEX
    for y in range(40, 950, 34):
        if table:
            words = [f"{rng.integers(0, 10 ** rng.integers(2, 6))}" for _ in range(9)]
            cv2.line(sheet, (20, y + 9), (1260, y + 9), (60, 60, 60), 1)
        else:
            letters = list("etaoinshrdlucmfwygpbvk")
            words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(11)]
        x = 30
        for word in words:
            cv2.putText(sheet, word, (x, y), font, 0.7, (25, 25, 25), 1, cv2.LINE_AA)
            x += 137 if table else cv2.getTextSize(word, font, 0.7, 1)[0][0] + 14
    for x in range(20, 1261, 137) if table else ():
        cv2.line(sheet, (x, 10), (x, 950), (60, 60, 60), 1)
    return sheet


_WALLS = {"wallpaper": wallpaper, "façade": facade, "tiles": tiles}


def repeats_pair(paths: Sequence[Path], number: int, seed: int) -> Pair:
    """A wall with a pattern that repeats, and a few things that do not; odd pairs show another instance."""
    kinds = (*_WALLS, "text", "table")
    kind, other = kinds[(number // 2) % len(kinds)], number % 2 == 1
    rng = np.random.default_rng([seed, number // 2, 12])  # both of a kind with one wall
    if kind in _WALLS:
        walls = [_WALLS[kind](paths, rng)] * 2
    else:
        walls = [page(rng, kind == "table") for _ in range(2)]
    scenes = [[Board(wall, (0.0, 0.0, 0.0))] for wall in walls]
    for scene in scenes if kind in _WALLS else ():  # posters on the wall and boards before it
        scene += _boards(paths, rng, int(rng.integers(2, 5)), near=0.0)
        scene += _boards(paths, rng, int(rng.integers(0, 3)))
    if not other:
        return _posed(f"repeats {number}", f"{kind}, the same", (scenes[0], scenes[0]), rng)
    pair = _posed(f"repeats {number}", kind, scenes, rng)
    return UnrelatedPair(pair.name, f"{kind}, another", pair.image0, pair.image1)


# Overlays: colours (h, w, 3) and opacity (h, w) in [0, 1]


def stamp(_: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A date in a corner."""
    ink, alpha = np.zeros((*SIZE[::-1], 3), np.uint8), np.zeros(SIZE[::-1], np.uint8)
    y, size = (int(rng.choice([35, 460])), float(rng.uniform(0.6, 1.1)))
    day = f"20{rng.integers(10, 27)}-{rng.integers(10, 13)}-{rng.integers(10, 29)}"
    text = f"{day} {rng.integers(10, 24)}:17:45"
    cv2.putText(alpha, text, (int(rng.integers(10, 200)), y), 0, size, 255, 2, cv2.LINE_AA)
    ink[:] = ((255, 255, 255), (255, 220, 0), (255, 120, 20))[rng.integers(3)]
    return ink, alpha / 255


def logo(paths: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A picture over a corner, perhaps half transparent."""
    ink, alpha = np.zeros((*SIZE[::-1], 3), np.uint8), np.zeros(SIZE[::-1])
    width, height = rng.integers((90, 60), (200, 130)).tolist()
    x, y = (int(rng.choice([10, n])) for n in (SIZE[0] - width - 10, SIZE[1] - height - 10))
    ink[y : y + height, x : x + width] = photo(paths, rng, (width, height))
    alpha[y : y + height, x : x + width] = rng.choice([0.5, 0.8, 1.0])
    return ink, alpha


def display(_: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, scales and a cross all over the picture, as of a drone or a camera."""
    alpha = np.zeros(SIZE[::-1], np.uint8)
    for place in ((15, 30), (15, 60), (500, 30), (500, 60), (15, 440), (15, 468), (480, 440), (480, 468)):
        text = f"{rng.choice(['H', 'D', 'V', 'ISO', 'BAT'])} {rng.integers(10, 999)}"
        cv2.putText(alpha, text, place, 0, 0.65, 255, 2)
    for step in range(-5, 6):
        cv2.line(alpha, (600, 240 + 30 * step), (620 + 10 * (step % 2), 240 + 30 * step), 255, 2)
    cv2.drawMarker(alpha, (320, 240), 255, cv2.MARKER_CROSS, 60, 2)
    cv2.rectangle(alpha, (220, 160), (420, 320), 255, 1)
    ink = np.full((*SIZE[::-1], 3), (60, 255, 60) if rng.random() < 0.5 else (255, 255, 255), np.uint8)
    return ink, alpha / 255


def frame(paths: Sequence[Path], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A patterned frame around the picture."""
    wide, alpha = int(rng.integers(25, 60)), np.ones(SIZE[::-1])
    alpha[wide:-wide, wide:-wide] = 0
    return photo(paths, rng, SIZE), alpha


_OVERLAYS = {"stamp": stamp, "logo": logo, "display": display, "frame": frame}


def overlays_pair(paths: Sequence[Path], number: int, seed: int) -> Pair:
    """The same overlay on unrelated photos, on parts of one photo, and on two of one place."""
    rng, size = np.random.default_rng([seed, number, 13]), np.array(OVERLAID)
    truth = ("unrelated", "moved", "moved", "still")[number % 4]
    kind = (*_OVERLAYS, "nothing")[(number // 4) % 5]
    name, group, shift = f"overlays {number}", f"{truth}, {kind}", np.zeros(2, np.int64)
    scene = photo(paths, rng, (740, 520))
    if truth == "moved":
        turn = rng.choice([0.0, math.pi / 2]) + rng.uniform(-0.4, 0.4)
        away = rng.uniform(0.2, 0.6) * np.abs([math.cos(turn), math.sin(turn)])
        shift = np.minimum(np.rint(away * size), (740, 520) - size).astype(np.int64)
    start = rng.integers(0, (740, 520) - size - shift + 1)
    ends = [(scene, start), (scene, start + shift)]
    if truth == "unrelated":
        ends[1] = photo(paths, rng, (740, 520)), start
    views = [np.ascontiguousarray(p[y : y + size[1], x : x + size[0]]) for p, (x, y) in ends]
    views = [degrade(view, 0.6, rng) for view in views]
    if kind in _OVERLAYS:
        ink, alpha = (cv2.resize(each, OVERLAID) for each in _OVERLAYS[kind](paths, rng))
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
