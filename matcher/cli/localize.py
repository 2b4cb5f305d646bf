"""`matcher localize`: where photos were taken, from a model and the features of its images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matcher.cli.options import Count, check_outputs, expand_images, loading
from matcher.cli.output import PARTIAL, complain, show
from matcher.errors import ImageError, UsageError

if TYPE_CHECKING:
    from matcher.cameras import Camera, RigConfig
    from matcher.localization.map import Map
    from matcher.localization.pose import Pose
_LOADING = ("max_keypoints", "resize", "weights", "frontend_weights", "precision", "device")


def localize(
    model: Path,
    photos: list[Path],
    /,
    given: loading(only=_LOADING),
    output: Path | None = None,
    pictures: Path | None = None,
    run: Path | None = None,
    camera: str | None = None,
    rig: Path | None = None,
    masks: Path | None = None,
    features: Path | None = None,
    neighbours: Count = 10,
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
        neighbours (N): Match a photo with at most N images of the map.
        plot (DIR): Draw each photo beside the map image that it matches best.
        recording (FILE.rrd): Save a rerun recording: points and cameras of the map, each photo and its
            camera.
        refine: Refine keypoints on the images of the map; without it poses are less exact.
    """
    from matcher.cameras import POSE_SUFFIXES, Camera, parse_cameras, read_rig_config
    from matcher.export.colmap import import_pycolmap
    from matcher.files import check_folder
    from matcher.images import find_masks
    from matcher.localization.map import Map
    from matcher.localization.sparse_map import LocalizationConfig
    from matcher.viz.recording import import_rerun

    for name, value in {"--masks": masks, "--rig": rig, "--pictures": pictures}.items():
        if features is not None and value is not None:
            raise UsageError(f"{name} needs keypoints of our own, and --features gives others; leave one out")
    named = expand_images(photos)
    cameras = {} if camera is None else parse_cameras(camera, "--camera")
    if isinstance(cameras, Camera):
        cameras = dict.fromkeys(named, cameras)
    elif camera is not None and not cameras.keys() & named.keys():
        raise UsageError(f"{camera} has the camera of none of the photos, such as {next(iter(named))}")
    masked = {} if masks is None else find_masks(masks, named, "the photos")
    fixed = None if rig is None else read_rig_config(rig)
    import_pycolmap()
    kept = [] if output is None else [output, _with_names(output)]  # if a photo has no pose
    outputs = [*((path, POSE_SUFFIXES) for path in dict.fromkeys(kept)), (recording, (".rrd",))]
    check_outputs(outputs, overwrite=overwrite)
    if recording is not None:
        import_rerun()
    if plot is not None:
        check_folder(plot, overwrite=overwrite)
    if pictures is not None:
        from matcher.cli.sfm import map_of

        sizes = ("max_keypoints", "resize")  # of the photos; the map has its own
        model = map_of(model, pictures, run, {key: given[key] for key in given if key not in sizes})
    given["config"] = LocalizationConfig(neighbours=neighbours, refine=refine)
    found: dict[str, Pose] = {}
    drawn = True
    with Map.open(model, run_dir=run, **given) as place, _recording(recording, place) as record:
        try:
            for name, pose in _poses(place, named, cameras, fixed, features, masked):
                if isinstance(pose, ImageError):
                    complain(str(pose))
                    continue
                found[name] = pose
                drawn &= _draw(place, name, named[name], pose, plot, record)
                if not json_:
                    show(_line(name, pose))
        except BaseException:  # such as an interrupt, or a full disk for a drawing: keep the poses so far
            if output is not None and found:
                with suppress(OSError):
                    _write(_with_names(output), found, {})
                    ended = f"ended after {len(found)} of {len(named)} photos"
                    complain(f"{ended}: poses are in {_with_names(output)}")
            raise
        if place.absent:
            complain(
                f"{len(place.absent)} pictures of the map are gone, such as "
                f"{place.image_path(place.absent[0])}: poses are less exact, since keypoints were not "
                "refined on them; put them back, or give --no-refine"
            )
        where = {} if place.georegistration is None else {"georegistration": place.georegistration}
    found = {name: found[name] for name in named if name in found}
    if output is not None:
        _write(output, found, where)
        show(f"wrote {output}")
    count = sum(pose.ok for pose in found.values())
    if json_:
        details = {name: pose.to_dict() for name, pose in found.items()}
        show(json.dumps({"model": str(model), **where, "poses": details}, allow_nan=False), always=True)
    else:
        show(f"{count} of {len(named)} photos have a pose")
    return 0 if drawn and count == len(named) else PARTIAL


def _recording(path: Path | None, place: Map) -> AbstractContextManager[Any]:
    if path is None:
        return nullcontext()
    from matcher.localization.plot import LocalizationRecording  # which imports matplotlib

    return LocalizationRecording(path, place)


def _poses(
    place: Map,
    named: dict[str, Path],
    cameras: dict[str, Camera],
    rig: RigConfig | None,
    features: Path | None,
    masks: dict[str, Path],
) -> Iterator[tuple[str, Pose | ImageError]]:
    """One by one, from the photos or from their features in a file, or the photos of each moment together."""
    from matcher.collection.sources import HlocFeatures
    from matcher.localization.map import localize_frames

    if rig is not None:
        yield from localize_frames(place, named, rig, cameras, masks)
        return
    stored = None if features is None else HlocFeatures(Path(), features)
    for name, path in named.items():
        try:
            given = path if stored is None else stored.read(name, place.pipeline).features
            query = place.query(given, cameras.get(name), mask=masks.get(name))
            query.path = path  # whose header may know the camera
            yield name, place.poses_of([query])[0]
        except ImageError as error:
            yield name, error


def _draw(place: Map, name: str, path: Path, pose: Pose, plot: Path | None, record: Any) -> bool:
    """Add a photo to drawing and recording; whether its picture could be read, which poses do not need."""
    from matcher.localization.plot import plot_pose

    try:
        if record is not None:
            record.add(name, path, pose)
        if plot is not None:
            plot.mkdir(exist_ok=True)  # not before there is something to draw
            plot_pose(place, path, pose, plot / f"{name.replace('/', '_')}.png")
    except ImageError as error:
        complain(f"{name} is not drawn: {error}")
        return False
    return True


def _with_names(output: Path) -> Path:
    """The file of poses that some photos lack: KITTI's lines have no names, so JSON instead."""
    return output.with_suffix(".json") if output.suffix.lower() == ".kitti" else output


def _write(output: Path, found: dict[str, Pose], where: dict[str, Any]) -> None:
    """The poses that were found, in the format that the name asks for; JSON says `where` the map is."""
    from matcher.cameras import write_named_poses

    poses = {name: pose.cam_from_world for name, pose in found.items() if pose.ok}
    facts = {name: pose.to_dict() for name, pose in found.items()}
    whole = output if len(poses) == len(found) else _with_names(output)
    write_named_poses(whole, poses, facts, **where)
    if whole != output:
        raise UsageError(
            f"{output}: KITTI's lines have no names, and {len(found) - len(poses)} photos have no pose; the "
            f"poses are in {whole}, or use .tum or .txt"
        )


def _line(name: str, pose: Pose) -> str:
    """The pose of a photo, or why it has none, as a line to print."""
    if not pose.ok:
        return f"{name}: no pose ({pose.reason})"
    x, y, z = pose.centre
    seen = f"{pose.num_inliers} of {len(pose.inliers)} matches with {len(pose.images)} images"
    return f"{name}: at {x:.3f} {y:.3f} {z:.3f}, {seen}, {pose.seconds['total']:.2f} s"
