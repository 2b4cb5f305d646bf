"""Metrics of one method on one pair, and their averages over pairs with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from matcher.cameras import Camera
from matcher.errors import UsageError
from matcher.evaluate.protocols import (
    CorrespondencePair,
    DepthPair,
    HomographyPair,
    Pair,
    PosePair,
    reproject,
)
from matcher.geometry import inside, warp_points
from matcher.match.nearest import mutual_minima
from matcher.result import Result
from matcher.types import Features, Matches, TwoViewGeometry
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose, threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.verdict import reject_improbable

THRESHOLDS = (1, 3)  # pixels of the resized images
COARSE = 10  # pixels; for ground truth that is accurate to several pixels only, and WxBS's mAA

# Errors of geometry and of matches


def corner_error(
    estimated: np.ndarray | None, ground_truth: np.ndarray, size: tuple[int, int], scale1: float = 1.0
) -> float:
    """Mean distance in image 1 between the corners of image 0 under two homographies.

    DeTone et al., SuperPoint, CVPRW 2018, section 6; averaged over the corners as in LoFTR and LightGlue.

    Args:
        estimated: (3, 3) stored pixels; None is a failed estimation.
        ground_truth: (3, 3) stored pixels.
        size: stored (width, height) of image 0; the corners are the centres of its corner pixels.
        scale1: resized / stored size of image 1.

    Returns:
        Resized pixels of image 1; infinite where the estimation failed or a corner falls behind the horizon.
    """
    if estimated is None or not np.isfinite(estimated).all():
        return math.inf
    width, height = size
    corners = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], dtype=np.float64)
    distance = np.linalg.norm(warp_points(corners, estimated) - warp_points(corners, ground_truth), axis=1)
    return float(np.nan_to_num(distance * scale1, nan=np.inf).mean())


def pose_error(estimated: np.ndarray | None, ground_truth: np.ndarray) -> tuple[float, float]:
    """Angular errors of the rotation and of the translation's direction, in degrees.

    The sign of the translation is ignored, as in SuperGlue (Sarlin et al. 2020, section 5.2).

    Args:
        estimated: (4, 4) cam1_from_cam0; None for a failed estimation, whose errors are infinite.
        ground_truth: (4, 4) cam1_from_cam0, any scale.
    """
    if estimated is None or not np.isfinite(estimated).all():
        return math.inf, math.inf
    difference = estimated[:3, :3].T @ ground_truth[:3, :3]
    rotation = np.degrees(np.arccos(np.clip((np.trace(difference) - 1) / 2, -1, 1)))
    lengths = np.linalg.norm(estimated[:3, 3]) * np.linalg.norm(ground_truth[:3, 3])
    cosine = estimated[:3, 3] @ ground_truth[:3, 3] / max(lengths, 1e-12)
    return float(rotation), float(np.degrees(np.arccos(np.clip(abs(cosine), 0, 1))))


def auc(errors: np.ndarray, threshold: float) -> np.ndarray:
    """Area under the cumulative error curve up to a threshold, normalised by the threshold.

    The trapezoidal rule from (0, 0) through (k-th smallest error, k/n), constant after the last error below
    the threshold: the definition of SuperGlue's evaluation (section 5.2), which every later paper uses.

    Args:
        errors: (…, n); infinite for failures.
        threshold: in the errors' unit; an error equal to it counts as above.

    Returns:
        (…,) in [0, 1]; NaN for n = 0.
    """
    errors = np.asarray(errors, dtype=np.float64)
    count = errors.shape[-1]
    if count == 0:
        return np.full(errors.shape[:-1], np.nan)
    ordered = np.sort(errors, axis=-1)
    below = ordered < threshold
    steps = np.diff(np.minimum(ordered, threshold), axis=-1, prepend=0.0)
    heights = np.where(below, np.arange(1, count + 1) - 0.5, below.sum(axis=-1, keepdims=True))
    last = threshold - np.minimum(ordered[..., -1], threshold)
    return ((steps * heights).sum(axis=-1) + last * count) / (count * threshold)


def distances(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(N, M) float32 Euclidean distances of (N, 2) and (M, 2); infinite where either point is NaN."""
    far0, far1 = (np.nan_to_num(points.astype(np.float32), nan=np.inf) for points in (points0, points1))
    with np.errstate(over="ignore"):
        return np.hypot(far0[:, None, 0] - far1[None, :, 0], far0[:, None, 1] - far1[None, :, 1])


