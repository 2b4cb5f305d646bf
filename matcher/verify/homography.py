"""Homographies of matched points, in resized pixels, and what lies off their plane."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import log
from typing import Any

import cv2
import numpy as np
import poselib

from matcher.cameras import Camera
from matcher.config import PlanarModel
from matcher.geometry import warp_points
from matcher.types import TwoViewGeometry, thinned
from matcher.verify.adjustment import (
    LOSS_SCALE,
    MAX_ITERATIONS,
    RANSAC_CONFIDENCE,
    Hypothesis,
    MatchedPoints,
    adjusted_homography,
    cross,
    fundamental_from_pose,
    in_front,
    lifted,
    likeliest,
    refined,
    sampson,
    until_most_agree,
)
from matcher.verify.likelihood import epipolar_residuals, half_normal, homography_likelihood, log_false_alarms

# Homographies


def estimated_homography(matched: MatchedPoints, threshold: float) -> TwoViewGeometry | None:
    """The likelier one of two homographies, each refined over its inliers.

    One by MAGSAC++ (Barath et al. 2020); another, if few matches agree with that and some are more probable
    than others, by PoseLib's LO-RANSAC, whose samples begin with these.
    """
    # One after the other, each with the inliers of the one before; only the first needs no covariances.
    refinements = (_refine_homography, adjusted_homography, adjusted_homography)

    def hypotheses() -> Iterator[Hypothesis]:
        for sampled in (partial(magsac, cv2.findHomography), _lo_ransac):
            if (matrix := sampled(matched, threshold)) is None:
                continue
            # Of H[2, 2] = 1: if the first pixel lies beyond the horizon, all points would be behind it.
            matrix = facing(matrix, matched.points0)
            for refine in refinements[: 1 if matched.covariances is None else None]:
                found = transfer_error(*matched.sides, matrix) <= threshold
                matrix = facing(refined(refine, matched, matrix, found), matched.points0)
            inliers = transfer_error(*matched.sides, matrix) <= threshold
            model = TwoViewGeometry("homography", "ok", inliers, matrix)
            yield Hypothesis(model, homography_likelihood(matrix, matched), float(np.mean(inliers)))

    best = likeliest(until_most_agree(hypotheses()))
    return None if best is None else best.model


def estimated_planar(matched: MatchedPoints, threshold: float, model: PlanarModel) -> TwoViewGeometry | None:
    """An affine map or a similarity (turn, one scale and shift, no mirror) by RANSAC, refined twice."""
    linear, _ = (cv2.estimateAffine2D if model == "affine" else cv2.estimateAffinePartial2D)(
        *(np.ascontiguousarray(side) for side in matched.sides),  # OpenCV needs it
        method=cv2.RANSAC,
        ransacReprojThreshold=threshold,
        maxIters=MAX_ITERATIONS,
        confidence=RANSAC_CONFIDENCE,
        refineIters=0,
    )
    if linear is None or not np.isfinite(linear).all():
        return None
    matrix = np.vstack([linear, [0.0, 0.0, 1.0]])
    for _ in range(2):
        inliers = transfer_error(*matched.sides, matrix) <= threshold
        matrix = refined(partial(adjusted_homography, model=model), matched, matrix, inliers)
    return TwoViewGeometry("homography", "ok", transfer_error(*matched.sides, matrix) <= threshold, matrix)


def magsac(find: Any, matched: MatchedPoints, threshold: float) -> np.ndarray | None:
    """The matrix (3, 3) by MAGSAC++ in OpenCV's `findHomography` or `findFundamentalMat`, if there is one."""
    settings = {"maxIters": MAX_ITERATIONS, "confidence": RANSAC_CONFIDENCE}
    try:
        matrix, _ = find(*matched.sides, cv2.USAC_MAGSAC, threshold, **settings)
    except cv2.error:  # raised for some inputs that no minimal sample fits
        return None
    usable = matrix is not None and matrix.shape == (3, 3) and np.isfinite(matrix).all() and matrix.any()
    return matrix if usable else None


