"""COLMAP's binary models, walked through before COLMAP reads them, which on a file cut short never ends.

The layout is that of COLMAP's src/colmap/scene/reconstruction_io.cc: little-endian, a count, then records.
"""

from __future__ import annotations

import io
import json
import mmap
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.errors import IntegrityError
from matcher.export.output import ExportReport
from matcher.files import write_whole
from matcher.sfm.mapping import CLOUD, RESULT

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- model_files: COLMAP's binary models, walked through before COLMAP reads them, which on a file cut
# short never ends.

_COUNT, _BYTE = "<Q", "<B"
_CAMERA = "<IiQQ"  # id, model, width, height; its parameters follow
_IMAGE = "<I7dI"  # id, pose, camera; its name, a zero and its keypoints follow
_POINT = "<Q3d3BdQ"  # id, position, colour, error, length of its track, which follows
_RIG = "<II"  # id, sensors; the first one follows, then the others with their poses
_FRAME = "<II7dI"  # id, rig, pose, how many images, which follow
_KEYPOINT, _OBSERVATION, _SENSOR, _POSE, _FRAME_IMAGE = 24, 8, 8, 56, 16  # bytes
_LONGEST_NAME = 4096


def check_model_files(folder: Path, parameters: Callable[[int], int]) -> None:
    """Refuse a binary model with a file that does not hold what its counts promise; text models are passed.

    Args:
        folder: of the model.
        parameters: how many a camera model has, by COLMAP's number; ValueError for an unknown one.

    Raises:
        IntegrityError: a file is damaged, or is no file.
    """
    walks = {
        "rigs.bin": _rig,
        "cameras.bin": lambda file: _camera(file, parameters),
        "frames.bin": _frame_model_files,
        "images.bin": _image,
        "points3D.bin": _point,
    }
    for name, walk in walks.items():
        path = folder / name
        if path.is_file():
            _check(path, walk)
        elif path.exists():  # a pipe would keep a reader waiting
            raise IntegrityError(f"{path} is not a file")


