"""Metrics of matches and of the geometry estimated from them.

Errors are in pixels of the resized images; `scale0`, `scale1` are resized / stored size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from matcher.data.geometry import warp_points
from matcher.match.minima import mutual_minima


def corner_error(
    estimated: np.ndarray | None, ground_truth: np.ndarray, size: tuple[int, int], scale1: float = 1.0
) -> float:
    """Mean distance in image 1 between the corners of image 0 under two homographies.

    DeTone et al., SuperPoint, CVPRW 2018, section 6; averaged over the corners as in LoFTR and LightGlue.

    Args:
        estimated: (3, 3) stored pixels; None is a failed estimation.
        ground_truth: (3, 3) stored pixels, the ground truth.
        size: stored (width, height) of image 0; the corners are the centres of its corner pixels.
        scale1: resized / stored size of image 1.

    Returns:
        Resized pixels of image 1; infinite where the estimation failed or a corner falls behind the horizon.
    """
    if estimated is None or not np.isfinite(estimated).all():
        return float("inf")
    width, height = size
    corners = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], dtype=np.float64)
    distance = np.linalg.norm(warp_points(corners, estimated) - warp_points(corners, ground_truth), axis=1)
    return float(np.nan_to_num(distance * scale1, nan=np.inf).mean())


def auc(errors: np.ndarray, threshold: float) -> np.ndarray:
    """Area under the cumulative error curve up to a threshold, normalised by the threshold.

    The trapezoidal rule from (0, 0) through (k-th smallest error, k/n), constant after the last error below
    the threshold: the definition of SuperGlue's evaluation (Sarlin et al. 2020, section 5.2), which every
    later paper uses.

    Args:
        errors: (…, n); infinite for failures.
        threshold: in the errors' unit.

    Returns:
        (…,) in [0, 1]; NaN for n = 0.
    """
    errors = np.asarray(errors, dtype=np.float64)
    count = errors.shape[-1]
    if count == 0:
        return np.full(errors.shape[:-1], np.nan)
    ordered = np.sort(errors, axis=-1)
    # an error equal to the threshold counts as above it
    below = ordered < threshold
    steps = np.diff(np.minimum(ordered, threshold), axis=-1, prepend=0.0)
    rank = np.arange(1, count + 1)
    heights = np.where(below, rank - 0.5, np.maximum(below.sum(axis=-1, keepdims=True), 0))
    last = threshold - np.minimum(ordered[..., -1], threshold)
    area = (steps * heights).sum(axis=-1) + last * count
    return area / (count * threshold)


def pose_error(estimated: np.ndarray | None, ground_truth: np.ndarray) -> tuple[float, float]:
    """Angular errors of the rotation and of the translation's direction, in degrees.

    The sign of the translation is ignored, as in SuperGlue (section 5.2): an error of 180° counts as 0.

    Args:
        estimated: (4, 4) cam1_from_cam0; None for a failed estimation, whose errors are infinite.
        ground_truth: (4, 4) cam1_from_cam0, any scale.
    """
    if estimated is None or not np.isfinite(estimated).all():
        return float("inf"), float("inf")
    difference = estimated[:3, :3].T @ ground_truth[:3, :3]
    rotation = np.degrees(np.arccos(np.clip((np.trace(difference) - 1) / 2, -1, 1)))
    lengths = np.linalg.norm(estimated[:3, 3]) * np.linalg.norm(ground_truth[:3, 3])
    cosine = estimated[:3, 3] @ ground_truth[:3, 3] / max(lengths, 1e-12)
    translation = np.degrees(np.arccos(np.clip(abs(cosine), 0, 1)))
    return float(rotation), float(translation)


def reprojection_errors(
    points0: np.ndarray,
    points1: np.ndarray,
    H_1_from_0: np.ndarray,
    scale0: float = 1.0,
    scale1: float = 1.0,
) -> np.ndarray:
    """(K,) reprojection errors of matched points (K, 2), the mean of both directions, in resized pixels.

    The error of a point beyond the horizon is infinite.
    """
    error = _mean_of_directions(_matched_distances, points0, points1, H_1_from_0, scale0, scale1)
    return np.nan_to_num(error, nan=np.inf)


def reprojection_matrix(
    points0: np.ndarray,
    points1: np.ndarray,
    H_1_from_0: np.ndarray,
    scale0: float = 1.0,
    scale1: float = 1.0,
) -> np.ndarray:
    """(N, M) float32: `reprojection_errors` of every keypoint (N, 2) with every keypoint (M, 2)."""
    return _mean_of_directions(distances, points0, points1, H_1_from_0, scale0, scale1)


def _mean_of_directions(
    distance: Callable[[np.ndarray, np.ndarray], np.ndarray],
    points0: np.ndarray,
    points1: np.ndarray,
    H_1_from_0: np.ndarray,
    scale0: float,
    scale1: float,
) -> np.ndarray:
    """The mean, over both directions, of a distance between warped points and points, in resized pixels."""
    forward = distance(warp_points(points0, H_1_from_0), points1) * scale1
    backward = distance(points0, warp_points(points1, np.linalg.inv(H_1_from_0))) * scale0
    return (forward + backward) / 2


def _matched_distances(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(K,) Euclidean distances of (K, 2) and (K, 2)."""
    return np.linalg.norm(points0 - points1, axis=-1)


