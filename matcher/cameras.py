"""Cameras in stored-image pixels, with the distortion models of COLMAP; rigs; poses in files of others.

The centre of the first pixel is (0, 0) here; COLMAP's lies at (0.5, 0.5): `from_colmap`, `to_colmap` convert.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from matcher.config import GeometryKind
from matcher.errors import MALFORMED, UsageError, plainly
from matcher.files import MARK, read_given, read_text, write_output, write_whole
from matcher.geometry import as_quaternion, as_rotation, check_poses

# COLMAP's name → focal lengths (1: one for both axes) and how many distortion parameters follow the principal
# point, in the order of its numbers (COLMAP, src/colmap/sensor/models.h).
CAMERA_MODELS = {
    "SIMPLE_PINHOLE": (1, 0),
    "PINHOLE": (2, 0),
    "SIMPLE_RADIAL": (1, 1),
    "RADIAL": (1, 2),
    "OPENCV": (2, 4),
    "OPENCV_FISHEYE": (2, 4),
    "FULL_OPENCV": (2, 8),
    "FOV": (2, 1),
    "SIMPLE_RADIAL_FISHEYE": (1, 1),
    "RADIAL_FISHEYE": (1, 2),
    "THIN_PRISM_FISHEYE": (2, 8),
}
_PINHOLE = ("fx", "fy", "cx", "cy")
LARGEST_LIST = 1 << 26  # bytes of a file of cameras or rigs


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
        for name in _PINHOLE:
            object.__setattr__(self, name, _number(getattr(self, name), name))
        if min(self.fx, self.fy) < 1e-6:
            raise UsageError(f"a camera's focal lengths must be positive, not {self.fx:g} and {self.fy:g}")
        focals, count = _parameters(self.model)
        if focals == 1 and self.fx != self.fy:
            raise UsageError(f"the model {self.model} has one focal length, not {self.fx:g}, {self.fy:g}")
        distortion = tuple(_number(each, "distortion") for each in np.array(self.distortion, object).ravel())
        if len(distortion) != count:
            raise UsageError(f"{self.model} has {count} distortion parameters, not {len(distortion)}")
        object.__setattr__(self, "distortion", distortion)
        if self.size is None:
            return
        try:
            width, height = (int(side) for side in self.size)
        except (TypeError, ValueError, OverflowError):
            width = height = 0
        if width < 1 or height < 1:
            raise UsageError(f"a camera's size must be (width, height), both positive, not {self.size!r}")
        object.__setattr__(self, "size", (width, height))

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
        """A pinhole camera from a (3, 3) calibration matrix; `UsageError`: another shape, skew, a last row
        other than (0, 0, 1), or values that `Camera` refuses."""
        try:
            K = np.asarray(K, dtype=np.float64)
        except (TypeError, ValueError):
            K = np.empty(0)
        right = K.shape == (3, 3) and np.allclose(K[2], (0, 0, 1)) and K[1, 0] == 0
        if not right or abs(K[0, 1]) > 1e-6 * abs(K[0, 0]):
            raise UsageError("K must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]]; a skew is not supported")
        return cls(K[0, 0], K[1, 1], K[0, 2], K[1, 2], size)

    @classmethod
    def from_colmap(cls, model: str, params: Sequence[float], size: tuple[int, int] | None = None) -> Camera:
        """A camera from COLMAP's model name and parameters, whose first pixel has its centre at (0.5, 0.5);
        `UsageError`: an unknown model, or another number of parameters than it has.

        >>> Camera.from_colmap("SIMPLE_RADIAL", [800, 512, 384, 0.1], (1024, 768)).cx
        511.5
        """
        focals, more = _parameters(model)
        values = [_number(value, "parameters") for value in np.array(params, object).ravel()]
        if len(values) != focals + 2 + more:
            raise UsageError(f"{model} has {focals + 2 + more} parameters, not {len(values)}")
        fx, fy = values[0], values[focals - 1]
        cx, cy = (value - 0.5 for value in values[focals : focals + 2])
        return cls(fx, fy, cx, cy, size, model, values[focals + 2 :])

    def to_colmap(self) -> tuple[str, tuple[float, ...]]:
        """Model name and parameters with COLMAP's pixel origin, for `pycolmap.Camera`."""
        return self.model, replace(self, cx=self.cx + 0.5, cy=self.cy + 0.5).params


CameraInput = Camera | Sequence[Any] | np.ndarray | Mapping[str, Any]  # what `as_camera` takes


