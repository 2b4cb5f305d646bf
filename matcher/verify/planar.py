"""Matched points of a plane → homography, affine map or similarity, with a status as for other geometries.

A model with fewer parameters needs fewer matches and extrapolates better: scans, aerial photos and
pictures of a screen are related by a similarity, a distant plane by an affine map.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np

from matcher.config import EstimationConfig, GeometryStatus, PlanarModel
from matcher.data.geometry import warp_points
from matcher.verify.degeneracy import chance_inlier, log_false_alarms, on_a_line
from matcher.verify.estimation import RobustEstimator, checked_scale, paired

_MINIMUM = {"affine": 3, "similarity": 2}  # size of the minimal sample
_MAX_ITERATIONS = 10_000
_CONFIDENCE = 0.9999
_LOSS_SCALE = 0.5  # pixels of the resized image, as of the other models
_ROUNDS = 10  # of reweighted least squares


@dataclass(frozen=True, eq=False)
class PlanarTransform:
    """How the pixels of image 0 move to image 1, or the reason why that is not known."""

    model: PlanarModel
    status: GeometryStatus  # as of `TwoViewGeometry`
    inliers: np.ndarray  # (K,) bool
    matrix: np.ndarray | None = None  # (3, 3) float64, stored pixels of image 0 → image 1


def estimate_planar(
    points0: np.ndarray,
    points1: np.ndarray,
    model: PlanarModel,
    config: EstimationConfig,
    thresholds_scale: float = 1.0,
) -> PlanarTransform:
    """Estimate a map of the plane from matches: MAGSAC++ or RANSAC, refined under a Cauchy loss.

    Args:
        points0, points1: (K, 2) stored pixels; rows that are not finite are never inliers.
        model: "homography", "affine" or "similarity" (turn, one scale and shift, no mirror).
        config: `max_reprojection_error`, in pixels of the resized image, and `min_inliers` are used.
        thresholds_scale: stored pixels of image 1 per resized pixel.

    Raises:
        UsageError: arrays that are not both (K, 2), or a scale that is not positive.
    """
    if model == "homography":
        estimate = RobustEstimator(replace(config, kind="homography"))
        found = estimate(points0, points1, thresholds_scale=thresholds_scale)
        return PlanarTransform(model, found.status, found.inliers, found.matrix)
    both = paired(points0, points1) / checked_scale(thresholds_scale)
    none, sides = np.zeros(len(both), dtype=bool), (both[:, :2], both[:, 2:])
    distinct = np.unique(both[np.isfinite(both).all(axis=1)], axis=0)
    ends = (np.ascontiguousarray(side) for side in (distinct[:, :2], distinct[:, 2:]))  # OpenCV needs it
    status, linear = _fit(*ends, model, config)
    if linear is None:
        return PlanarTransform(model, status, none)
    matrix = np.vstack([linear, [0.0, 0.0, 1.0]])
    matrix[:2, 2] *= thresholds_scale
    error = np.linalg.norm(warp_points(sides[0] * thresholds_scale, matrix) - np.asarray(points1), axis=1)
    inliers = np.nan_to_num(error, nan=np.inf) <= config.max_reprojection_error * thresholds_scale
    return PlanarTransform(model, status, inliers, matrix)


def _fit(
    points0: np.ndarray, points1: np.ndarray, model: PlanarModel, config: EstimationConfig
) -> tuple[GeometryStatus, np.ndarray | None]:
    """Status and (2, 3) map of distinct, finite points in resized pixels."""
    minimum, threshold = _MINIMUM[model], config.max_reprojection_error
    if len(points0) <= minimum:
        return "too_few", None
    chance = chance_inlier(points0, points1, threshold, True)

    def on_line(which: np.ndarray) -> bool:
        sides = (points0, points1) if model == "affine" else ()
        return any(on_a_line(side, which, threshold, minimum + 1, chance) for side in sides)

    if on_line(np.ones(len(points0), dtype=bool)):
        return "degenerate", None
    sample = cv2.estimateAffine2D if model == "affine" else cv2.estimateAffinePartial2D
    linear, _ = sample(
        points0,
        points1,
        method=cv2.RANSAC,
        ransacReprojThreshold=threshold,
        maxIters=_MAX_ITERATIONS,
        confidence=_CONFIDENCE,
        refineIters=0,
    )
    if linear is None or not np.isfinite(linear).all():
        return "no_model", None
    linear = _refined(points0, points1, linear, model, threshold)
    inliers = _errors(points0, points1, linear) <= threshold
    count = int(inliers.sum())
    if count < config.min_inliers or log_false_alarms(len(points0), count, minimum, chance) >= 0:
        return "low_inliers", linear
    return ("degenerate", None) if on_line(inliers) else ("ok", linear)


def _errors(points0: np.ndarray, points1: np.ndarray, linear: np.ndarray) -> np.ndarray:
    return np.linalg.norm(points0 @ linear[:, :2].T + linear[:, 2] - points1, axis=1)


def _refined(
    points0: np.ndarray, points1: np.ndarray, linear: np.ndarray, model: PlanarModel, threshold: float
) -> np.ndarray:
    """Minimise the Cauchy loss over the inliers by iteratively reweighted least squares."""
    near = _errors(points0, points1, linear) <= threshold
    if np.count_nonzero(near) <= _MINIMUM[model]:
        return linear
    points0, points1 = points0[near], points1[near]
    centre = points0.mean(axis=0)  # conditions the system
    x, y = (points0 - centre).T
    one, zero = np.ones_like(x), np.zeros_like(x)
    if model == "affine":
        rows = [np.stack(row, 1) for row in ((x, y, one, zero, zero, zero), (zero, zero, zero, x, y, one))]
    else:
        rows = [np.stack(row, 1) for row in ((x, -y, one, zero), (y, x, zero, one))]
    system, target = np.vstack(rows), points1.T.ravel()
    for _ in range(_ROUNDS):
        weight = np.tile(1 / (1 + (_errors(points0, points1, linear) / _LOSS_SCALE) ** 2), 2) ** 0.5
        found, *_ = np.linalg.lstsq(system * weight[:, None], target * weight, rcond=None)
        if model == "similarity":
            a, b, shift = found[0], found[1], found[2:]
            found = np.array([a, -b, shift[0], b, a, shift[1]])
        linear = found.reshape(2, 3)
        linear[:, 2] -= linear[:, :2] @ centre
    return linear
