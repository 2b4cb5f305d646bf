"""A rendered street for tests of stereo: textured ground, walls and boxes close by, with exact depths.

Every surface is a plane across one axis of the world (x right, y down, z ahead); an image is made by casting
a ray through every pixel. So the true depth of any pixel is known, and disparities reach from 2 to 80 pixels.
"""

from dataclasses import dataclass

import cv2
import numpy as np

from matcher.cameras import Camera

SIZE = (480, 200)
CAMERA = Camera(360.0, 360.0, 239.5, 79.5)
BASELINE = 0.54
_WAVELENGTHS = 0.03 * 2.0 ** np.arange(8)  # metres, of the octaves of texture
_OVERSAMPLING = 2
_ROW = _OVERSAMPLING * SIZE[0]


@dataclass(frozen=True)
class Face:
    """The part of the plane `axis` = `at` that lies within `low` and `high` (3,) metres."""

    axis: int
    at: float
    low: tuple[float, float, float]
    high: tuple[float, float, float]


def box(x: float, z: float, width: float, height: float, depth: float) -> list[Face]:
    """Front, two sides and top of a box on the ground, whose front's left edge is at (x, z)."""
    low, high = (x, 1.5 - height, z), (x + width, 1.5, z + depth)
    return [Face(2, z, low, high), Face(0, x, low, high), Face(0, x + width, low, high),
            Face(1, 1.5 - height, low, high)]  # fmt: skip


# Ground and something far: how far the camera moved shows on the near ground alone.
OPEN_ROAD = [Face(1, 1.5, (-40, 0, -10), (40, 2, 200)), Face(2, 100.0, (-90, -60, 0), (90, 2, 200))]
STREET = [
    *OPEN_ROAD,
    Face(0, -7.0, (-8, -6, -10), (0, 1.5, 200)),
    Face(0, 8.0, (0, -9, -10), (9, 1.5, 200)),
    *box(0.9, 2.4, 0.9, 1.6, 1.0),
    *box(-1.2, 4.5, 0.8, 1.3, 1.2),
    *box(2.2, 5.5, 1.5, 2.5, 2.0),
    *box(-3.6, 8.0, 1.6, 2.2, 3.0),
    *box(2.6, 11.0, 1.6, 1.5, 3.5),
    *box(-4.0, 15.0, 1.8, 1.5, 4.0),
    *box(3.0, 20.0, 1.8, 3.0, 4.0),
]


def pose(frame: int, step: float = 0.5) -> np.ndarray:
    """(4, 4) world_from_cam of a frame: so many metres ahead each, in a slight curve."""
    angle = 0.012 * frame
    T = np.eye(4)
    T[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
    T[:3, 3] = 0.003 * frame**2, 0.01 * np.sin(frame), step * frame
    return T


def cast(
    faces: list[Face], points: np.ndarray, world_from_cam: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the pixels (N, 2) show: depth along z (N,), place in the world (N, 3), face (N,)."""
    local = np.column_stack(
        [(points[:, 0] - CAMERA.cx) / CAMERA.fx, (points[:, 1] - CAMERA.cy) / CAMERA.fy, np.ones(len(points))]
    )
    rays, centre = local @ world_from_cam[:3, :3].T, world_from_cam[:3, 3]
    depths, which = np.full(len(points), np.inf), np.full(len(points), -1)
    for row, face in enumerate(faces):
        with np.errstate(divide="ignore", invalid="ignore"):
            t = (face.at - centre[face.axis]) / rays[:, face.axis]
            nearer = (t > 0.3) & (t < depths)
            for axis in {0, 1, 2} - {face.axis}:
                place = centre[axis] + t * rays[:, axis]
                nearer &= (place >= face.low[axis]) & (place <= face.high[axis])
        depths[nearer], which[nearer] = t[nearer], row
    return depths, centre + np.where(np.isfinite(depths), depths, 0)[:, None] * rays, which


def right_of(world_from_cam: np.ndarray) -> np.ndarray:
    """The pose of the right camera of a pair."""
    T = world_from_cam.copy()
    T[:3, 3] += BASELINE * T[:3, 0]
    return T


def pair(faces: list[Face], world_from_cam: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Left and right image, (H, W) uint8."""
    poses = world_from_cam, right_of(world_from_cam)
    left, right = (_picture(faces, T, np.random.default_rng((seed, i))) for i, T in enumerate(poses))
    return left, right


def _picture(faces: list[Face], world_from_cam: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    width, height = (_OVERSAMPLING * side for side in SIZE)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    pixels = (np.column_stack([x.ravel(), y.ravel()]) + 0.5) / _OVERSAMPLING - 0.5
    depths, places, which = cast(faces, pixels, world_from_cam)
    shade = np.where(np.isfinite(depths), _texture(faces, depths, places, which), 200.0)
    grey = cv2.resize(shade.reshape(height, width).astype(np.float32), SIZE, interpolation=cv2.INTER_AREA)
    return np.clip(grey + rng.normal(0, 1.0, grey.shape), 0, 255).astype(np.uint8)


def _texture(faces: list[Face], depths: np.ndarray, places: np.ndarray, which: np.ndarray) -> np.ndarray:
    """(N,) grey levels: octaves of noise on each face, those finer than a pixel left out."""
    lattice = np.random.default_rng(5).standard_normal((512, 512)).astype(np.float32)
    axes = np.array([face.axis for face in faces])[which]
    u = np.where(axes == 0, places[:, 2], places[:, 0]) + 13.7 * which
    v = np.where(axes == 1, places[:, 2], places[:, 1]) + 29.1 * which
    footprint = np.where(np.isfinite(depths), depths, 1e3) / CAMERA.fx / _OVERSAMPLING
    shade = np.full(len(depths), 125.0)
    for wavelength in _WAVELENGTHS:
        seen = np.clip(wavelength / footprint / 2 - 1, 0, 1)
        grid = [np.mod(each / wavelength, 512).astype(np.float32).reshape(-1, _ROW) for each in (u, v)]
        shade += 22 * seen * cv2.remap(lattice, *grid, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP).ravel()
    return shade


def true_disparities(faces: list[Face], points: np.ndarray, world_from_cam: np.ndarray) -> np.ndarray:
    """(N,) pixels at which the right image shows left pixels (N, 2) further left; NaN where it does not."""
    points = np.asarray(points, np.float64)
    depths, _, _ = cast(faces, points, world_from_cam)
    found = CAMERA.fx * BASELINE / depths
    there = points - np.column_stack([found, np.zeros(len(points))])
    again, _, _ = cast(faces, there, right_of(world_from_cam))
    seen = (there[:, 0] >= 0) & (np.abs(again / depths - 1) < 0.02)
    return np.where(seen, found, np.nan)
