"""Rotations as matrices and as quaternions x y z w."""

from __future__ import annotations

import numpy as np

FARTHEST = 1e12  # units of a translation
_SKEWED = 0.01  # by which a rotation written with few digits may differ from one


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


def as_rotation(quaternions: np.ndarray) -> np.ndarray:
    """(…, 3, 3) of quaternions (…, 4) x y z w of any length but 0.

    Raises:
        ValueError: a quaternion of length 0, or values that are not finite.
    """
    q = np.asarray(quaternions, np.float64)
    largest = np.abs(q).max(axis=-1, keepdims=True)
    if not ((largest > 0) & (largest < np.inf)).all():
        raise ValueError("a quaternion of length 0, or without finite values, is no rotation")
    q = q / largest  # or the squares could overflow
    x, y, z, w = np.moveaxis(q / np.linalg.norm(q, axis=-1, keepdims=True), -1, 0)
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=-1).reshape(*q.shape[:-1], 3, 3)
    return np.eye(3) + 2 * w[..., None, None] * cross + 2 * cross @ cross


def check_poses(poses: np.ndarray) -> None:
    """Refuse matrices (N, 4, 4) that are no poses.

    Raises:
        ValueError: a value that is not finite, a translation of more than 10¹² units, or a matrix that is
            no rotation.
    """
    if not (np.abs(poses) <= FARTHEST).all():
        raise ValueError("a pose is not finite, or too far away")
    turns = poses[:, :3, :3]
    if (np.abs(turns) > 2).any() or not np.allclose(
        turns @ turns.transpose(0, 2, 1), np.eye(3), rtol=0, atol=_SKEWED
    ):
        raise ValueError("the first three columns of a pose are no rotation")
    if (np.linalg.det(turns) < 0).any():
        raise ValueError("a pose is mirrored")
