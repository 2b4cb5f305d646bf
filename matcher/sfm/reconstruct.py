"""From a finished run to cameras and 3D points: COLMAP's mapping, in a process of its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np

from matcher.collection.schema import common_camera
from matcher.collection.settings import feature_settings
from matcher.collection.store import Store
from matcher.collection.tracks import refine_run
from matcher.errors import MatcherError, UsageError, counted, few, optional, unknown_name
from matcher.export.colmap import CameraChoice, ExportReport, import_pycolmap, write_colmap
from matcher.files import whole_folder, write_whole
from matcher.image_files import read_gps
from matcher.processes import child_command, child_environment
from matcher.sfm.models import KEPT_CAMERAS, SUMMARY, GivenPoses, SparseModel

Mapper = Literal["incremental", "global"]
DATABASE, PLOT, RIG = "database.db", "reconstruction.png", "rig_config.json"


class ReconstructionError(MatcherError):
    """The matches yield no model, or COLMAP ended early; the message explains why and what may help."""

    exit_code = 4


class MappingOptions(TypedDict, total=False):
    """How `reconstruct` maps."""

    mapper: Mapper  # incremental (Schönberger and Frahm 2016; default) or global (GLOMAP, Pan et al. 2024)
    min_images: int  # of a model, at least; smaller ones are left out; default 3
    threads: int  # of COLMAP; −1, the default, is all processors; one thread gives the same model every time
    seed: int  # of COLMAP's random choices; default 0
    max_deviation: float | None  # pixels; less certain observations are left out in the end; default None
    overwrite: bool  # write into a folder that holds files; see `matcher.files.whole_folder`


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What `reconstruct` made; the files are in `folder`."""

    folder: Path
    models: tuple[SparseModel, ...]  # largest first; more than one where the photos do not hang together
    images: int  # that have features
    export: ExportReport
    unregistered: tuple[str, ...] = ()  # those of them without a pose in the largest model

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
        only: names of the images to use, all when absent, never those `gone` without a pose. `without`: pairs
            not to use.
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
    if unknown := sorted(options.keys() - MappingOptions.__annotations__.keys()):
        raise UsageError(unknown_name("option", unknown[0], MappingOptions.__annotations__))
    job = {"mapper": "incremental", "min_images": 3, "threads": -1, "seed": 0, "max_deviation": None}
    job |= {name: value for name, value in options.items() if name != "overwrite"}
    mapper, min_images, threads = job["mapper"], job["min_images"], job["threads"]
    if mapper not in get_args(Mapper):
        raise UsageError(f"the mapper must be {' or '.join(get_args(Mapper))}, not {mapper!r}")
    if min_images < 2 or threads == 0 or threads < -1:
        raise UsageError(f"min_images ({min_images}) starts at 2, threads ({threads}) at 1, or -1 for all")
    if (most := job["max_deviation"]) is not None and not 0 < most < float("inf"):
        raise UsageError(f"max_deviation ({most}) is a number of pixels above 0")
    out, choice = Path(out), choice or CameraChoice()
    import_pycolmap()
    if poses is not None:
        if poses.fixed and choice.rig is not None:
            raise UsageError("poses that stay as they are need no rig; leave one of both out")
        names = [image.name for image in store.images() if only is None or image.name in only]
        posed = names_with_pose(names, poses)
        check_mapper(job["mapper"])
        if poses.fixed:
            only, job["mapper"] = posed, "triangulate"
        adjusted = not (poses.fixed or poses.keeps_cameras)
        choice = replace(choice, known={**choice.known, **poses.cameras}, refine_known=adjusted)
    with whole_folder(out, overwrite=options.get("overwrite", False)) as part:
        while True:
            report, models = _mapped(store, out, part, job, choice, only, without, poses)
            used = frozenset(image.name for image in report.photos)
            missing = used.difference(models[0].cam_from_world if models else ())
            if not (missing and on_incomplete is not None and on_incomplete(missing)):
                break
            for leftover in part.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        notes = "".join(f"; {line}" for line in report.lines()[1:6])
        if not models and report.matches == 0:
            done = report.pairs > 0 and not any(store.waiting())
            why = "they show different things" if done else "match their pairs first"
            raise UsageError(
                f"the {report.images} photos have no matches in {counted(report.pairs, 'pair')}: {why}{notes}"
            )
        if not models:
            least = min(job["min_images"], report.images)
            what = f"COLMAP found no pair to begin with, or no model of {least} images,"
            remedy = "photos taken further apart, more keypoints, all pairs, or a known camera may help"
            if poses is not None:
                what = f"no point fits the {'given poses' if poses.fixed else 'model to be continued'},"
                remedy = "poses and cameras of these very photos are needed, of photos taken apart"
                remedy = remedy if poses.fixed else "make a model of all photos anew"
            raise ReconstructionError(
                f"{what} among {report.verified} verified of {report.pairs} pairs of {report.images} images; "
                f"{remedy}{notes}"
            )
    report.path = out / DATABASE
    return Reconstruction(out, models, report.images, report, tuple(sorted(missing)))


