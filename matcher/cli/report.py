"""`matcher report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matcher.cli import options
from matcher.cli.messages import complain, show

_SHOWN = 5


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="Folder of a run.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Page to create; by default RUN_DIR/report.html.")
    ] = None,
    pages: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of weakest pairs that get a page of their own.")
    ] = 20,
    overwrite: options.Overwrite = False,
) -> None:
    """Write an HTML report of a run: pair graph, match counts, tracks, failures and weakest pairs."""
    from matcher.explain.report.run import write_run_report

    written = write_run_report(run, output, pages=pages, overwrite=overwrite)
    show(f"wrote {written.index} and pages of {written.pages} pairs")
    for text in written.left_out[:_SHOWN]:
        complain(f"no page for {text}")
    if len(written.left_out) > _SHOWN:
        complain(f"and {len(written.left_out) - _SHOWN} more; the page lists them")
