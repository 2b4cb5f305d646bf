"""Recordings for the rerun viewer: images, tracks, poses, points in space, milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.data.image import Image
from matcher.drawing.recording_file import RecordingFile
from matcher.localization.recording import log_map
from matcher.sequence.frames import FrameResult
from matcher.sequence.odometry import rays

if TYPE_CHECKING:
    from matcher.data.camera import Camera
    from matcher.localization.sparse_map import SparseMap

_QUALITY = 75  # of the images' JPEG
_POINT_SIZE = 1.5  # radius on the screen
_POINTS = 200_000  # in space, of which the oldest go
_MAP = "in_map"  # the entity of what is in the coordinates of a loaded map
_ROUTE_COLOUR, _SIZE = (46, 204, 64), 0.08  # the latter a distance, of the extent of the map's cameras


class Recording(RecordingFile):
    """Writes a recording file, or shows one in the viewer as it grows.

    Colours follow the track id, so a point that is lost and found again keeps its colour.
    """

    def __init__(self, path: str | Path | None, loaded: SparseMap | None = None) -> None:
        """Open.

        Args:
            path: an .rrd file, which appears whole when the recording is closed; None starts the viewer.
            loaded: the map in which frames are localised; it has a view of its own, with their poses in it.

        Raises:
            UsageError: rerun is not installed, or there is no display for the viewer.
        """
        super().__init__(path)
        image = self.views.Spatial2DView(origin="world/camera/image", name="frame")
        times = self.views.TimeSeriesView(origin="milliseconds", name="milliseconds")
        beside = [image, times]
        if loaded is not None:
            beside.insert(0, self.views.Spatial3DView(origin=_MAP, name="in the map"))
            self._extent = log_map(self, _MAP, loaded)
        self._loaded = loaded is not None
        self._seen: dict[int, _Seen] = {}
        self.lay_out("route and points", *beside)
        self._route: list[np.ndarray] = []
        self._cloud: dict[int, np.ndarray] = {}  # track → position in the world

    def add(self, result: FrameResult, image: Image | None) -> None:
        """Add a frame; `image` is what the front end saw, None where the frame was skipped."""
        rr, stream = self.rr, self.stream
        self._set_time(result.index, result.timestamp)
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
        rr, T = self.rr, result.world_from_cam
        self._route.append(T[:3, 3])
        self.stream.log("world/route", rr.LineStrips3D([np.array(self._route)]))
        if result.camera is None:
            self.stream.log("world/camera", rr.Transform3D(translation=T[:3, 3], mat3x3=T[:3, :3]))
            return
        scale = np.ones(2) if image is None else np.asarray(image.scale)
        width, height = (round(side * factor) for side, factor in zip(result.size, scale, strict=True))
        shown = dict(scale=scale, size=(width, height))
        self.log_camera("world/camera", T, result.camera, **shown)
        if self._loaded:
            self._seen[result.index] = _Seen(result.timestamp, result.camera, result.map_from_cam, shown)
            if result.map_from_cam is not None:
                self._add_in_map(self._seen[result.index])
        if result.depths is not None and result.is_keyframe:
            self._add_points(result)

    def complete(self, map_poses: Mapping[int, np.ndarray]) -> None:
        """Take in poses in the map, (4, 4) by frame, that are known or better late, and draw the route."""
        for index, pose in map_poses.items():
            if (seen := self._seen.get(index)) is not None:
                self._seen[index] = replace(seen, map_from_cam=pose)
                self._set_time(index, seen.timestamp)
                self._add_in_map(self._seen[index])
        known = [seen.map_from_cam[:3, 3] for seen in self._seen.values() if seen.map_from_cam is not None]
        if known:
            line = self.rr.LineStrips3D([np.array(known)], colors=_ROUTE_COLOUR)
            self.stream.log(f"{_MAP}/route", line, static=True)

    def _set_time(self, index: int, timestamp: float | None) -> None:
        self.stream.reset_time()
        self.stream.set_time("frame", sequence=index)
        if timestamp is not None:
            self.stream.set_time("time", duration=timestamp)

    def _add_in_map(self, seen: _Seen) -> None:
        look = dict(image_plane_distance=self._extent * _SIZE, color=_ROUTE_COLOUR)
        self.log_camera(f"{_MAP}/frame", seen.map_from_cam, seen.camera, **seen.shown, **look)

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
        size = self.rr.Radius.ui_points(_POINT_SIZE)  # of the screen: the unit of one camera is any length
        self.stream.log("world/points", self.rr.Points3D(positions, colors=colours, radii=size))


@dataclass(frozen=True, eq=False)
class _Seen:
    """A frame with a pose, and what is needed to draw it in the map once its pose there is known."""

    timestamp: float | None
    camera: Camera
    map_from_cam: np.ndarray | None
    shown: dict[str, Any]  # of `log_camera`


def track_colours(track_ids: np.ndarray) -> np.ndarray:
    """(N, 3) uint8, one bright colour for every id, neighbours far apart."""
    hue = (np.asarray(track_ids, np.float64) * 0.61803398875) % 1.0
    channels = [np.abs((hue * 6 + shift) % 6 - 3) - 1 for shift in (0, 4, 2)]
    return (55 + 200 * np.clip(np.stack(channels, axis=-1), 0, 1)).astype(np.uint8)