class _Bytes:
    """The bytes of a file and how far they have been walked through."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple:
        size = struct.calcsize(form)
        self.skip(size)
        return struct.unpack_from(form, self.data, self.at - size)

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("it is cut short")

    def name(self) -> None:
        end = self.data.find(b"\0", self.at, self.at + _LONGEST_NAME)
        if end <= self.at:
            raise ValueError("the name of an image does not end, or is empty")
        self.data[self.at : end].decode("utf-8")
        self.at = end + 1


def _check(path: Path, walk: Callable[[_Bytes], None]) -> None:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _Bytes(data)
            for _ in range(*found.take(_COUNT)):
                walk(found)
            if found.at != len(data):
                raise ValueError("it is longer than its records")
    except (OSError, ValueError, OverflowError) as error:
        raise IntegrityError(f"{path}: the COLMAP model is damaged ({error})") from error


def _camera(file: _Bytes, parameters: Callable[[int], int]) -> None:
    _, model, _, _ = file.take(_CAMERA)
    file.skip(8 * parameters(model))


def _image(file: _Bytes) -> None:
    file.take(_IMAGE)
    file.name()
    file.skip(_KEYPOINT * file.take(_COUNT)[0])


def _point(file: _Bytes) -> None:
    file.skip(_OBSERVATION * file.take(_POINT)[-1])


def _rig(file: _Bytes) -> None:
    _, sensors = file.take(_RIG)
    if sensors:
        file.skip(_SENSOR)
    for _ in range(sensors - 1):
        file.skip(_SENSOR)
        file.skip(_POSE * bool(*file.take(_BYTE)))


def _frame_model_files(file: _Bytes) -> None:
    *_, images = file.take(_FRAME)
    file.skip(_FRAME_IMAGE * images)


# --- plot: A plot of a reconstruction: its points and cameras from above and from the front.

_POINTS_DRAWN = 60_000
_CAMERA_SIZE = 0.05  # of the scene's extent
_KEPT = (2.0, 98.0)  # percentiles of the points that the plot must show; stray ones lie far away
_MARGIN = 0.06
_CAMERA_COLOUR = "#c8102e"


def draw_model(
    cam_from_world: Mapping[str, np.ndarray],
    cameras: Mapping[str, Mapping[str, Any]],
    points: np.ndarray,
    colours: np.ndarray,
    path: Path,
) -> None:
    """Draw points in their colours and cameras as pyramids, seen from above and from the front, as a PNG.

    Args:
        cam_from_world: name → pose (3, 4), x right, y down, z ahead.
        cameras: name → its size in pixels and parameters, the focal length first.
        points: (P, 3).
        colours: (P, 3) uint8; black ones, of photos that were not there, are drawn in grey.
        path: the file.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    poses = list(cam_from_world.values())
    axes = scene_axes(poses)
    centres = np.array([-pose[:, :3].T @ pose[:, 3] for pose in poses]) @ axes.T
    cloud = points @ axes.T
    low, high = _limits(cloud, centres)
    size = _CAMERA_SIZE * float(np.max(high - low))
    shapes = [_pyramid(cam_from_world[name], cameras[name], size) @ axes.T for name in cam_from_world]
    step = max(1, len(cloud) // _POINTS_DRAWN)
    unseen = ~colours.any(axis=1)
    shades = np.where(unseen[:, None], 110, colours)[::step] / 255
    figure = Figure(figsize=(16, 8), dpi=100, layout="constrained")
    panels: Sequence[tuple[str, int, int, int]] = (("from above", 0, 2, 1), ("from the front", 0, 1, 2))
    for panel, (title, across, up, along) in zip(figure.subplots(1, 2), panels, strict=True):
        seen = cloud[::step]
        order = np.argsort(-seen[:, 2]) if along == 2 else np.argsort(-seen[:, 1])  # the nearest on top
        # The scene's axes are those of a camera: y points down.
        sign = -1 if up == 1 else 1
        panel.scatter(seen[order, across], sign * seen[order, up], s=3.0, c=shades[order], linewidths=0)
        for shape in shapes:
            panel.plot(shape[:, across], sign * shape[:, up], color=_CAMERA_COLOUR, linewidth=0.9)
        _frame_plot(panel, low[[across, up]], high[[across, up]], sign, title)
    figure.suptitle(f"{len(poses)} cameras, {len(points)} points")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_whole(path, buffer.getvalue())


def scene_axes(poses: Sequence[np.ndarray]) -> np.ndarray:
    """(3, 3) rows right, down and ahead of the scene in world coordinates, from how the cameras are held.

    Down is the mean of the cameras' own; ahead is the mean of where they look, or any direction where that
    has none, as in a ring.
    """
    down = _unit(np.mean([pose[1, :3] for pose in poses], axis=0), np.array([0.0, 1.0, 0.0]))
    ahead = np.mean([pose[2, :3] for pose in poses], axis=0)
    ahead = _unit(ahead - (ahead @ down) * down, poses[0][2, :3] - (poses[0][2, :3] @ down) * down)
    ahead = _unit(ahead, np.cross(down, [1.0, 0.0, 0.0]))
    return np.stack([np.cross(down, ahead), down, ahead])


def _unit(vector: np.ndarray, instead: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vector)
    return vector / length if length > 0.05 else instead / max(float(np.linalg.norm(instead)), 1e-12)


def _limits(cloud: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The corners (3,) of a box that holds all cameras and nearly all points."""
    kept = np.percentile(cloud, _KEPT, axis=0) if len(cloud) else centres
    everything = np.concatenate([kept, centres])
    low, high = everything.min(axis=0), everything.max(axis=0)
    margin = _MARGIN * max(float(np.max(high - low)), 1e-9)
    return low - margin, high + margin


def _pyramid(pose: np.ndarray, camera: Mapping[str, Any], size: float) -> np.ndarray:
    """(N, 3) a line through the edges of a camera's pyramid, in world coordinates."""
    half = np.array(camera["size"]) / 2 / camera["params"][0]
    half = half * (size / max(float(np.linalg.norm(half)), 1e-9)) / 1.5
    corners = np.array([[x * half[0], y * half[1], size] for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))])
    tip = np.zeros(3)
    a, b, c, d = corners
    line = np.array([tip, a, b, tip, c, d, tip, d, a, b, c])
    return (line - pose[:, 3]) @ pose[:, :3]


