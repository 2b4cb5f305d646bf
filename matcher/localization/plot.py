"""Localised photos: drawn beside the image of the map that they match best, and recorded for rerun."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from matcher.images import ImageInput, read_image
from matcher.localization.map import Map
from matcher.localization.pose import Pose
from matcher.localization.sparse_map import SparseMap
from matcher.sfm.plot import draw_points, scene_axes, show_box
from matcher.viz.drawings import draw_matches, figure_pixels, save_figure
from matcher.viz.overlays import as_colour
from matcher.viz.recording import RecordingFile

_SHOWN = 1024, 640  # pixels of the longer side of an image in a plot, and of a photo in a recording
_GREEN = (46, 204, 64)


def plot_pose(place: Map, photo: ImageInput, pose: Pose, path: str | Path) -> Path:
    """Draw a photo, its matches, and its camera among those of the map seen from above."""
    shown, model = read_image(photo, resize=_SHOWN[0]), place.model
    if pose.images:
        name = next(iter(pose.images))
        image = place.names.index(name)
        observed = np.where(model.points[image] < 0, -1, model.ids[model.points[image]])
        _, kept, theirs = np.intersect1d(pose.point_ids, observed, return_indices=True)
        other = read_image(place.image_path(name), resize=_SHOWN[0])
        ends = pose.points2d[kept], model.keypoints[image][theirs]
        title = f"{'the photo' if shown.path is None else Path(shown.path).name}, and {name} of the map"
        inliers = pose.inliers[kept] if pose.ok else None  # of a refused pose there are none
        how = dict(inliers=inliers, colour_by="confidence" if inliers is None else "inliers", title=title)
        pixels = figure_pixels(draw_matches(shown, other, *ends, **how))
    else:
        pixels = as_colour(shown.pixels)
    height = 16 * max(0.72 * pixels.shape[0] / pixels.shape[1], 0.28) + 0.9  # inches; .9: titles
    figure = Figure(figsize=(16, min(height, 16)), dpi=100, layout="constrained")
    left, axes = figure.subplots(1, 2, width_ratios=(0.72, 0.28))
    left.imshow(pixels)
    left.set_axis_off()
    across = scene_axes(list(model.cam_from_world))[[0, 2]]  # from above, x to the right
    cloud = draw_points(axes, model.xyz @ across.T, "#b0b0b0")
    centres = np.linalg.inv(model.cam_from_world)[:, :3, 3] @ across.T
    axes.scatter(*centres.T, s=6.0, c="#666666", label="the map's images")
    box = np.concatenate([np.percentile(cloud, (1.0, 99.0), axis=0), centres])
    if pose.ok:
        agree = centres[[number for number, name in enumerate(model.names) if pose.images.get(name)]]
        axes.scatter(*agree.T, s=24.0, c="#0072b2", label="those that agree")
        centre, sight = pose.centre @ across.T, pose.world_from_cam[:3, 2] @ across.T
        box = np.vstack([box, centre])
        length = 0.06 * float(np.ptp(box, axis=0).max())
        end = centre + length * sight / max(float(np.linalg.norm(sight)), 1e-9)
        axes.plot(*np.stack([centre, end]).T, color="#c8102e", linewidth=1.5)
        axes.scatter(*centre, s=40.0, c="#c8102e", label="the photo")
    show_box(axes, box, "from above")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=8)
    figure.suptitle(repr(pose).removeprefix("Pose(").removesuffix(")"), fontsize=10)
    return save_figure(figure, path)


class LocalizationRecording(RecordingFile):
    """Points and cameras of a map; then each photo, its camera and its inliers, on a timeline of photos."""

    def __init__(self, path: str | Path, place: Map) -> None:
        """Open, and write the map; `UsageError`: rerun is not installed."""
        super().__init__(path)
        photo = self.views.Spatial2DView(origin="photo", name="photo")
        self.lay_out("map and photos", photo, self.views.TextLogView(origin="photos", name="photos"))
        self._number = 0
        self._extent = log_map(self, "world", place.model)

    def add(self, name: str, photo: ImageInput, pose: Pose) -> None:
        """Add a photo; without a pose only its picture and the reason are written."""
        rr, entity = self.rr, ["world", "localized", name]
        self.stream.set_time("photo", sequence=self._number)
        self._number += 1
        text = repr(pose) if pose.ok else f"no pose: {pose.reason}"
        self.stream.log(["photos", name, "status"], rr.TextLog(f"{name}: {text}"))
        shown = read_image(photo, resize=_SHOWN[1], upright=False)  # as camera and keypoints are
        picture = rr.Image(shown.pixels).compress(jpeg_quality=75)
        self.stream.log("photo", picture)
        if not pose.ok:
            self.stream.log("photo/inliers", rr.Points2D([]))  # not those of the photo before
            self.stream.log("world/inliers", rr.Points3D([]))
            return
        scale = np.asarray(shown.scale)
        how = dict(image_plane_distance=0.08 * self._extent, color=_GREEN, scale=scale)
        size = shown.pixels.shape[1], shown.pixels.shape[0]
        self.log_camera(entity, pose.world_from_cam, pose.camera, size=size, **how)
        self.stream.log([*entity, "image"], picture)
        # The image is drawn with the centre of its first pixel at (0.5, 0.5).
        seen = (pose.points2d[pose.inliers] + 0.5) * scale
        look = dict(colors=_GREEN, radii=rr.Radius.ui_points(2.5))
        self.stream.log("photo/inliers", rr.Points2D(seen, **look))
        self.stream.log("world/inliers", rr.Points3D(pose.points3d[pose.inliers], **look))


def log_map(file: RecordingFile, root: str, model: SparseMap) -> float:
    """Write points and cameras of a map below the entity `root`, and say how far its cameras extend."""
    rr = file.rr
    down = scene_axes(list(model.cam_from_world))[1]
    # In metres of GPS positions z is up; as COLMAP leaves a world, y is down.
    axis = int(np.argmax(np.abs(down)))
    upright = f"RIGHT_HAND_{'XYZ'[axis]}_{'DOWN' if down[axis] > 0 else 'UP'}"
    file.stream.log(root, getattr(rr.ViewCoordinates, upright), static=True)
    back = np.linalg.inv(model.cam_from_world)
    extent = max(float(np.ptp(back[:, :3, 3], axis=0).max()), 1e-6)
    look = dict(colors=(120, 120, 120), radii=rr.Radius.ui_points(0.75))  # on the screen, in any unit
    cloud = rr.Points3D(model.xyz[:: 1 + len(model.xyz) // 200_000], **look)
    file.stream.log(f"{root}/points", cloud, static=True)
    shown = dict(image_plane_distance=0.015 * extent, color=(90, 90, 90))
    for name, world_from_cam, camera in zip(model.names, back, model.cameras, strict=True):
        file.log_camera([root, "map", name], world_from_cam, camera, static=True, **shown)
    return extent
