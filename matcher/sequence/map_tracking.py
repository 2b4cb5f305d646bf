"""A sequence in a map that exists: some frames are localised in it, the others follow by tracking."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
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
from matcher.sequence.late_poses import LatePoses, LocalizedFrame, moved_from, unit_of

_KEPT = 12  # localised frames that the scale is known from
_PATIENCE = 10.0  # seconds at the end, in which the process beside may still answer


@dataclass(eq=False)
class FrameLookup:
    """Localises frames in a map that is opened at the first or before; a task beside tracking."""

    model: Path
    options: dict[str, Any]
    _map: Map | None = field(default=None, init=False)

    def prepare(self) -> None:
        """Open the map, which takes seconds, before there is a frame."""
        self._map = Map.open(self.model, **self.options)

    def __call__(
        self, request: tuple[int, np.ndarray, np.ndarray | None, np.ndarray, Camera]
    ) -> LocalizedFrame | bool:
        """A frame's index, pixels, mask, pose world_from_cam and camera; False where it is not in the map."""
        index, pixels, mask, world_from_cam, camera = request
        if self._map is None:
            self.prepare()
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
        self._task = FrameLookup(model, dict(options))
        self._lookup = background.start(self._task, timing)
        self._localized: deque[LocalizedFrame] = deque(maxlen=_KEPT)
        self._unit = 1.0 if measured else None  # length of tracking's unit in the map's, as far as assumed
        self._late = LatePoses(self._unit)
        self._since = 0  # the first frame after tracking was lost
        self.found = 0  # frames that were localised, and that tracking followed on from
        self.localized = 0  # frames that were localised
        self.problem: str | None = None  # why no more frames are localised

    def follow(
        self, result: FrameResult, image: ImageInput, *, mask: Mask | None = None, alpha_mask: bool = True
    ) -> np.ndarray | None:
        """map_from_cam (4, 4) of the next frame that was tracked, None where it is not known."""
        if result.status == "lost":
            self._since = result.index
            self._late.lose(result.index)
            self._localized.clear()
        posed = result.pose_status == "ok" and result.world_from_cam is not None
        try:
            if posed and (result.is_keyframe or not self._localized):
                how = dict(resize=None, upright=False, mask=mask, alpha_mask=alpha_mask)
                shown = read_input(image, **how)
                pixels = np.array(shown.pixels)  # stays as it is
                request = (result.index, pixels, shown.mask, result.world_from_cam, result.camera)
                if (missed := self._lookup.offer(request)) is not None:
                    self._late.miss(missed)
            for answer in self._lookup.answers():
                self._take(answer)
        except MatcherError as error:
            self.problem = str(error)
        self.problem = self.problem or self._lookup.problem
        if not posed:
            return None
        pose = self.map_from_cam(result.world_from_cam)
        # Where lookups fall behind, a pose follows from a frame long before: those found later are better.
        if pose is None or self._late.missed_after(self._localized[-1].index):
            self._late.lack(result.index, result.world_from_cam)
        return pose

    @property
    def waiting(self) -> int:
        """Frames that `finish` would localise, at most."""
        return 0 if self.problem is not None else len(self._lookup.unanswered()) + self._late.wanted

    def late_poses(self) -> dict[int, np.ndarray]:
        """map_from_cam (4, 4) by frame, where `follow` knew none or a poor one, from what is known by now."""
        return self._late.poses()

    def finish(self) -> None:
        """Localise the frames for which no answer was there in time: at most 16, and the last two.

        The process beside tracking may get no core for as long as others compute. So it has ten seconds; then
        it is ended, and its frames are localised here. No frame can follow in the map afterwards.
        """
        if self.problem is None:
            self._try(self._wait)
        left = [] if self.problem is not None else self._lookup.unanswered()
        self._lookup.close()
        if self.problem is not None:
            return
        for request in left:
            self._try(lambda request=request: self._take(self._task(request)))
        for request in self._late.open_requests():
            self._try(lambda request=request: self._take(self._task(request)))

    def _wait(self) -> None:
        until = monotonic() + _PATIENCE
        while self._lookup.unanswered() and self._lookup.problem is None and monotonic() < until:
            for answer in self._lookup.answers(wait=max(0.0, until - monotonic())):
                self._take(answer)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (MatcherError, OSError) as error:
            self.problem = self.problem or str(error)
        self.problem = self.problem or self._lookup.problem

    def map_from_cam(self, world_from_cam: np.ndarray) -> np.ndarray | None:
        """The pose in the map of a camera whose pose in tracking is known."""
        if not self._localized:
            return None
        return moved_from(self._localized[-1], world_from_cam, unit_of(self._localized, self._unit))

    @property
    def beside(self) -> bool:
        """Whether frames are localised in a process beside this one."""
        return self._lookup.beside and self.problem is None

    def close(self) -> None:
        """End the work."""
        self._lookup.close()

    def _take(self, answer: LocalizedFrame | bool) -> None:
        if isinstance(answer, LocalizedFrame):
            self._late.take(answer)
            self.localized += 1
        if isinstance(answer, LocalizedFrame) and answer.index >= self._since:
            self._localized.append(answer)
            self.found += 1
