"""Matched points → homography, fundamental or essential matrix, with a status: whether to use it.

The libraries behind it throw, return None, or return a confident model for too few, equal, collinear or
non-finite points; here every such case has its own status and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import cv2
import numpy as np
import poselib

from matcher.cameras import Camera, cameras_of_pair
from matcher.config import EstimationConfig, GeometryKind, GeometryStatus
from matcher.errors import UsageError
from matcher.types import Estimator, Features, Matches, TwoViewGeometry
from matcher.verify.adjustment import (
    CONFIDENCE,
    LOSS_SCALE,
    MAX_ITERATIONS,
    Hypothesis,
    MatchedPoints,
    Spread,
    TwoViewModel,
    adjusted_fundamental,
    adjusted_pose,
    degrees_apart,
    fundamental_from_pose,
    in_front,
    likeliest,
    made,
    mean_pose,
    refined,
    sampson,
    threshold_scale,
    trials,
    undistort,
)
from matcher.verify.homography import (
    ENOUGH,
    OWN,
    Parallax,
    chance_inlier,
    completed,
    dominant_plane,
    estimated_homography,
    fixed_by_parallax,
    log_false_alarms,
    on_a_line,
    only_rotates,
    parallax_evidence,
    poses_of_plane,
)
from matcher.verify.repetition import repetition
from matcher.verify.verdict import epipolar_likelihood, probabilities, reject_improbable

# Fundamental and essential matrices

SAMPLES = 5_000  # for a pose, at most; twice as many give no better ones, even where most matches are wrong
# Of the threshold for inliers, and the share of the matches, the most probable ones. The first may be enough.
_FUNDAMENTAL = ((2 / 3, 1.0), (1 / 3, 1.0), (5 / 3, 1.0), (2 / 3, 0.5))
_ESSENTIAL = ((2 / 3, 1.0), (1 / 3, 0.5), (2 / 3, 0.5), (5 / 3, 1.0), (5 / 3, 0.5))
_TWINS = 5.0  # degrees between poses of one plane that are two, and not one twice
_IN_FRONT = 0.8  # share of the plane's matches that one of them has in front, that another must have
_OFF_PLANE = 2.0  # thresholds for inliers that a match may lie from its place by the homography of a plane


def estimated_fundamental(matched: MatchedPoints, threshold: float, adjusted: bool) -> TwoViewModel | None:
    """The likeliest fundamental matrix, each hypothesis refined over its inliers; else that of MAGSAC++."""
    if not adjusted:
        matrix = _magsac(matched, threshold)
        return None if matrix is None else TwoViewModel(matrix, sampson(*matched.sides, matrix) <= threshold)
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


@dataclass(frozen=True, eq=False)
class PoseSearch:
    """Poses that matches allow two pinhole cameras, in resized pixels; inliers lie in front of both."""

    matched: MatchedPoints
    cameras: tuple[Camera, Camera]
    threshold: float

    @cached_property
    def spread(self) -> Spread:
        """Of the matches."""
        return Spread.of(self.matched.covariances, len(self.matched))

    def model(self, pose: np.ndarray) -> tuple[TwoViewModel, np.ndarray, np.ndarray]:
        """That of a pose; its fundamental matrix, and which matches (N,) are in front of both cameras."""
        K0, K1 = (camera.K for camera in self.cameras)
        fundamental = fundamental_from_pose(K0, K1, pose)
        possible = in_front(*self.matched.sides, (np.linalg.inv(K0), np.linalg.inv(K1)), pose)
        inliers = (sampson(*self.matched.sides, fundamental) <= self.threshold) & possible
        essential = fundamental_from_pose(np.eye(3), np.eye(3), pose)
        return TwoViewModel(essential, inliers, pose), fundamental, possible

    def adjusted(self, pose: np.ndarray, part: MatchedPoints, inliers: np.ndarray) -> np.ndarray:
        """A pose refined over its inliers, of all matches or a part of them."""
        return refined(partial(adjusted_pose, cameras=self.cameras), part, pose, inliers)

    def likeliest(self, seed: int, samples: int) -> TwoViewModel | None:
        """The mean of the likeliest poses, sampled or of a plane."""
        found = made(self._hypotheses(seed, samples))
        best = likeliest(found)
        if best is None or (mean := mean_pose(found, best)) is None:
            return None if best is None else best.model
        return self.model(mean)[0]

    def _hypotheses(self, seed: int, samples: int) -> Iterator[Hypothesis]:
        def judged(pose: np.ndarray, agreeing: float) -> Hypothesis:
            model, fundamental, possible = self.model(pose)
            likelihood = epipolar_likelihood(fundamental, self.matched, self.spread, possible)
            return Hypothesis(model, likelihood, agreeing)

        for number, (factor, part) in enumerate(trials(self.matched, _ESSENTIAL)):
            pose, found = self._sampled(part, factor, seed, samples, progressive=number > 0)
            if pose is not None:
                if part.covariances is not None:
                    pose = self.adjusted(pose, part, found)
                yield judged(pose, np.count_nonzero(found) / len(self.matched))
            if number == 0:
                for pose in poses_of_plane(self.matched, self.cameras, _OFF_PLANE * self.threshold):
                    yield judged(self.adjusted(pose, self.matched, self.model(pose)[0].inliers), 0.0)

    def _sampled(
        self, part: MatchedPoints, factor: float, seed: int, samples: int, *, progressive: bool
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """cam1_from_cam0 (4, 4) by PoseLib's LO-RANSAC, None if there is none, and its inliers of the part.

        `progressive`: samples begin with the most probable matches, which helps where few are right, but not
        where these lie close together, as nearest neighbours' often do.
        """
        order = part.best_first() if progressive else None
        options = {
            "max_epipolar_error": factor * self.threshold,
            "min_iterations": 100,  # enough where most matches are right; 1,000 take longer than all else
            "max_iterations": samples,
            "success_prob": CONFIDENCE,
            "seed": seed,
            "progressive_sampling": order is not None,
        }
        cameras = [
            {"model": "PINHOLE", "width": 0, "height": 0, "params": [c.fx, c.fy, c.cx, c.cy]}
            for c in self.cameras
        ]
        loss = {"loss_type": "CAUCHY", "loss_scale": LOSS_SCALE}
        order = np.arange(len(part)) if order is None else order
        sides = (points[order] for points in part.sides)
        pose, report = poselib.estimate_relative_pose(*sides, *cameras, options, loss)
        inliers, length = np.zeros(len(part), dtype=bool), np.linalg.norm(pose.t)
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


# Estimator

_MINIMUM = {"homography": 4, "fundamental": 7, "essential": 5}  # points that fix the model
_LIMIT = 1e8  # coordinates beyond it are as useless as infinite ones


@dataclass(frozen=True)
class RobustEstimator:
    """Two-view geometry: MAGSAC++ for homography and fundamental (OpenCV), LO-RANSAC for essential (PoseLib).

    Each is the likeliest of several hypotheses, refined over its inliers
    under a Cauchy loss: where covariances are known by `adjustment.py`, which weighs matches by these and by
    their probability, and so a fundamental matrix always; else by PoseLib, where all count the same.

    Residuals, in pixels of the resized image: homography, the distance in image 1; fundamental and
    essential, Sampson's distance (Hartley and Zisserman, 2nd edition, section 11.4.3).
    """

    config: EstimationConfig
    adjusted: bool = True  # False: fundamental matrices are a single hypothesis, as MAGSAC++ leaves it
    pose_samples: int = SAMPLES  # for each hypothesis of an essential matrix, at most
    takes_covariances = True  # see `matcher.types.Estimator`

    def __call__(
        self,
        points0: np.ndarray,
        points1: np.ndarray,
        *,
        cameras: tuple[Camera, Camera] | None = None,
        scores: np.ndarray | None = None,
        thresholds_scale: float = 1.0,
        covariances: np.ndarray | None = None,
    ) -> TwoViewGeometry:
        """Estimate the configured geometry; deterministic, whatever the order of the matches.

        Status `ok`; `low_inliers`: a model with fewer distinct inliers than `min_inliers`, or no more than
        chance gives. Without a model: `too_few` distinct points; `degenerate`: the points, or what supports
        the model, lie on one point or line of an image, or (essential) only a rotation shows; `no_model`;
        `not_estimated` (kind "none"). A plane or a pure rotation fixes F only up to a family: the inliers are
        valid, the matrix does not constrain other points.

        Args:
            points0, points1: (K, 2) stored pixels; non-finite rows are never inliers.
            cameras: of image 0 and 1, in stored pixels; used by essential only, on undistorted points.
            scores: (K,) match probabilities, all the same if left out.
            thresholds_scale: stored pixels per resized pixel; one factor for both images.
            covariances: (K, 2, 2) of points1, stored pixels², as `MatchRefinement` has them.

        Returns:
            matrix: H with H[2, 2] = 1 (−1 where the first pixel lies beyond the horizon, so that the inliers
            lie before it), F or E of Frobenius norm 1; E = [t]× R up to scale, cam1_from_cam0 with |t| = 1.

        Raises:
            UsageError: arrays that do not fit each other, a scale of 0, essential without usable cameras.
        """
        kind, scale = self.config.kind, thresholds_scale
        if kind == "none":
            return TwoViewGeometry(kind, "not_estimated", np.zeros(len(points0), dtype=bool))
        if kind != "essential":
            cameras = None
        elif cameras is None:
            raise UsageError(
                "the essential matrix needs the cameras of both images: cameras=(Camera, Camera)"
            )
        given = distinct_matches(points0, points1, scale, scores, covariances, cameras)
        if cameras is not None:  # pinhole ones of the resized images
            cameras = tuple(Camera(c.fx / scale, c.fy / scale, c.cx / scale, c.cy / scale) for c in cameras)
        status, model = self._estimate(given.matched, cameras)
        if model is None:
            return TwoViewGeometry(kind, status, np.zeros(len(given.usable), dtype=bool))
        homography = model.homography
        found = TwoViewGeometry(
            kind,
            status,
            given.of_all(model.inliers),
            _stored(kind, model.matrix, scale),
            model.cam1_from_cam0,
            homography=None if homography is None else _stored("homography", homography, scale),
            alternatives=model.alternatives,
            evidence=model.evidence,
        )
        return found.without_rejected() if found.verified else found

    def _estimate(
        self, matched: MatchedPoints, cameras: tuple[Camera, Camera] | None
    ) -> tuple[GeometryStatus, TwoViewModel | None]:
        """Status and model of distinct, finite points in resized pixels."""
        points0, points1 = matched.points0, matched.points1
        kind, minimum = self.config.kind, _MINIMUM[self.config.kind]
        homography = kind == "homography"
        threshold = self.config.max_reprojection_error if homography else self.config.max_epipolar_error
        if len(points0) <= minimum:
            return "too_few", None
        chance = chance_inlier(points0, points1, threshold, homography)
        every = np.ones(len(points0), dtype=bool)
        if any(on_a_line(side, every, threshold, minimum, chance) for side in (points0, points1)):
            return "degenerate", None
        if kind == "essential":
            search = PoseSearch(matched, cameras, threshold)
            model = search.likeliest(self.config.seed, self.pose_samples)
        elif homography:
            model = estimated_homography(matched, threshold)
        else:
            model = estimated_fundamental(matched, threshold, self.adjusted)
        if model is None or not model.inliers.any():
            return "no_model", None
        count = int(np.count_nonzero(model.inliers))
        convincing = log_false_alarms(len(points0), count, minimum, chance) < 0
        if count < self.config.min_inliers or not convincing:
            return "low_inliers", model
        if any(on_a_line(side, model.inliers, threshold, minimum, chance) for side in (points0, points1)):
            return "degenerate", None
        if homography:
            return "ok", model
        return self._off_plane(matched, cameras, model, threshold)

    def _off_plane(
        self,
        matched: MatchedPoints,
        cameras: tuple[Camera, Camera] | None,
        model: TwoViewModel,
        threshold: float,
    ) -> tuple[GeometryStatus, TwoViewModel | None]:
        """Status and model where the inliers may all lie on one plane, or the views only rotate."""
        reach = self.config.max_reprojection_error
        homography = dominant_plane(matched, model.inliers, reach)
        rotates = cameras is not None and only_rotates(
            *matched.sides, cameras, model.inliers, model.cam1_from_cam0
        )
        if homography is None:
            return ("degenerate", None) if rotates else ("ok", model)
        residuals = sampson(*matched.sides, model.fundamental(cameras))[model.inliers]
        spread = Spread.of(matched.covariances, len(matched))
        parallax = Parallax.of(homography, matched, spread, residuals)
        planar = replace(model, homography=homography)
        on_plane = replace(planar, inliers=parallax.distance <= reach)
        if rotates:
            return "degenerate", replace(on_plane, cam1_from_cam0=None)
        if cameras is not None:
            return self._of_twins(PoseSearch(matched, cameras, threshold), planar, parallax)
        if fixed_by_parallax(model.matrix, matched, parallax):
            return "ok", planar
        matrix = completed(homography, matched, parallax)
        if matrix is None or not fixed_by_parallax(matrix, matched, parallax):
            return "degenerate", on_plane
        inliers = sampson(*matched.sides, matrix) <= threshold
        matrix = refined(adjusted_fundamental, matched, matrix, inliers)
        inliers = sampson(*matched.sides, matrix) <= threshold
        return "ok", replace(planar, matrix=matrix, inliers=inliers)

    def _of_twins(
        self, search: PoseSearch, planar: TwoViewModel, parallax: Parallax
    ) -> tuple[GeometryStatus, TwoViewModel]:
        """The one of the poses of a plane that matches off it tell from the others, if they do."""
        matched, reach = search.matched, self.config.max_reprojection_error
        poses = [planar.cam1_from_cam0]
        for pose in poses_of_plane(matched, search.cameras, reach, planar.homography):
            pose = search.adjusted(pose, matched, search.model(pose)[0].inliers)
            if all(degrees_apart(pose, one) > _TWINS for one in poses):
                poses.append(pose)
        on_plane, judged = parallax.distance <= reach, []
        for pose in poses:
            model, fundamental, possible = search.model(pose)
            gain = parallax_evidence(fundamental, matched, search.spread, parallax, planar.inliers, possible)
            gain += OWN * (pose is poses[0])
            judged.append((gain, np.count_nonzero(possible & on_plane), model))
        most = max(count for _, count, _ in judged)
        judged = [one for one in judged if one[1] >= _IN_FRONT * most]
        judged.sort(key=lambda one: -one[0])
        best = replace(judged[0][2], homography=planar.homography)
        if len(judged) == 1:
            return "ok", best
        ratio = judged[0][0] - judged[1][0]
        alternatives = tuple(model.cam1_from_cam0 for *_, model in judged)
        best = replace(best, alternatives=alternatives, evidence=float(ratio))
        return ("ok", best) if ratio >= ENOUGH else ("ambiguous", replace(best, inliers=on_plane))


class Distinct(NamedTuple):
    """The distinct, finite ones of K matches."""

    matched: MatchedPoints  # in resized pixels
    usable: np.ndarray  # (K,) bool: the finite ones
    place: np.ndarray  # which of the distinct ones each finite one is

    def of_all(self, inliers: np.ndarray) -> np.ndarray:
        """(K,) bool from the inliers among the distinct ones."""
        found = np.zeros(len(self.usable), dtype=bool)
        found[self.usable] = inliers[self.place]
        return found


def distinct_matches(
    points0: np.ndarray,
    points1: np.ndarray,
    scale: float,
    scores: np.ndarray | None,
    covariances: np.ndarray | None,
    cameras: tuple[Camera, Camera] | None = None,
) -> Distinct:
    """What an estimator takes of its arguments (`RobustEstimator`), with points undistorted by cameras.

    Raises:
        UsageError: arrays that do not fit each other, or a scale that is not positive and finite.
    """
    sides = [np.asarray(points) for points in (points0, points1)]
    if sides[0].shape != sides[1].shape or sides[0].ndim != 2 or sides[0].shape[1] != 2:
        shapes = " and ".join(str(side.shape) for side in sides)
        raise UsageError(f"points0 and points1 must both be (K, 2), not {shapes}")
    if any(side.dtype.kind not in "fiu" for side in sides):
        raise UsageError(f"points must be real numbers, not {sides[0].dtype} and {sides[1].dtype}")
    if not 0 < scale < _LIMIT:
        raise UsageError(f"thresholds_scale must be positive and finite, not {scale}")
    count = len(sides[0])
    for name, values, shape in (("scores", scores, (count,)), ("covariances", covariances, (count, 2, 2))):
        if values is not None and np.shape(values) != shape:
            raise UsageError(f"{name} of {count} matches must be {shape}, not {np.shape(values)}")
    if cameras is not None:
        sides = [undistort(side, camera) for side, camera in zip(sides, cameras, strict=True)]
    pairs = np.concatenate(sides, axis=1).astype(np.float64)
    usable = np.all(np.abs(pairs) < _LIMIT, axis=1)
    # Resized pixels: OpenCV's fundamental loses half its accuracy on coordinates four times as large.
    distinct, index, place = np.unique(pairs[usable] / scale, axis=0, return_index=True, return_inverse=True)
    if covariances is not None:
        covariances = np.asarray(covariances, dtype=np.float64)[np.flatnonzero(usable)[index]] / scale**2
    probable, place = np.zeros(len(distinct)), place.reshape(-1)
    np.maximum.at(probable, place, probabilities(scores, count)[usable])
    return Distinct(MatchedPoints(distinct[:, :2], distinct[:, 2:], probable, covariances), usable, place)


def _stored(kind: str, matrix: np.ndarray, scale: float) -> np.ndarray:
    """A model of resized pixels as one of stored pixels, normalised."""
    shrink = np.diag([1 / scale, 1 / scale, 1.0])
    if kind == "homography":
        matrix = np.linalg.inv(shrink) @ matrix @ shrink
        corner, norm = abs(matrix[2, 2]), np.linalg.norm(matrix)
        return matrix / (corner if corner > 1e-9 * norm else norm)
    if kind == "fundamental":
        matrix = shrink @ matrix @ shrink
    return matrix / np.linalg.norm(matrix)


# Geometry of matched features

# Where what does not repeat is found less often than this share of what does, the things may be others of
# their kind, and the verdict must not be against it.
ANOTHER, REPETITIVE = 0.6, 0.5


def verify_matches(
    estimator: Estimator,
    kind: GeometryKind,
    features0: Features,
    features1: Features,
    matches: Matches,
    camera0: Camera | None = None,
    camera1: Camera | None = None,
) -> TwoViewGeometry:
    """What `Pipeline.verify` does, by an estimator of a kind of geometry.

    Raises:
        UsageError: cameras without essential geometry, or it without them, or of another image size.
    """
    cameras = cameras_of_pair(kind, camera0, camera1, (features0.image_size, features1.image_size))
    known = matches.covariances
    takes_it = known is not None and getattr(estimator, "takes_covariances", False)
    geometry = estimator(
        matches.points0,
        matches.points1,
        cameras=cameras,
        scores=matches.prior_scores,
        thresholds_scale=threshold_scale(features0.scale.tolist(), features1.scale.tolist(), kind),
        **({"covariances": known} if takes_it else {}),
    )
    return with_repetition(geometry, features0, features1, matches)


def with_repetition(
    geometry: TwoViewGeometry, features0: Features, features1: Features, matches: Matches
) -> TwoViewGeometry:
    """The geometry with what its inliers repeat; refused where that says that the place is another one."""
    if not geometry.verified or not geometry.inliers.any():
        return geometry
    found = repetition(features0, features1, matches, geometry.inliers)
    rejected = geometry.rejected and replace(geometry.rejected, repetition=found)
    geometry = replace(geometry, repetition=found, rejected=rejected)
    if found is None or not found.repetitive or found.found >= ANOTHER:
        return geometry
    return reject_improbable(geometry, matches, features0.image_size, features1.image_size, REPETITIVE)
