"""Credible matches and probabilities that hold: what a network says, corrected by what is known of a pair.

That is how many keypoints find a partner and, after verification, how well the matches agree with a geometry.
The geometry itself goes by prior scores, which take account of how well the images agree around each match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from matcher.config import CalibrationConfig
from matcher.types import Matches, TwoViewGeometry

_LEAST = 1e-4  # probabilities nearer to 0 or 1 are taken as this near
_VARIANCE = 0.05  # pixels² of the resized image, of which variances are multiples: a usual one
_VARIANCES = (1e-4, 1e2)  # smaller and larger ones are taken for these
_EPIPOLAR = ("fundamental", "essential")
_PSEUDO_COUNT = 0.5  # of an inlier and of an outlier, added to the probabilities of a pair


def credible_matches(
    best: np.ndarray, partners: np.ndarray, mutual: np.ndarray, threshold: float, doubles_at: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Mutual best entries of one pair, (N,) each as in `MutualBest`, above `threshold` of the probability.

    The threshold is twice as high where `doubles_at` matches are expected: with S expected, the sum of the
    probabilities above it, it is threshold · (1 + doubles_at / S), as images of unrelated scenes give a few
    matches. Indices (K, 2) int64 and probabilities (K,) float32, best first.
    """
    rows = np.flatnonzero(mutual & (best > (math.log(threshold) if threshold > 0 else -math.inf)))
    probabilities = np.exp(best[rows]).clip(max=1.0).astype(np.float32)
    order = np.argsort(-probabilities, kind="stable")
    rows, probabilities = rows[order], probabilities[order]
    if doubles_at and len(rows):
        credible = probabilities > threshold * (1 + doubles_at / probabilities.sum())
        rows, probabilities = rows[credible], probabilities[credible]
    return np.stack([rows, partners[rows]], axis=1), probabilities


def calibrated(scores: np.ndarray, counts: Sequence[int], config: CalibrationConfig | None) -> np.ndarray:
    """The probabilities that matches are within 3 pixels, by Platt scaling with one number of the pair.

    A network is trained on the pairs of its recipe; where fewer keypoints find a partner, because the scene
    has depth or the images overlap little, its matches are wrong more often than it says. So
    log odds = offset + slope · log odds of the network + share_slope · log(Σ scores / keypoints).
    Platt, Probabilistic Outputs for Support Vector Machines, 1999. Of scores (K,) and the keypoints of both
    images, (K,) float32 in the same order; without a configuration the scores as they are.
    """
    if config is None or not len(scores):
        return scores
    return probabilities(config.offset + regressors(scores, counts) @ [config.slope, config.share_slope])


def regressors(scores: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """(K, 2) what `calibrated` goes by: log odds, and logarithm of the share of keypoints with a partner."""
    share = max(float(np.sum(scores, dtype=np.float64)) / max(1, min(counts)), _LEAST)
    return np.column_stack([_log_odds(scores), np.full(len(scores), np.log(share))])


def with_prior_scores(
    matches: Matches,
    scale: Sequence[float],
    calibration: CalibrationConfig | None,
    further_passes: bool = False,
) -> Matches:
    """Refined matches, in their order, with the `prior` scores by which geometry weighs them.

    A match whose surroundings look alike in both images, to an exact place, is right more often than its
    descriptors alone say, and one that could not be refined though most others of the pair could, less often:
    log odds = offset + slope · log odds before + refined · (1 if it was refined, less the share of matches
    that were) + variance_slope · log(variance / .05 pixels²) of a refined one + further_passes. Poses are
    most accurate with these; as probabilities they hold less well than the scores before. `scale` is resized
    / stored size of image 1 in x and y; without a calibration of refined matches nothing changes.
    """
    refined = calibration and calibration.refined
    if refined is None or matches.refinement is None or not len(matches):
        return matches
    slopes = [refined.slope, refined.refined, refined.variance_slope, refined.further_passes]
    values = refinement_regressors(matches, scale, further_passes)
    return replace(matches, prior=probabilities(refined.offset + values @ slopes))


def calibrated_by_geometry(
    matches: Matches, geometry: TwoViewGeometry, calibration: CalibrationConfig | None
) -> Matches:
    """Verified matches, in their order, with the probabilities that they then have.

    A match that agrees with the geometry of most others is right more often than it seemed alone, and one
    that does not is mostly wrong: log odds = offset + slope · log odds before + inlier · (1 if it is one)
    + share_slope · log odds of the share that inliers have of all probabilities.

    A geometry that was not found, or is refused, counts as one without inliers. A homography says nothing
    about single matches, as those off its plane may be right; that of an ambiguous or degenerate set says
    something about its inliers alone.
    """
    verified = calibration and calibration.verified
    on_plane = geometry.kind in _EPIPOLAR and geometry.status != "ok" and geometry.verified
    if verified is None or not (on_plane or judges_matches(geometry)) or not len(matches):
        return matches
    slopes = [verified.slope, verified.inlier, verified.share_slope]
    scores = probabilities(verified.offset + geometry_regressors(matches, geometry) @ slopes)
    if on_plane:
        scores = np.where(geometry.inliers, np.maximum(scores, matches.scores), matches.scores)
    return replace(matches, scores=scores, prior=matches.prior_scores)


def calibration_of(matcher: object) -> CalibrationConfig | None:
    """The calibration of a matcher's own scores; None of one whose scores are no such probabilities."""
    return getattr(matcher, "calibration", None)


def refinement_regressors(matches: Matches, scale: Sequence[float], further_passes: bool) -> np.ndarray:
    """(K, 4) what `with_prior_scores` goes by; its arguments, of refined matches."""
    refined = matches.refinement.accepted.astype(np.float64)
    xx, xy, yy = (matches.covariances.astype(np.float64)[:, i, j] for i, j in ((0, 0), (0, 1), (1, 1)))
    xx, xy, yy = xx * scale[0] ** 2, xy * scale[0] * scale[1], yy * scale[1] ** 2
    largest = (xx + yy) / 2 + np.hypot((xx - yy) / 2, xy)  # across the least certain direction
    variance = np.log(largest.clip(*_VARIANCES) / _VARIANCE)
    passes = np.full(len(refined), float(further_passes))
    return np.column_stack([_log_odds(matches.scores), refined - refined.mean(), refined * variance, passes])


def judges_matches(geometry: TwoViewGeometry) -> bool:
    """Whether a geometry, or that there is none, says something about single matches."""
    unknown = ("ambiguous", "degenerate", "not_estimated")
    return geometry.kind in _EPIPOLAR and geometry.status not in unknown


def geometry_regressors(matches: Matches, geometry: TwoViewGeometry) -> np.ndarray:
    """(K, 3) what `calibrated_by_geometry` goes by."""
    inliers = geometry.inliers if geometry.verified else np.zeros(len(matches), dtype=bool)
    scores = matches.scores.astype(np.float64)
    share = (scores[inliers].sum() + _PSEUDO_COUNT) / (scores.sum() + 2 * _PSEUDO_COUNT)
    pair = np.full(len(matches), np.log(share / (1 - share)))
    return np.column_stack([_log_odds(scores), inliers.astype(np.float64), pair])


def _log_odds(scores: np.ndarray) -> np.ndarray:
    inner = np.clip(np.asarray(scores, dtype=np.float64), _LEAST, 1 - _LEAST)
    return np.log(inner / (1 - inner))


def probabilities(log_odds: np.ndarray) -> np.ndarray:
    """(K,) float32 from log odds (K,)."""
    return (1 / (1 + np.exp(-log_odds))).astype(np.float32)
