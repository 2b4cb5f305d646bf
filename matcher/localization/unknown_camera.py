"""Cameras to try where a photo comes without one."""

from __future__ import annotations

from math import hypot
from pathlib import Path

from matcher.collection.exporting.cameras import FULL_FRAME, GUESSED_FOCAL, read_exif
from matcher.data.camera import Camera
from matcher.localization.sparse_map import SparseMap


def cameras_to_try(path: Path | None, size: tuple[int, int], model: SparseMap) -> list[Camera]:
    """Cameras of a photo, the most credible first: its EXIF's, then the map's own for that size.

    Their focal length is refined. The list is empty where nothing is known.
    """
    found = []
    if path is not None and (focal := read_exif(path).focal_35mm):
        found.append(pinhole(focal / hypot(*FULL_FRAME) * hypot(*size), size))
    same = [camera for camera in model.cameras if camera.size == size]
    if same:
        found.append(max(same, key=same.count))
    return found


def any_camera(size: tuple[int, int]) -> Camera:
    """A camera of which only the focal length is to be found."""
    return pinhole(GUESSED_FOCAL * max(size), size)


def pinhole(focal: float, size: tuple[int, int]) -> Camera:
    """Without distortion, the principal point in the middle."""
    middle = (size[0] - 1) / 2, (size[1] - 1) / 2
    return Camera(focal, focal, *middle, size, "SIMPLE_PINHOLE")
