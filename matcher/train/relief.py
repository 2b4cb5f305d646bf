"""Surfaces in space: flat or with relief, rectangular or cut out; boxes and rooms made of them.

World axes are those of a camera that looks along z: x to the right, y down; lengths in metres.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import cv2
import numpy as np

from matcher.evaluate.posed import NOTHING, DensePair, PosedView, dense_positions, with_distortion
from matcher.evaluate.protocols import DrawnPhotos, PhotoSet, capture, draw_grey_weights, to_grey

# --- surfaces: Surfaces in space: flat or with relief, rectangular or cut out; boxes and rooms made of
# them.


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


# --- render: Surfaces → pixels and inverse depth, nearest first; relief is traced from its highest layer
# downwards.

NEAR = 0.05  # metres; the near plane
LAYERS, SECANTS = (3, 10), 3  # fewest and most layers
LAYER_TEXELS = 4.0  # between two layers along a ray, as far as the largest number of layers allows
SUBPIXEL_BITS = 4


@dataclass(frozen=True, eq=False)
class ViewCamera:
    """x = K (R X + t); `size` (width, height)."""

    K: np.ndarray
    R: np.ndarray
    t: np.ndarray
    size: tuple[int, int]

    @property
    def cam_from_world(self) -> np.ndarray:
        """(4, 4)."""
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = self.R, self.t
        return pose

    @property
    def centre(self) -> np.ndarray:
        """(3,) position of the camera in the world."""
        return -self.R.T @ self.t


@dataclass(frozen=True, eq=False)
class _Patch:
    """A surface rendered into a window of the image."""

    pixels: np.ndarray
    inverse_depth: np.ndarray
    covered: np.ndarray


def render(surfaces: list[Surface], camera: ViewCamera, backdrop: np.ndarray) -> PosedView:
    """The nearest surface at each pixel; `backdrop` (H, W) uint8, without depth, where there is none."""
    pixels = backdrop.copy()
    inverse_depth = np.full(backdrop.shape, NOTHING, np.float32)
    for surface in surfaces:
        window = projected_window(surface, camera)
        if window is None:
            continue
        rows, columns, outline = window
        draw = _flat if surface.heights is None else _traced
        patch = draw(surface, camera, rows, columns, outline)
        nearest = patch.covered & (patch.inverse_depth > inverse_depth[rows, columns])
        np.copyto(pixels[rows, columns], patch.pixels, where=nearest)
        np.copyto(inverse_depth[rows, columns], patch.inverse_depth, where=nearest)
    return PosedView(pixels, inverse_depth, camera.K, camera.cam_from_world)


def projected_window(surface: Surface, camera: ViewCamera) -> tuple[slice, slice, np.ndarray] | None:
    """Rows and columns of the image that a surface may cover, and its outline (N, 2) px; None if none."""
    corners = surface.corners()
    outlines = [_outline(corners @ camera.R.T + camera.t, camera.K)]
    if surface.heights is not None:
        raised = corners + surface.facing * float(surface.heights.max())
        outlines.append(_outline(raised @ camera.R.T + camera.t, camera.K))
    corners = np.concatenate(outlines)
    if not len(corners):
        return None
    width, height = camera.size
    low = np.floor(corners.min(0)).clip(0, (width, height)).astype(int)
    high = (np.ceil(corners.max(0)) + 1).clip(0, (width, height)).astype(int)
    if (high - low < 2).any():
        return None
    return slice(low[1], high[1]), slice(low[0], high[0]), outlines[0]


def _outline(corners: np.ndarray, K: np.ndarray) -> np.ndarray:
    """(N, 2) pixels of a polygon (M, 3) in camera axes, clipped at the near plane; empty if behind it."""
    kept = []
    for a, b in zip(corners, np.roll(corners, -1, 0), strict=True):
        if a[2] > NEAR:
            kept.append(a)
        if (a[2] > NEAR) != (b[2] > NEAR):
            kept.append(a + (b - a) * (NEAR - a[2]) / (b[2] - a[2]))
    projected = np.array(kept).reshape(-1, 3) @ K.T
    return projected[:, :2] / projected[:, 2:]


def _flat(surface: Surface, camera: ViewCamera, rows: slice, columns: slice, outline: np.ndarray) -> _Patch:
    H = _homography(surface, camera)
    H = np.array([[1, 0, -columns.start], [0, 1, -rows.start], [0, 0, 1.0]]) @ H
    size = (columns.stop - columns.start, rows.stop - rows.start)
    if abs(np.linalg.det(H)) < 1e-18:  # seen from its edge
        empty = np.zeros(size[::-1], np.float32)
        return _Patch(empty.astype(np.uint8), empty, empty > 0)
    a, b, c = np.linalg.inv(H)[2].astype(np.float32)
    inverse_depth = a * np.arange(size[0], dtype=np.float32) + (
        b * np.arange(size[1], dtype=np.float32)[:, None] + c
    )
    texture, scale = _minified(surface.texture, H, size)
    pixels = cv2.warpPerspective(
        texture, H @ _rescaled(scale), size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )
    if surface.solid is not None:
        mask = surface.solid.astype(np.uint8)
        covered = cv2.warpPerspective(mask, H, size, flags=cv2.INTER_NEAREST) > 0
    else:
        mask = np.zeros(size[::-1], np.uint8)
        corners = (outline - (columns.start, rows.start)).clip(-1e4, 1e4) * 2**SUBPIXEL_BITS
        cv2.fillConvexPoly(mask, np.rint(corners).astype(np.int32), 1, shift=SUBPIXEL_BITS)
        covered = mask > 0
    return _Patch(pixels, inverse_depth, covered & (inverse_depth > 0) & (inverse_depth < 1 / NEAR))


def _minified(texture: np.ndarray, H: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The texture, reduced to the resolution at the middle of a window of `size` if that is lower, and its
    scale (2,) relative to the original."""
    u, v, w = np.linalg.inv(H) @ [size[0] / 2, size[1] / 2, 1]
    height, width = texture.shape
    middle = np.clip([u / w, v / w], 0, (width, height)) if abs(w) > 1e-12 else np.array([width, height]) / 2
    depth = H[2] @ [*middle, 1]
    area = abs(np.linalg.det(H)) / max(abs(depth), 1e-6) ** 3  # pixels per texel
    shrink = float(np.clip(1 / np.sqrt(max(area, 1e-9)), 1, 8))
    if shrink < 1.3:
        return texture, np.ones(2)
    smaller = tuple(max(4, round(side / shrink)) for side in (width, height))
    return cv2.resize(texture, smaller, interpolation=cv2.INTER_AREA), np.divide(smaller, (width, height))