def focal_of_film(millimetres: float, size: tuple[int, int]) -> float:
    """A focal length in pixels, from that of film (36 x 24 mm) of the same angle of view on the diagonal."""
    return millimetres / hypot(36, 24) * hypot(*size)


def as_camera(value: Any, name: str = "camera") -> Camera:
    """A camera from what users have: a `Camera`, four numbers fx, fy, cx, cy, a (3, 3) matrix K, or a
    dictionary of the fields of a `Camera`, of which K may stand for those four; `UsageError`: anything else,
    called `name` in the message."""
    if isinstance(value, Camera):
        return value
    try:
        if isinstance(value, Mapping) and ("K" in value or value.keys() >= {*_PINHOLE}):
            more = dict(value)
            pinhole = Camera.from_K(more.pop("K")) if "K" in more else Camera(*map(more.pop, _PINHOLE))
            if unknown := sorted(map(str, more.keys() - {"size", "model", "distortion"})):
                raise UsageError(f"it has no {unknown[0]!r}; it may have size, model and distortion, too")
            return replace(pinhole, **more)
        numbers = np.asarray(value, dtype=np.float64)
        if numbers.shape in ((3, 3), (4,)):
            return Camera.from_K(numbers) if numbers.ndim == 2 else Camera(*numbers.tolist())
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    except (TypeError, ValueError):
        pass  # as numbers of another shape
    raise UsageError(f"{name} must be a Camera, fx, fy, cx, cy in stored pixels or a (3, 3) K, not {value!r}")


def camera_of_each(value: Any, count: int) -> list[Any]:
    """What `as_camera` takes for each of some pictures, from one for all or one for each."""
    try:
        one = np.asarray(value, dtype=np.float64).shape in ((4,), (3, 3))
    except (TypeError, ValueError):  # a Camera or a dictionary, or several of different kinds
        one = isinstance(value, (Camera, Mapping))
    each = [value] * count if one else list(value)
    if len(each) != count:
        raise UsageError(f"{count} pictures need as many cameras, not {len(each)}")
    return each


def cameras_of_pair(
    kind: GeometryKind, camera0: Any, camera1: Any, sizes: Sequence[tuple[int, int]] | None = None
) -> tuple[Camera, Camera] | None:
    """The cameras that the geometry of a pair needs, from what `as_camera` takes; None for a kind without.

    Images of one size, of `sizes` (width, height) where they are known, may have one camera. `UsageError`: no
    camera where one is needed, one where none is, or one of images of another size.
    """
    if kind != "essential":
        if camera0 is not None or camera1 is not None:
            raise UsageError(f"cameras are for geometry 'essential' only, not for {kind!r}: leave them out")
        return None
    if camera0 is None:
        raise UsageError("geometry 'essential' needs camera0 (fx, fy, cx, cy in stored pixels)")
    if camera1 is None and sizes and sizes[0] != sizes[1]:
        both = " and ".join(f"{width} x {height}" for width, height in sizes)
        raise UsageError(f"the images have {both} pixels, so camera0 is not of both: give camera1, too")
    first = as_camera(camera0, "camera0")
    cameras = first, first if camera1 is None else as_camera(camera1, "camera1")
    for index, (camera, size) in enumerate(zip(cameras, sizes or (), strict=bool(sizes))):
        check_size(camera, size, f"camera{index}")
    return cameras


def check_size(camera: Camera, size: tuple[int, int], name: str = "the camera") -> None:
    """Refuse a camera of images of another (width, height): `UsageError`.

    One that does not know its size is, if its principal point lies outside the image.
    """
    if camera.size not in (None, size):
        raise UsageError(f"{name} is of images of {camera.size}, but its image is {size}")
    if camera.size is None and not (-0.5 < camera.cx < size[0] and -0.5 < camera.cy < size[1]):
        raise UsageError(
            f"{name}'s principal point ({camera.cx:g}, {camera.cy:g}) lies outside its image of {size[0]} x "
            f"{size[1]} pixels: is it of another size? Scale it; of a cut-out give the size, too"
        )


