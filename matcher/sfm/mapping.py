"""The mapping itself, run in a child process: COLMAP ends the process on bad input."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from matcher.sfm.cameras import enriched, have_few_images, keep_certain, most_images, simplified

# --- georegistration: A model in metres, east-north-up, from the positions in its photos' headers; run in
# COLMAP's process.

_FEWEST_POSITIONS = 4  # photos with a position
_NEAR = 15.0  # metres, by which a receiver in a telephone is easily off
_FLAT = 0.05  # of the largest spread: photos in one line do not say how the model is turned about it


def georegister(
    pycolmap: Any, model: Any, positions: dict[str, list[float]]
) -> tuple[dict[str, Any] | None, str | None]:
    """Move a model to metres east, north and up of the first photo's position.

    Args:
        pycolmap: the module.
        model: a `pycolmap.Reconstruction`, which is changed.
        positions: latitude, longitude and altitude by name of image.

    Returns:
        The origin and how well positions and cameras agree; None where too few do, and nothing is changed.
        And why positions, if there are any, are not used.
    """
    named = {model.image(number).name: number for number in model.reg_image_ids()}
    names = sorted(named.keys() & positions.keys())
    if len(names) < _FEWEST_POSITIONS:
        return None, f"they are {len(names)}, and {_FEWEST_POSITIONS} are needed" if names else None
    given = np.array([positions[name] for name in names], dtype=np.float64)
    metres = np.asarray(pycolmap.GPSTransform().ellipsoid_to_enu(given, *given[0]))
    spread = np.linalg.svd(metres - metres.mean(axis=0), compute_uv=False)
    if spread[0] < _NEAR:
        return None, f"they lie within {_NEAR:g} m of each other, which a receiver is easily off"
    if spread[1] < _FLAT * spread[0]:
        return None, "they lie on one line, which does not say how the model is turned about it"
    ransac = pycolmap.RANSACOptions(max_error=_NEAR, random_seed=0)
    found = pycolmap.align_reconstruction_to_locations(model, names, metres, _FEWEST_POSITIONS, ransac)
    if found is None:
        return None, f"fewer than {_FEWEST_POSITIONS} agree with the cameras to {_NEAR:g} m"
    model.transform(found)
    return agreement(pycolmap, model, positions, given[0].tolist()), None


def agreement(
    pycolmap: Any, model: Any, positions: dict[str, list[float]], origin: list[float]
) -> dict[str, Any] | None:
    """How well the positions of photos agree with a model that is in metres east, north and up of an origin.

    Args:
        pycolmap: the module.
        model: a `pycolmap.Reconstruction`.
        positions: latitude, longitude and altitude by name of image.
        origin: the same of (0, 0, 0).

    Returns:
        The origin, how many positions agree and their median error; None where no image has a position.
    """
    numbers = {model.image(number).name: number for number in model.reg_image_ids()}
    names = sorted(numbers.keys() & positions.keys())
    if not names:
        return None
    given = np.array([positions[name] for name in names], dtype=np.float64)
    metres = np.asarray(pycolmap.GPSTransform().ellipsoid_to_enu(given, *origin))
    centres = np.array([model.image(numbers[name]).projection_center() for name in names])
    errors = np.linalg.norm(centres - metres, axis=1)
    return {
        "origin": list(origin),  # latitude, longitude, altitude of (0, 0, 0); x east, y north, z up
        "images": int((errors < _NEAR).sum()),
        "median_error_metres": float(np.median(errors)),
    }


# --- rigs: Rigs in the mapping; run in COLMAP's process.

_FEWEST_MATCHES = 50  # verified matches between the pictures of a frame to begin with
_TRIED = 3  # such frames


def calibrate_rig(pycolmap: Any, job: dict[str, Any], mapped: Callable[[], dict[int, Any]]) -> bool:
    """Where the file does not say how cameras are fixed to each other, learn it from a model without rigs.

    Args:
        pycolmap: the module.
        job: of the mapping; its database is given the rigs with their poses.
        mapped: makes models from the database.

    Returns:
        Whether there is a model to learn from.

    Raises:
        ValueError: in no frame of the model two cameras of a rig have a pose.
    """
    with pycolmap.Database.open(job["database"]) as database:
        database.clear_frames()
        database.clear_rigs()
    models = mapped()
    if not models:
        return False
    largest = max(models.values(), key=lambda model: model.num_reg_images())
    configs = pycolmap.read_rig_config(job["rig"])
    with pycolmap.Database.open(job["database"]) as database:
        pycolmap.apply_rig_config(configs, database, largest)
        unknown = [rig for rig in database.read_all_rigs() if not _is_calibrated(rig)]
    if unknown:
        raise ValueError(
            "the file of the rig does not say how its cameras are fixed to each other, and pictures of one "
            "moment were not registered together: add cam_from_rig_rotation and cam_from_rig_translation"
        )
    return True


def _is_calibrated(rig: Any) -> bool:
    return all(pose is not None for pose in rig.non_ref_sensors.values())


def frames_to_begin_with(pycolmap: Any, database: Any) -> list[str]:
    """A picture of each of the frames whose own pictures agree most, best first.

    COLMAP begins with two frames that see points from clearly different directions. A rig that only moves
    ahead, as on a car, has none, but the pictures of one frame give points at once.
    """
    names = {image.image_id: image.name for image in database.read_all_images()}
    found = []
    for frame in database.read_all_frames():
        own = sorted(data.id for data in frame.data_ids)
        pairs = [(i, j) for i in own for j in own if i < j and database.exists_two_view_geometry(i, j)]
        count = sum(len(database.read_two_view_geometry(i, j).inlier_matches) for i, j in pairs)
        found.append((count, names[own[0]]))
    found = sorted((row for row in found if row[0] >= _FEWEST_MATCHES), key=lambda row: (-row[0], row[1]))
    return [name for _, name in found[:_TRIED]]


def keep_calibration(options: Any, job: dict[str, Any]) -> None:
    """Poses that the user gave within a rig are not refined, those that were learnt are."""
    if hasattr(options, "ba_refine_sensor_from_rig"):
        options.ba_refine_sensor_from_rig = not job["rig_known"]
    else:
        options.mapper.refine_sensor_from_rig = not job["rig_known"]


def posed_frames(pycolmap: Any, database: Any, poses: dict[str, list[list[float]]]) -> Any:
    """The frames of a database of which an image has a pose, as a model without points.

    Args:
        pycolmap: the module.
        database: open; all its images have rigs.
        poses: name → cam_from_world (3, 4).
    """
    model = pycolmap.Reconstruction()
    for camera in database.read_all_cameras():
        model.add_camera(camera)
    for rig in database.read_all_rigs():
        model.add_rig(rig)
    images = {image.image_id: image for image in database.read_all_images()}
    for frame in database.read_all_frames():
        own = [images[data.id] for data in frame.data_ids]
        posed = next((image for image in own if image.name in poses), None)
        if posed is None:
            continue
        model.add_frame(frame)
        for image in own:
            model.add_image(image)
        matrix = np.array(poses[posed.name], dtype=np.float64)
        rigid = pycolmap.Rigid3d(pycolmap.Rotation3d(matrix[:, :3]), matrix[:, 3])
        model.frame(frame.frame_id).set_cam_from_world(posed.camera_id, rigid)
        model.register_frame(frame.frame_id)
    return model


def write_calibration(model: Any, path: Path) -> None:
    """Write how cameras are fixed to each other in a model, in its units, into the file of the rig."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    images = [model.image(number) for number in model.reg_image_ids()]
    for each in (camera for rig in rows for camera in rig["cameras"] if not camera.get("ref_sensor")):
        own = next((image for image in images if image.name.startswith(each["image_prefix"])), None)
        if own is None:
            continue
        pose = model.rig(own.frame.rig_id).sensor_from_rig(model.camera(own.camera_id).sensor_id)
        x, y, z, w = pose.rotation.quat.tolist()
        each["cam_from_rig_rotation"] = [w, x, y, z]
        each["cam_from_rig_translation"] = pose.translation.tolist()
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


