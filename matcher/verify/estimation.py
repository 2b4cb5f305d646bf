"""Matched points → homography, fundamental or essential matrix, with a status: whether to use it.

The libraries behind it throw, return None, or return a confident model for too few, equal, collinear or
non-finite points; here every such case has its own status and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.config import EstimationConfig, GeometryStatus
from matcher.data.camera import Camera
from matcher.data.matches import TwoViewGeometry
from matcher.errors import UsageError
from matcher.verify.degeneracy import chance_inlier, log_false_alarms, on_a_line, only_rotates
from matcher.verify.epipolar import SAMPLES, estimated_essential, estimated_fundamental, sampled_fundamental
from matcher.verify.homography import estimated_homography
from matcher.verify.hypotheses import MatchedPoints, TwoViewModel
from matcher.verify.likelihood import probabilities
from matcher.verify.undistortion import undistort

_MINIMUM = {"homography": 4, "fundamental": 7, "essential": 5}  # points that fix the model
_LIMIT = 1e8  # coordinates beyond it are as useless as infinite ones


@dataclass(frozen=True)
class RobustEstimator:
    """Two-view geometry: MAGSAC++ for homography and fundamental (OpenCV), LO-RANSAC for essential (PoseLib).

    Each is the likeliest of several hypotheses (`epipolar.py`, `homography.py`), refined over its inliers
    under a Cauchy loss: where covariances are known by `adjustment.py`, which weighs matches by these and by
    their probability, and so a fundamental matrix always; else by PoseLib, where all count the same.

    Residuals, in pixels of the resized image: homography, the distance in image 1; fundamental and
    essential, Sampson's distance (Hartley and Zisserman, 2nd edition, section 11.4.3).
    """

    config: EstimationConfig
    adjusted: bool = True  # False: fundamental matrices are a single hypothesis, as MAGSAC++ leaves it
    pose_samples: int = SAMPLES  # for each hypothesis of an essential matrix, at most
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
        """Estimate the configured geometry; deterministic, whatever the order of the matches.

        Status `ok`; `low_inliers`: a model with fewer distinct inliers than `min_inliers`, or no more than
        chance gives. Without a model: `too_few` distinct points; `degenerate`: the points, or what supports
        the model, lie on one point or line of an image, or (essential) only a rotation shows; `no_model`;
        `not_estimated` (kind "none"). A plane or a pure rotation fixes F only up to a family: the inliers are
        valid, the matrix does not constrain other points.

        Args:
            points0, points1: (K, 2) stored pixels; non-finite rows are never inliers.
            cameras: of image 0 and 1, in stored pixels; used by essential only, on undistorted points.
            scores: (K,) match probabilities, all the same if left out.
            thresholds_scale: stored pixels per resized pixel; one factor for both images.
            covariances: (K, 2, 2) of points1, stored pixels², as `MatchRefinement` has them.

        Returns:
            matrix: H with H[2, 2] = 1 (−1 where the first pixel lies beyond the horizon, so that the inliers
            lie before it), F or E of Frobenius norm 1; E = [t]× R up to scale, cam1_from_cam0 with |t| = 1.

        Raises:
            UsageError: arrays that do not fit each other, a scale of 0, essential without usable cameras.
        """
        kind = self.config.kind
        pairs = paired(points0, points1)
        if kind == "none":
            return TwoViewGeometry(kind, "not_estimated", np.zeros(len(pairs), dtype=bool))
        scale = checked_scale(thresholds_scale)
        if kind == "essential":
            pairs, cameras = _pinhole(pairs, cameras, scale)
        inliers = np.zeros(len(pairs), dtype=bool)
        matched, usable, place = distinct_matches(pairs, scale, scores, covariances)
        status, model = self._estimate(matched, cameras)
        if model is None:
            return TwoViewGeometry(kind, status, inliers)
        inliers[usable] = model.inliers[place]
        matrix = _stored(kind, model.matrix, scale)
        return TwoViewGeometry(kind, status, inliers, matrix, model.cam1_from_cam0)

    def _estimate(
        self, matched: MatchedPoints, cameras: tuple[Camera, Camera] | None
    ) -> tuple[GeometryStatus, TwoViewModel | None]:
        """Status and model of distinct, finite points in resized pixels."""
        points0, points1 = matched.points0, matched.points1
        kind, minimum = self.config.kind, _MINIMUM[self.config.kind]
        homography = kind == "homography"
        threshold = self.config.max_reprojection_error if homography else self.config.max_epipolar_error
        if len(points0) <= minimum:
            return "too_few", None
        chance = chance_inlier(points0, points1, threshold, homography)
        every = np.ones(len(points0), dtype=bool)
        if any(on_a_line(side, every, threshold, minimum, chance) for side in (points0, points1)):
            return "degenerate", None
        if kind == "essential":
            model = estimated_essential(matched, cameras, threshold, self.config.seed, self.pose_samples)
        elif homography:
            model = estimated_homography(matched, threshold)
        else:
            fundamental = estimated_fundamental if self.adjusted else sampled_fundamental
            model = fundamental(matched, threshold)
        if model is None or not model.inliers.any():
            return "no_model", None
        count = int(np.count_nonzero(model.inliers))
        convincing = log_false_alarms(len(points0), count, minimum, chance) < 0
        if count < self.config.min_inliers or not convincing:
            return "low_inliers", model
        if any(on_a_line(side, model.inliers, threshold, minimum, chance) for side in (points0, points1)):
            return "degenerate", None
        if kind == "essential" and only_rotates(
            points0, points1, cameras, model.inliers, model.cam1_from_cam0
        ):
            return "degenerate", None
        return "ok", model


def paired(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(K, 4) float64 from two (K, 2).

    Raises:
        UsageError: other shapes, or no real numbers.
    """
    sides = [np.asarray(points) for points in (points0, points1)]
    if sides[0].shape != sides[1].shape or sides[0].ndim != 2 or sides[0].shape[1] != 2:
        raise UsageError(
            f"points0 and points1 must both be (K, 2), not {sides[0].shape} and {sides[1].shape}"
        )
    if any(side.dtype.kind not in "fiu" for side in sides):
        raise UsageError(f"points must be real numbers, not {sides[0].dtype} and {sides[1].dtype}")
    return np.concatenate(sides, axis=1).astype(np.float64)


