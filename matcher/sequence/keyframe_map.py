"""Keyframes of a sequence as a map: loops are closed, points triangulated, and later runs localised in it.

While a sequence is tracked, keyframes are written to a folder, and poses beside them every few keyframes; at
the end, or after a kill, they are matched with their neighbours in time and with those that look most like
them. Verified pairs far apart in time are loops where drift can explain them. A graph of the tracked steps
and the loops gives poses, from which COLMAP adjusts everything. Where tracking was lost, the longest stretch
is the map, with those parts of others that verified pairs join to it.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import cv2
import numpy as np
import PIL.Image

from matcher.cameras import Camera, CameraInput, as_camera
from matcher.collection.collection import Collection
from matcher.collection.schema import StoredPair
from matcher.config import EstimationConfig
from matcher.errors import MALFORMED, IntegrityError, MatcherError, UsageError, optional
from matcher.export.colmap import CameraChoice, as_rigid, import_pycolmap
from matcher.files import check_folder, check_output, write_whole
from matcher.geometry import check_poses
from matcher.images import ImageInput, read_image
from matcher.localization.map import Map
from matcher.pipeline import Mask
from matcher.presets import DEFAULT_PRESET, LoadOptions, given_options
from matcher.sequence.frames import FrameResult
from matcher.sequence.trajectory import path_length, write_trajectory
from matcher.sfm.models import GivenPoses
from matcher.sfm.reconstruct import ReconstructionError, reconstruct
from matcher.verify.adjustment import fundamental_from_pose, sampson
from matcher.verify.estimation import RobustEstimator

KEPT = "tracked.npz"  # in the folder of a map that is not finished
LOOPS, TRAJECTORY, PLOT = "loops.json", "trajectory.tum", "trajectory.png"
FRAMES, RUN, MODEL = "frames", "model-run", "model"  # in the folder of a map
NEXT, SIMILAR = 4, 4  # keyframes that each is matched with, by time and by their looks

Loop = tuple[int, int, int]  # two keyframes, by their frames, and the inliers between them


def name_of(index: int) -> str:
    """The file of a keyframe."""
    return f"{index:06d}.png"


def _relative_pose(points0: np.ndarray, points1: np.ndarray, camera: Camera) -> np.ndarray | None:
    estimator = RobustEstimator(EstimationConfig(kind="essential"))
    geometry = estimator(points0, points1, cameras=(camera, camera))
    return geometry.cam1_from_cam0 if geometry.status == "ok" else None


def inliers_of(pair: StoredPair) -> tuple[np.ndarray, np.ndarray]:
    """(M, 2) stored pixels of both images."""
    inliers = pair.geometry.inliers
    return pair.matches.points0[inliers], pair.matches.points1[inliers]


def is_strong(pair: StoredPair) -> bool:
    """Whether a verified pair has inliers enough to join what tracking has apart."""
    return np.count_nonzero(pair.geometry.inliers) >= 40


# --- The graph of keyframes' poses, its edges tracked steps and loops.


LoopEdge = tuple[int, int, np.ndarray]  # two keyframes that show one place, cam1_from_cam0 of length 1


def spread(tracked: Mapping[int, np.ndarray], loops: Sequence[LoopEdge]) -> dict[int, np.ndarray]:
    """World_from_cam (4, 4) by keyframe that agrees best with the tracked steps and the loops. Rotations are
    averaged first, then positions are found by least squares; the first keyframe stays."""
    if not loops:
        raise ReconstructionError("no pair of keyframes that closes a loop has a relative pose")
    if len(tracked) > 2000:  # whose equations take 0.5 GB, three times at once
        raise ReconstructionError(f"{len(tracked)} keyframes are more than the 2000 of a graph of steps")
    keyframes = sorted(tracked)
    edges = [(keyframes.index(first), keyframes.index(second), pose) for first, second, pose in loops]
    poses = np.array([tracked[keyframe] for keyframe in keyframes])
    steps = np.array([(np.linalg.inv(a) @ b)[:3, 3] for a, b in pairwise(poses)])
    poses[:, :3, :3] = _rotations(poses, edges)
    poses[:, :3, 3] = poses[0, :3, 3] + _positions(poses[:, :3, :3], steps, edges)
    return dict(zip(keyframes, poses, strict=True))


def _rotations(poses: np.ndarray, loops: list[LoopEdge]) -> np.ndarray:
    """(N, 3, 3) world_from_cam by COLMAP's rotation averaging, the first as it is."""
    pycolmap = import_pycolmap()
    pycolmap.logging.minloglevel = pycolmap.logging.FATAL.value
    model, graph = pycolmap.Reconstruction(), pycolmap.PoseGraph()
    model.add_camera_with_trivial_rig(pycolmap.Camera.create_from_model_name(1, "SIMPLE_PINHOLE", 1.0, 1, 1))
    inverse = np.linalg.inv(poses)
    for row, pose in enumerate(inverse):
        image = pycolmap.Image(name=str(row), camera_id=1, image_id=row + 1)
        model.add_image_with_trivial_frame(image, as_rigid(pose))
    near = [(row, row + k) for k in (1, 2) for row in range(len(poses) - k)]
    for first, second, pose in [*((a, b, inverse[b] @ poses[a]) for a, b in near), *loops]:
        edge = pycolmap.PoseGraphEdge(as_rigid(pose))
        edge.num_matches = 1
        graph.add_edge(first + 1, second + 1, edge)
    options = pycolmap.RotationEstimatorOptions()
    options.random_seed = 0
    if not pycolmap.run_rotation_averaging(options, graph, model, []):
        raise ReconstructionError("the rotations of the graph of steps could not be averaged")
    found = [model.image(row + 1).cam_from_world().rotation.matrix().T for row in range(len(poses))]
    return poses[0, :3, :3] @ found[0].T @ np.array(found)


