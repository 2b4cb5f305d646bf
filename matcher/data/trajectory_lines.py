"""Poses world_from_cam as lines of trajectory files: of TUM, with times, and of KITTI, without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from matcher.data.rotations import as_quaternion
from matcher.files import MARK


def tum_lines(timestamps: Sequence[float], poses: Sequence[np.ndarray]) -> list[str]:
    """A comment, which lets a later run replace the file unasked, and a line per pose: `t x y z qx qy qz qw`.

    Args:
        timestamps: (N,) seconds.
        poses: N world_from_cam (4, 4).
    """
    lines = [f"# {MARK.decode()}: timestamp x y z qx qy qz qw of world_from_cam"]
    for time, pose in zip(timestamps, poses, strict=True):
        lines.append(f"{time:.6f} {numbers([*pose[:3, 3], *as_quaternion(pose[:3, :3])])}")
    return lines


def kitti_lines(poses: Iterable[np.ndarray]) -> list[str]:
    """The 12 numbers of the upper 3×4 part of each world_from_cam (4, 4)."""
    return [numbers(pose[:3].ravel()) for pose in poses]


def numbers(values: Iterable[float]) -> str:
    """Numbers to nine digits, with spaces between."""
    return " ".join(f"{value:.9g}" for value in values)
