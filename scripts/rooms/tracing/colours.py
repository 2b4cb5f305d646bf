"""Compiled loops over pixels: the light on surfaces, and their colours.

Lamps and surfaces are rows as in `kernels`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tracing.kernels import NEAR_LAMP
from tracing.sampling import look_up


@njit(cache=True, fastmath=True)
def _spread_from(values, surfaces, y, x, stride, surface, out):
    """Interpolate a coarser grid `values` (H, W, C) at pixel (y, x) of a finer one, written to `out`.

    Only samples in the same plane as `surface` (6,) count, or all where there is none of these.
    """
    height, width, channels = values.shape
    y0, x0 = y // stride, x // stride
    if y % stride == 0 and x % stride == 0:
        for c in range(channels):
            out[c] = values[y0, x0, c]
        return
    dy, dx = np.float32(y % stride) / stride, np.float32(x % stride) / stride
    for attempt in range(2):
        total = np.float32(0.0)
        for c in range(channels):
            out[c] = 0.0
        for corner in range(4):
            weight = (dy if corner // 2 else 1 - dy) * (dx if corner % 2 else 1 - dx)
            if weight == 0:
                continue
            v, u = min(y0 + corner // 2, height - 1), min(x0 + corner % 2, width - 1)
            if attempt == 0:
                turn = away = np.float32(0.0)
                for k in range(3):
                    turn += surface[3 + k] * surfaces[v, u, 3 + k]
                    away += surface[3 + k] * (surfaces[v, u, k] - surface[k])
                if turn < 0.8 or abs(away) > 0.015:
                    continue
            total += weight
            for c in range(channels):
                out[c] += weight * values[v, u, c]
        if total > 0:
            for c in range(channels):
                out[c] /= total
            return


@njit(cache=True, fastmath=True)
def light_surfaces(directions, hits, surfaces, shares, around, around_grid, mesh, slots_finish, lamps):
    """Light on surfaces (H, W, 6): (H, W, 6), of which three for what is matt, three for the highlight.

    `hits` are triangle and barycentric coordinates (H, W), `shares` (H, W, L) the visible shares of lamps,
    `around` (h, w, 3) the light from around on a grid twice as coarse with its surfaces, `mesh` the normals
    (T, 3, 3) and materials (T,) of triangles, `slots_finish` (M, 4) as in `shade`.
    """
    height, width = surfaces.shape[:2]
    triangles, bus, bvs = hits
    normals, slots = mesh
    found = np.zeros((height, width, 6), np.float32)
    normal, ray = np.empty(3, np.float32), np.empty(3, np.float32)
    toward = np.empty(3, np.float32)
    for y in range(height):
        for x in range(width):
            triangle = triangles[y, x]
            if triangle < 0:
                continue
            surface = surfaces[y, x]
            _spread_from(around, around_grid, y, x, 2, surface, found[y, x])
            bu, bv = bus[y, x], bvs[y, x]
            size = dot = length = np.float32(0.0)
            for k in range(3):
                normal[k] = (
                    (1 - bu - bv) * normals[triangle, 0, k]
                    + bu * normals[triangle, 1, k]
                    + bv * normals[triangle, 2, k]
                )
                size += normal[k] * normal[k]
                dot += normal[k] * surface[3 + k]
                length += directions[y, x, k] * directions[y, x, k]
            size, length = math.sqrt(max(size, 1e-12)), math.sqrt(length)
            is_sound = abs(dot) > 0.1 * size  # stored normals of some worlds lie across their triangle
            for k in range(3):
                normal[k] = (
                    (normal[k] / size if dot > 0 else -normal[k] / size) if is_sound else surface[3 + k]
                )
                ray[k] = directions[y, x, k] / length
            _add_lamps(
                found[y, x], surface, normal, ray, slots_finish[slots[triangle]], lamps, shares[y, x], toward
            )
    return found


@njit(cache=True, fastmath=True)
def _add_lamps(found, point, normal, ray, finish, lamps, shares, toward):
    """Add the light that lamps throw directly: matt (3,), and a highlight (3,) by Blinn's half vector."""
    for j in range(len(lamps)):
        if shares[j] < 1e-3:
            continue
        square = facing = leaving = np.float32(0.0)
        for k in range(3):
            toward[k] = lamps[j, k] - point[k]
            square += toward[k] * toward[k]
            facing += toward[k] * normal[k]
            leaving -= toward[k] * lamps[j, 12 + k]
        distance = math.sqrt(square) + 1e-6
        strength = shares[j] / max(square, NEAR_LAMP) * facing / distance
        if lamps[j, 12] != 0 or lamps[j, 13] != 0 or lamps[j, 14] != 0:
            strength *= max(leaving, 0.0) / distance
        if strength <= 0:
            continue
        highlight = np.float32(0.0)
        if finish[0] > 0:
            size = half = np.float32(0.0)
            for k in range(3):
                middle = toward[k] / distance - ray[k]
                size += middle * middle
                half += middle * normal[k]
            half = max(half, np.float32(0.0)) / math.sqrt(max(size, 1e-9))
            highlight = finish[0] * (finish[1] + 8) / 25.0 * half ** finish[1]
        for k in range(3):
            found[k] += lamps[j, 9 + k] * strength
            found[3 + k] += lamps[j, 9 + k] * strength * highlight


@njit(cache=True, fastmath=True)
def shade(width, directions, pixel, hits, surfaces, light, light_grid, mesh, look, sky):
    """(N, 3) linear colours of the rays of a view.

    Args:
        width: of the finest grid, on which the rays (N, 3) `directions` lie.
        pixel: width of a ray at distance 1.
        hits: triangle, barycentric coordinates and distance, (N,) each.
        surfaces: (N, 6) of the finest grid.
        light: (H, W, 6) of `light_surfaces`, on a grid half as fine.
        light_grid: its surfaces (H, W, 6).
        mesh: corners (T, 3, 3), texture coordinates (T, 3, 2), materials (T,).
        look: pool, decoding table, levels, counts, and the materials' textures (M,), tints (M, 3), and
            (M, 4) gloss, shininess, emission and whether repetitions are mirrored.
        sky: (3,) where no surface is.
    """
    triangles, bus, bvs, distances = hits
    corners, uvs, slots = mesh
    pool, to_linear, levels, counts, textures, tints, finishes = look
    found = np.empty((len(directions), 3), np.float32)
    ray, albedo, here = np.empty(3, np.float32), np.empty(3, np.float32), np.empty(6, np.float32)
    for i in range(len(directions)):
        triangle = triangles[i]
        if triangle < 0:
            for k in range(3):
                found[i, k] = sky[k]
            continue
        slot = slots[triangle]
        texture = textures[slot]
        length = math.sqrt(directions[i, 0] ** 2 + directions[i, 1] ** 2 + directions[i, 2] ** 2)
        for k in range(3):
            ray[k] = directions[i, k] / length
            albedo[k] = 1.0
        if counts[texture] > 1:
            look_up(
                pool, to_linear, levels[texture], counts[texture], corners[triangle], uvs[triangle],
                surfaces[i, 3:], ray, bus[i], bvs[i], pixel * distances[i], finishes[slot, 3] > 0, albedo,
            )  # fmt: skip
        if finishes[slot, 2] > 0:
            for k in range(3):
                found[i, k] = albedo[k] * tints[slot, k] * finishes[slot, 2]
            continue
        _spread_from(light, light_grid, i // width, i % width, 2, surfaces[i], here)
        for k in range(3):
            found[i, k] = albedo[k] * tints[slot, k] * here[k] + here[3 + k]
    return found
