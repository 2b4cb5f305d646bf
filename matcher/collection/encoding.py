"""Bytes of a pair and of keypoints: compact, little endian, each with a CRC-32 beside it.

A pair takes 6 bytes per match: two 16-bit indices (32-bit where an image has more than 65,536
keypoints) and a score in steps of 1/65535; then one bit per match for inliers, the matrix and the pose.
Points are stored only where they differ from the keypoints of the indices.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

import numpy as np

from matcher.config import GeometryKind, GeometryStatus
from matcher.data.camera import Camera
from matcher.data.matches import Matches, TwoViewGeometry

_HEAD = "<BBBBIHII"  # version, kind, status, flags, K, layers run, kept 0, kept 1
_VERSION = 1
_WIDE, _MATRIX, _POSE, _REFINED0, _REFINED1 = 1, 2, 4, 8, 16
_SCORE_STEPS = 65535
_INTRINSICS = ("fx", "fy", "cx", "cy")


class DamagedError(ValueError):
    """Stored bytes are damaged."""


def checksum(data: bytes) -> int:
    """CRC-32, as zlib computes it."""
    return zlib.crc32(data)


def check(data: bytes, crc: int, what: str) -> bytes:
    """The bytes, if their checksum is right; `what` names them in the message.

    Raises:
        DamagedError: they have another checksum.
    """
    if not isinstance(data, bytes) or zlib.crc32(data) != crc:
        raise DamagedError(f"{what} is damaged (its checksum differs)")
    return data


def encode_keypoints(keypoints: np.ndarray) -> bytes:
    """(N, 2) float32."""
    return np.ascontiguousarray(keypoints, dtype="<f4").tobytes()


def decode_keypoints(data: bytes, what: str) -> np.ndarray:
    """(N, 2) float32; `what` names them in the message.

    Raises:
        DamagedError: they are no points, or not all finite.
    """
    if len(data) % 8:
        raise DamagedError(f"{what}: {len(data)} bytes are no points")
    points = np.frombuffer(data, dtype="<f4").reshape(-1, 2).astype(np.float32)
    if not np.isfinite(points).all():
        raise DamagedError(f"{what} are not all finite")
    return points


def encode_camera(camera: Camera) -> list[Any] | dict[str, Any]:
    """A camera ready for JSON: fx, fy, cx, cy of a pinhole camera of any size, else its fields by name."""
    if camera == Camera(camera.fx, camera.fy, camera.cx, camera.cy):
        return [camera.fx, camera.fy, camera.cx, camera.cy]
    values = asdict(camera)
    return {**values, "size": camera.size and list(camera.size), "distortion": list(camera.distortion)}


def common_camera(settings: Mapping[str, Any]) -> Camera | None:
    """The camera of every image of a run that has none of its own; errors as `decode_camera`."""
    value = settings.get("camera")
    return None if value is None else decode_camera(value)


def decode_camera(value: Any, what: str = "a camera") -> Camera:
    """The inverse of `encode_camera`; `what` names the value in the message.

    Raises:
        DamagedError: it is not what `encode_camera` makes.
    """
    try:
        if isinstance(value, dict):
            fields = {**value, "distortion": tuple(value.get("distortion", ()))}
            numbers = [
                *(value[name] for name in _INTRINSICS),
                *(value.get("size") or ()),
                *fields["distortion"],
            ]
        else:
            fields, numbers = dict(zip(_INTRINSICS, value, strict=True)), value
        # `Camera` would take numbers in texts.
        if all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
            return Camera(**fields)
        raise ValueError("not all of them are numbers")
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise DamagedError(f"{what} is none ({error})") from error


def parse_json(text: str, what: str) -> Any:
    """The value of a text as JSON has it; `what` names the text in the message.

    Raises:
        DamagedError: it is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is no JSON ({error})") from error