def reprojection_errors(
    points0: np.ndarray, points1: np.ndarray, H_1_from_0: np.ndarray, scale0: float = 1.0, scale1: float = 1.0
) -> np.ndarray:
    """(K,) reprojection errors of matched points (K, 2), the mean of both directions, in resized pixels.

    The error of a point beyond the horizon is infinite.
    """
    forward = np.linalg.norm(warp_points(points0, H_1_from_0) - points1, axis=-1) * scale1
    backward = np.linalg.norm(points0 - warp_points(points1, np.linalg.inv(H_1_from_0)), axis=-1) * scale0
    return np.nan_to_num((forward + backward) / 2, nan=np.inf)


def reprojection_matrix(
    points0: np.ndarray, points1: np.ndarray, H_1_from_0: np.ndarray, scale0: float = 1.0, scale1: float = 1.0
) -> np.ndarray:
    """(N, M) float32: `reprojection_errors` of every keypoint (N, 2) with every keypoint (M, 2)."""
    forward = distances(warp_points(points0, H_1_from_0), points1) * scale1
    return (forward + distances(points0, warp_points(points1, np.linalg.inv(H_1_from_0))) * scale0) / 2


def corresponding_points(pair: CorrespondencePair, points: np.ndarray) -> np.ndarray:
    """(N, 2) positions in image 1 of points (N, 2) in image 0, by the label of the pixel; NaN without one."""
    width, height = (int(pair.points0[:, axis].max(initial=0)) + 2 for axis in (0, 1))
    label = np.full((height, width), -1, dtype=np.int64)
    cells = np.rint(pair.points0).astype(np.int64)
    label[cells[:, 1], cells[:, 0]] = np.arange(len(cells))
    pixels = np.rint(points).astype(np.int64)
    known = (pixels >= 0).all(axis=1) & (pixels[:, 0] < width) & (pixels[:, 1] < height)
    index = np.where(known, label[pixels[:, 1] * known, pixels[:, 0] * known], -1)
    corresponding = points + pair.points1[index] - pair.points0[index]
    return np.where((index >= 0)[:, None], corresponding, np.nan)


def match_errors(pair: Pair, matches: Matches, scale0: float, scale1: float) -> np.ndarray:
    """(K,) errors of matches in pixels of the resized images, NaN where the ground truth cannot tell.

    Every match of unrelated images is infinitely wrong. `scale0` and `scale1` are resized / stored size.
    """
    points0, points1 = (p.astype(np.float64) for p in (matches.points0, matches.points1))
    if isinstance(pair, HomographyPair):
        return reprojection_errors(points0, points1, pair.H_1_from_0, scale0, scale1)
    if isinstance(pair, DepthPair):
        expected, _ = reproject(points0, pair.view0, pair.view1)
    elif isinstance(pair, CorrespondencePair):
        expected = corresponding_points(pair, points0)
    else:
        return np.full(len(points0), np.inf)
    return np.linalg.norm(expected - points1, axis=1) * scale1


def ground_truth_matches(errors: np.ndarray, threshold: float) -> np.ndarray:
    """(K, 2) int64: mutual nearest keypoints under the ground truth, with an error below `threshold`.

    Args:
        errors: (N, M) errors of every pair of keypoints under the ground truth.
    """
    rows, columns = mutual_minima(errors)
    keep = errors[rows, columns] < threshold
    return np.stack([rows[keep], columns[keep]], axis=1)


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
        return math.nan
    found = indices[errors < threshold]
    return float((np.isin(expected[:, 0], found[:, 0]) | np.isin(expected[:, 1], found[:, 1])).mean())


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
        return math.nan
    near = errors < threshold
    found = (near.any(axis=1) & covisible0).sum() + (near.any(axis=0) & covisible1).sum()
    return float(found / (covisible0.sum() + covisible1.sum()))


# One pair


