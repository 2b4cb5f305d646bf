"""Keyframes of a sequence as a map: loops are closed, points triangulated, and later runs localised in it.

While a sequence is tracked, keyframes are written to a folder. There, or afterwards, each is matched with its
neighbours in time and with those that look most like it. Verified pairs far apart in time are loops. With
loops, COLMAP's global mapper optimises the graph of relative poses, by rotation averaging and global
positioning (GLOMAP, Pan et al. 2024), or where that tears the path the tracked steps join the graph
(`step_graph.py`) and bundle adjustment follows; without, it starts from the tracked poses.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Unpack

import numpy as np

from matcher.cameras import Camera, as_camera
from matcher.errors import MatcherError, UsageError
from matcher.export.output import check_folder
from matcher.files import write_whole
from matcher.images import ImageInput, read_input
from matcher.localization.map import Map
from matcher.match.retrieval import Vocabulary, learn_vocabulary
from matcher.match.steering import STEERABLE, best_turn, rotated_descriptors, turned
from matcher.pipeline import Mask, Pipeline
from matcher.presets import DEFAULT_PRESET, LoadOptions, given_options
from matcher.processes import one_core_free
from matcher.sequence import background
from matcher.sequence.background import LatePoses, LocalizedFrame, OrderedWork, Timing, moved_from, unit_of
from matcher.sequence.capture import write_tum
from matcher.sequence.frames import (
    KEPT,
    FrameLinks,
    FrameResult,
    KeptFrames,
    PlacedFrame,
    StageTimes,
    count_keyframes,
    read_kept,
    write_image,
    write_kept,
)
from matcher.sequence.keyframes import MIN_LINKS, KeptFrame, Linker
from matcher.sequence.loops import (
    FRAMES,
    GRAPH,
    MODEL,
    ClosedTrajectory,
    Closing,
    Loop,
    PoseGraph,
    carried,
    name_of,
)
from matcher.types import Features, Matches

# --- keyframe_map: Keyframes of a sequence as a map: loops are closed, points triangulated, and later runs
# localised in it.

LOOPS, TRAJECTORY, PLOT = "loops.json", "trajectory.tum", "trajectory.png"
LoopTiming = Literal["end", "background", "inline"]
LOOP_TIMINGS: tuple[LoopTiming, ...] = ("end", "background", "inline")
_EVERY = 5  # keyframes, after which loops are looked for
_KEPT_EVERY, _GROWN = 4, 1.05  # keyframes, and times as many frames, after which poses are kept


class KeyframeMap:
    """Collects keyframes in a folder; `finish` makes the map.

    Memory holds poses only, and every few keyframes they are written beside the frames: of a program that was
    killed `resume` finishes the map. Where loops are looked for in the background, images are written there
    too, by a thread, so that a keyframe takes no longer than another frame. A mask is kept as transparency.

        >>> import matcher
        >>> camera = matcher.Camera(700, 700, 320, 240, size=(640, 480))
        >>> keyframes = matcher.KeyframeMap("map", camera)
        >>> keyframes.folder.name
        'map'
    """

    def __init__(
        self,
        folder: str | Path,
        camera: Camera,
        preset: str = DEFAULT_PRESET,
        *,
        loops: LoopTiming = "end",
        overwrite: bool = False,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Set up; the folder is made with the first keyframe.

        Args:
            folder: of the map; it must not exist, or be empty.
            camera: of the frames (or fx, fy, cx, cy, or K (3, 3)), which have one size; it is kept as it is.
            preset, options: of the map's features, as of `Collection.open`; photos are localised with them.
            loops: when they are looked for: at the "end", or after every few keyframes, in the "background"
                (in a process that computes only while a core is free; a `Tracker` leaves it one, unless
                OMP_NUM_THREADS says how many threads to use: with as many as cores a frame may take half a
                second) or "inline" (while tracking waits; the same result every time). `closed` then tells
                what is known.
            overwrite: the folder may hold files; those of an earlier map are replaced.

        Raises:
            UsageError: a folder or a timing that cannot be used.
        """
        camera = as_camera(camera)
        self.folder, self.camera = Path(folder), camera
        if loops not in LOOP_TIMINGS:
            raise UsageError(f"loops must be {', '.join(LOOP_TIMINGS)}, not {loops!r}")
        # What alpha of a frame is a mask, is that of its keyframe on the disk, and nothing else is.
        alpha = given_options({"alpha_mask": options.pop("alpha_mask", None)})
        self._alpha_mask = alpha.get("alpha_mask", True)
        check_folder(self.folder, overwrite=overwrite)
        (self.folder / KEPT).unlink(missing_ok=True)
        self._graph = PoseGraph(self.folder.absolute(), camera, preset, dict(options), overwrite)
        self._search = None if loops == "end" else background.start(self._graph, loops)
        self._work, self._written = OrderedWork(beside=loops == "background"), set[int]()
        self._due: int | None = None  # the keyframe with which loops are looked for again
        self._closing: Closing | None = None
        self.problem: str | None = None  # why loops are not looked for before the end
        self._placed: list[PlacedFrame] = []
        self._keyframe: int | None = None
        self._kept = 0  # frames that are on the disk

    @classmethod
    def resume(cls, folder: str | Path) -> KeyframeMap:
        """A map whose program ended before it was finished, with the frames that were kept.

        Raises:
            UsageError: the folder holds no unfinished map.
            IntegrityError: what was kept is damaged.
        """
        kept = read_kept(Path(folder))
        made = cls.__new__(cls)
        made.folder, made.camera, made.problem = Path(folder), kept.camera, None
        made._graph = PoseGraph(made.folder.absolute(), kept.camera, kept.preset, kept.options)
        made._search, made._due, made._closing, made._placed = None, None, None, kept.frames
        made._work, made._written = OrderedWork(beside=False), {p.keyframe for p in kept.frames}
        made._keyframe, made._kept, made._alpha_mask = None, len(kept.frames), True
        return made

    @property
    def beside(self) -> bool:
        """Whether loops are looked for in a process beside this one."""
        return self._search is not None and self._search.beside and self.problem is None

    @property
    def closed(self) -> ClosedTrajectory | None:
        """The trajectory with the loops found so far, None before the first; `OSError` as of `add`."""
        self._take()
        if self._closing is None:
            return None
        return self._trajectory(self._closing.world_from_cam, self._closing.loops)

    def add(self, result: FrameResult, image: ImageInput | None, *, mask: Mask | None = None) -> None:
        """Take in the next frame that a `Tracker` has seen; the image of a keyframe is written.

        Frames without a measured pose, which follow a loss of tracking, are left out. The mask is that of
        `Tracker.push`.

        Raises:
            ImageError: the image cannot be read.
            OSError: the folder cannot be written; this may be said at a later frame, and frames of which the
                keyframe is not on the disk are left out of the map.
        """
        if result.pose_status != "ok" or result.world_from_cam is None or image is None:
            return
        if result.is_keyframe or self._keyframe is None:
            shown = read_input(image, resize=None, upright=False, mask=mask, alpha_mask=self._alpha_mask)
            self._write(result.index, np.array(shown.pixels), shown.mask)
            self._keyframe = result.index
        time = float(result.index) if result.timestamp is None else result.timestamp
        pose = np.array(result.world_from_cam, dtype=np.float64)
        self._placed.append(PlacedFrame(result.index, time, pose, self._keyframe))
        if self._keyframe == result.index:
            if self._is_due():
                self._write_kept()
            if count_keyframes(self._placed) % _EVERY == 0:
                self._due = result.index
        if self._due is not None or self._keyframe == result.index:
            self._take()

    def _write(self, index: int, pixels: np.ndarray, mask: np.ndarray | None) -> None:
        def write() -> None:
            self._make_folder()
            write_image(self.folder / FRAMES / name_of(index), pixels, mask)
            self._written.add(index)

        with self._whole():
            self._work.add(write)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Where something could not be written, frames whose keyframe is not on the disk are left out."""
        try:
            yield
        except Exception:
            self._placed = [placed for placed in self._placed if placed.keyframe in self._written]
            self._kept, self._keyframe = 0, None  # the next keyframe is due, whatever is on the disk
            raise

    def _make_folder(self) -> None:
        """Not before there is something to keep: what fails before leaves no folder in the way."""
        (self.folder / FRAMES).mkdir(parents=True, exist_ok=True)

    def _is_due(self) -> bool:
        since = count_keyframes(self._placed[self._kept :])
        return since >= _KEPT_EVERY and len(self._placed) >= _GROWN * self._kept

    def _write_kept(self) -> None:
        kept = KeptFrames(list(self._placed), self.camera, self._graph.preset, self._graph.options)
        with self._whole():
            self._work.add(lambda: write_kept(self.folder, kept))
        self._kept = len(self._placed)

    def keep(self) -> tuple[int, int]:
        """Write the poses so far, also as the trajectory, for `resume`; the numbers of frames and keyframes.

        Raises:
            OSError: the disk is full.
        """
        self._make_folder()
        self._write_kept()
        with self._whole():
            self._work.wait()
        poses = [frame.world_from_cam for frame in self._placed]
        write_tum(self.folder / TRAJECTORY, [frame.time for frame in self._placed], poses)
        return len(self._placed), count_keyframes(self._placed)

    def finish(self, *, close_loops: bool = True) -> ClosedTrajectory:
        """Match the keyframes, close loops, make the model, and write the trajectory, its plot and the loops.

        Args:
            close_loops: optimise the graph of poses where loops are found; otherwise, and where that fails
                (`ClosedTrajectory.problem`), they only share points.

        Raises:
            UsageError: fewer than three keyframes have a pose, or pycolmap is absent.
            ReconstructionError: COLMAP finds no points.
            OSError: the disk is full.
        """
        self.close()
        self.keep()
        tracked = self._tracked()
        if len(tracked) < 3:
            raise UsageError(
                f"a map needs at least three keyframes with a pose, not {len(tracked)}: track more frames, "
                "or a camera that moves further"
            )
        collection = self._graph.match(sorted(tracked))
        loops = self._graph.loops(collection, tracked)
        adjusted = self._graph.model(collection, tracked, loops if close_loops else ())
        for left in self.folder.glob(f"{GRAPH}*"):
            shutil.rmtree(left, ignore_errors=True)
        said = dict(problem=self._graph.unclosed, alike=len(self._graph.alike))
        closed = replace(self._trajectory(adjusted, loops), **said)
        write_tum(self.folder / TRAJECTORY, closed.timestamps.tolist(), list(closed.after))
        rows = [{"frames": loop[:2], "inliers": loop[2]} for loop in closed.loops]
        write_whole(self.folder / LOOPS, json.dumps(rows, indent=1).encode())
        closed.plot(self.folder / PLOT)
        (self.folder / KEPT).unlink(missing_ok=True)
        return closed

    def close(self) -> None:
        """End the search for loops; what is matched stays in the folder."""
        if self._search is not None:
            self._search.close()
            self._search = None

    def _take(self) -> None:
        """Take what the search has found, and give it more; where it fails, loops are found at the end."""
        if self._search is None:
            return
        with self._whole():
            self._work.is_done()  # or something has failed
        try:
            if self._due in self._written:
                self._due = None
                poses = self._tracked()
                self._search.offer({index: poses[index] for index in poses if index in self._written})
            for closing in self._search.answers():
                self._closing = closing or self._closing
        except (MatcherError, OSError) as error:
            self.problem = str(error)
        self.problem = self.problem or self._search.problem

    def _tracked(self) -> dict[int, np.ndarray]:
        """The poses of the keyframes."""
        return {p.index: p.world_from_cam for p in self._placed if p.index == p.keyframe}

    def _trajectory(self, adjusted: dict[int, np.ndarray], loops: tuple[Loop, ...]) -> ClosedTrajectory:
        """Every frame moves with its keyframe; those of keyframes without an adjusted pose stay."""
        rows = [(placed.keyframe, placed.world_from_cam) for placed in self._placed]
        return ClosedTrajectory(
            frames=np.array([placed.index for placed in self._placed], dtype=np.int64),
            timestamps=np.array([placed.time for placed in self._placed]),
            before=np.array([placed.world_from_cam for placed in self._placed]),
            after=carried(rows, self._tracked(), adjusted),
            loops=loops,
            folder=self.folder / MODEL,
        )


# --- tracker_maps: What a tracker does with maps: it makes one of its keyframes, and is localised in one
# that exists.


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


# --- relocalisation: Which keyframe shows the same place: candidates by a global descriptor, verified by
# matching.

MatchPairs = Callable[[Sequence[tuple[Features, Features]]], list[Matches]]
_WORDS, _SAMPLE = 64, 4096  # enough for the few dozen keyframes of a window, and learned in milliseconds


class KeyframeIndex:
    """Global descriptors (VLAD) of keyframes, over a vocabulary learned from those that are kept.

    The vocabulary is learned when it is first asked for, and again when half of what it came from is gone.
    """

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._learned_from: frozenset[int] = frozenset()
        self._described: dict[int, np.ndarray] = {}  # keyframe → global descriptor

    def candidates(self, frame: KeptFrame, keyframes: Sequence[KeptFrame], count: int) -> list[KeptFrame]:
        """At most `count` of the keyframes, the one that looks most like the frame first."""
        keyframes = [keyframe for keyframe in keyframes if len(keyframe.descriptors)]
        if not keyframes or len(frame.descriptors) == 0:
            return []
        self._learn(keyframes)
        present = {keyframe.index for keyframe in keyframes}
        self._described = {index: row for index, row in self._described.items() if index in present}
        for keyframe in keyframes:
            if keyframe.index not in self._described:
                self._described[keyframe.index] = self._vocabulary.describe(keyframe.descriptors)
        shown = rotated_descriptors(frame.descriptors, frame.features.kind)
        queries = np.stack([self._vocabulary.describe(position) for position in shown])
        similarity = np.stack([queries @ self._described[k.index] for k in keyframes]).max(1)
        return [keyframes[i] for i in np.argsort(-similarity, kind="stable")[:count]]

    def _learn(self, keyframes: Sequence[KeptFrame]) -> None:
        present = frozenset(keyframe.index for keyframe in keyframes)
        if self._vocabulary is not None and 2 * len(present & self._learned_from) >= len(present):
            return
        share = max(1, _SAMPLE // len(keyframes))
        rng = np.random.default_rng(0)
        samples = [k.descriptors[rng.permutation(len(k.descriptors))[:share]] for k in keyframes]
        self._vocabulary = learn_vocabulary(np.concatenate(samples), words=_WORDS)
        self._learned_from, self._described = present, {}


def verify_candidates(
    match: MatchPairs, linker: Linker, frame: KeptFrame, candidates: Sequence[KeptFrame]
) -> tuple[KeptFrame, FrameLinks] | None:
    """The candidate that most points of the frame agree with in one epipolar geometry, and the links to it.

    None where no candidate has `MIN_LINKS` consistent ones.
    """
    if not candidates or len(frame.keypoints) == 0:
        return None
    pairs = [(candidate.features, frame.features) for candidate in candidates]
    best: tuple[KeptFrame, FrameLinks] | None = None
    most = MIN_LINKS - 1
    for candidate, matches in zip(candidates, match(pairs), strict=True):
        links, _ = linker.verify(candidate, _facing(candidate, frame), matches)
        if (agreeing := int(links.consistent.sum())) > most:
            best, most = (candidate, links), agreeing
    return best


def _facing(candidate: KeptFrame, frame: KeptFrame) -> KeptFrame:
    """The frame with descriptors turned as the candidate is."""
    if frame.features.kind != STEERABLE or 0 in (len(candidate.descriptors), len(frame.descriptors)):
        return frame
    turn = best_turn(candidate.descriptors, frame.descriptors)
    return replace(frame, descriptors=turned(frame.descriptors, turn))


# --- map_tracking: A sequence in a map that exists: some frames are localised in it, the others follow by
# tracking.

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
