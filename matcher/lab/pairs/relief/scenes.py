"""Random scenes: rooms with boxes, tables seen from above, walls with relief behind cut-outs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np

from matcher.lab.pairs.relief.surfaces import (
    Surface,
    box,
    random_rotation,
    rectangle,
    room,
    upright,
    with_relief,
)
from matcher.lab.pairs.relief.textures import (
    draw_heights,
    draw_outline,
    draw_texture,
    pattern_texture,
    photo_texture,
    plain_texture,
)
from matcher.lab.pairs.textures import DrawnPhotos, PhotoSet

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
