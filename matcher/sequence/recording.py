"""Recordings for the rerun viewer: images, tracks, poses, points in space, milliseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from matcher.data.image import Image
from matcher.drawing.recording_file import RecordingFile
from matcher.sequence.frames import FrameResult
from matcher.sequence.odometry import rays

_QUALITY = 75  # of the images' JPEG
_POINT_SIZE = 1.5  # radius on the screen
_POINTS = 200_000  # in space, of which the oldest go


class Recording(RecordingFile):
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
        super().__init__(path)
        image = self.views.Spatial2DView(origin="world/camera/image", name="frame")
        times = self.views.TimeSeriesView(origin="milliseconds", name="milliseconds")
        self.lay_out("route and points", image, times)
        self._route: list[np.ndarray] = []
        self._cloud: dict[int, np.ndarray] = {}  # track → position in the world

    def add(self, result: FrameResult, image: Image | None) -> None:
        """Add a frame; `image` is what the front end saw, None where the frame was skipped."""
        rr, stream = self.rr, self.stream
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
        rr, T = self.rr, result.world_from_cam
        self.stream.log("world/camera", rr.Transform3D(translation=T[:3, 3], mat3x3=T[:3, :3]))
        self._route.append(T[:3, 3])
        self.stream.log("world/route", rr.LineStrips3D([np.array(self._route)]))
        if result.camera is None:
            return
        scale = np.ones(2) if image is None else np.asarray(image.scale)
        K = result.camera.K
        K[:2, 2] += 0.5  # the image is drawn with the centre of its first pixel at (0.5, 0.5)
        K[:2] *= scale[:, None]
        width, height = result.size
        resolution = (round(width * scale[0]), round(height * scale[1]))
        self.stream.log("world/camera/image", rr.Pinhole(image_from_camera=K, resolution=resolution))
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
        size = self.rr.Radius.ui_points(_POINT_SIZE)  # of the screen: the unit of one camera is any length
        self.stream.log("world/points", self.rr.Points3D(positions, colors=colours, radii=size))


def track_colours(track_ids: np.ndarray) -> np.ndarray:
    """(N, 3) uint8, one bright colour for every id, neighbours far apart."""
    hue = (np.asarray(track_ids, np.float64) * 0.61803398875) % 1.0
    channels = [np.abs((hue * 6 + shift) % 6 - 3) - 1 for shift in (0, 4, 2)]
    return (55 + 200 * np.clip(np.stack(channels, axis=-1), 0, 1)).astype(np.uint8)
