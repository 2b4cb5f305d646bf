"""Fundamental and essential matrices: hypotheses of several thresholds, of which the likeliest is kept.

How far right matches lie from their epipolar lines differs from pair to pair: a tenth of a pixel where they
are refined on sharp images of a rigid scene, some pixels in weak texture. A narrow threshold finds an exact
model in the first case and too few inliers in the second, so several are tried, of all matches and of the
more probable ones, unless most matches agree with the first. Of poses also those that a plane allows, and the
mean of those near the likeliest.
"""

from __future__ import annotations

from collections.abc import Iterator

import cv2
import numpy as np
import poselib

from matcher.data.camera import Camera
from matcher.verify.adjustment import Spread, adjusted_fundamental, adjusted_pose, refined
from matcher.verify.distances import fundamental_from_pose, in_front, sampson
from matcher.verify.hypotheses import (
    CONFIDENCE,
    LOSS_SCALE,
    MAX_ITERATIONS,
    Hypothesis,
    MatchedPoints,
    TwoViewModel,
    likeliest,
    made,
    trials,
)
from matcher.verify.likelihood import epipolar_likelihood
from matcher.verify.plane_poses import poses_of_plane
from matcher.verify.pose_mean import mean_pose

SAMPLES = 5_000  # for a pose, at most; twice as many give no better ones, even where most matches are wrong
_MIN_ITERATIONS = 100  # enough where most matches are right; PoseLib's own 1,000 take longer than all else
# Of the threshold for inliers, and the share of the matches, the most probable ones. The first may be enough.
_FUNDAMENTAL = ((2 / 3, 1.0), (1 / 3, 1.0), (5 / 3, 1.0), (2 / 3, 0.5))
_ESSENTIAL = ((2 / 3, 1.0), (1 / 3, 0.5), (2 / 3, 0.5), (5 / 3, 1.0), (5 / 3, 0.5))
_OFF_PLANE = 2.0  # thresholds for inliers that a match may lie from its place by the homography of a plane


def sampled_fundamental(matched: MatchedPoints, threshold: float) -> TwoViewModel | None:
    """The fundamental matrix as MAGSAC++ (Barath et al. 2020) leaves it."""
    matrix = _magsac(matched, threshold)
    return None if matrix is None else TwoViewModel(matrix, sampson(*matched.sides, matrix) <= threshold)


def estimated_fundamental(matched: MatchedPoints, threshold: float) -> TwoViewModel | None:
    """The likeliest fundamental matrix, each hypothesis refined over its inliers."""
    spread = Spread.of(matched.covariances, len(matched))

    def hypotheses() -> Iterator[Hypothesis]:
        for factor, part in trials(matched, _FUNDAMENTAL):
            if (matrix := _magsac(part, factor * threshold)) is None:
                continue
            found = sampson(*part.sides, matrix) <= factor * threshold
            matrix = refined(adjusted_fundamental, part, matrix, found)
            likelihood = epipolar_likelihood(matrix, matched, spread)
            model = TwoViewModel(matrix, sampson(*matched.sides, matrix) <= threshold)
            yield Hypothesis(model, likelihood, np.count_nonzero(found) / len(matched))

    best = likeliest(made(hypotheses()))
    return None if best is None else best.model


def estimated_essential(
    matched: MatchedPoints,
    cameras: tuple[Camera, Camera],
    threshold: float,
    seed: int,
    samples: int = SAMPLES,
) -> TwoViewModel | None:
    """The mean of the likeliest poses by PoseLib's LO-RANSAC; inliers lie in front of both cameras."""
    known = np.linalg.inv(cameras[0].K), np.linalg.inv(cameras[1].K)
    spread = Spread.of(matched.covariances, len(matched))

    def refine(pose: np.ndarray, *matches: np.ndarray) -> np.ndarray:
        return adjusted_pose(pose, known, *matches)

    def judged(pose: np.ndarray, agreeing: float) -> Hypothesis:
        fundamental = fundamental_from_pose(cameras[0].K, cameras[1].K, pose)
        possible = in_front(*matched.sides, known, pose)
        likelihood = epipolar_likelihood(fundamental, matched, spread, possible)
        inliers = (sampson(*matched.sides, fundamental) <= threshold) & possible
        essential = fundamental_from_pose(np.eye(3), np.eye(3), pose)
        return Hypothesis(TwoViewModel(essential, inliers, pose), likelihood, agreeing)

    def hypotheses() -> Iterator[Hypothesis]:
        for number, (factor, part) in enumerate(trials(matched, _ESSENTIAL)):
            reach, progressive = factor * threshold, number > 0
            pose, found = _sampled_pose(part, cameras, reach, seed, samples, progressive=progressive)
            if pose is not None:
                if part.covariances is not None:
                    pose = refined(refine, part, pose, found)
                yield judged(pose, np.count_nonzero(found) / len(matched))
            if number == 0:
                yield from of_plane()

    def of_plane() -> Iterator[Hypothesis]:
        for pose in poses_of_plane(matched, cameras, _OFF_PLANE * threshold):
            inliers = judged(pose, 0.0).model.inliers
            yield judged(refined(refine, matched, pose, inliers), 0.0)

    found = made(hypotheses())
    best = likeliest(found)
    if best is None or (mean := mean_pose(found, best)) is None:
        return None if best is None else best.model
    return judged(mean, best.agreeing).model


def _sampled_pose(
    matched: MatchedPoints,
    cameras: tuple[Camera, Camera],
    threshold: float,
    seed: int,
    samples: int,
    *,
    progressive: bool,
) -> tuple[np.ndarray | None, np.ndarray]:
    """cam1_from_cam0 (4, 4), None if there is none, and its inliers (N,); PoseLib refines on these.

    `progressive`: samples begin with the most probable matches, which helps where few are right, but not
    where these lie close together, as nearest neighbours' often do.
    """
    order = matched.best_first() if progressive else None
    dicts = [
        {"model": "PINHOLE", "width": 0, "height": 0, "params": [c.fx, c.fy, c.cx, c.cy]} for c in cameras
    ]
    options = {
        "max_epipolar_error": threshold,
        "min_iterations": _MIN_ITERATIONS,
        "max_iterations": samples,
        "success_prob": CONFIDENCE,
        "seed": seed,
        "progressive_sampling": order is not None,
    }
    loss = {"loss_type": "CAUCHY", "loss_scale": LOSS_SCALE}
    order = np.arange(len(matched)) if order is None else order
    sides = (points[order] for points in matched.sides)
    pose, report = poselib.estimate_relative_pose(*sides, *dicts, options, loss)
    inliers, length = np.zeros(len(matched), dtype=bool), np.linalg.norm(pose.t)
    inliers[order] = report["inliers"]
    if not (1e-12 < length < np.inf and np.isfinite(pose.R).all()):
        return None, inliers
    cam1_from_cam0 = np.eye(4)
    cam1_from_cam0[:3, :3], cam1_from_cam0[:3, 3] = pose.R, pose.t / length
    return cam1_from_cam0, inliers


def _magsac(matched: MatchedPoints, threshold: float) -> np.ndarray | None:
    try:
        matrix, _ = cv2.findFundamentalMat(
            *matched.sides, cv2.USAC_MAGSAC, threshold, CONFIDENCE, MAX_ITERATIONS
        )
    except cv2.error:  # raised for some inputs that no minimal sample fits
        return None
    if matrix is None or matrix.shape != (3, 3) or not np.isfinite(matrix).all() or not matrix.any():
        return None
    return matrix