def _positions(rotations: np.ndarray, steps: np.ndarray, loops: list[LoopEdge]) -> np.ndarray:
    """(N, 3) positions, the first at 0, by least squares; with each goes the unit of the step after it. A
    step (N − 1, 3) is as tracked in its unit, give or take 3 % of its length; units change by 2 % from step
    to step; a loop says on which line through one camera the other is, give or take three tenths of a median
    step, under a Huber loss."""
    count, lengths = len(rotations), np.linalg.norm(steps, axis=1)
    median = max(float(np.median(lengths)), 1e-9)
    errors, seen = 0.03 * (lengths + 0.2 * median), np.einsum("nij,nj->ni", rotations[:-1], steps)
    first, second, poses = (np.array(each) for each in zip(*loops, strict=True))
    towards = np.einsum("nij,nkj,nk->ni", rotations[first], poses[:, :3, :3], poses[:, :3, 3])
    towards /= np.linalg.norm(towards, axis=1, keepdims=True)

    def residuals(numbers: np.ndarray) -> np.ndarray:
        """(B, R) of B candidates, those of the loops first; linear in the numbers (B, 4 N)."""
        positions, units = numbers[:, : 3 * count].reshape(-1, count, 3), numbers[:, 3 * count :]
        between = positions[:, second] - positions[:, first]
        parts = (
            (between - np.sum(between * towards, axis=2, keepdims=True) * towards) / (0.3 * median),
            (np.diff(positions, axis=1) - units[:, :-1, None] * seen) / errors[:, None],
            np.diff(units) / 0.02,
            positions[:, 0] / median * 100.0,  # so much weighs what is only convention: where the first
            (units.mean(axis=1, keepdims=True) - 1) * 100.0,  # camera is, and the mean unit
        )
        return np.concatenate([part.reshape(len(numbers), -1) for part in parts], axis=1)

    constant = residuals(np.zeros((1, 4 * count)))[0]
    derivatives = (residuals(np.eye(4 * count)) - constant).T
    closing, fixed = np.split(derivatives, [3 * len(loops)])
    equations, wanted = fixed.T @ fixed, -fixed.T @ constant[3 * len(loops) :]
    weights = np.ones(len(loops))
    for _ in range(5):
        weighed = closing * np.repeat(weights, 3)[:, None]
        found = np.linalg.solve(equations + weighed.T @ closing, wanted)
        beside = np.linalg.norm((closing @ found).reshape(-1, 3), axis=1)
        weights = 1 / np.maximum(beside, 1)  # of Huber
    return found[: 3 * count].reshape(-1, 3)


# --- Keyframes on disk: matched with each other, loops found, and everything adjusted.


