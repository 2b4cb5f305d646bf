"""`matcher localize`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matcher.cli import options
from matcher.cli.collection import Masks
from matcher.cli.options import PARTIAL, complain, show

if TYPE_CHECKING:
    import numpy as np

    from matcher.cameras import Camera, RigConfig
    from matcher.errors import ImageError
    from matcher.localization.map import Map
    from matcher.localization.plot import LocalizationRecording
    from matcher.localization.pose import Pose


# --- localized: The poses of photos, written and printed, for `matcher localize`.


def write_poses(output: Path, found: dict[str, Pose], where: dict[str, Any]) -> None:
    """The poses that were found, in the format that the name asks for; JSON says `where` the map is."""
    from matcher.errors import UsageError
    from matcher.poses import write_named_poses

    poses, facts = _accepted(found), details(found)
    if output.suffix.lower() == ".kitti" and len(poses) < len(found):
        kept = output.with_suffix(".json")
        write_named_poses(kept, poses, facts, **where)
        raise UsageError(
            f"{output}: KITTI's lines have no names, and {len(found) - len(poses)} photos have no pose; the "
            f"poses are in {kept}, or use .tum or .txt"
        )
    write_named_poses(output, poses, facts, **where)
    show(f"wrote {output}")


def show_poses(
    found: dict[str, Pose], where: dict[str, Any], *, model: Path, count: int, as_json: bool
) -> None:
    """Print all that is known of the photos as JSON, or how many of `count` have a pose."""
    if as_json:
        rows = {"model": str(model), **where, "poses": details(found)}
        show(json.dumps(rows, allow_nan=False), always=True)
    else:
        show(f"{sum(pose.ok for pose in found.values())} of {count} photos have a pose")


def say_absent(place: Map) -> None:
    """Say how many pictures of the map were missing where keypoints should have been refined on them."""
    if place.absent:
        first = place.image_path(place.absent[0])
        complain(
            f"{len(place.absent)} pictures of the map are gone, such as {first}: poses are less exact, "
            "since keypoints were not refined on them; put them back, or give --no-refine"
        )


@contextmanager
def kept_poses(output: Path | None, found: dict[str, Pose], count: int) -> Iterator[None]:
    """Where the work is ended early, by an interrupt or a full disk for a drawing, write the poses so far."""
    from matcher.poses import write_named_poses

    try:
        yield
    except BaseException:
        if output is not None and found:
            kept = output.with_suffix(".json") if output.suffix.lower() == ".kitti" else output
            with suppress(OSError):
                write_named_poses(kept, _accepted(found), details(found))
                complain(f"ended after {len(found)} of {count} photos, whose poses are in {kept}")
        raise


def _accepted(found: dict[str, Pose]) -> dict[str, np.ndarray]:
    return {name: pose.cam_from_world for name, pose in found.items() if pose.ok}


def details(found: dict[str, Pose]) -> dict[str, dict[str, Any]]:
    """All that is known of each photo, for JSON."""
    return {name: pose.to_dict() for name, pose in found.items()}


def line_of(name: str, pose: Pose) -> str:
    """The pose of a photo, or why it has none, as a line to print."""
    if not pose.ok:
        return f"{name}: no pose ({pose.reason})"
    x, y, z = pose.centre
    seen = f"{pose.num_inliers} of {len(pose.inliers)} matches with {len(pose.images)} images"
    return f"{name}: at {x:.3f} {y:.3f} {z:.3f}, {seen}, {pose.seconds['total']:.2f} s"


# --- localize: `matcher localize`.

ModelFolder = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Folder of a model that `matcher sfm` wrote, or of `matcher track --map`; with --pictures, a "
        "COLMAP model of any program.",
    ),
]
Pictures = Annotated[
    Path | None,
    typer.Option(
        "--pictures",
        metavar="DIR",
        help="Pictures of a MODEL that another program made. The first time its map is made as by `matcher "
        "sfm DIR --poses MODEL --out MODEL-map`, and kept there.",
    ),
]
Photos = Annotated[
    list[Path], typer.Argument(metavar="PHOTOS...", show_default=False, help="Photos, or folders of photos.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.txt|.tum|.kitti|.json",
        help="Save the poses: hloc's lines (.txt), COLMAP's images.txt (of that name), a trajectory (.tum, "
        ".kitti) or everything (.json).",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN_DIR",
        help="Run with the features of MODEL; by default its own. Another preset may match them there.",
    ),
]
CameraText = Annotated[
    str | None,
    typer.Option(
        metavar="fx,fy,cx,cy|FILE",
        help="Intrinsics in stored pixels, of all photos or, in a FILE of lines NAME MODEL WIDTH HEIGHT "
        "PARAMS, of each; those of others come from EXIF, from the map, or are estimated.",
    ),
]
RigFile = Annotated[
    Path | None,
    typer.Option(
        "--rig",
        metavar="FILE",
        help="Cameras that are fixed to each other, as COLMAP's rig_config.json, in the units of the map "
        "(a MODEL made with --rig holds one); photos of one moment are localised together.",
    ),
]
FeaturesFile = Annotated[
    Path | None,
    typer.Option(
        "--features",
        metavar="FILE.h5",
        help="Keypoints and descriptors of the photos in hloc's HDF5 layout, for a MODEL made of such ones.",
    ),
]
Neighbours = Annotated[
    int, typer.Option(metavar="N", min=1, help="Match a photo with at most N images of the map.")
]
PlotFolder = Annotated[
    Path | None,
    typer.Option("--plot", metavar="DIR", help="Draw each photo beside the map image that it matches best."),
]
RecordingPath = Annotated[
    Path | None,
    typer.Option(
        "--recording",
        metavar="FILE.rrd",
        help="Save a rerun recording: points and cameras of the map, each photo and its camera.",
    ),
]


def localize(
    model: ModelFolder,
    photos: Photos,
    output: Output = None,
    pictures: Pictures = None,
    run: RunFolder = None,
    camera: CameraText = None,
    rig: RigFile = None,
    masks: Masks = None,
    features: FeaturesFile = None,
    neighbours: Neighbours = 10,
    plot: PlotFolder = None,
    recording: RecordingPath = None,
    weights: options.Weights = None,
    frontend_weights: options.FrontEndWeights = None,
    precision: options.Precision = None,
    device: options.Device = "auto",
    no_refine: options.NoRefine = False,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Find where photos were taken, from a model and the features of its images.

    A photo of another place gets no pose, and the reason is printed; then the exit code is 4.
    """
    from matcher.localization.map import Map
    from matcher.localization.sparse_map import LocalizationConfig

    named = _expand(photos)
    cameras, masked = _cameras(camera, named), _masks(masks, named, features)
    fixed = _rig(rig, features)
    if pictures is not None and features is not None:
        raise typer.BadParameter("the map of --pictures has features of our own; leave --features out")
    _check(output, plot, recording, overwrite)
    chosen = dict(weights=weights, frontend_weights=frontend_weights, precision=precision, device=device)
    model = model if pictures is None else _map_of(model, pictures, run, chosen)
    chosen["config"] = LocalizationConfig(neighbours=neighbours, refine=not no_refine)
    opened = Map.open(model, run_dir=run, **chosen)
    with opened as place, _recording(recording, place) as record:
        poses = _poses(place, named, cameras, fixed, features, masked)
        with kept_poses(output, found := {}, len(named)):
            drawn = _localize(place, named, poses, plot, record, found, quiet=as_json)
        say_absent(place)
    found = {name: found[name] for name in named if name in found}
    where = {} if place.georegistration is None else {"georegistration": place.georegistration}
    if output is not None:
        write_poses(output, found, where)
    show_poses(found, where, model=model, count=len(named), as_json=as_json)
    return 0 if drawn and sum(pose.ok for pose in found.values()) == len(named) else PARTIAL


