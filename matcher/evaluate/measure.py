"""What a method did on a pair, held against the truth: errors of geometry and of matches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from matcher.cameras import Camera
from matcher.errors import ImageError
from matcher.evaluate import protocols
from matcher.geometry import inside, warp_points
from matcher.match.nearest import mutual_minima
from matcher.result import Result
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose, threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.verdict import SAME, reject_improbable

THRESHOLDS = (1, 3)  # pixels of the resized images
OUTCOMES = ("right", "ambiguous", "refused", "wrong")  # of pairs that are easily wrong
COARSE = 10  # pixels; for ground truth that is accurate to several pixels only, and WxBS's mAA


def corner_error(
    estimated: np.ndarray | None, ground_truth: np.ndarray, size: tuple[int, int], scale1: float = 1.0
) -> float:
    """Mean distance in resized pixels of image 1 between the corners of image 0, of a stored `size`, under
    two homographies of stored pixels (SuperPoint, DeTone et al. 2018, section 6); infinite without an
    estimate, or beyond the horizon."""
    if estimated is None or not np.isfinite(estimated).all():
        return math.inf
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * (np.array(size, dtype=np.float64) - 1)
    ours, theirs = (warp_points(corners, H) for H in (estimated, ground_truth))
    return float(distances(ours, theirs).mean() * scale1)


def pose_error(estimated: np.ndarray | None, ground_truth: np.ndarray) -> tuple[float, float]:
    """Angles in degrees between the rotations and the translations, these up to sign, of two cam1_from_cam0
    (4, 4) (SuperGlue, Sarlin et al. 2020, section 5.2); infinite without an estimate."""
    if estimated is None or not np.isfinite(estimated).all():
        return math.inf, math.inf
    difference = estimated[:3, :3].T @ ground_truth[:3, :3]
    rotation = np.degrees(np.arccos(np.clip((np.trace(difference) - 1) / 2, -1, 1)))
    lengths = np.linalg.norm(estimated[:3, 3]) * np.linalg.norm(ground_truth[:3, 3])
    cosine = estimated[:3, 3] @ ground_truth[:3, 3] / max(lengths, 1e-12)
    return float(rotation), float(np.degrees(np.arccos(np.clip(abs(cosine), 0, 1))))


def distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(…,) Euclidean distances of points (…, 2); infinite where either is NaN."""
    return np.nan_to_num(np.hypot(*np.moveaxis(points - others, -1, 0)), nan=np.inf)


def reprojection_errors(
    points0: np.ndarray, points1: np.ndarray, H_1_from_0: np.ndarray, scale0: float = 1.0, scale1: float = 1.0
) -> np.ndarray:
    """(…,) errors of points (…, 2) in resized pixels, the mean of both directions, infinite beyond the
    horizon; the scales are resized / stored size."""
    forward = distances(warp_points(points0, H_1_from_0), points1) * scale1
    return (forward + distances(points0, warp_points(points1, np.linalg.inv(H_1_from_0))) * scale0) / 2


def errors_of(
    pair: protocols.Pair, points0: np.ndarray, points1: np.ndarray, scale0: float, scale1: float
) -> np.ndarray:
    """(…,) errors in resized pixels of points (…, 2) that are said to correspond: infinite of unrelated
    images, NaN where the ground truth cannot tell; the scales are resized / stored size."""
    points0, points1 = (np.asarray(points, np.float64) for points in (points0, points1))
    if isinstance(pair, protocols.HomographyPair):
        return reprojection_errors(points0, points1, pair.H_1_from_0, scale0, scale1)
    if isinstance(pair, protocols.DepthPair):
        expected, _ = protocols.reproject(points0.reshape(-1, 2), pair.view0, pair.view1)
        expected = expected.reshape(points0.shape)
    elif isinstance(pair, protocols.CorrespondencePair) and pair.dense:
        # By the labels of the pixels.
        pixels, labels = (np.rint(points).astype(np.int64) for points in (points0, pair.points0))
        size = labels.max(axis=0, initial=0) + 1
        shift = np.full((*size, 2), np.nan)
        shift[tuple(labels.T)] = pair.points1 - pair.points0
        known = ((pixels >= 0) & (pixels < size)).all(axis=-1, keepdims=True)
        x, y = np.moveaxis(pixels * known, -1, 0)
        expected = points0 + np.where(known, shift[x, y], np.nan)
    else:
        shape = np.broadcast_shapes(points0.shape, points1.shape)[:-1]
        return np.full(shape, np.inf if isinstance(pair, protocols.UnrelatedPair) else np.nan)
    errors = distances(expected, points1) * scale1
    return np.where(np.isnan(expected[..., 0]), np.nan, errors)


def ground_truth_matches(errors: np.ndarray, threshold: float) -> np.ndarray:
    """(K, 2) int64 mutual nearest keypoints by errors (N, M) under the ground truth, those below a limit."""
    rows, columns = mutual_minima(errors)
    keep = errors[rows, columns] < threshold
    return np.stack([rows[keep], columns[keep]], axis=1)


