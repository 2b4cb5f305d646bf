"""A drawing of a localised photo: beside the map's image that it matches best, and in the plan of the map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matcher.images import ImageInput, read_image
from matcher.localization.map import Map
from matcher.localization.pose import Pose
from matcher.localization.sparse_map import SparseMap
from matcher.sfm.models import scene_axes
from matcher.viz.drawings import draw_matches, figure_pixels, save_figure
from matcher.viz.recording import RecordingFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- plot: A drawing of a localised photo: beside the map's image that it matches best, and in the plan of
# the map.

_POINTS_DRAWN = 30_000
_SHOWN_SIZE_PLOT = 1024  # pixels of the longer side of a drawn image
_KEPT = (1.0, 99.0)  # percentiles of the points in the plan
_AHEAD = 0.06  # length of a camera's line of sight, of the plan's size
_MAP_COLOUR_PLOT, _MATCHED_COLOUR, _CAMERA_COLOUR = "#666666", "#0072b2", "#c8102e"
_WIDTH, _SHARE, _TITLES = 16.0, 0.72, 0.9  # inches; the images' share of the width; inches above and below
_MANY = 10_000  # points, of which each is drawn small


def plot_pose(place: Map, photo: ImageInput, pose: Pose, path: str | Path) -> Path:
    """Draw a photo, its matches, and its camera among those of the map seen from above.

    Args:
        place: the map.
        photo: what was localised.
        pose: of it; without a pose only the images are drawn, with the reason.
        path: the file, .png, .jpg, .svg or .pdf.

    Raises:
        ImageError: the photo, or the map's image, cannot be read.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    images = _beside(place, photo, pose)
    shape = images.shape[0] / images.shape[1]
    height = min(max(_WIDTH * _SHARE * shape, _WIDTH * (1 - _SHARE)) + _TITLES, _WIDTH)
    figure = Figure(figsize=(_WIDTH, height), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(_SHARE, 1 - _SHARE))
    left.imshow(images)
    left.set_axis_off()
    _draw_plan(right, place.model, pose)
    title = repr(pose).removeprefix("Pose(").removesuffix(")")
    figure.suptitle(title, fontsize=10)
    return save_figure(figure, path)


def _beside(place: Map, photo: ImageInput, pose: Pose) -> np.ndarray:
    """The pixels of both images with lines between the photo's keypoints and those of the map's image."""
    shown = read_image(photo, resize=_SHOWN_SIZE_PLOT)
    if not pose.images:
        return shown.pixels if shown.pixels.ndim == 3 else np.repeat(shown.pixels[:, :, None], 3, axis=2)
    name = next(iter(pose.images))
    image = place.names.index(name)
    observed = place.model.points[image]
    keypoint_of = dict(zip(observed[observed >= 0].tolist(), np.flatnonzero(observed >= 0), strict=True))
    points = np.searchsorted(place.model.ids, pose.point_ids).tolist()
    kept = np.array([row for row, point in enumerate(points) if point in keypoint_of], dtype=np.int64)
    theirs = np.array([keypoint_of[points[row]] for row in kept], dtype=np.int64)
    other = read_image(place.image_path(name), resize=_SHOWN_SIZE_PLOT)
    ends = pose.points2d[kept], place.model.keypoints[image][theirs]
    title = f"{'the photo' if shown.path is None else Path(shown.path).name}, and {name} of the map"
    how = dict(inliers=pose.inliers[kept], colour_by="inliers", title=title)
    return figure_pixels(draw_matches(shown, other, *ends, **how))


def _draw_plan(axes: Axes, model: SparseMap, pose: Pose) -> None:
    """Points and cameras from above, x to the right."""
    right, _, ahead = scene_axes(list(model.cam_from_world))
    across = np.stack([right, ahead])
    cloud = model.xyz[:: max(1, len(model.xyz) // _POINTS_DRAWN)] @ across.T
    axes.scatter(*cloud.T, s=1.0 if len(cloud) > _MANY else 4.0, c="#b0b0b0", linewidths=0)
    back = np.linalg.inv(model.cam_from_world)
    centres = back[:, :3, 3] @ across.T
    axes.scatter(*centres.T, s=6.0, c=_MAP_COLOUR_PLOT, label="the map's images")
    matched = [number for number, name in enumerate(model.names) if pose.images.get(name)]
    if matched:
        axes.scatter(*centres[matched].T, s=24.0, c=_MATCHED_COLOUR, label="those that agree")
    everything = np.concatenate([np.percentile(cloud, _KEPT, axis=0), centres])
    if pose.ok:
        centre, sight = pose.centre @ across.T, pose.world_from_cam[:3, 2] @ across.T
        everything = np.vstack([everything, centre])
        length = _AHEAD * float(np.ptp(everything, axis=0).max())
        end = centre + length * sight / max(float(np.linalg.norm(sight)), 1e-9)
        axes.plot(*np.stack([centre, end]).T, color=_CAMERA_COLOUR, linewidth=1.5)
        axes.scatter(*centre, s=40.0, c=_CAMERA_COLOUR, label="the photo")
    low, high = everything.min(axis=0), everything.max(axis=0)
    margin = 0.05 * max(float((high - low).max()), 1e-9)
    axes.set_xlim(low[0] - margin, high[0] + margin)
    axes.set_ylim(low[1] - margin, high[1] + margin)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title("from above")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=8)


# --- recording: A recording of localised photos among the points and cameras of the map, for the rerun
# viewer.

_QUALITY = 75  # of the photos' JPEG
_SHOWN_SIZE_RECORDING = 640  # pixels of the longer side of a photo
_POINTS = 200_000
_POINT_COLOUR, _MAP_COLOUR_RECORDING, _INLIER_COLOUR = (120, 120, 120), (90, 90, 90), (46, 204, 64)
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
        shown = read_image(photo, resize=_SHOWN_SIZE_RECORDING, upright=False)  # as camera and keypoints are
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
    shown = dict(image_plane_distance=extent * _SIZE, color=_MAP_COLOUR_RECORDING)
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