def _localize(
    place: Map,
    named: dict[str, Path],
    poses: Iterator[tuple[str, Pose | ImageError]],
    plot: Path | None,
    record: LocalizationRecording | None,
    found: dict[str, Pose],
    *,
    quiet: bool,
) -> bool:
    """Fill in the poses by name, without photos that cannot be read; whether every drawing was made."""
    from matcher.errors import ImageError
    from matcher.localization.plot import plot_pose

    drawn = True
    for name, pose in poses:
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
        except ImageError as error:  # images are needed only here, and poses are not lost for them
            complain(f"{name} is not drawn: {error}")
            drawn = False
        if not quiet:
            show(line_of(name, pose))
    return drawn


def _poses(
    place: Map,
    named: dict[str, Path],
    cameras: dict[str, Camera],
    rig: RigConfig | None,
    features: Path | None,
    masks: dict[str, Path],
) -> Iterator[tuple[str, Pose | ImageError]]:
    """One by one, from the photos or from their features in a file, or the photos of each moment together."""
    from matcher.errors import ImageError
    from matcher.export.hloc import HlocFeatures
    from matcher.localization.map import localize_frames

    if rig is not None:
        yield from localize_frames(place, named, rig, cameras, masks)
        return
    stored = None if features is None else HlocFeatures(Path(), features)
    for name, path in named.items():
        try:
            given = path if stored is None else stored.query(name, place.localizer.pipeline)
            query = place.query(given, cameras.get(name), mask=masks.get(name))
            query.path = path  # whose header may know the camera
            yield name, place.localizer.localize(query)
        except ImageError as error:
            yield name, error


