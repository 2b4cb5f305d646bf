"""Matched points → homography, fundamental or essential matrix, with a status that says what it is worth.

The libraries behind it throw, return None, or return a confident model for too few, equal, collinear or
non-finite points; here every such case has its own status and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lgamma, log, pi, sqrt

import cv2
import numpy as np
import poselib

from matcher.config import EstimationConfig
from matcher.geometry import fundamental_from_pose, warp_points
from matcher.types import Camera, GeometryStatus, TwoViewGeometry, UsageError

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
    T_0to1: np.ndarray | None = None


@dataclass(frozen=True)
class RobustEstimator:
    """Two-view geometry: MAGSAC++ for homography and fundamental (OpenCV), LO-RANSAC for essential (PoseLib).

    A homography is then refined over its inliers under a Cauchy loss (PoseLib): on warped photos of the
    training set that raised AUC@5 px from 0.86 to 0.91 and AUC@1 px from 0.42 to 0.61.

    Residuals, in pixels of the resized picture: homography, the distance in image 1; fundamental and
    essential, Sampson's distance (Hartley and Zisserman, 2nd edition, section 11.4.3).
    """

    config: EstimationConfig

    def __call__(
        self,
        points0: np.ndarray,
        points1: np.ndarray,
        *,
        cameras: tuple[Camera, Camera] | None = None,
        scores: np.ndarray | None = None,
        thresholds_scale: float = 1.0,
    ) -> TwoViewGeometry:
        """Estimate the configured geometry; deterministic, whatever the order of the matches.

        Status `ok`; `low_inliers`: a model with fewer distinct inliers than `min_inliers`, or no more than
        chance gives. Without a model: `too_few` distinct points; `degenerate`: the points, or all that
        supports the model, lie on one point or line of a picture, or (essential) no motion but rotation
        shows; `no_model`; `not_estimated` (kind "none"). A plane or a pure rotation fixes F only up to a
        family: the inliers hold, the matrix says nothing of other points.

        Args:
            points0: (K, 2) stored pixels of image 0; non-finite rows are never inliers.
            points1: (K, 2) stored pixels of image 1.
            cameras: of image 0 and 1, in stored pixels; used by essential only.
            scores: taken for the protocol; every match is sampled alike.
            thresholds_scale: stored pixels per resized pixel; one factor for both pictures.

        Returns:
            matrix: H with H[2, 2] = 1 (−1 where the first pixel lies beyond the horizon, so that the inliers
            lie before it), F or E of Frobenius norm 1; E = [t]× R up to scale, with T_0to1 of |t| = 1.

        Raises:
            UsageError: arrays not (K, 2) alike, a scale that is not positive, essential without cameras.
        """
        kind = self.config.kind
        pairs = _pairs(points0, points1)
        inliers = np.zeros(len(pairs), dtype=bool)
        if kind == "none":
            return TwoViewGeometry(kind, "not_estimated", inliers)
        if not 0 < thresholds_scale < _LIMIT:
            raise UsageError(f"thresholds_scale must be positive and finite, not {thresholds_scale}")
        if kind == "essential":
            cameras = _scaled(cameras, thresholds_scale)
        usable = np.all(np.abs(pairs) < _LIMIT, axis=1)
        # Resized pixels: OpenCV's fundamental loses half its accuracy on coordinates four times as large.
        distinct, inverse = np.unique(pairs[usable] / thresholds_scale, axis=0, return_inverse=True)
        status, model = self._estimate(distinct[:, :2], distinct[:, 2:], cameras)
        if model is None:
            return TwoViewGeometry(kind, status, inliers)
        inliers[usable] = model.inliers[inverse.reshape(-1)]
        matrix = _stored(kind, model.matrix, thresholds_scale)
        return TwoViewGeometry(kind, status, inliers, matrix, model.T_0to1)

    def _estimate(
        self, points0: np.ndarray, points1: np.ndarray, cameras: tuple[Camera, Camera] | None
    ) -> tuple[GeometryStatus, _Model | None]:
        """Status and model of distinct, finite points in resized pixels."""
        kind, minimum = self.config.kind, _MINIMUM[self.config.kind]
        homography = kind == "homography"
        threshold = self.config.max_reprojection_error if homography else self.config.max_epipolar_error
        if len(points0) <= minimum:
            return "too_few", None
        chance = _chance(points0, points1, threshold, homography)
        every = np.ones(len(points0), dtype=bool)
        if any(_on_a_line(side, every, threshold, minimum, chance) for side in (points0, points1)):
            return "degenerate", None
        if kind == "essential":
            model = _essential(points0, points1, cameras, threshold, self.config.seed)
        else:
            model = (_homography if homography else _fundamental)(points0, points1, threshold)
        if model is None or not model.inliers.any():
            return "no_model", None
        count = int(np.count_nonzero(model.inliers))
        convincing = _log_false_alarms(len(points0), count, minimum, chance) < 0
        if count < self.config.min_inliers or not convincing:
            return "low_inliers", model
        if any(_on_a_line(side, model.inliers, threshold, minimum, chance) for side in (points0, points1)):
            return "degenerate", None
        if kind == "essential" and _only_rotates(points0, points1, cameras, model):
            return "degenerate", None
        return "ok", model


def _pairs(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(K, 4) float64 from two (K, 2)."""
    sides = [np.asarray(points) for points in (points0, points1)]
    if sides[0].shape != sides[1].shape or sides[0].ndim != 2 or sides[0].shape[1] != 2:
        raise UsageError(
            f"points0 and points1 must both be (K, 2), not {sides[0].shape} and {sides[1].shape}"
        )
    if any(side.dtype.kind not in "fiu" for side in sides):
        raise UsageError(f"points must be real numbers, not {sides[0].dtype} and {sides[1].dtype}")
    return np.concatenate(sides, axis=1).astype(np.float64)


