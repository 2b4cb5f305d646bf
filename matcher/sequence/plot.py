"""Plots and recordings of trajectories: the path from above and its errors, before and after loops closed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
from matplotlib.figure import Figure

from matcher.localization.plot import log_map
from matcher.sequence.frames import FrameResult
from matcher.sequence.pose_tracking import rays
from matcher.sequence.trajectory import path_length
from matcher.types import Image
from matcher.viz.drawings import BLUE, GREEN, ORANGE, PINK, VERMILION, save_figure
from matcher.viz.recording import RecordingFile

if TYPE_CHECKING:
    from matcher.localization.sparse_map import SparseMap
    from matcher.sequence.keyframe_map import ClosedTrajectory

_AXES = {"right": GREEN, "down": PINK, "ahead": ORANGE}


def plot_trajectory(
    path: str | Path,
    found: np.ndarray,
    ground_truth: np.ndarray | None = None,
    *,
    keyframes: Sequence[int] = (),
    breaks: Sequence[int] = (),
    unit: str = "m",
    title: str = "",
) -> Path:
    """Draw poses world_from_cam (N, 4, 4), and true ones in the same frame; rows of keyframes are marked, and
    `breaks`, from which poses are relative to an extrapolated one, where the line is broken. The plot is
    .png, .jpg, .jpeg, .pdf or .svg, lengths are in the `unit`."""
    positions = found[:, :3, 3]
    true = None if ground_truth is None else ground_truth[:, :3, 3]
    spans = np.ptp(positions if true is None else np.concatenate([positions, true]), axis=0)
    width = float(np.clip(spans[0] / max(spans[2], 1e-9), 0.5, 1.6))
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    above, beside = figure.subplots(1, 2, width_ratios=[width, 1.2])
    if true is not None:
        above.plot(true[:, 0], true[:, 2], color=VERMILION, linewidth=3, alpha=0.6, label="ground truth")
    look = dict(color=BLUE, linewidth=1.2, marker=".", markersize=3)
    for number, part in enumerate(np.split(positions, breaks)):
        above.plot(part[:, 0], part[:, 2], label=None if number else "estimate", **look)
    if len(lost := positions[list(breaks)]):
        above.scatter(lost[:, 0], lost[:, 2], s=60, marker="x", color=VERMILION, label="tracking lost before")
    marked = positions[list(keyframes)]
    above.scatter(marked[:, 0], marked[:, 2], s=28, facecolors="none", edgecolors=BLUE, label="keyframes")
    above.set(xlabel=f"x, right ({unit})", ylabel=f"z, ahead ({unit})", title="from above", xmargin=0.1)
    above.annotate("start", positions[0, [0, 2]], xytext=(8, 2), textcoords="offset points", fontsize=9)
    above.set_aspect("equal", adjustable="datalim")
    above.legend()
    label = f"distance travelled ({unit})"
    if true is None:
        for part in np.split(np.column_stack([path_length(found), -positions[:, 1]]), breaks):
            beside.plot(*part.T, color=BLUE)
        beside.set(xlabel=label, ylabel=f"height ({unit})", title="height, to its own scale")
    else:
        way, difference = path_length(ground_truth), positions - true
        beside.plot(way, np.linalg.norm(difference, axis=1), color="black", label="distance")
        for axis, (name, colour) in enumerate(_AXES.items()):
            beside.plot(way, difference[:, axis], linewidth=1.2, color=colour, label=name)
        beside.legend()
        beside.set(xlabel=label, ylabel=f"estimate − ground truth ({unit})", title="position error")
    for axes in (above, beside):
        axes.grid(alpha=0.3)
    return save_figure(figure, path)


def plot_closing(
    path: str | Path | None, closed: ClosedTrajectory, *, overwrite: bool
) -> Path | PIL.Image.Image:
    """Draw both paths from above, the loops, and how far each pose was moved; as `save_figure`."""
    before, after, loops = closed.before, closed.after, _ends(closed)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    above, beside = figure.subplots(1, 2)
    # Tracked ones are wider, so that both are seen where they agree.
    above.plot(before[:, 0, 3], before[:, 2, 3], color="#999999", label="tracked", linewidth=4.0)
    above.plot(after[:, 0, 3], after[:, 2, 3], color=BLUE, label="adjusted", linewidth=1.5)
    look = dict(color=VERMILION, linewidth=0.8, markersize=3, alpha=0.6)
    for number, ends in enumerate(loops):  # where they were before, as they lie together afterwards
        above.plot(ends[:, 0], ends[:, 2], "o-", label=None if number else "loops", **look)
    above.set_aspect("equal", "datalim")
    found = f"{len(loops)} loop closures{'' if closed.problem is None else ', left open'}"
    above.set(xlabel="right", ylabel="ahead", title=f"from above, {found}")
    above.legend()
    beside.plot(closed.moved(), color=BLUE)
    beside.set(xlabel="pose", ylabel="moved by", title="how far each pose was moved")
    beside.grid(alpha=0.3)
    return save_figure(figure, path, overwrite=overwrite)


def _ends(closed: ClosedTrajectory) -> list[np.ndarray]:
    """Of each loop (2, 3) where tracking has its keyframes."""
    rows = [np.searchsorted(closed.frames, loop[:2]) for loop in closed.loops]
    return [closed.before[pair, :3, 3] for pair in rows]


def record_closing(path: Path, closed: ClosedTrajectory) -> Path:
    """Write both paths, the loops, and how far each pose was moved, as an .rrd file."""
    with RecordingFile(path) as file:
        rr, stream = file.rr, file.stream
        file.lay_out("path and loops", file.views.TimeSeriesView(origin="moved_by", name="moved by"))
        lines = {
            "tracked": ([closed.before[:, :3, 3]], (150, 150, 150)),
            "adjusted": ([closed.after[:, :3, 3]], (0, 114, 178)),
            "loops": (_ends(closed), (213, 94, 0)),
        }
        for name, (strips, colour) in lines.items():
            if strips:
                stream.log(f"world/{name}", rr.LineStrips3D(strips, colors=colour), static=True)
        for row, distance in enumerate(closed.moved()):
            stream.set_time("pose", sequence=row)
            stream.log("moved_by", rr.Scalars([float(distance)]))
    return path


_MAP = "in_map"  # the entity of what is in the coordinates of a loaded map


class Recording(RecordingFile):
    """Writes a recording of images, tracks, poses, points and milliseconds, or shows one as it grows. Colours
    follow the track id, so a point that is lost and found again keeps its colour."""

    def __init__(self, path: str | Path | None, loaded: SparseMap | None = None) -> None:
        """Open a file or the viewer as `RecordingFile` does; a loaded map has a view of its own."""
        super().__init__(path)
        image = self.views.Spatial2DView(origin="world/camera/image", name="frame")
        beside = [image, self.views.TimeSeriesView(origin="milliseconds", name="milliseconds")]
        if loaded is not None:
            beside.insert(0, self.views.Spatial3DView(origin=_MAP, name="in the map"))
            self._extent = log_map(self, _MAP, loaded)
        self.lay_out("route and points", *beside)
        self._routes: dict[str, list[np.ndarray]] = {"world": [], _MAP: []}
        self._cloud: dict[int, np.ndarray] = {}  # track → position in the world

    def add(self, result: FrameResult, image: Image | None) -> None:
        """Add a frame; `image` is what the front end saw, None where the frame was skipped."""
        rr, stream = self.rr, self.stream
        stream.reset_time()
        stream.set_time("frame", sequence=result.index)
        if result.timestamp is not None:
            stream.set_time("time", duration=result.timestamp)
        scale = np.ones(2) if image is None else np.asarray(image.scale)
        if image is not None:
            stream.log("world/camera/image", rr.Image(image.pixels).compress(jpeg_quality=75))
        if len(result.keypoints):
            # The image is drawn with the centre of its first pixel at (0.5, 0.5).
            positions, colours = (result.keypoints + 0.5) * scale, track_colours(result.track_ids)
            stream.log("world/camera/image/tracks", rr.Points2D(positions, colors=colours, radii=2.0))
        for root, T in (("world", result.world_from_cam), (_MAP, result.map_from_cam)):
            if T is None:
                continue
            self._routes[root].append(T[:3, 3])
            stream.log(f"{root}/route", rr.LineStrips3D([np.array(self._routes[root])]))
            if result.camera is None:
                stream.log(f"{root}/camera", rr.Transform3D(translation=T[:3, 3], mat3x3=T[:3, :3]))
                continue
            look = {}
            if root == _MAP:
                look = dict(image_plane_distance=self._extent * 0.08, color=(46, 204, 64))
            width, height = (round(side * factor) for side, factor in zip(result.size, scale, strict=True))
            self.log_camera(f"{root}/camera", T, result.camera, scale=scale, size=(width, height), **look)
        needed = result.world_from_cam, result.camera, result.depths
        if result.is_keyframe and not any(each is None for each in needed):
            known = np.isfinite(result.depths)
            local = rays(result.keypoints[known].astype(np.float64), result.camera)
            local *= result.depths[known, None]
            world = local @ result.world_from_cam[:3, :3].T + result.world_from_cam[:3, 3]
            self._cloud |= zip(result.track_ids[known].tolist(), world, strict=True)
            for track in list(self._cloud)[: max(0, len(self._cloud) - 200_000)]:  # the oldest go
                del self._cloud[track]
            tracks, positions = (np.array(list(each)) for each in (self._cloud, self._cloud.values()))
            size = rr.Radius.ui_points(1.5)  # of the screen: the unit of one camera is any length
            stream.log("world/points", rr.Points3D(positions, colors=track_colours(tracks), radii=size))
        for stage, value in result.milliseconds.items():
            stream.log(f"milliseconds/{stage}", rr.Scalars([value]))


def track_colours(track_ids: np.ndarray) -> np.ndarray:
    """(N, 3) uint8, one bright colour for every id, neighbours far apart."""
    hue = (np.asarray(track_ids, np.float64) * 0.61803398875) % 1.0  # the golden ratio's part
    channels = [np.abs((hue * 6 + shift) % 6 - 3) - 1 for shift in (0, 4, 2)]
    return (55 + 200 * np.clip(np.stack(channels, axis=-1), 0, 1)).astype(np.uint8)
