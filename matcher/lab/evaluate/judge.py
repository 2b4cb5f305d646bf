"""One pair, one row: what the truth says of the matches, as numbers under the names that the tables use."""

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
    pose_error,
    possible_matches,
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

THRESHOLDS = (1, 3)  # pixels of the pictures as matched
ORACLE_THRESHOLD = 3
LOOSE = 10  # pixels; where poses or labels are coarse
_MAX_LABELS = 2000  # a disparity map has a label a pixel; evenly chosen ones say as much


@dataclass(frozen=True, eq=False)
class Observation:
    """What a front end made of one picture."""

    features: Features
    image: Image  # without its pixels

    @property
    def scale(self) -> float:
        """Resized / stored size, the geometric mean of both axes."""
        return float(np.sqrt(self.image.scale[0] * self.image.scale[1]))

    @property
    def keypoints(self) -> np.ndarray:
        """(N, 2) float64 stored pixels."""
        return self.features.keypoints.numpy().astype(np.float64)


@dataclass(frozen=True, eq=False)
class Truth:
    """What the keypoints of a pair allow."""

    possible: Mapping[int, np.ndarray]  # (P, 2) keypoints that belong together, by threshold in pixels
    repeatability: float = math.nan  # at the largest of the thresholds; of homographies


def true_matches(pair: Pair, side0: Observation, side1: Observation) -> Truth | None:
    """Which keypoints belong together; None where the pair's truth cannot tell."""
    points0, points1 = side0.keypoints, side1.keypoints
    again = math.nan
    if isinstance(pair, HomographyPair):
        errors = reprojection_matrix(points0, points1, pair.H_1_from_0, side0.scale, side1.scale)
        seen0 = inside(warp_points(points0, pair.H_1_from_0), side1.image.size)
        seen1 = inside(warp_points(points1, np.linalg.inv(pair.H_1_from_0)), side0.image.size)
        again = repeatability(errors, seen0, seen1, max(THRESHOLDS))
    elif isinstance(pair, CorrespondencePair):
        if not pair.dense:
            return None
        errors = distances(partners(pair, points0), points1) * side1.scale
    elif isinstance(pair, DepthPair):
        moved0, _ = reproject(points0, pair.view0, pair.view1)
        errors = distances(moved0, points1) * side1.scale
    else:
        return None
    widest = possible_matches(errors, max(THRESHOLDS))  # a smaller threshold keeps the nearer ones of these
    near = errors[widest[:, 0], widest[:, 1]]
    return Truth({threshold: widest[near < threshold] for threshold in THRESHOLDS}, again)


def oracle(truth: Truth, side0: Observation, side1: Observation) -> Matches:
    """The true assignment of the same keypoints: the most that any matcher can reach."""
    indices = truth.possible[ORACLE_THRESHOLD]
    return Matches(
        indices=indices,
        points0=side0.features.keypoints.numpy()[indices[:, 0]],
        points1=side1.features.keypoints.numpy()[indices[:, 1]],
        scores=np.ones(len(indices), dtype=np.float32),
        kept0=len(side0.features),
        kept1=len(side1.features),
    )


