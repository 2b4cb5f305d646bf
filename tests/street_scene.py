"""Rendered streets and roads for tests of stereo and odometry: exact depths, exact poses, cars that move.

Every surface is a plane across one axis of the world (x right, y down, z ahead); an image is made by casting
a ray through every pixel. `scripts/measure.py roads` tells how far odometry drifts on them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    contrast: float = 22.0  # grey levels of an octave of texture
    number: int = 0  # which texture it has


def box(x: float, z: float, width: float, height: float, depth: float, number: int = 0) -> list[Face]:
    """Front, two sides and top of a box on the ground, whose front's left edge is at (x, z)."""
    low, high = (x, 1.5 - height, z), (x + width, 1.5, z + depth)
    planes = (2, z), (0, x), (0, x + width), (1, 1.5 - height)
    return [Face(*plane, low, high, number=number + i) for i, plane in enumerate(planes)]


# Ground and something far: how far the camera moved shows on the near ground alone.
OPEN_ROAD = [Face(1, 1.5, (-40, 0, -10), (40, 2, 200)), Face(2, 100.0, (-90, -60, 0), (90, 2, 200), number=1)]
STREET = [
    *OPEN_ROAD,
    Face(0, -7.0, (-8, -6, -10), (0, 1.5, 200), number=2),
    Face(0, 8.0, (0, -9, -10), (9, 1.5, 200), number=3),
    *box(0.9, 2.4, 0.9, 1.6, 1.0, 4),
    *box(-1.2, 4.5, 0.8, 1.3, 1.2, 8),
    *box(2.2, 5.5, 1.5, 2.5, 2.0, 12),
    *box(-3.6, 8.0, 1.6, 2.2, 3.0, 16),
    *box(2.6, 11.0, 1.6, 1.5, 3.5, 20),
    *box(-4.0, 15.0, 1.8, 1.5, 4.0, 24),
    *box(3.0, 20.0, 1.8, 3.0, 4.0, 28),
]


