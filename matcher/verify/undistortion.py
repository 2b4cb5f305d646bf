"""Points of a camera with lens distortion → points of the pinhole camera with the same calibration matrix."""

from __future__ import annotations

import cv2
import numpy as np

from matcher.data.camera import Camera
from matcher.errors import UsageError, install_command

_PINHOLE = ("PINHOLE", "SIMPLE_PINHOLE")
_RADIAL = ("SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV")  # COLMAP took these from OpenCV
_FISHEYE = ("SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE", "OPENCV_FISHEYE")
_UNTIL = (cv2.TERM_CRITERIA_COUNT + cv2.TERM_CRITERIA_EPS, 100, 1e-10)


def undistort(points: np.ndarray, camera: Camera) -> np.ndarray:
    """Where an ideal pinhole camera with `camera.K` would see the points.

    OpenCV inverts its own models, the radial and the fisheye ones; pycolmap the others.

    Args:
        points: (K, 2) stored pixels; rows that are not finite stay so.
        camera: of the image.

    Returns:
        (K, 2) float64; NaN where the model cannot be inverted.

    Raises:
        UsageError: a model that only pycolmap can invert, and it is not installed.
    """
    points = np.asarray(points, dtype=np.float64)
    if camera.model in _PINHOLE or not len(points):
        return points
    if camera.model in _RADIAL:
        # In OpenCV 4 another function has the criteria; its default stops after five steps.
        invert = getattr(cv2, "undistortPointsIter", cv2.undistortPoints)
        found = invert(
            points[:, None], camera.K, _padded(camera, 4), P=camera.K, criteria=_UNTIL, R=np.eye(3)
        )
        return found[:, 0]
    if camera.model in _FISHEYE:
        found = cv2.fisheye.undistortPoints(points[:, None], camera.K, _padded(camera, 4), P=camera.K)
        # OpenCV marks what it cannot invert by −1000000 before it applies P.
        return np.where(np.abs(found[:, 0]) < 1e5 * camera.fx, found[:, 0], np.nan)
    return _by_pycolmap(points, camera)


def _padded(camera: Camera, least: int) -> np.ndarray:
    values = camera.distortion
    return np.array([*values, *(0.0,) * (least - len(values))])


def _by_pycolmap(points: np.ndarray, camera: Camera) -> np.ndarray:
    try:
        import pycolmap
    except ModuleNotFoundError:
        raise UsageError(
            f"points of the camera model {camera.model} are undistorted by pycolmap: {install_command('sfm')}"
        ) from None
    model, params = camera.to_colmap()
    width, height = camera.size or (1, 1)
    lens = pycolmap.Camera(model=model, width=width, height=height, params=params)
    found = lens.cam_from_img(points + 0.5)
    return found * (camera.fx, camera.fy) + (camera.cx, camera.cy)
