"""Plots and recordings of trajectories: the path from above and its errors, before and after loops closed."""

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
from matcher.sequence.frames import FrameResult
from matcher.sequence.pose_tracking import rays
from matcher.sequence.trajectory import path_length
from matcher.types import Image
from matcher.viz.recording import RecordingFile

if TYPE_CHECKING:
    from matcher.cameras import Camera
    from matcher.localization.sparse_map import SparseMap

PLOT_SUFFIXES = (".png", ".jpg", ".jpeg", ".pdf")
# Of Okabe and Ito's palette.
_BLUE, _RED = "#0072b2", "#d55e00"
_AXES = {"right": "#009e73", "down": "#cc79a7", "ahead": "#e69f00"}


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
    figure, positions = _figure(), found[:, :3, 3]
    figure.suptitle(title, fontsize=11)
    all_positions = positions if ground_truth is None else np.concatenate([found, ground_truth])[:, :3, 3]
    spans = np.ptp(all_positions, axis=0)
    width = float(np.clip(spans[0] / max(spans[2], 1e-9), 0.5, 1.6))
    above, beside = figure.subplots(1, 2, width_ratios=[width, 1.2])
    if ground_truth is not None:
        true = ground_truth[:, :3, 3]
        above.plot(true[:, 0], true[:, 2], color=_RED, linewidth=3, alpha=0.6, label="ground truth")
    above.plot(
        positions[:, 0],
        positions[:, 2],
        color=_BLUE,
        linewidth=1.2,
        marker=".",
        markersize=3,
        label="estimate",
    )
    marked = positions[list(keyframes)]
    above.scatter(marked[:, 0], marked[:, 2], s=28, facecolors="none", edgecolors=_BLUE, label="keyframes")
    above.set(xlabel=f"x, right ({unit})", ylabel=f"z, ahead ({unit})", title="from above")
    above.annotate("start", positions[0, [0, 2]], xytext=(8, 2), textcoords="offset points", fontsize=9)
    above.set_aspect("equal", adjustable="datalim")
    above.legend()
    label = f"distance travelled ({unit})"
    if ground_truth is None:
        beside.plot(path_length(found), -found[:, 1, 3], color=_BLUE)
        beside.set(xlabel=label, ylabel=f"height ({unit})", title="height, to its own scale")
    else:
        _draw_error(beside, positions - ground_truth[:, :3, 3], path_length(ground_truth))
        beside.set(xlabel=label, ylabel=f"estimate − ground truth ({unit})", title="position error")
    for axes in (above, beside):
        axes.grid(alpha=0.3)
    return _save(figure, path)


def _draw_error(beside: Axes, difference: np.ndarray, way: np.ndarray) -> None:
    beside.plot(way, np.linalg.norm(difference, axis=1), color="black", label="distance")
    for axis, (name, colour) in enumerate(_AXES.items()):
        beside.plot(way, difference[:, axis], linewidth=1.2, color=colour, label=name)
    beside.legend()


def plot_closing(path: Path, before: np.ndarray, after: np.ndarray, loops: Sequence[tuple[int, int]]) -> Path:
    """Draw both paths from above, the tracked poses that loops join, and how far each pose was moved.

    Args:
        path: a .png file, which is replaced.
        before, after: (F, 4, 4) world_from_cam, x right, y down, z ahead.
        loops: pairs of rows.

    Raises:
        OSError: the file cannot be written.
    """
    figure = _figure()
    above, beside = figure.subplots(1, 2)
    # Tracked ones are wider, so that both are seen where they agree.
    for poses, colour, label, width in (
        (before, "#999999", "tracked", 4.0),
        (after, _BLUE, "adjusted", 1.5),
    ):
        above.plot(poses[:, 0, 3], poses[:, 2, 3], color=colour, label=label, linewidth=width)
    look = dict(color=_RED, linewidth=0.8, markersize=3, alpha=0.6)
    for number, rows in enumerate(loops):  # where they were before, as they lie together afterwards
        ends = before[list(rows), :3, 3]
        above.plot(ends[:, 0], ends[:, 2], "o-", label=None if number else "loops", **look)
    above.set_aspect("equal", "datalim")
    above.set(xlabel="right", ylabel="ahead", title=f"from above, {len(loops)} loop closures")
    above.legend()
    beside.plot(np.linalg.norm(after[:, :3, 3] - before[:, :3, 3], axis=1), color=_BLUE)
    beside.set(xlabel="pose", ylabel="moved by", title="how far each pose was moved")
    beside.grid(alpha=0.3)
    return _save(figure, path)


