"""The pose of a photo, or of pictures fixed to each other, from matches of their keypoints with points.

Several pictures are one generalised camera, whose rays leave from several centres; a single photo is a rig of
one. COLMAP's LO-RANSAC over P3P and GP3P (Kukelova et al. 2016) finds the pose, and its refinement ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from matcher.cameras import Camera, focal_of_film
from matcher.export.colmap import GUESSED_FOCAL, import_pycolmap, read_exif, to_colmap
from matcher.sfm.models import as_our_camera

PoseStatus = Literal[
    "ok",
    "no_keypoints",  # the photo has too few keypoints
    "no_similar_image",  # no image of the map shares enough matches with it
    "too_few_matches",  # too few of its keypoints were matched to points of the map
    "no_model",  # no pose agrees with the matches
    "not_significant",  # so few agree that wrong matches could do so by chance
    "ambiguous",  # nearly as many of the other matches agree with another pose
    "wrong_camera",  # far more matches agree, or agree much better, with another camera
    "wrong_rig",  # far more matches of a picture agree with a pose that the others do not give it
    "implausible",  # the pose cannot be: points behind the camera, or inliers in one spot
]


@dataclass(frozen=True, eq=False, repr=False)
class Pose:
    """Where a photo was taken, or why that is not known.

    The camera looks along +z, x to the right and y down. Without status "ok" there is no pose: a guess is
    never returned.

        >>> import matcher
        >>> refused = matcher.Pose("too_few_matches", "3 matches with points of the map")
        >>> refused.ok, refused.cam_from_world
        (False, None)
    """

    status: PoseStatus
    reason: str  # in words; empty when ok; arrays that are not given are empty
    cam_from_world: np.ndarray | None = None  # (4, 4) float64, the map's units
    camera: Camera | None = None  # the given one, or the one whose focal length was found
    points2d: np.ndarray = None  # (K, 2) stored pixels
    points3d: np.ndarray = None  # (K, 3) their partners, world
    point_ids: np.ndarray = None  # (K,) in the COLMAP model
    inliers: np.ndarray = None  # (K,)
    # (6, 6) of a turn about the camera's axes (radians) and a shift along them (the map's units), as if the
    # points of the map were exact.
    covariance: np.ndarray | None = None
    images: Mapping[str, int] = field(default_factory=dict)  # matched with it → inliers that each shows
    log10_false_alarms: float = 0.0  # how many such poses chance would give, the lower the surer
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage

    def __post_init__(self) -> None:
        empty = {"points2d": (0, 2), "points3d": (0, 3), "point_ids": (0,), "inliers": (0,)}
        for name, shape in empty.items():
            if getattr(self, name) is None:
                kind = {"point_ids": np.int64, "inliers": bool}.get(name, np.float64)
                object.__setattr__(self, name, np.zeros(shape, kind))

    @property
    def ok(self) -> bool:
        """Whether there is a pose."""
        return self.status == "ok"

    @property
    def num_inliers(self) -> int:
        """Matches with points of the map that agree with the pose."""
        return int(self.inliers.sum())

    @property
    def world_from_cam(self) -> np.ndarray | None:
        """(4, 4), the inverse of `cam_from_world`."""
        return None if self.cam_from_world is None else np.linalg.inv(self.cam_from_world)

    @property
    def centre(self) -> np.ndarray | None:
        """(3,) the camera's position in the world."""
        return None if self.cam_from_world is None else self.world_from_cam[:3, 3]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the points, ready for JSON; the camera with COLMAP's pixel origin."""
        camera = None
        if self.camera is not None:
            model, params = self.camera.to_colmap()
            camera = {"model": model, "params": list(params), "size": list(self.camera.size or ())}
        return {
            "status": self.status,
            "reason": self.reason,
            "cam_from_world": None if self.cam_from_world is None else self.cam_from_world.tolist(),
            "camera": camera,
            "matches": len(self.inliers),
            "inliers": self.num_inliers,
            "covariance": None if self.covariance is None else self.covariance.tolist(),
            "images": dict(self.images),
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
        }

    def __repr__(self) -> str:
        if not self.ok:
            return f"Pose({self.status}: {self.reason})"
        centre = ", ".join(f"{value:.3f}" for value in self.centre)
        return f"Pose(ok, at ({centre}), {self.num_inliers} of {len(self.inliers)} matches agree)"


# --- Estimation

MIN_MATCHES = 4  # P3P and one that confirms it


