"""The metrics of one method on one pair, by the names that the columns of the tables use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.geometry import inside, warp_points
from matcher.data.image import Image
from matcher.data.matches import Matches, TwoViewGeometry
from matcher.errors import UsageError
from matcher.lab.evaluate.metrics import (
    corner_error,
    distances,
    ground_truth_matches,
    pose_error,
    precision,
    recall,
    repeatability,
    reprojection_errors,
    reprojection_matrix,
)
from matcher.lab.pairs.depth import reproject
from matcher.lab.pairs.protocols import CorrespondencePair, DepthPair, HomographyPair, Pair, PosePair
from matcher.verify.distances import epipolar_distance, fundamental_from_pose
from matcher.verify.estimation import RobustEstimator
from matcher.verify.thresholds import threshold_scale
from matcher.verify.verdict import reject_improbable

THRESHOLDS = (1, 3)  # pixels of the resized images
ORACLE_THRESHOLD = 3
COARSE = 10  # pixels; for ground truth that is accurate to several pixels only
_MAX_LABELS = 2000  # a disparity map labels every pixel; an even sample is enough


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """The features that a front end extracted from one image."""

    features: Features
    image: Image  # its pixels are dropped

    @property
    def scale(self) -> float:
        """Resized / stored size, the geometric mean of both axes."""
        return float(np.sqrt(self.image.scale[0] * self.image.scale[1]))

    @property
    def keypoints(self) -> np.ndarray:
        """(N, 2) float64 stored pixels."""
        return np.asarray(self.features.keypoints).astype(np.float64)


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The ground-truth matches between the extracted keypoints of a pair."""

    matches: Mapping[int, np.ndarray]  # (P, 2) corresponding keypoints, by threshold in pixels
    repeatability: float = math.nan  # at the largest threshold; homographies only


def find_ground_truth(pair: Pair, side0: ImageFeatures, side1: ImageFeatures) -> GroundTruth | None:
    """The ground-truth matches of the keypoints; None if the pair has only a pose or sparse labels."""
    points0, points1 = side0.keypoints, side1.keypoints
    repeatable = math.nan
    if isinstance(pair, HomographyPair):
        errors = reprojection_matrix(points0, points1, pair.H_1_from_0, side0.scale, side1.scale)
        covisible0 = inside(warp_points(points0, pair.H_1_from_0), side1.image.size)
        covisible1 = inside(warp_points(points1, np.linalg.inv(pair.H_1_from_0)), side0.image.size)
        repeatable = repeatability(errors, covisible0, covisible1, max(THRESHOLDS))
    elif isinstance(pair, CorrespondencePair):
        if not pair.dense:
            return None
        errors = distances(corresponding_points(pair, points0), points1) * side1.scale
    elif isinstance(pair, DepthPair):
        reprojected0, _ = reproject(points0, pair.view0, pair.view1)
        errors = distances(reprojected0, points1) * side1.scale
    else:
        return None
    widest = ground_truth_matches(errors, max(THRESHOLDS))  # smaller thresholds select from these
    error = errors[widest[:, 0], widest[:, 1]]
    return GroundTruth({threshold: widest[error < threshold] for threshold in THRESHOLDS}, repeatable)


def oracle(ground_truth: GroundTruth, side0: ImageFeatures, side1: ImageFeatures) -> Matches:
    """All ground-truth matches of the same keypoints: an upper bound for every matcher."""
    indices = ground_truth.matches[ORACLE_THRESHOLD]
    return Matches(
        indices=indices,
        points0=np.asarray(side0.features.keypoints)[indices[:, 0]],
        points1=np.asarray(side1.features.keypoints)[indices[:, 1]],
        scores=np.ones(len(indices), dtype=np.float32),
        kept0=len(side0.features),
        kept1=len(side1.features),
    )


