"""Compiled loops over pixels: rays of views, towards lamps and around points, and smoothing.

Lamps are rows of 15: middle, two half-axes of their area, colour, and the direction in which they shine
(zeros: in all directions), each of three numbers. Surfaces on a grid are rows of 6: a point and the unit
normal on the viewer's side (zeros where nothing was hit).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

PHASES = 4  # pixels of 4 × 4 sample different points of lamps, and so do blocks of 4 × 4 such blocks
NEAR_LAMP = 0.15  # metres: no point is lit as if it were closer, where the inverse square explodes


@njit(cache=True, fastmath=True)
def view_rays(rotation, focal, middle_x, middle_y, width, height, step):
    """Directions (width * height, 3) of depth 1 of pixels (step * x, step * y); `rotation` from the world."""
    rays = np.empty((height * width, 3), np.float32)
    for y in range(height):
        for x in range(width):
            a, b = (step * x - middle_x) / focal, (step * y - middle_y) / focal
            for k in range(3):
                rays[y * width + x, k] = a * rotation[0, k] + b * rotation[1, k] + rotation[2, k]
    return rays


@njit(cache=True, fastmath=True)
def place_surfaces(origin, directions, distances, facing):
    """(N, 6) points and unit normals towards the viewer of hits; `facing` (N, 3) are any normals."""
    found = np.zeros((len(directions), 6), np.float32)
    for i in range(len(directions)):
        if distances[i] > 1e8:
            continue
        dot = size = np.float32(0.0)
        for k in range(3):
            found[i, k] = origin[k] + directions[i, k] * distances[i]
            dot += directions[i, k] * facing[i, k]
            size += facing[i, k] * facing[i, k]
        scale = (-1.0 if dot > 0 else 1.0) / math.sqrt(max(size, 1e-30))
        for k in range(3):
            found[i, 3 + k] = facing[i, k] * scale
    return found


@njit(cache=True, fastmath=True)
def rays_to_lamps(surfaces, width, lamps, wide, offsets):
    """Rays from surfaces (N, 6) on a grid to points of lamps (L, 15) that they face.

    Returns origins and directions (M, 3), whose length reaches the lamp, and for each the index n * L + l.
    `offsets` (16, 16, 2) are points of a lamp's area for each block and pixel, in units of its half-axes;
    lamps before number `wide` use those of the first block everywhere.
    """
    count = len(surfaces) * len(lamps)
    origins, directions = np.empty((count, 3), np.float32), np.empty((count, 3), np.float32)
    which, used = np.empty(count, np.int64), 0
    for i in range(len(surfaces)):
        if surfaces[i, 3] == 0 and surfaces[i, 4] == 0 and surfaces[i, 5] == 0:
            continue
        y, x = i // width, i % width
        phase = PHASES * (y % PHASES) + x % PHASES
        block = PHASES * (y // PHASES % PHASES) + x // PHASES % PHASES
        for j in range(len(lamps)):
            a, b = offsets[block if j >= wide else 0, (phase + 5 * j) % 16]
            facing = leaving = np.float32(0.0)
            for k in range(3):
                start = surfaces[i, k] + 2e-3 * surfaces[i, 3 + k]
                toward = lamps[j, k] + a * lamps[j, 3 + k] + b * lamps[j, 6 + k] - start
                origins[used, k], directions[used, k] = start, toward
                facing += toward * surfaces[i, 3 + k]
                leaving += toward * lamps[j, 12 + k]
            if facing > 0 and leaving <= 0:
                which[used] = i * len(lamps) + j
                used += 1
    return origins[:used], directions[:used], which[:used]


@njit(cache=True, fastmath=True)
def rays_around(surfaces, width, hemisphere):
    """Rays into the half-space above surfaces (N, 6): origins and directions (N * R, 3).

    `hemisphere` (16, R, 3) are directions about +z for each phase of the 4 × 4 pattern.
    """
    rays = hemisphere.shape[1]
    origins = np.empty((len(surfaces) * rays, 3), np.float32)
    directions = np.empty((len(surfaces) * rays, 3), np.float32)
    for i in range(len(surfaces)):
        nx, ny, nz = surfaces[i, 3], surfaces[i, 4], surfaces[i, 5]
        phase = PHASES * (i // width % PHASES) + i % width % PHASES
        sign = np.float32(1.0) if nz >= 0 else np.float32(-1.0)  # basis after Duff et al. 2017
        a = -1.0 / (sign + nz)
        b = nx * ny * a
        for r in range(rays):
            x, y, z = hemisphere[phase, r]
            row = i * rays + r
            directions[row, 0] = x * (1.0 + sign * nx * nx * a) + y * b + z * nx
            directions[row, 1] = x * sign * b + y * (sign + ny * ny * a) + z * ny
            directions[row, 2] = -x * sign * nx - y * ny + z * nz
            for k in range(3):
                origins[row, k] = surfaces[i, k] + 2e-3 * surfaces[i, 3 + k]
    return origins, directions


@njit(cache=True, fastmath=True)
def _lit(point, normal, lamps, out):
    """Add to `out` (3,) the light of all lamps at a point, as if nothing stood between."""
    for j in range(len(lamps)):
        square = facing = leaving = np.float32(0.0)
        for k in range(3):
            toward = lamps[j, k] - point[k]
            square += toward * toward
            facing += toward * normal[k]
            leaving -= toward * lamps[j, 12 + k]
        if facing <= 0 or leaving < 0:
            continue
        distance = math.sqrt(square) + 1e-6
        share = facing / distance / max(square, NEAR_LAMP)
        if lamps[j, 12] != 0 or lamps[j, 13] != 0 or lamps[j, 14] != 0:
            share *= leaving / distance
        for k in range(3):
            out[k] += share * lamps[j, 9 + k]


@njit(cache=True, fastmath=True)
def gather(origins, directions, distances, triangles, facing, albedo, lamps, ambient, sky, rays, reach):
    """(N, 3) light that arrives from around each point: what its rays hit reflects the lamps' light.

    `albedo` (T, 3) is the triangles' mean colour (0 where they shine themselves); a hit nearer than `reach`
    metres counts less, as it lies in shade more often than not.
    """
    found = np.zeros((len(origins) // rays, 3), np.float32)
    point, normal, light = np.empty(3, np.float32), np.empty(3, np.float32), np.empty(3, np.float32)
    for row in range(len(origins)):
        i, triangle = row // rays, triangles[row]
        if triangle < 0:
            for k in range(3):
                found[i, k] += sky[k] / rays
            continue
        dot = size = np.float32(0.0)
        for k in range(3):
            dot += directions[row, k] * facing[row, k]
            size += facing[row, k] * facing[row, k]
        scale = (-1.0 if dot > 0 else 1.0) / math.sqrt(max(size, 1e-30))
        for k in range(3):
            point[k] = origins[row, k] + directions[row, k] * distances[row]
            normal[k] = facing[row, k] * scale
            light[k] = ambient[k]
        _lit(point, normal, lamps, light)
        open_share = 0.3 + 0.7 * min(1.0, distances[row] / reach)
        for k in range(3):
            found[i, k] += albedo[triangle, k] * light[k] * open_share / rays
    return found


@njit(cache=True, fastmath=True)
def _same_plane(surfaces, y, x, v, u):
    """Whether two pixels of surfaces (H, W, 6) lie in about the same plane."""
    turn = away = np.float32(0.0)
    for k in range(3):
        turn += surfaces[y, x, 3 + k] * surfaces[v, u, 3 + k]
        away += surfaces[y, x, 3 + k] * (surfaces[v, u, k] - surfaces[y, x, k])
    return turn > 0.85 and abs(away) < 0.015


@njit(cache=True, fastmath=True)
def smooth(values, surfaces, across, stride, first):
    """(H, W, C) means over every `stride`-th of five pixels of a row or column, of channels from `first` on.

    Only pixels in the same plane of surfaces (H, W, 6) count. The outer two count half, so that every phase
    of the 4 × 4 pattern has the same weight.
    """
    height, width, channels = values.shape
    found = np.empty_like(values)
    for y in range(height):
        for x in range(width):
            total = np.float32(1.0)
            for c in range(channels):
                found[y, x, c] = values[y, x, c]
            for step in range(-2, 3):
                v, u = (y, x + stride * step) if across else (y + stride * step, x)
                if step == 0 or v < 0 or u < 0 or v >= height or u >= width:
                    continue
                if _same_plane(surfaces, y, x, v, u):
                    weight = np.float32(0.5 if abs(step) == 2 else 1.0)
                    total += weight
                    for c in range(first, channels):
                        found[y, x, c] += weight * values[v, u, c]
            for c in range(first, channels):
                found[y, x, c] /= total
    return found
