"""What localisation says of a photo."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from pathlib import Path
from typing import Any, Literal

import numpy as np

from matcher.cameras import Camera
from matcher.config import RefineConfig
from matcher.errors import IntegrityError
from matcher.export.colmap import FULL_FRAME, GUESSED_FOCAL, import_pycolmap, read_exif, to_colmap
from matcher.images import limit_for, read_image
from matcher.localization.sparse_map import SparseMap
from matcher.refine import ImagePyramid, refine_matches
from matcher.sfm.reconstruct import as_our_camera
from matcher.types import Matches

# --- pose: What localisation says of a photo.

PoseStatus = Literal[
    "ok",
    "no_keypoints",  # the photo has too few keypoints
    "no_similar_image",  # no image of the map shares enough matches with it
    "too_few_matches",  # too few of its keypoints were matched to points of the map
    "no_model",  # no pose agrees with the matches
    "not_significant",  # so few agree that wrong matches could do so by chance
    "ambiguous",  # nearly as many of the other matches agree with another pose
    "wrong_camera",  # far more matches agree, or agree much better, with another camera
    "implausible",  # the pose cannot be: points behind the camera, or inliers in one spot
]


def _no_pixels() -> np.ndarray:
    return np.zeros((0, 2))


def _no_points() -> np.ndarray:
    return np.zeros((0, 3))


def _no_ids() -> np.ndarray:
    return np.zeros(0, np.int64)


def _no_flags() -> np.ndarray:
    return np.zeros(0, bool)


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
    points2d: np.ndarray = field(default_factory=_no_pixels)  # (K, 2) stored pixels
    points3d: np.ndarray = field(default_factory=_no_points)  # (K, 3) their partners, world
    point_ids: np.ndarray = field(default_factory=_no_ids)  # (K,) in the COLMAP model
    inliers: np.ndarray = field(default_factory=_no_flags)  # (K,)
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


# --- absolute_pose: The pose of a camera from matches with points: LO-RANSAC, then refinement and its
# covariance.

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


# --- unknown_camera: Cameras to try where a photo comes without one.


def cameras_to_try(path: Path | None, size: tuple[int, int], model: SparseMap) -> list[Camera]:
    """Cameras of a photo, the most credible first: its EXIF's, then the map's own for that size.

    Their focal length is refined. The list is empty where nothing is known.
    """
    found = []
    if path is not None and (focal := read_exif(path).focal_35mm):
        found.append(pinhole(focal / hypot(*FULL_FRAME) * hypot(*size), size))
    same = [camera for camera in model.cameras if camera.size == size]
    if same:
        found.append(max(same, key=same.count))
    return found


def any_camera(size: tuple[int, int]) -> Camera:
    """A camera of which only the focal length is to be found."""
    return pinhole(GUESSED_FOCAL * max(size), size)


def pinhole(focal: float, size: tuple[int, int]) -> Camera:
    """Without distortion, the principal point in the middle."""
    middle = (size[0] - 1) / 2, (size[1] - 1) / 2
    return Camera(focal, focal, *middle, size, "SIMPLE_PINHOLE")


# --- subpixel: A photo's keypoints moved to where it looks most like the map's images.

_KEPT = 16  # pyramids of map images in memory


class MapImages:
    """Pyramids of the map's images, read when they are needed; the last few are kept."""

    def __init__(
        self,
        model: SparseMap,
        path: Callable[[str], Path],
        zoom: Callable[[str], float],
        has_changed: Callable[[str], bool],
    ) -> None:
        """By name of image: its file, resized for stored pixels, and whether it is another file now."""
        self._model, self._path, self._zoom, self._has_changed = model, path, zoom, has_changed
        self._kept: OrderedDict[int, ImagePyramid] = OrderedDict()
        self.absent: set[str] = set()  # names of images that were asked for and whose files are gone

    def __call__(self, image: int) -> ImagePyramid | None:
        """The pyramid of an image, None if its file is not there any more.

        Raises:
            IntegrityError: the file is not the one in which the keypoints were found.
        """
        if image in self._kept:
            self._kept.move_to_end(image)
            return self._kept[image]
        name, wanted = self._model.names[image], self._model.cameras[image].size
        path = self._path(name)
        if not path.is_file():
            self.absent.add(name)
            return None
        pixels = read_image(path, resize=None, upright=False, keep_stored=True, max_pixels=limit_for(wanted))
        if pixels.size != wanted:
            raise IntegrityError(
                f"{path} is {pixels.size[0]} x {pixels.size[1]} pixels now, and was {wanted[0]} x "
                f"{wanted[1]} when the map was made: put the old file back, or make the map again"
            )
        if self._has_changed(name):
            raise IntegrityError(
                f"{path} has changed since its keypoints were found: put the old file back, or make the map "
                "again"
            )
        self._kept[image] = ImagePyramid.of(pixels)._replace(zoom=self._zoom(name))
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return self._kept[image]


def refined_positions(
    images: MapImages,
    model: SparseMap,
    photo: ImagePyramid,
    positions: np.ndarray,
    table: np.ndarray,
    config: RefineConfig,
) -> np.ndarray:
    """(M, 2) positions in the photo; those that cannot be refined stay.

    Args:
        images: of the map.
        model: the map.
        photo: the photo's pyramid.
        positions: (N, 2) of its keypoints.
        table: (M, 4) inliers: keypoint, point, map image, its keypoint.
        config: window and acceptance.
    """
    found = positions[table[:, 0]].astype(np.float64)
    for image in np.unique(table[:, 2]).tolist():
        rows = np.flatnonzero(table[:, 2] == image)
        pyramid = images(image)
        if pyramid is None:
            continue
        indices = table[rows][:, [3, 0]]
        ends = model.keypoints[image][indices[:, 0]], found[rows]
        ends = tuple(end.astype(np.float32) for end in ends)
        matches = Matches(indices, *ends, np.ones(len(rows), np.float32))
        refined = refine_matches(pyramid, photo, matches, config)
        accepted = refined.refinement.accepted
        found[rows[accepted]] = refined.points1[accepted]
    return found
