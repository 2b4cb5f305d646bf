"""From a finished run to cameras and 3D points: COLMAP's mapping, in a separate process."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np

from matcher.cameras import Camera
from matcher.collection.schema import common_camera
from matcher.collection.settings import feature_settings
from matcher.collection.sources import name_fault
from matcher.collection.track_refinement import refine_run
from matcher.errors import IntegrityError, UsageError
from matcher.export.colmap import CameraChoice, import_pycolmap, write_colmap
from matcher.export.output import ExportReport, whole_folder
from matcher.geometry import FARTHEST, check_poses
from matcher.image_files import read_gps
from matcher.poses import COLMAP_IMAGES, read_named_poses
from matcher.sfm.cameras import better_focal, write_deviations
from matcher.sfm.mapping_process import ReconstructionError, run_mapping
from matcher.sfm.models import (
    DEVIATIONS,
    KEPT_CAMERAS,
    SparseModel,
    check_model_files,
    read_described,
    read_summary,
)

if TYPE_CHECKING:
    from matcher.collection.store import Store


# --- given_poses: Poses that a reconstruction starts from: only points are triangulated, or a model is
# continued.

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


# --- reconstruct: From a finished run to cameras and 3D points: COLMAP's mapping, in a separate process.

Mapper = Literal["incremental", "global"]
MAPPERS: tuple[Mapper, ...] = ("incremental", "global")
DATABASE, POINTS = "database.db", "points.ply"
RIG = "rig_config.json"


class MappingOptions(TypedDict, total=False):
    """How `reconstruct` maps."""

    mapper: Mapper  # incremental (Schönberger and Frahm 2016; default) or global (GLOMAP, Pan et al. 2024)
    min_images: int  # of a model, at least; smaller ones are left out; default 3
    threads: int  # of COLMAP; −1, the default, is all processors; one thread gives the same model every time
    seed: int  # of COLMAP's random choices; default 0
    max_deviation: float | None  # pixels; less certain observations are left out in the end; default None
    overwrite: bool  # write into a folder that holds files; see `exporting.output.whole_folder`


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What `reconstruct` made; the files are in `folder`."""

    folder: Path
    models: tuple[SparseModel, ...]  # largest first; more than one where the photos do not hang together
    images: int  # that have features
    export: ExportReport

    @property
    def largest(self) -> SparseModel:
        """The model with the most images."""
        return self.models[0]


def reconstruct(
    store: Store,
    out: str | Path,
    *,
    choice: CameraChoice | None = None,
    only: Collection[str] | None = None,
    without: Collection[tuple[str, str]] = (),
    poses: GivenPoses | None = None,
    on_incomplete: Callable[[frozenset[str]], bool] | None = None,
    **options: Unpack[MappingOptions],
) -> Reconstruction:
    """Cameras and points from a run's verified matches, whose tracks are refined on the images first.

    `out` holds COLMAP's models in `sparse/0`, `sparse/1` … (largest first), the database they came from, the
    points of the largest as PLY, a plot of it, the numbers as JSON, and a rig that is given, in its units.

    Args:
        store: the run.
        out: the folder; it must not exist, or be empty.
        choice: the cameras; given ones are kept as they are, by the global mapper if all are. So is a rig
            whose poses are given; others are learnt from a model that is made first without it.
        only: names of the images to use; all when absent. `without`: pairs of names, in order, not to use.
        poses: to start from. Fixed ones stay as they are, and only points are triangulated, of the images
            that have one; from others the mapping continues, in the same world coordinates.
        on_incomplete: called with the names of images that the largest model lacks; True says that the run
            has more matches now, and all is mapped again.
        options: see `MappingOptions`.

    Raises:
        UsageError: pycolmap is absent, the output exists, fewer than two images, no matches, no image of the
            run has a given pose, cameras or a rig that do not fit, `max_deviation` without refined
            keypoints, or the global mapper for poses.
        ReconstructionError: no model was found, or COLMAP's process ended early.
        OSError: the disk is full.
    """
    job, out = _mapping_job(options), Path(out)
    import_pycolmap()
    if poses is not None:
        only = _check_poses(store, poses, only, choice)
        check_mapper(job["mapper"])
        job["mapper"] = "triangulate" if poses.fixed else job["mapper"]
        choice = replace(choice or CameraChoice(), known=poses.cameras, refine_known=poses.adjusts_cameras)
    job |= _world(store, only, poses)
    with whole_folder(out, overwrite=options.get("overwrite", False)) as part:
        report, models = _mapped(store, out, part, job, choice, (only, without), poses)
        while _is_incomplete(store, only, models, on_incomplete):
            _empty(part)
            report, models = _mapped(store, out, part, job, choice, (only, without), poses)
        _check_model(report, models, min(job["min_images"], report.images))
    return Reconstruction(out, models, report.images, report)