def names_with_pose(names: Sequence[str], poses: GivenPoses) -> list[str]:
    """Those of the images that have a given pose; `UsageError`: fewer than two."""
    posed = [name for name in names if name in poses.cam_from_world]
    if len(posed) < 2:
        raise UsageError(
            f"{len(posed)} of the run's {len(names)} images have a given pose, and two are needed; names "
            f"are paths below the image folder, such as {names[0] if names else 'a.jpg'}, and the poses "
            f"are of {next(iter(poses.cam_from_world), 'none')}"
        )
    return posed


def check_mapper(mapper: str) -> None:
    """Refuse, by a `UsageError`, a mapper that would forget the poses that are given."""
    if mapper != "incremental":
        raise UsageError(f"the {mapper} mapper starts without the poses that are given: leave it out")


def _mapped(
    store: Store,
    out: Path,
    part: Path,
    job: Mapping[str, Any],
    choice: CameraChoice,
    only: Collection[str] | None,
    without: Collection[tuple[str, str]],
    poses: GivenPoses | None,
) -> tuple[ExportReport, tuple[SparseModel, ...]]:
    """Map once, in the folder `part`, which will be `out`; no models where there is no match."""
    unrefined = refine_run(store)
    kept = () if poses is None else poses.cam_from_world
    report = write_colmap(store, part / DATABASE, choice, only, without, kept)
    report.notes.extend(note for note in (unrefined, check_given_camera(store, choice, only)) if note)
    first: dict[str, str] = {}  # image by digest
    used = {image.name: image for image in report.photos}
    rows = [(name, image.sha256) for name, image in used.items() if image.sha256]
    if copies := [f"{name} is {first[sha]}" for name, sha in rows if first.setdefault(sha, name) != name]:
        report.notes.append(f"copies, which show nothing more: {few(copies)}")
    given = len(report.given_cameras)
    if job["mapper"] == "triangulate" and report.guessed_cameras:
        report.notes.append(
            f"the focal length of {report.guessed_cameras} photos is a guess, which given poses do not allow "
            "to correct: give the camera, or poses with their cameras"
        )
    if job["mapper"] == "global" and 0 < given < report.cameras:
        report.notes.append(
            f"the global mapper adjusts all {report.cameras} cameras, also the {given} that were given, "
            "since others were not: the incremental one keeps them"
        )
    if report.images < 2:
        raise UsageError(f"a reconstruction needs at least two photos with features, not {report.images}")
    if report.matches == 0:
        return report, ()
    statuses, undecided = set(), []  # of pairs; those on one plane, which allows several poses
    for pair in store.pairs():
        statuses.add(pair.geometry.status)
        if pair.geometry.verified and pair.geometry.status != "ok":
            undecided.append((pair.name0, pair.name1))
    work, photos = part / "work", store.image_folder  # `work` is not kept
    work.mkdir()
    place = None if poses is None else poses.georegistration
    job = {
        **job,
        "database": str(part / DATABASE),
        "images": str(photos if photos.is_dir() else work),  # only colours are taken from there
        "output": str(part),
        "work": str(work),
        "result": str(work / "result.json"),  # to be written: what is said of each model
        "deviations": str(work / "deviations.npz"),  # how uncertain each observation is
        "fixed_cameras": report.given_cameras,  # numbers of those that are not refined
        "all_fixed": given == report.cameras,
        "min_images": min(job["min_images"], report.images),  # of two photos there is a model, too
        "two_views": report.images == 2,  # whether points that two images see are kept, where no other does
        "verify": statuses == {"not_estimated"},
        "undecided": undecided,
        "poses": poses and {name: pose[:3].tolist() for name, pose in poses.cam_from_world.items()},
        "origin": None if place is None else place["origin"],  # poses are metres east, north and up of it
        "positions": {},  # latitude, longitude, altitude by name
        "rig": None if choice.rig is None else str(part / RIG),  # completed from the largest model
        "rig_known": choice.rig is None or choice.rig.known,
    }
    if job["max_deviation"] is not None:
        deviations = {}  # along the less certain axis, stored pixels; NaN where a keypoint was not refined
        for image in store.images():
            if (each := store.refined_keypoints(image.name)) is not None:
                largest = np.linalg.eigvalsh(each.covariances.astype(np.float64))[:, 1]
                deviations[image.name] = np.where(each.refined, np.sqrt(largest.clip(0)), np.nan)
        if not deviations:
            raise UsageError(
                "max_deviation needs refined keypoints: this preset or refine=False left them as they were "
                "found, or the photos are not in their folder"
            )
        np.savez(job["deviations"], **deviations)
    if poses is None or place is not None:
        found = {name: read_gps(image.path) for name, image in used.items()}
        job["positions"] = {name: position for name, position in found.items() if position is not None}
    if choice.rig is not None:
        (part / RIG).write_text(choice.rig.to_json(), encoding="utf-8")
    with optional():  # before the work
        from matcher.sfm.plot import draw_model
    _run_mapping(job)
    described = json.loads((work / "result.json").read_text(encoding="utf-8"))
    if not described:
        alone = few([f"{a} and {b}" for a, b in undecided if used.keys() >= {a, b}])
        why = f"pairs on one plane, or that only turn, allow several poses, or none, without a third: {alone}"
        report.notes += [why] * bool(alone)
        return report, ()
    draw_model(import_pycolmap().Reconstruction(str(part / "sparse" / "0")), part / PLOT)
    if place is not None:  # the coordinates are those of the model that the poses come from
        described[0]["georegistration"] = described[0]["georegistration"] or dict(place)
    # Whether the user gave all cameras, now, for the run, or when the model was made that is continued.
    told = choice.camera is not None or common_camera(store.settings) is not None
    summary = {
        "run": os.path.relpath(store.folder, out.absolute()),
        "features": feature_settings(store.settings),  # what they depend on
        KEPT_CAMERAS: job["all_fixed"] and (told or (poses is not None and poses.keeps_cameras)),
        "images": report.images,
        "pairs": report.pairs,
        "verified_pairs": report.verified,
        "matches": report.matches,
        "unregistered": sorted(used.keys() - described[0]["cam_from_world"].keys()),
        "models": described,
    }
    write_whole(part / SUMMARY, json.dumps(summary, indent=1).encode())
    shutil.rmtree(work, ignore_errors=True)
    for row in described:
        row["cam_from_world"] = {name: np.array(pose) for name, pose in row["cam_from_world"].items()}
        del row["registered"]  # their number
    return report, tuple(SparseModel(**row) for row in described)