@dataclass(frozen=True, eq=False)
class Matches3d:
    """M matches of an image's keypoints with points."""

    points2d: np.ndarray  # (M, 2) stored pixels
    points3d: np.ndarray  # (M, 3)
    keypoints: np.ndarray  # (M,) which keypoint; one may be matched with several points

    def select(self, index: np.ndarray) -> Matches3d:
        """Some of them."""
        return Matches3d(self.points2d[index], self.points3d[index], self.keypoints[index])

    @staticmethod
    def joined(matches: Sequence[Matches3d]) -> Matches3d:
        """Those of several pictures, keypoints numbered on."""
        starts = np.cumsum([0, *(int(each.keypoints.max(initial=-1)) + 1 for each in matches)])
        return Matches3d(
            np.concatenate([each.points2d for each in matches]),
            np.concatenate([each.points3d for each in matches]),
            np.concatenate([each.keypoints + start for each, start in zip(matches, starts, strict=False)]),
        )


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
    """The pose that most matches agree with, None where there is none."""
    if focal_known:
        found = estimate_poses([matches], [camera], np.eye(4)[None], [max_error], seed=seed)
        return found and found[0]
    if len(matches.points2d) < MIN_MATCHES:
        return None
    pycolmap = import_pycolmap()
    options = pycolmap.AbsolutePoseEstimationOptions(estimate_focal_length=True)
    options.ransac = _ransac(max_error, seed)
    theirs = as_colmap_camera(camera)
    points = to_colmap(matches.points2d)
    found = pycolmap.estimate_absolute_pose(points, matches.points3d, theirs, estimation_options=options)
    if found is None or found["num_inliers"] < MIN_MATCHES + 1:
        return None
    camera = replace(as_our_camera(found.get("camera", theirs)), size=camera.size)
    start = PoseEstimate(_matrix(found["cam_from_world"]), camera, np.asarray(found["inlier_mask"], bool))
    return refine_pose(start, matches, max_error, refine_focal=True)


def refine_pose(
    start: PoseEstimate, matches: Matches3d, max_error: float, *, refine_focal: bool = False
) -> PoseEstimate | None:
    """`refine_poses` of a single picture."""
    found = refine_poses([start], [matches], np.eye(4)[None], [max_error], refine_focal=refine_focal)
    return found and found[0]


def estimate_poses(
    matches: Sequence[Matches3d],
    cameras: Sequence[Camera],
    cam_from_rig: np.ndarray,
    max_errors: Sequence[float],
    *,
    seed: int = 0,
) -> list[PoseEstimate] | None:
    """The poses of R pictures that are fixed to each other, None where there is none.

    Args:
        matches: of each picture, some wrong.
        cameras: with their sizes.
        cam_from_rig: (R, 4, 4).
        max_errors: of an inlier in each picture, stored pixels.
        seed: of the sampling.
    """
    joined = Matches3d.joined(matches)
    if len(joined.points2d) < MIN_MATCHES:
        return None
    found = import_pycolmap().estimate_generalized_absolute_pose(
        to_colmap(joined.points2d),
        joined.points3d,
        _picture_of_each(matches),
        [as_rigid(pose) for pose in cam_from_rig],
        [as_colmap_camera(camera) for camera in cameras],
        _ransac(float(np.mean(max_errors)), seed),
    )
    if found is None or found["num_inliers"] < MIN_MATCHES:
        return None
    poses, inliers = cam_from_rig @ _matrix(found["rig_from_world"]), _split(found["inlier_mask"], matches)
    start = [PoseEstimate(*each) for each in zip(poses, cameras, inliers, strict=True)]
    return refine_poses(start, matches, cam_from_rig, max_errors)


def refine_poses(
    start: Sequence[PoseEstimate],
    matches: Sequence[Matches3d],
    cam_from_rig: np.ndarray,
    max_errors: Sequence[float],
    *,
    refine_focal: bool = False,
) -> list[PoseEstimate] | None:
    """Poses refined on their inliers, which are chosen again each of three times; None with too few left.

    `refine_focal` refines the focal length, too, of a single picture. Other arguments: see `estimate_poses`.
    """
    pycolmap = import_pycolmap()
    options = pycolmap.AbsolutePoseRefinementOptions(
        refine_focal_length=refine_focal, refine_extra_params=False, loss_function_scale=1.0
    )
    joined, number = Matches3d.joined(matches), _picture_of_each(matches)
    cameras, inliers = [each.camera for each in start], [each.inliers for each in start]
    rig_from_world = np.linalg.inv(cam_from_rig[0]) @ start[0].cam_from_world
    for _ in range(3):
        used = np.concatenate(inliers)
        if used.sum() < MIN_MATCHES:
            return None
        theirs, points = [as_colmap_camera(camera) for camera in cameras], to_colmap(joined.points2d)
        if len(start) == 1:
            pose = as_rigid(cam_from_rig[0] @ rig_from_world)
            given = pose, points, joined.points3d, used, theirs[0], options
            result = pycolmap.refine_absolute_pose(*given, return_covariance=True)
            found = result and np.linalg.inv(cam_from_rig[0]) @ _matrix(result["cam_from_world"])
        else:
            pose, fixed = as_rigid(rig_from_world), [as_rigid(pose) for pose in cam_from_rig]
            given = pose, points, joined.points3d, used, number, fixed, theirs, options
            result = pycolmap.refine_generalized_absolute_pose(*given, return_covariance=True)
            found = result and _matrix(result["rig_from_world"])
        if result is None:
            return None
        rig_from_world = found
        if refine_focal:
            size = cameras[0].size
            cameras = [replace(as_our_camera(result.get("camera", theirs[0])), size=size)]
        poses = cam_from_rig @ rig_from_world
        errors = [reprojection_errors(*each) for each in zip(matches, poses, cameras, strict=True)]
        inliers = [error < limit for error, limit in zip(errors, max_errors, strict=True)]
    if sum(map(np.count_nonzero, inliers)) < MIN_MATCHES:
        return None
    covariance = _covariance(result, np.concatenate(errors)[used])
    turns = [np.kron(np.eye(2), fixed[:3, :3]) for fixed in cam_from_rig]
    spreads = [covariance if covariance is None else turn @ covariance @ turn.T for turn in turns]
    return [PoseEstimate(*each) for each in zip(poses, cameras, inliers, spreads, strict=True)]


