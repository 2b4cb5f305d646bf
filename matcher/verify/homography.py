"""Homographies of matched points, in resized pixels."""

from __future__ import annotations

from collections.abc import Iterator

import cv2
import numpy as np
import poselib

from matcher.data.geometry import warp_points
from matcher.verify.adjustment import Spread, adjusted_homography, refined
from matcher.verify.hypotheses import (
    CONFIDENCE,
    LOSS_SCALE,
    MAX_ITERATIONS,
    Hypothesis,
    MatchedPoints,
    TwoViewModel,
    likeliest,
    made,
)
from matcher.verify.likelihood import homography_likelihood


def estimated_homography(matched: MatchedPoints, threshold: float) -> TwoViewModel | None:
    """The likelier one of two homographies, each refined over its inliers.

    One by MAGSAC++ (Barath et al. 2020); another, if few matches agree with that and some are more probable
    than others, by PoseLib's LO-RANSAC, whose samples begin with these.
    """
    spread, covariances = Spread.of(matched.covariances, len(matched)), matched.covariances

    def hypotheses() -> Iterator[Hypothesis]:
        for sampled in (sampled_homography, _lo_ransac):
            if (matrix := sampled(matched, threshold)) is None:
                continue
            # Of H[2, 2] = 1: if the first pixel lies beyond the horizon, all points would be behind it.
            matrix = facing(matrix, matched.points0)
            for refine in _REFINEMENTS[: 1 if covariances is None else None]:
                found = transfer_error(*matched.sides, matrix) <= threshold
                matrix = refined(refine, matched, matrix, found)
                matrix = facing(matrix, matched.points0)
            inliers = transfer_error(*matched.sides, matrix) <= threshold
            likelihood = homography_likelihood(matrix, matched, spread)
            yield Hypothesis(TwoViewModel(matrix, inliers), likelihood, float(np.mean(inliers)))

    best = likeliest(made(hypotheses()))
    return None if best is None else best.model


def sampled_homography(matched: MatchedPoints, threshold: float) -> np.ndarray | None:
    """The homography (3, 3) as MAGSAC++ leaves it, if there is one."""
    try:
        matrix, _ = cv2.findHomography(
            *matched.sides, cv2.USAC_MAGSAC, threshold, maxIters=MAX_ITERATIONS, confidence=CONFIDENCE
        )
    except cv2.error:  # raised for some inputs that no minimal sample fits
        return None
    return matrix if matrix is not None and np.isfinite(matrix).all() else None


def _lo_ransac(matched: MatchedPoints, threshold: float) -> np.ndarray | None:
    order = matched.best_first()
    if order is None:
        return None
    options = {
        "max_reproj_error": threshold,
        "max_iterations": MAX_ITERATIONS,
        "success_prob": CONFIDENCE,
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


def _refine_homography(
    matrix: np.ndarray, points0: np.ndarray, points1: np.ndarray, *_: np.ndarray | None
) -> np.ndarray:
    options = {"loss_type": "CAUCHY", "loss_scale": LOSS_SCALE, "max_iterations": 50}
    return poselib.refine_homography(points0, points1, matrix, options)[0]


# One after the other, each with the inliers of the one before; only the first needs no covariances.
_REFINEMENTS = (_refine_homography, adjusted_homography, adjusted_homography)
