"""Poses that a reconstruction starts from: only points are triangulated, or a model is continued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from matcher.collection.exporting.colmap import import_pycolmap
from matcher.collection.reconstruction.model_files import check_model_files
from matcher.collection.reconstruction.summary import KEPT_CAMERAS, read_summary
from matcher.collection.sources import name_fault
from matcher.data.camera import Camera
from matcher.data.named_poses import COLMAP_IMAGES, read_named_poses
from matcher.data.rotations import FARTHEST, check_poses
from matcher.errors import IntegrityError, UsageError

_FILES = ("cameras", "images", "points3D")
_PLACES = (".", "sparse/0", "sparse")  # in a folder of ours or of COLMAP's, where the model may be


@dataclass(frozen=True, eq=False)
class GivenPoses:
    """Poses of images by name, and the cameras of those that have one."""

    cam_from_world: Mapping[str, np.ndarray]  # (4, 4)
    cameras: Mapping[str, Camera] = field(default_factory=dict)
    fixed: bool = True  # only points are triangulated; else more images are registered and all is adjusted
    georegistration: Mapping[str, Any] | None = None  # of the model that they come from
    keeps_cameras: bool = False  # those of the model were given by the user, and are not adjusted

    @property
    def adjusts_cameras(self) -> bool:
        """Whether `cameras` are refined with the poses."""
        return not (self.fixed or self.keeps_cameras)


def read_given_poses(source: str | Path, *, fixed: bool = True) -> GivenPoses:
    """The poses of a COLMAP model, of a folder that `reconstruct` wrote, or of a file (`read_named_poses`).

    Raises:
        UsageError: there is neither, or the file holds something else.
        IntegrityError: the model is damaged.
    """
    source = Path(source)
    if source.name == COLMAP_IMAGES and is_model(source.parent):
        source = source.parent
    if not source.is_dir():
        return GivenPoses(*read_named_poses(source), fixed=fixed)
    model = read_model(find_model(source))
    poses, cameras = {}, {}
    for number in model.reg_image_ids():
        image = model.image(number)
        poses[image.name] = np.vstack([image.cam_from_world().matrix(), [0, 0, 0, 1]])
        cameras[image.name] = camera_of_model(source, model.camera(image.camera_id))
        check_model_poses(source, f"the pose of {image.name}", poses[image.name][None])
    if not poses:
        raise UsageError(f"{source} is a model without any registered image")
    kept = read_summary(source).get(KEPT_CAMERAS) is True
    return GivenPoses(poses, cameras, fixed, read_georegistration(source), kept)


def read_georegistration(folder: Path) -> dict[str, Any] | None:
    """Where on Earth the coordinates of a model of ours are (see `georegister`), if it says so."""
    try:
        found = read_summary(folder)["models"][0]["georegistration"]
        numbers = np.array([*found["origin"], found["images"], found["median_error_metres"]], np.float64)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    if numbers.shape != (5,) or not np.isfinite(numbers).all():
        return None
    *origin, images, error = numbers.tolist()
    return {"origin": origin, "images": int(images), "median_error_metres": error}


def is_model(folder: Path) -> bool:
    """Whether a folder holds a COLMAP model, binary or as text."""
    return any(all((folder / f"{name}{end}").is_file() for name in _FILES) for end in (".bin", ".txt"))


def find_model(folder: Path) -> Path:
    """The folder with COLMAP's files: this one, or its `sparse/0` or `sparse`.

    Raises:
        UsageError: none of them holds a model.
    """
    for place in _PLACES:
        if is_model(folder / place):
            return folder / place
    raise UsageError(
        f"{folder} holds no COLMAP model (cameras, images and points3D, .bin or .txt, in it or in sparse/0): "
        "make one with `matcher sfm PHOTOS --out NEW_MODEL`"
    )


def read_model(folder: Path) -> Any:
    """A `pycolmap.Reconstruction`.

    Raises:
        UsageError: pycolmap is absent.
        IntegrityError: a file is damaged.
    """
    pycolmap = import_pycolmap()
    pycolmap.logging.minloglevel = pycolmap.logging.FATAL.value

    def parameters(model: int) -> int:
        return len(pycolmap.Camera.create_from_model_id(1, pycolmap.CameraModelId(model), 1.0, 1, 1).params)

    check_model_files(folder, parameters)
    try:
        model = pycolmap.Reconstruction(str(folder))
    except Exception as error:  # of C++, of any type
        raise IntegrityError(f"{folder}: the COLMAP model is damaged ({str(error)[:200]})") from error
    for image in model.images.values():
        if fault := name_fault(image.name):
            raise IntegrityError(
                f"{folder}: the COLMAP model is damaged (the name of image {image.image_id} {fault})"
            )
    names = Counter(image.name for image in model.images.values())
    if twice := [name for name, count in names.items() if count > 1]:
        raise IntegrityError(f"{folder}: the COLMAP model is damaged (two images are named {twice[0]})")
    return model


def check_finite(model: Path, what: str, values: np.ndarray) -> None:
    """Refuse numbers of a model that are none.

    Raises:
        IntegrityError: a value is NaN or infinite; the message names the model and `what`.
    """
    if not np.isfinite(values).all():
        raise IntegrityError(f"{model}: the COLMAP model is damaged ({what} is not finite)")


def check_points(model: Path, points: np.ndarray) -> None:
    """Refuse points (P, 3) of a model with which nothing can be computed.

    Raises:
        IntegrityError: a coordinate is not finite, or farther away than a pose may be.
    """
    check_finite(model, "a point", points)
    if (np.abs(points) > FARTHEST).any():
        raise IntegrityError(f"{model}: the COLMAP model is damaged (a point is too far away)")


def check_model_poses(model: Path, what: str, poses: np.ndarray) -> None:
    """Refuse matrices (N, 4, 4) of a model that are no poses (see `check_poses`).

    Raises:
        IntegrityError: one is none; the message names the model and `what`.
    """
    try:
        check_poses(poses)
    except ValueError as error:
        raise IntegrityError(f"{model}: the COLMAP model is damaged ({what}: {error})") from error


def camera_of_model(model: Path, camera: Any) -> Camera:
    """A camera of a model that anybody may have made; arguments as of `as_our_camera`.

    Raises:
        IntegrityError: its numbers are not finite.
        UsageError: they are none of a camera, or its model is not supported; the message names both.
    """
    check_finite(model, f"a number of camera {camera.camera_id}", np.array(camera.params))
    try:
        return as_our_camera(camera)
    except UsageError as error:
        raise UsageError(f"{model}, camera {camera.camera_id}: {error}") from error


def as_our_camera(camera: Any) -> Camera:
    """A `pycolmap.Camera` with our pixel origin."""
    return Camera.from_colmap(camera.model.name, camera.params.tolist(), (camera.width, camera.height))
