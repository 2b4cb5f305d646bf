"""`matcher explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from matcher.cli import options
from matcher.cli.match import First, MaskFile, Second
from matcher.cli.messages import show

ExplainOptions = Annotated[dict[str, Any], ("second_pass", "engine"), {}]  # one pass is explained


def explain(
    image0: First,
    image1: Second,
    output: Annotated[Path, typer.Option(metavar="FILE.html", help="Report to create.", show_default=False)],
    given: ExplainOptions,
    point: Annotated[
        str | None,
        typer.Option(metavar="x,y", help="Show the keypoint nearest to this pixel of IMAGE0 first."),
    ] = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Match two images and write a report that explains each match: attention, early exit, pruning.

    The report is a single HTML file that works offline.
    """
    from matcher.cli.result import check_each
    from matcher.errors import UsageError
    from matcher.explain.report.report import write_report
    from matcher.loading import load

    position = None
    if point is not None:
        try:
            x, y = (float(part) for part in point.split(","))
        except ValueError as error:
            raise UsageError(f"--point must be x,y in pixels of {image0}, not {point!r}") from error
        position = (x, y)
    check_each([(output, (".html",))], (image0, image1, mask0, mask1), overwrite=overwrite)
    masks = {"mask0": mask0, "mask1": mask1}
    result = write_report(load(**given), image0, image1, output, position, **masks, overwrite=overwrite)
    show(f"{len(result.matches)} matches, {int(result.geometry.inliers.sum())} inliers; wrote {output}")
