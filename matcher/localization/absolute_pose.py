"""The pose of a camera from matches with points: LO-RANSAC, then refinement and its covariance.

PoseLib's LO-RANSAC over P3P (Persson and Nordberg 2018) proposes a pose where the focal length is known,
COLMAP's over P4Pf (Larsson et al. 2017) where it is not; pycolmap refines it on the pixels themselves. How
many wrong matches would agree with some pose by chance is the number of false alarms of Moisan and Stival
(2004). It takes wrong matches for independent; `settings.py` asks for much more than that needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matcher.collection.exporting.colmap import import_pycolmap, to_colmap
from matcher.collection.reconstruction.given_poses import as_our_camera
from matcher.data.camera import Camera

MIN_MATCHES = 4  # P3P and one that confirms it
ITERATIONS = 10_000
CONFIDENCE = 0.9999
LOSS = 1.0  # pixels of the resized image, of the Cauchy loss
_ROUNDS = 3  # of refinement and a new choice of inliers
_SAMPLE = {False: 3, True: 4}  # matches that a pose needs, by whether the focal length is unknown


@dataclass(frozen=True, eq=False)
class Matches3d:
    """M matches of an image's keypoints with points."""

    points2d: np.ndarray  # (M, 2) stored pixels
    points3d: np.ndarray  # (M, 3)
    keypoints: np.ndarray  # (M,) which keypoint; one may be matched with several points

    def select(self, index: np.ndarray) -> Matches3d:
        """Some of them."""
        return Matches3d(self.points2d[index], self.points3d[index], self.keypoints[index])


@dataclass(frozen=True, eq=False)
class PoseEstimate:
    """A pose that some of the matches agree with."""

    cam_from_world: np.ndarray  # (4, 4)
    camera: Camera
    inliers: np.ndarray  # (M,) bool
    covariance: np.ndarray | None = None  # (6, 6), see `Pose`


def estimate_pose(
    matches: Matches3d, camera: Camera, *, max_error: float, focal_known: bool, seed: int = 0
) -> PoseEstimate | None:
    """The pose that most matches agree with, None where there is none.

    Args:
        matches: M of them, some wrong.
        camera: with its size; where the focal length is unknown, any guess of it.
        max_error: of an inlier, stored pixels.
        focal_known: otherwise it is estimated too.
        seed: of the sampling.
    """
    if len(matches.points2d) < MIN_MATCHES:
        return None
    if focal_known:
        start = _by_poselib(matches, camera, max_error, seed)
    else:
        start = _by_unknown_focal(matches, camera, max_error, seed)
    return None if start is None else refine_pose(start, matches, max_error, refine_focal=not focal_known)


def _by_poselib(matches: Matches3d, camera: Camera, max_error: float, seed: int) -> PoseEstimate | None:
    import poselib

    points, pinhole = undistorted(matches.points2d, camera)
    usable = np.isfinite(points).all(axis=1)
    ransac = {
        "max_reproj_error": max_error,  # the name of PoseLib 2.0
        "max_error": max_error,  # of later versions
        "max_iterations": ITERATIONS,
        "success_prob": CONFIDENCE,
        "seed": seed,
    }
    if usable.sum() < MIN_MATCHES:
        return None
    pose, info = poselib.estimate_absolute_pose(
        points[usable], matches.points3d[usable], pinhole, ransac, {"max_iterations": 50}
    )
    inliers = np.zeros(len(points), dtype=bool)
    inliers[usable] = np.asarray(info["inliers"], dtype=bool)
    if inliers.sum() < MIN_MATCHES:
        return None
    return PoseEstimate(np.vstack([pose.Rt, [0, 0, 0, 1]]), camera, inliers)


def _by_unknown_focal(matches: Matches3d, camera: Camera, max_error: float, seed: int) -> PoseEstimate | None:
    pycolmap = import_pycolmap()
    options = pycolmap.AbsolutePoseEstimationOptions(estimate_focal_length=True)
    options.ransac.max_error, options.ransac.random_seed = max_error, seed
    options.ransac.max_num_trials, options.ransac.confidence = ITERATIONS, CONFIDENCE
    theirs = as_colmap_camera(camera)
    found = pycolmap.estimate_absolute_pose(
        to_colmap(matches.points2d), matches.points3d, theirs, estimation_options=options
    )
    if found is None or found["num_inliers"] < MIN_MATCHES + 1:
        return None
    inliers = np.asarray(found["inlier_mask"], dtype=bool)
    pose = np.vstack([found["cam_from_world"].matrix(), [0, 0, 0, 1]])
    found_camera = as_our_camera(found["camera"]) if "camera" in found else as_our_camera(theirs)
    return PoseEstimate(pose, replace(found_camera, size=camera.size), inliers)


