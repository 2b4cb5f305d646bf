"""Mapping that begins with simpler cameras: many unknown parameters can keep a model from growing at all.

Until a model holds many images, parameters of lens distortion fit its errors, and no further image fits it.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.collection.store import RefinedKeypoints
from matcher.errors import UsageError
from matcher.sfm.mapping_process import adjust

if TYPE_CHECKING:
    from matcher.cameras import Camera
    from matcher.collection.store import Store


# --- simpler_cameras: Mapping that begins with simpler cameras: many unknown parameters can keep a model
# from growing at all.

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


# --- doubted_camera: Whether the camera that the user gave fits the photos: told from the fundamental
# matrices of their pairs.

_OCTAVES, _STEPS = 3, 8  # the given focal length is made longer and shorter by; steps of each
_PAIRS, _MOST = 8, 2000  # that tell it at least; more say no more
_INLIERS = 50  # of a pair whose matrix is exact enough
_BETTER = 2.0  # times as unequal as with another focal length, singular values are a doubt
_UNEQUAL = 0.015  # so far the singular values are apart at least; less can be noise
_OTHER = 1.25  # times as long or short, at least, as the given one


def better_focal(store: Store, camera: Camera, only: Collection[str] | None = None) -> float | None:
    """About the focal length (pixels) that the pairs of a run imply, where they contradict the given one.

    None where they agree with it, or say too little.
    """
    matrices = []
    for pair in store.pairs():
        selected = only is None or (pair.name0 in only and pair.name1 in only)
        found = pair.geometry
        exact = found.status == "ok" and np.count_nonzero(found.inliers) >= _INLIERS
        if selected and exact and found.kind == "fundamental" and found.matrix is not None:
            matrices.append(found.matrix)
        if len(matrices) == _MOST:
            break
    if len(matrices) < _PAIRS:
        return None
    factor = _better_factor(np.array(matrices), camera)
    return None if factor is None else factor * camera.fx


def _better_factor(matrices: np.ndarray, camera: Camera) -> float | None:
    """The factor of the focal length with which fundamental matrices (P, 3, 3) are essential ones."""
    factors = 2.0 ** (np.arange(-_OCTAVES * _STEPS, _OCTAVES * _STEPS + 1) / _STEPS)
    unequal = np.array([np.median(_inequality(matrices, camera, factor)) for factor in factors])
    best = int(np.argmin(unequal))
    given = unequal[_OCTAVES * _STEPS]
    inside = 0 < best < len(factors) - 1  # at the end, none of them fits
    far = abs(np.log(factors[best])) >= np.log(_OTHER)
    clear = given >= max(_UNEQUAL, _BETTER * unequal[best])
    return float(factors[best]) if inside and far and clear else None


def _inequality(matrices: np.ndarray, camera: Camera, factor: float) -> np.ndarray:
    """(P,) in [0, 1]: how unequal both singular values of KᵀFK are."""
    k = np.array([[factor * camera.fx, 0, camera.cx], [0, factor * camera.fy, camera.cy], [0, 0, 1]])
    values = np.linalg.svd(k.T @ matrices @ k, compute_uv=False)
    return (values[:, 0] - values[:, 1]) / (values[:, 0] + values[:, 1])


# --- certainty: Observations whose refined position is uncertain are left out of a finished model, which is
# adjusted again.

_FEWEST = 15  # certain observations of an image; with fewer it keeps all


def deviations(refined: RefinedKeypoints) -> np.ndarray:
    """(N,) standard deviation of keypoints along their less certain axis, stored pixels; NaN: not refined."""
    largest = np.linalg.eigvalsh(refined.covariances.astype(np.float64))[:, 1]
    return np.where(refined.refined, np.sqrt(np.maximum(largest, 0)), np.nan)


def write_deviations(store: Store, path: Path) -> None:
    """The deviations of a run's refined keypoints, for `keep_certain`.

    Raises:
        UsageError: they are not refined.
    """
    found = {image.name: store.refined_keypoints(image.name) for image in store.images()}
    known = {name: deviations(each) for name, each in found.items() if each is not None}
    if not known:
        raise UsageError(
            "max_deviation needs refined keypoints, and this run has none: its preset or refine=False left "
            "them as they were found, or its photos are not in their folder"
        )
    np.savez(path, **known)


def keep_certain(
    pycolmap: Any, model: Any, path: Path, limit: float, fixed_cameras: Iterable[int] | None, threads: int
) -> None:
    """Leave uncertain observations out of a model, and adjust it to the others.

    Those with a deviation above `limit` pixels go; so do those that were not refined where a track has more
    than one, for one is the reference of the others. A point without two observations left goes with them.

    Args:
        pycolmap: the module.
        model: changed in place.
        path: from `write_deviations`.
        limit: in stored pixels.
        fixed_cameras: numbers of those that are not refined; None: nothing but observations is changed.
        threads: -1: all.
    """
    with np.load(path) as stored:
        deviation = {name: stored[name] for name in stored.files}
    images = [model.image(number) for number in model.reg_image_ids()]
    unrefined = {
        number: _count_unrefined(model, point, deviation) for number, point in model.points3D.items()
    }
    for image in images:
        given = deviation.get(image.name)
        if given is None:
            continue
        rows = [i for i, point in enumerate(image.points2D) if point.has_point3D()]
        go = [i for i in rows if _uncertain(given[i], limit, unrefined[image.points2D[i].point3D_id])]
        if len(rows) - len(go) < _FEWEST:
            continue
        for i in go:
            if image.points2D[i].has_point3D():  # its point may be gone with another observation
                model.delete_observation(image.image_id, i)
    if fixed_cameras is not None:
        adjust(pycolmap, model, fixed_cameras, threads)
    model.update_point_3d_errors()


def _count_unrefined(model: Any, point: Any, deviation: dict[str, np.ndarray]) -> int:
    ends = ((model.image(each.image_id).name, each.point2D_idx) for each in point.track.elements)
    return sum(name in deviation and bool(np.isnan(deviation[name][row])) for name, row in ends)


def _uncertain(deviation: float, limit: float, unrefined: int) -> bool:
    return unrefined > 1 if np.isnan(deviation) else bool(deviation > limit)