def _expand(photos: list[Path]) -> dict[str, Path]:
    """Photos by name: the path below the given folder, or the file's name."""
    from matcher.images import find_images

    found: dict[str, Path] = {}
    for given in photos:
        paths = find_images(given) if given.is_dir() else [given]
        start = given if given.is_dir() else given.parent
        for path in paths:
            name = path.relative_to(start).as_posix()
            found[str(path) if name in found else name] = path
    return found


def _cameras(text: str | None, named: dict[str, Path]) -> dict[str, Camera]:
    """The cameras by name of photo."""
    from matcher.cameras import read_camera_list
    from matcher.errors import UsageError

    if text is None:
        return {}
    if not Path(text).is_file():
        return dict.fromkeys(named, options.parse_camera(text, "--camera"))
    found = read_camera_list(text)
    if not found.keys() & named.keys():
        raise UsageError(f"{text} has the camera of none of the photos, such as {next(iter(named))}")
    return found


def _masks(folder: Path | None, named: dict[str, Path], features: Path | None) -> dict[str, Path]:
    """The masks by name of photo."""
    from matcher.errors import UsageError
    from matcher.images import find_masks

    if folder is None:
        return {}
    if features is not None:
        raise UsageError(
            "masks and features cannot be combined: masks only affect the extraction of keypoints"
        )
    return find_masks(folder, named, "the photos")


def _rig(path: Path | None, features: Path | None) -> RigConfig | None:
    """The rig that is given, if any."""
    from matcher.cameras import read_rig_config

    if path is not None and features is not None:
        raise typer.BadParameter("--rig needs the photos themselves; give it or --features")
    return None if path is None else read_rig_config(path)


def _recording(path: Path | None, place: Map) -> AbstractContextManager[LocalizationRecording | None]:
    """What is written beside the poses, if anything; the file appears only if all goes well."""
    from matcher.localization.plot import LocalizationRecording

    return nullcontext() if path is None else LocalizationRecording(path, place)


def _map_of(model: Path, pictures: Path, run: Path | None, loading: dict[str, Any]) -> Path:
    from matcher.cli.sfm import map_of

    return map_of(model, pictures, run, loading)


def _check(output: Path | None, plot: Path | None, recording: Path | None, overwrite: bool) -> None:
    from matcher.export.colmap import import_pycolmap
    from matcher.export.output import check_folder
    from matcher.files import check_output
    from matcher.poses import SUFFIXES
    from matcher.viz.recording import import_rerun

    import_pycolmap()
    if output is not None:
        check_output(output, SUFFIXES, overwrite=overwrite)
        if output.suffix.lower() == ".kitti":  # if a photo has no pose, the others are kept there
            check_output(output.with_suffix(".json"), SUFFIXES, overwrite=overwrite)
    if recording is not None:
        check_output(recording, (".rrd",), overwrite=overwrite)
        import_rerun()
    if plot is not None:
        check_folder(plot, overwrite=overwrite)
