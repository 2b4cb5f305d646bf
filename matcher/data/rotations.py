"""Rotations as matrices and as quaternions x y z w."""

from __future__ import annotations

import numpy as np


def as_quaternion(rotation: np.ndarray) -> np.ndarray:
    """(4,) x y z w, w ≥ 0, of a rotation (3, 3)."""
    R = np.asarray(rotation, np.float64)
    # Each row is the quaternion times four times one of its components; the longest is the most exact.
    rows = np.array(
        [
            [1 + R[0, 0] - R[1, 1] - R[2, 2], R[0, 1] + R[1, 0], R[0, 2] + R[2, 0], R[2, 1] - R[1, 2]],
            [R[0, 1] + R[1, 0], 1 - R[0, 0] + R[1, 1] - R[2, 2], R[1, 2] + R[2, 1], R[0, 2] - R[2, 0]],
            [R[0, 2] + R[2, 0], R[1, 2] + R[2, 1], 1 - R[0, 0] - R[1, 1] + R[2, 2], R[1, 0] - R[0, 1]],
            [R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1], 1 + np.trace(R)],
        ]
    )
    longest = rows[np.argmax(np.diag(rows))]
    return longest / np.linalg.norm(longest) * (-1 if longest[3] < 0 else 1)


def as_rotation(quaternion: np.ndarray) -> np.ndarray:
    """(3, 3) of a quaternion x y z w of any length but 0."""
    x, y, z, w = np.asarray(quaternion, np.float64) / np.linalg.norm(quaternion)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + 2 * w * cross + 2 * cross @ cross
