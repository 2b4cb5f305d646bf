"""The plot of a training run: loss and validation over pairs and over time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matcher.files import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_curve(rows: Sequence[dict[str, float]], path: Path, title: str) -> None:
    """Draw the rows of `log.jsonl` (step, pairs, seconds, and loss or precision and recall) as a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for column, (key, unit, label) in enumerate(
        (("pairs", 1000, "training pairs / 1000"), ("seconds", 3600, "hours of training"))
    ):
        _lines(axes[0, column], rows, key, unit, ("loss",))
        _lines(axes[1, column], rows, key, unit, ("precision", "recall"))
        axes[1, column].set_xlabel(label)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("validation")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_output(path, buffer.getvalue())


def _lines(axes: Axes, rows: Sequence[dict[str, float]], key: str, unit: float, names: Sequence[str]) -> None:
    for name in names:
        known = [row for row in rows if name in row]
        x, y = [row[key] / unit for row in known], [row[name] for row in known]
        axes.plot(x, y, marker="." if len(x) < 100 else "", linewidth=1.2, label=name)
    axes.grid(alpha=0.3)
    if len(names) > 1:
        axes.legend()
