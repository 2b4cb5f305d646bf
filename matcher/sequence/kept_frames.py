"""What is kept of a map that is being made: images of keyframes, and all poses in one file; always whole."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from matcher.data.camera import Camera
from matcher.data.rotations import check_poses
from matcher.errors import MALFORMED, IntegrityError, UsageError
from matcher.files import write_whole

KEPT = "tracked.npz"  # in the folder of a map that is not finished
_LARGEST = 1 << 31  # bytes
_QUICK = (cv2.IMWRITE_PNG_COMPRESSION, 1)  # a fifth of the time, for a seventh more bytes


@dataclass(frozen=True, eq=False)
class PlacedFrame:
    """A frame with a pose, and the keyframe that it moves with."""

    index: int
    time: float
    world_from_cam: np.ndarray  # (4, 4)
    keyframe: int


@dataclass(frozen=True, eq=False)
class KeptFrames:
    """Frames of a map that is not finished, and what its features are found with."""

    frames: list[PlacedFrame]
    camera: Camera
    preset: str
    options: dict[str, Any]  # of `matcher.load`


def write_kept(folder: Path, kept: KeptFrames) -> None:
    """Write all frames so far; a crash leaves the file as it was.

    Raises:
        OSError: the disk is full.
    """
    frames = kept.frames
    facts = {"camera": asdict(kept.camera), "preset": kept.preset, "options": kept.options}
    buffer = io.BytesIO()
    np.savez(
        buffer,
        index=np.array([frame.index for frame in frames], dtype=np.int64),
        time=np.array([frame.time for frame in frames], dtype=np.float64),
        world_from_cam=np.array([frame.world_from_cam for frame in frames]).reshape(-1, 4, 4),
        keyframe=np.array([frame.keyframe for frame in frames], dtype=np.int64),
        facts=np.array(json.dumps(facts, default=str)),
    )
    write_whole(folder / KEPT, buffer.getvalue())


def read_kept(folder: Path) -> KeptFrames:
    """What `write_kept` wrote.

    Raises:
        UsageError: there is none, because the map is finished or nothing was tracked.
        IntegrityError: the file is damaged.
    """
    path = folder / KEPT
    if not path.is_file():
        raise UsageError(f"{folder} holds no unfinished map (no {KEPT})")
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("it is too large")
        with np.load(path) as rows:
            # We write without compression, so what unpacks to more than the file is not ours.
            if sum(each.file_size for each in rows.zip.infolist()) > path.stat().st_size:
                raise ValueError("it unpacks to more than it may")
            index, time, poses, keyframe = (rows[n] for n in ("index", "time", "world_from_cam", "keyframe"))
            facts = json.loads(str(rows["facts"]))
        if poses.shape != (len(index), 4, 4) or not len(index) == len(time) == len(keyframe):
            raise ValueError("its arrays do not fit each other")
        check_poses(poses)
        camera = facts["camera"]
        camera = Camera(**{**camera, "distortion": tuple(camera["distortion"])})
        preset, options = str(facts["preset"]), dict(facts["options"])
    except (*MALFORMED, zipfile.BadZipFile, zlib.error) as error:
        raise IntegrityError(f"{path}: the poses of the unfinished map are damaged ({error})") from error
    rows = zip(index.tolist(), time.tolist(), poses, keyframe.tolist(), strict=True)
    return KeptFrames([PlacedFrame(*row) for row in rows], camera, preset, options)


def write_image(path: Path, pixels: np.ndarray, mask: np.ndarray | None = None) -> None:
    """Write a keyframe (H, W[, 3]) as a PNG that appears whole; its alpha is 0 where the mask (H, W) is.

    Raises:
        OSError: the disk is full.
    """
    colour = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    if mask is not None:
        colour = cv2.cvtColor(colour, cv2.COLOR_GRAY2BGRA if pixels.ndim == 2 else cv2.COLOR_BGR2BGRA)
        colour[..., 3] = np.where(mask, 255, 0)
    write_whole(path, cv2.imencode(".png", colour, _QUICK)[1].tobytes())


def count_keyframes(frames: Sequence[PlacedFrame]) -> int:
    """How many of the frames are keyframes."""
    return sum(frame.index == frame.keyframe for frame in frames)