def _mapped(
    store: Store,
    out: Path,
    part: Path,
    job: dict[str, Any],
    choice: CameraChoice | None,
    selection: tuple[Collection[str] | None, Collection[tuple[str, str]]],
    poses: GivenPoses | None,
) -> tuple[ExportReport, tuple[SparseModel, ...]]:
    """Map once, into the folder `part`; no models where there is no match.

    Raises:
        UsageError: fewer than two images.
    """
    unrefined = refine_run(store)
    report = write_colmap(store, part / DATABASE, choice, *selection)
    report.notes.extend(note for note in (unrefined, _doubt(store, choice, selection[0])) if note)
    if job["mapper"] == "triangulate" and report.guessed_cameras:
        report.notes.append(
            f"the focal length of {report.guessed_cameras} photos is a guess, which given poses do not allow "
            "to correct: give the camera, or poses with their cameras"
        )
    if job["mapper"] == "global" and 0 < len(report.given_cameras) < report.cameras:
        report.notes.append(
            f"the global mapper adjusts all {report.cameras} cameras, also the {len(report.given_cameras)} "
            "that were given, since others were not: the incremental one keeps them"
        )
    if report.images < 2:
        raise UsageError(f"a reconstruction needs at least two photos with features, not {report.images}")
    if report.matches == 0:
        return report, ()
    if job["max_deviation"] is not None:
        write_deviations(store, part / DEVIATIONS)
    rig = None if choice is None else choice.rig
    job = {**job, **_paths(store, report, part), "rig": None, "rig_known": rig is None or rig.known}
    job["min_images"] = min(job["min_images"], report.images)  # of two photos there is a model, too
    if rig is not None:
        job["rig"] = str(part / RIG)
        (part / RIG).write_text(rig.to_json(), encoding="utf-8")
    run_mapping(job)
    made_from = {
        "run": os.path.relpath(store.folder, out.absolute()),
        "features": feature_settings(store.settings),
        KEPT_CAMERAS: _keeps_cameras(store, report, choice, poses),
    }
    place = None if poses is None else poses.georegistration
    return report, read_described(part, report, made_from, place)


def _keeps_cameras(
    store: Store, report: ExportReport, choice: CameraChoice | None, poses: GivenPoses | None
) -> bool:
    """Whether the user gave all cameras, now, for the run, or when the model was made that is continued."""
    given = (choice is not None and choice.camera is not None) or common_camera(store.settings) is not None
    given |= poses is not None and poses.keeps_cameras
    return given and len(report.given_cameras) == report.cameras


def check_mapper(mapper: str) -> None:
    """Refuse a mapper that would forget the poses that are given.

    Raises:
        UsageError: it is not the incremental one.
    """
    if mapper != "incremental":
        raise UsageError(
            f"the {mapper} mapper starts from matches alone, without the poses that are given: leave it out"
        )


def _is_incomplete(
    store: Store,
    only: Collection[str] | None,
    models: tuple[SparseModel, ...],
    on_incomplete: Callable[[frozenset[str]], bool] | None,
) -> bool:
    """Whether images with features are not in the largest model, and there are more matches for them now."""
    done = {image.name for image in store.images() if image.status == "done"}
    wanted = done if only is None else done & set(only)
    missing = frozenset(wanted - models[0].cam_from_world.keys() if models else wanted)
    return bool(missing) and on_incomplete is not None and on_incomplete(missing)


def _check_poses(
    store: Store, poses: GivenPoses, only: Collection[str] | None, choice: CameraChoice | None
) -> Collection[str] | None:
    """The names of the images to use: where poses are fixed, those that have one.

    Raises:
        UsageError: no image of the run has a pose, or a rig for poses that are fixed.
    """
    if poses.fixed and choice is not None and choice.rig is not None:
        raise UsageError("poses that stay as they are need no rig; leave one of both out")
    names = [image.name for image in store.images() if only is None or image.name in only]
    posed = [name for name in names if name in poses.cam_from_world]
    if len(posed) < 2:
        raise UsageError(
            f"{len(posed)} of the run's {len(names)} images have a given pose, and two are needed; names are "
            f"paths below the image folder, such as {names[0] if names else 'a.jpg'}, and the poses are of "
            f"{next(iter(poses.cam_from_world), 'none')}"
        )
    return posed if poses.fixed else only


