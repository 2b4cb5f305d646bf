"""The graph of keyframes' poses, its edges tracked steps and loops.

COLMAP's mappers know what pairs of keyframes share. Where three in a row share little, in front of a bare
wall, they tear the path, which tracking had from frame to frame. Here every tracked step is an edge:
rotations are averaged by COLMAP (Chatterjee and Govindu 2013), then positions and the unit of length, which
drifts with one camera, are those of least squares, with loops that disagree weighted down. What comes of it
is close enough for bundle adjustment to do the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from matcher.collection.exporting.colmap import import_pycolmap
from matcher.collection.reconstruction.reconstruct import ReconstructionError
from matcher.collection.records import StoredPair
from matcher.config import EstimationConfig
from matcher.data.camera import Camera
from matcher.verify.estimation import RobustEstimator

MOST = 2000  # keyframes, whose equations take 0.5 GB, three times at once
_STEP, _LEAST = 0.03, 0.2  # errors of a step: a share of its length, and of that share of the median length
_UNIT = 0.02  # by which the unit of length changes from one step to the next
_LOOP = 0.3  # median steps, by which the end of a loop may be beside the line on which its matches put it
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
            _add(equations, line, weight / (_LOOP * median))
        found = np.linalg.solve(equations, wanted)
        beside = [sum(part @ found[at : at + 3] for at, part in line) for line in lines]
        errors = np.linalg.norm(beside, axis=1) / (_LOOP * median)
        weights = 1 / np.sqrt(np.maximum(errors, 1))  # of Huber
    return found[: 3 * count].reshape(-1, 3)


def _add(equations: np.ndarray, parts: list[tuple[int, np.ndarray]], weight: float) -> None:
    """Add the normal equations of residuals that are sums of `parts`: where each begins, and its matrix."""
    for at, left in parts:
        for beside, right in parts:
            where = np.s_[at : at + left.shape[1], beside : beside + right.shape[1]]
            equations[where] += weight**2 * left.T @ right
