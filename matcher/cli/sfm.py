"""`matcher sfm`: cameras and points, from photos or from a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli.options import DEFAULT_PRESET, Masks, Overwrite, argument, option
from matcher.cli.output import PARTIAL, results_as_notices, say, show, stage_progress
from matcher.cli.runs import (
    CameraModel,
    Cameras,
    Exclude,
    Exhaustive,
    FeaturesFile,
    GivenCamera,
    GivenRig,
    Include,
    PairFile,
    Preemptive,
    Restart,
    Sequential,
    Similar,
    Tiles,
    WorkerCount,
    camera_choice,
    choose_pairs,
    counted,
    enter_images,
    match_pairs,
    suggestion,
    with_tiles,
)
from matcher.errors import UsageError

if TYPE_CHECKING:
    from matcher.collection.sources import FeatureSource
    from matcher.collection.store import Store
    from matcher.export.colmap import CameraChoice
    from matcher.sfm.reconstruct import Reconstruction

RESIZE, MAX_KEYPOINTS, KEEP = 2048, 4096, "largest"
# Images up to which a reconstruction matches every pair, and neighbours of each image in larger collections.
LIMITS = {"exhaustive_up_to": 100, "neighbours": 30}
_BESIDE_RUN = {"weights", "frontend_weights", "device"}  # options that a run does not hold


def sfm(
    source: argument(Path, "RUN_DIR|IMAGES", "Folder of photos, or of a run."),
    out: option(Path, metavar="MODEL", help="Folder to create for the model."),
    given: Annotated[
        dict[str, Any],
        ("geometry", "further_passes"),
        {"resize": RESIZE, "max_keypoints": MAX_KEYPOINTS, "keep": KEEP},
    ],
    run: option(
        Path | None, metavar="RUN_DIR", help="Folder for the matches of photos; by default MODEL-run."
    ) = None,
    pairs: PairFile = None,
    exhaustive: Exhaustive = False,
    sequential: Sequential = None,
    similar: Similar = None,
    preemptive: Preemptive = None,
    include: Include = None,
    exclude: Exclude = None,
    features: FeaturesFile = None,
    masks: Masks = None,
    tiles: Tiles = False,
    workers: WorkerCount = None,
    restart: Restart = False,
    camera: GivenCamera = None,
    camera_model: CameraModel = "SIMPLE_RADIAL",
    cameras: Cameras = "auto",
    rig: GivenRig = None,
    mapper: option(
        Literal["incremental", "global"], help="COLMAP's incremental or global (GLOMAP) mapper."
    ) = "incremental",
    poses: option(
        Path | None,
        metavar="MODEL|FILE",
        help="Known poses: a COLMAP model, hloc's lines (.txt), images.txt or .json. Only points are "
        "triangulated, of the photos with a pose.",
    ) = None,
    continued: option(
        Path | None,
        "--continue",
        metavar="MODEL",
        help="Add the photos to this model, in its coordinates and with its run; MODEL itself is kept. They "
        "must lie in the folder of its images.",
    ) = None,
    min_images: option(int, metavar="N", min=2, help="Discard models with fewer images.") = 3,
    threads: option(
        int, metavar="N", help="COLMAP's threads; -1 uses all cores, 1 makes the result reproducible."
    ) = -1,
    seed: option(int, metavar="N", help="Seed of COLMAP's random numbers.") = 0,
    max_deviation: option(
        float | None, metavar="PX", help="Leave out observations whose refined position is less certain."
    ) = None,
    overwrite: Overwrite = False,
    dry_run: option(
        bool, "--dry-run", help="Check the input and print what would be done, without writing anything."
    ) = False,
) -> int:
    """Reconstruct cameras and 3D points with COLMAP, from photos or from a run of `matcher collection`.

    Photos are matched first: every pair of up to 100, else --similar 30. The same command continues a run.
    """
    from matcher.collection.schema import DATABASE
    from matcher.collection.sources import Selection
    from matcher.collection.store import Store

    choice = camera_choice(camera, camera_model, cameras, rig)
    _check_first(out, overwrite, poses, continued, choice, mapper)
    wanted = choose_pairs(pairs, exhaustive, sequential=sequential, similar=similar, preemptive=preemptive)
    mapping = dict(mapper=mapper, min_images=min_images, threads=threads, seed=seed, choice=choice)
    mapping |= dict(max_deviation=max_deviation, overwrite=overwrite)
    selection = dict(include=include or (), exclude=exclude or ())
    sources = dict(masks=masks, features=features)
    asked = {name for name, value in given.items() if (name, value) not in _ALWAYS} - _BESIDE_RUN
    asked |= {name for name, value in (sources | dict(restart=restart, tiles=tiles)).items() if value}
    if continued is not None:
        if asked or any(selection.values()) or dry_run:
            raise typer.BadParameter(
                "a continued model is matched with the settings of its run; leave out what selects or "
                "extracts images, --restart and --dry-run"
            )
        how = {"workers": workers, **{name: given[name] for name in _BESIDE_RUN & given.keys()}}
        return _continue(continued, source, out, run, wanted, how, mapping)
    if not (source / DATABASE).is_file():
        how = {**sources, **selection, "restart": restart}
        given = with_tiles(given) if tiles else given
        return _from_photos(source, run, out, given, wanted, workers, how, mapping, poses, dry_run)
    if asked or wanted or run is not None or workers is not None or _BESIDE_RUN - {"device"} & given.keys():
        raise typer.BadParameter("RUN_DIR is already matched; matching options apply only to photos")
    with Store.open(source) as store:
        counts = store.counts()
        names = Selection.parse(**selection).apply(image.name for image in store.images())
    if choice.rig is not None:
        choice.rig.frames(names)
    if not dry_run:
        return _reconstruct(source, out, names, mapping, poses)
    show(f"images: {len(names)} of {counts.images} in {source}")
    show(f"pairs: {counts.pairs_done} matched, {counts.pairs_waiting} waiting, {counts.pairs_failed} failed")
    show(f"would create {out}")
    return 0


_ALWAYS = (("preset", DEFAULT_PRESET), ("device", "auto"))  # where nothing is given


def _check_first(
    out: Path,
    overwrite: bool,
    poses: Path | None,
    continued: Path | None,
    choice: CameraChoice,
    mapper: str,
) -> None:
    """Refuse what could not be finished before hours of matching."""
    from matcher.export.colmap import check_used, import_pycolmap
    from matcher.export.output import check_folder
    from matcher.sfm.models import read_given_poses
    from matcher.sfm.reconstruct import check_mapper

    import_pycolmap()
    check_folder(out, overwrite=overwrite)
    if poses is not None and continued is not None:
        raise typer.BadParameter(
            "--poses are kept as they are, and --continue adjusts them; give one of both"
        )
    if choice.rig is not None and poses is not None:
        raise typer.BadParameter("--poses are kept as they are and need no --rig; give one of both")
    if choice.rig is not None and continued is not None:
        raise typer.BadParameter("a continued model has the rig that it was made with; leave --rig out")
    if (start := poses or continued) is not None:
        check_mapper(mapper)
        found = read_given_poses(start)
        if poses is not None:
            check_used(replace(choice, known=found.cameras), found.cam_from_world)


def _continue(
    model: Path,
    photos: Path,
    out: Path,
    run: Path | None,
    wanted: dict[str, Any],
    how: dict[str, Any],
    mapping: dict[str, Any],
) -> int:
    """Add photos to a model; the exit code."""
    from matcher.sfm.growing import continue_model

    if "file" in wanted:
        raise typer.BadParameter("--pairs cannot list the pairs of a continued model; use --similar")
    with stage_progress() as update:
        steps = dict(run_dir=run, pairs=wanted, on_progress=update, on_round=_say_round)
        made = continue_model(model, photos, out, how=how, **steps, **mapping)
    return _finish(made, None)


def _from_photos(
    photos: Path,
    run: Path | None,
    out: Path,
    given: dict[str, Any],
    wanted: dict[str, Any],
    workers: int | None,
    how: dict[str, Any],
    mapping: dict[str, Any],
    poses: Path | None,
    dry_run: bool,
) -> int:
    """Match photos and reconstruct, or print what would be done; `how`: as of `Collection.add_images`."""
    from matcher.collection.collection import Collection
    from matcher.loading import takes
    from matcher.presets import PRESETS, configure

    run = run or out.with_name(f"{out.name}-run")
    if run.resolve() == out.resolve():
        raise UsageError(f"--run and --out are one folder, {out}; name another one for the run")
    found = _find_photos(photos, how, mapping["choice"])
    names = found.names()[0]
    if dry_run:
        return _preview(found, run, out, wanted)
    preset, sizes = given["preset"], {"max_keypoints": MAX_KEYPOINTS, "resize": RESIZE}
    defaults = {name: sizes[name] for name in sizes if "tiles" not in given and takes(preset, name)}
    if how["features"] is not None:
        defaults.pop("max_keypoints", None)
    elif preset in PRESETS:
        extractor = configure(PRESETS[preset], {"frontend": given.get("frontend")}).extractor
        defaults |= {"keep": KEEP} if extractor.kind == "sift" else {}
    opened = Collection.open(run, workers=workers, **(defaults | given))
    enter_images(opened, photos, **how)
    matched = match_pairs(opened, wanted, LIMITS)
    return max(matched, _reconstruct(run, out, names, mapping, poses, opened))


def _find_photos(images: Path, how: dict[str, Any], choice: CameraChoice) -> FeatureSource:
    """The photos of a reconstruction; `UsageError` for too few of them, or cameras that do not fit."""
    from matcher.collection.sources import Selection, check_masks
    from matcher.export.colmap import check_used
    from matcher.export.hloc import find_source

    selection = Selection.parse(how["include"], how["exclude"])
    source = find_source(images, how["masks"], how["features"], selection)
    check_masks(source)
    names = source.names()[0]
    if choice.rig is not None:
        choice.rig.frames(names)
    check_used(choice, names)
    if len(names) < 2:
        raise UsageError(f"a reconstruction needs at least two photos, and {images} holds {len(names)}")
    return source


def _preview(source: FeatureSource, run: Path, out: Path, wanted: dict[str, Any]) -> int:
    """Print what would be matched and reconstructed."""
    from matcher.collection.sources import check_masks, default_choice

    names, masked = source.names()[0], check_masks(source)
    show(f"images: {len(names)}" + ("" if masked is None else f", {masked} with a mask"))
    if wanted:
        ((method, value),) = wanted.items()
        show(f"pairs: --{method.replace('file', 'pairs')}" + ("" if value is True else f" {value}"))
    else:
        show(f"pairs: {suggestion(default_choice(len(names), **LIMITS), len(names))}")
    show(f"would {'continue' if run.is_dir() else 'create'} {run}, then create {out}")
    return 0


def _reconstruct(
    run: Path, out: Path, names: Any, mapping: dict[str, Any], poses: Path | None, opened: Any = None
) -> int:
    """Reconstruct these images of a run, print statistics and return the exit code.

    `opened`: where given, it matches more pairs for images that get no pose.
    """
    from matcher.collection.store import Store
    from matcher.sfm.growing import MorePairs
    from matcher.sfm.models import read_given_poses
    from matcher.sfm.reconstruct import reconstruct

    how = dict(only=names, poses=None if poses is None else read_given_poses(poses), **mapping)
    with Store.open(run) as store, stage_progress() as update:
        if opened is not None and poses is None:
            how["on_incomplete"] = MorePairs(opened, on_round=_say_round, on_progress=update)
        return _finish(reconstruct(store, out, **how), _resized_scale(store))


def _say_round(images: int, pairs: int) -> None:
    """Say that more pairs are matched because some images have no pose."""
    lack = f"{counted(images, 'image')} {'have' if images > 1 else 'has'} no pose"
    say(f"{lack}: {counted(pairs, 'more pair')} matched, then all is mapped again")


def _finish(made: Reconstruction, scale: float | None) -> int:
    """Print the statistics; the exit code."""
    for line in summary_lines(made, scale):
        show(line)
    return PARTIAL if made.largest.registered < made.images or made.export.left_out else 0


def _resized_scale(store: Store) -> float | None:
    """Resized size / stored size of the largest image; None if none was resized."""
    settings = store.settings
    resize = settings.get("config", {}).get("extractor", {}).get("resize")
    if not resize or settings.get("source", {}).get("kind") != "photos":
        return None
    longest = max((max(image.size) for image in store.images()), default=0)
    return resize / longest if longest > resize else None


def summary_lines(made: Reconstruction, scale: float | None) -> list[str]:
    """The statistics of a reconstruction, as lines to print."""
    from matcher.sfm.models import SIMPLE
    from matcher.sfm.reconstruct import PLOT

    model = made.largest
    error = f"{model.mean_reprojection_error:.3f} px of the stored image"
    if scale is not None:
        error += f", {model.mean_reprojection_error * scale:.3f} px of the resized image"
    lines = [
        *made.export.notes,
        *(f"left out: {reason}" for reason in made.export.left_out),
        f"registered images: {model.registered} of {made.images}",
        f"points: {model.points}, observations: {model.observations}",
        f"mean track length: {model.mean_track_length:.2f}",
        f"mean reprojection error: {error}",
    ]
    if model.began_simply:
        lines.append(
            f"the mapping began with {SIMPLE} cameras, because with the ones asked for fewer images were "
            "registered; these were adjusted afterwards"
        )
    if (place := model.georegistration) is not None:
        latitude, longitude, _ = place["origin"]
        near = f"{place['images']} positions agree to {place['median_error_metres']:.1f} m (median)"
        lines.append(f"in metres, x east, y north, z up, from {latitude:.6f}, {longitude:.6f}: {near}")
    elif model.positions_unused is not None:
        lines.append(
            f"without a place or metres: the positions in the photos are not used, since "
            f"{model.positions_unused}"
        )
    if others := made.models[1:]:
        shared = {name for other in others for name in other.cam_from_world} & model.cam_from_world.keys()
        where = f", of which {counted(len(shared), 'is', 'are')} in it, too" if shared else ""
        sizes = ", ".join(str(other.registered) for other in others)
        lines.append(f"{counted(len(others), 'more model')}: {sizes} images{where}")
    return [*lines, f"wrote {made.folder} (look at {made.folder / PLOT})"]


def map_of(model: Path, pictures: Path, run: Path | None, loading: dict[str, Any]) -> Path:
    """The folder of our map of a COLMAP model, beside it; made where there is none, with all poses kept.

    Args:
        model: of any program.
        pictures: the folder that its images lie in.
        run: where features and matches of the pictures are kept; None: beside the map.
        loading: options of `matcher.load`.

    Raises:
        UsageError: the model has a run of its own, or a map was made from other poses; as of `matcher sfm`.
    """
    import numpy as np

    from matcher.sfm.models import find_run, read_given_poses

    try:
        own = find_run(model)
    except UsageError:
        made = model.resolve().with_name(f"{model.resolve().name}-map")
    else:
        raise UsageError(f"{model} has features of its pictures in {own}: leave --pictures out")
    if not made.exists():
        say(f"{model}: its map is made from {pictures}, with the model's poses, and kept in {made}")
        given = {name: value for name, value in loading.items() if value is not None}
        with results_as_notices():
            sfm(pictures, made, {"preset": DEFAULT_PRESET, **given}, run, poses=model)
        return made
    kept, poses = (read_given_poses(each).cam_from_world for each in (made, model))
    if any(name not in poses or not np.allclose(pose, poses[name]) for name, pose in kept.items()):
        raise UsageError(
            f"{made} was not made from the poses that {model} has now: delete it, and it is made again"
        )
    say(f"{made} is the map of {len(kept)} of the {len(poses)} pictures of {model}")
    return made
