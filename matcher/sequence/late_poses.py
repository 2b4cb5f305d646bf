"""Frames of a sequence that had no pose in a map, or a poor one, when they were tracked: one at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from matcher.data.rotations import as_quaternion, as_rotation

_MOVED = 2.0  # standard deviations of the positions, by which two of them must be apart to say the unit
_NEAR = 12  # localised frames that say the unit beyond the first and the last
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


def _placed(
    ordered: Sequence[LocalizedFrame], index: int, world_from_cam: np.ndarray, unit: float | None
) -> np.ndarray | None:
    """map_from_cam (4, 4) of a frame; between two that were localised, drift is spread over the time."""
    before = [frame for frame in ordered if frame.index <= index]
    after = [frame for frame in ordered if frame.index >= index]
    if not before or not after:
        return moved_from((before or after[:1])[-1], world_from_cam, unit)
    ends = before[-1], after[0]
    share = (index - ends[0].index) / max(1, ends[1].index - ends[0].index)
    # Tracking with one camera loses its unit little by little, so these two know it best.
    own = unit_of(ends, unit)
    found = [moved_from(end, world_from_cam, own) for end in ends]
    if found[0] is None or found[1] is None:
        return found[round(share)]
    return _mean(found[0], found[1], share)


def _mean(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """A pose (4, 4) between two, `share` of the way to the second."""
    turns = [as_quaternion(pose[:3, :3]) for pose in (first, second)]
    turns[1] = turns[1] if turns[0] @ turns[1] >= 0 else -turns[1]
    pose = (1 - share) * first + share * second
    turn = (1 - share) * turns[0] + share * turns[1]
    pose[:3, :3] = as_rotation(turn)
    return pose


@dataclass(eq=False)
class _Stretch:
    """Frames between two losses of tracking: one system of coordinates."""

    start: int
    without: dict[int, np.ndarray] = field(default_factory=dict)  # index → world_from_cam
    localized: list[LocalizedFrame] = field(default_factory=list)

    def poses(self, assumed: float | None) -> dict[int, np.ndarray]:
        """map_from_cam of frames that have none, each from the localised frames before and after it."""
        if not self.localized:
            return {}
        ordered, found = sorted(self.localized, key=lambda frame: frame.index), {}
        units = [unit_of(some, assumed) for some in (ordered[:_NEAR], ordered, ordered[-_NEAR:])]
        for index, pose in self.without.items():
            unit = units[int(index >= ordered[0].index) + int(index > ordered[-1].index)]
            if (placed := _placed(ordered, index, pose, unit)) is not None:
                found[index] = placed
        return found

    def says_more(self, index: int) -> bool:
        """Whether a frame without a pose in the map is nearer in time to this one than to any localised."""
        return any(
            all(abs(other - index) < abs(other - frame.index) for frame in self.localized)
            for other in self.without
        )


class LatePoses:
    """Remembers frames without a good pose in the map, and what is needed to give them one.

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
        """A frame has no pose in the map yet, or one that may become better."""
        self._stretches[-1].without[index] = world_from_cam

    def missed_after(self, index: int) -> bool:
        """Whether frames after this one were to be localised and could not be in time."""
        return bool(self._missed) and self._missed[-1][0] > index

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
        """Frames that were missed, as long as others without a pose in time are nearest to them."""
        while self._missed:
            request = self._missed.pop()
            if self._says_more(request):
                yield request

    @property
    def wanted(self) -> int:
        """How many frames `open_requests` gives at most."""
        return sum(map(self._says_more, self._missed))

    def _says_more(self, request: Request) -> bool:
        return self._of(request[0]).says_more(request[0])

    def poses(self) -> dict[int, np.ndarray]:
        """map_from_cam (4, 4) of frames that had none when they were tracked, or a poor one, by index."""
        return {i: pose for stretch in self._stretches for i, pose in stretch.poses(self._assumed).items()}

    def _of(self, index: int) -> _Stretch:
        return next(each for each in reversed(self._stretches) if each.start <= index)
