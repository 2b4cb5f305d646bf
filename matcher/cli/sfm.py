"""`matcher sfm`: cameras and points, from photos or from a run."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli.options import DEFAULT_PRESET, loading
from matcher.cli.output import PARTIAL, ProgressLines, say, show
from matcher.cli.runs import CameraOptions, ImageOptions, PairOptions, match_pairs, suggestion
from matcher.errors import UsageError, counted

if TYPE_CHECKING:
    from matcher.sfm.reconstruct import Reconstruction

RESIZE, MAX_KEYPOINTS, KEEP = 2048, 2048, "largest"
_BESIDE_RUN = {"weights", "frontend_weights", "device"}  # options that a run does not hold


def sfm(
    source: Path,
    /,
    out: Path,
    given: loading("geometry", "further_passes", resize=RESIZE, max_keypoints=MAX_KEYPOINTS, keep=KEEP),
    pairing: PairOptions = PairOptions(),
    sources: ImageOptions = ImageOptions(),
    intrinsics: CameraOptions = CameraOptions(),
    run: Path | None = None,
    mapper: Literal["incremental", "global"] = "incremental",
    poses: Path | None = None,
    continue_: Path | None = None,
    min_images: Annotated[int, ("min", 2)] = 3,
    threads: int = -1,
    seed: int = 0,
    max_deviation: float | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> int:
    """Reconstruct cameras and 3D points with COLMAP, from photos or from a run of `matcher collection`.

    Photos are matched first: every pair of up to 12, else --preemptive 30. The same command continues a run.

    Args:
        source (RUN_DIR|IMAGES): Folder of photos, or of a run.
        out (MODEL): Folder to create for the model.
        run (RUN_DIR): Folder for the matches of photos; by default MODEL-run.
        mapper: COLMAP's incremental or global (GLOMAP) mapper.
        poses (MODEL|FILE): Known poses: a COLMAP model, hloc's lines (.txt), images.txt or .json. Only points
            are triangulated, of the photos with a pose.
        continue_ (MODEL): Add the photos to this model, in its coordinates and with its run; MODEL itself is
            kept. They must lie in the folder of its images.
        min_images (N): Discard models with fewer images.
        threads (N): COLMAP's threads; -1 uses all cores, 1 makes the result reproducible.
        seed (N): Seed of COLMAP's random numbers.
        max_deviation (PX): Leave out observations whose refined position is less certain.
        dry_run: Check the input and print what would be done, without writing anything.
    """
    from matcher.collection.schema import DATABASE
    from matcher.collection.sources import Selection
    from matcher.collection.store import Store
    from matcher.export.colmap import check_used, import_pycolmap
    from matcher.files import check_folder
    from matcher.sfm.growing import continue_model
    from matcher.sfm.models import read_given_poses
    from matcher.sfm.reconstruct import check_mapper

    # What could not be finished is refused before hours of matching.
    choice = intrinsics.choice()
    import_pycolmap()
    check_folder(out, overwrite=overwrite)
    if poses is not None and (continue_ is not None or choice.rig is not None):
        raise typer.BadParameter("--poses are kept as they are: leave out --continue and --rig, or --poses")
    if choice.rig is not None and continue_ is not None:
        raise typer.BadParameter("a continued model has the rig that it was made with; leave --rig out")
    if (start := poses or continue_) is not None:
        check_mapper(mapper)
        found = read_given_poses(start)
        if poses is not None:
            check_used(replace(choice, known=found.cameras), found.cam_from_world)
    wanted = pairing.chosen()
    mapping = dict(mapper=mapper, min_images=min_images, threads=threads, seed=seed, choice=choice)
    mapping |= dict(max_deviation=max_deviation, overwrite=overwrite)
    always = (("preset", DEFAULT_PRESET), ("device", "auto"))  # where nothing is given
    asked = {name for name, value in given.items() if (name, value) not in always} - _BESIDE_RUN
    asked |= {name for name in ("masks", "features", "restart", "tiles") if getattr(sources, name)}
    if continue_ is not None:
        if asked or any(sources.selection.values()) or dry_run:
            raise typer.BadParameter(
                "a continued model is matched with the settings of its run; leave out what selects or "
                "extracts images, --restart and --dry-run"
            )
        if "file" in wanted:
            raise typer.BadParameter("--pairs cannot list the pairs of a continued model; use --similar")
        how = {"workers": sources.workers, **{name: given[name] for name in _BESIDE_RUN & given.keys()}}
        steps = dict(run_dir=run, pairs=wanted, on_progress=ProgressLines().stage, on_round=_say_round)
        return _finish(continue_model(continue_, source, out, how=how, **steps, **mapping), None)
    if not (source / DATABASE).is_file():
        run = run or out.with_name(f"{out.name}-run")
        if run.resolve() == out.resolve():
            raise UsageError(f"--run and --out are one folder, {out}; name another one for the run")
        return _from_photos(source, run, out, given, wanted, sources, mapping, poses, dry_run)
    others = wanted or run is not None or sources.workers is not None
    if asked or others or _BESIDE_RUN - {"device"} & given.keys():
        raise typer.BadParameter("RUN_DIR is already matched; matching options apply only to photos")
    with Store.open(source) as store:
        counts = store.counts()
        names = Selection.parse(**sources.selection).apply(image.name for image in store.images())
    if choice.rig is not None:
        choice.rig.frames(names)
    if not dry_run:
        return _reconstruct(source, out, names, mapping, poses)
    show(f"images: {len(names)} of {counts.images} in {source}")
    show(f"pairs: {counts.pairs_done} matched, {counts.pairs_waiting} waiting, {counts.pairs_failed} failed")
    show(f"would create {out}")
    return 0


def _from_photos(
    photos: Path,
    run: Path,
    out: Path,
    given: dict[str, Any],
    wanted: dict[str, Any],
    sources: ImageOptions,
    mapping: dict[str, Any],
    poses: Path | None,
    dry_run: bool,
) -> int:
    """Match photos and reconstruct, or print what would be done."""
    from matcher.collection.collection import Collection
    from matcher.collection.sources import Selection, default_choice, find_source
    from matcher.collection.store import Store
    from matcher.export.colmap import check_used
    from matcher.loading import takes
    from matcher.presets import PRESETS, configure
    from matcher.sfm.growing import PAIRS

    selection = Selection.parse(**sources.selection)
    _, names, _, masked = find_source(photos, sources.masks, sources.features, selection)
    if mapping["choice"].rig is not None:
        mapping["choice"].rig.frames(names)
    check_used(mapping["choice"], names)
    if len(names) < 2:
        raise UsageError(f"a reconstruction needs at least two photos, and {photos} holds {len(names)}")
    if dry_run:
        show(f"images: {len(names)}" + ("" if masked is None else f", {masked} with a mask"))
        for method, value in wanted.items():
            show(f"pairs: --{method.replace('file', 'pairs')}" + ("" if value is True else f" {value}"))
        if not wanted:
            show(f"pairs: {suggestion(default_choice(len(names), **PAIRS), len(names))}")
        show(f"would {'continue' if run.is_dir() else 'create'} {run}, then create {out}")
        return 0
    preset, sizes = given["preset"], {"max_keypoints": MAX_KEYPOINTS, "resize": RESIZE}
    defaults = {name: sizes[name] for name in sizes if not sources.tiles and takes(preset, name)}
    if sources.features is not None:
        defaults.pop("max_keypoints", None)
    elif preset in PRESETS:
        extractor = configure(PRESETS[preset], {"frontend": given.get("frontend")}).extractor
        defaults |= {"keep": KEEP} if extractor.kind == "sift" else {}
    opened = Collection.open(run, workers=sources.workers, **(defaults | sources.with_tiles(given)))
    sources.enter(opened, photos)
    _say_alternatives(len(names), given, wanted, sources)
    matched = match_pairs(opened, wanted, PAIRS)
    with Store.open(run) as store:
        verified = (pair.geometry for pair in islice(store.pairs(), 2000) if pair.geometry.status == "ok")
        shares = sorted(geometry.inliers.mean() for geometry in verified)
    # For three quarters of the pairs .95 of a castle's matches, where SIFT does; .86 of a kitchen's, where
    # COLMAP's SIFT registers 5 of 20 photos; .54 of a beach's from the air.
    if shares and shares[len(shares) // 4] > 0.9 and not preset.startswith("nearest"):
        say("these photos are easy to match: SIFT (--preset nearest) would probably do, and sooner")
    return max(matched, _reconstruct(run, out, names, mapping, poses, opened))


def _say_alternatives(
    images: int, given: dict[str, Any], wanted: dict[str, Any], sources: ImageOptions
) -> None:
    """What a faster and a more thorough run would be, before hours of matching."""
    own = sources.features is None and not sources.tiles
    many, free = images > 12, own and "max_keypoints" not in given
    options = {
        "faster": {
            "--similar 6": many and not wanted.keys() - {"exhaustive"},
            f"--max-keypoints {MAX_KEYPOINTS // 2}": free,
            "--preset nearest (SIFT, for easy photos)": own and not given["preset"].startswith("nearest"),
        },
        "more thorough": {
            "--exhaustive": many and "exhaustive" not in wanted,
            f"--max-keypoints {2 * MAX_KEYPOINTS}": free,
        },
    }
    fitting = {how: [each for each, fits in those.items() if fits] for how, those in options.items()}
    if said := "; ".join(f"{how}: {', '.join(those)}" for how, those in fitting.items() if those):
        say(f"{said} (in another --run)")


def _reconstruct(
    run: Path, out: Path, names: Any, mapping: dict[str, Any], poses: Path | None, opened: Any = None
) -> int:
    """Reconstruct these images of a run; `opened` matches more pairs for images that get no pose."""
    from matcher.collection.store import Store
    from matcher.sfm.growing import more_pairs
    from matcher.sfm.models import read_given_poses
    from matcher.sfm.reconstruct import reconstruct

    how = dict(only=names, poses=None if poses is None else read_given_poses(poses), **mapping)
    with Store.open(run) as store:
        if opened is not None and poses is None:
            how["on_incomplete"] = more_pairs(opened, on_round=_say_round, on_progress=ProgressLines().stage)
        made, settings, scale = reconstruct(store, out, **how), store.settings, None
        resize = settings.get("config", {}).get("extractor", {}).get("resize")
        longest = max((max(image.size) for image in store.images()), default=0)
        if resize and longest > resize and settings.get("source", {}).get("kind") == "photos":
            scale = resize / longest
        return _finish(made, scale)


def _say_round(images: int, pairs: int) -> None:
    """Say that more pairs are matched because some images have no pose."""
    lack = f"{counted(images, 'image')} {'have' if images > 1 else 'has'} no pose"
    say(f"{lack}: {counted(pairs, 'more pair')} matched, then all is mapped again")


def _finish(made: Reconstruction, scale: float | None) -> int:
    """Print the statistics; `scale`: resized / stored size, where it is not 1. The exit code."""
    from matcher.sfm.reconstruct import PLOT

    model = made.largest
    error = f"{model.mean_reprojection_error:.3f} px of the stored image"
    if scale is not None:
        error += f", {model.mean_reprojection_error * scale:.3f} px of the resized image"
    for line in (*made.export.notes, *(f"left out: {reason}" for reason in made.export.left_out)):
        show(line)
    show(f"registered images: {model.registered} of {made.images}")
    show(f"points: {model.points}, observations: {model.observations}")
    show(f"mean track length: {model.mean_track_length:.2f}")
    show(f"mean reprojection error: {error}")
    if model.began_simply:
        show(
            "the mapping began without lens distortion, because with it fewer images were registered; it was "
            "estimated afterwards"
        )
    if (place := model.georegistration) is not None:
        latitude, longitude, _ = place["origin"]
        near = f"{place['images']} positions agree to {place['median_error_metres']:.1f} m (median)"
        show(f"in metres, x east, y north, z up, from {latitude:.6f}, {longitude:.6f}: {near}")
    elif model.positions_unused is not None:
        show(f"without a place or metres: positions are not used, since {model.positions_unused}")
    if others := made.models[1:]:
        shared = {name for other in others for name in other.cam_from_world} & model.cam_from_world.keys()
        where = f", of which {counted(len(shared), 'is', 'are')} in it, too" if shared else ""
        sizes = ", ".join(str(other.registered) for other in others)
        show(f"{counted(len(others), 'more model')}: {sizes} images{where}")
    show(f"wrote {made.folder} (look at {made.folder / PLOT})")
    return PARTIAL if model.registered < made.images or made.export.left_out else 0


def map_of(model: Path, pictures: Path, run: Path | None, given: dict[str, Any]) -> Path:
    """The folder of our map of a COLMAP model, beside it; made where there is none, with all poses kept.

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
        with redirect_stdout(sys.stderr):  # which is of the results of the command
            sfm(pictures, made, {"preset": DEFAULT_PRESET, **given}, run=run, poses=model)
        return made
    kept, poses = (read_given_poses(each).cam_from_world for each in (made, model))
    if any(name not in poses or not np.allclose(pose, poses[name]) for name, pose in kept.items()):
        raise UsageError(
            f"{made} was not made from the poses that {model} has now: delete it, and it is made again"
        )
    say(f"{made} is the map of {len(kept)} of the {len(poses)} pictures of {model}")
    return made
