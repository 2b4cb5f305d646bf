"""COLMAP's mapping, as a program: COLMAP ends its process on bad input, which must not be that of a user."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap

from matcher.sfm.plot import draw_model

_NEAR = 15.0  # metres, by which a receiver in a telephone is easily off


def main() -> None:
    """Read the job (JSON) from standard input, map, and write models and what is said of them.

    Job: `database`, `images` (folder that only colours are taken from; it may be absent), `output` (an
    existing folder), `result` (the file to write: what is said of each model as JSON), `mapper` (incremental,
    global, or triangulate for points only), `poses` (None, or those to start from: name → cam_from_world
    (3, 4)), `positions` (name → latitude, longitude, altitude), `origin` (None, or the position that the
    poses to start from are metres east, north and up of), `fixed_cameras` (numbers of those that are not
    refined), `all_fixed` (these are all), `min_images` of a model, `threads` (−1: all), `seed`, `verify` (run
    COLMAP's geometric verification first), `max_deviation` (None, or pixels beyond which an observation is
    uncertain), `deviations` (the file that says how uncertain each is), `rig` (None, or COLMAP's
    rig_config.json, which is completed from the largest model) and `rig_known` (whether it says how all its
    cameras are fixed to each other).
    """
    # An interrupt reaches the whole group; the parent ends this process, which must not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = json.load(sys.stdin)
    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    pycolmap.set_random_seed(job["seed"])
    if job["verify"]:
        pycolmap.geometric_verification(job["database"])
    output = Path(job["output"])
    models = _map(job)
    simple = _without_distortion(job, models)
    models = kept_models(simple or models, job)
    described = []
    for number, model in enumerate(models):
        if job["max_deviation"] is not None:
            keep_certain(model, job)
        folder = output / "sparse" / str(number)
        folder.mkdir(parents=True)
        if job["poses"] is None:
            place, unplaced = georegister(model, job["positions"])
        else:  # it stays where it is, so positions are only compared
            placed = job["origin"] is not None and number == 0
            place, unplaced = agreement(model, job["positions"], job["origin"]) if placed else None, None
        model.write_binary(str(folder))
        how = {"georegistration": place, "positions_unused": unplaced, "began_simply": bool(simple)}
        described.append(_described(model) | how)
    if models:
        if job["rig"] is not None:
            _write_calibration(models[0], Path(job["rig"]))
        models[0].export_PLY(str(output / "points.ply"))
        points = models[0].points3D.values()
        xyz = np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3)
        colours = np.array([point.color for point in points], dtype=np.uint8).reshape(-1, 3)
        seen = described[0]["cam_from_world"], described[0]["cameras"]
        draw_model(*seen, xyz, colours, output / "reconstruction.png")
    Path(job["result"]).write_text(json.dumps(described), encoding="utf-8")


def _map(job: dict[str, Any]) -> dict[int, Any]:
    """Models by the mapper of the job."""
    arguments = _arguments(job, job["database"], "work")

    def mapped() -> dict[int, Any]:
        if job["mapper"] == "global":
            return pycolmap.global_mapping(*arguments, _options(job))
        return _incremental(arguments, _options(job))

    if job["rig"] is not None and not job["rig_known"] and not _calibrate_rig(job, mapped):
        return {}
    if job["mapper"] == "global" or job["poses"] is None:
        models = mapped()
        alone = not models and job["rig"] is not None and job["mapper"] == "incremental"
        return _from_one_frame(job, arguments) if alone else models
    options = _options(job)
    start = pycolmap.triangulate_points(_posed(job, job["poses"]), *arguments, options=options)
    if job["mapper"] == "triangulate":
        return {0: start}
    models = _continued(start, arguments, options, "start")
    for model in models.values():
        _move_back(model, start, keeps_size=job["rig"] is not None)
    return models


def _move_back(model: Any, start: Any, *, keeps_size: bool) -> None:
    """Move a model to where it started: bundle adjustment moves, turns and scales the world."""
    both = sorted(start.point3D_ids() & model.point3D_ids())
    found, wanted = (np.array([each.point3D(n).xyz for n in both]).reshape(-1, 3) for each in (model, start))
    if len(both) < 4:
        return
    spread = float(np.median(np.linalg.norm(wanted - np.median(wanted, axis=0), axis=1)))
    options = pycolmap.RANSACOptions(max_error=0.02 * spread, random_seed=0)  # most points hardly move
    estimate = pycolmap.estimate_rigid3d_robust if keeps_size else pycolmap.estimate_sim3d_robust
    if (estimated := estimate(found, wanted, options)) is not None:
        moved = estimated["tgt_from_src"]
        model.transform(pycolmap.Sim3d(1.0, moved.rotation, moved.translation) if keeps_size else moved)


def _arguments(job: dict[str, Any], database: str, work: str) -> tuple[str, str, str]:
    """Database, folder of the photos (or one without any: only colours are taken from there), work folder."""
    folder = str(Path(job["output"]) / work)
    return database, job["images"] if Path(job["images"]).is_dir() else folder, folder


def _incremental(arguments: tuple[str, str, str], options: Any) -> dict[int, Any]:
    models = pycolmap.incremental_mapping(*arguments, options)
    if not models:  # along a street, every pair is one of cameras that move ahead
        options.mapper.init_max_forward_motion = 1.0
        models = pycolmap.incremental_mapping(*arguments, options)
    return models


def _continued(start: Any, arguments: tuple[str, str, str], options: Any, name: str) -> dict[int, Any]:
    folder = Path(arguments[2]) / name
    folder.mkdir()
    start.write_binary(str(folder))
    return pycolmap.incremental_mapping(*arguments, options, input_path=str(folder))


def _options(job: dict[str, Any]) -> Any:
    """Of the mapper of the job."""
    if job["mapper"] == "global":
        options = pycolmap.GlobalPipelineOptions()
        adjusting = options.mapper.bundle_adjustment  # of all cameras or of none
        adjusting.refine_focal_length = adjusting.refine_extra_params = not job["all_fixed"]
    else:
        options = pycolmap.IncrementalPipelineOptions()
        options.constant_cameras = set(job["fixed_cameras"])
    options.num_threads, options.random_seed = job["threads"], job["seed"]
    options.min_model_size = job["min_images"]
    # Poses that the user gave within a rig are not refined, those that were learnt are.
    if hasattr(options, "ba_refine_sensor_from_rig"):
        options.ba_refine_sensor_from_rig = not job["rig_known"]
    else:
        options.mapper.refine_sensor_from_rig = not job["rig_known"]
    return options


def _posed(job: dict[str, Any], poses: Mapping[str, Any]) -> Any:
    """The frames of the database of which an image has a pose (3, 4), as a model without points."""
    model = pycolmap.Reconstruction()
    with pycolmap.Database.open(job["database"]) as database:
        cameras, images = database.read_all_cameras(), database.read_all_images()
        rigs, frames = database.read_all_rigs(), database.read_all_frames()
    if job["rig"] is None:
        for camera in cameras:
            model.add_camera_with_trivial_rig(camera)
        for image in images:
            if image.name in poses:
                model.add_image_with_trivial_frame(image, _rigid(poses[image.name]))
        return model
    for camera in cameras:
        model.add_camera(camera)
    for rig in rigs:
        model.add_rig(rig)
    by_number = {image.image_id: image for image in images}
    for frame in frames:
        own = [by_number[data.id] for data in frame.data_ids]
        posed = next((image for image in own if image.name in poses), None)
        if posed is None:
            continue
        model.add_frame(frame)
        for image in own:
            model.add_image(image)
        model.frame(frame.frame_id).set_cam_from_world(posed.camera_id, _rigid(poses[posed.name]))
        model.register_frame(frame.frame_id)
    return model


def _rigid(pose: Any) -> Any:
    matrix = np.array(pose, dtype=np.float64)
    return pycolmap.Rigid3d(pycolmap.Rotation3d(matrix[:, :3]), matrix[:, 3])


def kept_models(models: Mapping[int, Any], job: dict[str, Any]) -> list[Any]:
    """The models to be written, the largest first: none that is too small, or wholly in larger ones.

    COLMAP begins again with images that a model has already, and leaves models below its least size. A model
    of given poses is what was asked for, however small.
    """
    kept, covered = [], set()
    for model in sorted(models.values(), key=lambda model: -model.num_reg_images()):
        names = registered_poses(model).keys()
        if job["poses"] is not None or (len(names) >= job["min_images"] and not names <= covered):
            kept.append(model)
            covered |= names
    return kept


def registered_poses(model: Any) -> dict[str, np.ndarray]:
    """cam_from_world (3, 4) of the registered images by name."""
    images = [model.image(number) for number in model.reg_image_ids()]
    return {image.name: image.cam_from_world().matrix() for image in images}


def adjust(model: Any, fixed_cameras: Iterable[int], threads: int) -> None:
    """Adjust all registered images, points and cameras of a model but the fixed ones, in place."""
    images = [model.image(number) for number in model.reg_image_ids()]
    config, options = pycolmap.BundleAdjustmentConfig(), pycolmap.BundleAdjustmentOptions()
    options.print_summary = options.refine_sensor_from_rig = False
    options.ceres.solver_options.num_threads = threads
    for image in images:
        config.add_image(image.image_id)
    for number in set(fixed_cameras) & {image.camera_id for image in images}:
        config.set_constant_cam_intrinsics(number)
    config.fix_gauge(pycolmap.BundleAdjustmentGauge.TWO_CAMS_FROM_WORLD)
    pycolmap.create_default_bundle_adjuster(options, config, model).solve()


def _described(model: Any) -> dict[str, Any]:
    """Statistics of a model for the summary, and the data for its plot."""
    images = [model.image(number) for number in model.reg_image_ids()]
    cameras = {image.name: model.camera(image.camera_id) for image in images}
    return {
        "registered": len(images),
        "points": model.num_points3D(),
        "observations": model.compute_num_observations(),
        "mean_track_length": model.compute_mean_track_length(),
        "mean_reprojection_error": model.compute_mean_reprojection_error(),
        "cam_from_world": {name: pose.tolist() for name, pose in registered_poses(model).items()},
        "cameras": {
            name: {"model": c.model.name, "size": [c.width, c.height], "params": c.params.tolist()}
            for name, c in cameras.items()
        },
    }


# --- Positions of photos


def georegister(model: Any, positions: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Move a model to metres east, north and up of the first photo's position.

    Returns:
        The origin and how well positions and cameras agree; None where too few do, and nothing is changed.
        And why positions, if there are any, are not used.
    """
    names = sorted({model.image(number).name for number in model.reg_image_ids()} & positions.keys())
    if len(names) < 4:  # three place a model, and one confirms it
        return None, f"they are {len(names)}, and 4 are needed" if names else None
    given = np.array([positions[name] for name in names], dtype=np.float64)
    metres = np.asarray(pycolmap.GPSTransform().ellipsoid_to_enu(given, *given[0]))
    spread = np.linalg.svd(metres - metres.mean(axis=0), compute_uv=False)
    if spread[0] < _NEAR:
        return None, f"they lie within {_NEAR:g} m of each other, which a receiver is easily off"
    if spread[1] < 0.05 * spread[0]:
        return None, "they lie on one line, which does not say how the model is turned about it"
    ransac = pycolmap.RANSACOptions(max_error=_NEAR, random_seed=0)
    found = pycolmap.align_reconstruction_to_locations(model, names, metres, 4, ransac)
    if found is None:
        return None, f"fewer than 4 agree with the cameras to {_NEAR:g} m"
    model.transform(found)
    return agreement(model, positions, given[0].tolist()), None


