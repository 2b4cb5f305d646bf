"""COLMAP's binary models, walked through before COLMAP reads them, which on a file cut short never ends.

The layout is that of COLMAP's src/colmap/scene/reconstruction_io.cc: little-endian, a count, then records.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path

from matcher.errors import IntegrityError

_COUNT, _BYTE = "<Q", "<B"
_CAMERA = "<IiQQ"  # id, model, width, height; its parameters follow
_IMAGE = "<I7dI"  # id, pose, camera; its name, a zero and its keypoints follow
_POINT = "<Q3d3BdQ"  # id, position, colour, error, length of its track, which follows
_RIG = "<II"  # id, sensors; the first one follows, then the others with their poses
_FRAME = "<II7dI"  # id, rig, pose, how many images, which follow
_KEYPOINT, _OBSERVATION, _SENSOR, _POSE, _FRAME_IMAGE = 24, 8, 8, 56, 16  # bytes
_LONGEST_NAME = 4096


def check_model_files(folder: Path, parameters: Callable[[int], int]) -> None:
    """Refuse a binary model with a file that does not hold what its counts promise; text models are passed.

    Args:
        folder: of the model.
        parameters: how many a camera model has, by COLMAP's number; ValueError for an unknown one.

    Raises:
        IntegrityError: a file is damaged, or is no file.
    """
    walks = {
        "rigs.bin": _rig,
        "cameras.bin": lambda file: _camera(file, parameters),
        "frames.bin": _frame,
        "images.bin": _image,
        "points3D.bin": _point,
    }
    for name, walk in walks.items():
        path = folder / name
        if path.is_file():
            _check(path, walk)
        elif path.exists():  # a pipe would keep a reader waiting
            raise IntegrityError(f"{path} is not a file")


class _Bytes:
    """The bytes of a file and how far they have been walked through."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple:
        size = struct.calcsize(form)
        self.skip(size)
        return struct.unpack_from(form, self.data, self.at - size)

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("it is cut short")

    def name(self) -> None:
        end = self.data.find(b"\0", self.at, self.at + _LONGEST_NAME)
        if end <= self.at:
            raise ValueError("the name of an image does not end, or is empty")
        self.data[self.at : end].decode("utf-8")
        self.at = end + 1


def _check(path: Path, walk: Callable[[_Bytes], None]) -> None:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _Bytes(data)
            for _ in range(*found.take(_COUNT)):
                walk(found)
            if found.at != len(data):
                raise ValueError("it is longer than its records")
    except (OSError, ValueError, OverflowError) as error:
        raise IntegrityError(f"{path}: the COLMAP model is damaged ({error})") from error


def _camera(file: _Bytes, parameters: Callable[[int], int]) -> None:
    _, model, _, _ = file.take(_CAMERA)
    file.skip(8 * parameters(model))


def _image(file: _Bytes) -> None:
    file.take(_IMAGE)
    file.name()
    file.skip(_KEYPOINT * file.take(_COUNT)[0])


def _point(file: _Bytes) -> None:
    file.skip(_OBSERVATION * file.take(_POINT)[-1])


def _rig(file: _Bytes) -> None:
    _, sensors = file.take(_RIG)
    if sensors:
        file.skip(_SENSOR)
    for _ in range(sensors - 1):
        file.skip(_SENSOR)
        file.skip(_POSE * bool(*file.take(_BYTE)))


def _frame(file: _Bytes) -> None:
    *_, images = file.take(_FRAME)
    file.skip(_FRAME_IMAGE * images)