def _scaled(cameras: tuple[Camera, Camera] | None, scale: float) -> tuple[Camera, Camera]:
    if cameras is None:
        raise UsageError("the essential matrix needs the cameras of both images: cameras=(Camera, Camera)")
    for camera in cameras:
        values = (camera.fx, camera.fy, camera.cx, camera.cy)
        if not np.isfinite(values).all() or min(camera.fx, camera.fy) <= 0:
            raise UsageError(f"a camera needs finite values and positive focal lengths, not {camera}")
    first, second = (Camera(c.fx / scale, c.fy / scale, c.cx / scale, c.cy / scale) for c in cameras)
    return first, second


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


def _homography(points0: np.ndarray, points1: np.ndarray, threshold: float) -> _Model | None:
    try:
        matrix, _ = cv2.findHomography(
            points0, points1, cv2.USAC_MAGSAC, threshold, maxIters=_MAX_ITERATIONS, confidence=_CONFIDENCE
        )
    except cv2.error:  # raised for some inputs that no minimal sample fits
        return None
    if matrix is None or not np.isfinite(matrix).all():
        return None
    found = _transfer(points0, points1, matrix) <= threshold
    matrix = _refined(poselib.refine_homography, points0, points1, matrix, found)
    if np.median(points0 @ matrix[2, :2] + matrix[2, 2]) < 0:  # the first pixel lies beyond the horizon
        matrix = -matrix
    return _Model(matrix, _transfer(points0, points1, matrix) <= threshold)


