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
from matcher.export.colmap import GUESSED_FOCAL, as_rigid, import_pycolmap, read_exif, to_colmap
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
    reason: str  # in words; empty when ok
    cam_from_world: np.ndarray | None = None  # (4, 4) float64, the map's units
    camera: Camera | None = None  # the given one, or the one whose focal length was found
    points2d: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # (K, 2) stored pixels
    points3d: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))  # (K, 3) their partners, world
    point_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (K,) in the COLMAP model
    inliers: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # (K,)
    # (6, 6) of a turn about the camera's axes (radians) and a shift along them (the map's units), as if the
    # points of the map were exact.
    covariance: np.ndarray | None = None
    images: Mapping[str, int] = field(default_factory=dict)  # matched with it → inliers that each shows
    log10_false_alarms: float = 0.0  # how many such poses chance would give, the lower the surer
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage

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
    """M matches of the keypoints of a picture, which may be one of a rig, with points."""

    points2d: np.ndarray  # (M, 2) stored pixels
    points3d: np.ndarray  # (M, 3)
    table: np.ndarray  # (M, 4) keypoint, point, the image that was matched, and its keypoint
    max_error: float  # of an inlier, stored pixels
    cam_from_rig: np.ndarray | None = None  # (4, 4) of a rig; None: the identity

    def __len__(self) -> int:
        return len(self.table)

    @property
    def keypoints(self) -> np.ndarray:
        """(M,) which keypoint; one may be matched with several points."""
        return self.table[:, 0]

    def select(self, index: np.ndarray) -> Matches3d:
        """Some of them."""
        kept = self.points2d[index], self.points3d[index], self.table[index]
        return Matches3d(*kept, self.max_error, self.cam_from_rig)

    def errors(self, cam_from_world: np.ndarray, camera: Camera) -> np.ndarray:
        """(M,) reprojection errors, stored pixels; infinite for points behind the camera."""
        local = self.points3d @ cam_from_world[:3, :3].T + cam_from_world[:3, 3]
        errors = np.full(len(local), np.inf)
        ahead = local[:, 2] > 1e-9
        seen = as_colmap_camera(camera).img_from_cam(local[ahead])
        errors[ahead] = np.linalg.norm(seen - to_colmap(self.points2d[ahead]), axis=1)
        return np.nan_to_num(errors, nan=np.inf)


@dataclass(frozen=True, eq=False)
class PoseEstimate:
    """The pose of a picture that some of its matches agree with."""

    matches: Matches3d
    camera: Camera
    cam_from_world: np.ndarray  # (4, 4)
    inliers: np.ndarray  # (M,) bool
    covariance: np.ndarray | None = None  # (6, 6), see `Pose`


Estimates = list[PoseEstimate]  # of all pictures of a rig, or of one photo


def agreeing(estimates: Estimates | None) -> int:
    """Keypoints of all pictures with an inlier."""
    return sum(len(np.unique(each.matches.keypoints[each.inliers])) for each in estimates or ())


def estimate_poses(
    matches: Sequence[Matches3d], cameras: Sequence[Camera], *, focal_known: bool = True, seed: int = 0
) -> Estimates | None:
    """The poses of R pictures that are fixed to each other, None where there is none.

    Args:
        matches: of each picture, some wrong.
        cameras: with their sizes.
        focal_known: False finds the focal length, too, of a single picture.
        seed: of the sampling.
    """
    if sum(map(len, matches)) < MIN_MATCHES:
        return None
    pycolmap, theirs = import_pycolmap(), [as_colmap_camera(camera) for camera in cameras]
    points, pictures, fixed = _joined(matches)
    max_error = float(np.mean([each.max_error for each in matches]))
    ransac = pycolmap.RANSACOptions(max_error=max_error, random_seed=seed, confidence=0.9999)
    if focal_known:
        rig = pictures, [as_rigid(pose) for pose in fixed], theirs
        found = pycolmap.estimate_generalized_absolute_pose(*points, *rig, ransac)
    else:
        options = pycolmap.AbsolutePoseEstimationOptions(estimate_focal_length=True)
        options.ransac = ransac
        found = pycolmap.estimate_absolute_pose(*points, *theirs, estimation_options=options)
    if found is None or found["num_inliers"] < MIN_MATCHES + (not focal_known):
        return None
    if not focal_known:
        cameras = [replace(as_our_camera(found.get("camera", theirs[0])), size=cameras[0].size)]
    world = _matrix(found["rig_from_world" if focal_known else "cam_from_world"])
    inliers = np.split(np.asarray(found["inlier_mask"], bool), np.cumsum(list(map(len, matches)))[:-1])
    poses = [pose @ world for pose in fixed]
    start = [PoseEstimate(*each) for each in zip(matches, cameras, poses, inliers, strict=True)]
    return refine_poses(start, refine_focal=not focal_known)


