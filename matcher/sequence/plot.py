"""A plot of a trajectory: the path from above, and its error."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from matcher.files import check_output, write_output
from matcher.localization.plot import log_map
from matcher.sequence.capture import path_length
from matcher.sequence.frames import FrameResult
from matcher.sequence.stereo import rays
from matcher.types import Image
from matcher.viz.recording import RecordingFile

if TYPE_CHECKING:
    from matcher.cameras import Camera
    from matcher.localization.sparse_map import SparseMap


# --- plot: A plot of a trajectory: the path from above, and its error.

PLOT_SUFFIXES = (".png", ".jpg", ".jpeg", ".pdf")
# Of Okabe and Ito's palette.
_FOUND, _TRUE = "#0072b2", "#d55e00"
_AXES = {"right": "#009e73", "down": "#cc79a7", "ahead": "#e69f00"}
_NARROWEST, _WIDEST = 0.5, 1.6  # of the view from above, beside the other panel


def plot_trajectory(
    path: str | Path,
    found: np.ndarray,
    ground_truth: np.ndarray | None = None,
    *,
    keyframes: Sequence[int] = (),
    unit: str = "m",
    title: str = "",
) -> Path:
    """Draw poses and save the plot; it appears whole or not at all.

    Args:
        path: .png, .jpg, .jpeg or .pdf.
        found: (N, 4, 4) camera to world, in the frame of `ground_truth` where there is one.
        ground_truth: (N, 4, 4) of the same frames.
        keyframes: rows of `found` that are marked.
        unit: of length.
        title: above the plot.

    Raises:
        UsageError: an output that cannot be written.
    """
    path = check_output(path, PLOT_SUFFIXES)
    figure = Figure(figsize=(11, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    spans = np.ptp(
        found[:, :3, 3] if ground_truth is None else np.concatenate([found, ground_truth])[:, :3, 3], axis=0
    )
    width = float(np.clip(spans[0] / max(spans[2], 1e-9), _NARROWEST, _WIDEST))
    above, beside = figure.subplots(1, 2, width_ratios=[width, 1.2])
    _draw_from_above(above, found, ground_truth, keyframes, unit)
    if ground_truth is None:
        beside.plot(path_length(found), -found[:, 1, 3], color=_FOUND)
        label = f"distance travelled ({unit})"
        beside.set(xlabel=label, ylabel=f"height ({unit})", title="height, to its own scale")
    else:
        _draw_error(beside, found, ground_truth, unit)
    for axes in (above, beside):
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    kind = path.suffix.lower()[1:]
    figure.savefig(buffer, format=kind, **({"metadata": {"CreationDate": None}} if kind == "pdf" else {}))
    write_output(path, buffer.getvalue())
    return path


def _draw_from_above(
    above: Axes, found: np.ndarray, ground_truth: np.ndarray | None, keyframes: Sequence[int], unit: str
) -> None:
    positions = found[:, :3, 3]
    if ground_truth is not None:
        above.plot(
            ground_truth[:, 0, 3],
            ground_truth[:, 2, 3],
            color=_TRUE,
            linewidth=3,
            alpha=0.6,
            label="ground truth",
        )
    above.plot(
        positions[:, 0],
        positions[:, 2],
        color=_FOUND,
        linewidth=1.2,
        marker=".",
        markersize=3,
        label="estimate",
    )
    marked = positions[list(keyframes)]
    above.scatter(marked[:, 0], marked[:, 2], s=28, facecolors="none", edgecolors=_FOUND, label="keyframes")
    above.set(xlabel=f"x, right ({unit})", ylabel=f"z, ahead ({unit})", title="from above")
    above.annotate("start", positions[0, [0, 2]], xytext=(8, 2), textcoords="offset points", fontsize=9)
    above.set_aspect("equal", adjustable="datalim")
    above.legend()


def _draw_error(beside: Axes, found: np.ndarray, ground_truth: np.ndarray, unit: str) -> None:
    difference, way = (found - ground_truth)[:, :3, 3], path_length(ground_truth)
    beside.plot(way, np.linalg.norm(difference, axis=1), color="black", label="distance")
    for axis, (name, colour) in enumerate(_AXES.items()):
        beside.plot(way, difference[:, axis], linewidth=1.2, color=colour, label=name)
    beside.set(
        xlabel=f"distance travelled ({unit})",
        ylabel=f"estimate − ground truth ({unit})",
        title="position error",
    )
    beside.legend()


# --- recording: Recordings for the rerun viewer: images, tracks, poses, points in space, milliseconds.

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