def measure_pair(
    pair: Pair, result: Result, estimators: Sequence[RobustEstimator]
) -> dict[str, float | np.ndarray]:
    """Compute the metrics of the pair's protocol.

    Args:
        pair: with its ground truth.
        result: of the pair; the geometry of several passes must be probable to be accepted.
        estimators: S robust estimators of the protocol's geometry, one per seed.

    Returns:
        Metric name to value; metrics of the estimated geometry are (S,) arrays. Errors in pixels of the
        resized images or in degrees, NaN where the ground truth cannot decide.

    Raises:
        UsageError: the intrinsics belong to images of another size.
    """
    matches, sides = result.matches, (result.features0, result.features1)
    first, total = result.first or result, sum(map(len, sides))
    found: dict[str, float | np.ndarray] = {
        "matches": float(len(matches)),
        "layers": float(matches.layers_run),
        "kept": (matches.kept0 + matches.kept1) / total if total else 1.0,
        "keypoints": (len(first.features0) + len(first.features1)) / 2,
        "passes": float(max(1, len(result.passes))),
    }
    cameras = _cameras(pair, result) if isinstance(pair, PosePair) else None
    scales = [side.scale.tolist() for side in sides]
    geometries = [
        estimator(
            matches.points0,
            matches.points1,
            cameras=cameras,
            scores=matches.prior_scores,
            thresholds_scale=threshold_scale(*scales, estimator.config.kind),
            covariances=matches.covariances,
        )
        for estimator in estimators
    ]
    accepted = geometries
    if len(result.passes) > 1:
        sizes = [side.image_size for side in sides]
        accepted = [reject_improbable(geometry, matches, *sizes) for geometry in geometries]
    found["accepted"] = np.array([float(geometry.verified) for geometry in accepted])
    found["ambiguous"] = np.array([float(geometry.status == "ambiguous") for geometry in accepted])
    geometries = [g.rejected or g for g in geometries]  # the first answer, also of several or rejected
    if isinstance(pair, PosePair):
        found |= _pose_metrics(pair, matches, geometries, threshold_scale(*scales, "essential"))
    elif isinstance(pair, HomographyPair):
        H, size, scale1 = pair.H_1_from_0, sides[0].image_size, scale_of(sides[1])
        found["error"] = np.array([corner_error(g.matrix, H, size, scale1) for g in geometries])
    elif isinstance(pair, CorrespondencePair):
        found |= _label_metrics(pair, geometries, scale_of(sides[1]))
    return found | _match_metrics(pair, result)


def scale_of(features: Features) -> float:
    """Resized / stored size of the features' image, the geometric mean of both axes."""
    return math.sqrt(math.prod(features.scale.tolist()))


def _match_metrics(pair: Pair, result: Result) -> dict[str, float]:
    """Precision and recall; matches of which the ground truth cannot tell are not counted.

    Nothing of poses or unrelated pairs, and NaN of sparse labels, which say nothing of single matches.
    """
    points0, points1 = (np.asarray(f.keypoints, np.float64) for f in (result.features0, result.features1))
    scale0, scale1 = scale_of(result.features0), scale_of(result.features1)
    found = {}
    if isinstance(pair, HomographyPair):
        H, back = pair.H_1_from_0, np.linalg.inv(pair.H_1_from_0)
        every = reprojection_matrix(points0, points1, H, scale0, scale1)
        covisible0 = inside(warp_points(points0, H), result.features1.image_size)
        covisible1 = inside(warp_points(points1, back), result.features0.image_size)
        found["repeatability"] = repeatability(every, covisible0, covisible1, max(THRESHOLDS))
    elif isinstance(pair, CorrespondencePair) and pair.dense:
        every = distances(corresponding_points(pair, points0), points1) * scale1
    elif isinstance(pair, DepthPair):
        every = distances(reproject(points0, pair.view0, pair.view1)[0], points1) * scale1
    elif isinstance(pair, CorrespondencePair):
        return {f"{name}{t}": math.nan for name in ("precision", "recall") for t in THRESHOLDS}
    else:
        return {}
    errors = match_errors(pair, result.matches, scale0, scale1)
    found |= _precisions(errors[~np.isnan(errors)])
    expected = ground_truth_matches(every, max(THRESHOLDS))
    distance = every[expected[:, 0], expected[:, 1]]
    for threshold in THRESHOLDS:
        within = expected[distance < threshold]
        found[f"recall{threshold}"] = recall(result.matches.indices, errors, within, threshold)
    return found


