"""Reprojection of points from one image into another by depth and pose.

A depth map holds z of every `stride`-th pixel in both directions, in metres like the poses, 0 if unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from matcher.errors import ImageError

EDGE = 0.05  # relative difference of neighbouring depths beyond which they belong to two surfaces
AGREEMENT = 0.03  # relative difference of depths up to which a point is visible in the other image
_SLACK = 0.02  # metres, added to that difference
_MILLIMETRES = 1e-3


@dataclass(frozen=True, eq=False)
class DepthCamera:
    """The camera and the depth map of an image."""

    path: Path  # of the depth map, a 16-bit PNG in millimetres
    stride: int
    K: np.ndarray  # (3, 3) of the stored image
    cam_from_world: np.ndarray  # (4, 4), metres

    def depth(self) -> np.ndarray:
        """(h, w) float32 metres.

        Raises:
            ImageError: the file cannot be read.
        """
        found = cv2.imread(str(self.path), cv2.IMREAD_UNCHANGED)
        if found is None or found.ndim != 2:
            raise ImageError(f"{self.path}: no depth map; a grey 16-bit PNG in millimetres is needed")
        return found.astype(np.float32) * np.float32(_MILLIMETRES)


def depth_at(points: np.ndarray, camera: DepthCamera) -> np.ndarray:
    """(N,) depth at points (N, 2), interpolated bilinearly in inverse depth.

    NaN where it is unknown, outside the image, or at a depth edge.
    """
    depth = camera.depth()
    at = np.nan_to_num(points, nan=-1e6).clip(-1e6, 1e6) / camera.stride
    low = np.floor(at).astype(np.int64)
    height, width = depth.shape
    known = (low >= 0).all(axis=1) & (low[:, 0] < width - 1) & (low[:, 1] < height - 1)
    x, y = (low * known[:, None]).T
    corners = np.stack([depth[y, x], depth[y, x + 1], depth[y + 1, x], depth[y + 1, x + 1]], axis=1)
    nearest, farthest = corners.min(axis=1), corners.max(axis=1)
    known &= (nearest > 0) & (farthest <= nearest * (1 + EDGE))
    u, v = (at - low).T
    weights = np.stack([(1 - u) * (1 - v), u * (1 - v), (1 - u) * v, u * v], axis=1)
    inverse = (weights / np.where(corners > 0, corners, 1)).sum(axis=1)
    return np.where(known, 1 / np.where(known, inverse, 1), np.nan)


def reproject(points: np.ndarray, source: DepthCamera, target: DepthCamera) -> tuple[np.ndarray, np.ndarray]:
    """Project points (N, 2) of one image into another.

    Returns:
        (N, 2) stored pixels of the target: NaN where the depth cannot decide, infinite where the point is not
        visible in the target (occluded, behind the camera or outside the image); and (N,) bool, the points
        that are visible.
    """
    z = depth_at(points, source)
    rays = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(source.K).T
    pose = target.cam_from_world @ np.linalg.inv(source.cam_from_world)
    points1 = (rays * z[:, None]) @ pose[:3, :3].T + pose[:3, 3]
    front = points1[:, 2] > 1e-6
    projected = points1 @ target.K.T
    pixels = projected[:, :2] / np.where(front, points1[:, 2], 1)[:, None]
    measured = depth_at(np.where(front[:, None], pixels, np.nan), target)
    height, width = target.depth().shape
    limit = np.array([width, height]) * target.stride
    with np.errstate(invalid="ignore"):
        outside = front & ((pixels < -0.5) | (pixels > limit - 0.5)).any(axis=1)
        consistent = np.abs(measured - points1[:, 2]) < AGREEMENT * points1[:, 2] + _SLACK
    visible = np.isfinite(z) & front & consistent
    hidden = np.isfinite(z) & (~front | outside | (np.isfinite(measured) & ~consistent))
    pixels = np.where(hidden[:, None], np.inf, pixels)
    return np.where((visible | hidden)[:, None], pixels, np.nan), visible