def recall(indices: np.ndarray, errors: np.ndarray, expected: np.ndarray, threshold: float) -> float:
    """Share of the true matches `expected` (P, 2), NaN of none, of which either keypoint has a correct match,
    of `indices` (K, 2) with `errors` (K,): of several at one position (SIFT: one per orientation) either will
    do."""
    if not len(expected):
        return math.nan
    found = indices[errors < threshold]
    return float((np.isin(expected[:, 0], found[:, 0]) | np.isin(expected[:, 1], found[:, 1])).mean())


def repeatability(
    errors: np.ndarray, covisible0: np.ndarray, covisible1: np.ndarray, threshold: float
) -> float:
    """Share of the covisible keypoints (N,), (M,) bool, NaN of none, that are detected in the other image too
    (SuperPoint, section 4), by `errors` (N, M) of every pair of keypoints under the ground truth."""
    if not (covisible0.any() or covisible1.any()):
        return math.nan
    near = errors < threshold
    found = (near.any(axis=1) & covisible0).sum() + (near.any(axis=0) & covisible1).sum()
    return float(found / (covisible0.sum() + covisible1.sum()))


@dataclass(frozen=True, eq=False)
class Record:
    """What one method did on one pair."""

    pair: str
    groups: tuple[str, ...]
    metrics: dict[str, np.ndarray]  # (S,) float64; those of the geometry differ by the estimator's seed
    scores: np.ndarray  # (K,) of the matches that the truth can judge
    errors: np.ndarray  # (K,) of these, pixels of the resized images
    verdict: float | None  # probability of the same place


def scales_of(result: Result) -> tuple[float, float]:
    """Resized / stored size of both images, the geometric mean of both axes."""
    return tuple(math.sqrt(math.prod(f.scale.tolist())) for f in (result.features0, result.features1))


def check_intrinsics(pair: protocols.PosePair, result: Result) -> None:
    """Refuse a pair with a principal point outside its image (`ImageError`)."""
    sides = (result.features0, result.features1), (pair.K0, pair.K1), (pair.image0, pair.image1)
    for side, K, image in zip(*sides, strict=True):
        width, height = side.image_size
        if not (0 < K[0, 2] < width and 0 < K[1, 2] < height):
            raise ImageError(f"{image.path}: {width} x {height} pixels; the intrinsics are of another size")


