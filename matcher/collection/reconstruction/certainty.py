"""Observations whose refined position is uncertain are left out of a finished model, which is adjusted again.

A keypoint on an edge is exact across it and not along it, one in weak texture in no direction; its covariance
says so. Cameras are found with all of them, because few points are worse than inexact ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.collection.reconstruction.adjustment import adjust
from matcher.collection.refined_keypoints import RefinedKeypoints
from matcher.errors import UsageError

if TYPE_CHECKING:
    from matcher.collection.store import Store

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
