"""What a tracker does with maps: it makes one of its keyframes, and is localised in one that exists."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from matcher.data.camera import Camera
from matcher.data.images import ImageInput
from matcher.errors import UsageError
from matcher.options import LoadOptions
from matcher.pipeline import Mask, Pipeline
from matcher.sequence.frames import FrameResult
from matcher.sequence.latency import StageTimes
from matcher.threads import one_core_free

if TYPE_CHECKING:
    from matcher.sequence.background import Timing
    from matcher.sequence.closed_trajectory import ClosedTrajectory
    from matcher.sequence.keyframe_map import KeyframeMap
    from matcher.sequence.map_tracking import MapTracking


class TrackerMaps:
    """The part of `Tracker` that is about maps."""

    camera: Camera | None
    pipeline: Pipeline
    baseline: float | None
    keyframe_map: KeyframeMap | None = None  # takes in the frames
    _in_map: MapTracking | None = None  # the map that was loaded
    _watch: StageTimes

    def save_map(self, *, close_loops: bool = True) -> ClosedTrajectory:
        """Make the map of the keyframes so far, to be localised in and loaded by a later run.

        Arguments and errors as of `KeyframeMap.finish`.

        Raises:
            UsageError: also where the tracker has no `keyframe_map`.
        """
        if self.keyframe_map is None:
            raise UsageError(
                "the keyframes were not kept: Tracker(camera=C, keyframe_map=matcher.KeyframeMap(FOLDER, C))"
            )
        return self.keyframe_map.finish(close_loops=close_loops)

    def load_map(
        self, folder: str | Path, *, timing: Timing = "background", **options: Unpack[LoadOptions]
    ) -> None:
        """Follow in a map that exists: from now on `FrameResult.map_from_cam` is the pose in it, once known.

        Args:
            folder: of `save_map`, or any model that `Map.open` takes.
            timing: "background": frames are localised in a process that computes only while a core is free;
                tracking leaves it one, unless OMP_NUM_THREADS says how many threads to use. "inline": at
                once, the same result every time.
            options: of `Map.open`.

        Raises:
            UsageError: no camera, or no map; as of `Map.open`.
            IntegrityError: as of `Map.open`.
        """
        from matcher.sequence.map_tracking import MapTracking

        self.unload_map()
        if self.camera is None:
            raise UsageError("a map needs poses, and poses need a camera: Tracker(camera=matcher.Camera(…))")
        measured = self.baseline is not None
        self._in_map = MapTracking(folder, measured=measured, timing=timing, **options)

    @property
    def waiting_in_map(self) -> int:
        """Frames that the loaded map has given no answer for yet; `finish_in_map` waits for them."""
        return 0 if self._in_map is None else self._in_map.waiting

    @property
    def localized_in_map(self) -> int:
        """Frames that were localised in the loaded map."""
        return 0 if self._in_map is None else self._in_map.localized

    def finish_in_map(self) -> None:
        """At the end of a sequence: localise the frames that the loaded map gave no answer for in time.

        `late_poses_in_map` then has poses of frames before the first answer. Interrupted, it has those that
        are known. No frame can follow in this map afterwards.
        """
        if self._in_map is not None:
            self._in_map.finish()

    def late_poses_in_map(self) -> dict[int, np.ndarray]:
        """map_from_cam (4, 4) by frame, known by now, of those whose `FrameResult` has none or a poor one."""
        return {} if self._in_map is None else self._in_map.late_poses()

    def unload_map(self) -> None:
        """Stop following in a map."""
        if self._in_map is not None:
            self._in_map.close()
        self._in_map = None

    @property
    def problem(self) -> str | None:
        """Why nothing more is found in a map or of loops, None where all is well."""
        maps = [found for found in (self._in_map, self.keyframe_map) if found is not None]
        return next((found.problem for found in maps if found.problem is not None), None)

    def _for_a_frame(self) -> AbstractContextManager[None]:
        """While a frame is tracked: where another process works on maps, a core is left to it."""
        maps = (self._in_map, self.keyframe_map)
        return one_core_free() if any(each is not None and each.beside for each in maps) else nullcontext()

    def _mapped(self, result: FrameResult, frame: ImageInput, mask: Mask | None) -> FrameResult:
        """The result with its pose in the loaded map; the map that is made takes it in."""
        if self.keyframe_map is not None:
            with self._watch.timed("map"):
                self.keyframe_map.add(result, frame, mask=mask)
        if self._in_map is not None:
            with self._watch.timed("map"):
                how = dict(mask=mask, alpha_mask=self.pipeline.alpha_mask)
                result = replace(result, map_from_cam=self._in_map.follow(result, frame, **how))
        return replace(result, milliseconds=self._watch.milliseconds())
