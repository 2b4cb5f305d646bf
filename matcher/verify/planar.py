"""Matched points of a plane → affine map or similarity, with a status as for other geometries.

A model with fewer parameters needs fewer matches and extrapolates better: scans, aerial photos and
pictures of a screen are related by a similarity, a distant plane by an affine map.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import cv2
import numpy as np

from matcher.config import EstimationConfig, GeometryStatus, PlanarModel
from matcher.data.matches import TwoViewGeometry
from matcher.verify.adjustment import adjusted_homography, refined
from matcher.verify.degeneracy import chance_inlier, log_false_alarms, on_a_line
from matcher.verify.estimation import checked_scale, distinct_matches, paired
from matcher.verify.homography import transfer_error
from matcher.verify.hypotheses import CONFIDENCE, MAX_ITERATIONS, MatchedPoints

_MINIMUM = {"affine": 3, "similarity": 2}  # size of the minimal sample
_ROUNDS = 2  # of refinement, each with the inliers of the one before


def estimate_planar(
    points0: np.ndarray,
    points1: np.ndarray,
    model: Literal["affine", "similarity"],
    config: EstimationConfig,
    thresholds_scale: float = 1.0,
    *,
    scores: np.ndarray | None = None,
    covariances: np.ndarray | None = None,
) -> TwoViewGeometry:
    """Estimate a map of the plane from matches by RANSAC, refined under a Cauchy loss (`adjustment.py`).

    Args:
        points0, points1: (K, 2) stored pixels; rows that are not finite are never inliers.
        model: "affine" or "similarity" (turn, one scale and shift, no mirror).
        config: `max_reprojection_error`, in pixels of the resized image, and `min_inliers` are used.
        thresholds_scale: stored pixels of image 1 per resized pixel.
        scores, covariances: as of `RobustEstimator`.

    Returns:
        kind "homography"; the last row of the matrix is 0, 0, 1.

    Raises:
        UsageError: arrays that do not fit each other, or a scale that is not positive.
    """
    pairs, scale = paired(points0, points1), checked_scale(thresholds_scale)
    matched, usable, place = distinct_matches(pairs, scale, scores, covariances)
    status, matrix = _fit(matched, model, config)
    inliers = np.zeros(len(pairs), dtype=bool)
    if matrix is None:
        return TwoViewGeometry("homography", status, inliers)
    inliers[usable] = (transfer_error(*matched.sides, matrix) <= config.max_reprojection_error)[place]
    stored = matrix.copy()
    stored[:2, 2] *= scale
    return TwoViewGeometry("homography", status, inliers, stored)


def _fit(
    matched: MatchedPoints, model: PlanarModel, config: EstimationConfig
) -> tuple[GeometryStatus, np.ndarray | None]:
    """Status and map (3, 3) of resized pixels."""
    minimum, threshold = _MINIMUM[model], config.max_reprojection_error
    if len(matched) <= minimum:
        return "too_few", None
    chance = chance_inlier(*matched.sides, threshold, True)

    def on_line(which: np.ndarray) -> bool:
        sides = matched.sides if model == "affine" else ()
        return any(on_a_line(side, which, threshold, minimum + 1, chance) for side in sides)

    if on_line(np.ones(len(matched), dtype=bool)):
        return "degenerate", None
    sample = cv2.estimateAffine2D if model == "affine" else cv2.estimateAffinePartial2D
    linear, _ = sample(
        *(np.ascontiguousarray(side) for side in matched.sides),  # OpenCV needs it
        method=cv2.RANSAC,
        ransacReprojThreshold=threshold,
        maxIters=MAX_ITERATIONS,
        confidence=CONFIDENCE,
        refineIters=0,
    )
    if linear is None or not np.isfinite(linear).all():
        return "no_model", None
    matrix = np.vstack([linear, [0.0, 0.0, 1.0]])
    for _ in range(_ROUNDS):
        inliers = transfer_error(*matched.sides, matrix) <= threshold
        matrix = refined(partial(adjusted_homography, model=model), matched, matrix, inliers)
    inliers = transfer_error(*matched.sides, matrix) <= threshold
    count = int(inliers.sum())
    if count < config.min_inliers or log_false_alarms(len(matched), count, minimum, chance) >= 0:
        return "low_inliers", matrix
    return ("degenerate", None) if on_line(inliers) else ("ok", matrix)
