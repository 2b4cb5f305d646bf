"""Loops: keyframes that show a place again, and the poses with which the path closes there.

Keyframes are matched with their neighbours in time and with those that look most like them. Verified pairs
far apart in time are loops where drift can explain them: in a corridor every door has its like, but tracking
is not wrong by as far as the camera has gone. A graph of the tracked steps and the loops gives poses, from
which COLMAP adjusts everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from matcher.cameras import Camera
from matcher.collection.collection import Collection
from matcher.collection.schema import StoredPair
from matcher.config import EstimationConfig
from matcher.export.colmap import CameraChoice, import_pycolmap
from matcher.sequence.trajectory import path_length
from matcher.sfm.models import GivenPoses
from matcher.sfm.reconstruct import ReconstructionError, reconstruct
from matcher.verify.adjustment import fundamental_from_pose, sampson
from matcher.verify.estimation import RobustEstimator

FRAMES, RUN, MODEL = "frames", "model-run", "model"  # in the folder of a map
NEXT, SIMILAR = 4, 4  # keyframes that each is matched with, by time and by their looks

Loop = tuple[int, int, int]  # two keyframes, by their frames, and the inliers between them


def name_of(index: int) -> str:
    """The file of a keyframe."""
    return f"{index:06d}.png"


# --- Whether two keyframes that match are a place come back to, or two places that look alike.


def kind_of_pair(
    points0: np.ndarray,
    points1: np.ndarray,
    camera: Camera,
    poses: tuple[np.ndarray, np.ndarray],
    travelled: float,
) -> Literal["loop", "along", "alike"]:
    """What a verified pair of keyframes far apart in time is.

    A "loop" can be explained by drift: tracking may have put them apart by half of the path between them, and
    turned by 60 degrees. A pair "along" the path shows from afar what comes nearer later, as its tracked
    poses say; of a pair that is neither, the images are merely "alike".

    Its inliers are `points0`, `points1` (M, 2), `poses` the tracked world_from_cam (4, 4) of both, and
    `travelled` is the length of the tracked path between them.
    """
    pose = np.linalg.inv(poses[1]) @ poses[0]
    # Tracking is right where half of the matches are near their lines, by a share of the focal length.
    distances = sampson(points0, points1, fundamental_from_pose(camera.K, camera.K, pose))
    along = bool((distances < 0.01 * (camera.fx + camera.fy) / 2).mean() >= 0.5)
    if np.linalg.norm(poses[1][:3, 3] - poses[0][:3, 3]) > 0.5 * travelled:
        return "along" if along else "alike"
    found = _relative_pose(points0, points1, camera)
    if along or found is None:
        return "loop"
    turn = np.trace(found[:3, :3] @ pose[:3, :3].T)
    return "loop" if np.degrees(np.arccos(np.clip((turn - 1) / 2, -1, 1))) < 60 else "alike"


def _relative_pose(points0: np.ndarray, points1: np.ndarray, camera: Camera) -> np.ndarray | None:
    estimator = RobustEstimator(EstimationConfig(kind="essential"))
    geometry = estimator(points0, points1, cameras=(camera, camera))
    return geometry.cam1_from_cam0 if geometry.status == "ok" else None


def inliers_of(pair: StoredPair) -> tuple[np.ndarray, np.ndarray]:
    """(M, 2) stored pixels of both images."""
    inliers = pair.geometry.inliers
    return pair.matches.points0[inliers], pair.matches.points1[inliers]


# --- The graph of keyframes' poses, its edges tracked steps and loops.


LoopEdge = tuple[int, int, np.ndarray]  # two keyframes that show one place, cam1_from_cam0 of length 1


def spread(tracked: Mapping[int, np.ndarray], loops: Sequence[LoopEdge]) -> dict[int, np.ndarray]:
    """World_from_cam (4, 4) by keyframe that agrees best with the tracked steps and the loops.

    Rotations are averaged first, then positions are found by least squares; the first keyframe stays.

    Raises:
        ReconstructionError: no loop, too many keyframes, or the rotations cannot be averaged.
    """
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

    def rigid(pose: np.ndarray) -> Any:
        return pycolmap.Rigid3d(pycolmap.Rotation3d(pose[:3, :3]), pose[:3, 3])

    model, graph = pycolmap.Reconstruction(), pycolmap.PoseGraph()
    model.add_camera_with_trivial_rig(pycolmap.Camera.create_from_model_name(1, "SIMPLE_PINHOLE", 1.0, 1, 1))
    inverse = np.linalg.inv(poses)
    for row, pose in enumerate(inverse):
        image = pycolmap.Image(name=str(row), camera_id=1, image_id=row + 1)
        model.add_image_with_trivial_frame(image, rigid(pose))
    near = [(row, row + k) for k in (1, 2) for row in range(len(poses) - k)]
    for first, second, pose in [*((a, b, inverse[b] @ poses[a]) for a, b in near), *loops]:
        edge = pycolmap.PoseGraphEdge(rigid(pose))
        edge.num_matches = 1
        graph.add_edge(first + 1, second + 1, edge)
    options = pycolmap.RotationEstimatorOptions()
    options.random_seed = 0
    if not pycolmap.run_rotation_averaging(options, graph, model, []):
        raise ReconstructionError("the rotations of the graph of steps could not be averaged")
    found = [model.image(row + 1).cam_from_world().rotation.matrix().T for row in range(len(poses))]
    return poses[0, :3, :3] @ found[0].T @ np.array(found)


def _positions(rotations: np.ndarray, steps: np.ndarray, loops: list[LoopEdge]) -> np.ndarray:
    """(N, 3) positions, the first at 0; with each goes the unit of the step after it.

    Least squares in 4 N numbers: a step (N − 1, 3) is as tracked in its unit, give or take 3 % of its length;
    units change by 2 % from step to step; and a loop says on which line through one camera the other is, give
    or take three tenths of a median step, under a Huber loss.
    """
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
    open_because: str | None = field(default=None, init=False)  # why the last model has its loops left open
    # Verified pairs that cannot show one place, as `loops` has found; no model has them.
    alike: frozenset[tuple[str, str]] = field(default=frozenset(), init=False)

    def match(self, keyframes: list[int]) -> Collection:
        """The keyframes, matched with their neighbours and with similar ones."""
        collection = Collection.open(self.folder / RUN, preset=self.preset, workers=0, **self.options)
        names = [name_of(index) for index in keyframes]
        collection.add_images(self.folder / FRAMES, include=names, restart=self.overwrite)
        self.overwrite = False
        collection.add_pairs(sequential=NEXT)
        collection.add_pairs(similar=SIMILAR)
        collection.run()
        return collection

    def loops(self, collection: Collection, tracked: Mapping[int, np.ndarray]) -> tuple[Loop, ...]:
        """Verified pairs with 40 inliers that are not neighbours in time and may show one place.

        Those that cannot, since tracking would have to be wrong by most of the path, are kept as `alike`.
        """
        keyframes = sorted(tracked)
        rank = {name_of(index): place for place, index in enumerate(keyframes)}
        poses = np.array([tracked[index] for index in keyframes])
        path = path_length(poses)
        found, alike = [], set()
        for pair in collection:
            if pair.name0 not in rank or pair.name1 not in rank or not pair.geometry.verified:
                continue
            first, second = rank[pair.name0], rank[pair.name1]
            if abs(second - first) <= NEXT:
                continue
            ends, travelled = inliers_of(pair), float(abs(path[second] - path[first]))
            kind = kind_of_pair(*ends, self.camera, (poses[first], poses[second]), travelled)
            if kind == "alike":
                alike.add((pair.name0, pair.name1))
            elif kind == "loop" and len(ends[0]) >= 40:
                found.append((keyframes[first], keyframes[second], len(ends[0])))
        self.alike = frozenset(alike)
        return tuple(sorted(found))

    def model(
        self, collection: Collection, tracked: Mapping[int, np.ndarray], loops: tuple[Loop, ...]
    ) -> dict[int, np.ndarray]:
        """The keyframes' adjusted poses world_from_cam, of a model in the coordinates of the first one.

        Loops are closed where the matches agree better with the closed path than with the tracked one.
        Otherwise they are left open, all is adjusted from the tracked poses, and `open_because` says why.
        """
        self.open_because, without = None, self.alike
        names = {(name_of(first), name_of(second)) for first, second, _ in loops}
        if loops:
            closing = [pair for pair in collection if (pair.name0, pair.name1) in names]
            found = [_relative_pose(*inliers_of(pair), self.camera) for pair in closing]
            ends = [(int(Path(pair.name0).stem), int(Path(pair.name1).stem)) for pair in closing]
            edges = [(*both, pose) for both, pose in zip(ends, found, strict=True) if pose is not None]
            try:
                adjusted = self._mapped(collection, spread(tracked, edges), without, fixed=False)
                before, after = (self._residuals(collection, each, names) for each in (tracked, adjusted))
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
            adjusted = self._mapped(collection, tracked, without, fixed=False)
        return self._mapped(collection, in_tracked_coordinates(tracked, adjusted), without, fixed=True)

    def _mapped(
        self,
        collection: Collection,
        start: Mapping[int, np.ndarray],
        without: frozenset[tuple[str, str]],
        *,
        fixed: bool,
    ) -> dict[int, np.ndarray]:
        """A model by COLMAP's incremental mapper, from these poses; its poses world_from_cam."""
        given = {name_of(index): np.linalg.inv(pose) for index, pose in start.items()}
        poses = GivenPoses(given, dict.fromkeys(given, self.camera), fixed=fixed)
        how = dict(choice=CameraChoice(camera=self.camera), without=without, threads=1, overwrite=True)
        with collection.store as store:
            made = reconstruct(store, self.folder / MODEL, poses=poses, **how)
        found = {name: np.vstack([pose, [0, 0, 0, 1]]) for name, pose in made.largest.cam_from_world.items()}
        return {int(Path(name).stem): np.linalg.inv(pose) for name, pose in found.items()}

    def _residuals(
        self, collection: Collection, poses: Mapping[int, np.ndarray], loops: set[tuple[str, str]]
    ) -> tuple[float, float]:
        """Median pixels of inliers from the lines of the poses: of neighbours in time, and of loops."""
        found: tuple[list[float], list[float]] = ([], [])
        places, K = {name_of(index): np.linalg.inv(pose) for index, pose in poses.items()}, self.camera.K
        rank = {name: place for place, name in enumerate(sorted(places))}
        for pair in collection:
            if pair.name0 not in rank or pair.name1 not in rank or not pair.geometry.verified:
                continue
            closing = (pair.name0, pair.name1) in loops
            if closing or abs(rank[pair.name0] - rank[pair.name1]) <= NEXT:
                pose = places[pair.name1] @ np.linalg.inv(places[pair.name0])
                distances = sampson(*inliers_of(pair), fundamental_from_pose(K, K, pose))
                found[closing].append(float(np.median(distances)))
        return tuple(float(np.median(each)) if each else 0.0 for each in found)


