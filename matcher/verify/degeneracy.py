"""Degenerate configurations: matches on a line or spot, pure rotation, and support by chance.

Points and residuals are pixels of the resized images.
"""

from __future__ import annotations

from math import lgamma, log, pi, sqrt

import cv2
import numpy as np

from matcher.data.camera import Camera
from matcher.data.geometry import warp_points
from matcher.verify.distances import fundamental_from_pose, sampson


def on_a_line(points: np.ndarray, inliers: np.ndarray, tolerance: float, minimum: int, chance: float) -> bool:
    """Whether the inliers lie on one line or spot, but for no more than chance would put beside it.

    Matches along a line leave at least `minimum` − 3 points' worth of freedom to F and E (to H: one point's),
    with which a model can fit as many arbitrary matches; only what exceeds that is support.
    """
    sample = points[inliers]
    sample = sample[:: -(-len(sample) // 64)]  # as good as all of them for a line, and the fit is slow
    dx, dy, x, y = cv2.fitLine(sample.astype(np.float32), cv2.DIST_L1, 0, 0.01, 0.01).ravel()
    beside = np.abs((points[:, 0] - x) * dy - (points[:, 1] - y) * dx) > tolerance
    count, support = int(np.count_nonzero(beside)), int(np.count_nonzero(beside & inliers))
    return log_false_alarms(count, support, minimum - 3, chance) >= 0


def only_rotates(
    points0: np.ndarray,
    points1: np.ndarray,
    cameras: tuple[Camera, Camera],
    inliers: np.ndarray,
    cam1_from_cam0: np.ndarray,
) -> bool:
    """Whether a rotation alone explains the inliers as well as the essential matrix does.

    Noise of deviation s per coordinate gives Sampson's distance a 90th percentile of 1.6 s, and the distance
    after the best rotation (Kabsch 1976) one of 3 s; a factor of three between them leaves room. Where it
    holds, the translation is noise.
    """
    points0, points1 = points0[inliers], points1[inliers]
    K0, K1 = (camera.K for camera in cameras)
    rays0, rays1 = (
        np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(K).T
        for points, K in ((points0, K0), (points1, K1))
    )
    rays0, rays1 = (rays / np.linalg.norm(rays, axis=1, keepdims=True) for rays in (rays0, rays1))
    near = np.ones(len(points0), dtype=bool)
    for _ in range(4):  # outliers that the essential matrix happens to fit must not pull the rotation
        u, _, vt = np.linalg.svd(rays1[near].T @ rays0[near])
        rotation = u @ np.diag([1, 1, np.linalg.det(u @ vt)]) @ vt
        turned = warp_points(points0, K1 @ rotation @ np.linalg.inv(K0))
        error = np.nan_to_num(np.linalg.norm(turned - points1, axis=1), nan=np.inf)
        near = error <= (reach := np.percentile(error, 90, method="nearest"))
    fundamental = fundamental_from_pose(K0, K1, cam1_from_cam0)
    noise = np.percentile(sampson(points0, points1, fundamental), 90)
    return bool(reach <= max(3 * noise, 0.1))


def chance_inlier(points0: np.ndarray, points1: np.ndarray, threshold: float, homography: bool) -> float:
    """Probability that a random match is an inlier: its region's share of the area that the points span."""
    shares = []
    for points in (points0, points1):
        width, height = np.maximum(np.ptp(points, axis=0), 1.0)
        band = 2 * sqrt(2) * threshold * np.hypot(width, height)  # Sampson: √2 times the distance to the line
        shares.append((pi * threshold**2 if homography else band) / (width * height))
    return float(min(1.0, shares[1] if homography else max(shares)))


def log_false_alarms(count: int, inliers: int, minimum: int, chance: float) -> float:
    """Logarithm of how many models with that many inliers `count` random matches would give.

    Moisan and Stival, A probabilistic criterion to detect rigid point matches, IJCV 2004, section 3.
    """
    if inliers <= minimum:
        return 0.0

    def log_choose(n: int, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    models = log(count - minimum) + log_choose(count, inliers) + log_choose(inliers, minimum)
    return models + (inliers - minimum) * log(chance)
