"""The camera of a sequence, rescaled for frames of another size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from matcher.data.camera import Camera
from matcher.data.geometry import resize_points
from matcher.errors import UsageError
from matcher.sequence.keyframes import KeptFrame

_SAME_SHAPE = 0.01  # relative difference of the sides' ratio up to which a frame counts as resized


class Calibration:
    """A pinhole camera and the image size it is for: the one it names, or else that of the first frame.

    A frame of another size but the same shape is taken for a resized one, and the camera is rescaled to it.
    For a frame of another shape, which may be cropped anywhere, there is no camera.

    Raises:
        UsageError: a camera whose lens distorts.
    """

    def __init__(self, camera: Camera) -> None:
        if camera.distortion:
            raise UsageError(
                f"a tracker needs images without distortion, and the camera is {camera.model}: "
                "undistort them (cv2.undistort) and give the pinhole camera of the result"
            )
        self.camera = camera
        self._size = camera.size

    def begin(self, size: tuple[int, int]) -> None:
        """The first frame has this (width, height)."""
        self._size = self._size or size

    def of(self, size: tuple[int, int]) -> Camera | None:
        """The camera of frames of a (width, height), or None where the shape differs."""
        if self._size is None or size == self._size:
            return replace(self.camera, size=size)
        scale = (size[0] / self._size[0], size[1] / self._size[1])
        if abs(scale[0] / scale[1] - 1) > _SAME_SHAPE:
            return None
        centre = resize_points(np.array([self.camera.cx, self.camera.cy]), scale)
        return Camera(self.camera.fx * scale[0], self.camera.fy * scale[1], *centre.tolist(), size=size)

    def pixels(self, points: np.ndarray, size: tuple[int, int]) -> np.ndarray | None:
        """(N, 2) float64: a frame's pixels as pixels of the camera; None where the shape differs."""
        points = points.astype(np.float64)
        if self.of(size) is None:
            return None
        if self._size is None or size == self._size:
            return points
        return resize_points(points, (self._size[0] / size[0], self._size[1] / size[1]))

    def coarseness(self, frame: KeptFrame) -> float:
        """Camera pixels for one pixel of the frame as its points were found."""
        width = frame.size[0] if self._size is None else self._size[0]
        return width / (frame.size[0] * frame.scale[0])
