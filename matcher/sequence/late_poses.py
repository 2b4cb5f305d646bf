"""Frames of a sequence that had no pose in a map when they were tracked, and get one at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

_MOVED = 2.0  # standard deviations of the positions, by which two of them must be apart to say the unit
_HELD = 16  # requests of a sequence that nobody worked on; each holds a frame's pixels

Request = tuple[int, Any, Any, np.ndarray, Any]  # index, pixels, mask, world_from_cam, camera


@dataclass(frozen=True, eq=False)
class LocalizedFrame:
    """A frame that was localised in the map."""

    index: int
    world_from_cam: np.ndarray  # (4, 4), in the coordinates of tracking
    map_from_cam: np.ndarray  # (4, 4), in those of the map
    deviation: float  # standard deviation of its position, the map's units


def unit_of(localized: Sequence[LocalizedFrame], assumed: float | None) -> float | None:
    """The map's units in one of tracking; `assumed` where no two frames are far enough apart to say it."""
    ratios = []
    for before, after in pairwise(localized):
        there = np.linalg.norm(after.map_from_cam[:3, 3] - before.map_from_cam[:3, 3])
        here = np.linalg.norm(after.world_from_cam[:3, 3] - before.world_from_cam[:3, 3])
        if here > 0 and there > _MOVED * np.hypot(before.deviation, after.deviation):
            ratios.append(there / here)
    return float(np.median(ratios)) if ratios else assumed


def moved_from(near: LocalizedFrame, world_from_cam: np.ndarray, unit: float | None) -> np.ndarray | None:
    """map_from_cam (4, 4) of a frame, from one that was localised; None where the unit is needed."""
    step = np.linalg.inv(near.world_from_cam) @ world_from_cam
    if unit is None and np.linalg.norm(step[:3, 3]) > 0:
        return None
    step[:3, 3] *= 1.0 if unit is None else unit
    return near.map_from_cam @ step


@dataclass(eq=False)
class _Stretch:
    """Frames between two losses of tracking: one system of coordinates."""

    start: int
    without: dict[int, np.ndarray] = field(default_factory=dict)  # index → world_from_cam
    localized: list[LocalizedFrame] = field(default_factory=list)

    def poses(self, assumed: float | None) -> dict[int, np.ndarray]:
        """map_from_cam of frames that have none, each from the localised frame nearest in time."""
        if not self.localized:
            return {}
        ordered = sorted(self.localized, key=lambda frame: frame.index)
        unit, found = unit_of(ordered, assumed), {}
        for index, pose in self.without.items():
            near = min(ordered, key=lambda frame: abs(frame.index - index))
            if (placed := moved_from(near, pose, unit)) is not None:
                found[index] = placed
        return found


class LatePoses:
    """Remembers frames without a pose in the map, and what is needed to give them one.

    Memory: a pose a frame, and the pixels of up to 16 frames that were to be localised when the process that
    does so was busy, spread over the sequence.
    """

    def __init__(self, assumed: float | None) -> None:
        """Set up; `assumed`: the map's units in one of tracking, None with one camera."""
        self._assumed = assumed
        self._stretches = [_Stretch(0)]
        self._missed: list[Request] = []

    def lose(self, index: int) -> None:
        """Tracking was lost at this frame."""
        self._stretches.append(_Stretch(index))

    def lack(self, index: int, world_from_cam: np.ndarray) -> None:
        """A frame has no pose in the map yet."""
        self._stretches[-1].without[index] = world_from_cam

    def miss(self, request: Request) -> None:
        """A frame was to be localised, but others came after it before it could be."""
        self._missed.append(request)
        if len(self._missed) > _HELD:
            gaps = [after[0] - before[0] for before, after in pairwise(self._missed)]
            joined = [left + right for left, right in pairwise(gaps)]
            del self._missed[1 + int(np.argmin(joined))]  # the first and the last say most of the unit

    def take(self, frame: LocalizedFrame) -> None:
        """A frame was localised, of whichever stretch."""
        self._of(frame.index).localized.append(frame)

    def open_requests(self) -> Iterator[Request]:
        """Frames that were missed, as long as they are in a stretch where frames still have no pose."""
        while self._missed:
            request = self._missed.pop()
            if self._lacks(request):
                yield request

    @property
    def wanted(self) -> int:
        """How many frames `open_requests` gives at most."""
        return sum(map(self._lacks, self._missed))

    def _lacks(self, request: Request) -> bool:
        stretch = self._of(request[0])
        return len(stretch.poses(self._assumed)) < len(stretch.without)

    def poses(self) -> dict[int, np.ndarray]:
        """map_from_cam (4, 4) of frames that had none when they were tracked, by index."""
        return {i: pose for stretch in self._stretches for i, pose in stretch.poses(self._assumed).items()}

    def _of(self, index: int) -> _Stretch:
        return next(each for each in reversed(self._stretches) if each.start <= index)
