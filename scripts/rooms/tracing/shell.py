"""The shell of a room: floor, ceiling, walls with windows, and lamps below the ceiling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from tracing.furniture import Maker
from tracing.library import Library
from tracing.meshes import PLAIN, Material, Mesh, box, joined, lathed, quad
from tracing.surfaces import colour, draw_material


@dataclass(eq=False)
class Room:
    """What stands where, in metres."""

    bounds: np.ndarray  # (2, 3) lowest and highest corner
    parts: list[Mesh] = field(default_factory=list)
    spots: list[np.ndarray] = field(default_factory=list)  # (3,) worth looking at
    fixtures: list[np.ndarray] = field(default_factory=list)  # (3,) where lamps are
    windows: list[np.ndarray] = field(default_factory=list)  # (3, 3) middle and half-axes
    inward: list[np.ndarray] = field(default_factory=list)  # (3,) direction from each window into the room


def build_shell(room: Room, maker: Maker, library: Library) -> None:
    """Floor, ceiling, walls with windows, skirting boards, and lamps below the ceiling."""
    rng, photos = maker.rng, maker.photos
    x, y, z = room.bounds[1]
    floor = draw_material(rng, photos, "floors")
    room.parts.append(quad([(0, 0, 0), (x, 0, 0), (x, y, 0), (0, y, 0)], floor))
    white = draw_material(rng, photos, "walls", "plain" if rng.random() < 0.8 else None)
    room.parts.append(quad([(0, y, z), (x, y, z), (x, 0, z), (0, 0, z)], white))
    usual = draw_material(rng, photos, "walls")
    skirting = Material(tint=colour(rng), gloss=0.1)
    for number in range(4):
        length, depth = (x, y) if number % 2 == 0 else (y, x)
        look = usual if rng.random() < 0.75 else draw_material(rng, photos, "walls")
        side = Side(length, depth / 2, z, look, np.array([x / 2, y / 2, 0]), number * math.pi / 2)
        wall = [_wall(room, maker, side)]
        if rng.random() < 0.6:
            size = length, 0.015, rng.uniform(0.05, 0.12)
            wall.append(box(size, skirting, (0, depth / 2 - 0.008, 0)))
        room.parts += [part.moved(side.middle, side.yaw) for part in wall]
    for _ in range(int(rng.integers(1, 7))):
        add_fixture(room, np.append(rng.uniform(0.15, 0.85, 2) * room.bounds[1, :2], z), rng, library)


@dataclass(frozen=True, eq=False)
class Side:
    """A wall: made at +y of the origin, it is turned about the room's middle into its place."""

    length: float
    y: float  # metres from the middle of the room
    height: float
    look: Material
    middle: np.ndarray  # (3,) of the room
    yaw: float  # radians


def _wall(room: Room, maker: Maker, side: Side) -> Mesh:
    """A wall with a window or without, before it is turned."""
    rng, y, half = maker.rng, side.y, side.length / 2
    if rng.random() < 0.6 or side.length < 1.6:
        whole = [(half, y, 0), (-half, y, 0), (-half, y, side.height), (half, y, side.height)]
        return quad(whole, side.look)
    width = rng.uniform(0.6, min(2.6, side.length - 0.7))
    left = rng.uniform(-half + 0.25, half - 0.25 - width)
    low = 0.02 if rng.random() < 0.2 else rng.uniform(0.6, 1.1)
    high = rng.uniform(max(low + 0.7, 1.8), side.height - 0.1)
    parts = [
        quad([(b, y, c), (a, y, c), (a, y, d), (b, y, d)], side.look)
        for i, (a, b) in enumerate(pairwise([-half, left, left + width, half]))
        for j, (c, d) in enumerate(pairwise([0, low, high, side.height]))
        if (i, j) != (1, 1)
    ]
    c, s = math.cos(side.yaw), math.sin(side.yaw)
    turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1.0]])
    pane = np.array([[left + width / 2, y, (low + high) / 2], [width / 2, 0, 0], [0, 0, (high - low) / 2]])
    placed = pane @ turn.T
    placed[0] += side.middle
    room.windows.append(placed)
    room.inward.append(turn @ [0, -1.0, 0])
    return joined([*parts, *_window(maker, pane)])


def _window(maker: Maker, pane: np.ndarray) -> list[Mesh]:
    """The frame of an opening (3, 3), its middle and half-axes, and a photo behind it."""
    rng, (centre, y, level), (w, h) = maker.rng, pane[0], (pane[1, 0], pane[2, 2])
    frame = Material(tint=colour(rng) if rng.random() < 0.4 else (0.75, 0.75, 0.73), gloss=0.15)
    deep, edge = rng.uniform(0.08, 0.3), rng.uniform(0.03, 0.07)
    parts = [
        box((edge, deep, 2 * h), frame, (centre + place, y + deep / 2, level - h))
        for place in [-w, w, *(0,) * int(rng.random() < 0.6)]
    ]
    parts += [
        box((2 * w + edge, deep, edge), frame, (centre, y + deep / 2, level + place - edge / 2))
        for place in (-h, h, *(0,) * int(rng.random() < 0.3))
    ]
    spread, away = rng.uniform(0.8, 4), deep + rng.uniform(0.2, 3)
    w, h, far = w + spread * away, h + spread * away, y + away  # seen aslant, there is photo enough
    corners = [(1, -1), (-1, -1), (-1, 1), (1, 1)]
    view = replace(maker.picture(), emission=1.0, tint=(1.0, 1.0, 1.0))
    return [*parts, quad([(centre + a * w, far, level + b * h) for a, b in corners], view)]


def add_fixture(room: Room, below: np.ndarray, rng: np.random.Generator, library: Library) -> None:
    """A lamp at a point of the ceiling."""
    glow = Material(PLAIN, (0.8, 0.8, 0.8), lamp=len(room.fixtures), casts=False)
    kind = rng.random()
    if kind < 0.4:  # a panel
        part, drop = box((*rng.uniform(0.15, 0.6, 2), 0.03), glow).moved(below - [0, 0, 0.035]), 0.08
    elif kind < 0.8:  # a globe on a cord
        radius, drop = rng.uniform(0.05, 0.2), rng.uniform(0.3, 0.7)
        turn = np.linspace(-math.pi / 2, math.pi / 2, 13)
        globe = lathed(radius * np.stack([np.cos(turn), np.sin(turn)], -1), glow)
        cord = box((0.01, 0.01, drop), Material(tint=(0.05, 0.05, 0.05), casts=False))
        part = joined([globe, cord]).moved(below - [0, 0, drop])
    else:
        piece = library.at("ceiling")[0].mesh.scaled(rng.uniform(0.5, 0.9))
        part, drop = piece.moved(below - [0, 0, piece.extent[2]]), piece.extent[2] + 0.05
    room.parts.append(part)
    room.fixtures.append(below - [0, 0, drop])
