"""Rigs in the mapping; run in COLMAP's process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_FEWEST = 50  # verified matches between the pictures of a frame to begin with
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
    found = sorted((row for row in found if row[0] >= _FEWEST), key=lambda row: (-row[0], row[1]))
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
