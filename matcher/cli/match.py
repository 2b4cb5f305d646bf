"""`matcher match`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matcher.cli import options

Picture = Annotated[Path, typer.Argument(show_default=False)]
MaskFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Picture, not black where to look.")]
CameraText = Annotated[str | None, typer.Option(metavar="fx,fy,cx,cy", help="In pixels of the file.")]


def match(
    image0: Picture,
    image1: Picture,
    preset: options.Preset = "hybrid",
    weights: options.Weights = None,
    frontend: options.FrontEnd = None,
    variant: options.Variant = None,
    max_keypoints: options.MaxKeypoints = None,
    resize: options.Resize = None,
    geometry: options.Geometry = None,
    camera0: CameraText = None,
    camera1: CameraText = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    threshold: options.Threshold = None,
    precision: options.Precision = None,
    device: options.Device = "auto",
    no_upright: options.NoUpright = False,
    max_pixels: options.MaxPixels = None,
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
    pipeline = load(
        preset,
        weights=weights,
        frontend=frontend,
        variant=variant,
        device=device,
        precision=precision,
        max_keypoints=max_keypoints,
        resize=resize,
        match_threshold=threshold,
        geometry=geometry,
        upright=not no_upright,
        max_pixels=max_pixels,
    )
    result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1, **cameras)
    save(result, pipeline, output, plot)
    show(result, pipeline, as_json=as_json, written=[path for path in (output, plot) if path])