def _number(value: Any, name: str) -> float:
    """A number that no arithmetic takes beyond what numbers hold."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"a camera's {name} must be a number, not {value!r}") from None
    if not abs(number) <= 1e9:
        raise UsageError(f"a camera's {name} must be finite and at most 1e9, not {number:g}")
    return number


def _parameters(model: str) -> tuple[int, int]:
    """Focal lengths and distortion parameters of a model."""
    if not isinstance(model, str) or model not in CAMERA_MODELS:
        raise UsageError(f"unknown camera model {model!r}; known: {', '.join(CAMERA_MODELS)}")
    return CAMERA_MODELS[model]


# Cameras as users write them: as text, or in files of COLMAP, hloc, nerfstudio, OpenCV, KITTI, ROS and EuRoC.

CAMERA_FORMS = (
    "fx,fy,cx,cy (the centre of the first pixel is (0, 0)); MODEL,width,height,params… with a model of "
    "COLMAP's (whose first pixel has its centre at (0.5, 0.5)); or a file: lines NAME MODEL WIDTH HEIGHT "
    "PARAMS…, COLMAP's cameras.txt or cameras.bin, nerfstudio's transforms.json, KITTI's calib.txt, or the "
    ".yml or .yaml of OpenCV, ROS (camera_info) or EuRoC (sensor.yaml)"
)


def parse_cameras(text: str, name: str = "camera") -> Camera | dict[str, Camera]:
    """One camera for all images, or cameras by name of image, from what a user gives: `CAMERA_FORMS`;
    `UsageError`: something else, or a file that cannot be read; `name` is the argument's."""
    if Path(text).expanduser().is_file():
        return read_cameras(Path(text).expanduser())
    words = re.split(r"[\s,]+", text.strip().upper())
    try:
        if words[0] in CAMERA_MODELS:
            return _from_words(words)
        fx, fy, cx, cy = map(float, words)
    except (TypeError, ValueError) as error:
        why = f" ({error})" if words[0] in CAMERA_MODELS else "; there is no such file" * ("," not in text)
        raise UsageError(f"{name} must be {CAMERA_FORMS}; not {text!r}{why}") from None
    return Camera(fx, fy, cx, cy)


def _from_words(words: Sequence[str]) -> Camera:
    model, *numbers = words
    if len(numbers) != (count := 4 + sum(_parameters(model))):
        raise UsageError(f"after {model} come width, height and {count - 2} parameters: {count} numbers")
    return Camera.from_colmap(model, list(map(float, numbers[2:])), (int(numbers[0]), int(numbers[1])))


def read_cameras(path: Path) -> Camera | dict[str, Camera]:
    """Cameras of a file in one of the forms of `CAMERA_FORMS`, or a `UsageError`."""
    try:
        suffix = path.suffix.lower()
        text = "" if suffix == ".bin" else read_text(path, LARGEST_LIST)
        if suffix == ".bin":
            found = _from_binary(read_given(path, LARGEST_LIST))
        elif suffix in (".yml", ".yaml") and "opencv-matrix" not in text:
            found = _from_yaml(text)
        elif suffix in (".yml", ".yaml", ".xml") or (suffix == ".json" and "frames" not in text):
            found = _from_opencv(text)
        elif suffix == ".json":
            found = _from_nerfstudio(json.loads(text))
        else:
            kitti = {Camera.from_K(P[:, :3]) for P in _projections(text).values()}
            if len(kitti) > 1:
                raise ValueError("its cameras differ, so give fx,fy,cx,cy of the one whose images these are")
            found = next(iter(kitti), None) or _from_lines(text.splitlines())
        if suffix != ".json" and isinstance(found, dict) and all(name.isdecimal() for name in found):
            if len(found) > 1:
                raise ValueError(f"it holds {len(found)} cameras and does not say of which images; give one")
            found = next(iter(found.values()), {})
    except (*MALFORMED, struct.error, cv2.error, SystemError) as error:  # a UsageError is one
        why = "OpenCV cannot read it" if isinstance(error, (cv2.error, SystemError)) else plainly(error)
        raise UsageError(f"{path}: cannot be read as cameras ({why}); wanted: {CAMERA_FORMS}") from error
    if not found:
        raise UsageError(f"{path} names no camera")
    return found


def _from_lines(lines: list[str]) -> dict[str, Camera]:
    """hloc's lines, or those of COLMAP's cameras.txt, which begin with a number."""
    found = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # A name may have spaces, in quotes or not.
        end = next((at for at, word in enumerate(words[1:], start=1) if word in CAMERA_MODELS), 1)
        name = line.rsplit(maxsplit=len(words) - end)[0].strip()
        if len(name) > 2 and name[0] == name[-1] and name[0] in "\"'":
            name = name[1:-1]
        try:
            found[name] = _from_words(words[end:])
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {error}") from error
    return found


