"""Cameras in stored-image pixels, with the distortion models of COLMAP.

The centre of the first pixel is (0, 0) here; COLMAP's lies at (0.5, 0.5). `from_colmap` and `to_colmap`
convert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matcher.config import GeometryKind
from matcher.errors import UsageError

# COLMAP's name → focal lengths (1: one for both axes) and how many distortion parameters follow the principal
# point (COLMAP, src/colmap/sensor/models.h).
CAMERA_MODELS = {
    "SIMPLE_PINHOLE": (1, 0),
    "PINHOLE": (2, 0),
    "SIMPLE_RADIAL": (1, 1),
    "RADIAL": (1, 2),
    "OPENCV": (2, 4),
    "FULL_OPENCV": (2, 8),
    "SIMPLE_RADIAL_FISHEYE": (1, 1),
    "RADIAL_FISHEYE": (1, 2),
    "OPENCV_FISHEYE": (2, 4),
    "FOV": (2, 1),
    "THIN_PRISM_FISHEYE": (2, 8),
}
_HALF_PIXEL = 0.5
_LARGEST = 1e9  # pixels, or a distortion parameter
_SHORTEST = 1e-6  # focal length in pixels


@dataclass(frozen=True)
class Camera:
    """Intrinsics of an image as stored in its file, in pixels.

    A pinhole camera unless `model` names another:

        >>> from matcher import Camera
        >>> camera = Camera(800, 800, 511.5, 383.5, size=(1024, 768))
        >>> camera.K[0].tolist()
        [800.0, 0.0, 511.5]
        >>> Camera.from_K(camera.K, size=(1024, 768)) == camera
        True

    Raises:
        UsageError: a focal length that is not positive, a value that is not a finite number, an unknown
            model, or a number of distortion parameters that the model does not have.
    """

    fx: float
    fy: float
    cx: float  # the centre of the first pixel is (0, 0)
    cy: float
    size: tuple[int, int] | None = None  # (width, height) of the stored image, where it is known
    model: str = "PINHOLE"  # a name in CAMERA_MODELS
    distortion: tuple[float, ...] = ()  # in COLMAP's order, such as k1, k2, p1, p2 of OPENCV

    def __post_init__(self) -> None:
        for name in ("fx", "fy", "cx", "cy"):
            object.__setattr__(self, name, _number(getattr(self, name), name))
        if min(self.fx, self.fy) < _SHORTEST:
            raise UsageError(f"a camera's focal lengths must be positive, not {self.fx:g} and {self.fy:g}")
        if self.model not in CAMERA_MODELS:
            raise UsageError(f"unknown camera model {self.model!r}; known: {', '.join(CAMERA_MODELS)}")
        focals, count = CAMERA_MODELS[self.model]
        if focals == 1 and self.fx != self.fy:
            raise UsageError(
                f"the camera model {self.model} has one focal length, not {self.fx:g}, {self.fy:g}"
            )
        distortion = tuple(_number(value, "distortion") for value in self.distortion)
        if len(distortion) != count:
            raise UsageError(
                f"the camera model {self.model} has {count} distortion parameters, not {len(distortion)}"
            )
        object.__setattr__(self, "distortion", distortion)
        if self.size is not None:
            object.__setattr__(self, "size", _size(self.size))

    @property
    def K(self) -> np.ndarray:
        """(3, 3) float64 calibration matrix, without the distortion."""
        return np.array([[self.fx, 0.0, self.cx], [0.0, self.fy, self.cy], [0.0, 0.0, 1.0]])

    @property
    def params(self) -> tuple[float, ...]:
        """All parameters in the order of COLMAP's `model`; the centre of the first pixel is (0, 0)."""
        focals = (self.fx,) if CAMERA_MODELS[self.model][0] == 1 else (self.fx, self.fy)
        return (*focals, self.cx, self.cy, *self.distortion)

    @classmethod
    def from_K(cls, K: Any, *, size: tuple[int, int] | None = None) -> Camera:
        """A pinhole camera from a (3, 3) calibration matrix without skew.

        Raises:
            UsageError: another shape, skew, a last row other than (0, 0, 1), or values `Camera` refuses.
        """
        try:
            K = np.asarray(K, dtype=np.float64)
        except (TypeError, ValueError):
            raise UsageError(f"K must be a (3, 3) matrix of numbers, not {type(K).__name__}") from None
        if K.shape != (3, 3):
            raise UsageError(f"K must be a (3, 3) matrix, not {K.shape}")
        if not np.allclose(K[2], (0, 0, 1)) or K[1, 0] != 0 or abs(K[0, 1]) > 1e-6 * abs(K[0, 0]):
            raise UsageError("K must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]]; a skew is not supported")
        return cls(K[0, 0], K[1, 1], K[0, 2], K[1, 2], size)

    @classmethod
    def from_colmap(cls, model: str, params: Sequence[float], size: tuple[int, int] | None = None) -> Camera:
        """A camera from COLMAP's model name and parameters, whose first pixel has its centre at (0.5, 0.5).

            >>> Camera.from_colmap("SIMPLE_RADIAL", [800, 512, 384, 0.1], (1024, 768)).cx
            511.5

        Raises:
            UsageError: an unknown model, or another number of parameters than it has.
        """
        if model not in CAMERA_MODELS:
            raise UsageError(f"unknown camera model {model!r}; known: {', '.join(CAMERA_MODELS)}")
        focals, more = CAMERA_MODELS[model]
        values = [float(value) for value in params]
        if len(values) != focals + 2 + more:
            raise UsageError(f"{model} has {focals + 2 + more} parameters, not {len(values)}")
        fx, fy = values[0], values[focals - 1]
        cx, cy = (value - _HALF_PIXEL for value in values[focals : focals + 2])
        return cls(fx, fy, cx, cy, size, model, tuple(values[focals + 2 :]))

    def to_colmap(self) -> tuple[str, tuple[float, ...]]:
        """Model name and parameters with COLMAP's pixel origin, for `pycolmap.Camera`."""
        moved = replace(self, cx=self.cx + _HALF_PIXEL, cy=self.cy + _HALF_PIXEL)
        return self.model, moved.params