def measure_pair(pair: protocols.Pair, result: Result, estimators: Sequence[RobustEstimator] = ()) -> Record:
    """Metrics of the pair's ground truth, in resized pixels or in degrees, NaN where it cannot decide. Robust
    estimators, one per seed, find the geometry, which of several passes must be probable to be accepted;
    without them that of the result is measured, and its `outcome`."""
    matches, sides = result.matches, (result.features0, result.features1)
    first, total = result.first or result, sum(map(len, sides))
    sizes, scales = [side.image_size for side in sides], [side.scale.tolist() for side in sides]
    scale0, scale1 = scales_of(result)
    found: dict[str, float | np.ndarray] = {
        "matches": len(matches),
        "layers": matches.layers_run,
        "kept": (matches.kept0 + matches.kept1) / total if total else 1.0,
        "keypoints": (len(first.features0) + len(first.features1)) / 2,
        "passes": max(1, len(result.passes)),
        "wall": 1e3 * result.seconds.get("call", math.nan),
        "cpu": 1e3 * result.seconds.get("cpu", math.nan),
    }
    cameras = None
    if isinstance(pair, protocols.PosePair):
        both = (pair.K0, pair.K1)
        cameras = [Camera.from_K(K, size=size) for K, size in zip(both, sizes, strict=True)]
        centres = np.concatenate([2 * K[:2, 2] / size for K, size in zip(both, sizes, strict=True)])
        alike = np.ptp(centres) < 0.1 * centres.mean()
        found["K_scale"] = centres.mean() if alike else math.nan  # 1 of intrinsics of the stored images
    ends = matches.points0, matches.points1
    known = {"cameras": cameras, "scores": matches.prior_scores, "covariances": matches.covariances}
    geometries = accepted = [
        estimator(*ends, thresholds_scale=threshold_scale(*scales, estimator.config.kind), **known)
        for estimator in estimators
    ] or [result.geometry]
    if estimators and len(result.passes) > 1:
        accepted = [reject_improbable(geometry, matches, *sizes) for geometry in geometries]
    found["accepted"] = np.array([geometry.verified for geometry in accepted])
    found["ambiguous"] = np.array([geometry.status == "ambiguous" for geometry in accepted])
    geometries = [g.rejected or g for g in geometries]  # the first answer, also of several or rejected
    errors = errors_of(pair, *ends, scale0, scale1)
    known = ~np.isnan(errors)
    if isinstance(pair, protocols.PosePair):
        truths = {"error": pair.cam1_from_cam0, "inverse": np.linalg.inv(pair.cam1_from_cam0)}
        for name, truth in truths.items():
            found[name] = np.array([max(pose_error(g.cam1_from_cam0, truth)) for g in geometries])
        F = fundamental_from_pose(pair.K0, pair.K1, pair.cam1_from_cam0)
        ends = (points.astype(np.float64) for points in ends)
        found |= _precisions(epipolar_distance(*ends, F) / threshold_scale(*scales, "essential"))
    elif isinstance(pair, protocols.HomographyPair):
        for name, truth in {"error": pair.H_1_from_0, "inverse": np.linalg.inv(pair.H_1_from_0)}.items():
            found[name] = np.array([corner_error(g.matrix, truth, sizes[0], scale1) for g in geometries])
    elif isinstance(pair, protocols.CorrespondencePair):
        near_line = np.zeros((len(geometries), COARSE))
        step = max(1, len(pair.points0) // 2000)  # a disparity map labels every pixel: an even sample will do
        labels = [p[::step].astype(np.float64) for p in (pair.points0, pair.points1)]
        for row, geometry in zip(near_line, geometries, strict=True):
            if geometry.matrix is not None:
                distance = epipolar_distance(*labels, geometry.matrix) * scale1
                row[:] = (distance[:, None] < np.arange(1, COARSE + 1)).mean(axis=0)
        found |= {"labels3": near_line[:, 2], f"labels{COARSE}": near_line.mean(axis=1)}
    # Precision and recall: not of poses alone and of unrelated pairs, and NaN of sparse labels.
    if isinstance(pair, protocols.HomographyPair | protocols.DepthPair | protocols.CorrespondencePair):
        keypoints0, keypoints1 = (np.asarray(side.keypoints, np.float64) for side in sides)
        every = errors_of(pair, keypoints0[:, None], keypoints1[None], scale0, scale1)
        every = np.nan_to_num(every, nan=np.inf)
        if isinstance(pair, protocols.HomographyPair):
            covisible0 = inside(warp_points(keypoints0, pair.H_1_from_0), sizes[1])
            covisible1 = inside(warp_points(keypoints1, np.linalg.inv(pair.H_1_from_0)), sizes[0])
            found["repeatability"] = repeatability(every, covisible0, covisible1, max(THRESHOLDS))
        judged = not isinstance(pair, protocols.CorrespondencePair) or pair.dense
        found |= _precisions(errors[known]) if judged else dict.fromkeys(_precisions(errors), math.nan)
        expected = ground_truth_matches(every, max(THRESHOLDS))
        distance = every[expected[:, 0], expected[:, 1]]
        for threshold in THRESHOLDS:
            within = expected[distance < threshold]
            found[f"recall{threshold}"] = recall(matches.indices, errors, within, threshold)
    found |= {} if estimators else outcome(pair, result)
    metrics = {name: np.broadcast_to(np.float64(value), len(geometries)) for name, value in found.items()}
    probability = None if result.verdict is None else result.verdict.probability
    return Record(pair.name, pair.groups, metrics, result.scores[known], errors[known], probability)


def _precisions(errors: np.ndarray) -> dict[str, float]:
    """Share of the matches whose error (K,) is below each threshold, 0 without matches; and their numbers."""
    found = {}
    for threshold in (*THRESHOLDS, COARSE):
        found[f"correct{threshold}"] = float((errors < threshold).sum())
        found[f"precision{threshold}"] = found[f"correct{threshold}"] / max(1, len(errors))
    return found


def outcome(pair: protocols.Pair, result: Result) -> dict[str, float]:
    """1 for the word in `OUTCOMES` of a pair that is easily wrong. A pose is right within 10 degrees, a
    homography with four in five inliers within 5 pixels, an ambiguous geometry with one right."""
    geometry, same, right = result.geometry, not isinstance(pair, protocols.UnrelatedPair), False
    if isinstance(pair, protocols.PosePair):
        known = [geometry.cam1_from_cam0] if geometry.status == "ok" else geometry.alternatives
        right = any(max(pose_error(pose, pair.cam1_from_cam0)) <= 10 for pose in known)
    elif same and result.inliers.any():
        ends = (points[result.inliers].astype(np.float64) for points in (result.points0, result.points1))
        right = np.mean(reprojection_errors(*ends, pair.H_1_from_0) <= 5) >= 0.8
    said = 0.0 if result.verdict is None else result.verdict.probability
    if geometry.status == "ambiguous" and same:
        word = "ambiguous" if right else "wrong"
    elif geometry.status not in ("ok", "degenerate") or said < 0.5:
        word = "refused"
    else:
        word = "right" if right else "wrong"
    found = {name: float(name == word) for name in OUTCOMES}
    found |= {"sure": float(word == "wrong" and said >= SAME), "same": float(said >= SAME)}
    return found | {"verdict": said, "brier": (said - same) ** 2, "truth": float(same)}