def _from_binary(data: bytes) -> dict[str, Camera]:
    """COLMAP's cameras.bin (its documentation, Output Format)."""
    (count,), at, found = struct.unpack_from("<Q", data), 8, {}
    for _ in range(count):
        number, model, width, height = struct.unpack_from("<iiQQ", data, at)
        name, (focals, more) = list(CAMERA_MODELS.items())[model]
        params = struct.unpack_from(f"<{focals + 2 + more}d", data, at + 24)
        at += 24 + 8 * len(params)
        found[str(number)] = Camera.from_colmap(name, params, (width, height))
    return found


_FOLDER = re.compile(r"(\./)?(images/)?")  # of images in nerfstudio's names


def _from_nerfstudio(values: Any) -> Camera | dict[str, Camera]:
    """transforms.json: intrinsics of all frames, or of each; their pixel origin is COLMAP's."""

    def camera(row: Mapping[str, Any]) -> Camera | None:
        lens = str(row.get("camera_model", "OPENCV_FISHEYE" if row.get("is_fisheye") else "OPENCV"))
        fisheye = lens.endswith("FISHEYE")
        # Beyond k3 its polynomial is no model of COLMAP's.
        others = [key for key in (("p1", "p2") if fisheye else ("k4", "k5", "k6")) if row.get(key)]
        if others or lens not in {"PERSPECTIVE", *CAMERA_MODELS} - {"FOV", "THIN_PRISM_FISHEYE"}:
            raise ValueError(f"{' with '.join([lens, *others])} cannot be used: undistort the images")
        if "fl_x" not in row:
            return None
        params = [row["fl_x"], row.get("fl_y", row["fl_x"]), row["cx"], row["cy"]]
        model = "OPENCV_FISHEYE" if fisheye else "FULL_OPENCV" if row.get("k3") else "OPENCV"
        more = ("k3", "k4") if fisheye else ("p1", "p2", "k3", "k4", "k5", "k6")
        params += [row.get(key, 0.0) for key in ("k1", "k2", *more)[: CAMERA_MODELS[model][1]]]
        return Camera.from_colmap(model, params, (int(row["w"]), int(row["h"])))

    frames = {}
    for frame in values["frames"]:
        name = _FOLDER.sub("", frame["file_path"], 1)
        if (other := frames.setdefault(name, frame)) is not frame:
            raise ValueError(f"{other['file_path']!r} and {frame['file_path']!r} are both {name!r}; keep one")
    found = {name: camera(values | frame) for name, frame in frames.items()}
    if "fl_x" in values and len(set(found.values())) < 2:
        return camera(values | next(iter(frames.values()), {}))
    return {name: each for name, each in found.items() if each is not None}


def _from_opencv(text: str) -> Camera:
    """What OpenCV's calibration writes; its pixel origin is ours."""
    storage = cv2.FileStorage(text, cv2.FILE_STORAGE_READ | cv2.FILE_STORAGE_MEMORY)

    def first(*names: str) -> Any:
        return next((node for name in names if not (node := storage.getNode(name)).empty()), None)

    matrix = first("camera_matrix", "cameraMatrix", "Camera_Matrix", "K")
    if matrix is None:
        raise ValueError("it has no camera_matrix")
    K, node = matrix.mat(), first("distortion_coefficients", "dist_coeffs", "distCoeffs", "D")
    values = [] if node is None else node.mat().ravel().tolist()
    width, height = first("image_width", "width"), first("image_height", "height")
    size = None if width is None or height is None else (int(width.real()), int(height.real()))
    return _with_distortion(Camera.from_K(K, size=size), values)


def _with_distortion(plain: Camera, values: list[float], kind: str = "plumb_bob") -> Camera:
    """A pinhole camera with OpenCV's coefficients of a distortion model, by its name in ROS or EuRoC."""
    while values and values[-1] == 0:
        values.pop()
    if not values and kind != "equidistant":
        return plain
    if kind not in ("plumb_bob", "rational_polynomial", "radial-tangential", "radtan", "equidistant"):
        raise ValueError(f"the distortion model {kind} is not supported")
    if len(values) > 8:
        raise ValueError("more than eight distortion coefficients are not supported")
    model, count = ("OPENCV", 4) if len(values) <= 4 else ("FULL_OPENCV", 8)
    model = "OPENCV_FISHEYE" if kind == "equidistant" else model
    return replace(plain, model=model, distortion=tuple(values + [0.0] * (count - len(values))))


