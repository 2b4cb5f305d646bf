"""`matcher sfm`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli import options
from matcher.cli.collection import (
    CameraModel,
    Cameras,
    Exclude,
    Exhaustive,
    FeaturesFile,
    GivenCamera,
    GivenRig,
    Include,
    Masks,
    PairFile,
    Preemptive,
    Restart,
    Sequential,
    Similar,
    Tiles,
    WorkerCount,
    apart_from,
    camera_choice,
    choose_pairs,
    enter_images,
    further_pairs,
    is_run,
    match_pairs,
    say_round,
    suggestion,
    with_tiles,
)
from matcher.cli.options import PARTIAL, results_as_notices, say, show, stage_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matcher.collection.collection import Collection
    from matcher.collection.sources import FeatureSource
    from matcher.collection.store import Store
    from matcher.export.colmap import CameraChoice
    from matcher.sfm.reconstruct import Reconstruction


# --- reconstructed: The statistics of a reconstruction, for `matcher sfm`.


def resized_scale(store: Store) -> float | None:
    """Resized size / stored size of the largest image; None if none was resized."""
    settings = store.settings
    resize = settings.get("config", {}).get("extractor", {}).get("resize")
    if not resize or settings.get("source", {}).get("kind") != "photos":
        return None
    longest = max((max(image.size) for image in store.images()), default=0)
    return resize / longest if longest > resize else None


def summary_lines(made: Reconstruction, scale: float | None) -> list[str]:
    """The statistics of a reconstruction, as lines to print."""
    from matcher.sfm.cameras import SIMPLE
    from matcher.sfm.models import PLOT

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
    if len(made.models) > 1:
        sizes = ", ".join(str(other.registered) for other in made.models[1:])
        shared = {
            name for other in made.models[1:] for name in other.cam_from_world
        } & model.cam_from_world.keys()
        word = "model" if len(made.models) == 2 else "models"
        verb = "is" if len(shared) == 1 else "are"
        where = f", of which {len(shared)} {verb} in it, too" if shared else ""
        lines.append(f"{len(made.models) - 1} more {word}: {sizes} images{where}")
    return [*lines, f"wrote {made.folder} (look at {made.folder / PLOT})"]


# --- growing: `matcher sfm` from poses that are known, and `matcher sfm --continue`.

Poses = Annotated[
    Path | None,
    typer.Option(
        "--poses",
        metavar="MODEL|FILE",
        help="Known poses: a COLMAP model, hloc's lines (.txt), images.txt or .json. Only points are "
        "triangulated, of the photos with a pose.",
    ),
]
Continued = Annotated[
    Path | None,
    typer.Option(
        "--continue",
        metavar="MODEL",
        help="Add the photos to this model, in its coordinates and with its run; MODEL itself is kept. They "
        "must lie in the folder of its images.",
    ),
]


def add_photos(
    model: Path,
    photos: Path,
    out: Path,
    run: Path | None,
    wanted: dict[str, Any],
    how: dict[str, Any],
    mapping: dict[str, Any],
    *,
    beside: bool,
) -> int:
    """Add photos to a model; returns the exit code. `beside`: options were given that do not go with it."""
    from matcher.sfm.growing import continue_model

    if beside:
        raise typer.BadParameter(
            "a continued model is matched with the settings of its run; leave out what selects or extracts "
            "images, --restart and --dry-run"
        )
    if "file" in wanted:
        raise typer.BadParameter("--pairs cannot list the pairs of a continued model; use --similar")
    with stage_progress() as update:
        steps = dict(run_dir=run, pairs=wanted, on_progress=update, on_round=say_round)
        mapping = {name: value for name, value in mapping.items() if name != "poses"}
        made = continue_model(model, photos, out, how=how, **steps, **mapping)
    for line in summary_lines(made, None):
        show(line)
    return PARTIAL if made.largest.registered < made.images or made.export.left_out else 0


# --- sfm: `matcher sfm`.

RESIZE, MAX_KEYPOINTS, KEEP = 2048, 4096, "largest"
# Images up to which a reconstruction matches every pair, and neighbours of each image in larger collections.
LIMITS = {"exhaustive_up_to": 100, "neighbours": 30}
_ALWAYS = {"preset": options.DEFAULT_PRESET, "device": "auto", "upright": True}  # where nothing is given
_BESIDE_RUN = {"weights", "frontend_weights", "device"}  # options that a run does not hold

RunOrPhotos = Annotated[
    Path, typer.Argument(metavar="RUN_DIR|IMAGES", show_default=False, help="Folder of photos, or of a run.")
]
ModelFolder = Annotated[Path, typer.Option("--out", metavar="MODEL", help="Folder to create for the model.")]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN_DIR", help="Folder for the matches of photos; by default MODEL-run."),
]
MapperChoice = Annotated[
    Literal["incremental", "global"],
    typer.Option("--mapper", help="COLMAP's incremental or global (GLOMAP) mapper."),
]
Threads = Annotated[
    int,
    typer.Option(metavar="N", help="COLMAP's threads; -1 uses all cores, 1 makes the result reproducible."),
]
MinImages = Annotated[
    int, typer.Option("--min-images", metavar="N", min=2, help="Discard models with fewer images.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of COLMAP's random numbers.")]
MaxDeviation = Annotated[
    float | None,
    typer.Option(metavar="PX", help="Leave out observations whose refined position is less certain."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check the input and print what would be done, without writing anything."),
]

SfmOptions = Annotated[
    dict[str, Any],
    ("geometry", "second_pass"),
    {"resize": RESIZE, "max_keypoints": MAX_KEYPOINTS, "keep": KEEP},
]


def sfm(
    source: RunOrPhotos,
    out: ModelFolder,
    given: SfmOptions,
    run: RunFolder = None,
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
    mapper: MapperChoice = "incremental",
    poses: Poses = None,
    continued: Continued = None,
    min_images: MinImages = 3,
    threads: Threads = -1,
    seed: Seed = 0,
    max_deviation: MaxDeviation = None,
    overwrite: options.Overwrite = False,
    dry_run: DryRun = False,
) -> int:
    """Reconstruct cameras and 3D points with COLMAP, from photos or from a run of `matcher collection`.

    Photos are matched first: every pair of up to 100, else --similar 30. The same command continues a run.
    """
    choice = camera_choice(camera, camera_model, cameras, rig)
    _check_first(out, overwrite, poses, continued, choice, mapper)
    given = with_tiles(given) if tiles else given
    wanted = choose_pairs(pairs, exhaustive, sequential=sequential, similar=similar, preemptive=preemptive)
    mapping = _mapping(mapper, min_images, threads, seed, max_deviation, overwrite, choice, poses)
    selection = dict(include=include or (), exclude=exclude or ())
    sources = dict(masks=masks, features=features)
    if continued is not None:
        beside = any((*selection.values(), *sources.values(), restart, dry_run, _asked(given) - _BESIDE_RUN))
        return add_photos(continued, source, out, run, wanted, _how(given, workers), mapping, beside=beside)
    if is_run(source):
        _refuse_matching(wanted, restart, _asked(given), run, workers, *sources.values())
        return _from_run(source, out, selection, mapping, dry_run)
    sources |= {**selection, "restart": restart}
    return _from_photos(source, run, out, given, wanted, workers, sources, mapping, dry_run)


def _from_photos(
    photos: Path,
    run: Path | None,
    out: Path,
    given: dict[str, Any],
    wanted: dict[str, Any],
    workers: int | None,
    how: dict[str, Any],
    mapping: dict[str, Any],
    dry_run: bool,
) -> int:
    """Match photos and reconstruct, or print what would be done; `how`: as of `Collection.add_images`."""
    run = apart_from(out, run or out.with_name(f"{out.name}-run"))
    found = _find_photos(photos, how, mapping["choice"])
    if dry_run:
        return preview_photos(found, run, out, wanted, LIMITS)
    matched, opened = _match(photos, run, given, wanted, workers, how)
    return max(matched, _reconstruct(run, out, found.names()[0], mapping, opened))


def _mapping(*values: Any) -> dict[str, Any]:
    """The options of `reconstruct`, and the poses for `_reconstruct` to read."""
    names = ("mapper", "min_images", "threads", "seed", "max_deviation", "overwrite", "choice", "poses")
    return dict(zip(names, values, strict=True))


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
    from matcher.sfm.reconstruct import check_mapper, read_given_poses

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


def _asked(given: dict[str, Any]) -> set[str]:
    """Options of the preset that differ from what they are where none is given."""
    return {name for name, value in given.items() if value != _ALWAYS.get(name)}


def _how(given: dict[str, Any], workers: int | None) -> dict[str, Any]:
    """What a run that is continued is opened with."""
    return {"workers": workers, **{name: given[name] for name in _BESIDE_RUN & given.keys()}}


def _refuse_matching(*values: object) -> None:
    if any(value is not None and value is not False and value not in ({}, set()) for value in values):
        raise typer.BadParameter("RUN_DIR is already matched; matching options apply only to photos")


def _find_photos(images: Path, how: dict[str, Any], choice: CameraChoice) -> FeatureSource:
    """The photos of a reconstruction; `UsageError` for too few of them, or cameras that do not fit."""
    from matcher.collection.sources import Selection, check_masks
    from matcher.errors import UsageError
    from matcher.export.colmap import check_used
    from matcher.export.hloc import find_source

    selection = Selection.parse(how["include"], how["exclude"])
    source = find_source(images, how["masks"], how["features"], selection)
    check_masks(source)
    count = len(source.names()[0])
    if choice.rig is not None:
        choice.rig.frames(source.names()[0])
    check_used(choice, source.names()[0])
    if count < 2:
        raise UsageError(f"a reconstruction needs at least two photos, and {images} holds {count}")
    return source


def _match(
    images: Path,
    run: Path,
    given: dict[str, Any],
    wanted: dict[str, Any],
    workers: int | None,
    how: dict[str, Any],
) -> tuple[int, Collection]:
    """Match a folder of photos, with the defaults of a reconstruction; the exit code and the collection."""
    from matcher.collection.collection import Collection
    from matcher.loading import takes
    from matcher.presets import PRESETS, configure

    preset, sizes = given["preset"], {"max_keypoints": MAX_KEYPOINTS, "resize": RESIZE}
    defaults = {name: sizes[name] for name in sizes if "tiles" not in given and takes(preset, name)}
    if how["features"] is not None:
        defaults.pop("max_keypoints", None)
    elif preset in PRESETS:
        extractor = configure(PRESETS[preset], {"frontend": given.get("frontend")}).extractor
        defaults |= {"keep": KEEP} if extractor.kind == "sift" else {}
    opened = Collection.open(run, workers=workers, **(defaults | given))
    enter_images(opened, images, **how)
    return match_pairs(opened, wanted, LIMITS), opened


def _from_run(run: Path, out: Path, selection: dict[str, Any], mapping: dict[str, Any], dry_run: bool) -> int:
    """Reconstruct the selected images of a run, or print what would be done; returns the exit code."""
    from matcher.collection.sources import Selection
    from matcher.collection.store import Store

    with Store.open(run) as store:
        counts = store.counts()
        names = Selection.parse(**selection).apply(image.name for image in store.images())
    if mapping["choice"].rig is not None:
        mapping["choice"].rig.frames(names)
    if not dry_run:
        return _reconstruct(run, out, names, mapping)
    show(f"images: {len(names)} of {counts.images} in {run}")
    show(f"pairs: {counts.pairs_done} matched, {counts.pairs_waiting} waiting, {counts.pairs_failed} failed")
    show(f"would create {out}")
    return 0


def _reconstruct(
    run: Path, out: Path, names: Sequence[str], mapping: dict[str, Any], opened: Collection | None = None
) -> int:
    """Reconstruct these images of a run, print statistics and return the exit code.

    `opened`: where given, it matches more pairs for images that get no pose.
    """
    from matcher.collection.store import Store
    from matcher.sfm.reconstruct import read_given_poses, reconstruct

    poses = mapping.pop("poses")
    given = None if poses is None else read_given_poses(poses)
    with Store.open(run) as store:
        how = dict(only=names, poses=given, **mapping)
        if opened is None or given is not None:
            made = reconstruct(store, out, **how)
        else:
            with further_pairs(opened) as on_incomplete:
                made = reconstruct(store, out, on_incomplete=on_incomplete, **how)
        for line in summary_lines(made, resized_scale(store)):
            show(line)
    return PARTIAL if made.largest.registered < made.images or made.export.left_out else 0


# --- sfm_preview: What `matcher sfm --dry-run` prints for photos.


def preview_photos(
    source: FeatureSource, run: Path, out: Path, wanted: dict[str, Any], limits: dict[str, int]
) -> int:
    """Print what would be matched and reconstructed."""
    from matcher.collection.sources import check_masks, default_choice

    names, _ = source.names()
    masked = check_masks(source)
    show(f"images: {len(names)}" + ("" if masked is None else f", {masked} with a mask"))
    if wanted:
        ((method, value),) = wanted.items()
        show(f"pairs: --{method.replace('file', 'pairs')}" + ("" if value is True else f" {value}"))
    else:
        show(f"pairs: {suggestion(default_choice(len(names), **limits), len(names))}")
    show(f"would {'continue' if is_run(run) else 'create'} {run}, then create {out}")
    return 0


# --- other_models: `matcher localize --pictures`: the map of a model that another program made.


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
    from matcher.errors import UsageError
    from matcher.sfm.growing import find_run

    try:
        own = find_run(model)
    except UsageError:
        made = model.resolve().with_name(f"{model.resolve().name}-map")
    else:
        raise UsageError(f"{model} has features of its pictures in {own}: leave --pictures out")
    if made.exists():
        _check_same(made, model)
        return made
    say(f"{model}: its map is made from {pictures}, with the model's poses, and kept in {made}")
    given = {name: value for name, value in loading.items() if value is not None}
    with results_as_notices():
        sfm(pictures, made, {"preset": options.DEFAULT_PRESET, "upright": True, **given}, run, poses=model)
    return made


def _check_same(made: Path, model: Path) -> None:
    """Refuse a map whose poses are not, or no longer, those of the model."""
    import numpy as np

    from matcher.errors import UsageError
    from matcher.sfm.reconstruct import read_given_poses

    kept, poses = (read_given_poses(each).cam_from_world for each in (made, model))
    if any(name not in poses or not np.allclose(pose, poses[name]) for name, pose in kept.items()):
        raise UsageError(
            f"{made} was not made from the poses that {model} has now: delete it, and it is made again"
        )
    say(f"{made} is the map of {len(kept)} of the {len(poses)} pictures of {model}")