def _transfer(points0: np.ndarray, points1: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """(N,) distances in image 1, pixels; infinite behind the horizon."""
    with np.errstate(over="ignore"):
        error = np.linalg.norm(warp_points(points0, homography) - points1, axis=1)
    return np.nan_to_num(error, nan=np.inf)


def _refined(
    refine: Callable[..., tuple[np.ndarray, dict]],
    points0: np.ndarray,
    points1: np.ndarray,
    matrix: np.ndarray,
    inliers: np.ndarray,
) -> np.ndarray:
    """The model of least Cauchy loss near `matrix`, over its inliers: coarse ones pull MAGSAC's own."""
    if np.count_nonzero(inliers) <= _LEAST_REFINED:
        return matrix
    options = {"loss_type": "CAUCHY", "loss_scale": _LOSS_SCALE, "max_iterations": 50}
    found, _ = refine(points0[inliers], points1[inliers], matrix, options)
    return found if np.isfinite(found).all() and found.any() else matrix


def _fundamental(points0: np.ndarray, points1: np.ndarray, threshold: float) -> _Model | None:
    try:
        matrix, _ = cv2.findFundamentalMat(
            points0, points1, cv2.USAC_MAGSAC, threshold, _CONFIDENCE, _MAX_ITERATIONS
        )
    except cv2.error:
        return None
    if matrix is None or matrix.shape != (3, 3) or not np.isfinite(matrix).all() or not matrix.any():
        return None
    return _Model(matrix, _sampson(points0, points1, matrix) <= threshold)


def _essential(
    points0: np.ndarray, points1: np.ndarray, cameras: tuple[Camera, Camera], threshold: float, seed: int
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
    pose, report = poselib.estimate_relative_pose(points0, points1, *dicts, options, {})
    length = np.linalg.norm(pose.t)
    T_0to1 = np.eye(4)
    T_0to1[:3, :3] = pose.R
    if not np.isfinite(length) or length < 1e-12 or not np.isfinite(T_0to1).all():
        return None
    T_0to1[:3, 3] = pose.t / length
    essential = fundamental_from_pose(np.eye(3), np.eye(3), T_0to1)
    return _Model(essential, np.asarray(report["inliers"], dtype=bool), T_0to1)


def _sampson(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(N,) Sampson's distance in pixels."""
    lifted0, lifted1 = (np.column_stack([points, np.ones(len(points))]) for points in (points0, points1))
    lines1, lines0 = lifted0 @ fundamental.T, lifted1 @ fundamental
    slope = np.sqrt(np.sum(lines0[:, :2] ** 2, axis=1) + np.sum(lines1[:, :2] ** 2, axis=1))
    return np.abs(np.sum(lines1 * lifted1, axis=1)) / np.maximum(slope, 1e-300)


def _on_a_line(
    points: np.ndarray, inliers: np.ndarray, tolerance: float, minimum: int, chance: float
) -> bool:
    """Whether the inliers lie on one line or spot, but for no more than chance would put beside it.

    Matches along a line leave at least `minimum` − 3 points' worth of freedom to F and E (to H: one point's),
    with which a model can fit as many arbitrary matches; only what exceeds that is support.
    """
    sample = points[inliers]
    sample = sample[:: -(-len(sample) // 64)]  # as good as all of them for a line, and the fit is slow
    dx, dy, x, y = cv2.fitLine(sample.astype(np.float32), cv2.DIST_L1, 0, 0.01, 0.01).ravel()
    beside = np.abs((points[:, 0] - x) * dy - (points[:, 1] - y) * dx) > tolerance
    count, support = int(np.count_nonzero(beside)), int(np.count_nonzero(beside & inliers))
    return _log_false_alarms(count, support, minimum - 3, chance) >= 0


def _only_rotates(
    points0: np.ndarray, points1: np.ndarray, cameras: tuple[Camera, Camera], model: _Model
) -> bool:
    """Whether a rotation alone explains the inliers as well as the essential matrix does.

    Noise of deviation s a coordinate gives Sampson's distance a 90th percentile of 1.6 s, and the distance
    after the best rotation (Kabsch 1976) one of 3 s; a factor of three between them leaves room. Where it
    holds, the translation is noise.
    """
    points0, points1 = points0[model.inliers], points1[model.inliers]
    K0, K1 = (np.array([[c.fx, 0, c.cx], [0, c.fy, c.cy], [0, 0, 1.0]]) for c in cameras)
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
    fundamental = fundamental_from_pose(K0, K1, model.T_0to1)
    noise = np.percentile(_sampson(points0, points1, fundamental), 90)
    return bool(reach <= max(3 * noise, 0.1))


def _chance(points0: np.ndarray, points1: np.ndarray, threshold: float, homography: bool) -> float:
    """Probability that a random match is an inlier: its region's share of the area that the points span."""
    shares = []
    for points in (points0, points1):
        width, height = np.maximum(np.ptp(points, axis=0), 1.0)
        band = 2 * sqrt(2) * threshold * np.hypot(width, height)  # Sampson: √2 times the distance to the line
        shares.append((pi * threshold**2 if homography else band) / (width * height))
    return float(min(1.0, shares[1] if homography else max(shares)))


def _log_false_alarms(count: int, inliers: int, minimum: int, chance: float) -> float:
    """Logarithm of how many models with that many inliers `count` random matches would give.

    Moisan and Stival, A probabilistic criterion to detect rigid point matches, IJCV 2004, section 3.
    """
    if inliers <= minimum:
        return 0.0

    def log_choose(n: int, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    models = log(count - minimum) + log_choose(count, inliers) + log_choose(inliers, minimum)
    return models + (inliers - minimum) * log(chance)
