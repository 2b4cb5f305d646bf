"""Matched points → several homographies, one per plane: façades, floors, tables, and the covers on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.config import EstimationConfig, GeometryStatus, PlanarModel
from matcher.geometry import warp_points
from matcher.types import Estimator, TwoViewGeometry
from matcher.verify.adjustment import CONFIDENCE, MAX_ITERATIONS, MatchedPoints, adjusted_homography, refined
from matcher.verify.estimation import RobustEstimator, distinct_matches
from matcher.verify.homography import chance_inlier, log_false_alarms, on_a_line, transfer_error

# Several planes

MAX_PLANES = 16


@dataclass(frozen=True)
class PlanesEstimator:
    """Homographies by sequential consensus: one is estimated, its inliers are taken away, until none is left.

    Then every match goes to the plane that it agrees with best. Each plane passes the tests of a single
    homography: `min_inliers`, more inliers than chance gives, and not on one line.
    """

    config: EstimationConfig
    takes_covariances = True  # see `matcher.types.Estimator`

    def __call__(
        self,
        points0: np.ndarray,
        points1: np.ndarray,
        *,
        cameras: tuple[Camera, Camera] | None = None,
        scores: np.ndarray | None = None,
        thresholds_scale: float = 1.0,
        covariances: np.ndarray | None = None,
    ) -> TwoViewGeometry:
        """Estimate as many homographies as the matches support, `MAX_PLANES` at most.

        Args:
            points0, points1, thresholds_scale, covariances: as in `RobustEstimator`, for a homography.
            cameras, scores: accepted for the protocol and not used.

        Returns:
            kind "homographies"; `matrix` is that of the plane with most inliers, `planes` says which plane
            each match agrees with. Where there is no plane, the status is that of a single homography.

        Raises:
            UsageError: as `RobustEstimator`.
        """
        single = RobustEstimator(replace(self.config, kind="homography"))
        left, matrices = np.arange(len(points0)), []
        while len(matrices) < MAX_PLANES:
            known = None if covariances is None else covariances[left]
            found = single(points0[left], points1[left], thresholds_scale=thresholds_scale, covariances=known)
            if found.status != "ok":
                status = found.status
                break
            matrices.append(found.matrix)
            left = left[~found.inliers]
        reach = self.config.max_reprojection_error * thresholds_scale
        planes, kept = _assigned(_errors(points0, points1, matrices), reach, self.config.min_inliers)
        return TwoViewGeometry(
            "homographies",
            "ok" if kept else status,
            planes >= 0,
            matrices[kept[0]] if kept else None,
            planes=planes,
            matrices=np.array([matrices[plane] for plane in kept]).reshape(-1, 3, 3),
        )


def build_estimator(config: EstimationConfig) -> Estimator:
    """The estimator of the geometry that a configuration names."""
    return PlanesEstimator(config) if config.kind == "homographies" else RobustEstimator(config)


def _errors(points0: np.ndarray, points1: np.ndarray, matrices: list[np.ndarray]) -> np.ndarray:
    """(P, K) distances in image 1; infinite where a point is not finite or lies behind the horizon."""
    rows = []
    with np.errstate(over="ignore", invalid="ignore"):
        for matrix in matrices:
            moved = warp_points(np.asarray(points0, dtype=np.float64), matrix)
            rows.append(np.linalg.norm(moved - points1, axis=1))
    return np.nan_to_num(np.array(rows).reshape(len(matrices), len(points0)), nan=np.inf)


def _assigned(errors: np.ndarray, reach: float, least: int) -> tuple[np.ndarray, list[int]]:
    """Which plane each match agrees with best (K,), the largest plane being 0; and the planes in that order.

    A plane that loses so many matches to others that fewer than `least` remain is dropped.
    """
    kept = list(range(len(errors)))
    while kept:
        best = errors[kept].argmin(axis=0)
        planes = np.where(errors[kept].min(axis=0) <= reach, best, -1)
        counts = np.bincount(planes[planes >= 0], minlength=len(kept))
        if counts.min() >= least:
            order = np.argsort(-counts, kind="stable")
            rank = np.append(np.argsort(order), -1)  # the last for matches without a plane
            return rank[planes].astype(np.int64), [kept[plane] for plane in order]
        del kept[int(counts.argmin())]
    return np.full(errors.shape[1], -1, dtype=np.int64), []


# Affine maps and similarities

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
    given = distinct_matches(points0, points1, thresholds_scale, scores, covariances)
    status, matrix = _fit(given.matched, model, config)
    if matrix is None:
        return TwoViewGeometry("homography", status, np.zeros(len(given.usable), dtype=bool))
    near = transfer_error(*given.matched.sides, matrix) <= config.max_reprojection_error
    stored = matrix.copy()
    stored[:2, 2] *= thresholds_scale
    return TwoViewGeometry("homography", status, given.of_all(near), stored)


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
