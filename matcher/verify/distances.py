"""Residuals of matched points under a two-view geometry."""

from __future__ import annotations

import numpy as np


def epipolar_distance(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(K,) symmetric epipolar distance in pixels: the mean of the distances to the line in either image.

    Hartley and Zisserman, Multiple View Geometry, 2nd edition, section 11.4.
    """
    lifted0 = np.concatenate([points0, np.ones_like(points0[:, :1])], axis=1)
    lifted1 = np.concatenate([points1, np.ones_like(points1[:, :1])], axis=1)
    lines1, lines0 = lifted0 @ fundamental.T, lifted1 @ fundamental
    residual = np.abs(np.sum(lines1 * lifted1, axis=1))
    norm0 = np.maximum(np.linalg.norm(lines0[:, :2], axis=1), 1e-12)
    norm1 = np.maximum(np.linalg.norm(lines1[:, :2], axis=1), 1e-12)
    return 0.5 * residual * (1 / norm0 + 1 / norm1)


def fundamental_from_pose(K0: np.ndarray, K1: np.ndarray, cam1_from_cam0: np.ndarray) -> np.ndarray:
    """F (3, 3) with x1ᵀ F x0 = 0 from intrinsics and the pose that takes camera-0 points to camera 1."""
    x, y, z = cam1_from_cam0[:3, 3]
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.linalg.inv(K1).T @ cross @ cam1_from_cam0[:3, :3] @ np.linalg.inv(K0)


def sampson(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(N,) Sampson's distance in pixels."""
    lifted0, lifted1 = (np.column_stack([points, np.ones(len(points))]) for points in (points0, points1))
    lines1, lines0 = lifted0 @ fundamental.T, lifted1 @ fundamental
    slope = np.sqrt(np.sum(lines0[:, :2] ** 2, axis=1) + np.sum(lines1[:, :2] ** 2, axis=1))
    return np.abs(np.sum(lines1 * lifted1, axis=1)) / np.maximum(slope, 1e-300)


def in_front(
    points0: np.ndarray,
    points1: np.ndarray,
    inverse_calibrations: tuple[np.ndarray, np.ndarray],
    cam1_from_cam0: np.ndarray,
) -> np.ndarray:
    """(N,) bool: matches whose rays come nearest to each other in front of both cameras.

    Args:
        points0, points1: (N, 2) pixels.
        inverse_calibrations: K⁻¹ (3, 3) of image 0 and 1.
        cam1_from_cam0: (4, 4).
    """
    sides = zip((points0, points1), inverse_calibrations, strict=True)
    rays = [np.column_stack([points, np.ones(len(points))]) @ inverse.T for points, inverse in sides]
    first, second = (ray / np.linalg.norm(ray, axis=1, keepdims=True) for ray in rays)
    first = first @ cam1_from_cam0[:3, :3].T
    # The lengths a, b of least |a first + t − b second|, times a positive number.
    cosine = np.sum(first * second, axis=1)
    along0, along1 = -first @ cam1_from_cam0[:3, 3], second @ cam1_from_cam0[:3, 3]
    return (along0 + cosine * along1 > 0) & (cosine * along0 + along1 > 0)