def in_tracked_coordinates(
    tracked: Mapping[int, np.ndarray], adjusted: Mapping[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """Poses world_from_cam whose first keyframe and scale are made those of the tracked ones.

    The scale is the median of the ratios of neighbouring keyframes' distances, which drift changes least.
    """
    rows = sorted(adjusted)
    wanted, given = (np.array([poses[row] for row in rows]) for poses in (tracked, adjusted))
    steps = [np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1) for poses in (wanted, given)]
    usable = steps[1] > 1e-9
    scale = float(np.median(steps[0][usable] / steps[1][usable])) if usable.any() else 1.0
    given[:, :3, 3] *= scale
    return dict(zip(rows, wanted[0] @ np.linalg.inv(given[0]) @ given, strict=True))


def carried(
    frames: Sequence[tuple[np.ndarray, int]],
    tracked: Mapping[int, np.ndarray],
    adjusted: Mapping[int, np.ndarray],
) -> np.ndarray:
    """(F, 4, 4) world_from_cam of frames that move with their keyframes.

    Each of the `frames` is its world_from_cam (4, 4) as tracked, and its keyframe; `adjusted` holds those of
    keyframes that have moved. With one camera the unit of length drifts: where the step from a keyframe to
    the next has become a quarter longer or shorter, those of the frames between them have too.
    """
    scales = dict.fromkeys(tracked, 1.0)
    for index, following in pairwise(tracked):
        if index in adjusted and following in adjusted:
            ends = ((poses[index][:3, 3], poses[following][:3, 3]) for poses in (tracked, adjusted))
            before, after = (float(np.linalg.norm(second - first)) for first, second in ends)
            near = before / 1.25 <= after <= before * 1.25
            scales[index] = 1.0 if near or before == 0 else after / before
            scales[following] = scales[index]  # the last one has no next
    found = []
    for pose, index in frames:
        step = np.linalg.inv(tracked[index]) @ pose
        step[:3, 3] *= scales[index]
        found.append(adjusted.get(index, tracked[index]) @ step)
    return np.array(found)


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

    def __repr__(self) -> str:
        moved = f", moved by up to {self.moved().max():.3g}" if len(self.frames) else ""
        state = "" if self.problem is None else ", left open"
        counts = f"{len(self.frames)} frames, {len(self.loops)} loops"
        return f"ClosedTrajectory({counts}{state}{moved}, {self.folder})"

    def moved(self) -> np.ndarray:
        """(F,) how far each pose was moved."""
        return np.linalg.norm(self.after[:, :3, 3] - self.before[:, :3, 3], axis=1)

    def plot(self, path: str | Path) -> Path:
        """Draw both paths from above and how far each pose was moved, as a PNG."""
        from matcher.sequence.plot import plot_closing  # here, since it needs matplotlib

        return plot_closing(Path(path), self)

    def record(self, path: str | Path) -> Path:
        """Write the same as a recording (.rrd) for the rerun viewer; `UsageError`: it is not installed."""
        from matcher.sequence.plot import record_closing

        return record_closing(Path(path), self)

    @property
    def ends(self) -> list[np.ndarray]:
        """Of each loop (2, 3) where tracking has its keyframes."""
        rows = [np.searchsorted(self.frames, loop[:2]) for loop in self.loops]
        return [self.before[pair, :3, 3] for pair in rows]
