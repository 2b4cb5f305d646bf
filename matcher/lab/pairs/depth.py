"""Where points of one picture lie in another, by depth and pose.

Depth is z of every `stride`-th pixel of every `stride`-th row, in metres as the poses, 0 where unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from matcher.errors import ImageError

EDGE = 0.05  # relative difference of neighbouring depths beyond which a surface ends
AGREEMENT = 0.03  # relative difference of depths at which a point is the one that the other picture shows
_SLACK = 0.02  # added to it, in the unit of the poses: two centimetres
_MILLIMETRES = 1e-3


@dataclass(frozen=True, eq=False)
class DepthCamera:
    """A calibrated picture with its depth."""

    path: Path  # of the depth, a 16-bit PNG in millimetres
    stride: int
    K: np.ndarray  # (3, 3) of the stored picture
    camera_from_world: np.ndarray  # (4, 4), metres

    def depth(self) -> np.ndarray:
        """(h, w) float32 metres.

        Raises:
            ImageError: the file cannot be read.
        """
        found = cv2.imread(str(self.path), cv2.IMREAD_UNCHANGED)
        if found is None or found.ndim != 2:
            raise ImageError(f"{self.path}: no depth in it (a grey 16-bit PNG in millimetres)")
        return found.astype(np.float32) * np.float32(_MILLIMETRES)


def depth_at(points: np.ndarray, camera: DepthCamera) -> np.ndarray:
    """(N,) depth at points (N, 2), bilinear in the inverse depth.

    NaN where it is unknown, beyond the picture, or where a surface ends between the four values.
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
    """Where points (N, 2) of one picture lie in another.

    Returns:
        (N, 2) stored pixels of the target, NaN where depth does not tell, infinite where the target does not
        show the point: it lies behind something, behind the camera or beside the picture; and (N,) bool,
        points that the target shows.
    """
    z = depth_at(points, source)
    rays = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(source.K).T
    pose = target.camera_from_world @ np.linalg.inv(source.camera_from_world)
    there = (rays * z[:, None]) @ pose[:3, :3].T + pose[:3, 3]
    front = there[:, 2] > 1e-6
    lifted = there @ target.K.T
    moved = lifted[:, :2] / np.where(front, there[:, 2], 1)[:, None]
    seen_depth = depth_at(np.where(front[:, None], moved, np.nan), target)
    height, width = target.depth().shape
    limit = np.array([width, height]) * target.stride
    with np.errstate(invalid="ignore"):
        beside = front & ((moved < -0.5) | (moved > limit - 0.5)).any(axis=1)
        agrees = np.abs(seen_depth - there[:, 2]) < AGREEMENT * there[:, 2] + _SLACK
    seen = np.isfinite(z) & front & agrees
    hidden = np.isfinite(z) & (~front | beside | (np.isfinite(seen_depth) & ~agrees))
    moved = np.where(hidden[:, None], np.inf, moved)
    return np.where((seen | hidden)[:, None], moved, np.nan), seen