# --- mapping: The mapping itself, run in a child process: COLMAP ends the process on bad input.

RESULT = "result.json"
CLOUD = "cloud.npz"  # points (P, 3) and colours (P, 3) of the largest model
_COMPARED = 200  # cameras whose distances say how the scale has changed
_ANY_MOTION = 1.0  # share of a pair's motion that may be ahead where a model begins
_APART = 0.1  # of the largest distance; nearer cameras say little


def main() -> None:
    """Read the job (JSON) from standard input, map, write models, `RESULT` and `CLOUD` into its output.

    Job: `database`, `images` (folder that only colours are taken from; it may be absent), `output` (an
    existing folder), `mapper` (incremental, global, or triangulate for points only), `poses` (None, or those
    to start from: name → cam_from_world (3, 4)), `positions` (name → latitude, longitude, altitude), `origin`
    (None, or the position that the poses to start from are metres east, north and up of),
    `fixed_cameras` (numbers of those that are not refined), `all_fixed` (these are all),
    `min_images` of a model, `threads` (−1: all), `seed`,
    `verify` (run COLMAP's geometric verification first), `max_deviation` (None, or pixels beyond
    which an observation is uncertain), `deviations` (the file that says how uncertain each is), `rig` (None,
    or COLMAP's rig_config.json, which is completed from the largest model) and `rig_known` (whether it says
    how all its cameras are fixed to each other).
    """
    # An interrupt reaches the whole group; the parent ends this process, which must not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = json.load(sys.stdin)
    import pycolmap

    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    pycolmap.set_random_seed(job["seed"])
    if job["verify"]:
        pycolmap.geometric_verification(job["database"])
    models = _map(pycolmap, job)
    simple = _begun_simply(pycolmap, job, models)
    models = simple or models
    if job["max_deviation"] is not None:
        fixed = None if job["mapper"] == "triangulate" else job["fixed_cameras"]
        for model in models.values():
            keep_certain(
                pycolmap, model, Path(job["deviations"]), job["max_deviation"], fixed, job["threads"]
            )
    output = Path(job["output"])
    described = []
    ordered = _kept(models, job)
    for number, model in enumerate(ordered):
        folder = output / "sparse" / str(number)
        folder.mkdir(parents=True)
        place, unplaced = _place(pycolmap, model, job, number)
        model.write_binary(str(folder))
        how = {"georegistration": place, "positions_unused": unplaced, "began_simply": bool(simple)}
        described.append(_described(model) | how)
    if ordered:
        if job["rig"] is not None:
            write_calibration(ordered[0], Path(job["rig"]))
        ordered[0].export_PLY(str(output / "points.ply"))
        _write_cloud(ordered[0], output / CLOUD)
    (output / RESULT).write_text(json.dumps(described), encoding="utf-8")