def distances(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(N, M) float32 Euclidean distances of (N, 2) and (M, 2); infinite where either point is NaN."""
    far0, far1 = (np.nan_to_num(points.astype(np.float32), nan=np.inf) for points in (points0, points1))
    with np.errstate(over="ignore"):
        return np.hypot(far0[:, None, 0] - far1[None, :, 0], far0[:, None, 1] - far1[None, :, 1])


def ground_truth_matches(errors: np.ndarray, threshold: float) -> np.ndarray:
    """(K, 2) int64: mutual nearest keypoints under the ground truth, with an error below `threshold`.

    Args:
        errors: (N, M) errors of every pair of keypoints under the ground truth.
    """
    rows, columns = mutual_minima(errors)
    keep = errors[rows, columns] < threshold
    return np.stack([rows[keep], columns[keep]], axis=1)


def repeatability(
    errors: np.ndarray, covisible0: np.ndarray, covisible1: np.ndarray, threshold: float
) -> float:
    """Share of the covisible keypoints that are detected in the other image too, over both images.

    Mikolajczyk and Schmid, IJCV 2004, section 4, by the distance of points as in SuperPoint, section 4.

    Args:
        errors: (N, M) errors of every pair of keypoints under the ground truth.
        covisible0, covisible1: (N,) and (M,) bool, keypoints whose position lies inside the other image.
        threshold: in the unit of the errors.

    Returns:
        In [0, 1]; NaN if no keypoint is covisible.
    """
    if not (covisible0.any() or covisible1.any()):
        return float("nan")
    near = errors < threshold
    found0, found1 = near.any(axis=1) & covisible0, near.any(axis=0) & covisible1
    return float((found0.sum() + found1.sum()) / (covisible0.sum() + covisible1.sum()))


def precision(errors: np.ndarray, threshold: float) -> float:
    """Share of matches whose error (K,) is below the threshold; 0 without matches."""
    return float(np.mean(errors < threshold)) if len(errors) else 0.0


def recall(indices: np.ndarray, errors: np.ndarray, expected: np.ndarray, threshold: float) -> float:
    """Share of the ground-truth matches of which either keypoint has a correct match.

    Detectors may put several keypoints at one position (SIFT: one per orientation), and which of them are
    mutual nearest neighbours is arbitrary, so a correct match of either keypoint counts.

    Args:
        indices: (K, 2) predicted matches.
        errors: (K,) of these matches under the ground truth.
        expected: (P, 2) from `ground_truth_matches` at the same threshold.

    Returns:
        In [0, 1]; NaN without ground-truth matches.
    """
    if not len(expected):
        return float("nan")
    found = indices[errors < threshold]
    return float((np.isin(expected[:, 0], found[:, 0]) | np.isin(expected[:, 1], found[:, 1])).mean())
