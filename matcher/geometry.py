"""The pixel convention, in one place, the plane geometry built on it, and rotations.

The centre of the first pixel is (0, 0). Resizing by (sx, sy) maps p to (p + 0.5)·s − 0.5. Points are xy,
`size` is (width, height). *Stored* pixels are those of the file; *upright* pixels are what EXIF orientation
makes of them.
"""

from __future__ import annotations

import math

import numpy as np

FROM_CORNER = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])  # (3, 3) to pixels counted from a corner
LONGEST_ASPECT = 4.0  # longer / shorter side, above which images are resized by area

# stored → upright as a signed permutation of the centred coordinates, by EXIF orientation 1-8 (0 is unused).
UPRIGHT = np.array(
    [
        [[1, 0], [0, 1]],
        [[1, 0], [0, 1]],
        [[-1, 0], [0, 1]],
        [[-1, 0], [0, -1]],
        [[1, 0], [0, -1]],
        [[0, 1], [1, 0]],
        [[0, -1], [1, 0]],
        [[0, -1], [-1, 0]],
        [[0, 1], [-1, 0]],
    ],
    dtype=np.float64,
)


def resized(size: tuple[int, int], longer_side: int | None) -> tuple[tuple[int, int], tuple[float, float]]:
    """The size whose longer side is at most `longer_side` (None: any), and the exact scale (sx, sy) after
    rounding. Of a strip too few rows would be left: it gets the area of a 4:3 image of that longer side."""
    width, height = size
    factor = 1.0
    if longer_side is not None and max(size) > LONGEST_ASPECT * min(size):
        factor = min(1.0, longer_side * math.sqrt(0.75 / (width * height)))
    elif longer_side is not None:
        factor = min(1.0, longer_side / max(width, height))
    new = (max(1, round(width * factor)), max(1, round(height * factor)))
    return new, (new[0] / width, new[1] / height)


def resize_points(points: np.ndarray, scale: tuple[float, float]) -> np.ndarray:
    """Points (…, 2) of an image → the same points after resizing it by `scale` = (sx, sy)."""
    return (points + 0.5) * np.asarray(scale, dtype=np.float64) - 0.5


def upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """(width, height) after turning a stored image of `size` upright."""
    return (size[1], size[0]) if orientation >= 5 else (size[0], size[1])


def stored_to_upright(points: np.ndarray, size: tuple[int, int], orientation: int) -> np.ndarray:
    """Stored pixels (…, 2) → upright pixels; `size` is the stored size."""
    centre, new_centre = _centres(size, orientation)
    return (points - centre) @ UPRIGHT[orientation].T + new_centre


def upright_to_stored(points: np.ndarray, size: tuple[int, int], orientation: int) -> np.ndarray:
    """Upright pixels (…, 2) → stored pixels; the inverse of `stored_to_upright`."""
    centre, new_centre = _centres(size, orientation)
    return (points - new_centre) @ UPRIGHT[orientation] + centre


def _centres(size: tuple[int, int], orientation: int) -> np.ndarray:
    """(2, 2) the middles of an image as stored and upright."""
    return (np.array([size, upright_size(size, orientation)], dtype=np.float64) - 1) / 2


def upright_matrix(size: tuple[int, int], orientation: int) -> np.ndarray:
    """(3, 3) of `stored_to_upright`, for homogeneous points."""
    shift = stored_to_upright(np.zeros((1, 2)), size, orientation)
    return np.block([[UPRIGHT[orientation], shift.T], [np.zeros((1, 2)), np.ones((1, 1))]])


def turn_angles(angles: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Directions (radians, from x towards y) after the linear map `turn` (2, 2)."""
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=-1) @ turn.T
    return np.arctan2(directions[..., 1], directions[..., 0])


def warp_points(points: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """Points (…, 2) under a 3×3 homography; NaN where they fall on or behind the horizon."""
    lifted = points @ homography[:, :2].T + homography[:, 2]
    depth = lifted[..., 2:]
    return lifted[..., :2] / np.where(depth > 1e-8, depth, np.nan)


def inside(points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(…,) bool: points that lie on the pixels of an image; NaN is outside."""
    x, y = points[..., 0], points[..., 1]
    with np.errstate(invalid="ignore"):
        return (x >= -0.5) & (x <= size[0] - 0.5) & (y >= -0.5) & (y <= size[1] - 0.5)


# Rotations as matrices and as quaternions x y z w.

FARTHEST = 1e12  # units of a translation


def spread(points: np.ndarray, scores: np.ndarray, most: int) -> np.ndarray:
    """(K,) int64, at most `most`: the points (N, 2) that a grid keeps, of the highest scores first.

    Each cell first keeps its share, and the quota that sparse cells leave goes to the best of the rest, which
    avoids clusters.
    """
    order = np.argsort(-scores, kind="stable")
    if len(points) <= most:
        return order
    extent = np.maximum(np.ptp(points, axis=0), 1.0)
    side = np.sqrt(np.prod(extent) * 8 / max(1, most))  # a cell has eight keypoints if they are spread evenly
    cell = ((points[order] - points.min(axis=0)) // side).astype(np.int64)
    cell = cell[:, 0] + cell[:, 1] * (cell[:, 0].max() + 1)
    _, cell, counts = np.unique(cell, return_inverse=True, return_counts=True)
    by_cell = np.argsort(cell, kind="stable")  # within a cell still best first
    rank = np.empty(len(order), dtype=np.int64)
    rank[by_cell] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.argsort(rank >= max(1, most // len(counts)), kind="stable")[:most]
    return order[np.sort(chosen)]


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
    """(…, 3, 3) of quaternions (…, 4) x y z w; `ValueError`: one of length 0, or not finite."""
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
    """Refuse, by `ValueError`, matrices (N, 4, 4) that are no poses, or of more than 10¹² units."""
    if not (np.abs(poses) <= FARTHEST).all():
        raise ValueError("a pose is not finite, or too far away")
    turns = poses[:, :3, :3]
    small = (np.abs(turns) <= 2).all()  # or products could overflow
    if not small or not np.allclose(turns @ turns.transpose(0, 2, 1), np.eye(3), rtol=0, atol=0.01):
        raise ValueError("the first three columns of a pose are no rotation")
    if (np.linalg.det(turns) < 0).any():
        raise ValueError("a pose is mirrored")
