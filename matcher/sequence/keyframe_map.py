"""Keyframes of a sequence as a map: loops are closed, points triangulated, and later runs localised in it.

While a sequence is tracked, keyframes are written to a folder, and poses beside them every few keyframes, so
that the map of a program that was killed can still be made. At the end `loops.py` makes the model of them.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import cv2
import numpy as np

from matcher.cameras import Camera, as_camera
from matcher.errors import MALFORMED, IntegrityError, MatcherError, UsageError
from matcher.files import check_folder, write_whole
from matcher.geometry import check_poses
from matcher.images import ImageInput, read_image
from matcher.localization.map import Map
from matcher.pipeline import Mask
from matcher.presets import DEFAULT_PRESET, LoadOptions, given_options
from matcher.sequence.frames import FrameResult
from matcher.sequence.loops import FRAMES, MODEL, ClosedTrajectory, KeyframeGraph, carried, name_of
from matcher.sequence.trajectory import write_trajectory

KEPT = "tracked.npz"  # in the folder of a map that is not finished
LOOPS, TRAJECTORY, PLOT = "loops.json", "trajectory.tum", "trajectory.png"


# --- What is kept of a map that is being made: images of keyframes, and all poses in one file; always whole.


class PlacedFrame(NamedTuple):
    """A frame with a pose, and the keyframe that it moves with."""

    index: int
    time: float
    world_from_cam: np.ndarray  # (4, 4)
    keyframe: int


class KeptFrames(NamedTuple):
    """Frames of a map that is not finished, and what its features are found with."""

    frames: list[PlacedFrame]
    camera: Camera
    preset: str
    options: dict[str, Any]  # of `matcher.load`


def read_kept(folder: Path) -> KeptFrames:
    """What `KeyframeMap.keep` wrote; `UsageError`: there is none, `IntegrityError`: it is damaged."""
    path = folder / KEPT
    if not path.is_file():
        raise UsageError(f"{folder} holds no unfinished map (no {KEPT})")
    try:
        if path.stat().st_size > 1 << 31:
            raise ValueError("it is too large")
        with np.load(path) as rows:
            # We write without compression, so what unpacks to more than the file is not ours.
            if sum(each.file_size for each in rows.zip.infolist()) > path.stat().st_size:
                raise ValueError("it unpacks to more than it may")
            index, time, poses, keyframe = (rows[name] for name in PlacedFrame._fields)
            facts = json.loads(str(rows["facts"]))
        if poses.shape != (len(index), 4, 4) or not len(index) == len(time) == len(keyframe):
            raise ValueError("its arrays do not fit each other")
        check_poses(poses)
        camera = Camera(**facts["camera"] | {"distortion": tuple(facts["camera"]["distortion"])})
        preset, options = str(facts["preset"]), dict(facts["options"])
    except (*MALFORMED, zipfile.BadZipFile, zlib.error) as error:
        raise IntegrityError(f"{path}: the poses of the unfinished map are damaged ({error})") from error
    rows = zip(index.tolist(), time.tolist(), poses, keyframe.tolist(), strict=True)
    return KeptFrames([PlacedFrame(*row) for row in rows], camera, preset, options)


class KeyframeMap:
    """Collects keyframes in a folder; `finish` makes the map.

    Memory holds poses only, and every few keyframes they are written beside the images: of a program that was
    killed `resume` finishes the map. A mask is kept as transparency.

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
        overwrite: bool = False,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Set up; the folder is made with the first keyframe.

        Args:
            folder: of the map; it must not exist, or be empty.
            camera: of the frames (or fx, fy, cx, cy, or K (3, 3)), which have one size; it is kept as it is.
            preset, options: of the map's features, as of `Collection.open`; photos are localised with them.
            overwrite: the folder may hold files; those of an earlier map are replaced.

        Raises:
            UsageError: a folder or an option that cannot be used.
        """
        self.folder, self.camera = Path(folder), as_camera(camera)
        # What alpha of a frame is a mask, is that of its keyframe on the disk, and nothing else is.
        alpha = given_options({"alpha_mask": options.pop("alpha_mask", None)})
        self._alpha_mask = alpha.get("alpha_mask", True)
        check_folder(self.folder, overwrite=overwrite)
        (self.folder / KEPT).unlink(missing_ok=True)
        self._graph = KeyframeGraph(self.folder.absolute(), self.camera, preset, dict(options), overwrite)
        self._placed: list[PlacedFrame] = []
        self._keyframe: int | None = None
        self._kept = 0  # frames that are on the disk

    @classmethod
    def resume(cls, folder: str | Path) -> KeyframeMap:
        """A map whose program ended before it was finished, with the frames that were kept.

        Raises:
            UsageError, IntegrityError: the folder holds no unfinished map, or a damaged one.
        """
        folder, kept = Path(folder), read_kept(Path(folder))
        made = cls.__new__(cls)
        made.folder, made.camera, made._alpha_mask = folder, kept.camera, True
        made._graph = KeyframeGraph(folder.absolute(), kept.camera, kept.preset, kept.options)
        made._placed, made._keyframe, made._kept = kept.frames, None, len(kept.frames)
        return made

    def add(self, result: FrameResult, image: ImageInput | None, *, mask: Mask | None = None) -> None:
        """Take in the next frame that a `Tracker` has seen; the image of a keyframe is written.

        Frames without a measured pose are left out. The mask is that of `Tracker.push`.

        Raises:
            ImageError: the image cannot be read.
            OSError: the folder cannot be written; the next frame becomes a keyframe in the place of this one.
        """
        if not result.is_measured or image is None:
            return
        if result.is_keyframe or self._keyframe is None:
            self._keyframe = None
            shown = read_image(image, resize=None, upright=False, mask=mask, alpha_mask=self._alpha_mask)
            # Not before there is something to keep: what fails before leaves no folder in the way.
            (self.folder / FRAMES).mkdir(parents=True, exist_ok=True)
            colour = shown.pixels if shown.pixels.ndim == 2 else cv2.cvtColor(shown.pixels, cv2.COLOR_RGB2BGR)
            if shown.mask is not None:
                colour = np.dstack([colour] * 3) if colour.ndim == 2 else colour
                colour = np.dstack([colour, np.where(shown.mask, np.uint8(255), np.uint8(0))])
            # The least compression takes a fifth of the time, for a seventh more bytes.
            png = cv2.imencode(".png", colour, (cv2.IMWRITE_PNG_COMPRESSION, 1))[1].tobytes()
            write_whole(self.folder / FRAMES / name_of(result.index), png)
            self._keyframe = result.index
        time = float(result.index) if result.timestamp is None else result.timestamp
        pose = np.array(result.world_from_cam, dtype=np.float64)
        self._placed.append(PlacedFrame(result.index, time, pose, self._keyframe))
        since = len(_keyframes(self._placed[self._kept :]))
        # Rarer as there are more, so that writing them all takes a share of the time that stays small.
        if self._keyframe == result.index and since >= 4 and len(self._placed) >= 1.05 * self._kept:
            self._write_kept()

    def _write_kept(self) -> None:
        graph, buffer = self._graph, io.BytesIO()
        facts = {"camera": asdict(self.camera), "preset": graph.preset, "options": graph.options}
        rows = {name: [getattr(frame, name) for frame in self._placed] for name in PlacedFrame._fields}
        rows["world_from_cam"] = np.reshape(rows["world_from_cam"], (-1, 4, 4))
        np.savez(buffer, **rows, facts=np.array(json.dumps(facts, default=str)))
        write_whole(self.folder / KEPT, buffer.getvalue())
        self._kept = len(self._placed)

    def keep(self) -> tuple[int, int]:
        """Write the poses so far, also as the trajectory, for `resume`; the numbers of frames and keyframes.

        Raises:
            OSError: the disk is full.
        """
        (self.folder / FRAMES).mkdir(parents=True, exist_ok=True)
        self._write_kept()
        poses = [frame.world_from_cam for frame in self._placed]
        write_trajectory(self.folder / TRAJECTORY, [frame.time for frame in self._placed], poses)
        return len(self._placed), len(_keyframes(self._placed))

    def finish(self, *, close_loops: bool = True) -> ClosedTrajectory:
        """Match the keyframes, close loops, make the model, and write the trajectory, its plot and the loops.

        It may be called again after more frames; what is matched stays in the folder.

        Args:
            close_loops: bring the ends of loops together where their matches say so; otherwise, and where
                that makes nothing better (`ClosedTrajectory.problem`), the tracked poses are adjusted.

        Raises:
            UsageError: fewer than three keyframes have a pose, or pycolmap is absent.
            ReconstructionError: COLMAP finds no points.
            OSError: the disk is full.
        """
        self.keep()
        tracked = _keyframes(self._placed)
        if len(tracked) < 3:
            raise UsageError(
                f"a map needs at least three keyframes with a pose, not {len(tracked)}: track more frames, "
                "or a camera that moves further"
            )
        collection = self._graph.match(sorted(tracked))
        loops = self._graph.loops(collection, tracked)
        adjusted = self._graph.model(collection, tracked, loops if close_loops else ())
        closed = ClosedTrajectory(
            frames=np.array([placed.index for placed in self._placed], dtype=np.int64),
            timestamps=np.array([placed.time for placed in self._placed]),
            before=np.array([placed.world_from_cam for placed in self._placed]),
            after=carried([placed[2:] for placed in self._placed], tracked, adjusted),
            loops=loops,
            folder=self.folder / MODEL,
            problem=self._graph.open_because,
            alike=len(self._graph.alike),
        )
        write_trajectory(self.folder / TRAJECTORY, closed.timestamps.tolist(), list(closed.after))
        rows = [{"frames": loop[:2], "inliers": loop[2]} for loop in closed.loops]
        write_whole(self.folder / LOOPS, json.dumps(rows, indent=1).encode())
        closed.plot(self.folder / PLOT)
        (self.folder / KEPT).unlink(missing_ok=True)
        return closed


def _keyframes(frames: Sequence[PlacedFrame]) -> dict[int, np.ndarray]:
    return {frame.index: frame.world_from_cam for frame in frames if frame.index == frame.keyframe}


# --- A sequence in a map that exists: some frames are localised in it, the others follow by tracking.


class LocalizedFrame(NamedTuple):
    """A frame that was localised in the map."""

    index: int
    world_from_cam: np.ndarray  # (4, 4), in the coordinates of tracking
    map_from_cam: np.ndarray  # (4, 4), in those of the map
    deviation: float  # standard deviation of its position, the map's units


class MapTracking:
    """Where the frames of a sequence are in a map.

    Tracking has coordinates of its own and, with one camera, a unit of its own. Keyframes are localised, and
    every frame until the first is. Two of them that are far enough apart say how long the unit is; the last
    one says where the frames after it are, so drift does not add up.
    """

    def __init__(self, folder: str | Path, *, measured: bool, **options: Unpack[LoadOptions]) -> None:
        """Open a map with the arguments and errors of `Map.open`.

        Where tracking has `measured` distances, its unit is taken to be the map's until frames say it.
        """
        self._map = Map.open(Path(folder), **options)
        self._unit = 1.0 if measured else None  # length of tracking's unit in the map's, as far as assumed
        # Between two losses of tracking coordinates are one system: the frames that were localised in it, and
        # world_from_cam by frame of those whose place was not known in time.
        self._stretches: list[tuple[list[LocalizedFrame], dict[int, np.ndarray]]] = [([], {})]
        self.problem: str | None = None  # why a frame could not be looked up

    @property
    def localized(self) -> int:
        """Frames that were localised."""
        return sum(len(localized) for localized, _ in self._stretches)

    def follow(
        self, result: FrameResult, image: ImageInput, *, mask: Mask | None = None, alpha_mask: bool = True
    ) -> np.ndarray | None:
        """map_from_cam (4, 4) of the next frame that was tracked, None where it is not known."""
        if result.status == "lost":
            self._stretches.append(([], {}))
        if not result.is_measured:
            return None
        localized, unplaced = self._stretches[-1]
        if result.is_keyframe or not localized:
            try:
                shown = read_image(image, resize=None, upright=False, mask=mask, alpha_mask=alpha_mask)
                pose = self._map.localize(shown.pixels, result.camera, mask=shown.mask)
            except (MatcherError, OSError) as error:
                self.problem, pose = self.problem or str(error), None
            if pose is not None and pose.ok:
                place, spread = np.linalg.inv(pose.cam_from_world), pose.covariance
                deviation = np.inf if spread is None else float(np.sqrt(np.trace(spread[3:, 3:])))
                localized.append(LocalizedFrame(result.index, result.world_from_cam, place, deviation))
        pose = self._moved(localized[-12:], -1, result.world_from_cam)
        if pose is None:
            unplaced[result.index] = result.world_from_cam
        return pose

    def _moved(self, localized: list[LocalizedFrame], near: int, pose: np.ndarray) -> np.ndarray | None:
        """map_from_cam (4, 4) of a frame by its pose in tracking; None where a unit is needed and unknown.

        The unit is that of the `localized` frames, where two are far enough apart to say it; the frame has
        moved from the one in row `near`.
        """
        if not localized:
            return None
        ratios = []
        for before, after in pairwise(localized):
            there = np.linalg.norm(after.map_from_cam[:3, 3] - before.map_from_cam[:3, 3])
            here = np.linalg.norm(after.world_from_cam[:3, 3] - before.world_from_cam[:3, 3])
            if here > 0 and there > 2 * np.hypot(before.deviation, after.deviation):
                ratios.append(there / here)
        unit = float(np.median(ratios)) if ratios else self._unit
        step = np.linalg.inv(localized[near].world_from_cam) @ pose
        if unit is None and np.linalg.norm(step[:3, 3]) > 0:
            return None
        step[:3, 3] *= 1.0 if unit is None else unit
        return localized[near].map_from_cam @ step

    def late_poses(self) -> dict[int, np.ndarray]:
        """map_from_cam (4, 4) by frame, where `follow` knew none, from what is known by now."""
        found = {}
        for localized, unplaced in self._stretches:
            first = localized[:12]
            for index, pose in unplaced.items():
                near = int(np.argmin([abs(each.index - index) for each in first])) if first else 0
                if (placed := self._moved(first, near, pose)) is not None:
                    found[index] = placed
        return found

    def close(self) -> None:
        """Close the map."""
        self._map.close()