def _pose_metrics(
    pair: PosePair, matches: Matches, geometries: Sequence[TwoViewGeometry], shrink: float
) -> dict[str, float | np.ndarray]:
    angles = np.array([pose_error(g.cam1_from_cam0, pair.cam1_from_cam0) for g in geometries])
    F = fundamental_from_pose(pair.K0, pair.K1, pair.cam1_from_cam0)
    points0, points1 = (p.astype(np.float64) for p in (matches.points0, matches.points1))
    errors = epipolar_distance(points0, points1, F) / shrink
    return {"error": angles.max(axis=1), **_precisions(errors)}


def _precisions(errors: np.ndarray) -> dict[str, float]:
    """Share of the matches whose error (K,) is below each threshold, 0 without matches; and their numbers."""
    found = {}
    for threshold in (*THRESHOLDS, COARSE):
        found[f"correct{threshold}"] = float((errors < threshold).sum())
        found[f"precision{threshold}"] = found[f"correct{threshold}"] / max(1, len(errors))
    return found


def _label_metrics(
    pair: CorrespondencePair, geometries: Sequence[TwoViewGeometry], scale1: float
) -> dict[str, np.ndarray]:
    """Shares of the labelled points near the estimated epipolar lines: WxBS's mAA."""
    step = max(1, len(pair.points0) // 2000)  # a disparity map labels every pixel: an even sample is enough
    labels0, labels1 = (p[::step].astype(np.float64) for p in (pair.points0, pair.points1))
    near_line = np.zeros((len(geometries), COARSE))
    for row, geometry in zip(near_line, geometries, strict=True):
        if geometry.matrix is not None:
            distance = epipolar_distance(labels0, labels1, geometry.matrix) * scale1
            row[:] = (distance[:, None] < np.arange(1, COARSE + 1)).mean(axis=0)
    return {"labels3": near_line[:, 2], f"labels{COARSE}": near_line.mean(axis=1)}


def _cameras(pair: PosePair, result: Result) -> tuple[Camera, Camera]:
    cameras = []
    for K, features, path in (
        (pair.K0, result.features0, pair.image0.path),
        (pair.K1, result.features1, pair.image1.path),
    ):
        width, height = features.image_size
        if not (0 < K[0, 2] < width and 0 < K[1, 2] < height):
            raise UsageError(
                f"{path}: the principal point ({K[0, 2]:g}, {K[1, 2]:g}) lies outside the image of "
                f"{width} x {height} pixels; the intrinsics belong to images of another size"
            )
        cameras.append(Camera.from_K(K, size=(width, height)))
    return cameras[0], cameras[1]


# Averages over pairs, with intervals of 95 % by a seeded bootstrap over the pairs (Efron 1979)

Statistic = Callable[[np.ndarray], np.ndarray]  # (…, n) → (…,)


@dataclass(frozen=True)
class Estimate:
    """A statistic and its confidence interval; NaN for that of a single pair."""

    value: float
    low: float
    high: float
    spread: float  # standard deviation over the estimator's seeds


def estimate(
    values: np.ndarray, statistic: Statistic, *, minus: np.ndarray | None = None, seed: int = 0
) -> Estimate:
    """A statistic over pairs with its percentile bootstrap interval.

    Args:
        values: (S, n) of n pairs under S estimator seeds; the statistic is averaged over the seeds.
        statistic: a function along the last axis.
        minus: (S, n) of another method on the same pairs: the estimate is that of the difference, whose
            resampled pairs are the same (a paired interval).
        seed: of the bootstrap, which is the same for every row of a table.
    """
    count = values.shape[1]
    draws = np.random.default_rng([seed, count]).integers(0, count, (1000, count))
    by_seed, resampled = statistic(values), statistic(values[:, draws]).mean(axis=0)
    if minus is not None:
        by_seed, resampled = by_seed - statistic(minus), resampled - statistic(minus[:, draws]).mean(axis=0)
    known = resampled[np.isfinite(resampled)]
    interval = np.percentile(known, [2.5, 97.5]) if len(known) and count > 1 else (math.nan, math.nan)
    return Estimate(*map(float, (by_seed.mean(), *interval, by_seed.std())))


def mean(values: np.ndarray) -> np.ndarray:
    """Mean of the finite values along the last axis; NaN without any."""
    known = np.isfinite(values)
    count = known.sum(axis=-1)
    total = np.where(known, values, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