def measure_pair(
    pair: Pair,
    side0: ImageFeatures,
    side1: ImageFeatures,
    matches: Matches,
    ground_truth: GroundTruth | None,
    estimators: Sequence[RobustEstimator],
    *,
    several_passes: bool = False,
) -> dict[str, float | np.ndarray]:
    """Compute the metrics of the pair's protocol.

    Args:
        pair: with its ground truth.
        side0, side1: the features that were matched.
        matches: predicted between these features.
        ground_truth: from `find_ground_truth`.
        estimators: S robust estimators of the protocol's geometry, one per seed.
        several_passes: the matches are of several passes, whose geometry must be probable to be accepted.

    Returns:
        Metric name to value; metrics of the estimated geometry are (S,) arrays. Errors in pixels of the
        resized images or in degrees, NaN where the ground truth cannot decide.

    Raises:
        UsageError: the intrinsics belong to images of another size.
    """
    total = len(side0.features) + len(side1.features)
    found: dict[str, float | np.ndarray] = {
        "matches": float(len(matches)),
        "layers": float(matches.layers_run),
        "kept": (matches.kept0 + matches.kept1) / total if total else 1.0,
        "keypoints": total / 2,
    }
    cameras = _cameras(pair, side0, side1) if isinstance(pair, PosePair) else None
    geometries = [_estimate(estimator, side0, side1, matches, cameras) for estimator in estimators]
    found["accepted"] = _accepted(geometries, matches, side0, side1, several_passes=several_passes)
    if isinstance(pair, HomographyPair):
        return found | _homography(pair, side0, side1, matches, ground_truth, geometries)
    if isinstance(pair, DepthPair):
        by_pose = _pose(pair, side0, side1, matches, geometries)
        by_pose = {key: value for key, value in by_pose.items() if not key.startswith("precision")}
        return found | by_pose | _depth(pair, side0, side1, matches, ground_truth)
    if isinstance(pair, PosePair):
        return found | _pose(pair, side0, side1, matches, geometries)
    if isinstance(pair, CorrespondencePair):
        return found | _correspondences(pair, side0, side1, matches, ground_truth, geometries)
    return found


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


def _estimate(
    estimator: RobustEstimator,
    side0: ImageFeatures,
    side1: ImageFeatures,
    matches: Matches,
    cameras: tuple[Camera, Camera] | None,
) -> TwoViewGeometry:
    scale = threshold_scale(side0.image.scale, side1.image.scale, estimator.config.kind)
    return estimator(
        matches.points0,
        matches.points1,
        cameras=cameras,
        scores=matches.prior_scores,
        thresholds_scale=scale,
        covariances=matches.covariances,
    )


def _homography(
    pair: HomographyPair,
    side0: ImageFeatures,
    side1: ImageFeatures,
    matches: Matches,
    ground_truth: GroundTruth,
    geometries: Sequence[TwoViewGeometry],
) -> dict[str, float | np.ndarray]:
    errors = reprojection_errors(
        matches.points0.astype(np.float64),
        matches.points1.astype(np.float64),
        pair.H_1_from_0,
        side0.scale,
        side1.scale,
    )
    corners = [corner_error(g.matrix, pair.H_1_from_0, side0.image.size, side1.scale) for g in geometries]
    correct = errors[errors < max(THRESHOLDS)]
    found = {
        "error": np.array(corners),
        "repeatability": ground_truth.repeatability,
        "correct": float(len(correct)),
        "residual": float(correct.mean()) if len(correct) else float("nan"),
    }
    return found | _precision_and_recall(matches, errors, errors, ground_truth)


