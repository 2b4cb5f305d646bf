"""`matcher explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matcher.cli import options
from matcher.cli.loading import Given

Picture = Annotated[Path, typer.Argument(show_default=False)]


def explain(
    image0: Picture,
    image1: Picture,
    output: Annotated[Path, typer.Option(metavar="FILE.html", help="The report.", show_default=False)],
    given: Given,
    point: Annotated[
        str | None, typer.Option(metavar="x,y", help="Of image0, in pixels; its keypoint is shown first.")
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Match two pictures and write why: one HTML file with attention, exit and pruning of every keypoint."""
    from matcher.errors import UsageError
    from matcher.explain.report.report import write_report
    from matcher.pipeline import load

    place = None
    if point is not None:
        try:
            x, y = (float(part) for part in point.split(","))
        except ValueError as error:
            raise UsageError(f"--point must be x,y in pixels of {image0}, not {point!r}") from error
        place = (x, y)
    for image in (image0, image1):
        if output.exists() and image.exists() and output.samefile(image):
            raise UsageError(f"{output} is an input; name another file for the output")
    pipeline = load(**given)
    result = write_report(pipeline, image0, image1, output, place, overwrite=overwrite)
    typer.echo(f"{len(result.matches)} matches, {int(result.geometry.inliers.sum())} inliers; wrote {output}")