def _from_yaml(text: str) -> Camera:
    """ROS's camera_info, of a file or as messages are printed, or EuRoC's sensor.yaml; the pixel origin is
    ours. Lists stand in brackets, or a number a line."""

    def find(*names: str) -> str:
        found = re.search(rf"(?im)^(?:{'|'.join(names)}):(.*(?:\n(?:[ \t].*|- .*|$))*)", text)
        return re.sub(r"#.*|(rows|cols|dt)[\"']?:\s*\w+", "", found[1]) if found else ""

    def numbers(*names: str) -> list[float]:
        return [float(word) for word in re.findall(r"[-+]?\d*\.?\d+\.?(?:[eE][-+]?\d+)?", find(*names))]

    K, lens = numbers("camera_matrix", "K"), find("camera_model").strip(" \n\"'") or "pinhole"
    if len(own := numbers("intrinsics")) == 4:
        K = [own[0], 0, own[2], 0, own[1], own[3], 0, 0, 1]
    if len(K) != 9 or lens != "pinhole":
        raise ValueError("it has no camera_matrix, K or intrinsics of a pinhole camera")
    size = numbers("resolution") or numbers("image_width", "width") + numbers("image_height", "height")
    plain = Camera.from_K(np.reshape(K, (3, 3)), size=tuple(size) or None)
    kind = find("distortion_model").strip(" \n\"'") or "plumb_bob"
    return _with_distortion(plain, numbers("distortion_coefficients", "D"), kind)


def _projections(text: str) -> dict[int, np.ndarray]:
    """KITTI's projection matrices (3, 4) of rectified cameras, by number: a line `P0: …`, `P_rect_00: …`, or
    only 12 numbers, for each."""
    row = r"[-+]?\d\S*(?:[ \t]+[-+]?\d\S*){11}"
    found = re.findall(rf"(?m)^(?:P(?:_rect_)?(\d+):)?[ \t]*({row})\s*?$", text)
    matrices = (np.array(numbers.split(), np.float64).reshape(3, 4) for _, numbers in found)
    return {int(name or place): P for place, ((name, _), P) in enumerate(zip(found, matrices, strict=True))}


def read_baseline(path: Path, left: Path, right: Path) -> float | None:
    """The distance of two rectified cameras in a file of KITTI's: of the only two, or of those that the
    folders of their images are numbered by (`image_2`). None where it does not say it; `UsageError`: such a
    file cannot be read."""
    if not path.is_file() or path.suffix.lower() != ".txt":
        return None
    try:
        found = _projections(read_text(path, LARGEST_LIST))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as KITTI's calib.txt ({error})") from error
    ends = [re.search(r"(\d+)(?:/data)?$", folder.as_posix()) for folder in (left, right)]
    pair = sorted(found) if len(found) == 2 else [int(end[1]) if end else -1 for end in ends]
    if not found.keys() >= set(pair):
        return None
    first, second = (found[number][0, 3] / found[number][0, 0] for number in pair)
    return float(first - second) if first > second else None


# Cameras that are fixed to each other, such as a stereo pair, from COLMAP's `rig_config.json`.

_TURN, _SHIFT = "cam_from_rig_rotation", "cam_from_rig_translation"


@dataclass(frozen=True, eq=False)
class RigCamera:
    """One camera of a rig."""

    prefix: str  # what the names of its pictures begin with
    cam_from_rig: np.ndarray | None  # (4, 4), the identity for the reference; None: not known
    camera: Camera | None  # intrinsics, stored pixels; None: not known


