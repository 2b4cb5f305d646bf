"""Trajectories: TUM and KITTI files, relative errors over segments, scale of a single camera's path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from matcher.data.rotations import as_rotation, check_poses
from matcher.data.trajectory_lines import kitti_lines, tum_lines
from matcher.errors import UsageError
from matcher.files import read_given, write_whole

_ROUNDING = 1e-6  # metres
_NUMBERS = "12 numbers (KITTI) or 8 (TUM) in every line"


@dataclass(frozen=True)
class SegmentError:
    """Mean error over all segments of one length."""

    length: float  # metres along the true path
    count: int  # segments
    translation: float  # share of the length
    rotation: float  # degrees per metre


def write_trajectory(
    path: Path, timestamps: Sequence[float], poses: Sequence[np.ndarray], *, frames: int
) -> None:
    """In the form of TUM (.tum), or of KITTI (.kitti): 12 numbers, 3×4, a line for each of `frames` frames.

    Raises:
        UsageError: KITTI's lines have no times, and a frame has no pose.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() != ".kitti":
        write_tum(path, timestamps, poses)
        return
    if len(poses) < frames:
        raise UsageError(
            f"{path}: KITTI's lines have no times, and {frames - len(poses)} of {frames} frames have no "
            "pose; use .tum"
        )
    write_whole(path, "".join(f"{line}\n" for line in kitti_lines(poses)).encode())


def write_tum(path: str | Path, timestamps: Sequence[float], poses: Sequence[np.ndarray]) -> None:
    """A comment, and a line per pose: `t x y z qx qy qz qw`, in the order of the frames.

    Args:
        path: the file, which is replaced.
        timestamps: (N,) seconds.
        poses: N world_from_cam (4, 4).

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, "".join(f"{line}\n" for line in tum_lines(timestamps, poses)).encode())


def read_poses(path: str | Path) -> tuple[np.ndarray | None, np.ndarray]:
    """Poses world_from_cam from a file of KITTI (12 numbers per line, 3×4) or TUM (8 numbers).

    Returns:
        timestamps (N,) or None (KITTI has none), and poses (N, 4, 4).

    Raises:
        UsageError: the file cannot be read or holds something else.
    """
    try:
        text = read_given(path).decode("utf-8")
        rows = (line.split() for line in text.splitlines() if line.strip() and not line.startswith("#"))
        values = np.array([_pose_numbers(row) for row in rows])
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as poses ({error})") from error
    if values.ndim != 2 or not np.isfinite(values).all():
        raise UsageError(f"{path}: a pose file has {_NUMBERS}")
    poses = np.tile(np.eye(4), (len(values), 1, 1))
    try:
        if values.shape[1] == 12:
            poses[:, :3] = values.reshape(-1, 3, 4)
        else:
            poses[:, :3, :3] = as_rotation(values[:, 4:])
            poses[:, :3, 3] = values[:, 1:4]
        check_poses(poses)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return (values[:, 0] if values.shape[1] == 8 else None), poses


def _pose_numbers(words: list[str]) -> list[float]:
    if len(words) not in (8, 12):
        raise ValueError(f"a pose file has {_NUMBERS}, not {len(words)}")
    return [float(word) for word in words]


def path_length(poses: np.ndarray) -> np.ndarray:
    """(N,) distance travelled up to each pose (N, 4, 4)."""
    steps = np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1)
    return np.concatenate([[0.0], np.cumsum(steps)])


def segment_errors(
    ground_truth: np.ndarray, found: np.ndarray, lengths: Sequence[float] = (10, 20, 40)
) -> list[SegmentError]:
    """Relative errors as in KITTI's odometry benchmark (Geiger et al. 2012), of segments from every frame.

    Args:
        ground_truth: (N, 4, 4) camera to world, metres.
        found: (N, 4, 4) of the same frames, in any world frame.
        lengths: of the segments in metres of the true path; those longer than the path are left out, as are
            those of a path that stands still, whose errors have no length to be divided by.
    """
    travelled, errors = path_length(ground_truth), []
    for length in (each for each in lengths if each > _ROUNDING):
        rows = []
        for start in range(len(ground_truth)):
            end = int(np.searchsorted(travelled, travelled[start] + length - _ROUNDING))
            if end < len(ground_truth):
                error = _relative(found, start, end) @ np.linalg.inv(_relative(ground_truth, start, end))
                turn = np.clip((np.trace(error[:3, :3]) - 1) / 2, -1, 1)
                rows.append((np.linalg.norm(error[:3, 3]), np.rad2deg(np.arccos(turn))))
        if rows:
            translation, rotation = np.mean(rows, axis=0) / length
            errors.append(SegmentError(float(length), len(rows), float(translation), float(rotation)))
    return errors


def _relative(poses: np.ndarray, start: int, end: int) -> np.ndarray:
    return np.linalg.inv(poses[end]) @ poses[start]


def align(ground_truth: np.ndarray, found: np.ndarray, *, with_scale: bool) -> np.ndarray:
    """The found poses (N, 4, 4) in the frame of the true ones: the first frames are made equal.

    With `with_scale` the path is also scaled so that the positions fit best, which one camera cannot know.
    """
    local = np.linalg.inv(found[0]) @ found
    if with_scale:
        wanted = (np.linalg.inv(ground_truth[0]) @ ground_truth)[:, :3, 3]
        squares = np.sum(local[:, :3, 3] ** 2)
        local[:, :3, 3] *= np.sum(wanted * local[:, :3, 3]) / squares if squares > 0 else 1.0
    return ground_truth[0] @ local
