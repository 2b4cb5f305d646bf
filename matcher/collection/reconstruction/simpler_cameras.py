"""Mapping that begins with simpler cameras: many unknown parameters can keep a model from growing at all.

Until a model holds many images, parameters of lens distortion fit its errors, and no further image fits it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from matcher.collection.reconstruction.adjustment import adjust

SIMPLE = "SIMPLE_RADIAL"
# Models with the same projection and more parameters, each with the place of k1 among its own.
_RICHER = {"RADIAL": 3, "OPENCV": 4, "FULL_OPENCV": 4}
_FEW = 0.5  # of the images
_MAX_ERROR = 4.0  # pixels, and degrees between rays: COLMAP's limits for observations and points
_MIN_ANGLE = 1.5


def have_few_images(pycolmap: Any, models: dict[int, Any], database: str) -> bool:
    """Whether the largest model holds less than half of a database's images."""
    with pycolmap.Database.open(database) as stored:
        return most_images(models) < _FEW * stored.num_images()


def most_images(models: dict[int, Any]) -> int:
    """Registered images of the largest model."""
    return max((model.num_reg_images() for model in models.values()), default=0)


def simplified(pycolmap: Any, database: str, folder: Path, fixed: set[int]) -> Path | None:
    """A copy of a database, in `folder`, with simple cameras; None if no camera can be any simpler.

    Args:
        pycolmap: the module.
        database: its path.
        folder: that exists.
        fixed: numbers of cameras whose parameters are known.
    """
    with pycolmap.Database.open(database) as stored:
        cameras = stored.read_all_cameras()
    rich = [camera for camera in cameras if camera.model.name in _RICHER and camera.camera_id not in fixed]
    if not rich:
        return None
    path = folder / "simpler.db"
    shutil.copyfile(database, path)
    with pycolmap.Database.open(str(path)) as copied:
        for camera in rich:
            simple = pycolmap.Camera.create_from_model_name(
                camera.camera_id, SIMPLE, camera.mean_focal_length(), camera.width, camera.height
            )
            simple.has_prior_focal_length = camera.has_prior_focal_length
            copied.update_camera(simple)
    return path


def enriched(pycolmap: Any, model: Any, database: str, fixed: set[int], threads: int) -> None:
    """Give a model, in place, the kinds of cameras of its database, and adjust everything to them.

    Args:
        pycolmap: the module.
        model: of the database that `simplified` made.
        database: the one that it was made from.
        fixed: as for `simplified`.
        threads: −1: all.
    """
    with pycolmap.Database.open(database) as stored:
        wanted = {camera.camera_id: camera.model.name for camera in stored.read_all_cameras()}
    for number, camera in model.cameras.items():
        if camera.model.name == wanted[number]:
            continue
        simple = np.array(camera.params)  # f, cx, cy, k
        richer = pycolmap.Camera.create_from_model_name(
            number, wanted[number], simple[0], camera.width, camera.height
        )
        values = np.array(richer.params)
        values[list(richer.principal_point_idxs())] = simple[1:3]
        values[_RICHER[wanted[number]]] = simple[3]
        camera.model, camera.params = richer.model, values
    for _ in range(2):
        adjust(pycolmap, model, fixed, threads)
        pycolmap.ObservationManager(model).filter_all_points3D(_MAX_ERROR, _MIN_ANGLE)
    model.update_point_3d_errors()