def agreement(model: Any, positions: Mapping[str, Any], origin: list[float]) -> dict[str, Any] | None:
    """How well the positions of photos agree with a model that is in metres east, north and up of an origin.

    Arguments are those of `georegister`; the origin is a position, too. Returns the origin, how many
    positions agree and their median error; None where no image has a position.
    """
    images = {model.image(number).name: model.image(number) for number in model.reg_image_ids()}
    if not (names := sorted(images.keys() & positions.keys())):
        return None
    given = np.array([positions[name] for name in names], dtype=np.float64)
    metres = np.asarray(pycolmap.GPSTransform().ellipsoid_to_enu(given, *origin))
    errors = np.linalg.norm([images[name].projection_center() for name in names] - metres, axis=1)
    agreeing = {"images": int((errors < _NEAR).sum()), "median_error_metres": float(np.median(errors))}
    return {"origin": list(origin), **agreeing}  # latitude, longitude, altitude of (0, 0, 0)


# --- Rigs


def _calibrate_rig(job: dict[str, Any], mapped: Callable[[], dict[int, Any]]) -> bool:
    """Give the database its rigs, with the poses within them that a model without rigs has.

    Returns whether there is a model to learn from.

    Raises:
        ValueError: in no frame of the model two cameras of a rig have a pose.
    """
    with pycolmap.Database.open(job["database"]) as database:
        database.clear_frames()
        database.clear_rigs()
    if not (models := mapped()):
        return False
    largest = max(models.values(), key=lambda model: model.num_reg_images())
    with pycolmap.Database.open(job["database"]) as database:
        pycolmap.apply_rig_config(pycolmap.read_rig_config(job["rig"]), database, largest)
        rigs = database.read_all_rigs()
    if any(pose is None for rig in rigs for pose in rig.non_ref_sensors.values()):
        raise ValueError(
            "the file of the rig does not say how its cameras are fixed to each other, and pictures of one "
            "moment were not registered together: add cam_from_rig_rotation and cam_from_rig_translation"
        )
    return True


