"""Cameras around a common spot, as people hold them, and how much of each other's picture they see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tracing.shading import Scene

WIDTH, HEIGHT, DEPTH_STEP = 640, 480, 2
CLEARANCE = 0.28  # metres between a camera and the nearest surface
ATTEMPTS = 40
STEEPEST = (0.5, 1.0)  # a group's limit of the rise by the distance on the floor of cameras above the spot
SMALLEST_GROUP, LARGEST_GROUP = 8, 12
MIN_OVERLAP, TOLERANCE = 0.08, 0.02  # tolerance: share of the depth that two surfaces may differ by


@dataclass(frozen=True, eq=False)
class Camera:
    """x = f (R X + t) + middle; `centre` in the world (metres, z up)."""

    focal: float
    rotation: np.ndarray  # (3, 3) camera (OpenCV axes) from world
    centre: np.ndarray  # (3,)

    @property
    def K(self) -> np.ndarray:
        """(3, 3), the centre of the first pixel at (0, 0)."""
        return np.array([[self.focal, 0, (WIDTH - 1) / 2], [0, self.focal, (HEIGHT - 1) / 2], [0, 0, 1]])

    @property
    def cam_from_world(self) -> np.ndarray:
        """(4, 4)."""
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = self.rotation, -self.rotation @ self.centre
        return pose

    def rays(self, pixels: np.ndarray) -> np.ndarray:
        """(N, 3) directions in the world of depth 1 of pixels (N, 2)."""
        return np.c_[(pixels - self.K[:2, 2]) / self.focal, np.ones(len(pixels))] @ self.rotation


def looking(centre: np.ndarray, target: np.ndarray, roll: float, focal: float) -> Camera:
    """A camera at `centre` that looks at `target`, rolled by radians."""
    forward = (target - centre) / np.linalg.norm(target - centre)
    right = np.cross(forward, [0, 0, 1.0])
    right /= max(np.linalg.norm(right), 1e-9)
    down = np.cross(forward, right)
    c, s = math.cos(roll), math.sin(roll)
    return Camera(focal, np.stack([c * right + s * down, c * down - s * right, forward]), centre)


def _sphere(count: int) -> np.ndarray:
    """(count, 3) directions spread over the sphere."""
    place = np.arange(count) + 0.5
    z, turn = 1 - 2 * place / count, place * math.pi * (3 - math.sqrt(5))
    return np.stack([np.sqrt(1 - z * z) * np.cos(turn), np.sqrt(1 - z * z) * np.sin(turn), z], -1)


DIRECTIONS = _sphere(48)
COARSE = np.stack(np.meshgrid(np.arange(20, WIDTH, 40.0), np.arange(20, HEIGHT, 40.0)), -1).reshape(-1, 2)


def is_free(scene: Scene, point: np.ndarray) -> bool:
    """Whether a camera could be held there: air around, a floor below, and no surface all around near by."""
    around = scene.distances(point, DIRECTIONS)
    below = scene.distances(point, np.array([[0, 0, -1.0]]))[0]
    return bool(around.min() > CLEARANCE and 0.2 < below < 3 and np.median(around) > 0.6)


def _shows_spot(scene: Scene, camera: Camera, spot: np.ndarray) -> bool:
    """Whether the spot is not hidden and the picture is not filled by something near."""
    toward = spot - camera.centre
    distance = float(np.linalg.norm(toward))
    if scene.distances(camera.centre, toward[None])[0] * distance < distance - 0.45:
        return False
    z = scene.depth(camera, COARSE)
    return bool((z < 0.4).mean() < 0.06 and np.median(z) > 0.55 and np.isfinite(z).mean() > 0.7)


def draw_focal(rng: np.random.Generator) -> float:
    """Pixels, for a horizontal field of view of 50 to 85 degrees."""
    return WIDTH / 2 / math.tan(math.radians(rng.uniform(50, 85)) / 2)


def ring(count: int) -> np.ndarray:
    """(count, 3) horizontal directions."""
    turn = np.arange(count) * 2 * math.pi / count
    return np.stack([np.cos(turn), np.sin(turn), 0 * turn], -1)


def room_around(scene: Scene, spot: np.ndarray) -> float:
    """Metres of free floor around a spot, at the height at which cameras are held."""
    around = scene.distances(np.append(spot[:2], 1.6), ring(16)).clip(0, 2.5)
    return float(np.sort(around)[:10].mean())


def _draw_camera(
    scene: Scene,
    spot: np.ndarray,
    bounds: np.ndarray,
    azimuth: float,
    steepest: float,
    focal: float,
    rng: np.random.Generator,
) -> Camera | None:
    """A camera that looks at the spot from about an azimuth; None if none is found there."""
    for attempt in range(ATTEMPTS):
        turn = azimuth + rng.normal(0, 0.15 + 0.02 * attempt)
        distance = float(np.exp(rng.uniform(math.log(0.6), math.log(4.2))))
        rise = rng.triangular(0.5, 1.5, 2.2) - spot[2]
        across = math.sqrt(max(distance**2 - rise**2, (rise / steepest) ** 2, 0.09))
        centre = spot + np.array([across * math.cos(turn), across * math.sin(turn), rise])
        aim = spot + rng.normal(0, 0.09 * distance, 3)
        roll = math.radians(rng.normal(0, 6))
        if rng.random() < 0.06:
            roll += rng.choice([-1, 1]) * math.pi / 2
        camera = looking(centre, aim, roll, focal)
        if (np.abs(centre - bounds.mean(0)) > np.ptp(bounds, axis=0) / 2 - CLEARANCE).any():
            continue
        if is_free(scene, centre) and _shows_spot(scene, camera, spot):
            return camera
    return None


def draw_group(
    scene: Scene, spot: np.ndarray, bounds: np.ndarray, count: int, rng: np.random.Generator
) -> list[Camera]:
    """Up to `count` cameras around a spot (3,), on all sides that are free within bounds (2, 3)."""
    start, focal, is_mixed = rng.uniform(0, 2 * math.pi), draw_focal(rng), rng.random() < 0.25
    steepest = rng.uniform(*STEEPEST)
    found: list[Camera] = []
    for number in range(2 * count):
        azimuth = start + 2 * math.pi * number / count + rng.normal(0, 0.2)
        chosen = draw_focal(rng) if is_mixed else focal
        camera = _draw_camera(scene, spot, bounds, azimuth, steepest, chosen, rng)
        if camera is not None:
            found.append(camera)
        if len(found) == count:
            break
    return found


def axes_angle(first: Camera, second: Camera) -> float:
    """Degrees between the directions in which two cameras look."""
    return math.degrees(math.acos(float(np.clip(first.rotation[2] @ second.rotation[2], -1, 1))))


def _visible_share(camera: Camera, z: np.ndarray, other: Camera, other_z: np.ndarray) -> float:
    """Share of a camera's pixels (every eighth) that the other one sees; z (H, W) with steps of 4 pixels."""
    rows, columns = 2 * np.array(np.nonzero(np.isfinite(z[::2, ::2])))
    pixels = 4.0 * np.stack([columns, rows], -1)
    points = camera.centre + camera.rays(pixels) * z[rows, columns, None]
    projected = (points - other.centre) @ other.rotation.T
    ahead = projected[:, 2] > 0.05
    place = projected[ahead, :2] / projected[ahead, 2:] * other.focal + other.K[:2, 2]
    nearest = np.rint(place / 4).astype(int)
    inside = ((place >= 0) & (place <= [WIDTH - 1, HEIGHT - 1])).all(1)
    nearest = nearest[inside].clip(0, np.array(z.shape[::-1]) - 1)
    there, expected = other_z[nearest[:, 1], nearest[:, 0]], projected[ahead][inside, 2]
    return float((np.abs(there - expected) < TOLERANCE * expected).sum() / z[::2, ::2].size)


def list_pairs(cameras: list[Camera], depths: list[np.ndarray]) -> list[list[float]]:
    """Rows [i, j, overlap, degrees between the axes] of the pairs that overlap; depths (240, 320)."""
    coarse = [depth[::2, ::2] for depth in depths]
    rows = []
    for i in range(len(cameras)):
        for j in range(i + 1, len(cameras)):
            share = _visible_share(cameras[i], coarse[i], cameras[j], coarse[j])
            if share < MIN_OVERLAP:
                continue
            share = min(share, _visible_share(cameras[j], coarse[j], cameras[i], coarse[i]))
            if share >= MIN_OVERLAP:
                rows.append([i, j, round(share, 3), round(axes_angle(cameras[i], cameras[j]), 1)])
    return rows
