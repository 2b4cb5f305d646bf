"""Surfaces in space: flat or with relief, rectangular or cut out; boxes and rooms made of them.

World axes are those of a camera that looks along z: x to the right, y down; lengths in metres.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import cv2
import numpy as np


@dataclass(frozen=True, eq=False)
class Surface:
    """A textured parallelogram: texel (u, v) lies at origin + u·right + v·down (− heights·normal).

    Its normal is right × down and points away from the viewer; relief and light are on the viewer's side.
    """

    texture: np.ndarray  # (h, w) uint8, reflectance
    origin: np.ndarray  # (3,)
    right: np.ndarray  # (3,) metres per texel
    down: np.ndarray  # (3,)
    solid: np.ndarray | None = None  # (h, w) bool of a cut-out
    heights: np.ndarray | None = None  # (h, w) float32 metres above the plane, towards the viewer
    gloss: float = 0.0  # strength of the highlight
    casts_shadows: bool = True  # on other surfaces

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) in texels."""
        return self.texture.shape[0], self.texture.shape[1]

    @cached_property
    def facing(self) -> np.ndarray:
        """(3,) unit vector towards the viewer."""
        normal = np.cross(self.down, self.right)
        return normal / np.linalg.norm(normal)

    def corners(self) -> np.ndarray:
        """(4, 3) in order around it."""
        height, width = self.shape
        u, v = self.right * (width - 1), self.down * (height - 1)
        return np.stack([self.origin, self.origin + u, self.origin + u + v, self.origin + v])


def rectangle(
    texture: np.ndarray, centre: np.ndarray, across: np.ndarray, along: np.ndarray, **more: object
) -> Surface:
    """A surface from its centre and its two side vectors (3,), metres, left to right and top to bottom."""
    height, width = texture.shape
    origin = centre - across / 2 - along / 2
    return Surface(texture, origin, across / (width - 1), along / (height - 1), **more)


def upright(
    texture: np.ndarray, centre: np.ndarray, longer: float, turn: np.ndarray, **more: object
) -> Surface:
    """A surface of the texture's proportions, its longer side `longer` metres, turned by `turn` (3, 3)."""
    height, width = texture.shape
    step = longer / max(height, width)
    return rectangle(texture, centre, turn[:, 0] * step * width, turn[:, 1] * step * height, **more)


def random_rotation(limit: float, rng: np.random.Generator) -> np.ndarray:
    """(3, 3) tilt by up to `limit` degrees about a random axis in the image plane, and a small roll."""
    direction, angle = rng.uniform(0, 2 * np.pi), np.deg2rad(limit) * rng.random()
    tilt = cv2.Rodrigues(angle * np.array([np.cos(direction), np.sin(direction), 0.0]))[0]
    return tilt @ cv2.Rodrigues(np.array([0, 0, rng.normal(0, np.deg2rad(limit) / 4)]))[0]


def box(textures: list[np.ndarray], centre: np.ndarray, sides: np.ndarray, yaw: float) -> list[Surface]:
    """Five faces of an upright box (none below), `sides` (3,) metres, turned about the vertical."""
    turn = cv2.Rodrigues(np.array([0, yaw, 0.0]))[0]
    x, y, z = (turn[:, axis] * sides[axis] for axis in range(3))
    faces = [(-z, x, y), (z, -x, y), (-x, -z, y), (x, z, y), (-y, x, -z)]
    return [
        rectangle(texture, centre + outward / 2, across, along)
        for texture, (outward, across, along) in zip(textures, faces, strict=True)
    ]


def room(textures: list[np.ndarray], low: np.ndarray, high: np.ndarray) -> list[Surface]:
    """Six walls, seen from inside, between corners `low` and `high` (3,): back, front, left, right,
    floor, ceiling."""
    centre, sides = (low + high) / 2, high - low
    x, y, z = np.diag(sides)
    walls = [(z, x, y), (-z, -x, y), (-x, z, y), (x, -z, y), (y, x, -z), (-y, x, z)]
    return [
        rectangle(texture, centre + outward / 2, across, along, casts_shadows=False)
        for texture, (outward, across, along) in zip(textures, walls, strict=True)
    ]


def with_relief(surface: Surface, heights: np.ndarray, depth: float) -> Surface:
    """The surface with heights (h, w) in [0, 1] up to `depth` metres."""
    return replace(surface, heights=(heights * depth).astype(np.float32))
