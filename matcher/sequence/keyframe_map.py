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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

import numpy as np

from matcher.collection.exporting.output import check_folder
from matcher.data.camera import Camera, as_camera
from matcher.data.images import ImageInput, read_input
from matcher.errors import MatcherError, UsageError
from matcher.files import write_whole
from matcher.options import LoadOptions, given_options
from matcher.pipeline import Mask
from matcher.presets import DEFAULT_PRESET
from matcher.sequence import background
from matcher.sequence.closed_trajectory import ClosedTrajectory
from matcher.sequence.frames import FrameResult
from matcher.sequence.kept_frames import (
    KEPT,
    KeptFrames,
    PlacedFrame,
    count_keyframes,
    read_kept,
    write_image,
    write_kept,
)
from matcher.sequence.ordered_work import OrderedWork
from matcher.sequence.pose_graph import FRAMES, GRAPH, MODEL, Closing, Loop, PoseGraph, carried, name_of
from matcher.sequence.trajectory import write_tum

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
