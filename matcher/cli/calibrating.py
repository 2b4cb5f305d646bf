"""`matcher evaluate --calibration`: how often match probabilities hold, as a table and a diagram."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from matcher.cli.messages import say, show
from matcher.cli.progress import pair_progress

if TYPE_CHECKING:
    from matcher.lab.evaluate.run import Method
    from matcher.lab.pairs.protocols import PairSet

ENDING = "-calibration"  # of the names of its files, after that of the set


def show_calibration(pair_set: PairSet, methods: list[Method], folder: Path | None) -> int:
    """Measure one set, print its table and, where a folder is given, write table and diagram.

    Returns:
        The number of pairs that were skipped.
    """
    from matcher.drawing.canvas import save_figure
    from matcher.drawing.plots import draw_reliability
    from matcher.files import write_output
    from matcher.lab.evaluate.calibration import as_markdown, as_object, predictions

    skipped: list[str] = []
    with pair_progress(pair_set.name) as progress:
        found = predictions(pair_set, methods, progress=progress, skipped=skipped)
    table = as_object(pair_set, found, skipped)
    show(as_markdown(table), always=True)
    if folder is None:
        return len(skipped)
    path = folder / f"{pair_set.name}{ENDING}"
    texts = {".md": as_markdown(table), ".json": json.dumps(table, indent=1, allow_nan=False)}
    for suffix, text in texts.items():
        write_output(path.with_suffix(suffix), text.encode())
    curves = {row["name"]: (row["confidence"], row["accuracy"], row["count"]) for row in table["rows"]}
    title = f"reliability of match probabilities: {pair_set.name}"
    save_figure(draw_reliability(curves, title=title), path.with_suffix(".png"))
    say(f"wrote {', '.join(str(path.with_suffix(suffix)) for suffix in (*texts, '.png'))}")
    return len(skipped)
