"""From a finished run to cameras and 3D points: COLMAP's mapping, in a separate process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np

from matcher.collection.encoding import common_camera
from matcher.collection.exporting.cameras import CameraChoice
from matcher.collection.exporting.colmap import import_pycolmap, write_colmap
from matcher.collection.exporting.output import ExportReport, whole_folder
from matcher.collection.reconstruction.certainty import write_deviations
from matcher.collection.reconstruction.doubted_camera import better_focal
from matcher.collection.reconstruction.given_poses import GivenPoses
from matcher.collection.reconstruction.mapping_process import ReconstructionError, run_mapping
from matcher.collection.reconstruction.sparse_models import DEVIATIONS, SparseModel, read_described
from matcher.collection.reconstruction.summary import KEPT_CAMERAS
from matcher.collection.settings import feature_settings
from matcher.collection.track_refinement import refine_run
from matcher.data.gps import read_gps
from matcher.errors import UsageError

if TYPE_CHECKING:
    from matcher.collection.store import Store

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