def _rescaled(scale: np.ndarray) -> np.ndarray:
    """(3, 3) from texels of a resized texture to those of the original."""
    (a, b), offset = 1 / scale, 0.5 / scale - 0.5
    return np.array([[a, 0, offset[0]], [0, b, offset[1]], [0, 0, 1.0]])


def _traced(surface: Surface, camera: ViewCamera, rows: slice, columns: slice, outline: np.ndarray) -> _Patch:
    """The first crossing of each pixel's ray with a surface with relief."""
    axes = np.column_stack([surface.right, surface.down, surface.facing])
    to_texels = np.linalg.inv(axes)
    cu, cv, ch = (to_texels @ (camera.centre - surface.origin)).astype(np.float32)
    x = np.arange(columns.start, columns.stop, dtype=np.float32)
    y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None]
    du, dv, dh = (
        (row[0] * x + (row[1] * y + row[2])).astype(np.float32)
        for row in to_texels @ camera.R.T @ np.linalg.inv(camera.K)
    )
    top = float(surface.heights.max()) * 1.001 + 1e-6
    if ch <= top:  # the camera is inside or behind the relief
        return _Patch(np.zeros(dh.shape, np.uint8), dh, np.zeros(dh.shape, bool))
    downwards = dh < -1e-6
    slope = 1 / np.where(downwards, dh, -1)
    du, dv = du * slope, dv * slope  # texels per metre of height
    heights = _search(surface, (cu - ch * du, cv - ch * dv), (du, dv), top)
    u, v = cu + (heights - ch) * du, cv + (heights - ch) * dv
    size = surface.shape[::-1]
    inside = downwards & (u >= 0) & (v >= 0) & (u <= size[0] - 1) & (v <= size[1] - 1)
    if surface.solid is not None:
        inside &= cv2.remap(surface.solid.astype(np.uint8), u, v, cv2.INTER_NEAREST) > 0
    texture, scale = _minified(surface.texture, _homography(surface, camera), camera.size)
    (a, b), (c, d) = scale, 0.5 * scale - 0.5
    u, v = np.float32(a) * u + np.float32(c), np.float32(b) * v + np.float32(d)
    pixels = cv2.remap(texture, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    inverse_depth = np.where(inside, dh / (heights - ch), 0)
    return _Patch(pixels, inverse_depth, inside & (inverse_depth < 1 / NEAR))


def _homography(surface: Surface, camera: ViewCamera) -> np.ndarray:
    """(3, 3) texels of the surface's plane → pixels; the third coordinate is the depth."""
    R, t = camera.R, camera.t
    return camera.K @ np.column_stack([R @ surface.right, R @ surface.down, R @ surface.origin + t])


def _search(
    surface: Surface,
    start: tuple[np.ndarray, np.ndarray],
    slope: tuple[np.ndarray, np.ndarray],
    top: float,
) -> np.ndarray:
    """(h, w) float32 height at which each ray u = start + height · slope first meets the relief."""

    u, v = np.empty_like(start[0]), np.empty_like(start[1])

    def above(height: np.ndarray | np.float32) -> np.ndarray:
        for texel, first, step in zip((u, v), start, slope, strict=True):
            np.multiply(step, height, out=texel)
            np.add(texel, first, out=texel)
        relief = cv2.remap(
            surface.heights, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT, borderValue=-1
        )
        return height - relief

    length = float(np.quantile(np.hypot(slope[0][::16, ::16], slope[1][::16, ::16]), 0.8)) * top
    layers = int(np.clip(np.ceil(length / LAYER_TEXELS), *LAYERS))
    # Number of layers before the first one below the relief.
    searching, passed = np.ones(start[0].shape, bool), np.zeros(start[0].shape, np.float32)
    for layer in range(layers - 1, 0, -1):
        searching &= above(np.float32(top * layer / layers)) > 0
        passed += searching
    spacing = np.float32(top / layers)
    upper = top - passed * spacing
    lower = np.maximum(upper - spacing, 0)
    upper_gap, lower_gap = np.maximum(above(upper), 1e-9), above(lower)
    for _ in range(SECANTS):
        middle = lower + (upper - lower) * (-lower_gap / np.maximum(upper_gap - lower_gap, 1e-9))
        gap = above(middle)
        below = gap <= 0
        lower, lower_gap = np.where(below, middle, lower), np.where(below, gap, lower_gap)
        upper, upper_gap = np.where(below, upper, middle), np.where(below, upper_gap, gap)
    # The last point on the upper side lies on the relief to a fraction of a texel.
    return lower + (upper - lower) * (-lower_gap / np.maximum(upper_gap - lower_gap, 1e-9))


# --- lighting: Lighting: lamps, cast shadows, highlights and the shading of relief.

FINE, COARSE = 30, 10  # light samples along each side of a surface: of large surfaces, and of others
LARGE = 1.5  # metres
SHADOW_STEPS = 5


@dataclass(frozen=True, eq=False)
class Lights:
    """Point lamps and ambient light."""

    positions: np.ndarray  # (L, 3)
    powers: np.ndarray  # (L,)
    ambient: float


def draw_lights(low: np.ndarray, high: np.ndarray, rng: np.random.Generator) -> Lights:
    """One to five lamps in the space between corners `low` and `high` (3,)."""
    count = int(rng.integers(1, 6))
    powers = rng.uniform(0.3, 1, count) ** 2
    return Lights(rng.uniform(low, high, (count, 3)), powers, float(rng.choice([0.08, 0.25, 0.6])))


def illuminate(
    surfaces: list[Surface], lights: Lights, camera: ViewCamera, rng: np.random.Generator
) -> list[Surface]:
    """The surfaces in the camera's image, their textures multiplied by the light and the exposure."""
    samples = [_samples(surface) for surface in surfaces]
    points = np.concatenate([grid.reshape(-1, 3) for grid in samples])
    normals = np.concatenate(
        [np.tile(s.facing, (g.shape[0] * g.shape[1], 1)) for s, g in zip(surfaces, samples, strict=True)]
    )
    gloss = np.concatenate([np.full(g[..., 0].size, s.gloss) for s, g in zip(surfaces, samples, strict=True)])
    light, highlight = _illumination(points, normals, gloss, surfaces, lights, camera.centre)
    exposure = rng.uniform(0.5, 1.05) / max(float(np.percentile(light, 80)), 1e-6)
    done, at = [], 0
    for surface, grid in zip(surfaces, samples, strict=True):
        count, shape = grid[..., 0].size, grid.shape[:2]
        at += count
        if projected_window(surface, camera) is None:
            continue
        maps = [values[at - count : at].reshape(shape) * exposure for values in (light, highlight)]
        done.append(_exposed(surface, *maps, lights))
    return done


def _samples(surface: Surface) -> np.ndarray:
    """(n, m, 3) points on the surface, aligned with its texels as `cv2.resize` aligns pixels."""
    sides = [
        np.linalg.norm(side) * n for side, n in zip((surface.down, surface.right), surface.shape, strict=True)
    ]
    n, m = (FINE if side > LARGE else COARSE for side in sides)
    v = ((np.arange(n) + 0.5) / n * surface.shape[0] - 0.5)[:, None, None]
    u = ((np.arange(m) + 0.5) / m * surface.shape[1] - 0.5)[None, :, None]
    return surface.origin + surface.right * u + surface.down * v


def _illumination(
    points: np.ndarray,
    normals: np.ndarray,
    gloss: np.ndarray,
    surfaces: list[Surface],
    lights: Lights,
    viewer: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(P,) diffuse light and highlights at points (P, 3)."""
    total = np.full(len(points), lights.ambient * lights.powers.sum() / 4, np.float32)
    highlight = np.zeros(len(points), np.float32)
    to_viewer = viewer - points
    to_viewer /= np.linalg.norm(to_viewer, axis=1, keepdims=True)
    for position, power in zip(lights.positions, lights.powers, strict=True):
        ray = (position - points).astype(np.float32)
        distance = np.linalg.norm(ray, axis=1)
        towards = ray / distance[:, None]
        cosine = np.abs(np.einsum("pi,pi->p", towards, normals))
        shine = power * ~_in_shadow(points, ray, surfaces) / (0.3 + distance**2)
        total += (shine * cosine).astype(np.float32)
        halfway = towards + to_viewer
        halfway /= np.linalg.norm(halfway, axis=1, keepdims=True) + 1e-9
        highlight += shine * gloss * np.abs(np.einsum("pi,pi->p", halfway, normals)) ** 60
    return total, highlight


def _in_shadow(points: np.ndarray, ray: np.ndarray, surfaces: list[Surface]) -> np.ndarray:
    """(P,) bool: whether a surface that casts shadows intersects the ray (P, 3) of each point."""
    shadowed = np.zeros(len(points), bool)
    for surface in surfaces:
        if not surface.casts_shadows:
            continue
        to_texels = np.linalg.inv(np.column_stack([surface.right, surface.down, surface.facing]))
        start = (points - surface.origin) @ to_texels.T.astype(np.float32)
        step = ray @ to_texels.T.astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = -start[:, 2] / step[:, 2]
            u, v = start[:, 0] + share * step[:, 0], start[:, 1] + share * step[:, 1]
        height, width = surface.shape
        met = (share > 0.01) & (share < 1) & (u > 0) & (u < width - 1) & (v > 0) & (v < height - 1)
        if surface.solid is not None and met.any():
            met[met] = surface.solid[v[met].astype(int), u[met].astype(int)]
        shadowed |= met
    return shadowed


def _exposed(surface: Surface, light: np.ndarray, highlight: np.ndarray, lights: Lights) -> Surface:
    size = surface.shape[::-1]
    gain = cv2.resize(light.astype(np.float32), size, interpolation=cv2.INTER_LINEAR)
    if surface.heights is not None:
        gain *= _relief_shading(surface, lights)
    texture = cv2.multiply(surface.texture, gain, dtype=cv2.CV_8U)
    if surface.gloss > 0:
        shine = cv2.resize(highlight.astype(np.float32) * 255, size, interpolation=cv2.INTER_CUBIC)
        texture = cv2.add(texture, shine.clip(0, 255).astype(np.uint8))
    return replace(surface, texture=texture)


def _relief_shading(surface: Surface, lights: Lights) -> np.ndarray:
    """(h, w) float32: light on the relief relative to that on its base plane."""
    heights = surface.heights
    across, along = np.linalg.norm(surface.right), np.linalg.norm(surface.down)
    slope_u = cv2.Sobel(heights, cv2.CV_32F, 1, 0, scale=1 / (8 * across))
    slope_v = cv2.Sobel(heights, cv2.CV_32F, 0, 1, scale=1 / (8 * along))
    length = np.sqrt(1 + slope_u**2 + slope_v**2)
    middle = surface.corners().mean(0)
    total, flat = np.full(heights.shape, 0.15, np.float32), 0.15
    for position, power in zip(lights.positions, lights.powers, strict=True):
        ray = position - middle
        distance = np.linalg.norm(ray)
        u, v, h = (
            float(ray @ axis) / distance
            for axis in (surface.right / across, surface.down / along, surface.facing)
        )
        h = max(abs(h), 0.15)
        shine = power / (0.3 + distance**2)
        cosine = ((h - u * slope_u - v * slope_v) / length).clip(0, None)
        total += shine * cosine * _self_shadow(heights, u / across, v / along, h)
        flat += shine * h
    return total / flat


def _self_shadow(heights: np.ndarray, u: float, v: float, h: float) -> np.ndarray:
    """(h, w) float32 in [0.3, 1]: less where the relief occludes the light, in direction (u, v) texels per h
    metres of height."""
    small = cv2.resize(heights, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    top = float(heights.max())
    covered = np.zeros(small.shape, np.float32)
    for step in range(1, SHADOW_STEPS + 1):
        rise = top * step / SHADOW_STEPS
        shift = np.array([[1, 0, -0.5 * u * rise / h], [0, 1, -0.5 * v * rise / h]])
        shifted = cv2.warpAffine(small, shift, small.shape[::-1], borderMode=cv2.BORDER_REPLICATE)
        np.maximum(covered, shifted - small - rise, out=covered)
    darker = 1 - 0.7 * (covered / max(0.1 * top, 1e-9)).clip(0, 1)
    return cv2.resize(darker, heights.shape[::-1], interpolation=cv2.INTER_LINEAR)


# --- textures: Textures of surfaces (photos, paint, patterns), heights of relief, and outlines of cut-outs.

SIDE = 384  # texels of textures that are not photos


def photo_texture(photos: PhotoSet | DrawnPhotos, rng: np.random.Generator, longer: int = 512) -> np.ndarray:
    """(h, w) uint8: a window of a photo in grey, with random colour weights, at most `longer` texels long."""
    photo = next(iter(photos.draw(1, rng).values()))
    share = rng.uniform(0.4, 1)
    height, width = (max(32, int(side * share)) for side in photo.shape[:2])
    top, left = (
        int(rng.integers(max(side - cut, 0) + 1))
        for side, cut in zip(photo.shape, (height, width), strict=False)
    )
    window = photo[top : top + height, left : left + width]
    if window.ndim == 3:
        window = to_grey(window, draw_grey_weights(rng, random_share=0.5))
    scale = longer / max(window.shape)
    if scale < 1:
        window = cv2.resize(window, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return np.ascontiguousarray(window.astype(np.uint8))


def plain_texture(rng: np.random.Generator) -> np.ndarray:
    """(h, w) uint8: paint or paper with a faint grain, stains and sometimes a line."""
    level = rng.uniform(60, 235)
    grain = cv2.resize(rng.standard_normal((24, 24), np.float32), (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
    texture = level + grain * rng.uniform(0, 4) + _grain(rng) * rng.uniform(0, 2.5)
    for _ in range(int(rng.integers(0, 3))):
        ends = rng.integers(0, SIDE, (2, 2))
        colour = float(np.clip(level + rng.normal(0, 40), 0, 255))
        cv2.line(texture, ends[0].tolist(), ends[1].tolist(), colour, int(rng.integers(1, 4)))
    return texture.clip(0, 255).astype(np.uint8)


def pattern_texture(rng: np.random.Generator) -> np.ndarray:
    """(h, w) uint8: tiles, boards or squares, the brightness of each cell slightly different."""
    rows, columns = int(rng.integers(2, 14)), int(rng.integers(2, 10))
    shift = rng.random() < 0.5
    texture = np.full((SIDE, SIDE), rng.uniform(20, 235), np.float32)
    level, spread, joint = rng.uniform(60, 200), rng.uniform(0, 30), int(rng.integers(1, 6))
    height, width = SIDE / rows, SIDE / columns
    for row in range(rows):
        offset = width / 2 if shift and row % 2 else 0.0
        for column in range(-1, columns):
            top, left = int(row * height) + joint, int(column * width + offset) + joint
            bottom, right = int((row + 1) * height), int((column + 1) * width + offset)
            texture[top:bottom, max(left, 0) : max(right, 0)] = level + spread * rng.standard_normal()
    return (texture + _grain(rng) * rng.uniform(0, 12)).clip(0, 255).astype(np.uint8)


def draw_texture(photos: PhotoSet | DrawnPhotos, plain_share: float, rng: np.random.Generator) -> np.ndarray:
    """(h, w) uint8: plain in `plain_share` of the cases, else mostly photos."""
    kind = rng.random()
    if kind < plain_share:
        return plain_texture(rng)
    return pattern_texture(rng) if kind > 0.9 else photo_texture(photos, rng)


def _grain(rng: np.random.Generator) -> np.ndarray:
    """(SIDE, SIDE) float32 fine noise with a standard deviation of about 1."""
    pieces = _grains()
    piece = pieces[int(rng.integers(len(pieces)))]
    top, left = (int(rng.integers(side - SIDE + 1)) for side in piece.shape)
    return piece[top : top + SIDE, left : left + SIDE]


@cache
def _grains() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    fine = rng.standard_normal((5, 3 * SIDE, 3 * SIDE), np.float32)
    blurred = [cv2.GaussianBlur(p, (0, 0), s) for p, s in zip(fine, (0.4, 0.7, 1, 1.5, 2), strict=True)]
    return tuple(piece / piece.std() for piece in blurred)


def fractal(
    shape: tuple[int, int], rng: np.random.Generator, coarse: int = 3, octaves: int = 5
) -> np.ndarray:
    """(h, w) float32 in about [−1, 1]: sums of smooth noise, each octave finer and weaker."""
    total, weight, gain = np.zeros(shape, np.float32), 1.0, rng.uniform(0.3, 0.6)
    for octave in range(octaves):
        knots = coarse * 2**octave
        noise = rng.uniform(-1, 1, (knots + 1, knots + 1)).astype(np.float32)
        total += weight * cv2.resize(noise, shape[::-1], interpolation=cv2.INTER_CUBIC)
        weight *= gain
    return total


def draw_heights(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """(h, w) float32 in [0, 1]: noise, waves, bricks, steps or pebbles; smooth enough to be traced."""
    kind = rng.choice(["noise", "waves", "bricks", "steps", "pebbles"])
    rows, columns = np.mgrid[0 : 1 : shape[0] * 1j, 0 : 1 : shape[1] * 1j].astype(np.float32)
    if kind == "noise":
        heights = fractal(shape, rng, int(rng.integers(2, 6)))
    elif kind == "waves":
        turn, count = rng.uniform(0, np.pi), rng.uniform(2, 12)
        heights = np.sin(
            2 * np.pi * count * (rows * np.sin(turn) + columns * np.cos(turn)) + fractal(shape, rng)
        )
    elif kind == "bricks":
        across, along = rng.uniform(3, 12), rng.uniform(2, 8)
        line = np.floor(rows * across)
        fraction = np.stack([rows * across % 1, (columns * along + 0.5 * (line % 2)) % 1])
        heights = (np.minimum(fraction, 1 - fraction).min(0) * rng.uniform(4, 12)).clip(0, 1)
        heights += 0.15 * fractal(shape, rng, 6)
    elif kind == "steps":
        heights = np.tanh(6 * np.sin(3 * fractal(shape, rng, int(rng.integers(1, 4)), 3)))
    else:
        cells = rng.random((int(rng.integers(5, 16)),) * 2).astype(np.float32)
        heights = cv2.resize(cells, shape[::-1], interpolation=cv2.INTER_CUBIC) + 0.1 * fractal(shape, rng, 8)
    heights = cv2.GaussianBlur(heights, (0, 0), 1.2)
    low, high = float(heights.min()), float(heights.max())
    return (heights - low) / max(high - low, 1e-6)


def draw_outline(rng: np.random.Generator) -> np.ndarray:
    """(h, w) bool, the solid part of a cut-out: a blob, a fence, branches, a frame or a lattice."""
    side = 256
    mask = np.zeros((side, side), np.uint8)
    kind = rng.choice(["blob", "fence", "branches", "frame", "lattice"])
    if kind == "blob":
        angles = np.linspace(0, 2 * np.pi, int(rng.integers(5, 40)), endpoint=False)
        radii = side / 2 * rng.uniform(0.4, 0.98, len(angles))
        corners = side / 2 + np.stack([np.cos(angles), np.sin(angles)], -1) * radii[:, None]
        cv2.fillPoly(mask, [corners.astype(np.int32)], 1)
    elif kind == "branches":
        for _ in range(int(rng.integers(4, 14))):
            path = rng.integers(0, side, 2) + np.cumsum(rng.normal(0, 22, (12, 2)), 0)
            cv2.polylines(mask, [path.astype(np.int32)], False, 1, int(rng.integers(2, 9)))
    elif kind == "frame":
        cv2.rectangle(mask, (0, 0), (side - 1, side - 1), 1, int(rng.integers(16, 80)))
    else:
        for axis in (0, 1) if kind == "lattice" else (int(rng.integers(2)),):
            count, width = int(rng.integers(3, 11)), int(rng.integers(2, 10))
            for at in np.linspace(width, side - width, count):
                at = int(at + rng.normal(0, 2))
                mask[(slice(at - width // 2, at + width // 2 + 1), slice(None))[:: 1 - 2 * axis]] = 1
    return mask.astype(bool)


# --- scenes: Random scenes: rooms with boxes, tables seen from above, walls with relief behind cut-outs.

WALL_TEXELS = 700
CLEARANCE = 0.3  # metres between a camera and the walls


@dataclass(frozen=True, eq=False)
class Scene:
    """Surfaces, the space for cameras and lamps, and points for cameras to look at."""

    surfaces: list[Surface]
    low: np.ndarray  # (3,) corners of the space for cameras
    high: np.ndarray
    targets: np.ndarray  # (T, 3)
    lamps: tuple[np.ndarray, np.ndarray]  # corners of the space for lamps


def draw_scene(photos: PhotoSet | DrawnPhotos, rng: np.random.Generator) -> Scene:
    """A room, a table or a wall."""
    kind = rng.random()
    if kind < 0.4:
        return _room(photos, rng)
    return _table(photos, rng) if kind < 0.75 else _wall(photos, rng)


def _room(photos: PhotoSet | DrawnPhotos, rng: np.random.Generator) -> Scene:
    """A room of six walls, mostly plain, with posters, boxes on the floor and floating cut-outs."""
    half = np.array([rng.uniform(1.2, 4), rng.uniform(1.1, 1.6), rng.uniform(1.5, 5)])
    plain = rng.uniform(0.3, 0.9)
    paint = plain_texture(rng)  # walls of one room often have the same paint
    textures = [_wall_texture(photos, plain, paint, rng) for _ in range(6)]
    walls = room(textures, -half, half)
    chosen = int(rng.integers(5))
    if rng.random() < 0.3:
        walls[chosen] = _roughened(walls[chosen], rng.uniform(0.02, 0.08), rng)
    surfaces = [*walls]
    for number in range(int(rng.integers(2, 8))):
        surfaces.append(_poster(walls[number % 4], photos, rng))
    for _ in range(int(rng.integers(1, 5))):
        surfaces += _standing_box(photos, half, rng)
    for _ in range(int(rng.integers(0, 3))):
        centre = rng.uniform(-half * 0.7, half * 0.7)
        surfaces.append(_cut_out(photos, centre, rng.uniform(0.3, 1.2), rng))
    targets = np.stack([s.corners().mean(0) for s in surfaces[6:]])
    low, high = -half + CLEARANCE, half - CLEARANCE
    low[1], high[1] = -0.6, 0.5
    return Scene(surfaces, low, high, targets, (-half * [0.9, 0.95, 0.9], half * [0.9, -0.1, 0.9]))


def _wall_texture(
    photos: PhotoSet | DrawnPhotos, plain: float, paint: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(h, w) uint8 for a wall or floor: paint, a pattern, or a photo repeated like wallpaper."""
    kind = rng.random()
    if kind < plain:
        return paint if rng.random() < 0.6 else plain_texture(rng)
    if kind > 1 - (1 - plain) / 3:
        return pattern_texture(rng)
    tile = photo_texture(photos, rng, WALL_TEXELS // 2)
    mirrored = np.hstack([tile, tile[:, ::-1]])
    wallpaper = cv2.resize(np.vstack([mirrored, mirrored[::-1]]), (WALL_TEXELS, WALL_TEXELS))
    grain = np.empty((WALL_TEXELS // 2,) * 2, np.float32)
    cv2.randn(grain, 0, int(rng.integers(1, 12)))
    return cv2.add(wallpaper, cv2.resize(grain, wallpaper.shape[::-1]), dtype=cv2.CV_8U)


def _poster(wall: Surface, photos: PhotoSet | DrawnPhotos, rng: np.random.Generator) -> Surface:
    """A poster a few centimetres in front of a wall."""
    texture = draw_texture(photos, 0.15, rng)
    corners = wall.corners()
    sides = np.linalg.norm(corners[1] - corners[0]), np.linalg.norm(corners[3] - corners[0])
    longer = rng.uniform(0.2, 0.6) * min(sides)
    share = rng.uniform(0.15, 0.85, 2)
    centre = corners[0] + share[0] * (corners[1] - corners[0]) + share[1] * (corners[3] - corners[0])
    relief = 0.0 if wall.heights is None else float(wall.heights.max())
    turn = np.column_stack(
        [
            (corners[1] - corners[0]) / sides[0],
            (corners[3] - corners[0]) / sides[1],
            -wall.facing,
        ]
    )
    centre = centre + wall.facing * (relief + rng.uniform(0.01, 0.06))
    return upright(texture, centre, longer, turn, casts_shadows=False, gloss=_gloss(rng))


def _gloss(rng: np.random.Generator) -> float:
    return float(rng.uniform(0.2, 1.5)) if rng.random() < 0.2 else 0.0


def _roughened(surface: Surface, share: float, rng: np.random.Generator) -> Surface:
    """The surface with relief of `share` of its shorter side."""
    corners = surface.corners()
    shorter = min(np.linalg.norm(corners[1] - corners[0]), np.linalg.norm(corners[3] - corners[0]))
    return with_relief(surface, draw_heights(surface.shape, rng), share * shorter)


def _standing_box(
    photos: PhotoSet | DrawnPhotos, half: np.ndarray, rng: np.random.Generator
) -> list[Surface]:
    """A box on the floor of a room of half sides `half`."""
    sides = np.array([rng.uniform(0.2, 1.2), rng.uniform(0.2, 1.4), rng.uniform(0.2, 1.2)])
    reach = np.maximum(half - 0.6 * np.hypot(sides[0], sides[2]), 0.1)
    centre = np.array([rng.uniform(-1, 1) * reach[0], half[1] - sides[1] / 2, rng.uniform(-1, 1) * reach[2]])
    plain = 0.8 if rng.random() < 0.4 else 0.2
    faces = [draw_texture(photos, plain, rng) for _ in range(5)]
    gloss = _gloss(rng)
    return [replace(face, gloss=gloss) for face in box(faces, centre, sides, rng.uniform(0, 2 * np.pi))]


def _cut_out(
    photos: PhotoSet | DrawnPhotos, centre: np.ndarray, longer: float, rng: np.random.Generator
) -> Surface:
    """A flat surface with an irregular outline: a leaf, a fence, branches."""
    outline = draw_outline(rng)
    texture = cv2.resize(draw_texture(photos, 0.5, rng), outline.shape[::-1], interpolation=cv2.INTER_AREA)
    turn = random_rotation(70, rng)
    return upright(texture, centre, longer, turn, solid=outline, casts_shadows=rng.random() < 0.5)


def _table(photos: PhotoSet | DrawnPhotos, rng: np.random.Generator) -> Scene:
    """Boxes and cut-outs on a table or floor that fills the view, seen from above."""
    half = np.array([1.5, 0.0, 1.5])
    texture = _wall_texture(photos, 0.35, plain_texture(rng), rng)
    ground = rectangle(
        texture, np.zeros(3), np.array([9.0, 0, 0]), np.array([0, 0, -9.0]), casts_shadows=False
    )
    if rng.random() < 0.5:
        ground = _roughened(ground, rng.uniform(0.01, 0.05), rng)
    surfaces = [ground]
    for _ in range(int(rng.integers(2, 7))):
        surfaces += _standing_box(photos, half, rng)
    for _ in range(int(rng.integers(0, 3))):
        centre = np.array([rng.uniform(-1, 1), rng.uniform(-0.9, -0.1), rng.uniform(-1, 1)])
        surfaces.append(_cut_out(photos, centre, rng.uniform(0.2, 0.8), rng))
    targets = np.array([[0, -0.2, 0], [0.5, -0.2, 0.4], [-0.5, -0.2, 0.3], [0.1, -0.1, -0.5]])
    low, high = np.array([-2.5, -2.5, -2.5]), np.array([2.5, -0.7, 2.5])
    return Scene(surfaces, low, high, targets, (np.array([-3, -4, -3.0]), np.array([3, -1.2, 3])))


def _wall(photos: PhotoSet | DrawnPhotos, rng: np.random.Generator) -> Scene:
    """A wall with relief and, in front of it, tilted panels and cut-outs."""
    photo = photo_texture(photos, rng, WALL_TEXELS) if rng.random() < 0.75 else draw_texture(photos, 0.5, rng)
    wall = upright(
        photo, np.array([0, 0, 3.0]), rng.uniform(4.5, 8), random_rotation(25, rng), casts_shadows=False
    )
    if rng.random() < 0.8:
        wall = _roughened(wall, rng.uniform(0.03, 0.2), rng)
    surfaces = [replace(wall, gloss=_gloss(rng))]
    for _ in range(int(rng.integers(0, 4))):
        centre = np.append(rng.uniform(-1.2, 1.2, 2), rng.uniform(1.2, 2.3))
        surface = upright(
            draw_texture(photos, 0.2, rng), centre, rng.uniform(0.3, 1.2), random_rotation(60, rng)
        )
        if rng.random() < 0.3:
            surface = _roughened(surface, rng.uniform(0.03, 0.2), rng)
        surfaces.append(surface)
    for _ in range(int(rng.integers(0, 4))):
        centre = np.append(rng.uniform(-1, 1, 2), rng.uniform(0.9, 2.4))
        surfaces.append(_cut_out(photos, centre, rng.uniform(0.3, 1.4), rng))
    targets = np.column_stack([rng.uniform(-0.7, 0.7, (4, 2)), rng.uniform(2, 3, 4)])
    low, high = np.array([-1.8, -1.5, -2.2]), np.array([1.8, 1.5, 0.6])
    return Scene(surfaces, low, high, targets, (np.array([-3, -3, -2.0]), np.array([3, 3, 1.2])))


# --- source: Pairs of images of scenes with relief.

ATTEMPTS = 8  # for the second camera, before the scene is given up
SAME_LIGHT_SHARE = 0.5
LENS_SHARE, PHOTO_BACKDROP_SHARE = 0.3, 0.4
ANYWHERE_SHARE = 0.1  # of the pairs, whose second camera may be on the opposite side of what it looks at
MIN_OVERLAP, MAX_OVERLAP = 0.12, 0.9  # smaller share of covisible pixels of the two images


class Relief:
    """A source of pairs: scenes made of photos and plain surfaces, two cameras in each.

    Args:
        photos: textures, grey or in colour.
    """

    def __init__(self, photos: PhotoSet) -> None:
        self.photos = photos

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """Two views of a new scene; see `dense.PairSource`.

        Raises:
            UsageError: not one photo can be read.
        """
        anywhere = rng.random() < ANYWHERE_SHARE
        while True:
            photos = DrawnPhotos(self.photos)
            scene = draw_scene(photos, rng)
            cameras = _cameras(scene, size, anywhere, rng)
            if cameras is None:
                continue
            views = _rendered(scene, cameras, photos, rng)
            if rng.random() < LENS_SHARE:
                views = tuple(with_distortion(view, rng) for view in views)
            pair = DensePair(
                *(capture(view.pixels, rng) for view in views),
                dense_positions(*views),
                dense_positions(*views[::-1]),
                source="relief",
                scenes=frozenset(photos.names),
            )
            if pair.visible_share > MIN_OVERLAP / 2:
                return pair


def _rendered(
    scene: Scene, cameras: tuple[ViewCamera, ViewCamera], photos: DrawnPhotos, rng: np.random.Generator
) -> tuple[PosedView, ...]:
    lights = draw_lights(*scene.lamps, rng)
    views = []
    for camera in cameras:
        backdrop = np.full(camera.size[::-1], int(rng.integers(256)), np.uint8)
        if rng.random() < PHOTO_BACKDROP_SHARE:
            backdrop = cv2.resize(photo_texture(photos, rng), camera.size, interpolation=cv2.INTER_AREA)
        views.append(render(illuminate(scene.surfaces, lights, camera, rng), camera, backdrop))
        lights = lights if rng.random() < SAME_LIGHT_SHARE else draw_lights(*scene.lamps, rng)
    return tuple(views)


def _cameras(
    scene: Scene, size: tuple[int, int], anywhere: bool, rng: np.random.Generator
) -> tuple[ViewCamera, ViewCamera] | None:
    """Two cameras whose views overlap, by a coarse rendering of the scene; None where none are found."""
    first = _first_camera(scene, size, rng)
    view0 = _coarse_view(scene, first)
    covered = view0.inverse_depth > 0
    if covered.mean() < 0.6 or np.median(view0.inverse_depth[covered]) > 2.5:
        return None
    for _ in range(ATTEMPTS):
        depth = 1 / float(np.median(view0.inverse_depth[covered]))
        second = _second_camera(scene, first, depth, anywhere, rng)
        view1 = _coarse_view(scene, second)
        shares = [
            float((dense_positions(*views)[0] >= 0).mean()) for views in ((view0, view1), (view1, view0))
        ]
        if MIN_OVERLAP < min(shares) < MAX_OVERLAP:
            return first, second
    return None


def _coarse_view(scene: Scene, camera: ViewCamera) -> PosedView:
    """The scene in a twelfth of the resolution, without relief: only its depth is used."""
    scale = 12
    size = tuple(max(8, round(side / scale)) for side in camera.size)
    K = np.diag([1 / scale, 1 / scale, 1]) @ camera.K
    bare = [replace(s, heights=None, texture=s.texture) for s in scene.surfaces]
    return render(bare, replace(camera, K=K, size=size), np.zeros(size[::-1], np.uint8))


def _first_camera(scene: Scene, size: tuple[int, int], rng: np.random.Generator) -> ViewCamera:
    """A camera in the scene's space that looks roughly at one of its targets, held roughly upright."""
    width, height = size
    focal = rng.uniform(0.7, 1.3) * max(size)
    K = np.array([[focal, 0, (width - 1) / 2], [0, focal, (height - 1) / 2], [0, 0, 1.0]])
    centre = rng.uniform(scene.low, scene.high)
    target = scene.targets[rng.integers(len(scene.targets))] + rng.normal(0, 0.2, 3)
    R = _look_at(centre, target, rng.normal(0, 6))
    return ViewCamera(K, R, -R @ centre, size)


def _look_at(centre: np.ndarray, target: np.ndarray, roll: float) -> np.ndarray:
    """(3, 3) camera from world of a camera at `centre` that looks at `target`, rolled by degrees."""
    forward = (target - centre) / np.linalg.norm(target - centre)
    right = np.cross([0, 1.0, 0], forward)
    right /= max(np.linalg.norm(right), 1e-6)
    R = np.stack([right, np.cross(forward, right), forward])
    return cv2.Rodrigues(np.array([0, 0, np.deg2rad(roll)]))[0] @ R


def _second_camera(
    scene: Scene, first: ViewCamera, depth: float, anywhere: bool, rng: np.random.Generator
) -> ViewCamera:
    """A camera near the first, or anywhere, that looks roughly at the point `depth` metres ahead of it."""
    width, height = first.size
    zoom = float(np.exp(rng.normal(0, 0.35)).clip(0.4, 2.5))
    K = np.diag([zoom, zoom, 1]) @ first.K
    K[0, 2], K[1, 2] = (width - 1) / 2, (height - 1) / 2
    step = rng.normal(0, 1, 3) * [1, 0.5, 1]
    step *= rng.uniform(0.05, 0.8) * depth / max(np.linalg.norm(step), 1e-6)
    centre = (first.centre + step).clip(scene.low, scene.high)
    if anywhere:
        centre = rng.uniform(scene.low, scene.high)
    target = first.centre + first.R[2] * depth + rng.normal(0, 0.15 * depth, 3)
    any_roll = rng.random() < 0.12
    R = _look_at(centre, target, rng.uniform(-180, 180) if any_roll else rng.normal(0, 8))
    return ViewCamera(K, R, -R @ centre, first.size)