def _kept(models: dict[int, Any], job: dict[str, Any]) -> list[Any]:
    """The models to be written, the largest first: none that is too small, or wholly in larger ones.

    COLMAP begins again with images that a model has already, and leaves models below its least size. A model
    of given poses is what was asked for, however small.
    """
    ordered = sorted(models.values(), key=lambda model: -model.num_reg_images())
    if job["poses"] is not None:
        return ordered
    kept, covered = [], set()
    for model in ordered:
        names = _poses(model).keys()
        if len(names) >= job["min_images"] and not names <= covered:
            kept.append(model)
            covered |= names
    return kept


def _place(
    pycolmap: Any, model: Any, job: dict[str, Any], number: int
) -> tuple[dict[str, Any] | None, str | None]:
    """Where on Earth a model is, or why not; one that is continued stays there, so it is only compared."""
    if job["poses"] is None:
        return georegister(pycolmap, model, job["positions"])
    if job["origin"] is None or number > 0:
        return None, None
    return agreement(pycolmap, model, job["positions"], job["origin"]), None


def _map(pycolmap: Any, job: dict[str, Any]) -> dict[int, Any]:
    work = Path(job["output"]) / "work"
    work.mkdir()
    arguments = (job["database"], _colours(job), str(work))

    def mapped() -> dict[int, Any]:
        """From the database alone."""
        if job["mapper"] == "global":
            return pycolmap.global_mapping(*arguments, _options(pycolmap, job))
        return _incremental(pycolmap, job, arguments)

    if job["rig"] is not None and not job["rig_known"] and not calibrate_rig(pycolmap, job, mapped):
        return {}
    if job["mapper"] == "global" or job["poses"] is None:
        models = mapped()
        alone = not models and job["rig"] is not None and job["mapper"] == "incremental"
        return _from_one_frame(pycolmap, job, arguments) if alone else models
    options = _options(pycolmap, job)
    start = pycolmap.triangulate_points(_posed(pycolmap, job), *arguments, options=options)
    if job["mapper"] == "triangulate":
        return {0: start}
    return _continued(pycolmap, start, arguments, options, rescale=job["rig"] is None)


