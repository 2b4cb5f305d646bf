"""Homographies of matched points, in resized pixels."""

from __future__ import annotations

import cv2
import numpy as np
import poselib

from matcher.data.geometry import warp_points
from matcher.verify.adjustment import adjusted_homography, refined
from matcher.verify.epipolar import CONFIDENCE, LOSS_SCALE, MAX_ITERATIONS, MatchedPoints, TwoViewModel


def estimated_homography(matched: MatchedPoints, threshold: float) -> TwoViewModel | None:
    """The homography by MAGSAC++ (Barath et al. 2020), refined over its inliers."""
    points0, points1, covariances = matched.points0, matched.points1, matched.covariances
    try:
        matrix, _ = cv2.findHomography(
            points0, points1, cv2.USAC_MAGSAC, threshold, maxIters=MAX_ITERATIONS, confidence=CONFIDENCE
        )
    except cv2.error:  # raised for some inputs that no minimal sample fits
        return None
    if matrix is None or not np.isfinite(matrix).all():
        return None
    # OpenCV gives H[2, 2] = 1: where the first pixel lies beyond the horizon, all points would lie behind it.
    matrix = _facing(matrix, points0)
    for refine in (_refine_homography, adjusted_homography)[: 1 if covariances is None else 2]:
        found = _transfer(points0, points1, matrix) <= threshold
        matrix = _facing(refined(refine, points0, points1, matrix, found, covariances), points0)
    return TwoViewModel(matrix, _transfer(points0, points1, matrix) <= threshold)


def _facing(homography: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The homography with the sign that puts most of the points before its horizon."""
    return -homography if np.median(points @ homography[2, :2] + homography[2, 2]) < 0 else homography


def _transfer(points0: np.ndarray, points1: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """(N,) distances in image 1, pixels; infinite behind the horizon."""
    with np.errstate(over="ignore"):
        error = np.linalg.norm(warp_points(points0, homography) - points1, axis=1)
    return np.nan_to_num(error, nan=np.inf)


def _refine_homography(
    matrix: np.ndarray, points0: np.ndarray, points1: np.ndarray, _: np.ndarray | None
) -> np.ndarray:
    options = {"loss_type": "CAUCHY", "loss_scale": LOSS_SCALE, "max_iterations": 50}
    return poselib.refine_homography(points0, points1, matrix, options)[0]