def judge(
    pair: Pair,
    side0: Observation,
    side1: Observation,
    matches: Matches,
    truth: Truth | None,
    estimators: Sequence[RobustEstimator],
) -> dict[str, float | np.ndarray]:
    """Measures of one pair.

    Args:
        pair: with its truth.
        side0, side1: the features that were matched.
        matches: of them.
        truth: from `true_matches`.
        estimators: of the protocol's geometry, one a seed; measures of the geometry are (S,).

    Raises:
        UsageError: intrinsics that belong to pictures of another size.
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
    if isinstance(pair, HomographyPair):
        return found | _homography(pair, side0, side1, matches, truth, geometries)
    if isinstance(pair, DepthPair):
        by_pose = _pose(pair, side0, side1, matches, geometries)
        by_pose = {key: value for key, value in by_pose.items() if not key.startswith("precision")}
        return found | by_pose | _depth(pair, side0, side1, matches, truth)
    if isinstance(pair, PosePair):
        return found | _pose(pair, side0, side1, matches, geometries)
    if isinstance(pair, CorrespondencePair):
        return found | _correspondences(pair, side0, side1, matches, truth, geometries)
    return found | {"accepted": np.array([float(g.status == "ok") for g in geometries])}


def partners(pair: CorrespondencePair, points: np.ndarray) -> np.ndarray:
    """(N, 2) where points of image 0 lie in image 1, by the label of the same pixel; NaN without a label."""
    width, height = (int(pair.points0[:, axis].max(initial=0)) + 2 for axis in (0, 1))
    label = np.full((height, width), -1, dtype=np.int64)
    cells = np.rint(pair.points0).astype(np.int64)
    label[cells[:, 1], cells[:, 0]] = np.arange(len(cells))
    at = np.rint(points).astype(np.int64)
    known = (at >= 0).all(axis=1) & (at[:, 0] < width) & (at[:, 1] < height)
    index = np.where(known, label[at[:, 1] * known, at[:, 0] * known], -1)
    moved = points + pair.points1[index] - pair.points0[index]
    return np.where((index >= 0)[:, None], moved, np.nan)


def _estimate(
    estimator: RobustEstimator,
    side0: Observation,
    side1: Observation,
    matches: Matches,
    cameras: tuple[Camera, Camera] | None,
) -> TwoViewGeometry:
    scale = threshold_scale(side0.image.scale, side1.image.scale, estimator.config.kind)
    return estimator(matches.points0, matches.points1, cameras=cameras, thresholds_scale=scale)


def _homography(
    pair: HomographyPair,
    side0: Observation,
    side1: Observation,
    matches: Matches,
    truth: Truth,
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
    right = errors[errors < max(THRESHOLDS)]
    found = {
        "error": np.array(corners),
        "repeatability": truth.repeatability,
        "right": float(len(right)),
        "residual": float(right.mean()) if len(right) else float("nan"),
    }
    return found | _precision_and_recall(matches, errors, errors, truth)


def _correspondences(
    pair: CorrespondencePair,
    side0: Observation,
    side1: Observation,
    matches: Matches,
    truth: Truth,
    geometries: Sequence[TwoViewGeometry],
) -> dict[str, float | np.ndarray]:
    """Matches of pixels without a label are not judged, and with sparse labels none is."""
    step = max(1, len(pair.points0) // _MAX_LABELS)
    labels0, labels1 = (p[::step].astype(np.float64) for p in (pair.points0, pair.points1))
    agreeing = np.zeros((len(geometries), LOOSE))
    for row, geometry in zip(agreeing, geometries, strict=True):
        if geometry.matrix is not None:
            distance = epipolar_distance(labels0, labels1, geometry.matrix) * side1.scale
            row[:] = (distance[:, None] < np.arange(1, LOOSE + 1)).mean(axis=0)
    found = {"labels3": agreeing[:, ORACLE_THRESHOLD - 1], f"labels{LOOSE}": agreeing.mean(axis=1)}
    if truth is None:
        return found | {f"{name}{t}": math.nan for name in ("precision", "recall") for t in THRESHOLDS}
    expected = partners(pair, matches.points0.astype(np.float64))
    errors = np.linalg.norm(expected - matches.points1, axis=1) * side1.scale
    judged = errors[np.isfinite(errors)]
    known = np.nan_to_num(errors, nan=np.inf)
    return found | _precision_and_recall(matches, judged, known, truth)


def _depth(
    pair: DepthPair, side0: Observation, side1: Observation, matches: Matches, truth: Truth
) -> dict[str, float]:
    """Matches are judged by the depth of picture 0; those of unknown depth, and at edges, are not."""
    expected, _ = reproject(matches.points0.astype(np.float64), pair.view0, pair.view1)
    errors = np.linalg.norm(expected - matches.points1, axis=1) * side1.scale
    judged = errors[~np.isnan(errors)]
    loose = {
        f"precision{LOOSE}": precision(judged, LOOSE),
        "right": float((judged < max(THRESHOLDS)).sum()),
        f"right{LOOSE}": float((judged < LOOSE).sum()),
    }
    return loose | _precision_and_recall(matches, judged, np.nan_to_num(errors, nan=np.inf), truth)


def _precision_and_recall(
    matches: Matches, judged: np.ndarray, errors: np.ndarray, truth: Truth
) -> dict[str, float]:
    found = {}
    for threshold in THRESHOLDS:
        found[f"precision{threshold}"] = precision(judged, threshold)
        found[f"recall{threshold}"] = recall(matches.indices, errors, truth.possible[threshold], threshold)
    return found


def _pose(
    pair: PosePair,
    side0: Observation,
    side1: Observation,
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


def _cameras(pair: PosePair, side0: Observation, side1: Observation) -> tuple[Camera, Camera]:
    cameras = []
    for K, side in ((pair.K0, side0), (pair.K1, side1)):
        width, height = side.image.size
        if not (0 < K[0, 2] < width and 0 < K[1, 2] < height):
            raise UsageError(
                f"{side.image.path}: the principal point ({K[0, 2]:g}, {K[1, 2]:g}) lies outside {width} x "
                f"{height} pixels; the intrinsics belong to pictures of another size"
            )
        cameras.append(Camera.from_K(K, size=(width, height)))
    return cameras[0], cameras[1]
