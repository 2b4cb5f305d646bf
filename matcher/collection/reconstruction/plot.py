"""A plot of a reconstruction: its points and cameras from above and from the front."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        _frame(panel, low[[across, up]], high[[across, up]], sign, title)
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


def _frame(panel: Axes, low: np.ndarray, high: np.ndarray, sign: int, title: str) -> None:
    panel.set_title(title)
    panel.set_aspect("equal")
    panel.set_xlim(low[0], high[0])
    panel.set_ylim(*sorted((sign * low[1], sign * high[1])))
    panel.set_xticks([])
    panel.set_yticks([])