def _lo_ransac(matched: MatchedPoints, threshold: float) -> np.ndarray | None:
    order = matched.best_first()
    if order is None:
        return None
    options = {
        "max_reproj_error": threshold,
        "max_iterations": MAX_ITERATIONS,
        "success_prob": RANSAC_CONFIDENCE,
        "progressive_sampling": True,
    }
    loss = {"loss_type": "CAUCHY", "loss_scale": LOSS_SCALE}
    sides = (points[order] for points in matched.sides)
    matrix, _ = poselib.estimate_homography(*sides, options, loss)
    return matrix if np.isfinite(matrix).all() and matrix.any() else None


def facing(homography: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The homography with the sign that puts most of the points before its horizon."""
    return -homography if np.median(points @ homography[2, :2] + homography[2, 2]) < 0 else homography


def transfer_error(points0: np.ndarray, points1: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """(N,) distances in image 1, pixels; infinite behind the horizon."""
    with np.errstate(over="ignore"):
        error = np.linalg.norm(warp_points(points0, homography) - points1, axis=1)
    return np.nan_to_num(error, nan=np.inf)


def _refine_homography(matrix: np.ndarray, inliers: MatchedPoints) -> np.ndarray:
    options = {"loss_type": "CAUCHY", "loss_scale": LOSS_SCALE, "max_iterations": 50}
    return poselib.refine_homography(*inliers.sides, matrix, options)[0]


# Degenerate configurations: matches on a line or spot, pure rotation, and support by chance


def on_a_line(points: np.ndarray, inliers: np.ndarray, tolerance: float, freedom: int, chance: float) -> bool:
    """Whether the inliers lie on one line or spot, but for no more than chance would put beside it.

    Matches along a line leave at least so many points' worth of `freedom` to a model, which can fit as many
    arbitrary matches; only what exceeds that is support.
    """
    sample = thinned(points[inliers], 64)  # as good as all of them for a line, and the fit is slow
    dx, dy, x, y = cv2.fitLine(sample.astype(np.float32), cv2.DIST_L1, 0, 0.01, 0.01).ravel()
    beside = np.abs((points[:, 0] - x) * dy - (points[:, 1] - y) * dx) > tolerance
    count, support = int(np.count_nonzero(beside)), int(np.count_nonzero(beside & inliers))
    return log_false_alarms(count, support, freedom, chance) >= 0


def only_rotates(inliers: MatchedPoints, cameras: tuple[Camera, Camera], cam1_from_cam0: np.ndarray) -> bool:
    """Whether a rotation alone explains the inliers as well as E does, so that the translation is noise.

    Noise of deviation s per coordinate gives Sampson's distance a 90th percentile of 1.6 s, and the distance
    after the best rotation (Kabsch 1976) one of 3 s; a factor of three between them leaves room.
    """
    points0, points1 = inliers.sides
    K0, K1 = (camera.K for camera in cameras)
    rays0, rays1 = (lifted(points) @ np.linalg.inv(K).T for points, K in ((points0, K0), (points1, K1)))
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


# Poses that the homography of a plane allows

_LEAST_STEP = 1e-6  # length of a translation, in distances of the plane; shorter ones have no direction


def poses_of_plane(
    matched: MatchedPoints,
    cameras: tuple[Camera, Camera],
    threshold: float,
    homography: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Poses cam1_from_cam0 (4, 4), |t| = 1, with most of a plane's matches in front of both pinhole cameras.

    Decomposed by OpenCV (Malis and Vargas 2007). A match of the plane is within the threshold of its place by
    the homography, which has the points of image 0 before its horizon.
    """
    if homography is None:
        if (homography := magsac(cv2.findHomography, matched, threshold)) is None:
            return
        homography = facing(homography, matched.points0)
    plane = transfer_error(*matched.sides, homography) <= threshold
    inverse = np.linalg.inv(cameras[0].K), np.linalg.inv(cameras[1].K)
    calibrated = inverse[1] @ homography @ cameras[0].K
    try:
        _, rotations, translations, _ = cv2.decomposeHomographyMat(calibrated, np.eye(3))
    except cv2.error:  # as in the other estimators: for what has no decomposition
        return
    for rotation, translation in zip(rotations, translations, strict=True):
        pose, length = np.eye(4), np.linalg.norm(translation)
        if not (_LEAST_STEP < length < np.inf and np.isfinite(rotation).all()):
            continue
        pose[:3, :3], pose[:3, 3] = rotation, translation[:, 0] / length
        if 2 * np.count_nonzero(in_front(*matched.sides, inverse, pose) & plane) > np.count_nonzero(plane):
            yield pose


# Inliers that mostly lie on one plane, and what lies off it: that alone fixes an epipolar geometry.
#
# A homography allows two poses (Malis and Vargas 2007) and a family of fundamental matrices (Chum, Werner and
# Matas, Two-view geometry estimation unaffected by a dominant plane, CVPR 2005). A match off the plane by a
# distance d agrees with a wrong one of them by chance, the more easily the smaller d is.

LEAST_SHARE = 0.5  # of the inliers, on the plane; half of them off it fix any geometry
ENOUGH = 6.0  # logarithm of how much likelier one pose must be than its twin, or a matrix than by chance
OWN = 1.4  # the same of the likeliest by all matches, right of 17 of 21 planes with nothing off them
_SURE = 4.0  # standard deviations that a match must lie off the plane
_SAMPLES = 256  # inliers among which a plane is looked for
# Of matches off the plane that may be right, of which the likeliest counts.
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
_CELL = 32.0  # pixels of the resized image, in which matches may be wrong together
_BESIDE = 3.0  # pixels from a line along which matches may be wrong together; many slide thrice as far
_PAIRS = 24  # matches off the plane, any two of which give an epipole


def dominant_plane(matched: MatchedPoints, inliers: np.ndarray, threshold: float) -> np.ndarray | None:
    """The homography (3, 3) that most of the inliers (N,) agree with up to a threshold, if there is one."""
    sides = [points[inliers] for points in matched.sides]
    few = [thinned(points, _SAMPLES) for points in sides]
    # Where half of the matches lie on it, 150 samples of four miss it once in 16,000 times.
    homography, _ = cv2.findHomography(*few, cv2.RANSAC, threshold, maxIters=150, confidence=0.9999)
    for _ in range(2):
        if homography is None or not np.isfinite(homography).all():
            return None
        near = transfer_error(*sides, facing(homography, sides[0])) <= threshold
        if np.mean(near) < LEAST_SHARE:
            return None
        homography, _ = cv2.findHomography(sides[0][near], sides[1][near], 0)
    return None if homography is None else facing(homography, sides[0])


@dataclass(frozen=True, eq=False)
class Parallax:
    """How far matches lie from a plane."""

    moved: np.ndarray  # (N, 2) from the place by the homography, pixels; NaN behind its horizon
    distance: np.ndarray  # (N,) its length, infinite there
    noise: float  # 90th percentile of Sampson's distances of the inliers, pixels
    off: np.ndarray  # (N,) bool: matches off the plane

    @staticmethod
    def of(homography: np.ndarray, matched: MatchedPoints, residuals: np.ndarray) -> Parallax:
        """From a homography (3, 3), and Sampson's distances of the inliers.

        Noise of deviation s per coordinate gives distances from it a 90th percentile of 3 s, and Sampson's
        one of 1.6 s. What lies beyond that may have slid along an edge, as far as its covariance allows.
        """
        distance, variances = transfer_error(*matched.sides, homography), matched.variances
        noise = max(float(np.percentile(residuals, 90)), 0.03)
        dx, dy = (moved := matched.points1 - warp_points(matched.points0, homography)).T
        xx, yy = variances.xx + variances.image0, variances.yy + variances.image0
        squared = (yy * dx**2 - 2 * variances.xy * dx * dy + xx * dy**2) / (xx * yy - variances.xy**2)
        near = squared[distance <= 3 * noise]
        usual = np.median(near) / 1.39 if len(near) else 0.0  # the median of χ² of two degrees of freedom
        far = squared > _SURE**2 * max(_least_spread(matched) ** 2, float(usual))
        return Parallax(moved, distance, noise, np.isfinite(distance) & (distance > 3 * noise) & far)


def _least_spread(matched: MatchedPoints) -> float:
    """How much less than their standard deviations, of covariances or guessed, matches may spread."""
    return 0.5 if matched.covariances is None else 1.0


def parallax_evidence(
    fundamental: np.ndarray,
    matched: MatchedPoints,
    parallax: Parallax,
    inliers: np.ndarray,
    possible: np.ndarray,
) -> float:
    """Logarithm of how much likelier the matches off a plane are with an epipolar geometry than by chance.

    As `epipolar_likelihood`; the residuals of the inliers say how much wider than known matches spread.
    """
    off = parallax.off
    residual, deviation = epipolar_residuals(fundamental, matched)
    wider = max(_least_spread(matched), float(np.median(residual[inliers] / deviation[inliers])) / 0.6745)
    density = half_normal(residual[off], wider * deviation[off]) * possible[off]
    # Where nearly all matches lie on the plane, one off it is wrong more often than it seems alone.
    gains = matched.probable[off] * (density * parallax.distance[off].clip(None, 100.0) - 1)
    return max(float(matched.weights[off] @ np.log1p(share * gains)) for share in _SHARES)


def parallax_false_alarms(fundamental: np.ndarray, matched: MatchedPoints, parallax: Parallax) -> float:
    """Logarithm of how many matrices of a family would agree by chance with as many matches off a plane.

    One has an epipole, which two matches fix; each other one agrees with it by chance if it lies off the
    plane in the direction of the epipolar line. Those side by side, on the next window, or slid along one
    edge, or a little along like ones, are wrong together, so they count as the root of their number.
    """
    off, reach = parallax.off, 1.5 * parallax.noise
    cells = np.floor(matched.points0[off] / _CELL)
    _, cell, sharing = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    ends, moved = matched.points1[off] @ [1, 1j], parallax.moved[off] @ [1, 1j]
    step, short = 1 + len(ends) // _SAMPLES, parallax.distance[off] < 3 * _BESIDE
    turned = (moved / parallax.distance[off]).conj()[:, None]  # into the direction in which each moved
    beside = np.abs((turned * (ends[::step] - ends[:, None])).imag) < _BESIDE
    beside |= (np.abs((turned * moved[::step]).imag) < _BESIDE) & short[:, None] & short[::step]
    along = step * np.count_nonzero(beside, axis=1)
    weight = 1 / np.sqrt(np.maximum(sharing[cell.reshape(-1)], along))
    agree = float(weight @ (sampson(*matched.sides, fundamental)[off] <= reach)) - 2
    # Sampson's distance is √2 times shorter than that from a line.
    chance = 2 / np.pi * np.arcsin(np.minimum(1.0, np.sqrt(2) * reach / parallax.distance[off]))
    expected = float(weight @ chance)
    if agree <= expected:
        return np.inf
    pairs = log(max(len(sharing) * (len(sharing) - 1) / 2, 1))
    # Chernoff's bound of a Poisson distribution
    return pairs + agree - expected - agree * log(agree / max(expected, 1e-9))


def completed(homography: np.ndarray, matched: MatchedPoints, parallax: Parallax) -> np.ndarray | None:
    """The fundamental matrix (3, 3) of a plane and the epipole that most matches off it agree with."""
    off = np.flatnonzero(parallax.off)
    if len(off) < 3:
        return None
    chosen = off[np.argsort(-matched.probable[off], kind="stable")[:_PAIRS]]
    x0, x1 = (lifted(points[chosen]) for points in matched.sides)
    lines = np.cross(x0 @ homography.T, x1)
    lines /= np.linalg.norm(lines, axis=1, keepdims=True)
    sides, best, most = [points[off] for points in matched.sides], None, 0
    for i, j in combinations(range(len(chosen)), 2):
        epipole = np.cross(lines[i], lines[j])
        if (length := np.linalg.norm(epipole)) < 1e-9:
            continue
        fundamental = cross(epipole / length) @ homography
        count = int(np.count_nonzero(sampson(*sides, fundamental) <= 1.5 * parallax.noise))
        if count > most:
            best, most = fundamental, count
    return best