@dataclass(frozen=True, eq=False)
class RigConfig:
    """The rigs of a file; the first camera of each is its reference."""

    rigs: tuple[tuple[RigCamera, ...], ...]
    source: str = "the rig"  # for messages

    @property
    def known(self) -> bool:
        """Whether the file says how all cameras are fixed to each other."""
        return all(each.cam_from_rig is not None for rig in self.rigs for each in rig)

    def intrinsics(self) -> dict[str, Camera]:
        """The intrinsics that the file gives, by prefix."""
        return {each.prefix: each.camera for rig in self.rigs for each in rig if each.camera is not None}

    def camera_of(self, name: str) -> RigCamera | None:
        """The camera that took a picture; None: it is of no rig."""
        return next((each for rig in self.rigs for each in rig if name.startswith(each.prefix)), None)

    def frames(self, names: Iterable[str]) -> list[dict[str, RigCamera]]:
        """The pictures of each moment, by name, without those of no rig; `UsageError`: a camera has none, or
        no two are of one moment."""
        names = sorted(names)
        found: dict[tuple[int, str], dict[str, RigCamera]] = {}
        for number, rig in enumerate(self.rigs):
            for camera in rig:
                own = [name for name in names if name.startswith(camera.prefix)]
                if not own:
                    raise UsageError(
                        f"{self.source}: no picture's name begins with {camera.prefix!r}; names are paths "
                        f"below the folder of the images, such as {names[0] if names else 'left/0.png'}"
                    )
                for name in own:
                    found.setdefault((number, name.removeprefix(camera.prefix)), {})[name] = camera
        if all(len(frame) < 2 for frame in found.values()):
            first = [next(name for name in names if name.startswith(c.prefix)) for c in self.rigs[0][:2]]
            raise UsageError(
                f"{self.source}: no two pictures are of one moment; their names must be the same after the "
                f"prefix, unlike {first[0]} and {first[1]}"
            )
        return list(found.values())

    def to_json(self) -> str:
        """The text of a `rig_config.json`."""

        def row(number: int, each: RigCamera) -> dict[str, Any]:
            found: dict[str, Any] = {"image_prefix": each.prefix}
            if number == 0:
                found["ref_sensor"] = True
            elif each.cam_from_rig is not None:
                w, x, y, z, *shift = _wxyz(each.cam_from_rig)
                found |= {_TURN: [w, x, y, z], _SHIFT: shift}
            if each.camera is not None:
                model, params = each.camera.to_colmap()
                found |= {"camera_model_name": model, "camera_params": list(params)}
            return found

        rigs = [{"cameras": [row(*each) for each in enumerate(rig)]} for rig in self.rigs]
        return json.dumps(rigs, indent=1)


def read_rig_config(path: str | Path) -> RigConfig:
    """The rigs of a file in the format of COLMAP's `rig_config.json`, or a `UsageError`.

    It is a list of `{"cameras": [...]}`, each camera with `image_prefix`; one has `"ref_sensor": true`, the
    others may have `cam_from_rig_rotation` (w, x, y, z) and `cam_from_rig_translation`, all may have
    `camera_model_name` and `camera_params` (in COLMAP's pixels).
    """
    try:
        rows = json.loads(read_text(path, LARGEST_LIST))
        if not isinstance(rows, list) or not rows:
            raise ValueError("it lists no rig")
        rigs = tuple(_rig(row) for row in rows)
        # In order, a prefix stands right before one that begins with it.
        for first, second in pairwise(sorted(camera.prefix for rig in rigs for camera in rig)):
            if second.startswith(first):
                raise ValueError(
                    f"the image_prefix {first!r} and {second!r} cannot be told apart; end them with / or _"
                )
    except MALFORMED as error:
        raise UsageError(
            f'{path}: cannot be read as COLMAP\'s rig_config.json, a list of {{"cameras": [...]}} with an '
            f"image_prefix each ({plainly(error)})"
        ) from error
    return RigConfig(rigs, str(path))


def _rig(row: Any) -> tuple[RigCamera, ...]:
    _check_members(row, {"cameras"}, "a rig")
    cameras = row.get("cameras")
    if not isinstance(cameras, list) or len(cameras) < 2:
        raise ValueError("a rig has a list of at least two cameras")
    known = {"image_prefix", "ref_sensor", "camera_model_name", "camera_params", _TURN, _SHIFT}
    for row in cameras:
        _check_members(row, known, "a camera")
    found, reference = [], [row.get("ref_sensor", False) for row in cameras]
    if reference.count(True) != 1 or any(not isinstance(value, bool) for value in reference):
        raise ValueError('one camera of each rig, and only one, has "ref_sensor": true')
    for row, refers in zip(cameras, reference, strict=True):
        prefix = row.get("image_prefix")
        if not isinstance(prefix, str) or not prefix:
            raise ValueError("each camera has an image_prefix, a text that is not empty")
        for pair in ((_TURN, _SHIFT), ("camera_model_name", "camera_params")):
            if len(row.keys() & set(pair)) == 1:
                raise ValueError(f"{prefix}: {pair[0]} and {pair[1]} go together")
        pose, camera = np.eye(4) if refers else None, None
        if _TURN in row:
            turn, shift = (np.array(row[key], dtype=np.float64) for key in (_TURN, _SHIFT))
            if turn.shape != (4,) or shift.shape != (3,) or not abs(np.linalg.norm(turn) - 1) <= 0.01:
                raise ValueError(f"{prefix}: {_TURN} has w, x, y, z of length 1, and {_SHIFT} three numbers")
            pose = _poses_from_rows([(prefix, [*turn, *shift])])[prefix]
            if refers and not np.allclose(pose, np.eye(4)):
                raise ValueError(f"{prefix}: the reference camera's pose is the identity; leave it out")
        if "camera_params" in row:
            camera = Camera.from_colmap(row["camera_model_name"], row["camera_params"])
        found.append(RigCamera(prefix, pose, camera))
    found.insert(0, found.pop(reference.index(True)))
    return tuple(found)


