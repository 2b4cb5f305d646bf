"""`matcher sfm` from poses that are known, and `matcher sfm --continue`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from matcher.cli.collecting import say_round
from matcher.cli.exits import PARTIAL
from matcher.cli.messages import show
from matcher.cli.progress import stage_progress
from matcher.cli.reconstructed import summary_lines

Poses = Annotated[
    Path | None,
    typer.Option(
        "--poses",
        metavar="MODEL|FILE",
        help="Known poses: a COLMAP model, hloc's lines (.txt), images.txt or .json. Only points are "
        "triangulated, of the photos with a pose.",
    ),
]
Continued = Annotated[
    Path | None,
    typer.Option(
        "--continue",
        metavar="MODEL",
        help="Add the photos to this model, in its coordinates and with its run; MODEL itself is kept. They "
        "must lie in the folder of its images.",
    ),
]


def add_photos(
    model: Path,
    photos: Path,
    out: Path,
    run: Path | None,
    wanted: dict[str, Any],
    how: dict[str, Any],
    mapping: dict[str, Any],
    *,
    beside: bool,
) -> int:
    """Add photos to a model; returns the exit code. `beside`: options were given that do not go with it."""
    from matcher.collection.reconstruction.growing import continue_model

    if beside:
        raise typer.BadParameter(
            "a continued model is matched with the settings of its run; leave out what selects or extracts "
            "images, --restart and --dry-run"
        )
    if "file" in wanted:
        raise typer.BadParameter("--pairs cannot list the pairs of a continued model; use --similar")
    with stage_progress() as update:
        steps = dict(run_dir=run, pairs=wanted, on_progress=update, on_round=say_round)
        mapping = {name: value for name, value in mapping.items() if name != "poses"}
        made = continue_model(model, photos, out, how=how, **steps, **mapping)
    for line in summary_lines(made, None):
        show(line)
    return PARTIAL if made.largest.registered < made.images or made.export.left_out else 0
