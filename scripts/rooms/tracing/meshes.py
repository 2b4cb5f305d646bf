"""Textures, materials, and meshes of triangles with normals and texture coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import cv2
import numpy as np

WHITE_PIXEL = np.full((1, 1, 3), 255, np.uint8)


class Texture:
    """A picture and its mip levels, each half as large as the one before; red, green, blue as in sRGB."""

    def __init__(self, picture: np.ndarray) -> None:
        self.levels = [np.ascontiguousarray(picture)]
        while max(self.levels[-1].shape[:2]) > 1:
            height, width = (max(1, side // 2) for side in self.levels[-1].shape[:2])
            self.levels.append(cv2.resize(self.levels[-1], (width, height), interpolation=cv2.INTER_AREA))
        self.mean = (self.levels[-1].reshape(3) / 255.0) ** 2.2  # linear

    @property
    def aspect(self) -> float:
        """Width by height."""
        height, width = self.levels[0].shape[:2]
        return width / height


PLAIN = Texture(WHITE_PIXEL)


@dataclass(frozen=True, eq=False)
class Material:
    """How a surface reflects; colours are linear."""

    texture: Texture = PLAIN
    tint: tuple[float, float, float] = (0.7, 0.7, 0.7)  # times the texture
    gloss: float = 0.0  # strength of the highlight
    shininess: float = 30.0  # exponent of the highlight
    emission: float = 0.0  # radiance as a multiple of the colour; such a surface reflects nothing
    lamp: int = -1  # number of the lamp whose fixture this is: it glows where the lamp is on
    casts: bool = True  # whether it throws shadows; what holds a lamp does not, as the lamp is inside
    mirrored: bool = False  # whether repetitions of the texture are mirrored, so that they have no seams
    span: float = 0.0  # metres of a repetition; 0: texture coordinates are used as they are


@dataclass(frozen=True, eq=False)
class Mesh:
    """N triangles."""

    corners: np.ndarray  # (N, 3, 3) float64, metres, z up
    normals: np.ndarray  # (N, 3, 3) of unit length, at the corners
    uv: np.ndarray  # (N, 3, 2), v upwards
    slots: np.ndarray  # (N,) int, which of the materials
    materials: list[Material] = field(default_factory=lambda: [Material()])

    @property
    def low(self) -> np.ndarray:
        """(3,) corner of the bounding box."""
        return self.corners.min((0, 1))

    @property
    def high(self) -> np.ndarray:
        """(3,) opposite corner of the bounding box."""
        return self.corners.max((0, 1))

    @property
    def extent(self) -> np.ndarray:
        """(3,) metres."""
        return self.high - self.low

    def moved(self, shift: Sequence[float] | np.ndarray, yaw: float = 0.0) -> Mesh:
        """Turned about the z axis by radians, then shifted by metres."""
        c, s = math.cos(yaw), math.sin(yaw)
        return self.turned(np.array([[c, -s, 0], [s, c, 0], [0, 0, 1.0]]), np.asarray(shift, float))

    def turned(self, rotation: np.ndarray, shift: np.ndarray | float = 0.0) -> Mesh:
        """By a rotation (3, 3), then shifted (3,)."""
        return replace(self, corners=self.corners @ rotation.T + shift, normals=self.normals @ rotation.T)

    def scaled(self, factors: np.ndarray | float) -> Mesh:
        """Stretched along the axes."""
        normals = self.normals / factors
        normals = normals / np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-9)
        return replace(self, corners=self.corners * factors, normals=normals)

    def standing(self) -> Mesh:
        """Shifted so that the middle of its foot is at the origin."""
        low, high = self.low, self.high
        return self.moved([-(low[0] + high[0]) / 2, -(low[1] + high[1]) / 2, -low[2]])

    def painted(self, *materials: Material) -> Mesh:
        """With other materials; those with a span of metres are laid on by box projection."""
        uv = self.uv
        if any(material.span for material in materials):
            spans = np.array([material.span or 1.0 for material in materials])[self.slots]
            boxed = np.array([material.span > 0 for material in materials])[self.slots]
            uv = np.where(boxed[:, None, None], self._boxed() / spans[:, None, None], uv)
        return replace(self, uv=uv, materials=list(materials))

    def _boxed(self) -> np.ndarray:
        """(N, 3, 2) metres along the two axes that a triangle faces least."""
        facing = np.cross(self.corners[:, 1] - self.corners[:, 0], self.corners[:, 2] - self.corners[:, 0])
        axes = np.array([[1, 2], [0, 2], [0, 1]])[np.abs(facing).argmax(1)]
        return np.take_along_axis(self.corners, np.repeat(axes[:, None], 3, 1), 2)

    def with_one_slot(self) -> Mesh:
        """All triangles of one material."""
        return replace(self, slots=np.zeros_like(self.slots), materials=self.materials[:1])


def joined(parts: Sequence[Mesh]) -> Mesh:
    """One mesh of several, with the materials of all."""
    first = np.cumsum([0, *(len(part.materials) for part in parts)])
    return Mesh(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("corners", "normals", "uv")),
        np.concatenate([part.slots + number for part, number in zip(parts, first, strict=False)]),
        [material for part in parts for material in part.materials],
    )


def quad(corners: np.ndarray | Sequence, material: Material, repeat: tuple[float, float] = (1, 1)) -> Mesh:
    """A rectangle of four corners counterclockwise from the lower left, the texture `repeat` times on it."""
    points = np.asarray(corners, float)
    uv = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * repeat
    order = np.array([[0, 1, 2], [0, 2, 3]])
    normal = np.cross(points[1] - points[0], points[3] - points[0])
    normals = np.broadcast_to(normal / np.linalg.norm(normal), (2, 3, 3)).copy()
    mesh = Mesh(points[order], normals, uv[order], np.zeros(2, int))
    return mesh.painted(material)


def box(size: Sequence[float], material: Material, foot: Sequence[float] = (0, 0, 0)) -> Mesh:
    """A box of a size in metres whose foot has its middle at `foot`; each side has the whole texture."""
    x, y, z = np.asarray(size, float) / [2, 2, 1]
    sides = [
        [(-x, -y, 0), (x, -y, 0), (x, -y, z), (-x, -y, z)],
        [(x, -y, 0), (x, y, 0), (x, y, z), (x, -y, z)],
        [(x, y, 0), (-x, y, 0), (-x, y, z), (x, y, z)],
        [(-x, y, 0), (-x, -y, 0), (-x, -y, z), (-x, y, z)],
        [(-x, -y, z), (x, -y, z), (x, y, z), (-x, y, z)],
        [(-x, y, 0), (x, y, 0), (x, -y, 0), (-x, -y, 0)],
    ]
    whole = joined([quad(side, material) for side in sides]).with_one_slot()
    return whole.moved(foot).painted(material)


def lathed(profile: np.ndarray, material: Material, steps: int = 28) -> Mesh:
    """A body of revolution about z of a profile (P, 2) of radii and heights, from below upwards."""
    turn = np.linspace(0, 2 * math.pi, steps + 1)
    ring = np.stack([np.cos(turn), np.sin(turn)], -1)
    radius, height = profile[:, 0], profile[:, 1]
    points = np.concatenate(
        [radius[:, None, None] * ring, np.broadcast_to(height[:, None, None], (len(profile), steps + 1, 1))],
        -1,
    )
    slope = np.gradient(profile, axis=0)
    across = np.stack([slope[:, 1], -slope[:, 0]], -1)
    across /= np.maximum(np.linalg.norm(across, axis=1, keepdims=True), 1e-9)
    normals = np.concatenate(
        [across[:, :1, None] * ring, np.broadcast_to(across[:, 1:, None], (len(profile), steps + 1, 1))], -1
    )
    along = np.concatenate([[0], np.linalg.norm(np.diff(profile, axis=0), axis=1).cumsum()])
    uv = np.stack(np.meshgrid(np.linspace(0, 1, steps + 1), along / max(along[-1], 1e-9)), -1)
    return _from_grid(points, normals, uv).painted(material)


def _from_grid(points: np.ndarray, normals: np.ndarray, uv: np.ndarray) -> Mesh:
    """Two triangles for each cell of a grid (rows, columns, …)."""
    rows, columns = points.shape[:2]
    first = (np.arange(rows - 1)[:, None] * columns + np.arange(columns - 1)).reshape(-1, 1)
    order = np.concatenate(
        [first + np.array(way) for way in ([0, 1, columns + 1], [0, columns + 1, columns])]
    )
    flat = (values.reshape(rows * columns, -1)[order] for values in (points, normals, uv))
    return Mesh(*flat, np.zeros(len(order), int))


def sheet(points: np.ndarray, material: Material) -> Mesh:
    """A smooth surface through a grid of points (rows, columns, 3)."""
    along, down = np.gradient(points, axis=1), np.gradient(points, axis=0)
    normals = np.cross(along, down)
    normals /= np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-9)
    rows, columns = points.shape[:2]
    uv = np.stack(np.meshgrid(np.linspace(0, 1, columns), np.linspace(0, 1, rows)), -1)
    return _from_grid(points, normals, uv).painted(material)
