"""COLMAP's mapping, as a program: COLMAP ends its process on bad input, which must not be that of a user."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap

from matcher.export.colmap import as_rigid
from matcher.sfm.models import poses_of, registered

_NEAR = 15.0  # metres, by which a receiver in a telephone is easily off
Job = Mapping[str, Any]  # see `_mapped` in `reconstruct.py`
Models = Mapping[int, Any]


def main() -> None:
    """Read the job (JSON, made by `reconstruct`) from standard input, map, write models and a result."""
    # An interrupt reaches the whole group; the parent ends this process, which must not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = json.load(sys.stdin)
    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    pycolmap.set_random_seed(job["seed"])
    if job["verify"]:
        pycolmap.geometric_verification(job["database"])
    output, described = Path(job["output"]), []
    models = _map(job)
    simple = _without_distortion(job, models)
    models = kept_models(simple or models, job)
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
        cameras = {image.name: model.camera(image.camera_id) for image in registered(model)}
        described.append(
            {
                "registered": len(cameras),
                "points": model.num_points3D(),
                "observations": model.compute_num_observations(),
                "mean_track_length": model.compute_mean_track_length(),
                "mean_reprojection_error": model.compute_mean_reprojection_error(),
                "cam_from_world": {name: pose[:3].tolist() for name, pose in poses_of(model).items()},
                "cameras": {
                    name: {"model": c.model.name, "size": [c.width, c.height], "params": c.params.tolist()}
                    for name, c in cameras.items()
                },
                "georegistration": place,
                "positions_unused": unplaced,
                "doubtful": doubtful_images(model, job),
                "began_simply": bool(simple),
            }
        )
    if models:
        if job["rig"] is not None:
            _write_calibration(models[0], Path(job["rig"]))
        models[0].export_PLY(str(output / "points.ply"))
    Path(job["result"]).write_text(json.dumps(described), encoding="utf-8")


def _map(job: Job) -> Models:
    def mapped() -> Models:
        if job["mapper"] == "global":
            return pycolmap.global_mapping(job["database"], job["images"], job["work"], _options(job))
        return _incremental(job, _options(job))

    if job["rig"] is not None and not job["rig_known"] and not _calibrate_rig(job, mapped):
        return {}
    if job["mapper"] == "global" or job["poses"] is None:
        models = mapped()
        alone = not models and job["rig"] is not None and job["mapper"] == "incremental"
        return _from_one_frame(job) if alone else models
    start = _triangulated(job, job["poses"])
    if job["mapper"] == "triangulate":
        return {0: start}
    models = _continued(job, start, "start")
    for model in models.values():
        _move_back(model, start, keeps_size=job["rig"] is not None)
    return models


def _incremental(job: Job, options: Any, work: str = "") -> Models:
    arguments = job["database"], job["images"], str(Path(job["work"]) / work)
    models = pycolmap.incremental_mapping(*arguments, options)
    if not models:  # along a street, every pair is one of cameras that move ahead
        options.mapper.init_max_forward_motion = 1.0
        models = pycolmap.incremental_mapping(*arguments, options)
    if job["min_images"] > 2 or job["two_views"]:
        return models
    # Two images that hang together with no third: other images keep the models that they have without these.
    known = {image.name for model in models.values() for image in registered(model)}
    job = {**job, "two_views": True}
    (Path(job["work"]) / work / "two").mkdir(exist_ok=True)
    others = _incremental(job, _options(job), f"{work}/two")
    apart = [m for m in others.values() if known.isdisjoint(image.name for image in registered(m))]
    return dict(enumerate([*models.values(), *apart]))


def _triangulated(job: Job, poses: Mapping[str, Any]) -> Any:
    """A model of the frames of the database of which an image has a pose (3, 4), with their points."""
    model, options = pycolmap.Reconstruction(), pycolmap.DatabaseCacheOptions()
    options.load_all_images = True
    with pycolmap.Database.open(job["database"]) as database:
        model.load(pycolmap.DatabaseCache.create(database, options))
    for image in model.images.values():
        if image.name in poses and not image.frame.has_pose():
            image.frame.set_cam_from_world(image.camera_id, as_rigid(poses[image.name]))
            model.register_frame(image.frame_id)
    model.tear_down()  # of all others
    given = model, job["database"], job["images"], job["work"]
    found = pycolmap.triangulate_points(*given, options=_options(job))
    if found.num_points3D() == 0 and not job["two_views"]:  # no three images hang together
        return _triangulated({**job, "two_views": True}, poses)
    return found


def _continued(job: Job, start: Any, name: str) -> Models:
    folder = Path(job["work"]) / name
    folder.mkdir()
    start.write_binary(str(folder))
    arguments = job["database"], job["images"], job["work"], _options(job)
    return pycolmap.incremental_mapping(*arguments, input_path=str(folder))


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


def _options(job: Job) -> Any:
    """Of the mapper of the job; poses that the user gave within a rig are not refined, learnt ones are."""
    if job["mapper"] == "global":
        options = pycolmap.GlobalPipelineOptions()
        adjusting = options.mapper.bundle_adjustment  # of all cameras or of none
        adjusting.refine_focal_length = adjusting.refine_extra_params = not job["all_fixed"]
        options.mapper.refine_sensor_from_rig = not job["rig_known"]
        if job["two_views"]:
            options.mapper.track_min_num_views_per_track = 2
            options.mapper.global_positioning.min_num_view_per_track = 2
            adjusting.min_track_length = 2
            options.mapper.retriangulation.ignore_two_view_tracks = False
    else:
        options = pycolmap.IncrementalPipelineOptions()
        options.constant_cameras = set(job["fixed_cameras"])
        options.ba_refine_sensor_from_rig = not job["rig_known"]
        options.triangulation.ignore_two_view_tracks = not job["two_views"]
    options.num_threads, options.random_seed = job["threads"], job["seed"]
    options.min_model_size = job["min_images"]
    return options


def kept_models(models: Models, job: Job) -> list[Any]:
    """The models to be written, the largest first: none without points, too small, or wholly in larger ones.
    COLMAP leaves such; nor of two images alone whose matches fit several poses. A model of given poses is
    what was asked for, however small."""
    kept, covered, undecided = [], set(), list(map(set, job["undecided"]))
    for model in sorted(models.values(), key=lambda model: -model.num_reg_images()):
        names = {image.name for image in registered(model)}
        if model.num_points3D() == 0 or (job["poses"] is None and names in undecided):
            continue
        if job["poses"] is not None or (len(names) >= job["min_images"] and not names <= covered):
            kept.append(model)
            covered |= names
    return kept


def adjust(model: Any, fixed_cameras: Iterable[int], threads: int) -> None:
    """Adjust all registered images, points and cameras of a model but the fixed ones, in place."""
    config, options = pycolmap.BundleAdjustmentConfig(), pycolmap.BundleAdjustmentOptions()
    options.print_summary = options.refine_sensor_from_rig = False
    options.ceres.solver_options.num_threads = threads
    for image in registered(model):
        config.add_image(image.image_id)
        if image.camera_id in fixed_cameras:
            config.set_constant_cam_intrinsics(image.camera_id)
    config.fix_gauge(pycolmap.BundleAdjustmentGauge.TWO_CAMS_FROM_WORLD)
    pycolmap.create_default_bundle_adjuster(options, config, model).solve()


def georegister(model: Any, positions: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Move a model to metres east, north and up of the first photo's position, where enough agree. The origin
    and how well positions and cameras agree, or None and why positions, if any, are not used."""
    names = sorted({image.name for image in registered(model)} & positions.keys())
    if len(names) < 4:  # three place a model, and one confirms it
        return None, f"they are {len(names)}, and 4 are needed" if names else None
    origin = positions[names[0]]
    metres = _metres(positions, names, origin)
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
    return agreement(model, positions, origin), None


