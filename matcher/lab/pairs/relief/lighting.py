"""Lighting: lamps, cast shadows, highlights and the shading of relief."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np

from matcher.lab.pairs.relief.render import ViewCamera, projected_window
from matcher.lab.pairs.relief.surfaces import Surface

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
