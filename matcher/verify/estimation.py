"""Matched points → homography, fundamental or essential matrix, with a status: whether to use it.

The libraries behind it throw, return None, or return a confident model for too few, equal, collinear or
non-finite points; here every such case has its own status and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
import poselib

from matcher.config import EstimationConfig, GeometryStatus
from matcher.data.camera import Camera
from matcher.data.geometry import warp_points
from matcher.data.matches import TwoViewGeometry
from matcher.errors import UsageError
from matcher.verify.adjustment import adjusted_fundamental, adjusted_homography, adjusted_pose
from matcher.verify.degeneracy import chance_inlier, log_false_alarms, on_a_line, only_rotates
from matcher.verify.distances import fundamental_from_pose, in_front, sampson
from matcher.verify.undistortion import undistort

_MINIMUM = {"homography": 4, "fundamental": 7, "essential": 5}  # points that fix the model
_LIMIT = 1e8  # coordinates beyond it are as useless as infinite ones
_MAX_ITERATIONS = 10_000
_MAX_ITERATIONS_ESSENTIAL = 30_000  # enough for four outliers in five
_CONFIDENCE = 0.9999
_LOSS_SCALE = 0.5  # pixels; errors well above it no longer pull a refined model
_LEAST_REFINED = 8  # inliers below which there is nothing to refine from


@dataclass(frozen=True, eq=False)
class _Model:
    matrix: np.ndarray  # (3, 3)
    inliers: np.ndarray  # (N,) bool
    cam1_from_cam0: np.ndarray | None = None


@dataclass(frozen=True)
class RobustEstimator:
    """Two-view geometry: MAGSAC++ for homography and fundamental (OpenCV), LO-RANSAC for essential (PoseLib).

    Each model is then refined over its inliers under a Cauchy loss: where covariances are known weighed by
    them, and a fundamental matrix always (unless `adjusted` is False), by `adjustment.py`; else by PoseLib.

    Residuals, in pixels of the resized image: homography, the distance in image 1; fundamental and
    essential, Sampson's distance (Hartley and Zisserman, 2nd edition, section 11.4.3).
    """

    config: EstimationConfig
    adjusted: bool = True  # False: fundamental matrices stay as MAGSAC++ leaves them
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
            scores: accepted for the protocol and not used; all matches are sampled uniformly.
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
        usable, inliers = np.all(np.abs(pairs) < _LIMIT, axis=1), np.zeros(len(pairs), dtype=bool)
        # Resized pixels: OpenCV's fundamental loses half its accuracy on coordinates four times as large.
        resized = pairs[usable] / scale
        distinct, index, inverse = np.unique(resized, axis=0, return_index=True, return_inverse=True)
        known = _resized(covariances, len(pairs), scale, np.flatnonzero(usable)[index])
        status, model = self._estimate(distinct[:, :2], distinct[:, 2:], cameras, known)
        if model is None:
            return TwoViewGeometry(kind, status, inliers)
        inliers[usable] = model.inliers[inverse.reshape(-1)]
        matrix = _stored(kind, model.matrix, scale)
        return TwoViewGeometry(kind, status, inliers, matrix, model.cam1_from_cam0)

    def _estimate(
        self,
        points0: np.ndarray,
        points1: np.ndarray,
        cameras: tuple[Camera, Camera] | None,
        covariances: np.ndarray | None,
    ) -> tuple[GeometryStatus, _Model | None]:
        """Status and model of distinct, finite points in resized pixels."""
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
            model = _essential(points0, points1, cameras, threshold, self.config.seed, covariances)
        elif homography:
            model = _homography(points0, points1, threshold, covariances)
        else:
            model = _fundamental(points0, points1, threshold, covariances, self.adjusted)
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


def _homography(
    points0: np.ndarray, points1: np.ndarray, threshold: float, covariances: np.ndarray | None
) -> _Model | None:
    try:
        matrix, _ = cv2.findHomography(
            points0, points1, cv2.USAC_MAGSAC, threshold, maxIters=_MAX_ITERATIONS, confidence=_CONFIDENCE
        )
    except cv2.error:  # raised for some inputs that no minimal sample fits
        return None
    if matrix is None or not np.isfinite(matrix).all():
        return None
    # OpenCV gives H[2, 2] = 1: where the first pixel lies beyond the horizon, all points would lie behind it.
    matrix = _facing(matrix, points0)
    for refine in (_refine_homography, adjusted_homography)[: 1 if covariances is None else 2]:
        found = _transfer(points0, points1, matrix) <= threshold
        matrix = _facing(_refined(refine, points0, points1, matrix, found, covariances), points0)
    return _Model(matrix, _transfer(points0, points1, matrix) <= threshold)


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
    options = {"loss_type": "CAUCHY", "loss_scale": _LOSS_SCALE, "max_iterations": 50}
    return poselib.refine_homography(points0, points1, matrix, options)[0]


def _refined(
    refine: Callable[..., np.ndarray],
    points0: np.ndarray,
    points1: np.ndarray,
    matrix: np.ndarray,
    inliers: np.ndarray,
    covariances: np.ndarray | None,
) -> np.ndarray:
    """The model of least Cauchy loss near `matrix`, over its inliers: coarse ones pull MAGSAC's own."""
    if np.count_nonzero(inliers) <= _LEAST_REFINED:
        return matrix
    covariances = None if covariances is None else covariances[inliers]
    found = refine(matrix, points0[inliers], points1[inliers], covariances)
    return found if np.isfinite(found).all() and found.any() else matrix