def _frame_plot(panel: Axes, low: np.ndarray, high: np.ndarray, sign: int, title: str) -> None:
    panel.set_title(title)
    panel.set_aspect("equal")
    panel.set_xlim(low[0], high[0])
    panel.set_ylim(*sorted((sign * low[1], sign * high[1])))
    panel.set_xticks([])
    panel.set_yticks([])


# --- summary: The summary that `reconstruct` writes beside a model: which run it was made from, and numbers
# of it.

SUMMARY = "summary.json"
KEPT_CAMERAS = "cameras_given"  # in it: whether the user gave all cameras, so that none was adjusted
_LARGEST = 1 << 28  # bytes; an image takes about one thousand


def read_summary(folder: Path) -> dict[str, Any]:
    """What the summary in a folder says, nothing where there is none that can be read.

    The folder may be anybody's: what is not a file is not opened, since a pipe would never end.
    """
    path = folder / SUMMARY
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# --- sparse_models: What COLMAP's process made: models read, plotted and summarised.

PLOT, DEVIATIONS = "reconstruction.png", "deviations.npz"


@dataclass(frozen=True, eq=False)
class SparseModel:
    """One connected reconstruction."""

    cam_from_world: dict[str, np.ndarray]  # name → (3, 4) float64, COLMAP's axes: x right, y down, z ahead
    cameras: dict[str, dict[str, Any]]  # name → model, size, params in COLMAP's pixels
    points: int
    observations: int
    mean_track_length: float
    mean_reprojection_error: float  # stored pixels
    georegistration: dict[str, Any] | None = None  # where on Earth; then units are metres, x east, z up
    positions_unused: str | None = None  # why positions in the photos' headers do not say where on Earth
    began_simply: bool = False  # whether cameras got all their parameters once the images were registered

    @property
    def registered(self) -> int:
        """Images with a pose."""
        return len(self.cam_from_world)

    def centres(self) -> dict[str, np.ndarray]:
        """Camera centres (3,) by name."""
        return {name: -pose[:, :3].T @ pose[:, 3] for name, pose in self.cam_from_world.items()}


def read_described(
    part: Path, report: ExportReport, made_from: Mapping[str, Any], place: Mapping[str, Any] | None
) -> tuple[SparseModel, ...]:
    """Read, plot and summarise the child's output, and remove its temporary files; empty: there is no model.

    Args:
        part: the folder of the output.
        report: of the export.
        made_from: "run", its folder from that of the model, and "features", what they depend on.
        place: the georegistration of the model that the poses come from.
    """
    described = json.loads((part / RESULT).read_text(encoding="utf-8"))
    if not described:
        return ()
    if place is not None:  # the coordinates are those of the model that the poses come from
        described[0]["georegistration"] = described[0]["georegistration"] or dict(place)
    models = tuple(_model(row) for row in described)
    _write_summary(part / SUMMARY, report, described, made_from)
    with np.load(part / CLOUD) as cloud:
        shape = models[0].cam_from_world, models[0].cameras
        draw_model(*shape, cloud["points"], cloud["colours"], part / PLOT)
    for leftover in (RESULT, CLOUD, DEVIATIONS):
        (part / leftover).unlink(missing_ok=True)
    shutil.rmtree(part / "work", ignore_errors=True)
    return models


def _model(row: dict[str, Any]) -> SparseModel:
    poses = {name: np.array(pose, dtype=np.float64) for name, pose in row["cam_from_world"].items()}
    numbers = ("points", "observations", "mean_track_length", "mean_reprojection_error")
    found = {name: row[name] for name in (*numbers, "georegistration", "positions_unused", "began_simply")}
    return SparseModel(poses, row["cameras"], **found)


def _write_summary(
    path: Path, report: ExportReport, described: list[dict[str, Any]], made_from: Mapping[str, Any]
) -> None:
    summary = {
        **made_from,  # the run whose keypoints the model's are, and what they depend on
        "images": report.images,
        "pairs": report.pairs,
        "verified_pairs": report.verified,
        "matches": report.matches,
        "models": described,
    }
    write_whole(path, json.dumps(summary, indent=1).encode())
