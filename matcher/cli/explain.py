"""`matcher explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matcher.cli import options
from matcher.cli.loading import Given
from matcher.cli.messages import show

First = Annotated[Path, typer.Argument(metavar="IMAGE0", show_default=False, help="First image.")]
Second = Annotated[Path, typer.Argument(metavar="IMAGE1", show_default=False, help="Second image.")]


def explain(
    image0: First,
    image1: Second,
    output: Annotated[Path, typer.Option(metavar="FILE.html", help="Report to create.", show_default=False)],
    given: Given,
    point: Annotated[
        str | None,
        typer.Option(metavar="x,y", help="Show the keypoint nearest to this pixel of IMAGE0 first."),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Match two images and write a report that explains each match: attention, early exit, pruning.

    The report is a single HTML file that works offline.
    """
    from matcher.errors import UsageError
    from matcher.explain.report.report import write_report
    from matcher.files import check_output
    from matcher.loading import load

    position = None
    if point is not None:
        try:
            x, y = (float(part) for part in point.split(","))
        except ValueError as error:
            raise UsageError(f"--point must be x,y in pixels of {image0}, not {point!r}") from error
        position = (x, y)
    for image in (image0, image1):
        if output.exists() and image.exists() and output.samefile(image):
            raise UsageError(f"{output} is an input; name another file for the output")
    check_output(output, (".html",), overwrite=overwrite)
    pipeline = load(**given)
    result = write_report(pipeline, image0, image1, output, position, overwrite=overwrite)
    show(f"{len(result.matches)} matches, {int(result.geometry.inliers.sum())} inliers; wrote {output}")
