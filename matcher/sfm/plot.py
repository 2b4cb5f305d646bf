"""A plot of a reconstruction: its points and cameras from above and from the front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matcher.sfm.models import registered
from matcher.viz.drawings import save_figure


def draw_model(model: Any, path: Path) -> None:
    """Draw a `pycolmap.Reconstruction` from above and from the front, as a PNG: cameras as pyramids, points
    in their colours, bright ones darker, black ones, of photos that are gone, in grey."""
    images, points = registered(model), list(model.points3D.values())
    poses = [image.cam_from_world().matrix() for image in images]
    axes = scene_axes(poses)
    centres = np.array([image.projection_center() for image in images]) @ axes.T
    cloud = np.array([point.xyz for point in points]).reshape(-1, 3) @ axes.T
    colours = np.array([point.color for point in points]).reshape(-1, 3)
    shades = np.where(colours.any(axis=1)[:, None], 0.8 * colours, 110) / 255
    kept = np.percentile(cloud, (2.0, 98.0), axis=0) if len(cloud) else centres  # stray ones lie far away
    box = np.concatenate([kept, centres])
    size = 0.05 * float(np.ptp(box, axis=0).max())
    figure = Figure(figsize=(16, 8), dpi=100, layout="constrained")
    panels = ("from above", [0, 2], 1, 1), ("from the front", [0, 1], 2, -1)  # y points down
    for panel, (title, across, along, up) in zip(figure.subplots(1, 2), panels, strict=True):
        order = np.argsort(-cloud[:, along], kind="stable")  # the nearest on top
        draw_points(panel, cloud[order][:, across] * (1, up), shades[order], 60_000)
        for image, pose in zip(images, poses, strict=True):
            camera = model.camera(image.camera_id)
            half = np.array([camera.width, camera.height]) / 2 / camera.params[0]
            half = half * (size / max(float(np.linalg.norm(half)), 1e-9)) / 1.5
            tip, corners = (0, 0, 0), np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * half
            a, b, c, d = np.column_stack([corners, np.full(4, size)])
            pyramid = (np.array([tip, a, b, tip, c, d, tip, d, a, b, c]) - pose[:, 3]) @ pose[:, :3] @ axes.T
            panel.plot(pyramid[:, across[0]], up * pyramid[:, across[1]], color="#c8102e", linewidth=0.9)
        show_box(panel, box[:, across] * (1, up), title)
    figure.suptitle(f"{len(poses)} cameras, {len(points)} points")
    save_figure(figure, path)


def draw_points(axes: Axes, points: np.ndarray, colours: Any, most: int = 30_000) -> np.ndarray:
    """Dots at (P, 2), or at some of them where they are very many; returns those that are drawn."""
    step = max(1, len(points) // most)
    shown = points[::step]
    size = 1.0 if len(shown) > 10_000 else 4.0
    axes.scatter(*shown.T, s=size, c=colours if isinstance(colours, str) else colours[::step], linewidths=0)
    return shown


def show_box(axes: Axes, points: np.ndarray, title: str) -> None:
    """Show the box of the points (P, 2) and a margin, one unit as long in x as in y."""
    low, high = points.min(axis=0), points.max(axis=0)
    margin = 0.05 * max(float((high - low).max()), 1e-9)
    axes.set(title=title, xticks=[], yticks=[], aspect="equal")
    axes.set(xlim=(low[0] - margin, high[0] + margin), ylim=(low[1] - margin, high[1] + margin))


def scene_axes(poses: Sequence[np.ndarray]) -> np.ndarray:
    """(3, 3) rows right, down and ahead of the scene in world coordinates, from how the cameras are held.
    Down is the mean of the cameras' own; ahead is the mean of where they look, or any direction where that
    has none, as in a ring."""

    def unit(vector: np.ndarray, instead: np.ndarray) -> np.ndarray:
        length = np.linalg.norm(vector)
        return vector / length if length > 0.05 else instead / max(float(np.linalg.norm(instead)), 1e-12)

    down = unit(np.mean([pose[1, :3] for pose in poses], axis=0), np.array([0.0, 1.0, 0.0]))
    ahead, first = np.mean([pose[2, :3] for pose in poses], axis=0), poses[0][2, :3]
    ahead = unit(ahead - (ahead @ down) * down, first - (first @ down) * down)
    ahead = unit(ahead, np.cross(down, [1.0, 0.0, 0.0]))
    return np.stack([np.cross(down, ahead), down, ahead])