def _correspondences(
    pair: CorrespondencePair,
    side0: ImageFeatures,
    side1: ImageFeatures,
    matches: Matches,
    ground_truth: GroundTruth,
    geometries: Sequence[TwoViewGeometry],
) -> dict[str, float | np.ndarray]:
    """Matches of unlabelled pixels are not counted; with sparse labels no match is."""
    step = max(1, len(pair.points0) // _MAX_LABELS)
    labels0, labels1 = (p[::step].astype(np.float64) for p in (pair.points0, pair.points1))
    near_line = np.zeros((len(geometries), COARSE))
    for row, geometry in zip(near_line, geometries, strict=True):
        if geometry.matrix is not None:
            distance = epipolar_distance(labels0, labels1, geometry.matrix) * side1.scale
            row[:] = (distance[:, None] < np.arange(1, COARSE + 1)).mean(axis=0)
    found = {"labels3": near_line[:, ORACLE_THRESHOLD - 1], f"labels{COARSE}": near_line.mean(axis=1)}
    if ground_truth is None:
        return found | {f"{name}{t}": math.nan for name in ("precision", "recall") for t in THRESHOLDS}
    expected = corresponding_points(pair, matches.points0.astype(np.float64))
    errors = np.linalg.norm(expected - matches.points1, axis=1) * side1.scale
    counted = errors[np.isfinite(errors)]
    known = np.nan_to_num(errors, nan=np.inf)
    return found | _precision_and_recall(matches, counted, known, ground_truth)


def _depth(
    pair: DepthPair, side0: ImageFeatures, side1: ImageFeatures, matches: Matches, ground_truth: GroundTruth
) -> dict[str, float]:
    """By the depth of image 0; matches where it is unknown or has an edge are not counted."""
    expected, _ = reproject(matches.points0.astype(np.float64), pair.view0, pair.view1)
    errors = np.linalg.norm(expected - matches.points1, axis=1) * side1.scale
    counted = errors[~np.isnan(errors)]
    loose = {
        f"precision{COARSE}": precision(counted, COARSE),
        "correct": float((counted < max(THRESHOLDS)).sum()),
        f"correct{COARSE}": float((counted < COARSE).sum()),
    }
    return loose | _precision_and_recall(matches, counted, np.nan_to_num(errors, nan=np.inf), ground_truth)


def _accepted(
    geometries: Sequence[TwoViewGeometry],
    matches: Matches,
    side0: ImageFeatures,
    side1: ImageFeatures,
    *,
    several_passes: bool,
) -> np.ndarray:
    """(S,) 1 where a result with this geometry has status ok, else 0."""
    if several_passes:
        sizes = side0.features.image_size, side1.features.image_size
        geometries = [reject_improbable(geometry, matches, *sizes) for geometry in geometries]
    return np.array([float(geometry.status == "ok") for geometry in geometries])


def _precision_and_recall(
    matches: Matches, counted: np.ndarray, errors: np.ndarray, ground_truth: GroundTruth
) -> dict[str, float]:
    found = {}
    for threshold in THRESHOLDS:
        found[f"precision{threshold}"] = precision(counted, threshold)
        found[f"recall{threshold}"] = recall(
            matches.indices, errors, ground_truth.matches[threshold], threshold
        )
    return found


def _pose(
    pair: PosePair,
    side0: ImageFeatures,
    side1: ImageFeatures,
    matches: Matches,
    geometries: Sequence[TwoViewGeometry],
) -> dict[str, float | np.ndarray]:
    angles = np.array([pose_error(g.cam1_from_cam0, pair.cam1_from_cam0) for g in geometries])
    F = fundamental_from_pose(pair.K0, pair.K1, pair.cam1_from_cam0)
    shrink = threshold_scale(side0.image.scale, side1.image.scale, "essential")
    points0, points1 = (p.astype(np.float64) for p in (matches.points0, matches.points1))
    errors = epipolar_distance(points0, points1, F) / shrink
    found = {f"precision{threshold}": precision(errors, threshold) for threshold in THRESHOLDS}
    return {"error": angles.max(axis=1), "rotation": angles[:, 0], "translation": angles[:, 1], **found}


def _cameras(pair: PosePair, side0: ImageFeatures, side1: ImageFeatures) -> tuple[Camera, Camera]:
    cameras = []
    for K, side in ((pair.K0, side0), (pair.K1, side1)):
        width, height = side.image.size
        if not (0 < K[0, 2] < width and 0 < K[1, 2] < height):
            raise UsageError(
                f"{side.image.path}: the principal point ({K[0, 2]:g}, {K[1, 2]:g}) lies outside the image "
                f"of {width} x {height} pixels; the intrinsics belong to images of another size"
            )
        cameras.append(Camera.from_K(K, size=(width, height)))
    return cameras[0], cameras[1]