def _from_one_frame(job: dict[str, Any], arguments: tuple[str, str, str]) -> dict[int, Any]:
    """Models that begin with the points that the cameras of a rig see at one moment.

    COLMAP begins with two frames that see points from clearly different directions. A rig that only moves
    ahead, as on a car, has none, but the pictures of one frame give points at once. Three frames are tried,
    those whose own pictures agree most.
    """
    starts = []
    with pycolmap.Database.open(job["database"]) as database:
        names = {image.image_id: image.name for image in database.read_all_images()}
        for frame in database.read_all_frames():
            own = sorted(data.id for data in frame.data_ids)
            pairs = [(i, j) for i in own for j in own if i < j and database.exists_two_view_geometry(i, j)]
            count = sum(len(database.read_two_view_geometry(*pair).inlier_matches) for pair in pairs)
            if count >= 50:
                starts.append((-count, names[own[0]]))
    for number, (_, name) in enumerate(sorted(starts)[:3]):
        options = _options(job)
        posed = _posed(job, {name: np.eye(4)[:3]})
        start = pycolmap.triangulate_points(posed, *arguments, options=options)
        models = _continued(start, arguments, options, f"frame{number}")
        if models := {key: model for key, model in models.items() if model.num_reg_frames() > 1}:
            return models
    return {}


