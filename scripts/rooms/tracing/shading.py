"""A scene ready for rays, its lamps, and the drawing of views."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
from embreex import rtcore, rtcore_scene
from embreex.mesh_construction import TriangleMesh

from tracing import colours, kernels
from tracing.cameras import DEPTH_STEP, HEIGHT, WIDTH, Camera
from tracing.meshes import Mesh, joined
from tracing.sampling import pool_textures

AROUND_RAYS = 6  # for each depth pixel and phase, so 96 directions after smoothing
WIDE_LAMP = 0.1  # metres, half
REACH = 0.7  # metres within which a surface near by darkens
TO_LINEAR = (np.arange(256) / 255.0) ** 2.2


@dataclass(frozen=True, eq=False)
class Lamp:
    """A small light, or a window, which shines in one direction."""

    middle: np.ndarray  # (3,)
    axes: np.ndarray  # (2, 3) half-axes of its area, metres
    colour: np.ndarray  # (3,) light at one metre straight ahead
    direction: np.ndarray  # (3,) zeros: all directions

    @property
    def row(self) -> np.ndarray:
        """(15,) as the kernels read it."""
        return np.concatenate([self.middle, self.axes.reshape(-1), self.colour, self.direction])

    @property
    def is_wide(self) -> bool:
        """Whether its shadows have edges so soft that 16 points of it would show as steps."""
        return bool(np.abs(self.axes).max() > WIDE_LAMP)


@dataclass(frozen=True, eq=False)
class Lighting:
    """Which lamps are on, and what the rest adds."""

    lamps: list[Lamp]
    numbers: list[int]  # of the fixtures that glow
    sky: np.ndarray  # (3,) radiance where no surface is
    panes: float  # radiance of windows

    @property
    def rows(self) -> np.ndarray:
        """(L, 15) float32, wide lamps last."""
        return np.array([lamp.row for lamp in self._ordered()], np.float32).reshape(-1, 15)

    @property
    def first_wide(self) -> int:
        """The number of lamps whose shadows are nearly sharp."""
        return sum(not lamp.is_wide for lamp in self.lamps)

    def _ordered(self) -> list[Lamp]:
        return sorted(self.lamps, key=lambda lamp: lamp.is_wide)


def _points_of_lamps() -> np.ndarray:
    """(16, 16, 2) points of the unit disk for blocks and pixels, each block's in the cells of 4 × 4."""
    rng = np.random.default_rng(3)
    cells = np.stack(np.meshgrid(np.arange(4), np.arange(4)), -1).reshape(-1, 2)
    within = rng.permutation((cells + 0.5) / 4)  # where in its cell a block's points lie
    square = (cells + within[:, None]) / 2 - 1
    radius, angle = np.abs(square).max(-1), np.arctan2(square[..., 1], square[..., 0])
    disk = radius[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    return np.stack([rng.permutation(points) for points in disk]).astype(np.float32)


def _directions_around() -> np.ndarray:
    """(16, R, 3) directions about +z, as dense as the cosine, each phase's spread over the half-space."""
    count = 16 * AROUND_RAYS
    place = np.arange(count) + 0.5
    radius, turn = np.sqrt(place / count), place * math.pi * (3 - math.sqrt(5))
    rows = np.stack([radius * np.cos(turn), radius * np.sin(turn), np.sqrt(1 - radius**2)], -1)
    spread = np.random.default_rng(5).permuted(rows.reshape(AROUND_RAYS, 16, 3), axis=1)
    return np.ascontiguousarray(spread.transpose(1, 0, 2), np.float32)


def _smoothed(values: np.ndarray, grid: np.ndarray, stride: int = 1, first: int = 0) -> np.ndarray:
    """Smoothed along rows and columns; see `kernels.smooth`."""
    return kernels.smooth(kernels.smooth(values, grid, True, stride, first), grid, False, stride, first)


class Scene:
    """Triangles with their materials, in a tree for rays."""

    def __init__(self, parts: list[Mesh]) -> None:
        whole = joined(parts)
        self.corners = np.ascontiguousarray(whole.corners, np.float32)
        self._device = rtcore.EmbreeDevice()
        self._tree = rtcore_scene.EmbreeScene(self._device)
        TriangleMesh(self._tree, self.corners)
        casts = np.array([material.casts for material in whole.materials])[whole.slots]
        self._casting = rtcore_scene.EmbreeScene(self._device)
        TriangleMesh(self._casting, np.ascontiguousarray(self.corners[casts]))
        edges = self.corners[:, 1:] - self.corners[:, :1]
        facing = np.cross(edges[:, 0], edges[:, 1])
        self.area = np.linalg.norm(facing, axis=1) / 2
        self.facing = facing / np.maximum(2 * self.area, 1e-12)[:, None]
        self._mesh = (
            self.corners, whole.normals.astype(np.float32), whole.uv.astype(np.float32),
            whole.slots.astype(np.int32),
        )  # fmt: skip
        textures = {id(material.texture): material.texture for material in whole.materials}
        numbers = {key: number for number, key in enumerate(textures)}
        pool, levels, counts = pool_textures(list(textures.values()))
        chosen = np.array([numbers[id(material.texture)] for material in whole.materials])
        self._textures = pool, TO_LINEAR.astype(np.float32), levels, counts, chosen
        self.tints = np.array([material.tint for material in whole.materials], np.float32)
        self.lamp_numbers = np.array([material.lamp for material in whole.materials])
        self._finishes = np.array(
            [[m.gloss, m.shininess, m.emission, m.mirrored] for m in whole.materials], np.float32
        )
        means = np.array([material.texture.mean for material in whole.materials]) * self.tints
        glowing = (self._finishes[:, 2] > 0) | (self.lamp_numbers >= 0)
        self.albedo = np.where(glowing[:, None], 0, means)[whole.slots].astype(np.float32)

    def cast(self, origins: np.ndarray, directions: np.ndarray) -> dict[str, np.ndarray]:
        """First hits of rays (N, 3): `tfar` in units of the directions, `primID`, `u`, `v`, `Ng`."""
        origins = np.broadcast_to(np.asarray(origins, np.float32), directions.shape)
        return self._tree.run(
            np.ascontiguousarray(origins), np.ascontiguousarray(directions, np.float32), output=True
        )

    def distances(self, origins: np.ndarray, directions: np.ndarray) -> np.ndarray:
        """(N,) in units of each direction, inf without a hit."""
        hits = self.cast(origins, np.asarray(directions, np.float32).reshape(-1, 3))
        return np.where(hits["primID"] < 0, np.inf, hits["tfar"])

    def are_blocked(self, origins: np.ndarray, directions: np.ndarray, reach: float) -> np.ndarray:
        """(N,) bool, whether something that throws shadows lies within `reach` times the directions."""
        reaches = np.full(len(origins), reach, np.float32)
        return self._casting.run(origins, directions, reaches, query="OCCLUDED") >= 0

    def depth(self, camera: Camera, pixels: np.ndarray) -> np.ndarray:
        """(N,) z at pixels (N, 2), inf where nothing is hit."""
        return self.distances(camera.centre, camera.rays(pixels))

    def _look(self, lighting: Lighting) -> tuple:
        """What materials look like: fixtures of lamps and windows glow as much as they give light."""
        finishes = self._finishes.copy()
        finishes[self._finishes[:, 2] > 0, 2] *= lighting.panes
        for number, lamp in zip(lighting.numbers, lighting.lamps, strict=False):
            finishes[self.lamp_numbers == number, 2] = 2.0 + 2.0 * float(lamp.colour.mean())
        return (*self._textures, self.tints, finishes)

    def ambient(self, lighting: Lighting) -> np.ndarray:
        """(3,) light that has been reflected twice or more, the same everywhere."""
        rng = np.random.default_rng(0)
        chosen = rng.choice(len(self.area), 500, p=self.area / self.area.sum())
        middles = self.corners[chosen].mean(1)
        light = np.zeros(3)
        for lamp in lighting.lamps:
            toward = lamp.middle - middles
            square = np.maximum((toward**2).sum(1), 0.3)
            share = np.abs((toward * self.facing[chosen]).sum(1)) / np.sqrt(square) / square
            light += 0.4 * share.mean() * lamp.colour
        return light * self.albedo[chosen].mean(0) / (1 - self.albedo[chosen].mean(0).clip(0, 0.8)) * 0.6

    def draw(self, camera: Camera, lighting: Lighting) -> tuple[np.ndarray, np.ndarray]:
        """Linear colours (HEIGHT, WIDTH, 3) and z (HEIGHT / 2, WIDTH / 2) of a view, inf where nothing is."""
        fine = 2 * WIDTH - 1, 2 * HEIGHT - 1  # a ray for each pixel and between each two
        directions = kernels.view_rays(camera.rotation, camera.focal, *camera.K[:2, 2], *fine, 0.5)
        origin = camera.centre.astype(np.float32)
        hits = self.cast(origin, directions)
        surfaces = kernels.place_surfaces(origin, directions, hits["tfar"], hits["Ng"])
        seen_grid = np.ascontiguousarray(surfaces.reshape(fine[1], fine[0], 6)[::2, ::2])
        around_grid = np.ascontiguousarray(seen_grid[::DEPTH_STEP, ::DEPTH_STEP])
        look = self._look(lighting)
        light = colours.light_surfaces(
            directions.reshape(fine[1], fine[0], 3)[::2, ::2],
            tuple(hits[name].reshape(fine[::-1])[::2, ::2] for name in ("primID", "u", "v")), seen_grid,
            self._visible_shares(seen_grid, lighting), self._light_around(around_grid, lighting), around_grid,
            self._mesh[1::2], look[-1], lighting.rows,
        )  # fmt: skip
        picture = colours.shade(
            fine[0], directions, np.float32(0.6 / camera.focal),
            tuple(hits[name] for name in ("primID", "u", "v", "tfar")), surfaces, light, seen_grid,
            self._mesh[::2] + self._mesh[3:], look, lighting.sky.astype(np.float32),
        )  # fmt: skip
        z = np.where(hits["primID"] < 0, np.inf, hits["tfar"]).reshape(fine[1], fine[0])
        return picture.reshape(fine[1], fine[0], 3), z[:: 2 * DEPTH_STEP, :: 2 * DEPTH_STEP]

    def _visible_shares(self, grid: np.ndarray, lighting: Lighting) -> np.ndarray:
        """(H, W, L) share of each lamp that surfaces (H, W, 6) see."""
        height, width = grid.shape[:2]
        rows = lighting.rows
        if not len(rows):
            return np.zeros((height, width, 1), np.float32)
        origins, directions, which = kernels.rays_to_lamps(
            grid.reshape(-1, 6), width, rows, lighting.first_wide, LAMP_POINTS
        )
        shares = np.zeros(height * width * len(rows), np.float32)
        shares[which] = ~self.are_blocked(origins, directions, 0.995)
        shares = _smoothed(shares.reshape(height, width, len(rows)), grid)
        if lighting.first_wide == len(rows):
            return shares
        return _smoothed(shares, grid, kernels.PHASES, lighting.first_wide)

    def _light_around(self, grid: np.ndarray, lighting: Lighting) -> np.ndarray:
        """(H, W, 3) light that reaches surfaces (H, W, 6) from all around, without that of lamps."""
        height, width = grid.shape[:2]
        origins, directions = kernels.rays_around(grid.reshape(-1, 6), width, HEMISPHERE)
        hits = self.cast(origins, directions)
        light = kernels.gather(
            origins, directions, hits["tfar"], hits["primID"], hits["Ng"], self.albedo, lighting.rows,
            self.ambient(lighting).astype(np.float32), lighting.sky.astype(np.float32), AROUND_RAYS, REACH,
        )  # fmt: skip
        return _smoothed(light.reshape(height, width, 3), grid)


LAMP_POINTS, HEMISPHERE = _points_of_lamps(), _directions_around()


def develop(light: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(HEIGHT, WIDTH, 3) uint8 blue, green, red of a view with a ray between each two pixels.

    Exposure and white balance as a camera chooses them, with errors, then a tone curve, blur and noise.
    """
    grey = light[::4, ::4].mean(-1)
    gain = 0.2 / np.exp(np.log(grey + 1e-4).mean()) * 2 ** rng.normal(0, 0.4)
    gain = min(gain, 1.6 / max(np.percentile(grey, 92), 1e-4))
    average = light[::4, ::4].reshape(-1, 3).mean(0) + 1e-6
    white = (average.mean() / average) ** rng.uniform(0.2, 0.9) * np.exp(rng.normal(0, 0.05, 3))
    exposed = np.minimum(light * (gain * white).astype(np.float32), 6)
    kernel = np.array([0.25, 0.5, 0.25], np.float32)
    exposed = np.ascontiguousarray(cv2.sepFilter2D(exposed, -1, kernel, kernel)[::2, ::2])
    tone = cv2.pow(1 - cv2.exp(-exposed), 1 / rng.uniform(1.9, 2.4))
    if rng.random() < 0.12:
        tone = cv2.filter2D(tone, -1, _shake(rng))
    if rng.random() < 0.5:
        tone = cv2.GaussianBlur(tone, (0, 0), rng.uniform(0.3, 0.8))
    noise = rng.standard_normal(tone.shape, np.float32)
    tone += noise * (rng.uniform(0.001, 0.006) + rng.uniform(0.001, 0.014) * cv2.sqrt(tone))
    return (tone[..., ::-1] * 255).clip(0, 255).astype(np.uint8)


def _shake(rng: np.random.Generator) -> np.ndarray:
    """(9, 9) kernel of a camera that moved by up to 7 pixels."""
    length, turn = rng.uniform(2, 7), rng.uniform(0, math.pi)
    reach = np.array([math.cos(turn), math.sin(turn)]) * length / 2
    kernel = np.zeros((9, 9), np.float32)
    ends = (np.rint(4 + sign * reach).astype(int).tolist() for sign in (-1, 1))
    cv2.line(kernel, *ends, 1.0, lineType=cv2.LINE_AA)
    return kernel / kernel.sum()
