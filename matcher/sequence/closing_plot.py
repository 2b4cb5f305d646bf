"""A plot of a trajectory before and after its loops were closed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from matcher.files import write_output

_BEFORE, _AFTER, _LOOP = "#999999", "#0072b2", "#d55e00"


def plot_closing(path: Path, before: np.ndarray, after: np.ndarray, loops: Sequence[tuple[int, int]]) -> Path:
    """Draw both paths from above, the tracked poses that loops join, and how far each pose was moved.

    Args:
        path: a .png file, which is replaced.
        before, after: (F, 4, 4) world_from_cam, x right, y down, z ahead.
        loops: pairs of rows.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, beside = figure.subplots(1, 2)
    # Tracked ones are wider, so that both are seen where they agree.
    paths = ((before, _BEFORE, "tracked", 4.0), (after, _AFTER, "adjusted", 1.5))
    for poses, colour, label, width in paths:
        above.plot(poses[:, 0, 3], poses[:, 2, 3], color=colour, label=label, linewidth=width)
    for number, rows in enumerate(loops):  # where they were before, as they lie together afterwards
        ends = before[list(rows), :3, 3]
        label = None if number else "loops"
        above.plot(
            ends[:, 0], ends[:, 2], "o-", color=_LOOP, linewidth=0.8, markersize=3, alpha=0.6, label=label
        )
    above.set_aspect("equal", "datalim")
    above.set(xlabel="right", ylabel="ahead", title=f"from above, {len(loops)} loop closures")
    above.legend()
    beside.plot(np.linalg.norm(after[:, :3, 3] - before[:, :3, 3], axis=1), color=_AFTER)
    beside.set(xlabel="pose", ylabel="moved by", title="how far each pose was moved")
    beside.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_output(path, buffer.getvalue())
    return path
