"""Pose of a frame from the keyframe's depths, and depths from poses."""

from __future__ import annotations

import numpy as np
import poselib

from matcher.data.camera import Camera

MIN_POINTS = 12  # with a known depth that agree with a pose
_MAX_ERROR = 1.0  # pixels of the resized image that a point may be off its pose
_MIN_ANGLE = 0.6  # degrees between the rays of a point whose depth is worth something


def rays(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 3) points of depth 1 seen at pixels (N, 2)."""
    x = (points[:, 0] - camera.cx) / camera.fx
    y = (points[:, 1] - camera.cy) / camera.fy
    return np.column_stack([x, y, np.ones(len(points))]).astype(np.float64)


def move(points: np.ndarray, T: np.ndarray) -> np.ndarray:
    """Points (N, 3) under a rigid transform (4, 4)."""
    return points @ T[:3, :3].T + T[:3, 3]


def project(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 2) pixels of points (N, 3); those behind the camera are NaN."""
    z = np.where(points[:, 2] > 1e-9, points[:, 2], np.nan)
    return np.column_stack(
        [camera.fx * points[:, 0] / z + camera.cx, camera.fy * points[:, 1] / z + camera.cy]
    )


def solve_pose(
    points0: np.ndarray, depths0: np.ndarray, points1: np.ndarray, camera: Camera, scale: float = 1.0
) -> tuple[np.ndarray | None, np.ndarray]:
    """The pose of a frame that sees points whose depth an earlier one knows (LO-RANSAC, PoseLib).

    Args:
        points0: (K, 2) pixels in the earlier frame.
        depths0: (K,) along its z axis, NaN where unknown.
        points1: (K, 2) pixels in the frame.
        camera: of both.
        scale: camera pixels for one of the resized image, in which the threshold is.

    Returns:
        cam1_from_cam0 (4, 4) in the unit of the depths, or None; and (K,) bool, the points that agree.
    """
    inliers = np.zeros(len(points0), bool)
    known = np.flatnonzero(np.isfinite(depths0))
    if len(known) < MIN_POINTS:
        return None, inliers
    world = rays(points0[known], camera) * depths0[known, None]
    pinhole = {
        "model": "PINHOLE",
        "width": 0,
        "height": 0,
        "params": [camera.fx, camera.fy, camera.cx, camera.cy],
    }
    options = {
        "max_reproj_error": _MAX_ERROR * scale,
        "max_iterations": 2000,
        "min_iterations": 100,  # links have been verified before, so that few are wrong
        "success_prob": 0.9999,
        "seed": 0,
    }
    refinement = {"loss_type": "CAUCHY", "loss_scale": 0.5 * _MAX_ERROR * scale}
    pose, report = poselib.estimate_absolute_pose(
        points1[known].astype(np.float64), world, pinhole, options, refinement
    )
    inliers[known] = np.asarray(report["inliers"], dtype=bool)
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = pose.R, pose.t
    if inliers.sum() < MIN_POINTS or not np.isfinite(T).all():
        return None, np.zeros(len(points0), bool)
    return T, inliers


def triangulate(
    points0: np.ndarray, points1: np.ndarray, cam1_from_cam0: np.ndarray, camera: Camera, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Depths of points that two frames see, where they can be known.

    The midpoint of the shortest line between both rays (Hartley and Sturm 1997, section 5.3).

    Args:
        points0, points1: (K, 2) pixels.
        cam1_from_cam0: (4, 4).
        camera: of both.
        scale: as in `solve_pose`.

    Returns:
        depths (K,) along z in frame 0, NaN for points behind a camera, seen at too small an angle or
        projected too far away; and the angle between the rays (K,) in degrees.
    """
    a = rays(points0, camera) @ cam1_from_cam0[:3, :3].T  # rays of frame 0, turned into frame 1
    b, t = rays(points1, camera), cam1_from_cam0[:3, 3]
    angles = np.rad2deg(np.arctan2(np.linalg.norm(np.cross(a, b), axis=1), np.sum(a * b, axis=1)))
    aa, bb, ab = np.sum(a * a, axis=1), np.sum(b * b, axis=1), np.sum(a * b, axis=1)
    at, bt = a @ t, b @ t
    apart = np.maximum(aa * bb - ab * ab, 1e-15)
    depths = (ab * bt - bb * at) / apart  # least squares of depth0·a + t = depth1·b
    depths1 = (aa * bt - ab * at) / apart
    middle = (a * depths[:, None] + t + b * depths1[:, None]) / 2
    with np.errstate(invalid="ignore"):
        error = np.linalg.norm(project(middle, camera) - points1, axis=1)
        good = (depths > 0) & (depths1 > 0) & (angles >= _MIN_ANGLE) & (error <= 2 * _MAX_ERROR * scale)
    return np.where(good, depths, np.nan), angles
