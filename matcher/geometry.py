"""The pixel convention, in one place, and the plane geometry built on it.

The centre of the first pixel is (0, 0). Resizing by (sx, sy) maps p to (p + 0.5)·s − 0.5. Points are xy,
`size` is (width, height). *Stored* pixels are those of the file; *upright* pixels are what EXIF orientation
makes of them.
"""

from __future__ import annotations

import numpy as np

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
    """The size whose longer side is at most `longer_side`, and the exact scale (sx, sy) after rounding.

    Pictures are only ever made smaller; None keeps them.
    """
    width, height = size
    factor = 1.0 if longer_side is None else min(1.0, longer_side / max(width, height))
    new = (max(1, round(width * factor)), max(1, round(height * factor)))
    return new, (new[0] / width, new[1] / height)


def resize_points(points: np.ndarray, scale: tuple[float, float]) -> np.ndarray:
    """Points (…, 2) of a picture → the same points after resizing it by `scale` = (sx, sy)."""
    return (points + 0.5) * np.asarray(scale, dtype=np.float64) - 0.5


def upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """(width, height) after turning a stored picture of `size` upright."""
    return (size[1], size[0]) if orientation >= 5 else (size[0], size[1])


def stored_to_upright(points: np.ndarray, size: tuple[int, int], orientation: int) -> np.ndarray:
    """Stored pixels (…, 2) → upright pixels; `size` is the stored size."""
    centre = (np.asarray(size, dtype=np.float64) - 1) / 2
    new_centre = (np.asarray(upright_size(size, orientation), dtype=np.float64) - 1) / 2
    return (points - centre) @ UPRIGHT[orientation].T + new_centre


def upright_to_stored(points: np.ndarray, size: tuple[int, int], orientation: int) -> np.ndarray:
    """Upright pixels (…, 2) → stored pixels; the inverse of `stored_to_upright`."""
    centre = (np.asarray(size, dtype=np.float64) - 1) / 2
    new_centre = (np.asarray(upright_size(size, orientation), dtype=np.float64) - 1) / 2
    return (points - new_centre) @ UPRIGHT[orientation] + centre


def turn_angles(angles: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Directions (radians, from x towards y) after the linear map `turn` (2, 2)."""
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=-1) @ turn.T
    return np.arctan2(directions[..., 1], directions[..., 0])


def warp_points(points: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """Points (…, 2) under a 3×3 homography; NaN where they fall on or behind the horizon."""
    lifted = points @ homography[:, :2].T + homography[:, 2]
    depth = lifted[..., 2:]
    safe = np.where(depth > 1e-8, depth, np.nan)
    return lifted[..., :2] / safe


def inside(points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(…,) bool: points that lie on the pixels of a picture; NaN is outside."""
    x, y = points[..., 0], points[..., 1]
    with np.errstate(invalid="ignore"):
        return (x >= -0.5) & (x <= size[0] - 0.5) & (y >= -0.5) & (y <= size[1] - 0.5)


def epipolar_distance(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(K,) symmetric epipolar distance in pixels: the mean of the distances to the line in either picture.

    Hartley and Zisserman, Multiple View Geometry, 2nd edition, section 11.4.
    """
    lifted0 = np.concatenate([points0, np.ones_like(points0[:, :1])], axis=1)
    lifted1 = np.concatenate([points1, np.ones_like(points1[:, :1])], axis=1)
    lines1, lines0 = lifted0 @ fundamental.T, lifted1 @ fundamental
    residual = np.abs(np.sum(lines1 * lifted1, axis=1))
    norm0 = np.maximum(np.linalg.norm(lines0[:, :2], axis=1), 1e-12)
    norm1 = np.maximum(np.linalg.norm(lines1[:, :2], axis=1), 1e-12)
    return 0.5 * residual * (1 / norm0 + 1 / norm1)


def fundamental_from_pose(K0: np.ndarray, K1: np.ndarray, T_0to1: np.ndarray) -> np.ndarray:
    """F (3, 3) with x1ᵀ F x0 = 0 from intrinsics and the pose that takes camera-0 points to camera 1."""
    x, y, z = T_0to1[:3, 3]
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.linalg.inv(K1).T @ cross @ T_0to1[:3, :3] @ np.linalg.inv(K0)
