"""COLMAP's models read, whoever made them, and the summary that is written beside those of ours."""

from __future__ import annotations

import json
import mmap
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from matcher.cameras import COLMAP_IMAGES, Camera, read_named_poses
from matcher.collection.schema import DATABASE
from matcher.collection.sources import name_fault
from matcher.errors import IntegrityError, UsageError
from matcher.export.colmap import as_matrix, import_pycolmap
from matcher.geometry import FARTHEST, check_poses

SUMMARY = "summary.json"
KEPT_CAMERAS = "cameras_given"  # in it: whether the user gave all cameras, so that none was adjusted
_FILES = ("cameras", "images", "points3D")


@dataclass(frozen=True, eq=False)
class SparseModel:
    """One connected reconstruction."""

    cam_from_world: dict[str, np.ndarray]  # name → (3, 4) float64, COLMAP's axes: x right, y down, z ahead
    cameras: dict[str, dict[str, Any]]  # name → model, size, params in COLMAP's pixels
    points: int
    observations: int
    mean_track_length: float
    mean_reprojection_error: float  # stored pixels
    georegistration: dict[str, Any] | None = None  # where on Earth; then units are metres, x east, z up
    positions_unused: str | None = None  # why positions in the photos' headers do not say where on Earth
    doubtful: Sequence[str] = ()  # images whose estimated camera is hardly one; see `doubtful_images`
    began_simply: bool = False  # whether cameras got all their parameters once the images were registered

    @property
    def registered(self) -> int:
        """Images with a pose."""
        return len(self.cam_from_world)

    def centres(self) -> dict[str, np.ndarray]:
        """Camera centres (3,) by name."""
        return {name: -pose[:, :3].T @ pose[:, 3] for name, pose in self.cam_from_world.items()}


def is_model(folder: Path) -> bool:
    """Whether a folder holds a COLMAP model, binary or as text."""
    return any(all((folder / f"{name}{end}").is_file() for name in _FILES) for end in (".bin", ".txt"))


def find_model(folder: Path) -> Path:
    """The folder with COLMAP's files: this one, or its `sparse/0` or `sparse`; `UsageError`: none is."""
    for place in (folder, folder / "sparse/0", folder / "sparse"):
        if is_model(place):
            return place
    raise UsageError(
        f"{folder} holds no COLMAP model (cameras, images and points3D, .bin or .txt, in it or in sparse/0): "
        "make one with `matcher sfm PHOTOS --out NEW_MODEL`"
    )


def whole_model(model: Path) -> Path:
    """The folder above `sparse/0`, `sparse/1` …, where such a part of a model is given; else the model."""
    whole = model.absolute()
    return whole.parents[1] if whole.parent.name == "sparse" else model


def other_parts(model: Path) -> dict[Path, int]:
    """The parts of a model of ours besides the largest, by folder, and how many images each has."""
    rows, found = read_summary(model).get("models"), {}
    for number, row in enumerate(rows[1:] if isinstance(rows, list) else (), start=1):
        images = row.get("registered") if isinstance(row, dict) else None
        if isinstance(images, int) and is_model(folder := model / "sparse" / str(number)):
            found[folder] = images
    return found


def find_run(model: str | Path) -> Path:
    """The folder of the run that a model was made from; `UsageError`: it does not say, or it is not there."""
    folder = Path(model)
    above = whole_model(folder)
    folder = above if "run" in read_summary(above) else folder  # whose sparse/1 may be meant
    named, run = read_summary(folder).get("run"), folder.absolute()
    known = isinstance(named, str) and named.isprintable()
    run = run / named if known else run.with_name(f"{run.name}-run")
    with suppress(OSError):  # of a name that no file can have
        if (run / DATABASE).is_file():
            return run.resolve()
    run = run.with_name(run.name[:200])
    raise UsageError(
        f"{folder} does not say which run holds the features of its images, or the run is not at {run}: name "
        f"it (run_dir, `--run RUN_DIR`); for a model of another program, use `matcher localize {folder} "
        f"PHOTOS --pictures DIR`, or make one by `matcher sfm PHOTOS --poses {folder} --out NEW_MODEL`"
    )


def read_summary(folder: Path) -> dict[str, Any]:
    """What the summary in a folder, which may be anybody's, says; nothing where none can be read."""
    path = folder / SUMMARY
    try:  # a pipe would never end; an image takes about a thousand bytes
        small = path.is_file() and path.stat().st_size <= 1 << 28
        found = json.loads(path.read_text(encoding="utf-8")) if small else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_georegistration(folder: Path) -> dict[str, Any] | None:
    """Where on Earth the coordinates of a model of ours are, if it says so: origin, images, median error."""
    try:
        found = read_summary(folder)["models"][0]["georegistration"]
        numbers = np.array([*found["origin"], found["images"], found["median_error_metres"]], np.float64)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    if numbers.shape != (5,) or not np.isfinite(numbers).all():
        return None
    *origin, images, error = numbers.tolist()
    return {"origin": origin, "images": int(images), "median_error_metres": error}


@dataclass(frozen=True, eq=False)
class GivenPoses:
    """Poses of images by name, and the cameras of those that have one."""

    cam_from_world: Mapping[str, np.ndarray]  # (4, 4)
    cameras: Mapping[str, Camera] = field(default_factory=dict)
    fixed: bool = True  # only points are triangulated; else more images are registered and all is adjusted
    georegistration: Mapping[str, Any] | None = None  # of the model that they come from
    keeps_cameras: bool = False  # those of the model were given by the user, and are not adjusted


