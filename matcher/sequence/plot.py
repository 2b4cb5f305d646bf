"""A plot of a trajectory: the path from above, and its error."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from matcher.files import check_output, write_output
from matcher.sequence.trajectory import path_length

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
