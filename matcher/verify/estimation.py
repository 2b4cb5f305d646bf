"""Matched points → homography, fundamental or essential matrix, with a status: whether to use it.

The libraries behind it throw, return None, or return a confident model for too few, equal, collinear or
non-finite points; here every such case has its own status and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import cv2
import numpy as np
import poselib

from matcher.cameras import Camera
from matcher.config import EstimationConfig, PlanarModel
from matcher.errors import UsageError
from matcher.types import TwoViewGeometry
from matcher.verify.adjustment import (
    LOSS_SCALE,
    RANSAC_CONFIDENCE,
    Hypothesis,
    MatchedPoints,
    adjusted_fundamental,
    adjusted_pose,
    degrees_apart,
    fundamental_from_pose,
    in_front,
    likeliest,
    mean_pose,
    refined,
    sampson,
    undistort,
    until_most_agree,
)
from matcher.verify.homography import (
    ENOUGH,
    OWN,
    Parallax,
    completed,
    dominant_plane,
    estimated_homography,
    estimated_planar,
    magsac,
    on_a_line,
    only_rotates,
    parallax_evidence,
    parallax_false_alarms,
    poses_of_plane,
    transfer_error,
)
from matcher.verify.likelihood import chance_inlier, epipolar_likelihood, log_false_alarms, probabilities

# Fundamental and essential matrices

SAMPLES = 5_000  # for a pose, at most; twice as many give no better ones, even where most matches are wrong
# Hypotheses, the first of which may do: factor of the threshold, and share of the matches, the most probable.
_FUNDAMENTAL = ((2 / 3, 1.0), (1 / 3, 1.0), (5 / 3, 1.0), (2 / 3, 0.5))
_ESSENTIAL = ((2 / 3, 1.0), (1 / 3, 0.5), (2 / 3, 0.5), (5 / 3, 1.0), (5 / 3, 0.5))
_AT_REST = 0.25  # of the threshold, by which most matches move at most where nothing moves
_TWINS = 5.0  # degrees between poses of one plane that are two, and not one twice
_IN_FRONT = 0.8  # share of the plane's matches that one of them has in front, that another must have
_OFF_PLANE = 2.0  # thresholds for inliers that a match may lie from its place by the homography of a plane


def estimated_fundamental(matched: MatchedPoints, threshold: float, adjusted: bool) -> TwoViewGeometry | None:
    """The likeliest fundamental matrix, each hypothesis refined over its inliers; else that of MAGSAC++."""
    find = partial(magsac, cv2.findFundamentalMat)

    def of(matrix: np.ndarray) -> TwoViewGeometry:
        return TwoViewGeometry("fundamental", "ok", sampson(*matched.sides, matrix) <= threshold, matrix)

    moved = matched.points1 - matched.points0
    if np.median(np.hypot(*moved.T)) < _AT_REST * threshold:
        # Any epipole will do for a camera that stands still; MAGSAC++ may look for one for minutes.
        return of(np.array([[0.0, 0, 0], [0, 0, -1], [0, 1, 0]]))
    if not adjusted:
        matrix = find(matched, threshold)
        return None if matrix is None else of(matrix)

    def hypotheses() -> Iterator[Hypothesis]:
        for factor, part in matched.trials(_FUNDAMENTAL):
            if (matrix := find(part, factor * threshold)) is None:
                continue
            agree = sampson(*part.sides, matrix) <= factor * threshold
            matrix = refined(adjusted_fundamental, part, matrix, agree)
            agreeing = np.count_nonzero(agree) / len(matched)
            yield Hypothesis(of(matrix), epipolar_likelihood(matrix, matched), agreeing)

    best = likeliest(until_most_agree(hypotheses()))
    return None if best is None else best.model


@dataclass(frozen=True, eq=False)
class PoseSearch:
    """Poses that matches allow two pinhole cameras, in resized pixels; inliers lie in front of both."""

    matched: MatchedPoints
    cameras: tuple[Camera, Camera]
    threshold: float

    def model(self, pose: np.ndarray) -> tuple[TwoViewGeometry, np.ndarray, np.ndarray]:
        """The geometry of a pose; its fundamental matrix, and which matches (N,) lie before both cameras."""
        K0, K1 = (camera.K for camera in self.cameras)
        fundamental = fundamental_from_pose(K0, K1, pose)
        possible = in_front(*self.matched.sides, (np.linalg.inv(K0), np.linalg.inv(K1)), pose)
        inliers = (sampson(*self.matched.sides, fundamental) <= self.threshold) & possible
        essential = fundamental_from_pose(np.eye(3), np.eye(3), pose)
        return TwoViewGeometry("essential", "ok", inliers, essential, pose), fundamental, possible

    def adjusted(self, pose: np.ndarray, part: MatchedPoints, inliers: np.ndarray) -> np.ndarray:
        """A pose refined over its inliers, of all matches or a part of them."""
        return refined(partial(adjusted_pose, cameras=self.cameras), part, pose, inliers)

    def likeliest(self, seed: int, samples: int) -> TwoViewGeometry | None:
        """The mean of the likeliest poses, sampled or of a plane."""
        found = until_most_agree(self._hypotheses(seed, samples))
        best = likeliest(found)
        if best is None or (mean := mean_pose(found, best)) is None:
            return None if best is None else best.model
        return self.model(mean)[0]

    def _hypotheses(self, seed: int, samples: int) -> Iterator[Hypothesis]:
        def judged(pose: np.ndarray, agreeing: float) -> Hypothesis:
            model, fundamental, possible = self.model(pose)
            likelihood = epipolar_likelihood(fundamental, self.matched, possible)
            return Hypothesis(model, likelihood, agreeing)

        for number, (factor, part) in enumerate(self.matched.trials(_ESSENTIAL)):
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
            "success_prob": RANSAC_CONFIDENCE,
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


# Estimator

# Points that fix a model, and how many matches along a line leave it to fit by chance; a similarity none.
_MINIMA = {
    "homography": (4, 1),
    "affine": (3, 1),
    "similarity": (2, 0),
    "fundamental": (7, 4),
    "essential": (5, 2),
}
_LIMIT = 1e8  # coordinates beyond it are as useless as infinite ones
MAX_PLANES = 16


@dataclass(frozen=True)
class RobustEstimator:
    """Two-view geometry: MAGSAC++ for homography and fundamental (OpenCV), LO-RANSAC for essential (PoseLib).

    Each is the likeliest of several hypotheses, refined over its inliers under a Cauchy loss: where
    covariances are known by `adjustment.py`, which weighs matches by these and by their probability, and so a
    fundamental matrix always; else by PoseLib, where all count the same.

    Residuals, in pixels of the resized image: homography, the distance in image 1; fundamental and
    essential, Sampson's distance (Hartley and Zisserman, 2nd edition, section 11.4.3).
    """

    config: EstimationConfig
    adjusted: bool = True  # False: fundamental matrices are a single hypothesis, as MAGSAC++ leaves it
    pose_samples: int = SAMPLES  # for each hypothesis of an essential matrix, at most
    planar: PlanarModel = "homography"  # what the kind "homography" estimates
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

        Points and cameras are of stored pixels, `thresholds_scale` of which are a resized one; points that
        are not finite are never inliers. Scores are match probabilities ("homographies" do not use them),
        covariances (K, 2, 2) of points1. Cameras are used by essential only, on undistorted points.

        H has H[2, 2] = 1 (−1 where the first pixel lies beyond the horizon, so that the inliers lie before
        it), F and E have a Frobenius norm of 1, cam1_from_cam0 has |t| = 1. Status `low_inliers`: a model
        with fewer distinct inliers than `min_inliers`, or no more than chance gives; `degenerate`: the
        points, or what supports the model, lie on one point or line of an image or on one plane, or the views
        only rotate. `UsageError`: arrays that do not fit each other, essential without cameras.
        """
        kind, scale = self.config.kind, thresholds_scale
        if kind == "none":
            return TwoViewGeometry(kind, "not_estimated", np.zeros(len(points0), dtype=bool))
        if kind == "homographies":
            distinct_matches(points0, points1, scale, scores, covariances)  # or their error
            return self._planes(np.asarray(points0), np.asarray(points1), scale, covariances)
        if kind != "essential":
            cameras = None
        elif cameras is None:
            raise UsageError("an essential matrix needs cameras of both images: cameras=(Camera, Camera)")
        matched, usable, place = distinct_matches(points0, points1, scale, scores, covariances, cameras)
        if cameras is not None:  # pinhole ones of the resized images
            cameras = tuple(Camera(c.fx / scale, c.fy / scale, c.cx / scale, c.cy / scale) for c in cameras)
        found, inliers = self._estimate(matched, cameras), np.zeros(len(usable), dtype=bool)
        inliers[usable] = found.inliers[place]
        matrix = _stored(self.planar if kind == "homography" else kind, found.matrix, scale)
        homography = _stored("homography", found.homography, scale)
        found = replace(found, inliers=inliers, matrix=matrix, homography=homography)
        return found.without_rejected() if found.verified else found

    def _planes(
        self, points0: np.ndarray, points1: np.ndarray, scale: float, covariances: np.ndarray | None
    ) -> TwoViewGeometry:
        """Homographies by sequential consensus: one is estimated, its inliers are taken away, and so on.

        Then every match goes to the plane that it agrees with best; one that fewer than `min_inliers` are
        left of is dropped.
        """
        single = replace(self, config=replace(self.config, kind="homography"))
        left, matrices = np.arange(len(points0)), []
        while len(matrices) < MAX_PLANES:
            known = None if covariances is None else covariances[left]
            found = single(points0[left], points1[left], thresholds_scale=scale, covariances=known)
            if found.status != "ok":
                break
            matrices.append(found.matrix)
            left = left[~found.inliers]
        with np.errstate(invalid="ignore"):
            errors = [transfer_error(points0, points1, matrix) for matrix in matrices]
        errors = np.array(errors).reshape(len(matrices), len(points0))
        kept, planes = list(range(len(matrices))), np.full(len(points0), -1)
        while kept:
            near = errors[kept].min(axis=0) <= self.config.max_reprojection_error * scale
            planes = np.where(near, errors[kept].argmin(axis=0), -1)
            counts = np.bincount(planes[near], minlength=len(kept))
            if counts.min() >= self.config.min_inliers:
                order = np.argsort(-counts, kind="stable")  # the largest plane first
                planes = np.append(np.argsort(order), -1)[planes]  # the last for matches without a plane
                matrices = [matrices[kept[plane]] for plane in order]
                break
            del kept[int(counts.argmin())]
            planes = np.full(len(points0), -1)
        return TwoViewGeometry(
            "homographies",
            "ok" if kept else found.status,
            planes >= 0,
            matrices[0] if kept else None,
            planes=planes.astype(np.int64),
            matrices=np.array(matrices if kept else []).reshape(-1, 3, 3),
        )

    def _estimate(self, matched: MatchedPoints, cameras: tuple[Camera, Camera] | None) -> TwoViewGeometry:
        """The geometry of distinct, finite matches, in resized pixels, with its status."""
        of_plane = self.config.kind == "homography"
        kind = self.planar if of_plane else self.config.kind
        minimum, freedom = _MINIMA[kind]
        threshold = self.config.max_reprojection_error if of_plane else self.config.max_epipolar_error
        none = TwoViewGeometry(self.config.kind, "degenerate", np.zeros(len(matched), dtype=bool))
        if len(matched) <= minimum:
            return replace(none, status="too_few")
        chance = chance_inlier(*matched.sides, threshold, of_plane)

        def lie_on_a_line(inliers: np.ndarray) -> bool:
            sides = matched.sides if freedom else ()
            return any(on_a_line(side, inliers, threshold, freedom, chance) for side in sides)

        if lie_on_a_line(~none.inliers):
            return none
        if kind == "essential":
            search = PoseSearch(matched, cameras, threshold)
            model = search.likeliest(self.config.seed, self.pose_samples)
        elif kind == "fundamental":
            model = estimated_fundamental(matched, threshold, self.adjusted)
        elif kind == "homography":
            model = estimated_homography(matched, threshold)
        else:
            model = estimated_planar(matched, threshold, kind)
        if model is None or not model.inliers.any():
            return replace(none, status="no_model")
        count = int(np.count_nonzero(model.inliers))
        convincing = log_false_alarms(len(matched), count, minimum, chance) < 0
        if count < self.config.min_inliers or not convincing:
            return replace(model, status="low_inliers")
        if lie_on_a_line(model.inliers):
            return none
        if of_plane:
            return model
        # The inliers may all lie on one plane, or the views only rotate.
        reach = self.config.max_reprojection_error
        homography = dominant_plane(matched, model.inliers, reach)
        rotates, fundamental = False, model.matrix
        if cameras is not None:
            rotates = only_rotates(matched.select(model.inliers), cameras, model.cam1_from_cam0)
            fundamental = np.linalg.inv(cameras[1].K).T @ model.matrix @ np.linalg.inv(cameras[0].K)
        if homography is None:
            return none if rotates else model
        parallax = Parallax.of(homography, matched, sampson(*matched.sides, fundamental)[model.inliers])
        planar = replace(model, homography=homography)
        on_plane = replace(planar, status="degenerate", inliers=parallax.distance <= reach)
        if rotates:
            return replace(on_plane, cam1_from_cam0=None)
        if cameras is not None:
            return self._of_twins(search, planar, parallax)
        if (alarms := parallax_false_alarms(model.matrix, matched, parallax)) < -ENOUGH:
            return planar
        if alarms < 0:  # what agrees off the plane may be right, though it does not fix the matrix
            on_plane = replace(on_plane, inliers=planar.inliers)
        matrix = completed(homography, matched, parallax)
        if matrix is None or parallax_false_alarms(matrix, matched, parallax) >= -ENOUGH:
            return on_plane
        inliers = sampson(*matched.sides, matrix) <= threshold
        matrix = refined(adjusted_fundamental, matched, matrix, inliers)
        return replace(planar, matrix=matrix, inliers=sampson(*matched.sides, matrix) <= threshold)

    def _of_twins(self, search: PoseSearch, planar: TwoViewGeometry, parallax: Parallax) -> TwoViewGeometry:
        """The geometry of the one pose of a plane that matches off it single out; else it is ambiguous."""
        matched, reach = search.matched, self.config.max_reprojection_error
        poses = [planar.cam1_from_cam0]
        for pose in poses_of_plane(matched, search.cameras, reach, planar.homography):
            pose = search.adjusted(pose, matched, search.model(pose)[0].inliers)
            if all(degrees_apart(pose, one) > _TWINS for one in poses):
                poses.append(pose)
        on_plane, judged = parallax.distance <= reach, []
        for pose in poses:
            model, fundamental, possible = search.model(pose)
            gain = parallax_evidence(fundamental, matched, parallax, planar.inliers, possible)
            gain += OWN * (pose is poses[0])
            judged.append((gain, np.count_nonzero(possible & on_plane), model))
        most = max(count for _, count, _ in judged)
        judged = [one for one in judged if one[1] >= _IN_FRONT * most]
        judged.sort(key=lambda one: -one[0])
        best = replace(judged[0][2], homography=planar.homography)
        if len(judged) == 1:
            return best
        ratio = judged[0][0] - judged[1][0]
        alternatives = tuple(model.cam1_from_cam0 for *_, model in judged)
        best = replace(best, alternatives=alternatives, evidence=float(ratio))
        return best if ratio >= ENOUGH else replace(best, status="ambiguous", inliers=on_plane)


