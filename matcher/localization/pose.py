"""The pose of a photo, or of pictures fixed to each other, from matches of keypoints with points; its checks.

Several pictures are one generalised camera, whose rays leave from several centres; a single photo is a rig of
one. COLMAP's LO-RANSAC over P3P and GP3P (Kukelova et al. 2016) finds the pose, and its refinement ends it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from matcher.cameras import Camera
from matcher.export.colmap import GUESSED_FOCAL, as_matrix, as_rigid, import_pycolmap, to_colmap
from matcher.localization.sparse_map import LocalizationConfig
from matcher.sfm.models import as_our_camera
from matcher.verify.likelihood import log_false_alarms

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
        model, params = (None, ()) if self.camera is None else self.camera.to_colmap()
        camera = self.camera and {"model": model, "params": [*params], "size": [*(self.camera.size or ())]}
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

    def errors(self, cam_from_world: np.ndarray, camera: Camera) -> np.ndarray:
        """(M,) reprojection errors, stored pixels; infinite for points behind the camera."""
        local = self.points3d @ cam_from_world[:3, :3].T + cam_from_world[:3, 3]
        errors = np.full(len(local), np.inf)
        ahead = local[:, 2] > 1e-9
        seen = _as_colmap_camera(camera).img_from_cam(local[ahead])
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
    """The poses of R pictures that are fixed to each other, by cameras with sizes; None: there is none. Where
    it is not known, the focal length of a single picture is found, too."""
    if sum(map(len, matches)) < MIN_MATCHES:
        return None
    pycolmap, theirs = import_pycolmap(), [_as_colmap_camera(camera) for camera in cameras]
    points, pictures, fixed = _joined(matches)
    max_error = float(np.mean([each.max_error for each in matches]))
    ransac = pycolmap.RANSACOptions(max_error=max_error, random_seed=seed, confidence=0.9999)
    if focal_known:
        rig = pictures, [as_rigid(pose) for pose in fixed], theirs
        found = pycolmap.estimate_generalized_absolute_pose(*points, *rig, ransac)
    else:
        options = pycolmap.AbsolutePoseEstimationOptions(estimate_focal_length=True, ransac=ransac)
        found = pycolmap.estimate_absolute_pose(*points, *theirs, estimation_options=options)
    if found is None or found["num_inliers"] < MIN_MATCHES + (not focal_known):
        return None
    if not focal_known:
        cameras = [replace(as_our_camera(found.get("camera", theirs[0])), size=cameras[0].size)]
    world = as_matrix(found["rig_from_world" if focal_known else "cam_from_world"])
    inliers = np.split(np.asarray(found["inlier_mask"], bool), np.cumsum(list(map(len, matches)))[:-1])
    poses = [pose @ world for pose in fixed]
    start = [PoseEstimate(*each) for each in zip(matches, cameras, poses, inliers, strict=True)]
    return refine_poses(start, refine_focal=not focal_known)


def refine_poses(start: Estimates, *, refine_focal: bool = False) -> Estimates | None:
    """Poses, if asked with a focal length, refined thrice on inliers chosen anew; None: too few left."""
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
        pose, theirs = as_rigid(world), [_as_colmap_camera(camera) for camera in cameras]
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
        world = as_matrix(result["cam_from_world" if len(start) == 1 else "rig_from_world"])
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


def _joined(matches: Sequence[Matches3d]) -> tuple[tuple[np.ndarray, ...], list[int], list[np.ndarray]]:
    """Points of all pictures, the picture of each, and cam_from_rig; a single one is a rig of its own."""
    points2d = to_colmap(np.concatenate([each.points2d for each in matches]))
    points3d = np.concatenate([each.points3d for each in matches])
    pictures = np.repeat(np.arange(len(matches)), [len(each) for each in matches]).tolist()
    fixed = [each.cam_from_rig for each in matches] if len(matches) > 1 else [None]
    fixed = [np.eye(4) if pose is None else pose for pose in fixed]
    return (points2d, points3d), pictures, fixed


def _as_colmap_camera(camera: Camera) -> Any:
    model, params = camera.to_colmap()
    width, height = camera.size or (1, 1)
    return import_pycolmap().Camera(model=model, width=width, height=height, params=list(params))


def any_camera(size: tuple[int, int], focal: float | None = None) -> Camera:
    """A camera of which only the focal length is to be found."""
    focal = focal or GUESSED_FOCAL * max(size)
    return Camera(focal, focal, (size[0] - 1) / 2, (size[1] - 1) / 2, size, "SIMPLE_PINHOLE")


# --- Whether an estimated pose is accepted, and in words why not.


class Judgement(NamedTuple):
    """What is said of an estimate."""

    status: PoseStatus
    reason: str  # empty when ok
    log10_false_alarms: float  # how many such poses chance would give


def judge(
    estimates: Estimates | None,
    matches: Sequence[Matches3d],
    config: LocalizationConfig,
    *,
    focal_known: bool,
) -> Judgement:
    """Whether enough keypoints agree, and in enough of the picture."""
    count = sum(len(np.unique(each.keypoints)) for each in matches)
    if count < config.min_inliers:
        needed = f"{config.min_inliers} needed"
        return Judgement("too_few_matches", f"{count} keypoints match points of the map, {needed}", 0.0)
    if estimates is None:
        return Judgement("no_model", f"no pose agrees with the {count} matches", 0.0)
    size, found = estimates[0].camera.size, agreeing(estimates)
    area, max_error = size[0] * size[1], max(each.max_error for each in matches)
    chance = min(1.0, math.pi * max_error**2 / area * sum(map(len, matches)) / count)
    alarms = log_false_alarms(count, found, 3 if focal_known else 4, chance) / math.log(10)
    least = max(config.min_inliers, min(config.min_share * count, config.enough_inliers))
    if found < least or alarms > config.max_log10_false_alarms:
        reason = f"only {found} of {count} matched keypoints agree with a pose"
        return Judgement("not_significant", reason, alarms)
    # The share of the picture under the inliers' ellipse of two standard deviations.
    points = np.concatenate([each.matches.points2d[each.inliers] for each in estimates])
    covered = 4 * math.pi * math.sqrt(max(np.linalg.det(np.cov(points.T)), 0.0)) / area
    if covered < (config.min_spread_of_few if found < config.few_share * count else config.min_spread):
        where = f"lie in one spot, {100 * covered:.1f} % of the photo"
        return Judgement("implausible", f"the {found} of {count} that agree {where}", alarms)
    return Judgement("ok", "", alarms)


def _better(
    estimate: PoseEstimate | None, matches: Matches3d, config: LocalizationConfig, camera: Camera, known: bool
) -> tuple[PoseEstimate | None, str]:
    """Where fewer than 60 % agree, a pose of the matches alone that half as many again do; how many did."""
    found, count = agreeing([estimate] if estimate else None), len(np.unique(matches.keypoints))
    if found < 0.6 * count:
        others = estimate_poses([matches], [camera], focal_known=known, seed=config.seed)
        right = others is not None and agreeing(others) >= 1.5 * found
        if right and judge(others, [matches], config, focal_known=known).status == "ok":
            return others[0], f"{found} of {count} matched keypoints agree with"
    return None, ""


def check_camera(
    estimate: PoseEstimate | None, matches: Matches3d, camera: Camera, config: LocalizationConfig
) -> str:
    """Why the camera that was given seems wrong: another one explains far more matches; else empty. It
    differs by 15 % of the focal length, or in the principal point (the middle) by 5 % of it."""
    other, agree = _better(estimate, matches, config, any_camera(camera.size), known=False)
    if other is None:
        return ""
    given, found = _focal(camera), _focal(other.camera)
    centre, middle = (camera.cx, camera.cy), (other.camera.cx, other.camera.cy)
    if max(given, found) < 1.15 * min(given, found) and math.dist(centre, middle) < 0.05 * given:
        return ""
    points = ["({:.0f}, {:.0f})".format(*point) for point in (centre, middle)]
    return (
        f"{agree} the given camera, of focal length {given:.0f} pixels and principal point {points[0]}, "
        f"and {agreeing([other])} with one of {found:.0f} and {points[1]}: correct it, or give none"
    )


def check_rig_pose(estimate: PoseEstimate, config: LocalizationConfig) -> str:
    """Why the relative pose of a picture of a rig seems wrong: another one explains far more; else empty."""
    other, agree = _better(estimate, estimate.matches, config, estimate.camera, known=True)
    if other is None:
        return ""
    alone = f"{agreeing([other])} with one of this picture alone"
    return f"{agree} the pose of the rig, and {alone}: correct its relative pose"


def check_focal(estimate: PoseEstimate) -> str:
    """Why the focal length of an accepted pose seems wrong: the matches fit another one better; else empty.
    It differs by 4 % in x and y, and capped squared errors are a fifth less: the points of a map have errors
    of their own, which a focal length may take up."""
    fixed, free = (refine_poses([estimate], refine_focal=each) for each in (False, True))
    if fixed is None or free is None:
        return ""
    given, found = estimate.camera, free[0].camera
    changes = np.log([found.fx / given.fx, found.fy / given.fy])  # of one sign where the zoom is wrong
    if max(changes.min(), -changes.max()) < np.log(1.04):
        return ""
    matches, most = estimate.matches, estimate.matches.max_error
    errors = [matches.errors(each.cam_from_world, each.camera) for each in (*fixed, *free)]
    before, after = (float(np.square(np.minimum(each, most)).sum()) for each in errors)
    if after > 0.8 * before:
        return ""
    return (
        f"the matches fit a focal length of {_focal(found):.0f} pixels, and the camera that is given has "
        f"one of {_focal(given):.0f} pixels: correct the camera, or give none"
    )


def check_ambiguous(estimates: Estimates, config: LocalizationConfig) -> str:
    """Why an accepted pose may be another one: the other matches agree with that nearly as well; else empty.
    It rivals where 55 % as many keypoints agree with it, five times an inlier's largest error away by the
    accepted one: in a kitchen with like tables a wrong pose had .65, right ones at most .43."""
    found = agreeing(estimates)
    if found >= config.enough_inliers:
        return ""
    others = []
    for each in estimates:
        own, keypoints = each.matches, each.matches.keypoints
        rest = ~np.isin(keypoints, keypoints[each.inliers])
        kept = dict(points2d=own.points2d[rest], points3d=own.points3d[rest], table=own.table[rest])
        others.append(replace(own, **kept))
    rivals = estimate_poses(others, [each.camera for each in estimates], seed=config.seed)
    if (count := agreeing(rivals)) < 0.55 * found:
        return ""
    off = [
        rest.errors(estimate.cam_from_world, estimate.camera)[rival.inliers] / rest.max_error
        for rest, estimate, rival in zip(others, estimates, rivals, strict=True)
    ]
    if np.median(np.concatenate(off)) < 5:
        return ""  # it is the same place, seen less exactly
    return f"{found} matched keypoints agree with a pose, and {count} others with another one"


def _focal(camera: Camera) -> float:
    return (camera.fx + camera.fy) / 2
