"""Whether two keyframes that match are a place come back to, or two places that look alike.

In a corridor every door and every bin has its like, and enough of them agree with one epipolar geometry. What
tells them apart is the path: tracking drifts, but not by as far as the camera has gone.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from matcher.config import EstimationConfig
from matcher.data.camera import Camera
from matcher.verify.distances import fundamental_from_pose, sampson
from matcher.verify.estimation import RobustEstimator

PairKind = Literal["loop", "along", "alike"]
_DRIFT = 0.5  # of the path between two keyframes, by which tracking may have put them apart
_TURN = 60.0  # degrees by which tracking may have turned
_NEAR = 0.01  # of the focal length: distance from the epipolar line by which a match agrees with tracking
_AGREEING = 0.5  # share of the matches


def kind_of_pair(
    points0: np.ndarray,
    points1: np.ndarray,
    camera: Camera,
    poses: tuple[np.ndarray, np.ndarray],
    travelled: float,
) -> PairKind:
    """What a verified pair of keyframes far apart in time is.

    A "loop" can be explained by drift; a pair "along" the path shows from afar what comes nearer later, as
    its tracked poses say; of a pair that is neither, the images are merely "alike".

    Args:
        points0, points1: (M, 2) its inliers, stored pixels.
        camera: of both.
        poses: world_from_cam (4, 4) of both as tracked.
        travelled: length of the tracked path between them.
    """
    pose = np.linalg.inv(poses[1]) @ poses[0]
    along = _agree(points0, points1, camera, pose)
    if np.linalg.norm(poses[1][:3, 3] - poses[0][:3, 3]) > _DRIFT * travelled:
        return "along" if along else "alike"
    estimate = RobustEstimator(EstimationConfig(kind="essential"))
    found = estimate(points0, points1, cameras=(camera, camera)).cam1_from_cam0
    if along or found is None or _angle(found[:3, :3] @ pose[:3, :3].T) < _TURN:
        return "loop"
    return "alike"


def path_lengths(world_from_cam: np.ndarray) -> np.ndarray:
    """(N,) length of the path up to each of N poses (N, 4, 4)."""
    steps = np.linalg.norm(np.diff(world_from_cam[:, :3, 3], axis=0), axis=1)
    return np.concatenate([[0.0], np.cumsum(steps)])


def _agree(points0: np.ndarray, points1: np.ndarray, camera: Camera, pose: np.ndarray) -> bool:
    fundamental = fundamental_from_pose(camera.K, camera.K, pose)
    near = sampson(points0, points1, fundamental) < _NEAR * (camera.fx + camera.fy) / 2
    return bool(near.mean() >= _AGREEING)


def _angle(rotation: np.ndarray) -> float:
    return float(np.degrees(np.arccos(np.clip((np.trace(rotation) - 1) / 2, -1, 1))))