def distinct_matches(
    points0: np.ndarray,
    points1: np.ndarray,
    scale: float,
    scores: np.ndarray | None,
    covariances: np.ndarray | None,
    cameras: tuple[Camera, Camera] | None = None,
) -> tuple[MatchedPoints, np.ndarray, np.ndarray]:
    """The distinct, finite ones of K matches in resized pixels, points undistorted by cameras.

    Also which are finite (K,) bool, and which of the distinct ones each of these is.
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
    return MatchedPoints(distinct[:, :2], distinct[:, 2:], probable, covariances), usable, place


def _stored(kind: str, matrix: np.ndarray | None, scale: float) -> np.ndarray | None:
    """A model of resized pixels as one of stored pixels, normalised."""
    if matrix is None:
        return None
    shrink = np.diag([1 / scale, 1 / scale, 1.0])
    if kind in ("affine", "similarity"):
        matrix = matrix.copy()
        matrix[:2, 2] *= scale
        return matrix
    if kind == "homography":
        matrix = np.linalg.inv(shrink) @ matrix @ shrink
        corner, norm = abs(matrix[2, 2]), np.linalg.norm(matrix)
        return matrix / (corner if corner > 1e-9 * norm else norm)
    if kind == "fundamental":
        matrix = shrink @ matrix @ shrink
    return matrix / np.linalg.norm(matrix)