def agreement(model: Any, positions: Mapping[str, Any], origin: list[float]) -> dict[str, Any] | None:
    """How well positions agree with a model in metres east, north and up of an origin; None without any."""
    centres = {image.name: image.projection_center() for image in registered(model)}
    if not (names := sorted(centres.keys() & positions.keys())):
        return None
    metres = _metres(positions, names, origin)
    errors = np.linalg.norm([centres[name] for name in names] - metres, axis=1)
    agreeing = {"images": int((errors < _NEAR).sum()), "median_error_metres": float(np.median(errors))}
    return {"origin": list(origin), **agreeing}  # latitude, longitude, altitude of (0, 0, 0)


def _metres(positions: Mapping[str, Any], names: list[str], origin: list[float]) -> np.ndarray:
    """(N, 3) east, north and up of the origin."""
    given = np.array([positions[name] for name in names], dtype=np.float64)
    return np.asarray(pycolmap.GPSTransform().ellipsoid_to_enu(given, *origin))


def _calibrate_rig(job: Job, mapped: Callable[[], Models]) -> bool:
    """Give the database its rigs, with the poses within them of a model without rigs, if there is one."""
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


def _from_one_frame(job: Job) -> Models:
    """Models that begin with the points that a rig's cameras see at one moment; three frames are tried.
    COLMAP begins with two frames that see points from clearly different directions. A rig that only moves
    ahead, as on a car, has none."""
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
        models = _continued(job, _triangulated(job, {name: np.eye(4)}), f"frame{number}")
        if models := {key: model for key, model in models.items() if model.num_reg_frames() > 1}:
            return models
    return {}


