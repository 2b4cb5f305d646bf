"""Matched points → several homographies, one per plane: façades, floors, tables, and the covers on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from matcher.config import EstimationConfig
from matcher.data.camera import Camera
from matcher.data.geometry import warp_points
from matcher.data.matches import TwoViewGeometry
from matcher.data.protocols import Estimator
from matcher.verify.estimation import RobustEstimator

MAX_PLANES = 16


@dataclass(frozen=True)
class PlanesEstimator:
    """Homographies by sequential consensus: one is estimated, its inliers are taken away, until none is left.

    Then every match goes to the plane that it agrees with best. Each plane passes the tests of a single
    homography: `min_inliers`, more inliers than chance gives, and not on one line.
    """

    config: EstimationConfig
    takes_covariances = True  # see `matcher.data.protocols.Estimator`

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