def refine_pose(
    start: PoseEstimate, matches: Matches3d, max_error: float, *, refine_focal: bool = False
) -> PoseEstimate | None:
    """A pose refined on its inliers, which are chosen again a few times; None where too few are left."""
    pycolmap = import_pycolmap()
    options = pycolmap.AbsolutePoseRefinementOptions(
        refine_focal_length=refine_focal, refine_extra_params=False, loss_function_scale=LOSS
    )
    found = start
    for _ in range(_ROUNDS):
        if found.inliers.sum() < MIN_MATCHES:
            return None
        theirs = as_colmap_camera(found.camera)
        result = pycolmap.refine_absolute_pose(
            as_rigid(found.cam_from_world),
            to_colmap(matches.points2d),
            matches.points3d,
            found.inliers,
            theirs,
            options,
            return_covariance=True,
        )
        if result is None:
            return None
        pose = np.vstack([result["cam_from_world"].matrix(), [0, 0, 0, 1]])
        refined = result.get("camera", theirs)
        camera = replace(as_our_camera(refined), size=found.camera.size) if refine_focal else found.camera
        errors = reprojection_errors(matches, pose, camera)
        found = PoseEstimate(pose, camera, errors < max_error, covariance_of(result, errors, found.inliers))
    return found if found.inliers.sum() >= MIN_MATCHES else None


def covariance_of(result: dict[str, Any], errors: np.ndarray, inliers: np.ndarray) -> np.ndarray | None:
    """(6, 6) in radians and the map's units, for the noise that the inliers' errors show.

    Args:
        result: of pycolmap's refinement.
        errors: (M,) reprojection errors, pixels.
        inliers: (M,) those that were refined on.
    """
    given = result.get("covariance")
    if given is None or not np.isfinite(given).all():
        return None
    # The tangent of a quaternion is half of the turn; COLMAP assumes errors of one pixel.
    scale = np.diag([2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    variance = float(np.mean(np.square(errors[inliers]))) / 2
    return scale @ np.asarray(given)[:6, :6] @ scale * variance


def reprojection_errors(matches: Matches3d, cam_from_world: np.ndarray, camera: Camera) -> np.ndarray:
    """(M,) stored pixels; infinite for points behind the camera."""
    local = matches.points3d @ cam_from_world[:3, :3].T + cam_from_world[:3, 3]
    errors = np.full(len(local), np.inf)
    ahead = local[:, 2] > 1e-9
    if ahead.any():
        seen = np.asarray(as_colmap_camera(camera).img_from_cam(local[ahead]), dtype=np.float64)
        errors[ahead] = np.linalg.norm(seen - to_colmap(matches.points2d[ahead]), axis=1)
    return np.where(np.isnan(errors), np.inf, errors)


def undistorted(points: np.ndarray, camera: Camera) -> tuple[np.ndarray, dict[str, Any]]:
    """Points (M, 2) without distortion, and the pinhole camera that they are of, for PoseLib."""
    focal = (camera.fx + camera.fy) / 2
    rays = np.asarray(as_colmap_camera(camera).cam_from_img(to_colmap(points)), dtype=np.float64)
    width, height = camera.size or (1, 1)
    params = [focal, focal, 0.0, 0.0]
    return rays * focal, {"model": "PINHOLE", "width": width, "height": height, "params": params}


def log10_false_alarms(
    matches: Matches3d, inliers: np.ndarray, area: float, max_error: float, *, focal_known: bool = True
) -> float:
    """log10 of how many poses chance would give that as many keypoints agree with, at most.

    Args:
        matches: all that the pose was estimated from.
        inliers: (M,) those that agree.
        area: of the image, stored pixels².
        max_error: of an inlier, stored pixels.
        focal_known: a sample is one larger where it is not.
    """
    total = len(np.unique(matches.keypoints))
    agreeing = len(np.unique(matches.keypoints[inliers]))
    sample = _SAMPLE[not focal_known]
    if agreeing <= sample:
        return math.inf
    chance = min(1.0, math.pi * max_error**2 / area * len(matches.keypoints) / total)

    def choose(n: int, k: int) -> float:
        return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(10)

    return (
        math.log10(max(total - sample, 1))
        + choose(total, agreeing)
        + choose(agreeing, sample)
        + (agreeing - sample) * math.log10(chance)
    )


def spread(points: np.ndarray, size: Sequence[int]) -> float:
    """Share of the image's area under the points' ellipse of two standard deviations."""
    if len(points) < 3:
        return 0.0
    covariance = np.cov(points.T)
    return float(4 * math.pi * math.sqrt(max(np.linalg.det(covariance), 0.0)) / (size[0] * size[1]))


def as_colmap_camera(camera: Camera) -> Any:
    """A `pycolmap.Camera`."""
    model, params = camera.to_colmap()
    width, height = camera.size or (1, 1)
    return import_pycolmap().Camera(model=model, width=width, height=height, params=list(params))


def as_rigid(pose: np.ndarray) -> Any:
    """A `pycolmap.Rigid3d` of (4, 4) or (3, 4)."""
    pycolmap = import_pycolmap()
    return pycolmap.Rigid3d(pycolmap.Rotation3d(pose[:3, :3]), pose[:3, 3])