def _colours(job: dict[str, Any]) -> str:
    """The folder of the photos, or one without any: only colours are taken from there."""
    return job["images"] if Path(job["images"]).is_dir() else str(Path(job["output"]) / "work")


def _incremental(pycolmap: Any, job: dict[str, Any], arguments: tuple[Any, ...]) -> dict[int, Any]:
    options = _options(pycolmap, job)
    models = pycolmap.incremental_mapping(*arguments, options)
    if not models:  # along a street, every pair is one of cameras that move ahead
        options.mapper.init_max_forward_motion = _ANY_MOTION
        models = pycolmap.incremental_mapping(*arguments, options)
    return models


def _begun_simply(pycolmap: Any, job: dict[str, Any], models: dict[int, Any]) -> dict[int, Any]:
    """Models that began with simpler cameras; none where these do not apply or register no more images."""
    anew = job["mapper"] == "incremental" and job["poses"] is None and job["rig"] is None
    if not anew or not have_few_images(pycolmap, models, job["database"]):
        return {}
    folder, fixed = Path(job["output"]) / "work" / "simpler", set(job["fixed_cameras"])
    folder.mkdir()
    simpler = simplified(pycolmap, job["database"], folder, fixed)
    if simpler is None:
        return {}
    others = _incremental(pycolmap, job, (str(simpler), _colours(job), str(folder)))
    if most_images(others) <= most_images(models):
        return {}
    for model in others.values():
        enriched(pycolmap, model, job["database"], fixed, job["threads"])
    return others


def _from_one_frame(pycolmap: Any, job: dict[str, Any], arguments: tuple[Any, ...]) -> dict[int, Any]:
    """Models that begin with the points that the cameras of a rig see at one moment."""
    with pycolmap.Database.open(job["database"]) as database:
        starts = frames_to_begin_with(pycolmap, database)
    for number, name in enumerate(starts):
        here = {**job, "poses": {name: np.eye(4)[:3].tolist()}}
        options = _options(pycolmap, job)
        start = pycolmap.triangulate_points(_posed(pycolmap, here), *arguments, options=options)
        folder = Path(arguments[2]) / f"frame{number}"
        folder.mkdir()
        start.write_binary(str(folder))
        models = pycolmap.incremental_mapping(*arguments, options, input_path=str(folder))
        models = {key: model for key, model in models.items() if model.num_reg_frames() > 1}
        if models:
            return models
    return {}


def _options(pycolmap: Any, job: dict[str, Any]) -> Any:
    """Of the mapper of the job."""
    if job["mapper"] == "global":
        options = pycolmap.GlobalPipelineOptions()
        adjusting = options.mapper.bundle_adjustment  # of all cameras or of none
        adjusting.refine_focal_length = adjusting.refine_extra_params = not job["all_fixed"]
    else:
        options = pycolmap.IncrementalPipelineOptions()
        options.constant_cameras = set(job["fixed_cameras"])
    options.num_threads = job["threads"]
    options.random_seed = job["seed"]
    options.min_model_size = job["min_images"]
    keep_calibration(options, job)
    return options


def _posed(pycolmap: Any, job: dict[str, Any]) -> Any:
    """The images of the database that have a given pose, as a model without points."""
    model = pycolmap.Reconstruction()
    with pycolmap.Database.open(job["database"]) as database:
        if job["rig"] is not None:
            return posed_frames(pycolmap, database, job["poses"])
        for camera in database.read_all_cameras():
            model.add_camera_with_trivial_rig(camera)
        for image in database.read_all_images():
            if (pose := job["poses"].get(image.name)) is not None:
                matrix = np.array(pose, dtype=np.float64)
                rigid = pycolmap.Rigid3d(pycolmap.Rotation3d(matrix[:, :3]), matrix[:, 3])
                model.add_image_with_trivial_frame(image, rigid)
    return model


