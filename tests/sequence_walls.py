"""Two textured walls before a camera that slides to the right: images, pairs and true poses for tests."""

from pathlib import Path

import cv2
import numpy as np

CAMERA = "300,300,159.5,119.5"
DEPTHS, BASELINE, STEP = (2.0, 3.0), 0.2, 0.05


def make_walls() -> list[np.ndarray]:
    """Two textured planes; the nearer one covers the left of the image."""
    found = []
    for seed in (1, 2):
        noise = np.random.default_rng(seed).standard_normal((720, 960))
        found.append(cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 2.2), None, 0, 255, cv2.NORM_MINMAX))
    return [wall.astype(np.uint8) for wall in found]


def picture(walls: list[np.ndarray], x: float) -> np.ndarray:
    """(240, 320) grey, from a camera at x metres to the right that looks straight at the walls."""
    layers = []
    for wall, depth in zip(walls, DEPTHS, strict=True):
        shift = np.float64([[1, 0, -320 - 300 * x / depth], [0, 1, -240]])
        layers.append(cv2.warpAffine(wall, shift, (320, 240), flags=cv2.INTER_LINEAR))
    edge = int(160 - 300 * x / DEPTHS[0])
    layers[1][:, : max(edge, 0)] = layers[0][:, : max(edge, 0)]
    return layers[1]


def write_pairs(
    folder: Path, walls: list[np.ndarray], count: int = 6, step: float = STEP
) -> tuple[Path, Path, Path]:
    """Rectified pairs and their true poses in KITTI's form: left, right, poses.txt."""
    left, right = folder / "left", folder / "right"
    left.mkdir()
    right.mkdir()
    rows = []
    for i in range(count):
        cv2.imwrite(str(left / f"{i}.png"), picture(walls, step * i))
        cv2.imwrite(str(right / f"{i}.png"), picture(walls, step * i + BASELINE))
        rows.append(np.column_stack([np.eye(3), [step * i, 0, 0]]).ravel())
    np.savetxt(folder / "poses.txt", rows, encoding="utf-8-sig")  # as Windows' editors write
    return left, right, folder / "poses.txt"