@dataclass(eq=False)
class KeyframeGraph:
    """Keyframes in a folder, by the indices of their frames; everything that is matched stays there."""

    folder: Path
    camera: Camera
    preset: str
    options: dict[str, Any]  # of `matcher.load`
    overwrite: bool = False
    collection: Collection | None = field(default=None, init=False)  # of `match`
    open_because: str | None = field(default=None, init=False)  # why the last model has its loops left open
    # Verified pairs that cannot show one place, as `loops` has found; no model has them.
    alike: frozenset[tuple[str, str]] = field(default=frozenset(), init=False)

    def match(self, keyframes: list[int]) -> None:
        """Match the keyframes with their neighbours and with similar ones."""
        collection = Collection.open(self.folder / RUN, preset=self.preset, workers=0, **self.options)
        names = [name_of(index) for index in keyframes]
        collection.add_images(self.folder / FRAMES, include=names, restart=self.overwrite)
        self.overwrite = False
        collection.add_pairs(sequential=NEXT)
        collection.add_pairs(similar=SIMILAR)
        collection.run()
        self.collection = collection

    def loops(self, tracked: Mapping[int, np.ndarray]) -> tuple[Loop, ...]:
        """Verified pairs with 40 inliers, far apart in time, that drift explains: it may have put them apart
        by half of the path travelled between them, and turned by 60 degrees. Of the others, those that agree
        with the tracked poses show from afar what comes nearer later; the rest are `alike`, as doors are."""
        keyframes = sorted(tracked)
        poses = np.array([tracked[index] for index in keyframes])
        path, K = path_length(poses), self.camera.K
        found, alike = [], set()
        for pair, first, second in _verified(self.collection, keyframes):
            if abs(second - first) <= NEXT:
                continue
            ends, pose = inliers_of(pair), np.linalg.inv(poses[second]) @ poses[first]
            # Tracking is right where half of the matches are near their lines, by the focal length.
            distances = sampson(*ends, fundamental_from_pose(K, K, pose))
            along = bool((distances < 0.01 * (self.camera.fx + self.camera.fy) / 2).mean() >= 0.5)
            apart = np.linalg.norm(poses[second][:3, 3] - poses[first][:3, 3])
            loop = apart <= 0.5 * float(abs(path[second] - path[first]))
            if loop and not along and (seen := _relative_pose(*ends, self.camera)) is not None:
                turn = np.trace(seen[:3, :3] @ pose[:3, :3].T)
                loop = np.degrees(np.arccos(np.clip((turn - 1) / 2, -1, 1))) < 60
            if loop and is_strong(pair):
                found.append((keyframes[first], keyframes[second], len(ends[0])))
            elif not (loop or along):
                alike.add((pair.name0, pair.name1))
        self.alike = frozenset(alike)
        return tuple(sorted(found))

    def model(
        self, tracked: Mapping[int, np.ndarray], loops: tuple[Loop, ...], without: frozenset = frozenset()
    ) -> dict[int, np.ndarray]:
        """The keyframes' adjusted poses world_from_cam, in the coordinates of the first one. Loops are closed
        where the matches agree better with the closed path than with the tracked one; else all is adjusted
        from the tracked poses, and `open_because` says why. So are keyframes of other stretches that matches
        join to these; `without`: pairs of names that do not."""
        self.open_because, without = None, self.alike | without
        names = {(name_of(first), name_of(second)) for first, second, _ in loops}
        if loops:
            closing = [pair for pair in self.collection if (pair.name0, pair.name1) in names]
            found = [_relative_pose(*inliers_of(pair), self.camera) for pair in closing]
            ends = [(int(Path(pair.name0).stem), int(Path(pair.name1).stem)) for pair in closing]
            edges = [(*both, pose) for both, pose in zip(ends, found, strict=True) if pose is not None]
            try:
                adjusted = self._mapped(spread(tracked, edges), without, fixed=False)
                both = tracked, {index: adjusted[index] for index in adjusted.keys() & tracked.keys()}
                before, after = (self._residuals(each, names) for each in both)
                # Neighbours may fit a little worse, as the errors of the loops are spread over them.
                if after[1] >= 0.9 * before[1] or after[0] > max(2 * before[0], 1.0):
                    self.open_because = (
                        f"closing the loops makes nothing better: their matches are off by {after[1]:.2f} "
                        f"pixels instead of {before[1]:.2f}, those of neighbours by {after[0]:.2f} instead "
                        f"of {before[0]:.2f}"
                    )
            except ReconstructionError as error:
                self.open_because = f"the loops were not closed: {error}"
        if not loops or self.open_because is not None:
            without = without | names
            adjusted = self._mapped(tracked, without, fixed=False)
        # The scale is the median of the ratios of neighbours' distances, which drift changes least.
        own = sorted(adjusted.keys() & tracked.keys())
        rows = [*own, *sorted(adjusted.keys() - tracked.keys())]
        wanted, given = np.array([tracked[row] for row in own]), np.array([adjusted[row] for row in rows])
        ends = (poses[: len(own), :3, 3] for poses in (wanted, given))
        steps = [np.linalg.norm(np.diff(positions, axis=0), axis=1) for positions in ends]
        usable = steps[1] > 1e-9
        given[:, :3, 3] *= float(np.median(steps[0][usable] / steps[1][usable])) if usable.any() else 1.0
        given = dict(zip(rows, wanted[0] @ np.linalg.inv(given[0]) @ given, strict=True))
        return self._mapped(given, without, fixed=True)

    def _mapped(
        self, start: Mapping[int, np.ndarray], without: frozenset[tuple[str, str]], *, fixed: bool
    ) -> dict[int, np.ndarray]:
        """A model by COLMAP's incremental mapper, from these poses; its poses world_from_cam."""
        given = {name_of(index): np.linalg.inv(pose) for index, pose in start.items()}
        poses = GivenPoses(given, dict.fromkeys(given, self.camera), fixed=fixed)
        how = dict(choice=CameraChoice(camera=self.camera), without=without, threads=1, overwrite=True)
        with self.collection.store as store:
            made = reconstruct(store, self.folder / MODEL, poses=poses, **how)
        found = {name: np.vstack([pose, [0, 0, 0, 1]]) for name, pose in made.largest.cam_from_world.items()}
        return {int(Path(name).stem): np.linalg.inv(pose) for name, pose in found.items()}

    def _residuals(self, poses: Mapping[int, np.ndarray], loops: set[tuple[str, str]]) -> tuple[float, float]:
        """Median pixels of inliers from the lines of the poses: of neighbours in time, and of loops."""
        found: tuple[list[float], list[float]] = ([], [])
        places, K = [np.linalg.inv(poses[index]) for index in sorted(poses)], self.camera.K
        for pair, first, second in _verified(self.collection, sorted(poses)):
            closing = (pair.name0, pair.name1) in loops
            if closing or abs(first - second) <= NEXT:
                pose = places[second] @ np.linalg.inv(places[first])
                distances = sampson(*inliers_of(pair), fundamental_from_pose(K, K, pose))
                found[closing].append(float(np.median(distances)))
        return tuple(float(np.median(each)) if each else 0.0 for each in found)