def to_json(value: Any) -> str:
    """A text that `parse_json` takes."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def encode_pair(
    matches: Matches, geometry: TwoViewGeometry, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> bytes:
    """A pair without its names; keypoints are (N, 2) and (M, 2) float32 of the two images.

    Raises:
        ValueError: indices outside the keypoints, or arrays whose lengths differ: nothing is to be written.
    """
    indices = _checked_indices(matches, geometry, len(keypoints0), len(keypoints1))
    wide = max(len(keypoints0), len(keypoints1)) > 65536
    parts = [
        indices.astype("<u4" if wide else "<u2").tobytes(),
        np.rint(np.clip(matches.scores, 0, 1) * _SCORE_STEPS).astype("<u2").tobytes(),
        np.packbits(geometry.inliers.astype(bool)).tobytes(),
    ]
    flags = _WIDE if wide else 0
    if geometry.matrix is not None:
        flags |= _MATRIX
        parts.append(np.asarray(geometry.matrix, dtype="<f8").reshape(3, 3).tobytes())
    if geometry.cam1_from_cam0 is not None:
        flags |= _POSE
        parts.append(np.asarray(geometry.cam1_from_cam0, dtype="<f8").reshape(4, 4).tobytes())
    sides = (
        (_REFINED0, matches.points0, keypoints0, indices[:, 0]),
        (_REFINED1, matches.points1, keypoints1, indices[:, 1]),
    )
    for flag, points, keypoints, index in sides:
        points = np.asarray(points, dtype=np.float32)
        differs = np.any(points != keypoints[index], axis=1)
        if differs.any():
            flags |= flag
            parts += [np.packbits(differs).tobytes(), points[differs].astype("<f4").tobytes()]
    kind = get_args(GeometryKind).index(geometry.kind)
    status = get_args(GeometryStatus).index(geometry.status)
    numbers = (len(matches), matches.layers_run, matches.kept0, matches.kept1)
    return b"".join([struct.pack(_HEAD, _VERSION, kind, status, flags, *numbers), *parts])


def _checked_indices(matches: Matches, geometry: TwoViewGeometry, count0: int, count1: int) -> np.ndarray:
    indices = np.asarray(matches.indices, dtype=np.int64).reshape(-1, 2)
    lengths = {len(indices), len(matches.scores), len(geometry.inliers)}
    if lengths | {len(matches.points0), len(matches.points1)} != {len(indices)}:
        raise ValueError("matches, scores, points and inliers differ in number")
    if len(indices) and (indices.min() < 0 or np.any(indices.max(axis=0) >= (count0, count1))):
        raise ValueError("a match refers to a keypoint that the image does not have")
    if not np.isfinite(matches.scores).all():
        raise ValueError("a match has a score that is not finite")
    return indices


def decode_pair(
    data: bytes, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> tuple[Matches, TwoViewGeometry]:
    """The inverse of `encode_pair`.

    Raises:
        DamagedError: the bytes do not make a pair of these images.
    """
    try:
        return _decode_pair(_Cursor(data), keypoints0, keypoints1)
    except (struct.error, ValueError, IndexError) as error:
        raise DamagedError(f"a pair cannot be decoded ({error})") from error


class _Cursor:
    """Reads arrays from bytes one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, struct.calcsize(_HEAD)
        self.head = struct.unpack_from(_HEAD, data)

    def take(self, dtype: str, count: int) -> np.ndarray:
        array = np.frombuffer(self.data, dtype, count, self.place)
        self.place += array.nbytes
        return array

    def bits(self, count: int) -> np.ndarray:
        return np.unpackbits(self.take("u1", -(-count // 8)), count=count).astype(bool)


def _decode_pair(
    cursor: _Cursor, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> tuple[Matches, TwoViewGeometry]:
    version, kind, status, flags, count, layers, kept0, kept1 = cursor.head
    if version != _VERSION:
        raise ValueError(f"version {version}")
    indices = cursor.take("<u4" if flags & _WIDE else "<u2", 2 * count).astype(np.int64).reshape(-1, 2)
    scores = cursor.take("<u2", count).astype(np.float32) / np.float32(_SCORE_STEPS)
    inliers = cursor.bits(count)
    matrix = cursor.take("<f8", 9).astype(np.float64).reshape(3, 3) if flags & _MATRIX else None
    pose = cursor.take("<f8", 16).astype(np.float64).reshape(4, 4) if flags & _POSE else None
    points = [keypoints0[indices[:, 0]], keypoints1[indices[:, 1]]]
    for side, flag in enumerate((_REFINED0, _REFINED1)):
        if flags & flag:
            differs = cursor.bits(count)
            points[side][differs] = cursor.take("<f4", 2 * int(differs.sum())).reshape(-1, 2)
    if cursor.place != len(cursor.data):
        raise ValueError("bytes are left over")
    if not all(np.isfinite(values).all() for values in (*points, matrix, pose) if values is not None):
        raise ValueError("a point or a matrix is not finite")
    matches = Matches(indices, points[0], points[1], scores, layers, kept0, kept1)
    geometry = TwoViewGeometry(
        get_args(GeometryKind)[kind], get_args(GeometryStatus)[status], inliers, matrix, pose
    )
    if geometry.status == "ok" and (matrix is None or (geometry.kind == "essential" and pose is None)):
        raise ValueError("a geometry has no matrix")
    return matches, geometry
