"""What a method did on a pair, held against the truth: errors of geometry and of matches."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    UnrelatedPair,
    reproject,
)
from matcher.geometry import inside, warp_points
from matcher.match.nearest import mutual_minima
from matcher.result import Result
from matcher.types import Features, Matches
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose, threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.verdict import SAME, reject_improbable

THRESHOLDS = (1, 3)  # pixels of the resized images
COARSE = 10  # pixels; for ground truth that is accurate to several pixels only, and WxBS's mAA


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
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * (np.array(size, dtype=np.float64) - 1)
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


def _expected(pair: DepthPair | CorrespondencePair, points: np.ndarray) -> np.ndarray:
    """(N, 2) positions in image 1 of points (N, 2), by depth or by the label of the pixel; NaN if unknown."""
    if isinstance(pair, DepthPair):
        return reproject(points, pair.view0, pair.view1)[0]
    width, height = (int(pair.points0[:, axis].max(initial=0)) + 2 for axis in (0, 1))
    label = np.full((height, width), -1, dtype=np.int64)
    cells = np.rint(pair.points0).astype(np.int64)
    label[cells[:, 1], cells[:, 0]] = np.arange(len(cells))
    pixels = np.rint(points).astype(np.int64)
    known = (pixels >= 0).all(axis=1) & (pixels[:, 0] < width) & (pixels[:, 1] < height)
    index = np.where(known, label[pixels[:, 1] * known, pixels[:, 0] * known], -1)
    return np.where((index >= 0)[:, None], points + pair.points1[index] - pair.points0[index], np.nan)


def match_errors(pair: Pair, matches: Matches, scale0: float, scale1: float) -> np.ndarray:
    """(K,) errors of matches in pixels of the resized images, NaN where the ground truth cannot tell.

    Every match of unrelated images is infinitely wrong. `scale0` and `scale1` are resized / stored size.
    """
    points0, points1 = (p.astype(np.float64) for p in (matches.points0, matches.points1))
    if isinstance(pair, HomographyPair):
        return reprojection_errors(points0, points1, pair.H_1_from_0, scale0, scale1)
    if isinstance(pair, DepthPair) or (isinstance(pair, CorrespondencePair) and pair.dense):
        return np.linalg.norm(_expected(pair, points0) - points1, axis=1) * scale1
    return np.full(len(points0), np.inf if isinstance(pair, UnrelatedPair) else np.nan)


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


@dataclass(frozen=True, eq=False)
class Record:
    """What one method did on one pair."""

    pair: str
    groups: tuple[str, ...]
    metrics: dict[
        str, np.ndarray
    ]  # (S,) float64 by name; those of the geometry differ by the estimator's seed
    scores: np.ndarray  # (K,) of the matches that the truth can judge
    errors: np.ndarray  # (K,) of these, pixels of the resized images
    verdict: float | None  # probability of the same place


def scale_of(features: Features) -> float:
    """Resized / stored size of the features' image, the geometric mean of both axes."""
    return math.sqrt(math.prod(features.scale.tolist()))