def _continued(
    pycolmap: Any, start: Any, arguments: tuple[Any, ...], options: Any, *, rescale: bool
) -> dict[int, Any]:
    """The model with the other images registered, in the same world coordinates; a rig keeps its size."""
    folder = Path(arguments[2]) / "start"
    folder.mkdir()
    start.write_binary(str(folder))
    models = pycolmap.incremental_mapping(*arguments, options, input_path=str(folder))
    before = _poses(start)
    for model in models.values():
        after = _poses(model)
        both = sorted(before.keys() & after.keys())
        if len(both) > 1:
            # Bundle adjustment moves, turns and scales the world.
            back = similarity(*(np.array([poses[name] for name in both]) for poses in (after, before)))
            scale, turn, shift = back
            scale = scale if rescale else 1.0
            model.transform(pycolmap.Sim3d(scale, pycolmap.Rotation3d(turn), shift))
    return models


def _poses(model: Any) -> dict[str, np.ndarray]:
    """cam_from_world (3, 4) of the registered images by name."""
    images = [model.image(number) for number in model.reg_image_ids()]
    return {image.name: image.cam_from_world().matrix() for image in images}


def similarity(found: np.ndarray, wanted: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Scale, rotation (3, 3) and translation (3,) that bring a world back, from its cameras' poses.

    The rotation is that of the cameras, so they may lie on a line; those that have turned most do not count.

    Args:
        found: (N, 3, 4) cam_from_world in the world that has moved, N ≥ 2.
        wanted: (N, 3, 4) of the same cameras before.
    """
    turns = np.swapaxes(wanted[:, :, :3], 1, 2) @ found[:, :, :3]
    mean = _mean_rotation(turns)
    angles = np.linalg.norm(turns - mean, axis=(1, 2))
    turn = _mean_rotation(turns[angles <= np.median(angles)])
    theirs, ours = (-np.einsum("nji,nj->ni", poses[:, :, :3], poses[:, :, 3]) for poses in (found, wanted))
    theirs = theirs @ turn.T
    some = np.linspace(0, len(ours) - 1, min(len(ours), _COMPARED)).astype(int)
    first, second = np.triu_indices(len(some), 1)
    lengths = [np.linalg.norm(c[some[first]] - c[some[second]], axis=1) for c in (theirs, ours)]
    apart = lengths[0] > _APART * lengths[0].max()
    scale = float(np.median(lengths[1][apart] / lengths[0][apart])) if apart.any() else 1.0
    return scale, turn, np.median(ours - scale * theirs, axis=0)


def _mean_rotation(turns: np.ndarray) -> np.ndarray:
    u, _, v = np.linalg.svd(turns.sum(axis=0))
    return u @ np.diag([1.0, 1.0, np.linalg.det(u @ v)]) @ v


def _write_cloud(model: Any, path: Path) -> None:
    points = model.points3D.values()
    np.savez(
        path,
        points=np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3),
        colours=np.array([point.color for point in points], dtype=np.uint8).reshape(-1, 3),
    )


def _described(model: Any) -> dict[str, Any]:
    """Statistics of a model for the summary, and the data for its plot."""
    registered = [model.image(number) for number in model.reg_image_ids()]
    poses = {image.name: image.cam_from_world().matrix().tolist() for image in registered}
    return {
        "registered": len(registered),
        "points": model.num_points3D(),
        "observations": model.compute_num_observations(),
        "mean_track_length": model.compute_mean_track_length(),
        "mean_reprojection_error": model.compute_mean_reprojection_error(),
        "cam_from_world": poses,
        "cameras": {
            image.name: {"model": camera.model.name, "size": [camera.width, camera.height]}
            | {"params": camera.params.tolist()}
            for image in registered
            for camera in [model.camera(image.camera_id)]
        },
    }


if __name__ == "__main__":
    main()