def _figure() -> Figure:
    figure = Figure(figsize=(11, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    buffer, kind = io.BytesIO(), path.suffix.lower()[1:]
    figure.savefig(buffer, format=kind, **({"metadata": {"CreationDate": None}} if kind == "pdf" else {}))
    write_output(path, buffer.getvalue())
    return path


# --- Recordings for the rerun viewer.


def record_closing(
    path: Path, before: np.ndarray, after: np.ndarray, loops: Sequence[tuple[int, int]]
) -> Path:
    """Write both paths, the tracked poses that loops join, and how far each pose was moved.

    Args:
        path: an .rrd file, which is replaced.
        before, after: (F, 4, 4) world_from_cam, x right, y down, z ahead.
        loops: pairs of rows.

    Raises:
        UsageError: rerun is not installed.
    """
    with RecordingFile(path) as file:
        rr, stream = file.rr, file.stream
        file.lay_out("path and loops", file.views.TimeSeriesView(origin="moved_by", name="moved by"))
        lines = {
            "tracked": ([before[:, :3, 3]], (150, 150, 150)),
            "adjusted": ([after[:, :3, 3]], (0, 114, 178)),
            "loops": ([before[list(rows), :3, 3] for rows in loops], (213, 94, 0)),
        }
        for name, (strips, colour) in lines.items():
            if strips:
                stream.log(f"world/{name}", rr.LineStrips3D(strips, colors=colour), static=True)
        for row, distance in enumerate(np.linalg.norm(after[:, :3, 3] - before[:, :3, 3], axis=1)):
            stream.set_time("pose", sequence=row)
            stream.log("moved_by", rr.Scalars([float(distance)]))
    return path


_POINTS = 200_000  # in space, of which the oldest go
_MAP = "in_map"  # the entity of what is in the coordinates of a loaded map
_ROUTE_COLOUR = (46, 204, 64)


class Recording(RecordingFile):
    """Writes a recording of images, tracks, poses, points and milliseconds, or shows one as it grows.

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
        beside = [image, self.views.TimeSeriesView(origin="milliseconds", name="milliseconds")]
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
        scale = np.ones(2) if image is None else np.asarray(image.scale)
        if image is not None:
            stream.log("world/camera/image", rr.Image(image.pixels).compress(jpeg_quality=75))
        if len(result.keypoints):
            # The image is drawn with the centre of its first pixel at (0.5, 0.5).
            positions, colours = (result.keypoints + 0.5) * scale, track_colours(result.track_ids)
            stream.log("world/camera/image/tracks", rr.Points2D(positions, colors=colours, radii=2.0))
        if result.world_from_cam is not None:
            self._add_pose(result, scale)
        for stage, value in result.milliseconds.items():
            stream.log(f"milliseconds/{stage}", rr.Scalars([value]))

    def _add_pose(self, result: FrameResult, scale: np.ndarray) -> None:
        rr, T = self.rr, result.world_from_cam
        self._route.append(T[:3, 3])
        self.stream.log("world/route", rr.LineStrips3D([np.array(self._route)]))
        if result.camera is None:
            self.stream.log("world/camera", rr.Transform3D(translation=T[:3, 3], mat3x3=T[:3, :3]))
            return
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
        """Take in poses in the map, (4, 4) by frame, that became known late, and draw the route."""
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
        look = dict(image_plane_distance=self._extent * 0.08, color=_ROUTE_COLOUR)
        self.log_camera(f"{_MAP}/frame", seen.map_from_cam, seen.camera, **seen.shown, **look)

    def _add_points(self, result: FrameResult) -> None:
        known = np.isfinite(result.depths)
        local = rays(result.keypoints[known].astype(np.float64), result.camera) * result.depths[known, None]
        world = local @ result.world_from_cam[:3, :3].T + result.world_from_cam[:3, 3]
        self._cloud |= zip(result.track_ids[known].tolist(), world, strict=True)
        for track in list(self._cloud)[: max(0, len(self._cloud) - _POINTS)]:
            del self._cloud[track]
        positions, colours = np.array(list(self._cloud.values())), track_colours(np.array(list(self._cloud)))
        size = self.rr.Radius.ui_points(1.5)  # of the screen: the unit of one camera is any length
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
    hue = (np.asarray(track_ids, np.float64) * 0.61803398875) % 1.0  # the golden ratio's part
    channels = [np.abs((hue * 6 + shift) % 6 - 3) - 1 for shift in (0, 4, 2)]
    return (55 + 200 * np.clip(np.stack(channels, axis=-1), 0, 1)).astype(np.uint8)
