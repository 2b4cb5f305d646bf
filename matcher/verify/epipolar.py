"""Fundamental and essential matrices: hypotheses of several thresholds, of which the likeliest is kept.

How far right matches lie from their epipolar lines differs from pair to pair: a tenth of a pixel where they
are refined on sharp images of a rigid scene, some pixels in weak texture. A narrow threshold finds an exact
model in the first case and too few inliers in the second, so several are tried, unless most matches agree
with the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import poselib

from matcher.data.camera import Camera
from matcher.verify.adjustment import Spread, adjusted_fundamental, adjusted_pose, refined
from matcher.verify.distances import fundamental_from_pose, in_front, sampson
from matcher.verify.likelihood import log_likelihood

LOSS_SCALE = 0.5  # pixels; errors well above it no longer pull a refined model
CONFIDENCE = 0.9999
MAX_ITERATIONS = 10_000

_THRESHOLDS = (2 / 3, 1 / 3, 5 / 3)  # of the threshold for inliers; the first may be enough
_AGREED = 0.7  # share of matches that agree with a hypothesis, at which no other is tried


@dataclass(frozen=True, eq=False)
class MatchedPoints:
    """Distinct, finite matches of a pair, in resized pixels."""

    points0: np.ndarray  # (N, 2)
    points1: np.ndarray  # (N, 2)
    probable: np.ndarray  # (N,) match probabilities
    covariances: np.ndarray | None = None  # (N, 2, 2) of points1

    def __len__(self) -> int:
        return len(self.points0)


@dataclass(frozen=True, eq=False)
class TwoViewModel:
    """A two-view geometry of N matches, in resized pixels."""

    matrix: np.ndarray  # (3, 3)
    inliers: np.ndarray  # (N,) bool
    cam1_from_cam0: np.ndarray | None = None


class _Hypothesis(NamedTuple):
    fundamental: np.ndarray  # (3, 3), resized pixels
    inliers: np.ndarray  # (N,) bool, of its own threshold
    possible: np.ndarray | None = None  # (N,) bool: in front of both cameras
    cam1_from_cam0: np.ndarray | None = None


def sampled_fundamental(matched: MatchedPoints, threshold: float) -> TwoViewModel | None:
    """The fundamental matrix as MAGSAC++ (Barath et al. 2020) leaves it."""
    found = _magsac(matched, threshold)
    return None if found is None else TwoViewModel(found.fundamental, found.inliers)


def estimated_fundamental(matched: MatchedPoints, threshold: float) -> TwoViewModel | None:
    """The likeliest fundamental matrix, each hypothesis refined over its inliers."""

    def hypothesis(threshold: float) -> _Hypothesis | None:
        found = _magsac(matched, threshold)
        if found is None:
            return None
        sides, covariances = (matched.points0, matched.points1), matched.covariances
        return found._replace(
            fundamental=refined(adjusted_fundamental, *sides, found.fundamental, found.inliers, covariances)
        )

    found = _likeliest(hypothesis, matched, threshold)
    if found is None:
        return None
    near = sampson(matched.points0, matched.points1, found.fundamental) <= threshold
    return TwoViewModel(found.fundamental, near)


def estimated_essential(
    matched: MatchedPoints, cameras: tuple[Camera, Camera], threshold: float, seed: int
) -> TwoViewModel | None:
    """The likeliest relative pose by PoseLib's LO-RANSAC; inliers lie in front of both cameras.

    Samples begin with the most probable matches (PROSAC, Chum and Matas 2005), if some are more so.
    """
    order = np.argsort(-matched.probable, kind="stable")
    best0, best1 = matched.points0[order], matched.points1[order]
    dicts = [
        {"model": "PINHOLE", "width": 0, "height": 0, "params": [c.fx, c.fy, c.cx, c.cy]} for c in cameras
    ]
    known = np.linalg.inv(cameras[0].K), np.linalg.inv(cameras[1].K)
    options = {
        "max_iterations": MAX_ITERATIONS,
        "success_prob": CONFIDENCE,
        "seed": seed,
        "progressive_sampling": bool(np.ptp(matched.probable) > 0),
    }
    loss = {"loss_type": "CAUCHY", "loss_scale": LOSS_SCALE}

    def refine(pose: np.ndarray, *matches: np.ndarray) -> np.ndarray:
        return adjusted_pose(pose, known, *matches)

    def hypothesis(threshold: float) -> _Hypothesis | None:
        own = {**options, "max_epipolar_error": threshold}
        pose, report = poselib.estimate_relative_pose(best0, best1, *dicts, own, loss)
        length = np.linalg.norm(pose.t)
        if not (length > 1e-12 and np.isfinite(length) and np.isfinite(pose.R).all()):
            return None
        cam1_from_cam0 = np.eye(4)
        cam1_from_cam0[:3, :3], cam1_from_cam0[:3, 3] = pose.R, pose.t / length
        inliers = np.zeros(len(matched), dtype=bool)
        inliers[order] = report["inliers"]
        sides = matched.points0, matched.points1
        if matched.covariances is not None:
            cam1_from_cam0 = refined(refine, *sides, cam1_from_cam0, inliers, matched.covariances)
        fundamental = fundamental_from_pose(cameras[0].K, cameras[1].K, cam1_from_cam0)
        return _Hypothesis(fundamental, inliers, in_front(*sides, known, cam1_from_cam0), cam1_from_cam0)

    found = _likeliest(hypothesis, matched, threshold)
    if found is None:
        return None
    near = sampson(matched.points0, matched.points1, found.fundamental) <= threshold
    essential = fundamental_from_pose(np.eye(3), np.eye(3), found.cam1_from_cam0)
    return TwoViewModel(essential, near & found.possible, found.cam1_from_cam0)


def _magsac(matched: MatchedPoints, threshold: float) -> _Hypothesis | None:
    points0, points1 = matched.points0, matched.points1
    try:
        matrix, _ = cv2.findFundamentalMat(
            points0, points1, cv2.USAC_MAGSAC, threshold, CONFIDENCE, MAX_ITERATIONS
        )
    except cv2.error:  # raised for some inputs that no minimal sample fits
        return None
    if matrix is None or matrix.shape != (3, 3) or not np.isfinite(matrix).all() or not matrix.any():
        return None
    return _Hypothesis(matrix, sampson(points0, points1, matrix) <= threshold)


def _likeliest(
    hypothesis: Callable[[float], _Hypothesis | None], matched: MatchedPoints, threshold: float
) -> _Hypothesis | None:
    """The likeliest of the hypotheses of several thresholds, or the first that most matches agree with."""
    spread, best, most = Spread.of(matched.covariances, len(matched)), None, -np.inf
    for factor in _THRESHOLDS:
        found = hypothesis(factor * threshold)
        if found is None:
            continue
        points = matched.points0, matched.points1
        likely = log_likelihood(found.fundamental, *points, spread, matched.probable, found.possible)
        if best is None or likely > most:
            best, most = found, likely
        if np.mean(found.inliers) >= _AGREED:
            break
    return best