def _check_members(row: Any, known: set[str], what: str) -> None:
    """Refuse what is no object, or has members that nothing would read."""
    if not isinstance(row, dict):
        raise ValueError(f"{what} is an object, not {type(row).__name__}")
    if unknown := sorted(row.keys() - known):
        raise ValueError(f"{what} has no {unknown[0]!r}; it may have {', '.join(sorted(known))}")


# Poses world_from_cam as lines of trajectory files: of TUM, with times, and of KITTI, without.


def tum_lines(timestamps: Sequence[float], poses: Sequence[np.ndarray]) -> list[str]:
    """A comment, our mark, and for each of N seconds and poses world_from_cam (4, 4) a line of numbers."""
    lines = [f"# {MARK.decode()}: timestamp x y z qx qy qz qw of world_from_cam"]
    for time, pose in zip(timestamps, poses, strict=True):
        lines.append(f"{time:.6f} {_digits([*pose[:3, 3], *as_quaternion(pose[:3, :3])])}")
    return lines


def kitti_lines(poses: Iterable[np.ndarray]) -> list[str]:
    """The 12 numbers of the upper 3×4 part of each world_from_cam (4, 4)."""
    return [_digits(pose[:3].ravel()) for pose in poses]


def _digits(values: Iterable[float]) -> str:
    """Numbers to nine digits, with spaces between."""
    return " ".join(f"{value:.9g}" for value in values)


# Poses of images by name, in the files of other programs.

POSE_SUFFIXES = (".txt", ".tum", ".json", ".kitti")
COLMAP_IMAGES = "images.txt"


def read_named_poses(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Camera]]:
    """Poses cam_from_world (4, 4) by name of image, and the cameras of those that have one; or `UsageError`.

    They are of COLMAP's `images.txt` (whose cameras are beside it and not read here), result lines of hloc
    (`.txt`), or JSON: nerfstudio's, or name → {"cam_from_world": (3, 4) or (4, 4), "camera": …} or a matrix.
    """
    path = Path(path)
    if path.suffix.lower() in (".tum", ".kitti"):
        raise UsageError(f"{path}: a trajectory has no names of images; give images.txt, .txt or .json")
    try:
        text = read_text(path)
        if path.suffix.lower() == ".json":
            found = _poses_from_json(json.loads(text))
        elif path.name == COLMAP_IMAGES:
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            rows = (line.split(maxsplit=9) for line in lines[::2])  # between them are the lines of points
            found = _poses_from_rows((row[9], row[1:8]) for row in rows if row), {}
        else:
            lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
            rows = (line.rsplit(maxsplit=7) for line in lines)
            found = _poses_from_rows((row[0], row[1:]) for row in rows), {}
    except MALFORMED as error:
        raise UsageError(
            f"{path}: cannot be read as image poses ({plainly(error)}): lines `name qw qx qy qz tx ty tz`, "
            "COLMAP's images.txt, nerfstudio's transforms.json or one with cam_from_world by name are needed"
        ) from error
    if not found[0]:
        raise UsageError(f"{path} holds no pose")
    return found


