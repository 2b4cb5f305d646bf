"""Two textured walls before a camera that slides to the right: images, pairs, true poses and maps."""

from functools import cache
from pathlib import Path

import cv2
import numpy as np

import matcher
from matcher.sequence.keyframe_map import ClosedTrajectory

CAMERA = "300,300,159.5,119.5"
WALLS = matcher.Camera(*map(float, CAMERA.split(",")), size=(320, 240))
DEPTHS, BASELINE, STEP = (2.0, 3.0), 0.2, 0.05


@cache
def make_walls() -> list[np.ndarray]:
    """Two textured planes; the nearer one covers the left of the image."""
    found = []
    for seed in (1, 2):
        noise = np.random.default_rng(seed).standard_normal((720, 960))
        found.append(cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 2.2), None, 0, 255, cv2.NORM_MINMAX))
    return [wall.astype(np.uint8) for wall in found]


def picture(x: float) -> np.ndarray:
    """(240, 320) grey, from a camera at x metres to the right that looks straight at the walls."""
    layers = []
    for wall, depth in zip(make_walls(), DEPTHS, strict=True):
        shift = np.float64([[1, 0, -320 - 300 * x / depth], [0, 1, -240]])
        layers.append(cv2.warpAffine(wall, shift, (320, 240), flags=cv2.INTER_LINEAR))
    edge = int(160 - 300 * x / DEPTHS[0])
    layers[1][:, : max(edge, 0)] = layers[0][:, : max(edge, 0)]
    return layers[1]


def pair(x: float) -> tuple[np.ndarray, np.ndarray]:
    """What the two cameras of a rectified pair see, the left one at x."""
    return picture(x), picture(x + BASELINE)


def write_pairs(folder: Path, count: int = 6, step: float = STEP) -> tuple[Path, Path, Path]:
    """Rectified pairs and their true poses in KITTI's form: left, right, poses.txt."""
    left, right = folder / "left", folder / "right"
    left.mkdir()
    right.mkdir()
    rows = []
    for i in range(count):
        for side, pixels in zip((left, right), pair(step * i), strict=True):
            cv2.imwrite(str(side / f"{i}.png"), pixels)
        rows.append(np.column_stack([np.eye(3), [step * i, 0, 0]]).ravel())
    np.savetxt(folder / "poses.txt", rows, encoding="utf-8-sig")  # as Windows' editors write
    return left, right, folder / "poses.txt"


def map_of_pairs(folder: Path, **options: int) -> ClosedTrajectory:
    """The map that a tracker of eight pairs makes in a folder."""
    keyframes = matcher.KeyframeMap(folder, WALLS, "nearest", **options)
    tracker = matcher.Tracker("nearest", WALLS, baseline=BASELINE, keyframe_map=keyframes, **options)
    for x in 0.18 * np.arange(8):
        tracker.push_stereo(*pair(x))
    return tracker.save_map()