def _write_calibration(model: Any, path: Path) -> None:
    """Write how cameras are fixed to each other in a model, in its units, into the file of the rig."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    for each in (camera for rig in rows for camera in rig["cameras"] if not camera.get("ref_sensor")):
        prefix = each["image_prefix"]
        own = next((image for image in registered(model) if image.name.startswith(prefix)), None)
        if own is not None:
            pose = model.rig(own.frame.rig_id).sensor_from_rig(model.camera(own.camera_id).sensor_id)
            each["cam_from_rig_rotation"] = np.roll(pose.rotation.quat, 1).tolist()  # w x y z
            each["cam_from_rig_translation"] = pose.translation.tolist()
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _without_distortion(job: Job, models: Models) -> Models:
    """Models whose cameras got their lens distortion at the end, where so more images were registered: until
    a model holds many images, its parameters fit errors, and no further image fits."""
    if job["mapper"] != "incremental" or job["poses"] is not None or job["rig"] is not None:
        return {}

    def most_images(models: Models) -> int:
        return max((model.num_reg_images() for model in models.values()), default=0)

    with pycolmap.Database.open(job["database"]) as database:
        rich = any(len(c.extra_params_idxs()) > 1 for c in database.read_all_cameras())
        if not rich or most_images(models) >= 0.5 * database.num_images():
            return {}
    (Path(job["work"]) / "simpler").mkdir()
    options = _options(job)
    options.ba_refine_extra_params = False
    others = _incremental(job, options, "simpler")
    if most_images(others) <= most_images(models):
        return {}
    for model in others.values():
        for _ in range(2):
            adjust(model, job["fixed_cameras"], job["threads"])
            # COLMAP's own limits: pixels, and degrees between rays.
            pycolmap.ObservationManager(model).filter_all_points3D(4.0, 1.5)
        model.update_point_3d_errors()
    return others


def doubtful_images(model: Any, job: Job) -> list[str]:
    """Images whose estimated camera is beyond COLMAP's own limits, or half or twice as long as was known."""
    with pycolmap.Database.open(job["database"]) as database:
        before, found = {camera.camera_id: camera for camera in database.read_all_cameras()}, []
    for image in registered(model):
        camera, known = model.camera(image.camera_id), before[image.camera_id]
        ratio = camera.mean_focal_length() / known.mean_focal_length()
        far = known.has_prior_focal_length and not 0.5 < ratio < 2
        most = np.inf if camera.model.name == "FULL_OPENCV" else 1  # whose numerator and denominator cancel
        if image.camera_id not in job["fixed_cameras"] and (far or camera.has_bogus_params(0.1, 10, most)):
            found.append(image.name)
    return sorted(found)


def keep_certain(model: Any, job: Job) -> None:
    """Leave observations out whose refined position deviates by more than `max_deviation` pixels, and adjust.
    So do those that were not refined (NaN) where a track has more than one, for one is the reference of the
    others. An image keeps all where fewer than 15 would be left."""
    with np.load(job["deviations"]) as stored:
        deviation = {name: stored[name] for name in stored.files}
    seen = {
        image.image_id: [
            (i, point.point3D_id, deviation[image.name][i])
            for i, point in enumerate(image.points2D)
            if point.has_point3D()
        ]
        for image in registered(model)
        if image.name in deviation
    }
    unrefined = Counter(point for rows in seen.values() for _, point, given in rows if np.isnan(given))
    for number, rows in seen.items():
        go = [
            i
            for i, point, given in rows
            if (unrefined[point] > 1 if np.isnan(given) else given > job["max_deviation"])
        ]
        for i in go if len(rows) - len(go) >= 15 else ():
            if model.image(number).points2D[i].has_point3D():  # or it went with another observation
                model.delete_observation(number, i)
    if job["mapper"] != "triangulate":
        adjust(model, job["fixed_cameras"], job["threads"])
    model.update_point_3d_errors()


if __name__ == "__main__":
    main()
