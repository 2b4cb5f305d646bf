"""A recording of localised photos among the points and cameras of the map, for the rerun viewer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matcher.collection.reconstruction.plot import scene_axes
from matcher.data.images import ImageInput, read_image
from matcher.drawing.recording_file import RecordingFile
from matcher.localization.pose import Pose

if TYPE_CHECKING:
    from matcher.localization.map import Map
    from matcher.localization.sparse_map import SparseMap

_QUALITY = 75  # of the photos' JPEG
_SHOWN_SIZE = 640  # pixels of the longer side of a photo
_POINTS = 200_000
_POINT_COLOUR, _MAP_COLOUR, _INLIER_COLOUR = (120, 120, 120), (90, 90, 90), (46, 204, 64)
_SIZE, _LARGE = 0.015, 0.08  # distances of drawn images from cameras, of the extent of the map's cameras
_POINT, _INLIER = 0.75, 2.5  # radii on the screen: the map's unit is any length


class LocalizationRecording(RecordingFile):
    """Points and cameras of a map; then each photo, its camera and its inliers, on a timeline of photos."""

    def __init__(self, path: str | Path, place: Map) -> None:
        """Open, and write the map.

        Args:
            path: an .rrd file, which appears whole when the recording is closed.
            place: the map.

        Raises:
            UsageError: rerun is not installed.
        """
        super().__init__(path)
        photo = self.views.Spatial2DView(origin="photo", name="photo")
        self.lay_out("map and photos", photo, self.views.TextLogView(origin="photos", name="photos"))
        self._number = 0
        self._extent = log_map(self, "world", place.model)

    def add(self, name: str, photo: ImageInput, pose: Pose) -> None:
        """Add a photo; without a pose only its picture and the reason are written.

        Raises:
            ImageError: the photo cannot be read.
        """
        rr, entity = self.rr, ["world", "localized", name]
        self.stream.set_time("photo", sequence=self._number)
        self._number += 1
        text = repr(pose) if pose.ok else f"no pose: {pose.reason}"
        self.stream.log(["photos", name, "status"], rr.TextLog(f"{name}: {text}"))
        shown = read_image(photo, resize=_SHOWN_SIZE, upright=False)  # as camera and keypoints are
        picture = rr.Image(shown.pixels).compress(jpeg_quality=_QUALITY)
        self.stream.log("photo", picture)
        if not pose.ok:
            self.stream.log("photo/inliers", rr.Points2D([]))  # not those of the photo before
            self.stream.log("world/inliers", rr.Points3D([]))
            return
        scale = np.asarray(shown.scale)
        size = shown.pixels.shape[1], shown.pixels.shape[0]
        how = dict(image_plane_distance=self._extent * _LARGE, color=_INLIER_COLOUR)
        self.log_camera(entity, pose.world_from_cam, pose.camera, scale=scale, size=size, **how)
        self.stream.log([*entity, "image"], picture)
        # The image is drawn with the centre of its first pixel at (0.5, 0.5).
        seen = (pose.points2d[pose.inliers] + 0.5) * scale
        look = dict(colors=_INLIER_COLOUR, radii=rr.Radius.ui_points(_INLIER))
        self.stream.log("photo/inliers", rr.Points2D(seen, **look))
        self.stream.log("world/inliers", rr.Points3D(pose.points3d[pose.inliers], **look))


def log_map(file: RecordingFile, root: str, model: SparseMap) -> float:
    """Write points and cameras of a map below the entity `root`, and say how far its cameras extend."""
    rr = file.rr
    file.stream.log(root, getattr(rr.ViewCoordinates, axes_of(model.cam_from_world)), static=True)
    back = np.linalg.inv(model.cam_from_world)
    extent = max(float(np.ptp(back[:, :3, 3], axis=0).max()), 1e-6)
    kept = model.xyz[:: 1 + len(model.xyz) // _POINTS]
    look = dict(colors=_POINT_COLOUR, radii=rr.Radius.ui_points(_POINT))
    file.stream.log(f"{root}/points", rr.Points3D(kept, **look), static=True)
    shown = dict(image_plane_distance=extent * _SIZE, color=_MAP_COLOUR)
    for name, world_from_cam, camera in zip(model.names, back, model.cameras, strict=True):
        file.log_camera([root, "map", name], world_from_cam, camera, static=True, **shown)
    return extent


def axes_of(cam_from_world: np.ndarray) -> str:
    """Which of rerun's `ViewCoordinates` shows a world upright: the axis nearest to the cameras' down, or up.

    Args:
        cam_from_world: (N, 4, 4). In metres of GPS positions z is up; as COLMAP leaves a world, y is down.
    """
    down = scene_axes(list(cam_from_world))[1]
    axis = int(np.argmax(np.abs(down)))
    return f"RIGHT_HAND_{'XYZ'[axis]}_{'DOWN' if down[axis] > 0 else 'UP'}"