def _positions(store: Store, only: Collection[str] | None) -> dict[str, tuple[float, float, float]]:
    """Latitude, longitude and altitude of the images whose header has them."""
    names = {image.name: image.path for image in store.images() if only is None or image.name in only}
    found = {name: read_gps(path) for name, path in names.items() if path.is_file()}
    return {name: position for name, position in found.items() if position is not None}


def _world(store: Store, only: Collection[str] | None, poses: GivenPoses | None) -> dict[str, Any]:
    """The part of the child's job that says where the world's coordinates come from."""
    if poses is None:
        return {"poses": None, "origin": None, "positions": _positions(store, only)}
    place = poses.georegistration
    return {
        "poses": {name: np.asarray(pose)[:3].tolist() for name, pose in poses.cam_from_world.items()},
        "origin": None if place is None else place["origin"],
        "positions": {} if place is None else _positions(store, only),
    }


def _empty(folder: Path) -> None:
    for leftover in folder.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _doubt(store: Store, choice: CameraChoice | None, only: Collection[str] | None) -> str:
    """That the camera which was given may be wrong, where the pairs of photos clearly fit another one."""
    camera = None if choice is None else choice.camera
    focal = None if camera is None else better_focal(store, camera, only)
    if focal is None:
        return ""
    return (
        f"the camera that was given may be wrong: pairs of photos fit a focal length near {focal:.0f} px, "
        f"not {camera.fx:.0f}; correct it, or leave it out to have it estimated"
    )


def _check_model(report: ExportReport, models: tuple[SparseModel, ...], min_images: int) -> None:
    """Refuse to end without a model.

    Raises:
        UsageError: there was no match to make one of.
        ReconstructionError: COLMAP made none.
    """
    if models:
        return
    if report.matches == 0:
        raise UsageError(
            f"the {report.images} photos have no matches: either their pairs were not matched yet (check "
            "with `matcher status RUN_DIR`), or the photos show different things"
        )
    raise ReconstructionError(
        f"COLMAP found no pair to begin with, or no model of {min_images} images, among {report.verified} "
        f"verified of {report.pairs} pairs of {report.images} images; photos taken further apart, more "
        "keypoints, all pairs, or a known camera may help" + "".join(f"; {note}" for note in report.notes)
    )


def _paths(store: Store, report: ExportReport, part: Path) -> dict[str, Any]:
    """What the child process reads and writes; it verifies the pairs only where the run did not."""
    return {
        "database": str(part / DATABASE),
        "images": str(store.image_folder),
        "output": str(part),
        "fixed_cameras": report.given_cameras,
        "all_fixed": len(report.given_cameras) == report.cameras,
        "deviations": str(part / DEVIATIONS),
        "verify": all(pair.geometry.status == "not_estimated" for pair in store.pairs()),
    }


def _mapping_job(options: MappingOptions) -> dict[str, Any]:
    """The part of the child's job that the options set.

    Raises:
        UsageError: an unknown option, or a value out of range.
    """
    unknown = sorted(options.keys() - MappingOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(MappingOptions.__annotations__)
        raise UsageError(f"unknown option {unknown[0]!r}; there are {known}")
    job = {
        "mapper": "incremental",
        "min_images": 3,
        "threads": -1,
        "seed": 0,
        "max_deviation": None,
    } | options
    job.pop("overwrite", None)
    mapper, min_images, threads = job["mapper"], job["min_images"], job["threads"]
    if mapper not in MAPPERS:
        raise UsageError(f"the mapper must be {' or '.join(MAPPERS)}, not {mapper!r}")
    if min_images < 2 or threads == 0 or threads < -1:
        raise UsageError(f"min_images ({min_images}) starts at 2, threads ({threads}) at 1, or -1 for all")
    if (most := job["max_deviation"]) is not None and not 0 < most < float("inf"):
        raise UsageError(f"max_deviation ({most}) is a number of pixels above 0")
    return job
