"""Pairs of photos that were taken near each other, by the positions in their headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from matcher.data.gps import read_gps
from matcher.errors import UsageError

_DEGREE = 111_195.0  # metres of a degree of latitude, on a sphere


def positions_of(names: Sequence[str], folder: Path) -> dict[str, tuple[float, float, float]]:
    """Latitude, longitude (degrees) and altitude (metres) of the photos whose header has them."""
    found = {name: read_gps(folder / name) for name in names if (folder / name).is_file()}
    return {name: position for name, position in found.items() if position is not None}


def nearby_pairs(positions: Mapping[str, Sequence[float]], k: int) -> list[tuple[str, str]]:
    """Each photo with the `k` nearest ones, every pair once; altitudes, the least exact, are left out.

    Args:
        positions: latitude, longitude and altitude by name.
        k: neighbours; a photo may be in more pairs, as the neighbour of others.

    Raises:
        UsageError: k below 1, or fewer than two positions.
    """
    if k < 1:
        raise UsageError(f"pairs of nearby photos need at least 1 neighbour, not {k}")
    if len(positions) < 2:
        raise UsageError(
            f"{len(positions)} of the photos have a GPS position in their EXIF header, and two are needed: "
            "choose pairs in another way, such as by similar images"
        )
    names = list(positions)
    degrees = np.array([list(positions[name])[:2] for name in names], dtype=np.float64)
    metres = _DEGREE * degrees
    east = (degrees[:, 1] - degrees[0, 1] + 180) % 360 - 180  # the shorter way round
    metres[:, 1] = _DEGREE * east * np.cos(np.deg2rad(degrees[0, 0]))
    found: dict[tuple[int, int], None] = {}
    for row, here in enumerate(metres):
        distance = np.linalg.norm(metres - here, axis=1)
        distance[row] = np.inf
        for other in np.argsort(distance, kind="stable")[: min(k, len(names) - 1)].tolist():
            found[min(row, other), max(row, other)] = None
    return [(names[first], names[second]) for first, second in sorted(found)]
