"""Keyframes of a sequence as a map: loops are closed, points triangulated, and later runs localised in it.

While a sequence is tracked, keyframes are only written to a folder. Afterwards each is matched with its
neighbours in time and with those that look most like it. Verified pairs far apart in time are loops. With
loops, COLMAP's global mapper optimises the graph of relative poses, by rotation averaging and global
positioning (GLOMAP, Pan et al. 2024); without, bundle adjustment starts from the tracked poses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import cv2
import numpy as np

from matcher.collection.collection import Collection
from matcher.collection.exporting.cameras import CameraChoice
from matcher.collection.exporting.output import check_folder
from matcher.collection.reconstruction.given_poses import GivenPoses
from matcher.collection.reconstruction.reconstruct import ReconstructionError, reconstruct
from matcher.data.camera import Camera
from matcher.data.images import ImageInput, read_image
from matcher.errors import UsageError
from matcher.files import write_whole
from matcher.options import LoadOptions
from matcher.presets import DEFAULT_PRESET
from matcher.sequence.frames import FrameResult
from matcher.sequence.trajectory import write_tum

FRAMES, RUN, MODEL = "frames", "model-run", "model"
LOOPS, TRAJECTORY, PLOT = "loops.json", "trajectory.tum", "trajectory.png"
_NEXT, _SIMILAR = 4, 4  # keyframes that each is matched with, by time and by their looks
_LOOP_INLIERS = 40  # of a pair that closes a loop


@dataclass(frozen=True, eq=False)
class ClosedTrajectory:
    """The poses of all frames that had one, before and after their keyframes were adjusted."""

    frames: np.ndarray  # (F,) int64 indices of the frames
    timestamps: np.ndarray  # (F,) seconds; a frame's index where it has none
    before: np.ndarray  # (F, 4, 4) world_from_cam as tracked
    after: np.ndarray  # (F, 4, 4) the same, adjusted
    loops: tuple[tuple[int, int, int], ...]  # two keyframes, by their frames, and the inliers between them
    folder: Path  # of the model, for `Map.open`

    def plot(self, path: str | Path) -> Path:
        """Draw both paths from above and how far each pose was moved, as a PNG."""
        from matcher.sequence.closing_plot import plot_closing

        rows = {index: row for row, index in enumerate(self.frames.tolist())}
        loops = [(rows[first], rows[second]) for first, second, _ in self.loops]
        return plot_closing(Path(path), self.before, self.after, loops)

    def moved(self) -> np.ndarray:
        """(F,) how far each pose was moved."""
        return np.linalg.norm(self.after[:, :3, 3] - self.before[:, :3, 3], axis=1)


@dataclass(frozen=True, eq=False)
class _Placed:
    """A frame with a pose, and the keyframe that it moves with."""

    index: int
    time: float
    world_from_cam: np.ndarray
    keyframe: int


class KeyframeMap:
    """Collects keyframes in a folder; `finish` makes the map.

    Memory holds poses only. A program that is interrupted loses the map, not the frames.

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
        """Set up; the folder is made.

        Args:
            folder: of the map; it must not exist, or be empty.
            camera: of the frames, which have one size; it is kept as it is.
            preset, options: of the map's features, as of `Collection.open`; photos are localised with them.
            overwrite: the folder may hold files; those of an earlier map are replaced.

        Raises:
            UsageError: a folder that cannot be used.
        """
        self.folder, self.camera = Path(folder), camera
        self._preset, self._options, self._overwrite = preset, options, overwrite
        check_folder(self.folder, overwrite=overwrite)
        (self.folder / FRAMES).mkdir(parents=True, exist_ok=True)
        self._placed: list[_Placed] = []
        self._keyframe: int | None = None

    def add(self, result: FrameResult, image: ImageInput | None) -> None:
        """Take in the next frame that a `Tracker` has seen; the image of a keyframe is written.

        Frames without a measured pose, which follow a loss of tracking, are left out.

        Raises:
            ImageError: the image cannot be read.
            OSError: the folder cannot be written.
        """
        if result.pose_status != "ok" or result.world_from_cam is None or image is None:
            return
        if result.is_keyframe or self._keyframe is None:
            pixels = read_image(image, resize=None, upright=False).pixels
            colour = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
            write_whole(self._path(result.index), cv2.imencode(".png", colour)[1].tobytes())
            self._keyframe = result.index
        time = float(result.index) if result.timestamp is None else result.timestamp
        pose = np.array(result.world_from_cam, dtype=np.float64)
        self._placed.append(_Placed(result.index, time, pose, self._keyframe))

    def finish(self, *, close_loops: bool = True) -> ClosedTrajectory:
        """Match the keyframes, close loops, make the model, and write the trajectory, its plot and the loops.

        Args:
            close_loops: optimise the graph of poses where loops are found; otherwise they only share points.

        Raises:
            UsageError: fewer than three keyframes have a pose, or pycolmap is absent.
            ReconstructionError: COLMAP finds no points.
            OSError: the disk is full.
        """
        keyframes = sorted({placed.keyframe for placed in self._placed})
        if len(keyframes) < 3:
            raise UsageError(f"a map needs at least three keyframes with a pose, not {len(keyframes)}")
        tracked = {p.index: p.world_from_cam for p in self._placed if p.index == p.keyframe}
        collection = self._match()
        loops = self._loops(collection, keyframes)
        adjusted = self._adjust(collection, tracked, closing=close_loops and bool(loops))
        closed = self._trajectory(tracked, adjusted, loops)
        write_tum(self.folder / TRAJECTORY, closed.timestamps.tolist(), list(closed.after))
        rows = [{"frames": loop[:2], "inliers": loop[2]} for loop in closed.loops]
        write_whole(self.folder / LOOPS, json.dumps(rows, indent=1).encode())
        closed.plot(self.folder / PLOT)
        return closed

    def _path(self, index: int) -> Path:
        return self.folder / FRAMES / _name(index)

    def _match(self) -> Collection:
        """The keyframes, matched with their neighbours and with similar ones."""
        collection = Collection.open(self.folder / RUN, preset=self._preset, workers=0, **self._options)
        names = [_name(index) for index in sorted({placed.keyframe for placed in self._placed})]
        collection.add_images(self.folder / FRAMES, include=names, restart=self._overwrite)
        collection.add_pairs(sequential=_NEXT)
        collection.add_pairs(similar=_SIMILAR)
        collection.run()
        return collection

    def _loops(self, collection: Collection, keyframes: list[int]) -> tuple[tuple[int, int, int], ...]:
        """Verified pairs of keyframes that are not neighbours in time."""
        rank = {_name(index): place for place, index in enumerate(keyframes)}
        found = []
        for pair in collection:
            ends = rank[pair.name0], rank[pair.name1]
            inliers = int(pair.geometry.inliers.sum())
            apart = abs(ends[1] - ends[0]) > _NEXT
            if apart and pair.geometry.status == "ok" and inliers >= _LOOP_INLIERS:
                found.append((keyframes[ends[0]], keyframes[ends[1]], inliers))
        return tuple(sorted(found))

    def _adjust(
        self, collection: Collection, tracked: dict[int, np.ndarray], *, closing: bool
    ) -> dict[int, np.ndarray]:
        """The keyframes' adjusted poses world_from_cam, of a model in the coordinates of the first one."""
        start = {_name(index): np.linalg.inv(pose) for index, pose in tracked.items()}
        cameras = dict.fromkeys(start, self.camera)
        out = self.folder / MODEL
        with collection.store as store:
            if closing:
                choice = CameraChoice(camera=self.camera)
                made = reconstruct(store, out, choice=choice, mapper="global", threads=1, overwrite=True)
                found = made.largest.cam_from_world
                start = _in_tracked_coordinates(start, found)
                poses = GivenPoses(start, cameras, fixed=True)
            else:
                poses = GivenPoses(start, cameras, fixed=False)
            made = reconstruct(
                store, out, choice=CameraChoice(camera=self.camera), poses=poses, threads=1, overwrite=True
            )
        index_of = {_name(index): index for index in tracked}
        found = {name: np.vstack([pose, [0, 0, 0, 1]]) for name, pose in made.largest.cam_from_world.items()}
        return {index_of[name]: np.linalg.inv(pose) for name, pose in found.items()}

    def _trajectory(
        self,
        tracked: dict[int, np.ndarray],
        adjusted: dict[int, np.ndarray],
        loops: tuple[tuple[int, int, int], ...],
    ) -> ClosedTrajectory:
        """Every frame moves with its keyframe; those of keyframes that the model lacks stay."""
        moved = {index: adjusted.get(index, pose) @ np.linalg.inv(pose) for index, pose in tracked.items()}
        return ClosedTrajectory(
            frames=np.array([placed.index for placed in self._placed], dtype=np.int64),
            timestamps=np.array([placed.time for placed in self._placed]),
            before=np.array([placed.world_from_cam for placed in self._placed]),
            after=np.array([moved[placed.keyframe] @ placed.world_from_cam for placed in self._placed]),
            loops=loops,
            folder=self.folder / MODEL,
        )


def _name(index: int) -> str:
    return f"{index:06d}.png"


def _in_tracked_coordinates(
    tracked: dict[str, np.ndarray], found: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Poses cam_from_world of a model whose first camera and scale are made those of the tracked ones.

    The scale is the median of the ratios of neighbouring keyframes' distances, which drift changes least.

    Raises:
        ReconstructionError: fewer than two keyframes are in the model.
    """
    names = [name for name in sorted(tracked) if name in found]
    if len(names) < 2:
        raise ReconstructionError("the graph of poses connects fewer than two keyframes")
    wanted = np.array([np.linalg.inv(tracked[name]) for name in names])
    given = np.array([np.linalg.inv(np.vstack([found[name], [0, 0, 0, 1]])) for name in names])
    steps = [np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1) for poses in (wanted, given)]
    usable = steps[1] > 1e-9
    scale = float(np.median(steps[0][usable] / steps[1][usable])) if usable.any() else 1.0
    given[:, :3, 3] *= scale
    start = wanted[0] @ np.linalg.inv(given[0])
    return {name: np.linalg.inv(start @ pose) for name, pose in zip(names, given, strict=True)}