def measure_pair(pair: Pair, result: Result, estimators: Sequence[RobustEstimator] = ()) -> Record:
    """Compute the metrics of the pair's ground truth.

    Args:
        pair: with its ground truth.
        result: of the pair; the geometry of several passes must be probable to be accepted.
        estimators: S robust estimators of the truth's geometry, one per seed; without any, the geometry of
            the result is measured.

    Returns:
        Errors in pixels of the resized images or in degrees, NaN where the ground truth cannot decide.

    Raises:
        UsageError: the intrinsics belong to images of another size.
    """
    matches, sides = result.matches, (result.features0, result.features1)
    first, total = result.first or result, sum(map(len, sides))
    scale0, scale1 = map(scale_of, sides)
    found: dict[str, float | np.ndarray] = {
        "matches": len(matches),
        "layers": matches.layers_run,
        "kept": (matches.kept0 + matches.kept1) / total if total else 1.0,
        "keypoints": (len(first.features0) + len(first.features1)) / 2,
        "passes": max(1, len(result.passes)),
        "wall": 1e3 * result.seconds.get("call", math.nan),
        "cpu": 1e3 * result.seconds.get("cpu", math.nan),
    }
    scales = [side.scale.tolist() for side in sides]
    cameras = _cameras(pair, sides) if isinstance(pair, PosePair) else None
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
    ] or [result.geometry]
    accepted = geometries
    if estimators and len(result.passes) > 1:
        sizes = [side.image_size for side in sides]
        accepted = [reject_improbable(geometry, matches, *sizes) for geometry in geometries]
    found["accepted"] = np.array([geometry.verified for geometry in accepted])
    found["ambiguous"] = np.array([geometry.status == "ambiguous" for geometry in accepted])
    geometries = [g.rejected or g for g in geometries]  # the first answer, also of several or rejected
    points0, points1 = (p.astype(np.float64) for p in (matches.points0, matches.points1))
    errors = match_errors(pair, matches, scale0, scale1)
    known = ~np.isnan(errors)
    if isinstance(pair, PosePair):
        poses = [pose_error(g.cam1_from_cam0, pair.cam1_from_cam0) for g in geometries]
        found["error"] = np.array(poses).max(axis=1)
        F = fundamental_from_pose(pair.K0, pair.K1, pair.cam1_from_cam0)
        epipolar = epipolar_distance(points0, points1, F) / threshold_scale(*scales, "essential")
        found |= _precisions(epipolar)
    elif isinstance(pair, HomographyPair):
        H, size = pair.H_1_from_0, sides[0].image_size
        found["error"] = np.array([corner_error(g.matrix, H, size, scale1) for g in geometries])
    elif isinstance(pair, CorrespondencePair):
        near_line = np.zeros((len(geometries), COARSE))
        step = max(1, len(pair.points0) // 2000)  # a disparity map labels every pixel: an even sample will do
        labels = [p[::step].astype(np.float64) for p in (pair.points0, pair.points1)]
        for row, geometry in zip(near_line, geometries, strict=True):
            if geometry.matrix is not None:
                distance = epipolar_distance(*labels, geometry.matrix) * scale1
                row[:] = (distance[:, None] < np.arange(1, COARSE + 1)).mean(axis=0)
        found |= {"labels3": near_line[:, 2], f"labels{COARSE}": near_line.mean(axis=1)}
    # Precision and recall: not of poses alone and of unrelated pairs, and NaN of sparse labels.
    if isinstance(pair, HomographyPair | DepthPair | CorrespondencePair):
        keypoints = [np.asarray(side.keypoints, np.float64) for side in sides]
        if isinstance(pair, HomographyPair):
            every = reprojection_matrix(*keypoints, H, scale0, scale1)
            covisible0 = inside(warp_points(keypoints[0], H), sides[1].image_size)
            covisible1 = inside(warp_points(keypoints[1], np.linalg.inv(H)), sides[0].image_size)
            found["repeatability"] = repeatability(every, covisible0, covisible1, max(THRESHOLDS))
        else:
            every = distances(_expected(pair, keypoints[0]), keypoints[1]) * scale1
        judged = not isinstance(pair, CorrespondencePair) or pair.dense
        found |= _precisions(errors[known]) if judged else dict.fromkeys(_precisions(errors), math.nan)
        expected = ground_truth_matches(every, max(THRESHOLDS))
        distance = every[expected[:, 0], expected[:, 1]]
        for threshold in THRESHOLDS:
            within = expected[distance < threshold]
            share = recall(matches.indices, errors, within, threshold)
            found[f"recall{threshold}"] = share if judged else math.nan
    metrics = {name: np.broadcast_to(np.float64(value), len(geometries)) for name, value in found.items()}
    verdict = result.verdict
    probability = None if verdict is None else verdict.probability
    return Record(pair.name, pair.groups, metrics, result.scores[known], errors[known], probability)


def _precisions(errors: np.ndarray) -> dict[str, float]:
    """Share of the matches whose error (K,) is below each threshold, 0 without matches; and their numbers."""
    found = {}
    for threshold in (*THRESHOLDS, COARSE):
        found[f"correct{threshold}"] = float((errors < threshold).sum())
        found[f"precision{threshold}"] = found[f"correct{threshold}"] / max(1, len(errors))
    return found


def _cameras(pair: PosePair, sides: Sequence[Features]) -> list[Camera]:
    found = []
    for K, features, image in zip((pair.K0, pair.K1), sides, (pair.image0, pair.image1), strict=True):
        width, height = features.image_size
        if not (0 < K[0, 2] < width and 0 < K[1, 2] < height):
            raise UsageError(
                f"{image.path}: the principal point ({K[0, 2]:g}, {K[1, 2]:g}) lies outside the image of "
                f"{width} x {height} pixels; the intrinsics belong to images of another size"
            )
        found.append(Camera.from_K(K, size=(width, height)))
    return found


# Pairs that are easily wrong

OUTCOMES = ("right", "ambiguous", "refused", "wrong")


def outcome(pair: Pair, result: Result) -> dict[str, float]:
    """What a result says of a pair that is easily wrong, as metrics: 1 for its word in `OUTCOMES`.

    A pose is right within 10 degrees, a homography if it has four in five inliers right within 5 pixels; of
    an ambiguous geometry one of the alternatives has to be right.
    """
    geometry, same, right = result.geometry, not isinstance(pair, UnrelatedPair), False
    if isinstance(pair, PosePair):
        known = [geometry.cam1_from_cam0] if geometry.status == "ok" else geometry.alternatives
        right = any(max(pose_error(pose, pair.cam1_from_cam0)) <= 10 for pose in known)
    elif same and result.inliers.any():
        ends = (points[result.inliers].astype(np.float64) for points in (result.points0, result.points1))
        right = np.mean(reprojection_errors(*ends, pair.H_1_from_0) <= 5) >= 0.8
    said = result.verdict.probability
    if geometry.status == "ambiguous" and same:
        word = "ambiguous" if right else "wrong"
    elif geometry.status not in ("ok", "degenerate") or said < 0.5:
        word = "refused"
    else:
        word = "right" if right else "wrong"
    found = {name: float(name == word) for name in OUTCOMES}
    found |= {"sure": float(word == "wrong" and said >= SAME), "same": float(said >= SAME)}
    return found | {"verdict": said, "brier": (said - same) ** 2}