def _write_calibration(model: Any, path: Path) -> None:
    """Write how cameras are fixed to each other in a model, in its units, into the file of the rig."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    images = [model.image(number) for number in model.reg_image_ids()]
    for each in (camera for rig in rows for camera in rig["cameras"] if not camera.get("ref_sensor")):
        own = next((image for image in images if image.name.startswith(each["image_prefix"])), None)
        if own is not None:
            pose = model.rig(own.frame.rig_id).sensor_from_rig(model.camera(own.camera_id).sensor_id)
            x, y, z, w = pose.rotation.quat.tolist()
            each |= {"cam_from_rig_rotation": [w, x, y, z]}
            each |= {"cam_from_rig_translation": pose.translation.tolist()}
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


# --- Lens distortion: until a model holds many images, its parameters fit errors, and no further image fits.


def _without_distortion(job: dict[str, Any], models: dict[int, Any]) -> dict[int, Any]:
    """Models whose cameras got their distortion at the end, where so more images were registered."""
    if job["mapper"] != "incremental" or job["poses"] is not None or job["rig"] is not None:
        return {}
    with pycolmap.Database.open(job["database"]) as database:
        rich = any(len(c.extra_params_idxs()) > 1 for c in database.read_all_cameras())
        if not rich or _most_images(models) >= 0.5 * database.num_images():
            return {}
    (Path(job["output"]) / "work" / "simpler").mkdir()
    options = _options(job)
    options.ba_refine_extra_params = False
    others = _incremental(_arguments(job, job["database"], "work/simpler"), options)
    if _most_images(others) <= _most_images(models):
        return {}
    for model in others.values():
        for _ in range(2):
            adjust(model, job["fixed_cameras"], job["threads"])
            # COLMAP's own limits: pixels, and degrees between rays.
            pycolmap.ObservationManager(model).filter_all_points3D(4.0, 1.5)
        model.update_point_3d_errors()
    return others


def _most_images(models: Mapping[int, Any]) -> int:
    return max((model.num_reg_images() for model in models.values()), default=0)


# --- Uncertain observations


def keep_certain(model: Any, job: dict[str, Any]) -> None:
    """Leave observations out of a model whose refined position is uncertain, and adjust it to the others.

    Those with a deviation above `max_deviation` pixels go; so do those that were not refined (NaN) where a
    track has more than one, for one is the reference of the others. An image keeps all where fewer than 15
    would be left.
    """
    with np.load(job["deviations"]) as stored:
        deviation = {name: stored[name] for name in stored.files}
    images = {number: model.image(number) for number in model.reg_image_ids()}
    unrefined = {
        number: sum(
            bool(np.isnan(deviation[name][each.point2D_idx]))
            for each in point.track.elements
            if (name := model.image(each.image_id).name) in deviation
        )
        for number, point in model.points3D.items()
    }
    for number, image in images.items():
        if (given := deviation.get(image.name)) is None:
            continue
        points = {i: point.point3D_id for i, point in enumerate(image.points2D) if point.has_point3D()}
        go = [
            i
            for i, point in points.items()
            if (unrefined[point] > 1 if np.isnan(given[i]) else given[i] > job["max_deviation"])
        ]
        if len(points) - len(go) < 15:
            continue
        for i in go:
            if model.image(number).points2D[i].has_point3D():  # it may be gone with another observation
                model.delete_observation(number, i)
    if job["mapper"] != "triangulate":
        adjust(model, job["fixed_cameras"], job["threads"])
    model.update_point_3d_errors()


if __name__ == "__main__":
    main()