def as_camera(value: Any, name: str = "camera") -> Camera:
    """A camera from what users have: a `Camera`, four numbers fx, fy, cx, cy, or a (3, 3) matrix K.

    Raises:
        UsageError: anything else; `name` is the argument's in the message.
    """
    if isinstance(value, Camera):
        return value
    wanted = f"{name} must be a Camera, four numbers fx, fy, cx, cy in stored pixels, or a (3, 3) matrix K"
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"{wanted}, not {type(value).__name__}") from None
    if numbers.shape == (3, 3):
        return Camera.from_K(numbers)
    if numbers.shape == (4,):
        return Camera(*numbers.tolist())
    raise UsageError(f"{wanted}, not {type(value).__name__} of shape {numbers.shape}")


def camera_of_each(value: Any, count: int) -> list[Any]:
    """What says the camera of each of some pictures, from one for all or one for each, as of `as_camera`.

    Raises:
        UsageError: another number of cameras.
    """
    try:
        one = np.asarray(value, dtype=np.float64).shape in ((4,), (3, 3))
    except (TypeError, ValueError):  # a Camera, or several of different kinds
        one = isinstance(value, Camera)
    each = [value] * count if one else list(value)
    if len(each) != count:
        raise UsageError(f"{count} pictures need as many cameras, not {len(each)}")
    return each


def cameras_of_pair(
    kind: GeometryKind, camera0: Any, camera1: Any, sizes: Sequence[tuple[int, int]] | None = None
) -> tuple[Camera, Camera] | None:
    """The cameras that the geometry of a pair needs, None for a kind without.

    Args:
        kind: of the geometry.
        camera0, camera1: as `as_camera` takes them; images of one size may have one camera.
        sizes: (width, height) of both stored images; None while they are unknown.

    Raises:
        UsageError: no camera where one is needed, one where none is, one of images of another size, or what
            `as_camera` refuses.
    """
    if kind != "essential":
        if camera0 is not None or camera1 is not None:
            raise UsageError(
                f"cameras are for geometry 'essential' only, and this pipeline estimates {kind!r}: leave "
                "camera0 and camera1 out, or load it with geometry='essential'"
            )
        return None
    if camera0 is None:
        raise UsageError("geometry 'essential' needs camera0 (fx, fy, cx, cy in stored pixels)")
    if camera1 is None and sizes and sizes[0] != sizes[1]:
        raise UsageError(
            f"the images have {sizes[0][0]} x {sizes[0][1]} and {sizes[1][0]} x {sizes[1][1]} pixels, so "
            "camera0 is not that of both: give camera1, too"
        )
    first = as_camera(camera0, "camera0")
    cameras = first, first if camera1 is None else as_camera(camera1, "camera1")
    for index, (camera, size) in enumerate(zip(cameras, sizes or (), strict=bool(sizes))):
        if camera.size not in (None, size):
            raise UsageError(f"camera{index} is of images of {camera.size}, but its image is {size}")
    return cameras


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"a camera's {name} must be a number, not {value!r}") from None
    if not math.isfinite(number):
        raise UsageError(f"a camera's {name} must be finite, not {number}")
    if abs(number) > _LARGEST:
        raise UsageError(f"a camera's {name} must not exceed {_LARGEST:g}, not {number:g}")
    return number


def _size(size: Any) -> tuple[int, int]:
    try:
        width, height = (int(side) for side in size)
    except (TypeError, ValueError):
        raise UsageError(f"a camera's size must be (width, height), not {size!r}") from None
    if width < 1 or height < 1:
        raise UsageError(f"a camera's size must be positive, not {width} x {height}")
    return width, height