def refine_poses(start: Estimates, *, refine_focal: bool = False) -> Estimates | None:
    """Poses refined on their inliers, which are chosen again each of three times; None with too few left.

    `refine_focal` refines the focal length, too, of a single picture.
    """
    pycolmap = import_pycolmap()
    options = pycolmap.AbsolutePoseRefinementOptions(
        refine_focal_length=refine_focal, refine_extra_params=False, loss_function_scale=1.0
    )
    matches, cameras = [each.matches for each in start], [each.camera for each in start]
    points, pictures, fixed = _joined(matches)
    inliers = [each.inliers for each in start]
    world = np.linalg.inv(fixed[0]) @ start[0].cam_from_world  # of the rig
    for _ in range(3):
        used = np.concatenate(inliers)
        if used.sum() < MIN_MATCHES:
            return None
        pose, theirs = as_rigid(world), [as_colmap_camera(camera) for camera in cameras]
        if len(start) == 1:  # as no rig, it gives its focal length back
            result = pycolmap.refine_absolute_pose(
                pose, *points, used, theirs[0], options, return_covariance=True
            )
        else:
            rig = pictures, [as_rigid(pose) for pose in fixed], theirs
            result = pycolmap.refine_generalized_absolute_pose(
                pose, *points, used, *rig, options, return_covariance=True
            )
        if result is None:
            return None
        world = _matrix(result["cam_from_world" if len(start) == 1 else "rig_from_world"])
        if refine_focal:
            cameras = [replace(as_our_camera(result.get("camera", theirs[0])), size=cameras[0].size)]
        poses = [pose @ world for pose in fixed]
        errors = [own.errors(*each) for own, *each in zip(matches, poses, cameras, strict=True)]
        inliers = [error < own.max_error for error, own in zip(errors, matches, strict=True)]
    if sum(map(np.count_nonzero, inliers)) < MIN_MATCHES:
        return None
    spreads, covariance = [None] * len(start), result.get("covariance")
    if covariance is not None and np.isfinite(covariance).all():
        # The tangent of a quaternion is half of the turn; COLMAP assumes errors of one pixel.
        scale = np.diag([2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
        noise = float(np.mean(np.square(np.concatenate(errors)[used]))) / 2
        covariance = scale @ np.asarray(covariance)[:6, :6] @ scale * noise
        turns = [np.kron(np.eye(2), pose[:3, :3]) for pose in fixed]
        spreads = [turn @ covariance @ turn.T for turn in turns]
    return [PoseEstimate(*each) for each in zip(matches, cameras, poses, inliers, spreads, strict=True)]


def _joined(
    matches: Sequence[Matches3d],
) -> tuple[tuple[np.ndarray, np.ndarray], list[int], list[np.ndarray]]:
    """Points of all pictures, the picture of each, and cam_from_rig; a single one is a rig of its own."""
    points2d = to_colmap(np.concatenate([each.points2d for each in matches]))
    points3d = np.concatenate([each.points3d for each in matches])
    pictures = np.repeat(np.arange(len(matches)), [len(each) for each in matches]).tolist()
    fixed = [each.cam_from_rig for each in matches] if len(matches) > 1 else [None]
    fixed = [np.eye(4) if pose is None else pose for pose in fixed]
    return (points2d, points3d), pictures, fixed


def _matrix(rigid: Any) -> np.ndarray:
    return np.vstack([rigid.matrix(), [0, 0, 0, 1]])


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
        found.append(any_camera(size, focal_of_film(focal, size)))
    same = [camera for camera in known if camera.size == size]
    return [*found, max(same, key=same.count)] if same else found


def any_camera(size: tuple[int, int], focal: float | None = None) -> Camera:
    """A camera of which only the focal length is to be found."""
    focal = focal or GUESSED_FOCAL * max(size)
    return Camera(focal, focal, (size[0] - 1) / 2, (size[1] - 1) / 2, size, "SIMPLE_PINHOLE")