def distinct_matches(
    pairs: np.ndarray, scale: float, scores: np.ndarray | None, covariances: np.ndarray | None
) -> tuple[MatchedPoints, np.ndarray, np.ndarray]:
    """The distinct finite ones of matches `paired`, in resized pixels.

    Returns:
        them; (K,) bool, the finite matches; and for each of these, which of the distinct ones it is.

    Raises:
        UsageError: scores or covariances of another number of matches.
    """
    usable = np.all(np.abs(pairs) < _LIMIT, axis=1)
    # Resized pixels: OpenCV's fundamental loses half its accuracy on coordinates four times as large.
    resized = pairs[usable] / scale
    distinct, index, inverse = np.unique(resized, axis=0, return_index=True, return_inverse=True)
    known = _resized(covariances, len(pairs), scale, np.flatnonzero(usable)[index])
    probable, place = np.zeros(len(distinct)), inverse.reshape(-1)
    np.maximum.at(probable, place, _probable(scores, len(pairs))[usable])
    return MatchedPoints(distinct[:, :2], distinct[:, 2:], probable, known), usable, place


def _probable(scores: np.ndarray | None, count: int) -> np.ndarray:
    """(count,) probabilities of the matches."""
    if scores is not None and np.shape(scores) != (count,):
        raise UsageError(f"scores of {count} matches must be ({count},), not {np.shape(scores)}")
    return probabilities(scores, count)


def _resized(
    covariances: np.ndarray | None, count: int, scale: float, index: np.ndarray
) -> np.ndarray | None:
    """Covariances of some of `count` matches, in resized pixels²."""
    if covariances is None:
        return None
    if np.shape(covariances) != (count, 2, 2):
        raise UsageError(
            f"covariances of {count} matches must be ({count}, 2, 2), not {np.shape(covariances)}"
        )
    return np.asarray(covariances, dtype=np.float64)[index] / scale**2


def checked_scale(scale: float) -> float:
    """The `thresholds_scale` of an estimator.

    Raises:
        UsageError: it is not positive and finite.
    """
    if not 0 < scale < _LIMIT:
        raise UsageError(f"thresholds_scale must be positive and finite, not {scale}")
    return scale


def _pinhole(
    pairs: np.ndarray, cameras: tuple[Camera, Camera] | None, scale: float
) -> tuple[np.ndarray, tuple[Camera, Camera]]:
    """Points (K, 4) without lens distortion, stored pixels, and pinhole cameras of the resized images."""
    if cameras is None:
        raise UsageError("the essential matrix needs the cameras of both images: cameras=(Camera, Camera)")
    sides = [undistort(pairs[:, 2 * i : 2 * i + 2], camera) for i, camera in enumerate(cameras)]
    first, second = (Camera(c.fx / scale, c.fy / scale, c.cx / scale, c.cy / scale) for c in cameras)
    return np.concatenate(sides, axis=1), (first, second)


def _stored(kind: str, matrix: np.ndarray, scale: float) -> np.ndarray:
    """A model of resized pixels as one of stored pixels, normalised."""
    shrink = np.diag([1 / scale, 1 / scale, 1.0])
    if kind == "homography":
        matrix = np.linalg.inv(shrink) @ matrix @ shrink
        corner, norm = abs(matrix[2, 2]), np.linalg.norm(matrix)
        return matrix / (corner if corner > 1e-9 * norm else norm)
    if kind == "fundamental":
        matrix = shrink @ matrix @ shrink
    return matrix / np.linalg.norm(matrix)
