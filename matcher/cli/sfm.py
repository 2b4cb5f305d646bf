"""`matcher sfm`: cameras and points, from photos or a run; `matcher localize`: where others were taken."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from glob import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import matcher
from matcher.cli.options import DEFAULT_PRESET, Count, check_outputs, expand_images, loading
from matcher.cli.output import PARTIAL, ProgressLines, complain, say, show
from matcher.cli.runs import CameraOptions, ImageOptions, PairOptions, match_pairs, suggestion
from matcher.errors import ImageError, UsageError, counted, few
from matcher.presets import PRESETS, configure

if TYPE_CHECKING:
    from matcher.sfm.reconstruct import Reconstruction

RESIZE, MAX_KEYPOINTS, KEEP = 2048, 2048, "largest"
_LOCALIZING = ("max_keypoints", "resize", "weights", "frontend_weights", "precision", "device")
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
    threads: Annotated[int, ("min", -1)] = -1,
    seed: Annotated[int, ("min", 0), ("max", 2**31 - 1)] = 0,
    max_deviation: Annotated[float, ("min", 1e-6)] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> int:
    """Reconstruct cameras and 3D points with COLMAP, from photos or from a run of `matcher collection`.

    Photos are matched first: every pair of up to 12, else --preemptive 30. The same command continues a run.
    The exit code is 4 if photos cannot be matched, are gone or get no pose, or if a camera is doubtful.

    Args:
        source (RUN_DIR|IMAGES): Folder of photos, or of a run.
        out (MODEL): Folder to create for the model.
        run (RUN_DIR): Folder for the matches of photos; by default MODEL-run.
        mapper: COLMAP's incremental or global (GLOMAP) mapper.
        poses (MODEL|FILE): Known poses: a COLMAP model, hloc's lines (.txt), images.txt, .json such as
            nerfstudio's. Only points are triangulated, of the photos with a pose.
        continue_ (MODEL): Add the photos to this model, in its coordinates and with its run; MODEL itself is
            kept. They must lie in the folder of its images.
        min_images (N): Discard models with fewer images.
        threads (N): COLMAP's threads; -1 or 0 uses all cores, 1 makes the result reproducible.
        seed (N): Seed of COLMAP's random numbers.
        max_deviation (PX): Leave out observations whose refined position is less certain.
        dry_run: Check the input and print what would be done, without writing anything.
    """
    from matcher.collection.schema import DATABASE
    from matcher.collection.sources import Selection, default_choice, find_source
    from matcher.collection.store import Store, gone, names_in
    from matcher.export.colmap import check_photos, check_used, import_pycolmap
    from matcher.files import check_folder
    from matcher.loading import takes
    from matcher.sfm.growing import PAIRS, continue_model, more_pairs
    from matcher.sfm.models import read_given_poses
    from matcher.sfm.reconstruct import check_mapper, names_with_pose, reconstruct

    # What could not be finished is refused before hours of matching.
    choice, known = intrinsics.choice(), None
    import_pycolmap()
    check_folder(out, overwrite=overwrite)
    if poses is not None and (continue_ is not None or choice.rig is not None or min_images != 3):
        raise typer.BadParameter("--poses are kept as they are: leave out --continue, --rig and --min-images")
    if continue_ is not None and (choice.rig is not None or min_images != 3):
        raise typer.BadParameter("a continued model keeps its rig and size: leave out --rig and --min-images")
    if poses is not None or continue_ is not None:
        check_mapper(mapper)
    if poses is not None:
        known = read_given_poses(poses)
        posed = replace(choice, known={**choice.known, **known.cameras})
        check_used(posed, known.cam_from_world)
        if choice.sharing != "auto" and known.cam_from_world.keys() <= posed.known.keys():
            raise typer.BadParameter("every photo has a camera with its pose: leave --cameras out")
    wanted, preset = pairing.chosen(), given.get("preset", DEFAULT_PRESET)
    mapping = dict(mapper=mapper, min_images=min_images, threads=threads or -1, seed=seed, choice=choice)
    mapping |= dict(max_deviation=max_deviation, overwrite=overwrite)
    progress = dict(on_progress=ProgressLines().stage, on_round=_say_round)
    asked = given.keys() - _BESIDE_RUN
    asked |= {name for name in ("masks", "features", "restart", "tiles") if getattr(sources, name)}
    if continue_ is not None:
        if asked or dry_run:
            others = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(asked)) or "--dry-run"
            raise typer.BadParameter(f"a continued model has its run's settings: leave out {others}")
        if "file" in wanted:
            raise typer.BadParameter("--pairs cannot list the pairs of a continued model; use --similar")
        how = {"workers": sources.workers, **{name: given[name] for name in _BESIDE_RUN & given.keys()}}
        mapping |= progress | {"selection": Selection.parse(**sources.selection)}
        return _finish(continue_model(continue_, source, out, run_dir=run, pairs=wanted, how=how, **mapping))
    selection, matched = Selection.parse(**sources.selection), 0
    if (source / DATABASE).is_file():
        if asked or wanted or run is not None or sources.workers is not None or _BESIDE_RUN & given.keys():
            raise typer.BadParameter("RUN_DIR is already matched; matching options apply only to photos")
        run = source
        with Store.open(run) as store:
            counts, names = store.counts(), selection.apply(image.name for image in store.images())
        check_used(choice, names)
        if dry_run:
            show(f"images: {len(names)} of {counts.images} in {source}")
            left = f"{counts.pairs_waiting} waiting, {counts.pairs_failed} failed"
            show(f"pairs: {counts.pairs_done} matched, {left}")
            show(f"would create {out}")
            return 0
    else:
        run = run or out.with_name(f"{out.name}-run")
        # A model among the photos has a plot, which would be one of them.
        among = not (known or sources.features) and out.resolve().is_relative_to(source.resolve())
        if among or run.resolve() in (out.resolve(), source.resolve()):
            raise UsageError(f"--run {run} and --out {out} must be two folders, outside that of the photos")
        selection = replace(selection, known=names_in(run))
        features, names, _, masked = find_source(source, sources.masks, sources.features, selection)
        check_used(choice, names)
        if known is not None:  # of no others points are triangulated
            posed_names = names_with_pose(names, known)
            if len(posed_names) < len(names):
                names, exactly = posed_names, [escape(name).replace("@", "[@]") for name in posed_names]
                sources = replace(sources, include=exactly, exclude=None)
        if sources.features is None:  # which may be of photos of another size, or of none
            check_photos({name: source / name for name in names}, choice if known is None else posed)
        if len(names) < 2:
            raise UsageError(f"a reconstruction needs at least two photos, and {source} holds {len(names)}")
        # Options that are others here than for two photos, where the preset takes them.
        sizes = {"max_keypoints": MAX_KEYPOINTS, "resize": RESIZE}
        defaults = {name: sizes[name] for name in sizes if not sources.tiles and takes(preset, name)}
        if sources.features is not None:
            defaults.pop("max_keypoints", None)
        elif preset in PRESETS:
            extractor = configure(PRESETS[preset], {"frontend": given.get("frontend")}).extractor
            defaults |= {"keep": KEEP} if extractor.kind == "sift" else {}
        opened = sources.opened(run, defaults | given, workers=sources.workers)
        if dry_run:
            opened.check(features, restart=sources.restart)
            show(f"images: {len(names)}" + ("" if masked is None else f", {masked} with a mask"))
            for method, value in wanted.items():
                show(f"pairs: --{method.replace('file', 'pairs')}" + ("" if value is True else f" {value}"))
            if not wanted:
                show(f"pairs: {suggestion(default_choice(len(names), **PAIRS), len(names))}")
            verb = "start anew" if sources.restart else "continue" if run.is_dir() else "create"
            show(f"would {verb} {run}, then create {out}")
            return 0
        code = sources.enter(source, opened)
        plain = preset == DEFAULT_PRESET and "max_keypoints" not in given
        if plain and not (wanted or sources.features or sources.tiles):
            fewer, all_ = ("--similar 6, ", "--exhaustive, ") if len(names) > 12 else ("", "")
            say(
                f"faster: {fewer}--max-keypoints {MAX_KEYPOINTS // 2} or, for easy photos, --preset nearest "
                f"(SIFT); more thorough: {all_}--max-keypoints {2 * MAX_KEYPOINTS} (in another --run)"
            )
        matched = max(code, match_pairs(opened, wanted, PAIRS))
        if poses is None:  # more pairs are matched for images that get no pose
            mapping["on_incomplete"] = more_pairs(opened, **progress)
    with Store.open(run) as store:
        verified = (pair.geometry for pair in islice(store.pairs(), 2000) if pair.geometry.status == "ok")
        shares = [] if run == source else sorted(geometry.inliers.mean() for geometry in verified)
        if known is None:
            intrinsics.say_lacking(choice, names)
            names = {*names, *filter(selection.takes, gone(store))}  # which are left out, and named
        made = reconstruct(store, out, only=names, poses=known, **mapping)
        # Of a castle, where SIFT does, .95; of a kitchen, where it registers 5 of 20 photos, .86.
        if shares and shares[len(shares) // 4] > 0.9 and not preset.startswith("nearest"):
            say("these photos are easy to match: SIFT (--preset nearest) would probably do, and sooner")
        settings, scale = store.settings, None
        resize = settings.get("config", {}).get("extractor", {}).get("resize")
        longest = max((max(image.size) for image in store.images()), default=0)
        if resize and longest > resize and settings.get("source", {}).get("kind") == "photos":
            scale = resize / longest
    return max(matched, _finish(made, scale))


def _say_round(images: int, pairs: int) -> None:
    """Say that more pairs are matched because some images have no pose."""
    lack = counted(images, "image has", "images have")
    say(f"{lack} no pose: {counted(pairs, 'more pair')} matched, then all is mapped again")


def _finish(made: Reconstruction, scale: float | None = None) -> int:
    """Print the statistics; `scale`: resized / stored size, where it is not 1. The exit code."""
    from matcher.sfm.reconstruct import PLOT

    model = made.largest
    error = f"{model.mean_reprojection_error:.3f} px of the stored image"
    if scale is not None:
        error += f", {model.mean_reprojection_error * scale:.3f} px of the resized image"
    for line in (*made.export.notes, *(f"left out: {reason}" for reason in made.export.left_out)):
        show(line)
    show(f"registered images: {model.registered} of {made.images}")
    if without := made.unregistered:
        show(f"not registered: {few(without)}{' (summary.json names all)' * (len(without) > 5)}")
    show(f"points: {model.points}, observations: {model.observations}")
    show(f"mean track length: {model.mean_track_length:.2f}")
    show(f"mean reprojection error: {error}")
    if model.doubtful:
        camera, cameras = model.cameras[model.doubtful[0]], f"the cameras of {few(model.doubtful)}"
        numbers = " ".join(f"{value:.4g}" for value in camera["params"])
        show(f"doubtful, as improbable or unlike what was known: {cameras} ({camera['model']} {numbers})")
    if model.began_simply:
        show("lens distortion was estimated in the end, because with it fewer images were registered")
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
    return PARTIAL if without or made.export.left_out or model.doubtful else 0


def map_of(model: Path, pictures: Path, run: Path | None, given: dict[str, Any]) -> Path:
    """The folder of our map of a COLMAP model, beside it; made where there is none, with all poses kept.
    Errors are those of `sfm`, and `UsageError`: a model with its own run, a map of other poses or
    pictures."""
    import numpy as np

    from matcher.collection.store import Store
    from matcher.sfm.models import find_run, read_given_poses, whole_model

    try:
        own = find_run(model)
    except UsageError:
        whole = whole_model(model.resolve())
        part = f"-{model.resolve().name}" if whole != model.resolve() and model.resolve().name != "0" else ""
        made = whole.with_name(f"{whole.name}{part}-map")
    else:
        raise UsageError(f"{model} has features of its pictures in {own}: leave --pictures out")
    if not made.exists():
        say(f"{model}: its map is made from {pictures}, with the model's poses, and kept in {made}")
        with redirect_stdout(sys.stderr):  # which is of the results of the command
            sfm(pictures, made, {"preset": DEFAULT_PRESET, **given}, run=run, poses=model)
        return made
    with Store.open(run or find_run(made)) as store:
        if (folder := store.image_folder).resolve() != pictures.resolve():
            raise UsageError(f"{made} was made from {folder}, not {pictures}: delete it, or give that folder")
    kept, poses = (read_given_poses(each).cam_from_world for each in (made, model))
    if any(name not in poses or not np.allclose(pose, poses[name]) for name, pose in kept.items()):
        raise UsageError(f"{made} was not made from the poses that {model} has now: delete it, then repeat")
    say(f"{made} is the map of {len(kept)} of the {len(poses)} pictures of {model}")
    return made


# --- Where photos were taken, from a model and the features of its images.


def localize(
    model: Path,
    photos: list[Path],
    /,
    given: loading(only=_LOCALIZING),
    output: Path | None = None,
    pictures: Path | None = None,
    run: Path | None = None,
    camera: str | None = None,
    rig: Path | None = None,
    masks: Path | None = None,
    features: Path | None = None,
    pairs: Path | None = None,
    neighbours: Count | None = None,
    plot: Path | None = None,
    recording: Path | None = None,
    refine: bool = True,
    overwrite: bool = False,
    json_: bool = False,
) -> int:
    """Find where photos were taken, from a model and the features of its images.

    A photo of another place gets no pose, and the reason is printed; then the exit code is 4.

    Args:
        model (MODEL): Folder of a model that `matcher sfm` wrote, or of `matcher track --map`; with
            --pictures, a COLMAP model of any program.
        photos (PHOTOS...): Photos, or folders of photos.
        output (FILE.txt|.tum|.kitti|.json): Save the poses: hloc's lines (.txt), COLMAP's images.txt (of that
            name), a trajectory (.tum, .kitti) or everything (.json).
        pictures (DIR): Pictures of a MODEL that another program made. The first time its map is made as by
            `matcher sfm DIR --poses MODEL --out MODEL-map`, and kept there.
        run (RUN_DIR): Run with the features of MODEL; by default its own. Another preset may match them
            there.
        camera (fx,fy,cx,cy|MODEL,w,h,…|FILE): Intrinsics in stored pixels, of all photos or by name; those of
            others come from EXIF, from the map, or are estimated. {CAMERAS}
        rig (FILE): Cameras that are fixed to each other, as COLMAP's rig_config.json, in the units of the map
            (a MODEL made with --rig holds one); photos of one moment are localised together.
        features (FILE.h5): Keypoints and descriptors of the photos in hloc's HDF5 layout, for a MODEL made of
            such ones.
        pairs (FILE): Match each photo with the images of the map that hloc's list names for it, not with
            similar ones.
        neighbours (N): Match a photo with at most N images; by default 10, or all that --pairs names.
        plot (DIR): Draw each photo beside the map image that it matches best.
        recording (FILE.rrd): Save a rerun recording: points and cameras of the map, each photo and its
            camera.
        refine: Refine keypoints on the images of the map; without it poses are less exact.
    """
    from matcher.cameras import (
        POSE_SUFFIXES,
        Camera,
        check_pose_names,
        parse_cameras,
        read_rig_config,
        write_named_poses,
    )
    from matcher.collection.sources import HlocFeatures
    from matcher.export.colmap import CameraChoice, check_photos, check_used, import_pycolmap
    from matcher.files import check_folder
    from matcher.images import find_masks
    from matcher.localization.map import localize_photos, read_partners
    from matcher.localization.sparse_map import LocalizationConfig
    from matcher.sfm.models import other_parts
    from matcher.viz.recording import import_rerun

    for name, value in {"--masks": masks, "--rig": rig, "--pictures": pictures}.items():
        if features is not None and value is not None:
            raise UsageError(f"{name} needs keypoints of our own, and --features gives others; leave one out")
    named = expand_images(photos)
    cameras = {} if camera is None else parse_cameras(camera, "--camera")
    if isinstance(cameras, Camera):
        cameras = dict.fromkeys(named, cameras)
    check_used(choice := CameraChoice(known=cameras, source=camera or ""), named)
    if features is None:
        check_photos(named, choice)
    masked = {} if masks is None else find_masks(masks, named, "the photos")
    fixed = None if rig is None else read_rig_config(rig)
    import_pycolmap()
    # Where photos lack a pose, KITTI's lines have no names to tell whose they are.
    with_names = output and (output.with_suffix(".json") if output.suffix.lower() == ".kitti" else output)
    files = dict.fromkeys((output, with_names), POSE_SUFFIXES)
    check_outputs([*files.items(), (recording, (".rrd",))], overwrite=overwrite)
    if output is not None:
        check_pose_names(output, named)
    if recording is not None:
        import_rerun()
    if plot is not None:
        check_folder(plot, overwrite=overwrite)
    if recording is not None or plot is not None:
        from matcher.localization.plot import LocalizationRecording, plot_pose  # which import matplotlib
    if pictures is not None:
        sizes = ("max_keypoints", "resize")  # of the photos; the map has its own
        model = map_of(model, pictures, run, {key: given[key] for key in given if key not in sizes})
    for part, images in other_parts(model).items():
        say(f"a part of the model, of {counted(images, 'image')}, is not searched: {part}")
    given["config"] = LocalizationConfig(neighbours=neighbours or 10, refine=refine)
    found: dict[str, matcher.Pose] = {}
    drawn, where = True, {}

    def write(path: Path) -> None:
        have = {name: pose.cam_from_world for name, pose in found.items() if pose.ok}
        write_named_poses(path, have, {name: pose.to_dict() for name, pose in found.items()}, **where)

    with ExitStack() as stack:
        place = stack.enter_context(matcher.Map.open(model, run_dir=run, **given))
        listed = {} if pairs is None else read_partners(pairs, named, place, say, neighbours)
        record = recording and stack.enter_context(LocalizationRecording(recording, place))
        try:
            stored = None if features is None else HlocFeatures(Path(), features)
            for name, pose in localize_photos(place, named, fixed, cameras, masked, listed, stored):
                if isinstance(pose, ImageError):
                    complain(str(pose))
                    continue
                found[name] = pose
                try:
                    if record is not None:
                        record.add(name, named[name], pose)
                    if plot is not None:
                        plot.mkdir(exist_ok=True)  # not before there is something to draw
                        plot_pose(place, named[name], pose, plot / f"{name.replace('/', '_')}.png")
                except ImageError as error:  # poses need no picture
                    complain(f"{name} is not drawn: {error}")
                    drawn = False
                if json_:
                    continue
                if not pose.ok:
                    show(f"{name}: no pose ({pose.reason})")
                    continue
                x, y, z = pose.centre
                seen = f"{pose.num_inliers} of {len(pose.inliers)} matches with {len(pose.images)} images"
                seen = seen if pose.num_inliers else f"as its rig says alone, {seen}"
                show(f"{name}: at {x:.3f} {y:.3f} {z:.3f}, {seen}, {pose.seconds['total']:.2f} s")
        except BaseException:  # such as an interrupt, or a full disk for a drawing: keep the poses so far
            if output is not None and found:
                with suppress(OSError):
                    write(with_names)
                    complain(f"ended after {len(found)} of {len(named)} photos: poses are in {with_names}")
            raise
        if place.absent:
            some = f"{counted(len(place.absent), 'picture')} of the map, such as"
            some = f"{some} {place.image_path(min(place.absent))}, are gone"
            complain(f"{some}: without them poses are less exact; put them back, or give --no-refine")
        where = {} if place.georegistration is None else {"georegistration": place.georegistration}
    found = {name: found[name] for name in named if name in found}
    count = sum(pose.ok for pose in found.values())
    if output is not None:
        whole = output if count == len(named) else with_names
        write(whole)
        if whole != output:
            raise UsageError(
                f"{output}: KITTI's lines have no names, and {len(named) - count} photos have no pose; the "
                f"poses are in {whole}, or use .tum or .txt"
            )
        show(f"wrote {output}")
    if json_:
        details = {name: pose.to_dict() for name, pose in found.items()}
        show(json.dumps({"model": str(model), **where, "poses": details}, allow_nan=False), always=True)
    else:
        show(f"{count} of {len(named)} photos have a pose")
    return 0 if drawn and count == len(named) else PARTIAL
