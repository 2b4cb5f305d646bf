"""A model in metres, east-north-up, from the positions in its photos' headers; run in COLMAP's process."""

from __future__ import annotations

from typing import Any

import numpy as np

_FEWEST = 4  # photos with a position
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
    if len(names) < _FEWEST:
        return None, f"they are {len(names)}, and {_FEWEST} are needed" if names else None
    given = np.array([positions[name] for name in names], dtype=np.float64)
    metres = np.asarray(pycolmap.GPSTransform().ellipsoid_to_enu(given, *given[0]))
    spread = np.linalg.svd(metres - metres.mean(axis=0), compute_uv=False)
    if spread[0] < _NEAR:
        return None, f"they lie within {_NEAR:g} m of each other, which a receiver is easily off"
    if spread[1] < _FLAT * spread[0]:
        return None, "they lie on one line, which does not say how the model is turned about it"
    ransac = pycolmap.RANSACOptions(max_error=_NEAR, random_seed=0)
    found = pycolmap.align_reconstruction_to_locations(model, names, metres, _FEWEST, ransac)
    if found is None:
        return None, f"fewer than {_FEWEST} agree with the cameras to {_NEAR:g} m"
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