def pose(frame: int, step: float = 0.5, turn: float = 0.012) -> np.ndarray:
    """(4, 4) world_from_cam of a frame: `step` metres ahead each, in a curve of `turn` radians a frame."""
    angle, T = turn * frame, np.eye(4)
    T[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
    radius = step / turn
    T[:3, 3] = radius * (1 - np.cos(angle)), 0.01 * np.sin(frame), radius * np.sin(angle)
    return T


# --- Roads: a drive of many frames, and what is seen at each.


@dataclass(frozen=True)
class Road:
    """A drive."""

    step: float  # metres a frame
    turn: float  # radians a frame
    faces: Callable[[int], list[Face]]  # of a frame

    def pose(self, frame: int) -> np.ndarray:
        return pose(frame, self.step, self.turn)

    def pair(self, frame: int) -> tuple[np.ndarray, np.ndarray]:
        T = self.pose(frame)
        return pair([face for face in self.faces(frame) if _may_show(face, T[:3, 3])], T, frame)


def _may_show(face: Face, centre: np.ndarray) -> bool:
    """Whether a face is near enough and on the side of its box that a camera there sees."""
    if face.number < 4:
        return True
    if face.axis == 1 or not -2 < face.high[2] - centre[2] < 120:
        return face.axis == 1 and face.at > centre[1]
    return (face.at == face.low[face.axis]) == (centre[face.axis] < face.at)


def _beside(road: tuple[float, float], offsets: tuple[float, ...], apart: float, size: tuple) -> list[Face]:
    """Boxes along a road (step, turn), so many metres beside its middle and apart from each other."""
    rng, found, radius = np.random.default_rng(7), [], road[0] / road[1]
    for way in np.arange(6.0, 190.0, apart):
        for offset in offsets:
            angle, side = way / radius, offset + rng.uniform(-1, 1) * abs(offset) / 8
            x, z = radius - (radius - side) * np.cos(angle), (radius - side) * np.sin(angle)
            scale = rng.uniform(0.6, 1.4)
            number = int(rng.integers(1000))
            found += box(x, z, *(scale * each for each in size), number=number)
    return found


def _car(road: tuple[float, float], way: float, side: float, number: int) -> list[Face]:
    """A car `way` metres along the road and `side` metres beside the camera's lane."""
    radius = road[0] / road[1]
    angle = way / radius
    x, z = radius - (radius - side) * np.cos(angle), (radius - side) * np.sin(angle)
    return [replace(face, contrast=8.0) for face in box(x - 0.9, z, 1.8, 1.5, 4.0, number)]


def _ground(contrast: float) -> list[Face]:
    ground, far = OPEN_ROAD
    return [replace(ground, low=(-200, 0, -10), high=(200, 2, 400), contrast=contrast),
            replace(far, at=350.0, low=(-400, -35, 0), high=(400, 2, 400))]  # fmt: skip


TOWN, HIGHWAY = (0.9, 0.012), (2.6, 0.0087)  # metres and radians a frame; the highway's curve has 300 m
_NEAR = _beside(TOWN, (-5.0, 5.5), 6.0, (1.6, 2.5, 2.0))
_FAR = _beside(HIGHWAY, (-30.0, -60.0, 26.0, 55.0), 20.0, (4.0, 6.0, 4.0))


def _traffic(frame: int) -> list[Face]:
    """One car ahead that keeps its distance, one that overtakes, and one that comes towards the camera."""
    here = HIGHWAY[0] * frame
    cars = ((here + 18.0, 0.0, 900), (here + 4.0 + 0.8 * (frame % 24), -3.4, 910),
            (here + 90.0 - 2 * HIGHWAY[0] * (frame % 16), -7.0, 920))  # fmt: skip
    return [face for car in cars for face in _car(HIGHWAY, *car)]


ROADS = {
    "town": Road(*TOWN, lambda _: [*_ground(22.0), *_NEAR]),
    "highway": Road(*HIGHWAY, lambda _: [*_ground(0.4), *_FAR]),
    "traffic": Road(*HIGHWAY, lambda frame: [*_ground(1.0), *_FAR, *_traffic(frame)]),
}


# --- Rendering.


def cast(
    faces: list[Face], points: np.ndarray, world_from_cam: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the pixels (N, 2) show: depth along z (N,), place in the world (N, 3), face (N,)."""
    local = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(CAMERA.K).T
    rays, centre = local @ world_from_cam[:3, :3].T, world_from_cam[:3, 3]
    depths, which = np.full(len(points), np.inf), np.full(len(points), -1)
    for row, face in enumerate(faces):
        with np.errstate(divide="ignore", invalid="ignore"):
            t = (face.at - centre[face.axis]) / rays[:, face.axis]
        some = np.flatnonzero((t > 0.3) & (t < depths))
        for axis in {0, 1, 2} - {face.axis}:
            place = centre[axis] + t[some] * rays[some, axis]
            some = some[(place >= face.low[axis]) & (place <= face.high[axis])]
        depths[some], which[some] = t[some], row
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
    axes, contrast, number = (
        np.array([getattr(face, name) for face in faces])[which] for name in ("axis", "contrast", "number")
    )
    # A box that moves takes its texture along.
    corner = np.array([face.low if face.number >= 4 else (0, 0, 0) for face in faces])[which]
    places = places - corner
    u = np.where(axes == 0, places[:, 2], places[:, 0]) + 13.7 * number
    v = np.where(axes == 1, places[:, 2], places[:, 1]) + 29.1 * number
    footprint = np.where(np.isfinite(depths), depths, 1e3) / CAMERA.fx / _OVERSAMPLING
    shade = np.full(len(depths), 125.0)
    for wavelength in _WAVELENGTHS:
        seen = np.clip(wavelength / footprint / 2 - 1, 0, 1)
        grid = [np.mod(each / wavelength, 512).astype(np.float32).reshape(-1, _ROW) for each in (u, v)]
        noise = cv2.remap(lattice, *grid, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP).ravel()
        shade += contrast * seen * noise
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