def _verified(collection: Collection, keyframes: list[int]) -> Iterator[tuple[StoredPair, int, int]]:
    """Verified pairs of keyframes, with the rank of both among them."""
    rank = {name_of(index): place for place, index in enumerate(keyframes)}
    for pair in collection:
        if pair.name0 in rank and pair.name1 in rank and pair.geometry.verified:
            yield pair, rank[pair.name0], rank[pair.name1]


@dataclass(frozen=True, eq=False, repr=False)
class ClosedTrajectory:
    """The poses of all frames that had one, before and after their keyframes were adjusted."""

    frames: np.ndarray  # (F,) int64 indices of the frames
    timestamps: np.ndarray  # (F,) seconds; a frame's index where it has none
    before: np.ndarray  # (F, 4, 4) world_from_cam as tracked
    after: np.ndarray  # (F, 4, 4) the same, adjusted
    loops: tuple[Loop, ...]
    folder: Path  # of the model, for `Map.open`
    problem: str | None = None  # why loops were left open although there are some
    alike: int = 0  # pairs of keyframes that match and cannot show one place, which are left out
    left_out: tuple[int, ...] = ()  # frames that neither tracking nor a verified pair joins to the others

    def __repr__(self) -> str:
        moved = f", moved by up to {self.moved().max():.3g}" if len(self.frames) else ""
        state = "" if self.problem is None else ", left open"
        counts = f"{len(self.frames)} frames, {len(self.loops)} loops"
        return f"ClosedTrajectory({counts}{state}{moved}, {self.folder})"

    def moved(self) -> np.ndarray:
        """(F,) how far each pose was moved."""
        return np.linalg.norm(self.after[:, :3, 3] - self.before[:, :3, 3], axis=1)

    def plot(self, path: str | Path | None = None, *, overwrite: bool = False) -> Path | PIL.Image.Image:
        """Draw both paths from above and how far each pose was moved, to a file, or as a picture;
        `UsageError`: no matplotlib, or, without `overwrite`, a foreign file."""
        with optional():
            from matcher.sequence.plot import plot_closing

        return plot_closing(path, self, overwrite=overwrite)

    def record(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the same as a recording (.rrd) for the rerun viewer; `UsageError`: it is not installed, or,
        without `overwrite`, a foreign file."""
        with optional():
            from matcher.sequence.plot import record_closing

        return record_closing(check_output(path, (".rrd",), overwrite=overwrite), self)


# --- What is kept of a map that is being made: images of keyframes, and all poses in one file; always whole.


class PlacedFrame(NamedTuple):
    """A frame with a pose, and the keyframe that it moves with."""

    index: int
    time: float
    world_from_cam: np.ndarray  # (4, 4)
    keyframe: int
    stretch: int = 0  # of `FrameResult`


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
        raise UsageError(
            f"{folder} holds no unfinished map (no {KEPT}): if it is finished, `matcher localize` and "
            "`matcher track --load-map` use it; else track the frames again, into another folder"
        )
    try:
        if path.stat().st_size > 1 << 31:
            raise ValueError("it is too large")
        with np.load(path) as rows:
            # We write without compression, so what unpacks to more than the file is not ours.
            if sum(each.file_size for each in rows.zip.infolist()) > path.stat().st_size:
                raise ValueError("it unpacks to more than it may")
            columns = [rows[name] for name in PlacedFrame._fields if name in rows or name != "stretch"]
            facts, (index, _, poses, *_) = json.loads(str(rows["facts"])), columns
        if poses.shape != (len(index), 4, 4) or len({len(each) for each in columns}) > 1:
            raise ValueError("its arrays do not fit each other")
        check_poses(poses)
        camera = Camera(**facts["camera"] | {"distortion": tuple(facts["camera"]["distortion"])})
        preset, options = str(facts["preset"]), dict(facts["options"])
    except (*MALFORMED, zipfile.BadZipFile, zlib.error) as error:
        raise IntegrityError(f"{path}: the poses of the unfinished map are damaged ({error})") from error
    rows = zip(*(each if each is poses else each.tolist() for each in columns), strict=True)
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
        camera: CameraInput,
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
        self._reading = given_options({name: options.pop(name, None) for name in ("alpha_mask", "bgr")})
        check_folder(self.folder, overwrite=overwrite)
        (self.folder / KEPT).unlink(missing_ok=True)
        self._graph = KeyframeGraph(self.folder.absolute(), self.camera, preset, dict(options), overwrite)
        self._placed: list[PlacedFrame] = []
        self._keyframe: int | None = None
        self._kept = 0  # frames that are on the disk

    @classmethod
    def resume(cls, folder: str | Path) -> KeyframeMap:
        """A map whose program ended before it was finished, with the frames that were kept.

        `UsageError`, `IntegrityError`: the folder holds no unfinished map, or a damaged one.
        """
        folder, kept = Path(folder), read_kept(Path(folder))
        made = cls.__new__(cls)
        made.folder, made.camera, made._reading = folder, kept.camera, {}
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
        apart = any(frame.stretch != result.stretch for frame in self._placed[-1:])
        if result.is_keyframe or self._keyframe is None or apart:
            self._keyframe = None
            shown = read_image(image, resize=None, upright=False, mask=mask, **self._reading)
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
        self._placed.append(PlacedFrame(result.index, time, pose, self._keyframe, result.stretch))
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
        """Write the poses so far for `resume`, and as the trajectory; how many frames and keyframes.
        Without any, no file is written."""
        (self.folder / FRAMES).mkdir(parents=True, exist_ok=True)
        if not self._placed:
            return 0, 0
        self._write_kept()
        _, times, poses, _, stretches = zip(*self._placed, strict=True)
        write_trajectory(self.folder / TRAJECTORY, times, poses, stretches=stretches)
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
        everywhere = _keyframes(self._placed)
        of = {frame.index: frame.stretch for frame in self._placed if frame.index in everywhere}
        main = Counter(of.values()).most_common(1)
        tracked = {index: pose for index, pose in everywhere.items() if of[index] == main[0][0]}
        if len(tracked) < 3:
            raise UsageError(f"a map needs three keyframes with a pose, not {len(tracked)}: track more")
        self._graph.match(sorted(everywhere))
        loops = self._graph.loops(tracked)
        weak = ((pair.name0, pair.name1) for pair in self._graph.collection if not is_strong(pair))
        weak = frozenset(pair for pair in weak if len({of.get(int(Path(name).stem)) for name in pair}) > 1)
        adjusted = self._graph.model(tracked, loops if close_loops else (), weak)
        # Frames move with their keyframes. With one camera the unit of length drifts: where the step from a
        # keyframe to the next has become a quarter longer or shorter, those of frames between them have too.
        scales = dict.fromkeys(everywhere, 1.0)
        for index, following in pairwise(everywhere):
            if index in adjusted and following in adjusted and of[index] == of[following]:
                ends = ((poses[index][:3, 3], poses[following][:3, 3]) for poses in (everywhere, adjusted))
                before, after = (float(np.linalg.norm(second - first)) for first, second in ends)
                near = before / 1.25 <= after <= before * 1.25
                scales[index] = 1.0 if near or before == 0 else after / before
                scales[following] = scales[index]  # the last one has no next
        adjusted = tracked | adjusted
        placed = [frame for frame in self._placed if frame.keyframe in adjusted]
        carried = []
        for frame in placed:
            step = np.linalg.inv(everywhere[frame.keyframe]) @ frame.world_from_cam
            step[:3, 3] *= scales[frame.keyframe]
            carried.append(adjusted[frame.keyframe] @ step)
        closed = ClosedTrajectory(
            frames=np.array([frame.index for frame in placed], dtype=np.int64),
            timestamps=np.array([frame.time for frame in placed]),
            before=np.array([frame.world_from_cam for frame in placed]),
            after=np.array(carried),
            loops=loops,
            folder=self.folder / MODEL,
            problem=self._graph.open_because,
            alike=len(self._graph.alike),
            left_out=tuple(frame.index for frame in self._placed if frame.keyframe not in adjusted),
        )
        write_trajectory(self.folder / TRAJECTORY, closed.timestamps.tolist(), carried)
        rows = [{"frames": loop[:2], "inliers": loop[2]} for loop in closed.loops]
        write_whole(self.folder / LOOPS, json.dumps(rows, indent=1).encode())
        closed.plot(self.folder / PLOT, overwrite=True)
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
    """Where frames are in a map; the coordinates of tracking, and one camera's unit, are its own. Keyframes
    are localised, and every frame until the first is. Two that are far enough apart say how long the unit is;
    the last one says where the frames after it are, so drift does not add up."""

    def __init__(self, folder: str | Path, *, measured: bool, **options: Unpack[LoadOptions]) -> None:
        """Open as `Map.open` does; a `measured` unit is taken to be the map's until frames say it."""
        self._map = Map.open(Path(folder), **options)
        self._unit = 1.0 if measured else None  # length of tracking's unit in the map's, as far as assumed
        # Coordinates of one stretch are one system: the frames that were localised in it, and world_from_cam
        # by frame of those whose place was not known in time.
        self._stretches: dict[int, tuple[list[LocalizedFrame], dict[int, np.ndarray]]] = {}
        self.problem: str | None = None  # why a frame could not be looked up

    @property
    def localized(self) -> int:
        """Frames that were localised."""
        return sum(len(localized) for localized, _ in self._stretches.values())

    def follow(
        self, result: FrameResult, image: ImageInput, *, mask: Mask | None = None, **reading: bool
    ) -> np.ndarray | None:
        """map_from_cam (4, 4) of the next frame that was tracked, None where it is not known; `reading`:
        `alpha_mask` and `bgr` of `read_image`."""
        if not result.is_measured:
            return None
        localized, unplaced = self._stretches.setdefault(result.stretch, ([], {}))
        if result.is_keyframe or not localized:
            try:
                shown = read_image(image, resize=None, upright=False, mask=mask, **reading)
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
        """map_from_cam (4, 4) of a frame that has moved from row `near` of the localised ones, which say the
        unit where two are far enough apart; None where it is needed and unknown."""
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
        for localized, unplaced in self._stretches.values():
            first = localized[:12]
            for index, pose in unplaced.items():
                near = int(np.argmin([abs(each.index - index) for each in first])) if first else 0
                if (placed := self._moved(first, near, pose)) is not None:
                    found[index] = placed
        return found

    def close(self) -> None:
        """Close the map."""
        self._map.close()
