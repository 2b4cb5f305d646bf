"""Random light for a room: which of its lamps are on, daylight through windows, and the rest."""

from __future__ import annotations

import math

import numpy as np

from tracing.shading import Lamp, Lighting
from tracing.shell import Room

MOST_LAMPS = 5


def _warmth(rng: np.random.Generator) -> np.ndarray:
    """(3,) the colour of a lamp, from bluish to orange."""
    return 1 - rng.uniform(-0.15, 0.5) * np.array([0, 0.4, 1])


def light_up(room: Room, spot: np.ndarray, rng: np.random.Generator) -> Lighting:
    """Light for views of a spot (3,): lamps near it, chosen at random, and windows by day."""
    by_day = bool(room.windows) and rng.random() < 0.65
    wanted = int(rng.integers(0 if by_day else 1, 4))
    distance = [np.linalg.norm(place - spot) for place in room.fixtures]
    near = [int(n) for n in np.argsort(distance)[:6]]
    numbers = [int(n) for n in rng.permutation(near)[:wanted]]
    lamps = []
    for number in numbers:
        radius = float(np.exp(rng.uniform(math.log(0.015), math.log(0.25))))
        turn = rng.uniform(0, math.pi)
        axes = radius * np.array([[math.cos(turn), math.sin(turn), 0], [-math.sin(turn), math.cos(turn), 0]])
        colour = rng.uniform(0.5, 1.6) * _warmth(rng)
        lamps.append(Lamp(room.fixtures[number], axes, colour, np.zeros(3)))
    day = float(np.exp(rng.uniform(math.log(0.5), math.log(4)))) if by_day else 0.0
    if by_day:
        sky = day * (1 + rng.uniform(-0.15, 0.25) * np.array([-1, -0.2, 1]))
        for pane, inward in zip(room.windows, room.inward, strict=True):
            if len(lamps) == MOST_LAMPS:
                break
            area = 4 * np.linalg.norm(pane[1]) * np.linalg.norm(pane[2])
            lamps.append(Lamp(pane[0] + 0.02 * inward, pane[1:], sky * area, inward))
    outside = max(day, 0.02) * rng.uniform(0.6, 1.5)
    return Lighting(lamps, numbers, 0.5 * np.ones(3) * max(day, 0.2), outside)
