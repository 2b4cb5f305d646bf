"""A sequence in a map that exists: some frames are localised in it, the others follow by tracking."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from matcher.data.camera import Camera
from matcher.data.images import ImageInput, read_input
from matcher.errors import MatcherError
from matcher.localization.map import Map
from matcher.options import LoadOptions
from matcher.pipeline import Mask
from matcher.sequence import background
from matcher.sequence.background import Timing
from matcher.sequence.frames import FrameResult

_KEPT = 12  # localised frames that the scale is known from
_MOVED = 2.0  # standard deviations of the positions, by which two of them must be apart to say it


@dataclass(frozen=True, eq=False)
class LocalizedFrame:
    """A frame that was localised in the map."""

    index: int
    world_from_cam: np.ndarray  # (4, 4), in the coordinates of tracking
    map_from_cam: np.ndarray  # (4, 4), in those of the map
    deviation: float  # standard deviation of its position, the map's units


@dataclass(eq=False)
class FrameLookup:
    """Localises frames in a map that is opened at the first; a task beside tracking."""

    model: Path
    options: dict[str, Any]
    _map: Map | None = field(default=None, init=False)

    def __call__(
        self, request: tuple[int, np.ndarray, np.ndarray | None, np.ndarray, Camera]
    ) -> LocalizedFrame | bool:
        """A frame's index, pixels, mask, pose world_from_cam and camera; False where it is not in the map."""
        index, pixels, mask, world_from_cam, camera = request
        if self._map is None:
            self._map = Map.open(self.model, **self.options)
        pose = self._map.localize(pixels, camera, mask=mask)
        if not pose.ok:
            return False
        deviation = (
            float("inf") if pose.covariance is None else float(np.sqrt(np.trace(pose.covariance[3:, 3:])))
        )
        return LocalizedFrame(index, world_from_cam, np.linalg.inv(pose.cam_from_world), deviation)


class MapTracking:
    """Where the frames of a sequence are in a map.

    Tracking has coordinates of its own and, with one camera, a unit of its own. Keyframes are localised, and
    every frame until the first is. Two of them that are far enough apart say how long the unit is; the last
    one says where the frames after it are, so drift does not add up.
    """

    def __init__(
        self, folder: str | Path, *, measured: bool, timing: Timing, **options: Unpack[LoadOptions]
    ) -> None:
        """Set up.

        Args:
            folder: of a `KeyframeMap`, or any model that `Map.open` takes.
            measured: tracking knows distances, so its unit is taken to be the map's until frames say it.
            timing: where frames are localised, see `background`.
            options: of `Map.open`.

        Raises:
            UsageError, IntegrityError: as of `Map.open`.
        """
        model = Path(folder).absolute()
        Map.open(model, **options).close()  # what is wrong with it is said now
        self._lookup = background.start(FrameLookup(model, dict(options)), timing)
        self._localized: deque[LocalizedFrame] = deque(maxlen=_KEPT)
        self._unit = 1.0 if measured else None  # length of tracking's unit in the map's, as far as assumed
        self._since = 0  # the first frame after tracking was lost
        self.found = 0  # frames that were localised
        self.problem: str | None = None  # why no more frames are localised

    def follow(
        self, result: FrameResult, image: ImageInput, *, mask: Mask | None = None, alpha_mask: bool = True
    ) -> np.ndarray | None:
        """map_from_cam (4, 4) of the next frame that was tracked, None where it is not known."""
        if result.status == "lost":
            self._since = result.index
            self._localized.clear()
        posed = result.pose_status == "ok" and result.world_from_cam is not None
        try:
            if posed and (result.is_keyframe or not self._localized):
                how = dict(resize=None, upright=False, mask=mask, alpha_mask=alpha_mask)
                shown = read_input(image, **how)
                pixels = np.array(shown.pixels)  # stays as it is
                self._lookup.offer((result.index, pixels, shown.mask, result.world_from_cam, result.camera))
            for answer in self._lookup.answers():
                self._take(answer)
        except MatcherError as error:
            self.problem = str(error)
        self.problem = self.problem or self._lookup.problem
        return self.map_from_cam(result.world_from_cam) if posed else None

    def map_from_cam(self, world_from_cam: np.ndarray) -> np.ndarray | None:
        """The pose in the map of a camera whose pose in tracking is known."""
        scale = self._scale()
        if not self._localized:
            return None
        last = self._localized[-1]
        step = np.linalg.inv(last.world_from_cam) @ world_from_cam
        if scale is None and np.linalg.norm(step[:3, 3]) > 0:
            return None
        step[:3, 3] *= 1.0 if scale is None else scale
        return last.map_from_cam @ step

    @property
    def beside(self) -> bool:
        """Whether frames are localised in a process beside this one."""
        return self._lookup.beside and self.problem is None

    def close(self) -> None:
        """End the work."""
        self._lookup.close()

    def _take(self, answer: LocalizedFrame | bool) -> None:
        if isinstance(answer, LocalizedFrame) and answer.index >= self._since:
            self._localized.append(answer)
            self.found += 1

    def _scale(self) -> float | None:
        """The map's units in one of tracking."""
        ratios = []
        for before, after in pairwise(self._localized):
            there = np.linalg.norm(after.map_from_cam[:3, 3] - before.map_from_cam[:3, 3])
            here = np.linalg.norm(after.world_from_cam[:3, 3] - before.world_from_cam[:3, 3])
            if here > 0 and there > _MOVED * np.hypot(before.deviation, after.deviation):
                ratios.append(there / here)
        return float(np.median(ratios)) if ratios else self._unit
