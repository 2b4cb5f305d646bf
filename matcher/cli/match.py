"""`matcher match`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matcher.cli import options
from matcher.cli.loading import Given

Picture = Annotated[Path, typer.Argument(show_default=False)]
MaskFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Picture, not black where to look.")]
CameraText = Annotated[str | None, typer.Option(metavar="fx,fy,cx,cy", help="In pixels of the file.")]


def match(
    image0: Picture,
    image1: Picture,
    given: Given,
    camera0: CameraText = None,
    camera1: CameraText = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.npz|.json", help="Save keypoints, matches and geometry.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png|.svg|…", help="Draw the matches.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Match two pictures and verify the matches. Existing output files are replaced."""
    from matcher.cli.result import check_outputs, save, show
    from matcher.pipeline import load

    check_outputs(output, plot, inputs=(image0, image1, mask0, mask1))
    texts = {"camera0": camera0, "camera1": camera1}
    cameras = {name: options.parse_camera(text, f"--{name}") for name, text in texts.items()}
    pipeline = load(**given)
    result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1, **cameras)
    save(result, pipeline, output, plot)
    show(result, pipeline, as_json=as_json, written=[path for path in (output, plot) if path])
