"""Textures of surfaces (photos, paint, patterns), heights of relief, and outlines of cut-outs."""

from __future__ import annotations

from functools import cache

import cv2
import numpy as np

from matcher.lab.pairs.photometric import draw_grey_weights, to_grey
from matcher.lab.pairs.textures import DrawnPhotos, PhotoSet

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