def write_named_poses(
    path: str | Path, poses: Mapping[str, np.ndarray], facts: Mapping[str, Any] | None = None, **common: Any
) -> None:
    """Write poses cam_from_world (4, 4) by name of image in the format that the file's name asks for.

    `images.txt` is COLMAP's, any other `.txt` has hloc's result lines, `.tum` has timestamps (the number that
    an image is named by if all have another one, else its place, and comments say of which image it is),
    `.kitti` a line for each image, `.json` all, with the `facts` of images, also of those without a pose, and
    `common` members beside "poses". `UsageError`: a name that the format cannot hold, or another suffix.
    """
    path, facts = Path(path), facts or {}
    suffix = path.suffix.lower()
    if suffix == ".json":
        names = dict.fromkeys([*facts, *poses])
        found = {name: np.asarray(pose, np.float64).tolist() for name, pose in poses.items()}
        rows = {name: {"cam_from_world": found.get(name), **facts.get(name, {})} for name in names}
        write_output(path, json.dumps({**common, "poses": rows}, indent=1, allow_nan=False).encode())
        return
    if suffix == ".tum":
        lines = _tum_lines(poses)
    elif suffix == ".kitti":
        lines = kitti_lines(map(np.linalg.inv, poses.values()))
    elif path.name == COLMAP_IMAGES:
        columns = "IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME"
        lines = [f"# {MARK.decode()}: {columns} of cam_from_world; no points"]
        for number, (name, pose) in enumerate(poses.items(), start=1):
            lines += [f"{number} {_digits(_wxyz(pose))} {number} {name}", ""]
    elif suffix == ".txt":
        check_pose_names(path, poses)
        lines = [f"{name} {_digits(_wxyz(pose))}" for name, pose in poses.items()]
    else:
        raise UsageError(f"{path}: the name of a file of poses must end in {' or '.join(POSE_SUFFIXES)}")
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def check_pose_names(path: Path, names: Iterable[str]) -> None:
    """`UsageError` where a file of poses with that path cannot hold one of the names of images."""
    lines = path.suffix.lower() == ".txt" and path.name != COLMAP_IMAGES
    if lines and (spaced := [name for name in names if len(name.split()) != 1]):
        raise UsageError(
            f"{path}: hloc's lines cannot hold the name {spaced[0]!r}, which has a space: use .json, .tum or "
            f"{COLMAP_IMAGES}"
        )


def _tum_lines(poses: Mapping[str, np.ndarray]) -> list[str]:
    try:
        times, said = [float(Path(name).stem) for name in poses], []
    except ValueError:
        times = []
    if len(set(times)) < len(poses):
        times = [float(index) for index in range(len(poses))]
        said = [f"# {time:.6f} is {json.dumps(name)}" for time, name in zip(times, poses, strict=True)]
    ordered = sorted(zip(times, poses.values(), strict=True), key=lambda row: row[0])
    first, *lines = tum_lines([time for time, _ in ordered], [np.linalg.inv(pose) for _, pose in ordered])
    return [first, *said, *lines]


def _wxyz(pose: np.ndarray) -> list[float]:
    x, y, z, w = as_quaternion(pose[:3, :3])
    return [w, x, y, z, *pose[:3, 3]]


def _poses_from_rows(rows: Iterable[tuple[str, Sequence[str | float]]]) -> dict[str, np.ndarray]:
    """Poses (4, 4) by name, of rows of a name and qw qx qy qz tx ty tz; any other row raises."""
    named: dict[str, list[float]] = {}
    for name, words in rows:
        if len(words) != 7:
            raise ValueError(f"{len(words)} numbers in a line that needs 7")
        if name in named:
            raise ValueError(f"two lines have a pose of {name!r}; keep one")
        named[name] = [float(word) for word in words]
    values = np.array(list(named.values())).reshape(-1, 7)
    poses = np.tile(np.eye(4), (len(values), 1, 1))
    poses[:, :3, :3], poses[:, :3, 3] = as_rotation(np.roll(values[:, :4], -1, axis=1)), values[:, 4:]
    check_poses(poses)
    return dict(zip(named, poses, strict=True))


def _poses_from_json(values: Any) -> tuple[dict[str, np.ndarray], dict[str, Camera]]:
    poses, cameras = {}, {}
    if isinstance(frames := values.get("frames"), list):  # nerfstudio's, with OpenGL's axes: y up, z back
        names, known = [_FOLDER.sub("", f["file_path"], 1) for f in frames], _from_nerfstudio(values)
        placed = np.array([f["transform_matrix"] for f in frames], np.float64).reshape(-1, 4, 4)
        check_poses(placed := placed @ np.diag([1.0, -1.0, -1.0, 1.0]))
        poses = dict(zip(names, np.linalg.inv(placed), strict=True))
        return poses, known if isinstance(known, dict) else dict.fromkeys(poses, known)
    for name, row in (values["poses"] if isinstance(values.get("poses"), dict) else values).items():
        if name == "software":
            continue
        row = row if isinstance(row, dict) else {"cam_from_world": row}
        if row["cam_from_world"] is None:
            continue
        pose = np.eye(4)
        pose[:3] = np.array(row["cam_from_world"], dtype=np.float64)[:3].reshape(3, 4)
        check_poses(pose[None])
        poses[name] = pose
        if (camera := row.get("camera")) is not None:
            cameras[name] = Camera.from_colmap(camera["model"], camera["params"], tuple(camera["size"]))
    return poses, cameras
