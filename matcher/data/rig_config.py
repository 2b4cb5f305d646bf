"""Cameras that are fixed to each other, such as a stereo pair, from COLMAP's `rig_config.json`.

Pictures taken at the same moment, a frame, have names that differ only in the prefix of their camera, such as
`left/007.png` and `right/007.png`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from matcher.data.camera import Camera
from matcher.data.rotations import as_quaternion, as_rotation, check_poses
from matcher.errors import UsageError
from matcher.files import read_given

_CAMERA = {"image_prefix", "ref_sensor", "camera_model_name", "camera_params"}
_TURN, _SHIFT = "cam_from_rig_rotation", "cam_from_rig_translation"
_UNIT = 1e-2  # by which the length of a rotation's quaternion may be off
_LARGEST_FILE = 1 << 20


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
        """The pictures of each moment, by name; pictures of no rig are left out.

        Raises:
            UsageError: the names of the pictures do not fit: a camera has none, or no two are of one moment.
        """
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
        rows = [{"cameras": [_row(each, each is rig[0]) for each in rig]} for rig in self.rigs]
        return json.dumps(rows, indent=1)


def read_rig_config(path: str | Path) -> RigConfig:
    """The rigs of a file in the format of COLMAP's `rig_config.json`.

    It is a list of `{"cameras": [...]}`, each camera with `image_prefix`; one has `"ref_sensor": true`, the
    others may have `cam_from_rig_rotation` (w, x, y, z) and `cam_from_rig_translation`, all may have
    `camera_model_name` and `camera_params` (in COLMAP's pixels).

    Raises:
        UsageError: the file cannot be read, or says something else; the message names the camera.
    """
    path = Path(path)
    try:
        rows = json.loads(read_given(path, _LARGEST_FILE).decode("utf-8"))
        rigs = tuple(_rig(row) for row in rows if _is_object(row, {"cameras"}, "a rig"))
        if not rigs or not isinstance(rows, list):
            raise ValueError("it lists no rig")
        _check_prefixes([camera.prefix for rig in rigs for camera in rig])
    except (OSError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise UsageError(
            f'{path}: cannot be read as COLMAP\'s rig_config.json, a list of {{"cameras": [...]}} with an '
            f"image_prefix each ({error})"
        ) from error
    return RigConfig(rigs, str(path))


def _rig(row: Mapping[str, Any]) -> tuple[RigCamera, ...]:
    cameras = row.get("cameras")
    if not isinstance(cameras, list) or len(cameras) < 2:
        raise ValueError("a rig has a list of at least two cameras")
    known = _CAMERA | {_TURN, _SHIFT}
    reference = [each.get("ref_sensor", False) for each in cameras if _is_object(each, known, "a camera")]
    if reference.count(True) != 1 or any(not isinstance(value, bool) for value in reference):
        raise ValueError('one camera of each rig, and only one, has "ref_sensor": true')
    found = [_camera(each, reference=is_one) for each, is_one in zip(cameras, reference, strict=True)]
    found.insert(0, found.pop(reference.index(True)))
    return tuple(found)


def _camera(row: Mapping[str, Any], *, reference: bool) -> RigCamera:
    prefix = row.get("image_prefix")
    if not isinstance(prefix, str) or not prefix:
        raise ValueError("each camera has an image_prefix, a text that is not empty")
    for pair in ((_TURN, _SHIFT), ("camera_model_name", "camera_params")):
        if len(row.keys() & set(pair)) == 1:
            raise ValueError(f"{prefix}: {pair[0]} and {pair[1]} go together")
    pose = np.eye(4) if reference else None
    if _TURN in row:
        turn, shift = (np.array(row[key], dtype=np.float64) for key in (_TURN, _SHIFT))
        if turn.shape != (4,) or shift.shape != (3,) or not np.isfinite([*turn, *shift]).all():
            raise ValueError(f"{prefix}: {_TURN} has four finite numbers (w, x, y, z), {_SHIFT} three")
        if abs(np.linalg.norm(turn) - 1) > _UNIT:
            raise ValueError(f"{prefix}: {_TURN} is a quaternion of length 1, not {np.linalg.norm(turn):.3g}")
        if reference and not (np.allclose(np.abs(turn), (1, 0, 0, 0)) and np.allclose(shift, 0)):
            raise ValueError(f"{prefix}: the reference camera's pose is the identity; leave it out")
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = as_rotation(np.roll(turn, -1)), shift
        check_poses(pose[None])
    camera = None
    if "camera_params" in row:
        camera = Camera.from_colmap(row["camera_model_name"], row["camera_params"])
    return RigCamera(prefix, pose, camera)


def _is_object(row: Any, known: set[str], what: str) -> bool:
    """True; ValueError for what is none, or has members that nothing would read."""
    if not isinstance(row, dict):
        raise ValueError(f"{what} is an object, not {type(row).__name__}")
    if unknown := sorted(row.keys() - known):
        raise ValueError(f"{what} has no {unknown[0]!r}; it may have {', '.join(sorted(known))}")
    return True


def _check_prefixes(prefixes: list[str]) -> None:
    # In order, a prefix stands right before one that begins with it.
    for first, second in pairwise(sorted(prefixes)):
        if second.startswith(first):
            raise ValueError(
                f"the image_prefix {first!r} and {second!r} cannot be told apart; end them with / or _"
            )


def _row(each: RigCamera, reference: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"image_prefix": each.prefix}
    if reference:
        row["ref_sensor"] = True
    elif each.cam_from_rig is not None:
        x, y, z, w = as_quaternion(each.cam_from_rig[:3, :3]).tolist()
        row |= {_TURN: [w, x, y, z], _SHIFT: each.cam_from_rig[:3, 3].tolist()}
    if each.camera is not None:
        model, params = each.camera.to_colmap()
        row |= {"camera_model_name": model, "camera_params": list(params)}
    return row