def _run_mapping(job: Mapping[str, Any]) -> None:
    """Run the mapping in a child process that ends with this one."""
    child = subprocess.run(
        child_command("matcher.sfm.mapping"),
        env=child_environment(),
        input=json.dumps(job),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if (code := child.returncode) == 0:
        return
    if shutil.disk_usage(job["output"]).free < 1 << 20:  # COLMAP does not say that this is why it ended
        raise OSError(errno.ENOSPC, f"{job['output']}: the disk is full")
    # A Python exception is explained by its last line, a C++ crash by several.
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    last = " | ".join(lines[-6 if code < 0 else -1 :])[-1500:] or "no message"
    ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    raise ReconstructionError(f"COLMAP's process ended early ({ending}): {last}")


def check_given_camera(store: Store, choice: CameraChoice, only: Collection[str] | None = None) -> str:
    """That the camera which was given may be wrong, where pairs of photos clearly fit another; else empty.
    With the right focal length their fundamental matrices F are essential ones: both singular values of KᵀFK
    are equal (Hartley 1992). Eight pairs of 50 inliers are needed, a focal length within three octaves that
    differs by a quarter, and values half as unequal."""
    matrices, camera = [], choice.camera
    for pair in store.pairs() if camera is not None else ():
        selected = only is None or (pair.name0 in only and pair.name1 in only)
        found = pair.geometry
        exact = found.status == "ok" and np.count_nonzero(found.inliers) >= 50
        if selected and exact and found.kind == "fundamental" and found.matrix is not None:
            matrices.append(found.matrix)
        if len(matrices) == 2000:  # more say no more
            break
    if len(matrices) < 8:
        return ""
    factors, unequal = 2.0 ** np.linspace(-3, 3, 49), []
    for factor in factors:
        k = np.array([[factor * camera.fx, 0, camera.cx], [0, factor * camera.fy, camera.cy], [0, 0, 1]])
        values = np.linalg.svd(k.T @ np.array(matrices) @ k, compute_uv=False)
        unequal.append(np.median((values[:, 0] - values[:, 1]) / (values[:, 0] + values[:, 1])))
    best, given = int(np.argmin(unequal)), unequal[len(factors) // 2]
    far = abs(np.log(factors[best])) >= np.log(1.25) and 0 < best < len(factors) - 1
    if not far or given < max(0.015, 2 * unequal[best]):  # less can be noise
        return ""
    return (
        f"the camera that was given may be wrong: pairs of photos fit a focal length near "
        f"{factors[best] * camera.fx:.0f} px, not {camera.fx:.0f}; correct it, or have it estimated"
    )
