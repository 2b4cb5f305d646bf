"""Recordings for the rerun viewer: images, tracks, poses, points in space, milliseconds."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matcher.data.image import Image
from matcher.errors import UsageError, install_command
from matcher.sequence.frames import FrameResult
from matcher.sequence.odometry import rays

if TYPE_CHECKING:
    from types import ModuleType

_QUALITY = 75  # of the images' JPEG
_POINTS = 200_000  # in space, of which the oldest go


class Recording:
    """Writes a recording file, or shows one in the viewer as it grows.

    Colours follow the track id, so a point that is lost and found again keeps its colour.
    """

    def __init__(self, path: str | Path | None) -> None:
        """Open.

        Args:
            path: an .rrd file, which appears whole when the recording is closed; None starts the viewer.

        Raises:
            UsageError: rerun is not installed, or there is no display for the viewer.
        """
        self._rr = _rerun()
        self._path = None if path is None else Path(path)
        self._part: Path | None = None
        self._stream = self._rr.RecordingStream("matcher")
        if self._path is None:
            _need_display()
            self._stream.spawn()
        else:
            self._part = self._path.with_name(f".{self._path.name[:80]}.{secrets.token_hex(4)}.part")
            self._stream.save(self._part)
        self._route: list[np.ndarray] = []
        self._cloud: dict[int, np.ndarray] = {}  # track → position in the world
        self._stream.log("world", self._rr.ViewCoordinates.RIGHT_HAND_Y_DOWN, static=True)

    def add(self, result: FrameResult, image: Image | None) -> None:
        """Add a frame; `image` is what the front end saw, None where the frame was skipped."""
        rr, stream = self._rr, self._stream
        stream.set_time("frame", sequence=result.index)
        if result.timestamp is not None:
            stream.set_time("time", duration=result.timestamp)
        if image is not None:
            stream.log("world/camera/image", rr.Image(image.pixels).compress(jpeg_quality=_QUALITY))
        if len(result.keypoints):
            # The image is drawn with the centre of its first pixel at (0.5, 0.5).
            scale = np.ones(2) if image is None else np.asarray(image.scale)
            positions = (result.keypoints + 0.5) * scale
            colours = track_colours(result.track_ids)
            stream.log("world/camera/image/tracks", rr.Points2D(positions, colors=colours, radii=2.0))
        if result.world_from_cam is not None:
            self._add_pose(result, image)
        for stage, value in result.milliseconds.items():
            stream.log(f"milliseconds/{stage}", rr.Scalars([value]))

    def _add_pose(self, result: FrameResult, image: Image | None) -> None:
        rr, T = self._rr, result.world_from_cam
        self._stream.log("world/camera", rr.Transform3D(translation=T[:3, 3], mat3x3=T[:3, :3]))
        self._route.append(T[:3, 3])
        self._stream.log("world/route", rr.LineStrips3D([np.array(self._route)]))
        if result.camera is None:
            return
        scale = np.ones(2) if image is None else np.asarray(image.scale)
        K = result.camera.K
        K[:2, 2] += 0.5  # the image is drawn with the centre of its first pixel at (0.5, 0.5)
        K[:2] *= scale[:, None]
        width, height = result.size
        resolution = (round(width * scale[0]), round(height * scale[1]))
        self._stream.log("world/camera/image", rr.Pinhole(image_from_camera=K, resolution=resolution))
        if result.depths is not None and result.is_keyframe:
            self._add_points(result)

    def _add_points(self, result: FrameResult) -> None:
        known = np.isfinite(result.depths)
        depths, points = result.depths[known], result.keypoints[known].astype(np.float64)
        local = rays(points, result.camera)
        world = (local * depths[:, None]) @ result.world_from_cam[:3, :3].T + result.world_from_cam[:3, 3]
        self._cloud |= zip(result.track_ids[known].tolist(), world, strict=True)
        for track in list(self._cloud)[: max(0, len(self._cloud) - _POINTS)]:
            del self._cloud[track]
        colours = track_colours(np.array(list(self._cloud)))
        positions = np.array(list(self._cloud.values()))
        self._stream.log("world/points", self._rr.Points3D(positions, colors=colours, radii=0.03))

    def close(self) -> None:
        """Finish the file."""
        self._stream.flush()
        self._stream.disconnect()
        if self._part is not None and self._part.exists():
            self._part.replace(self._path)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._stream.disconnect()
        if self._part is not None:
            self._part.unlink(missing_ok=True)


def track_colours(track_ids: np.ndarray) -> np.ndarray:
    """(N, 3) uint8, one bright colour for every id, neighbours far apart."""
    hue = (np.asarray(track_ids, np.float64) * 0.61803398875) % 1.0
    channels = [np.abs((hue * 6 + shift) % 6 - 3) - 1 for shift in (0, 4, 2)]
    return (55 + 200 * np.clip(np.stack(channels, axis=-1), 0, 1)).astype(np.uint8)


def _rerun() -> ModuleType:
    try:
        import rerun
    except ModuleNotFoundError as error:
        raise UsageError(f"recordings and the viewer need rerun: {install_command('rerun')}") from error
    return rerun


def _need_display() -> None:
    if sys.platform.startswith("linux") and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))):
        raise UsageError("there is no display for the viewer; write a recording (FILE.rrd) instead")
