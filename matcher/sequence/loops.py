"""Whether two keyframes that match are a place come back to, or two places that look alike.

In a corridor every door and every bin has its like, and enough of them agree with one epipolar geometry. What
tells them apart is the path: tracking drifts, but not by as far as the camera has gone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from matcher.cameras import Camera
from matcher.collection.collection import Collection
from matcher.collection.schema import StoredPair
from matcher.config import EstimationConfig
from matcher.export.colmap import CameraChoice, import_pycolmap
from matcher.files import write_output
from matcher.sfm.models import GivenPoses
from matcher.sfm.reconstruct import ReconstructionError, reconstruct
from matcher.verify.adjustment import fundamental_from_pose, sampson
from matcher.verify.estimation import RobustEstimator
from matcher.viz.recording import RecordingFile

# --- loop_check: Whether two keyframes that match are a place come back to, or two places that look alike.

PairKind = Literal["loop", "along", "alike"]
_DRIFT = 0.5  # of the path between two keyframes, by which tracking may have put them apart
_TURN = 60.0  # degrees by which tracking may have turned
_NEAR = 0.01  # of the focal length: distance from the epipolar line by which a match agrees with tracking
_AGREEING = 0.5  # share of the matches


def kind_of_pair(
    points0: np.ndarray,
    points1: np.ndarray,
    camera: Camera,
    poses: tuple[np.ndarray, np.ndarray],
    travelled: float,
) -> PairKind:
    """What a verified pair of keyframes far apart in time is.

    A "loop" can be explained by drift; a pair "along" the path shows from afar what comes nearer later, as
    its tracked poses say; of a pair that is neither, the images are merely "alike".

    Args:
        points0, points1: (M, 2) its inliers, stored pixels.
        camera: of both.
        poses: world_from_cam (4, 4) of both as tracked.
        travelled: length of the tracked path between them.
    """
    pose = np.linalg.inv(poses[1]) @ poses[0]
    along = _agree(points0, points1, camera, pose)
    if np.linalg.norm(poses[1][:3, 3] - poses[0][:3, 3]) > _DRIFT * travelled:
        return "along" if along else "alike"
    estimate = RobustEstimator(EstimationConfig(kind="essential"))
    found = estimate(points0, points1, cameras=(camera, camera)).cam1_from_cam0
    if along or found is None or _angle(found[:3, :3] @ pose[:3, :3].T) < _TURN:
        return "loop"
    return "alike"


def path_lengths(world_from_cam: np.ndarray) -> np.ndarray:
    """(N,) length of the path up to each of N poses (N, 4, 4)."""
    steps = np.linalg.norm(np.diff(world_from_cam[:, :3, 3], axis=0), axis=1)
    return np.concatenate([[0.0], np.cumsum(steps)])


def _agree(points0: np.ndarray, points1: np.ndarray, camera: Camera, pose: np.ndarray) -> bool:
    fundamental = fundamental_from_pose(camera.K, camera.K, pose)
    near = sampson(points0, points1, fundamental) < _NEAR * (camera.fx + camera.fy) / 2
    return bool(near.mean() >= _AGREEING)


def _angle(rotation: np.ndarray) -> float:
    return float(np.degrees(np.arccos(np.clip((np.trace(rotation) - 1) / 2, -1, 1))))


# --- step_graph: The graph of keyframes' poses, its edges tracked steps and loops.

MOST = 2000  # keyframes, whose equations take 0.5 GB, three times at once
_STEP, _LEAST = 0.03, 0.2  # errors of a step: a share of its length, and of that share of the median length
_UNIT = 0.02  # by which the unit of length changes from one step to the next
_LOOP_STEP_GRAPH = (
    0.3  # median steps, by which the end of a loop may be beside the line on which its matches put it
)
_ROUNDS = 5  # of weighing the loops by their errors
_FIRM = 100.0  # weight of what is only convention: where the first camera is, and the mean unit


@dataclass(frozen=True, eq=False)
class LoopEdge:
    """Two keyframes that show one place."""

    first: int
    second: int
    cam1_from_cam0: np.ndarray  # (4, 4), the translation of length 1


def loop_edges(pairs: Iterable[StoredPair], camera: Camera, number: Mapping[str, int]) -> list[LoopEdge]:
    """The relative poses of pairs that close loops, of their inliers; those that have none are left out.

    Args:
        pairs: verified ones.
        camera: of all keyframes.
        number: of a keyframe, by its name.
    """
    estimate, found = RobustEstimator(EstimationConfig(kind="essential")), []
    for pair in pairs:
        agreeing = pair.geometry.inliers
        ends = pair.matches.points0[agreeing], pair.matches.points1[agreeing]
        pose = estimate(*ends, cameras=(camera, camera)).cam1_from_cam0
        if pose is not None:
            found.append(LoopEdge(number[pair.name0], number[pair.name1], pose))
    return found


def spread(tracked: Mapping[int, np.ndarray], loops: Sequence[LoopEdge]) -> dict[int, np.ndarray]:
    """The poses world_from_cam (4, 4) that agree best with the tracked steps and the loops.

    Args:
        tracked: keyframe → world_from_cam (4, 4); the first one stays.
        loops: of these keyframes.

    Raises:
        ReconstructionError: no loop, too many keyframes, or the rotations cannot be averaged.
    """
    if not loops:
        raise ReconstructionError("no pair of keyframes that closes a loop has a relative pose")
    if len(tracked) > MOST:
        raise ReconstructionError(f"{len(tracked)} keyframes are more than the {MOST} of a graph of steps")
    keyframes = sorted(tracked)
    place = {keyframe: row for row, keyframe in enumerate(keyframes)}
    edges = [(place[loop.first], place[loop.second], loop.cam1_from_cam0) for loop in loops]
    poses = np.array([tracked[keyframe] for keyframe in keyframes])
    poses[:, :3, :3] = _rotations(poses, edges)
    steps = _steps([tracked[keyframe] for keyframe in keyframes])
    poses[:, :3, 3] = poses[0, :3, 3] + _positions(poses[:, :3, :3], steps, edges)
    return dict(zip(keyframes, poses, strict=True))


def _steps(world_from_cam: Sequence[np.ndarray]) -> np.ndarray:
    """(N − 1, 3) where each camera sees the next."""
    return np.array([(np.linalg.inv(a) @ b)[:3, 3] for a, b in pairwise(world_from_cam)])


def _rotations(poses: np.ndarray, loops: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
    """(N, 3, 3) world_from_cam, the first as it is."""
    pycolmap = import_pycolmap()
    pycolmap.logging.minloglevel = pycolmap.logging.FATAL.value
    model, graph = pycolmap.Reconstruction(), pycolmap.PoseGraph()
    model.add_camera_with_trivial_rig(pycolmap.Camera.create_from_model_name(1, "SIMPLE_PINHOLE", 1.0, 1, 1))
    inverse = np.linalg.inv(poses)
    for row, pose in enumerate(inverse):
        image = pycolmap.Image(name=str(row), camera_id=1, image_id=row + 1)
        model.add_image_with_trivial_frame(image, _rigid(pycolmap, pose))
    near = [(row, row + k) for k in (1, 2) for row in range(len(poses) - k)]
    for first, second, pose in [*((a, b, inverse[b] @ poses[a]) for a, b in near), *loops]:
        edge = pycolmap.PoseGraphEdge(_rigid(pycolmap, pose))
        edge.num_matches = 1
        graph.add_edge(first + 1, second + 1, edge)
    options = pycolmap.RotationEstimatorOptions()
    options.random_seed = 0
    if not pycolmap.run_rotation_averaging(options, graph, model, []):
        raise ReconstructionError("the rotations of the graph of steps could not be averaged")
    found = [model.image(row + 1).cam_from_world().rotation.matrix().T for row in range(len(poses))]
    return poses[0, :3, :3] @ found[0].T @ np.array(found)


def _rigid(pycolmap: object, pose: np.ndarray) -> object:
    return pycolmap.Rigid3d(pycolmap.Rotation3d(pose[:3, :3]), pose[:3, 3])


def _positions(
    rotations: np.ndarray, steps: np.ndarray, loops: list[tuple[int, int, np.ndarray]]
) -> np.ndarray:
    """(N, 3) positions, the first at 0; with each goes the unit of the step after it.

    Least squares in 4 N numbers: a step is as tracked in its unit, units change slowly, and a loop says on
    which line through one camera the other is.
    """
    count = len(rotations)
    lengths = np.linalg.norm(steps, axis=1)
    median = max(float(np.median(lengths)), 1e-9)
    fixed = np.zeros((4 * count, 4 * count))
    wanted = np.zeros(4 * count)
    _add(fixed, [(0, np.eye(3))], _FIRM / median)
    for row, step in enumerate(steps):
        seen, error = rotations[row] @ step, _STEP * (lengths[row] + _LEAST * median)
        unit = 3 * count + row
        _add(fixed, [(3 * row + 3, np.eye(3)), (3 * row, -np.eye(3)), (unit, -seen[:, None])], 1 / error)
        _add(fixed, [(unit, np.eye(1)), (unit + 1, -np.eye(1))], 1 / _UNIT)
    units = np.zeros((1, 4 * count))
    units[0, 3 * count :] = _FIRM / count
    fixed += units.T @ units
    wanted += _FIRM * units[0]
    lines = []
    for first, second, pose in loops:
        towards = -rotations[first] @ pose[:3, :3].T @ pose[:3, 3]
        across = np.eye(3) - np.outer(towards, towards) / (towards @ towards)
        lines.append([(3 * second, across), (3 * first, -across)])
    weights = np.ones(len(lines))
    for _ in range(_ROUNDS):
        equations = fixed.copy()
        for line, weight in zip(lines, weights, strict=True):
            _add(equations, line, weight / (_LOOP_STEP_GRAPH * median))
        found = np.linalg.solve(equations, wanted)
        beside = [sum(part @ found[at : at + 3] for at, part in line) for line in lines]
        errors = np.linalg.norm(beside, axis=1) / (_LOOP_STEP_GRAPH * median)
        weights = 1 / np.sqrt(np.maximum(errors, 1))  # of Huber
    return found[: 3 * count].reshape(-1, 3)


def _add(equations: np.ndarray, parts: list[tuple[int, np.ndarray]], weight: float) -> None:
    """Add the normal equations of residuals that are sums of `parts`: where each begins, and its matrix."""
    for at, left in parts:
        for beside, right in parts:
            where = np.s_[at : at + left.shape[1], beside : beside + right.shape[1]]
            equations[where] += weight**2 * left.T @ right


# --- pose_graph: Keyframes on disk: matched with each other, loops found, and the graph of their poses
# optimised.

FRAMES, RUN, MODEL = "frames", "model-run", "model"
GRAPH = ".graph"  # folder of the graph's model while the sequence goes on
_NEXT, _SIMILAR = 4, 4  # keyframes that each is matched with, by time and by their looks
_LOOP_INLIERS = 40  # of a pair that closes a loop
_FEWEST = 3  # keyframes that are worth matching
# A step from a keyframe to the next is torn where it is so many times longer or shorter than tracked, or
# turned by more than 120 degrees; in a kitchen whose poses became better at most 2.1 times and 85 degrees.
_TORN, _BACK = 3.0, -0.5
_SLIGHT = 0.25  # of the median step: how far a step may change whatever its length
_DRIFTED = 1.25  # times that a step was shortened or stretched, from which the unit of length has drifted

Loop = tuple[int, int, int]  # two keyframes, by their frames, and the inliers between them


@dataclass(frozen=True, eq=False)
class Closing:
    """The loops that are known, and where they put the keyframes."""

    loops: tuple[Loop, ...]
    world_from_cam: dict[int, np.ndarray]  # keyframe → (4, 4), in the coordinates of the first


@dataclass(eq=False)
class PoseGraph:
    """Keyframes in a folder, by the indices of their frames; everything that is matched stays there.

    Called with the tracked poses of the keyframes so far, it looks for loops: a task beside tracking.
    """

    folder: Path
    camera: Camera
    preset: str
    options: dict[str, Any]  # of `matcher.load`
    overwrite: bool = False
    unclosed: str | None = field(default=None, init=False)  # why the last model was not closed
    # Verified pairs that cannot show one place, as `loops` has found; no graph and no model has them.
    alike: frozenset[tuple[str, str]] = field(default=frozenset(), init=False)
    _loops: int = field(default=0, init=False)

    def __call__(self, tracked: Mapping[int, np.ndarray]) -> Closing | Literal[False]:
        """The closing of the keyframes (index → world_from_cam); False where no loop is new."""
        if len(tracked) < _FEWEST:
            return False
        collection = self.match(sorted(tracked))
        loops = self.loops(collection, tracked)
        if len(loops) <= self._loops:
            return False
        self._loops = len(loops)
        try:
            start = self.optimised(collection, tracked, loops, self.folder / GRAPH)
        except ReconstructionError:
            return False  # not yet: more keyframes will connect them
        return Closing(loops, {index_of(name): np.linalg.inv(pose) for name, pose in start.items()})

    def match(self, keyframes: list[int]) -> Collection:
        """The keyframes, matched with their neighbours and with similar ones."""
        collection = Collection.open(self.folder / RUN, preset=self.preset, workers=0, **self.options)
        names = [name_of(index) for index in keyframes]
        collection.add_images(self.folder / FRAMES, include=names, restart=self.overwrite)
        self.overwrite = False
        collection.add_pairs(sequential=_NEXT)
        collection.add_pairs(similar=_SIMILAR)
        collection.run()
        return collection

    def loops(self, collection: Collection, tracked: Mapping[int, np.ndarray]) -> tuple[Loop, ...]:
        """Verified pairs of keyframes that are not neighbours in time and may show one place.

        Those that cannot, since tracking would have to be wrong by most of the path, are kept as `alike`.
        """
        keyframes = sorted(tracked)
        rank = {name_of(index): place for place, index in enumerate(keyframes)}
        poses = np.array([tracked[index] for index in keyframes])
        path = path_lengths(poses)
        found, alike = [], set()
        for pair in collection:
            if pair.name0 not in rank or pair.name1 not in rank or pair.geometry.status != "ok":
                continue
            first, second = rank[pair.name0], rank[pair.name1]
            if abs(second - first) <= _NEXT:
                continue
            inliers = pair.geometry.inliers
            ends = pair.matches.points0[inliers], pair.matches.points1[inliers]
            travelled = float(abs(path[second] - path[first]))
            kind = kind_of_pair(*ends, self.camera, (poses[first], poses[second]), travelled)
            if kind == "alike":
                alike.add((pair.name0, pair.name1))
            elif kind == "loop" and (count := int(inliers.sum())) >= _LOOP_INLIERS:
                found.append((keyframes[first], keyframes[second], count))
        self.alike = frozenset(alike)
        return tuple(sorted(found))

    def optimised(
        self,
        collection: Collection,
        tracked: Mapping[int, np.ndarray],
        loops: tuple[Loop, ...],
        out: Path,
    ) -> dict[str, np.ndarray]:
        """Poses cam_from_world by name, with the loops closed.

        COLMAP's global mapper makes them of the pairs alone, but where three keyframes in a row share little
        it tears the path apart; then the tracked steps are edges too, and all is adjusted from there.

        Raises:
            ReconstructionError: the graph connects fewer than two keyframes, or is torn both ways.
        """
        start = {name_of(index): np.linalg.inv(pose) for index, pose in tracked.items()}
        how = dict(choice=CameraChoice(camera=self.camera), threads=1, overwrite=True, only=list(start))
        for mapper in ("global", "incremental"):
            if mapper == "incremental":
                how["poses"] = self._spread(collection, tracked, loops)
            with collection.store as store:
                made = reconstruct(store, out, mapper=mapper, without=self.alike, **how)
            found = in_tracked_coordinates(start, made.largest.cam_from_world)
            if (torn := torn_at(start, found)) is None:
                return found
        raise ReconstructionError(
            f"the way from {torn[0]} to {torn[1]} does not agree with tracking, since they share too little"
        )

    def _spread(
        self, collection: Collection, tracked: Mapping[int, np.ndarray], loops: tuple[Loop, ...]
    ) -> GivenPoses:
        """Poses to start from, of the graph of tracked steps and loops."""
        closing = {(name_of(first), name_of(second)) for first, second, _ in loops}
        pairs = [pair for pair in collection if (pair.name0, pair.name1) in closing]
        found = spread(tracked, loop_edges(pairs, self.camera, {name_of(index): index for index in tracked}))
        poses = {name_of(index): np.linalg.inv(pose) for index, pose in found.items()}
        return GivenPoses(poses, dict.fromkeys(poses, self.camera), fixed=False)

    def model(
        self, collection: Collection, tracked: Mapping[int, np.ndarray], loops: tuple[Loop, ...]
    ) -> dict[int, np.ndarray]:
        """The keyframes' adjusted poses world_from_cam, of a model in the coordinates of the first one.

        Where the graph cannot be optimised, all is adjusted from the tracked poses, and `unclosed` says why.

        Args:
            collection: of `match`.
            tracked: keyframe → world_from_cam (4, 4).
            loops: to be closed; where there are none, or they are not, loops only share points.
        """
        start = {name_of(index): np.linalg.inv(pose) for index, pose in tracked.items()}
        out = self.folder / MODEL
        self.unclosed, closed = None, False
        if loops:
            try:
                start, closed = self.optimised(collection, tracked, loops, out), True
            except ReconstructionError as error:
                self.unclosed = f"the graph of poses was not optimised, and loops only share points: {error}"
        poses = GivenPoses(start, dict.fromkeys(start, self.camera), fixed=closed)
        with collection.store as store:
            choice = CameraChoice(camera=self.camera)
            how = dict(choice=choice, poses=poses, without=self.alike, threads=1, overwrite=True)
            made = reconstruct(store, out, **how)
        found = {name: np.vstack([pose, [0, 0, 0, 1]]) for name, pose in made.largest.cam_from_world.items()}
        return {index_of(name): np.linalg.inv(pose) for name, pose in found.items()}


def name_of(index: int) -> str:
    """The file of a keyframe."""
    return f"{index:06d}.png"


def index_of(name: str) -> int:
    """The inverse of `name_of`."""
    return int(Path(name).stem)


def in_tracked_coordinates(
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


def torn_at(tracked: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> tuple[str, str] | None:
    """The first neighbouring keyframes whose step drift cannot explain; None where it explains all.

    Args:
        tracked: poses cam_from_world by name.
        found: the same in the same unit of length, of some of them.
    """
    pairs = list(pairwise(name for name in sorted(tracked) if name in found))
    steps = np.array([[_step(poses, *each) for poses in (tracked, found)] for each in pairs])
    steps = steps.reshape(-1, 2, 3)
    lengths = np.linalg.norm(steps, axis=2)
    # Where a camera stands or turns in its place, what is left of a step is noise.
    slight = _SLIGHT * np.median(lengths[:, 0]) if pairs else 0.0
    for names, (before, after), (a, b) in zip(pairs, steps, lengths, strict=True):
        explained = min(a, b) * _TORN > max(a, b) and before @ after >= _BACK * a * b
        if not (explained or np.linalg.norm(after - before) <= slight):  # so that NaN is not explained
            return names
    return None


def _step(poses: Mapping[str, np.ndarray], first: str, second: str) -> np.ndarray:
    """(3,) the second camera, as the first sees it."""
    return (poses[first] @ np.linalg.inv(poses[second]))[:3, 3]


def carried(
    frames: Sequence[tuple[int, np.ndarray]],
    tracked: Mapping[int, np.ndarray],
    adjusted: Mapping[int, np.ndarray],
) -> np.ndarray:
    """(F, 4, 4) world_from_cam of frames that move with their keyframes.

    With one camera the unit of length drifts: where the step from a keyframe to the next has become much
    longer or shorter, those of the frames between them have too.

    Args:
        frames: the keyframe and world_from_cam (4, 4), as tracked, of each of F frames.
        tracked: keyframe → world_from_cam (4, 4) as tracked, in order.
        adjusted: the same, adjusted; keyframes that are absent stay where they are.
    """
    scales = dict.fromkeys(tracked, 1.0)
    for index, following in pairwise(tracked):
        if index in adjusted and following in adjusted:
            ends = ((poses[index][:3, 3], poses[following][:3, 3]) for poses in (tracked, adjusted))
            before, after = (float(np.linalg.norm(second - first)) for first, second in ends)
            near = before / _DRIFTED <= after <= before * _DRIFTED
            scales[index] = 1.0 if near or before == 0 else after / before
            scales[following] = scales[index]  # the last one has no next
    found = []
    for index, pose in frames:
        step = np.linalg.inv(tracked[index]) @ pose
        step[:3, 3] *= scales[index]
        found.append(adjusted.get(index, tracked[index]) @ step)
    return np.array(found)


# --- closed_trajectory: The path of a sequence before and after its loops were closed.


@dataclass(frozen=True, eq=False)
class ClosedTrajectory:
    """The poses of all frames that had one, before and after their keyframes were adjusted."""

    frames: np.ndarray  # (F,) int64 indices of the frames
    timestamps: np.ndarray  # (F,) seconds; a frame's index where it has none
    before: np.ndarray  # (F, 4, 4) world_from_cam as tracked
    after: np.ndarray  # (F, 4, 4) the same, adjusted
    loops: tuple[Loop, ...]
    folder: Path  # of the model, for `Map.open`
    problem: str | None = None  # why the graph of poses was not optimised although there are loops
    alike: int = 0  # pairs of keyframes that match and cannot show one place, which are left out

    def plot(self, path: str | Path) -> Path:
        """Draw both paths from above and how far each pose was moved, as a PNG."""

        return plot_closing(Path(path), self.before, self.after, self._joined())

    def record(self, path: str | Path) -> Path:
        """Write the same as a recording (.rrd) for the rerun viewer.

        Raises:
            UsageError: rerun is not installed.
        """

        return record_closing(Path(path), self.before, self.after, self._joined())

    def _joined(self) -> list[tuple[int, int]]:
        rows = {index: row for row, index in enumerate(self.frames.tolist())}
        return [(rows[first], rows[second]) for first, second, _ in self.loops]

    def moved(self) -> np.ndarray:
        """(F,) how far each pose was moved."""
        return np.linalg.norm(self.after[:, :3, 3] - self.before[:, :3, 3], axis=1)


# --- closing_plot: A plot of a trajectory before and after its loops were closed.

_BEFORE_CLOSING_PLOT, _AFTER_CLOSING_PLOT, _LOOP_CLOSING_PLOT = "#999999", "#0072b2", "#d55e00"


def plot_closing(path: Path, before: np.ndarray, after: np.ndarray, loops: Sequence[tuple[int, int]]) -> Path:
    """Draw both paths from above, the tracked poses that loops join, and how far each pose was moved.

    Args:
        path: a .png file, which is replaced.
        before, after: (F, 4, 4) world_from_cam, x right, y down, z ahead.
        loops: pairs of rows.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, beside = figure.subplots(1, 2)
    # Tracked ones are wider, so that both are seen where they agree.
    paths = ((before, _BEFORE_CLOSING_PLOT, "tracked", 4.0), (after, _AFTER_CLOSING_PLOT, "adjusted", 1.5))
    for poses, colour, label, width in paths:
        above.plot(poses[:, 0, 3], poses[:, 2, 3], color=colour, label=label, linewidth=width)
    for number, rows in enumerate(loops):  # where they were before, as they lie together afterwards
        ends = before[list(rows), :3, 3]
        label = None if number else "loops"
        above.plot(
            ends[:, 0],
            ends[:, 2],
            "o-",
            color=_LOOP_CLOSING_PLOT,
            linewidth=0.8,
            markersize=3,
            alpha=0.6,
            label=label,
        )
    above.set_aspect("equal", "datalim")
    above.set(xlabel="right", ylabel="ahead", title=f"from above, {len(loops)} loop closures")
    above.legend()
    beside.plot(np.linalg.norm(after[:, :3, 3] - before[:, :3, 3], axis=1), color=_AFTER_CLOSING_PLOT)
    beside.set(xlabel="pose", ylabel="moved by", title="how far each pose was moved")
    beside.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_output(path, buffer.getvalue())
    return path


