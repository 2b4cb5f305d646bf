"""Ellipses of uncertainty around matched points."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from matcher.drawing.canvas import YELLOW, Placed, as_points
from matcher.errors import UsageError

ENLARGED = 20  # a tenth of a pixel could not be seen
_CORNERS = 33


def draw_ellipses(axes: Axes, placed: Placed, points: np.ndarray, covariances: np.ndarray | None) -> None:
    """The one-sigma ellipses of points, `ENLARGED` times their size.

    Args:
        axes: of a drawing that `placed` lies on.
        placed: the image of the points.
        points: (K, 2) stored pixels.
        covariances: (K, 2, 2) stored pixels²; None draws nothing.

    Raises:
        UsageError: arrays whose shapes do not fit.
    """
    if covariances is None:
        return
    points, covariances = as_points(points, "points"), np.asarray(covariances, dtype=np.float64)
    if covariances.shape != (len(points), 2, 2):
        raise UsageError(f"covariances must be ({len(points)}, 2, 2), not {covariances.shape}")
    if not len(points):
        return
    angle = np.linspace(0, 2 * np.pi, _CORNERS)
    values, axes_of = np.linalg.eigh(covariances)
    radii = axes_of * np.sqrt(values.clip(0))[:, None]
    rings = points[:, None] + ENLARGED * np.stack([np.cos(angle), np.sin(angle)], 1) @ radii.swapaxes(1, 2)
    outlines = placed.points(rings.reshape(-1, 2)).reshape(rings.shape)
    axes.add_collection(LineCollection(list(outlines), colors=[YELLOW], linewidths=0.6, alpha=0.8))
