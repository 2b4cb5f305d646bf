"""`matcher match`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matcher.cli import options
from matcher.cli.exits import PARTIAL
from matcher.cli.loading import Given

ImageFile = Annotated[Path, typer.Argument(metavar="IMAGE", show_default=False)]
MaskFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Mask: keypoints are kept where it is not black.")
]
CameraText = Annotated[
    str | None, typer.Option(metavar="fx,fy,cx,cy", help="Intrinsics in pixels of the file.")
]


def match(
    image0: ImageFile,
    image1: ImageFile,
    given: Given,
    camera0: CameraText = None,
    camera1: CameraText = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.npz|.json", help="Save keypoints, matches and geometry.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg|…", help="Save a drawing of the matches.")
    ] = None,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    fail_if_unmatched: Annotated[
        bool,
        typer.Option(
            "--fail-if-unmatched",
            help="Exit with code 4 unless matches are found and their geometry verified.",
        ),
    ] = False,
) -> int:
    """Match two images and verify the matches.

    With --geometry the estimated matrix is printed, too. Points are (x, y) in pixels of the stored image: the
    centre of the first pixel is (0, 0), and an EXIF orientation is not applied.
    """
    from matcher.cli.result import check_outputs, is_unmatched, save, show_result
    from matcher.loading import load

    check_outputs(output, plot, inputs=(image0, image1, mask0, mask1), overwrite=overwrite)
    texts = {"camera0": camera0, "camera1": camera1}
    cameras = {name: options.parse_camera(text, f"--{name}") for name, text in texts.items()}
    pipeline = load(**given)
    result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1, **cameras)
    save(result, pipeline, output, plot)
    written = [path for path in (output, plot) if path]
    show_result(result, as_json=as_json, with_matrix="geometry" in given, written=written)
    return PARTIAL if fail_if_unmatched and is_unmatched(result) else 0