def _fundamental(
    points0: np.ndarray, points1: np.ndarray, threshold: float, covariances: np.ndarray | None, adjusted: bool
) -> _Model | None:
    try:
        matrix, _ = cv2.findFundamentalMat(
            points0, points1, cv2.USAC_MAGSAC, threshold, _CONFIDENCE, _MAX_ITERATIONS
        )
    except cv2.error:
        return None
    if matrix is None or matrix.shape != (3, 3) or not np.isfinite(matrix).all() or not matrix.any():
        return None
    found = sampson(points0, points1, matrix) <= threshold
    if adjusted:
        matrix = _refined(adjusted_fundamental, points0, points1, matrix, found, covariances)
    return _Model(matrix, sampson(points0, points1, matrix) <= threshold)


def _essential(
    points0: np.ndarray,
    points1: np.ndarray,
    cameras: tuple[Camera, Camera],
    threshold: float,
    seed: int,
    covariances: np.ndarray | None,
) -> _Model | None:
    """PoseLib refines the pose on its inliers and drops points behind a camera."""
    dicts = [
        {"model": "PINHOLE", "width": 0, "height": 0, "params": [c.fx, c.fy, c.cx, c.cy]} for c in cameras
    ]
    options = {
        "max_epipolar_error": threshold,
        "max_iterations": _MAX_ITERATIONS_ESSENTIAL,
        "success_prob": _CONFIDENCE,
        "seed": seed,
    }
    loss = {"loss_type": "CAUCHY", "loss_scale": _LOSS_SCALE}
    pose, report = poselib.estimate_relative_pose(points0, points1, *dicts, options, loss)
    length = np.linalg.norm(pose.t)
    cam1_from_cam0 = np.eye(4)
    cam1_from_cam0[:3, :3] = pose.R
    if not np.isfinite(length) or length < 1e-12 or not np.isfinite(cam1_from_cam0).all():
        return None
    cam1_from_cam0[:3, 3] = pose.t / length
    inliers = np.asarray(report["inliers"], dtype=bool)
    if covariances is not None:
        known = np.linalg.inv(cameras[0].K), np.linalg.inv(cameras[1].K)

        def refine(pose: np.ndarray, *matches: np.ndarray) -> np.ndarray:
            return adjusted_pose(pose, known, *matches)

        cam1_from_cam0 = _refined(refine, points0, points1, cam1_from_cam0, inliers, covariances)
        fundamental = fundamental_from_pose(cameras[0].K, cameras[1].K, cam1_from_cam0)
        inliers = sampson(points0, points1, fundamental) <= threshold
        inliers &= in_front(points0, points1, known, cam1_from_cam0)
    essential = fundamental_from_pose(np.eye(3), np.eye(3), cam1_from_cam0)
    return _Model(essential, inliers, cam1_from_cam0)
