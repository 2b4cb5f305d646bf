"""`matcher match`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matcher.cli import options
from matcher.cli.exits import PARTIAL
from matcher.cli.loading import Given

if TYPE_CHECKING:
    from matcher.pipeline import Pipeline

First = Annotated[Path, typer.Argument(metavar="IMAGE0", show_default=False, help="First image.")]
Second = Annotated[Path, typer.Argument(metavar="IMAGE1", show_default=False, help="Second image.")]
MaskFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Mask image; black pixels yield no keypoints.")
]
CameraText = Annotated[
    str | None,
    typer.Option(
        metavar="fx,fy,cx,cy", help="Intrinsics in stored pixels; --camera0 is of both images of one size."
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(metavar="MS", help="Choose keypoints, layers and passes to fit this time, once measured."),
]
Tiles = Annotated[
    bool,
    typer.Option(
        "--tiles",
        help="For large images: find keypoints by tiles at full resolution, by default 20000 per image.",
    ),
]


def match(
    image0: First,
    image1: Second,
    given: Given,
    camera0: CameraText = None,
    camera1: CameraText = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    budget_ms: Budget = None,
    tiles: Tiles = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.npz|.json", help="Save keypoints, matches and geometry.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg|…", help="Save a plot of the matches.")
    ] = None,
    ellipses: Annotated[
        bool,
        typer.Option("--ellipses", help="Draw the uncertainty of points in the plot, enlarged."),
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    fail_if_unmatched: Annotated[
        bool,
        typer.Option(
            "--fail-if-unmatched",
            help="Exit with code 4 if no matches are found or their geometry cannot be verified.",
        ),
    ] = False,
) -> int:
    """Match two images and verify the matches.

    Points are (x, y) in pixels of the stored image, without its EXIF orientation; the centre of the first
    pixel is (0, 0). With --geometry, the estimated matrix is printed too.
    """
    from matcher.cli.result import check_outputs, is_unmatched, save, show_result
    from matcher.loading import load

    check_outputs(output, plot, inputs=(image0, image1, mask0, mask1), overwrite=overwrite)
    if ellipses and plot is None:
        raise typer.BadParameter("--ellipses draws into a plot: add --plot FILE")
    texts = {"camera0": camera0, "camera1": camera1}
    cameras = {name: options.parse_camera(text, f"--{name}") for name, text in texts.items()}
    pipeline = _tiled(given) if tiles else load(**given)
    result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1, budget_ms=budget_ms, **cameras)
    save(result, pipeline, output, plot, ellipses=ellipses)
    written = [path for path in (output, plot) if path]
    show_result(result, as_json=as_json, with_matrix="geometry" in given, written=written)
    return PARTIAL if fail_if_unmatched and is_unmatched(result) else 0


def _tiled(given: dict[str, Any]) -> Pipeline:
    """A pipeline for large images; the first pass and each tile have the preset's number of keypoints."""
    from matcher.loading import load
    from matcher.tiling.tiled import MAX_KEYPOINTS, tiled

    most = given.get("max_keypoints", MAX_KEYPOINTS)
    return tiled(load(**{name: value for name, value in given.items() if name != "max_keypoints"}), most)