# --- closing_recording: A recording of a trajectory before and after its loops were closed, for the rerun
# viewer.

_BEFORE_CLOSING_RECORDING, _AFTER_CLOSING_RECORDING, _LOOP_CLOSING_RECORDING = (
    (150, 150, 150),
    (0, 114, 178),
    (213, 94, 0),
)


def record_closing(
    path: Path, before: np.ndarray, after: np.ndarray, loops: Sequence[tuple[int, int]]
) -> Path:
    """Write both paths, the tracked poses that loops join, and how far each pose was moved.

    Args:
        path: an .rrd file, which is replaced.
        before, after: (F, 4, 4) world_from_cam, x right, y down, z ahead.
        loops: pairs of rows.

    Raises:
        UsageError: rerun is not installed.
    """
    with RecordingFile(path) as file:
        rr, stream = file.rr, file.stream
        file.lay_out("path and loops", file.views.TimeSeriesView(origin="moved_by", name="moved by"))
        for name, poses, colour in (
            ("tracked", before, _BEFORE_CLOSING_RECORDING),
            ("adjusted", after, _AFTER_CLOSING_RECORDING),
        ):
            line = rr.LineStrips3D([poses[:, :3, 3]], colors=colour)
            stream.log(f"world/{name}", line, static=True)
        ends = [before[list(rows), :3, 3] for rows in loops]
        if ends:
            stream.log("world/loops", rr.LineStrips3D(ends, colors=_LOOP_CLOSING_RECORDING), static=True)
        moved = np.linalg.norm(after[:, :3, 3] - before[:, :3, 3], axis=1)
        for row, distance in enumerate(moved):
            stream.set_time("pose", sequence=row)
            stream.log("moved_by", rr.Scalars([float(distance)]))
    return path
