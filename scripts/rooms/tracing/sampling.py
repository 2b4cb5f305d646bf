"""Texture look-ups for compiled loops: mip levels by a ray's footprint, several samples along its length.

All mip levels of all textures lie in one array of bytes; `levels` (textures, 12, 3) has the offset, the
width and the height of each, and `counts` how many a texture has.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

MAX_LEVELS = 12
MAX_SAMPLES = 4  # along the longer axis of a footprint


@njit(cache=True, fastmath=True)
def _bilinear(pool, to_linear, offset, width, height, u, v, mirrored, out, weight):
    """Add `weight` times the texture's linear colour at (u, v) to `out` (3,)."""
    if mirrored:
        u = u - 2.0 * math.floor(0.5 * u)
        v = v - 2.0 * math.floor(0.5 * v)
        if u > 1.0:
            u = 2.0 - u
        if v > 1.0:
            v = 2.0 - v
    x = u * width - 0.5
    y = (1.0 - v) * height - 0.5
    left, top = math.floor(x), math.floor(y)
    dx, dy = x - left, y - top
    if mirrored:
        x0, x1 = max(int(left), 0), min(int(left) + 1, width - 1)
        y0, y1 = max(int(top), 0), min(int(top) + 1, height - 1)
    else:
        x0, x1 = int(left) % width, (int(left) + 1) % width
        y0, y1 = int(top) % height, (int(top) + 1) % height
    a, b = offset + 3 * (y0 * width + x0), offset + 3 * (y0 * width + x1)
    c, d = offset + 3 * (y1 * width + x0), offset + 3 * (y1 * width + x1)
    wa, wb = (1 - dx) * (1 - dy) * weight, dx * (1 - dy) * weight
    wc, wd = (1 - dx) * dy * weight, dx * dy * weight
    for k in range(3):
        out[k] += (
            wa * to_linear[pool[a + k]]
            + wb * to_linear[pool[b + k]]
            + wc * to_linear[pool[c + k]]
            + wd * to_linear[pool[d + k]]
        )


@njit(cache=True, fastmath=True)
def _along(e1, e2, duv1, duv2, direction, gram, width, height):
    """Texels per metre along a direction in the plane of a triangle, as (du, dv) times the texture's size."""
    p = e1[0] * direction[0] + e1[1] * direction[1] + e1[2] * direction[2]
    q = e2[0] * direction[0] + e2[1] * direction[1] + e2[2] * direction[2]
    a = (gram[2] * p - gram[1] * q) * gram[3]
    b = (gram[0] * q - gram[1] * p) * gram[3]
    return (a * duv1[0] + b * duv2[0]) * width, (a * duv1[1] + b * duv2[1]) * height


@njit(cache=True, fastmath=True)
def _difference(rows, number):
    """A row of (3, 3) less the first one, as a tuple: arrays would be allocated for every ray."""
    return (rows[number, 0] - rows[0, 0], rows[number, 1] - rows[0, 1], rows[number, 2] - rows[0, 2])