def _covariance(result: dict[str, Any], errors: np.ndarray) -> np.ndarray | None:
    """(6, 6) in radians and the map's units, for the noise that the inliers' errors (pixels) show."""
    given = result.get("covariance")
    if given is None or not np.isfinite(given).all():
        return None
    # The tangent of a quaternion is half of the turn; COLMAP assumes errors of one pixel.
    scale = np.diag([2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    return scale @ np.asarray(given)[:6, :6] @ scale * float(np.mean(np.square(errors))) / 2


def reprojection_errors(matches: Matches3d, cam_from_world: np.ndarray, camera: Camera) -> np.ndarray:
    """(M,) stored pixels; infinite for points behind the camera."""
    local = matches.points3d @ cam_from_world[:3, :3].T + cam_from_world[:3, 3]
    errors = np.full(len(local), np.inf)
    ahead = local[:, 2] > 1e-9
    if ahead.any():
        seen = np.asarray(as_colmap_camera(camera).img_from_cam(local[ahead]), dtype=np.float64)
        errors[ahead] = np.linalg.norm(seen - to_colmap(matches.points2d[ahead]), axis=1)
    return np.where(np.isnan(errors), np.inf, errors)


def _ransac(max_error: float, seed: int) -> Any:
    return import_pycolmap().RANSACOptions(max_error=max_error, random_seed=seed, confidence=0.9999)


def _picture_of_each(matches: Sequence[Matches3d]) -> list[int]:
    return np.repeat(np.arange(len(matches)), [len(each.points2d) for each in matches]).tolist()


def _split(values: Any, matches: Sequence[Matches3d]) -> list[np.ndarray]:
    return np.split(np.asarray(values, bool), np.cumsum([len(each.points2d) for each in matches])[:-1])


def _matrix(rigid: Any) -> np.ndarray:
    return np.vstack([rigid.matrix(), [0, 0, 0, 1]])


def as_rigid(pose: np.ndarray) -> Any:
    """A `pycolmap.Rigid3d` of (4, 4) or (3, 4)."""
    pycolmap = import_pycolmap()
    return pycolmap.Rigid3d(pycolmap.Rotation3d(pose[:3, :3]), pose[:3, 3])


def as_colmap_camera(camera: Camera) -> Any:
    """A `pycolmap.Camera`."""
    model, params = camera.to_colmap()
    width, height = camera.size or (1, 1)
    return import_pycolmap().Camera(model=model, width=width, height=height, params=list(params))


# --- Cameras that are not known


def cameras_to_try(path: Path | None, size: tuple[int, int], known: Sequence[Camera]) -> list[Camera]:
    """Cameras of a photo, the most credible first: its EXIF's, then the most frequent known one of its size.

    Their focal length is refined. The list is empty where nothing is known.
    """
    found = []
    if path is not None and (focal := read_exif(path).focal_35mm):
        found.append(_pinhole(focal_of_film(focal, size), size))
    same = [camera for camera in known if camera.size == size]
    return [*found, max(same, key=same.count)] if same else found


def any_camera(size: tuple[int, int]) -> Camera:
    """A camera of which only the focal length is to be found."""
    return _pinhole(GUESSED_FOCAL * max(size), size)


def _pinhole(focal: float, size: tuple[int, int]) -> Camera:
    return Camera(focal, focal, (size[0] - 1) / 2, (size[1] - 1) / 2, size, "SIMPLE_PINHOLE")
