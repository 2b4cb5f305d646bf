"""Stereo odometry as one writes it with OpenCV in thirty lines: SIFT, ratio test, depth by row, PnP."""

from collections.abc import Iterable

import cv2
import numpy as np


def _pairs(descriptors0: np.ndarray, descriptors1: np.ndarray, ratio: float = 0.8) -> np.ndarray:
    best = cv2.BFMatcher().knnMatch(descriptors0, descriptors1, k=2)
    return np.array([(m.queryIdx, m.trainIdx) for m, n in best if m.distance < ratio * n.distance]).reshape(
        -1, 2
    )


def opencv_odometry(
    pairs: Iterable[tuple[np.ndarray, np.ndarray]], K: np.ndarray, baseline: float, features: int = 1024
) -> np.ndarray:
    """(N, 4, 4) world_from_cam of rectified grey pairs, each from the one before."""
    sift, poses, before = cv2.SIFT_create(features), [np.eye(4)], None
    for left, right in pairs:
        (keys, descriptors), (others, there) = (sift.detectAndCompute(each, None) for each in (left, right))
        points, right_points = (cv2.KeyPoint_convert(each).astype(float) for each in (keys, others))
        if before is not None:
            places, known, earlier = before
            rows = _pairs(earlier, descriptors)
            rows = rows[known[rows[:, 0]]]
            world, seen = places[rows[:, 0]], points[rows[:, 1]]
            _, turn, t, good = cv2.solvePnPRansac(world, seen, K, None, None, None, False, 2000, 1.0, 0.9999)
            turn, t = cv2.solvePnPRefineLM(world[good[:, 0]], seen[good[:, 0]], K, None, turn, t)
            step = np.vstack([np.hstack([cv2.Rodrigues(turn)[0], t]), [0, 0, 0, 1]])
            poses.append(poses[-1] @ np.linalg.inv(step))
        rows = _pairs(descriptors, there)
        offset = points[rows[:, 0]] - right_points[rows[:, 1]]
        rows, disparity = (
            each[(abs(offset[:, 1]) < 2) & (offset[:, 0] > 1)] for each in (rows, offset[:, 0])
        )
        places, known = np.zeros((len(points), 3)), np.zeros(len(points), bool)
        rays = np.column_stack([points[rows[:, 0]], np.ones(len(rows))]) @ np.linalg.inv(K).T
        places[rows[:, 0]], known[rows[:, 0]] = rays * (K[0, 0] * baseline / disparity)[:, None], True
        before = places, known, descriptors
    return np.array(poses)