@njit(cache=True, fastmath=True)
def _footprint(corners, duv1, duv2, normal, ray, spread, width, height):
    """Where a ray's width reaches on a texture, in texels: (x, y) along the longer axis, and both lengths.

    `duv1` and `duv2` are the texture coordinates' changes along the triangle's edges from its first corner.
    """
    e1 = _difference(corners, 1)
    e2 = _difference(corners, 2)
    g11 = e1[0] * e1[0] + e1[1] * e1[1] + e1[2] * e1[2]
    g12 = e1[0] * e2[0] + e1[1] * e2[1] + e1[2] * e2[2]
    g22 = e2[0] * e2[0] + e2[1] * e2[1] + e2[2] * e2[2]
    gram = (g11, g12, g22, 1.0 / max(g11 * g22 - g12 * g12, 1e-20))
    facing = ray[0] * normal[0] + ray[1] * normal[1] + ray[2] * normal[2]
    sx, sy, sz = ray[0] - facing * normal[0], ray[1] - facing * normal[1], ray[2] - facing * normal[2]
    length = math.sqrt(sx * sx + sy * sy + sz * sz)
    if length < 1e-3:  # seen from straight ahead: any direction
        sx, sy, sz, length = e1[0], e1[1], e1[2], math.sqrt(g11) + 1e-12
    t = (sx / length, sy / length, sz / length)
    b = (
        normal[1] * t[2] - normal[2] * t[1],
        normal[2] * t[0] - normal[0] * t[2],
        normal[0] * t[1] - normal[1] * t[0],
    )
    long = spread / max(abs(facing), 0.05)
    tx, ty = _along(e1, e2, duv1, duv2, t, gram, width, height)
    bx, by = _along(e1, e2, duv1, duv2, b, gram, width, height)
    tx, ty, bx, by = tx * long, ty * long, bx * spread, by * spread
    major, minor = math.sqrt(tx * tx + ty * ty), math.sqrt(bx * bx + by * by)
    if minor > major:
        return bx, by, minor, major
    return tx, ty, major, minor


@njit(cache=True, fastmath=True)
def look_up(pool, to_linear, levels, count, corners, uvs, normal, ray, bu, bv, spread, mirrored, out):
    """The mean linear colour of a texture over a ray's footprint, written to `out` (3,).

    `corners` (3, 3) and `uvs` (3, 2) are the triangle's, `ray` (3,) is the unit direction, `spread` the
    ray's width in metres where it hits, at barycentric coordinates (bu, bv).
    """
    width, height = levels[0, 1], levels[0, 2]
    duv1 = (uvs[1, 0] - uvs[0, 0], uvs[1, 1] - uvs[0, 1])
    duv2 = (uvs[2, 0] - uvs[0, 0], uvs[2, 1] - uvs[0, 1])
    tx, ty, major, minor = _footprint(corners, duv1, duv2, normal, ray, spread, width, height)
    kept = max(minor, major / MAX_SAMPLES, 1.0)
    level = math.log2(kept)
    samples = min(MAX_SAMPLES, max(1, math.ceil(major / kept - 0.2)))
    first = min(int(level), count - 1)
    second = min(first + 1, count - 1)
    blend = min(level - first, 1.0)
    if blend < 0.05 or blend > 0.95:  # one level is enough
        blend = round(blend)
    u = uvs[0, 0] + bu * duv1[0] + bv * duv2[0]
    v = uvs[0, 1] + bu * duv1[1] + bv * duv2[1]
    out[0] = out[1] = out[2] = 0.0
    for k in range(samples):
        shift = (k + 0.5) / samples - 0.5
        su, sv = u + shift * tx / width, v + shift * ty / height
        if blend < 1:
            _bilinear(
                pool, to_linear, levels[first, 0], levels[first, 1], levels[first, 2],
                su, sv, mirrored, out, (1 - blend) / samples,
            )  # fmt: skip
        if blend > 0:
            _bilinear(
                pool, to_linear, levels[second, 0], levels[second, 1], levels[second, 2],
                su, sv, mirrored, out, blend / samples,
            )  # fmt: skip


def pool_textures(textures: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of all levels, `levels` (T, 12, 3) int64, and `counts` (T,) int64 of `meshes.Texture`."""
    levels = np.zeros((len(textures), MAX_LEVELS, 3), np.int64)
    counts = np.zeros(len(textures), np.int64)
    parts, offset = [], 0
    for number, texture in enumerate(textures):
        counts[number] = min(len(texture.levels), MAX_LEVELS)
        for depth, level in enumerate(texture.levels[:MAX_LEVELS]):
            levels[number, depth] = offset, level.shape[1], level.shape[0]
            parts.append(level.reshape(-1))
            offset += level.size
    return np.concatenate(parts), levels, counts