def read_given_poses(source: str | Path, *, fixed: bool = True) -> GivenPoses:
    """The poses of a COLMAP model, a folder that `reconstruct` wrote, or a file (`read_named_poses`)."""
    source = Path(source)
    if source.name == COLMAP_IMAGES and is_model(source.parent):
        source = source.parent
    if not source.is_dir():
        return GivenPoses(*read_named_poses(source), fixed=fixed)
    model = read_model(find_model(source))
    poses = poses_of(model)
    cameras = {image.name: as_our_camera(model.camera(image.camera_id)) for image in registered(model)}
    if not poses:
        raise UsageError(f"{source} is a model without any registered image")
    kept = read_summary(source).get(KEPT_CAMERAS) is True
    return GivenPoses(poses, cameras, fixed, read_georegistration(source), kept)


# --- COLMAP's files, of strangers


def read_model(folder: Path) -> Any:
    """A `pycolmap.Reconstruction` whose names, poses, cameras and points are such, or an `IntegrityError`.
    `UsageError`: a camera is none or of a model that is not supported."""
    pycolmap = import_pycolmap()
    pycolmap.logging.minloglevel = pycolmap.logging.FATAL.value
    _check_files(folder, pycolmap)
    try:
        model = pycolmap.Reconstruction(str(folder))
        names = Counter(image.name for image in model.images.values())  # which may be no UTF-8
    except Exception as error:  # of C++, of any type
        raise _damaged(folder, str(error)[:200]) from error
    for name, count in names.items():
        if fault := name_fault(name):
            raise _damaged(folder, f"the name of an image {fault}")
        if count > 1:
            raise _damaged(folder, f"two images are named {name}")
    for name, pose in poses_of(model).items():
        try:
            check_poses(pose[None])
        except ValueError as error:
            raise _damaged(folder, f"the pose of {name}: {error}") from error
    for number, camera in model.cameras.items():
        check_numbers(folder, f"camera {number}", camera.params, np.inf)
        try:
            as_our_camera(camera)
        except UsageError as error:
            raise UsageError(f"{folder}, camera {number}: {error}") from error
    points = [point.xyz for point in model.points3D.values()]
    check_numbers(folder, "a point", np.array(points).reshape(-1, 3))
    return model


def poses_of(model: Any) -> dict[str, np.ndarray]:
    """cam_from_world (4, 4) of the registered images of a `pycolmap.Reconstruction` by name."""
    return {image.name: as_matrix(image.cam_from_world()) for image in registered(model)}


def registered(model: Any) -> list[Any]:
    """The images of a `pycolmap.Reconstruction` that have a pose."""
    return [model.image(number) for number in model.reg_image_ids()]


def check_numbers(model: Path, what: str, values: np.ndarray, most: float = FARTHEST) -> None:
    """Refuse numbers of a model that are not finite or too large, by an `IntegrityError` that names both."""
    if not np.isfinite(values).all():
        raise _damaged(model, f"a number of {what} is not finite")
    if (np.abs(values) > most).any():
        raise _damaged(model, f"{what} is too far away")


def as_our_camera(camera: Any) -> Camera:
    """A `pycolmap.Camera` with our pixel origin."""
    return Camera.from_colmap(camera.model.name, camera.params.tolist(), (camera.width, camera.height))


def _damaged(place: Path, what: str) -> IntegrityError:
    return IntegrityError(f"{place}: the COLMAP model is damaged ({what})")


def _check_files(folder: Path, pycolmap: Any) -> None:
    """Refuse binary files that do not hold what their counts promise: COLMAP's reader never ends on those.
    Little-endian, a count, then records (COLMAP's src/colmap/scene/reconstruction_io.cc)."""

    def take(form: str) -> tuple:
        return struct.unpack(f"<{form}", data.read(struct.calcsize(f"<{form}")))

    def rig() -> None:
        for number in range(take("II")[1]):  # sensors
            take("8x")
            if number and take("B")[0]:  # whether its pose in the rig is known
                take("7d")

    def camera() -> None:
        kind = pycolmap.CameraModelId(take("IiQQ")[1])  # ValueError for an unknown one
        take(f"{len(pycolmap.Camera.create_from_model_id(1, kind, 1.0, 1, 1).params)}d")

    def image() -> None:
        take("I7dI")
        start = data.tell()
        if (end := data.find(b"\0", start, start + 4096)) <= start:
            raise ValueError("the name of an image does not end, or is empty")
        data.read(end + 1 - start).decode("utf-8")
        take(f"{24 * take('Q')[0]}x")

    records = {
        "rigs.bin": rig,
        "cameras.bin": camera,
        "frames.bin": lambda: take(f"{16 * take('II7dI')[-1]}x"),  # number, rig, pose; images
        "images.bin": image,
        "points3D.bin": lambda: take(f"{8 * take('Q3d3BdQ')[-1]}x"),  # …; its track
    }
    for name, skip in records.items():
        path = folder / name
        if path.exists() and not path.is_file():  # a pipe would keep a reader waiting
            raise IntegrityError(f"{path} is not a file")
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for _ in range(*take("Q")):
                    skip()
                if data.read(1):
                    raise ValueError("it is longer than its records")
        except (OSError, ValueError, OverflowError, struct.error) as error:
            raise _damaged(path, str(error)) from error
