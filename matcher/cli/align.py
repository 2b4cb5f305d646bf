"""`matcher align`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli import options
from matcher.cli.exits import PARTIAL
from matcher.cli.match import First, MaskFile, Second
from matcher.cli.messages import complain, show

if TYPE_CHECKING:
    from matcher.alignment.align import Alignment

Model = Annotated[
    Literal["homography", "affine", "similarity"],
    typer.Option("--model", help="How IMAGE0 may be moved; similarity: turn, one scale and shift."),
]
Warped = Annotated[
    Path | None, typer.Option(metavar="FILE.png|.jpg|.tif", help="Save IMAGE0 as IMAGE1 shows it.")
]
Blend = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png|…", help="Save both as one: IMAGE0 red, IMAGE1 blue, grey if they agree."),
]
Board = Annotated[
    Path | None, typer.Option(metavar="FILE.png|…", help="Save a checkerboard of IMAGE0 and IMAGE1.")
]
Difference = Annotated[
    Path | None, typer.Option(metavar="FILE.png|…", help="Save the absolute difference of the two.")
]
AlignOptions = Annotated[dict[str, Any], ("geometry",), {}]


def align(
    image0: First,
    image1: Second,
    given: AlignOptions,
    model: Model = "homography",
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    output: Warped = None,
    blend: Blend = None,
    checkerboard: Board = None,
    difference: Difference = None,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Bring IMAGE0 onto IMAGE1 and save it as IMAGE1 shows it.

    Right where the scene is flat or far away, or where the camera only turned. Images are those after EXIF
    orientation, at the full size of IMAGE1. If the two cannot be aligned, nothing is written and the exit
    code is 4.
    """
    import json

    from matcher.alignment.align import PICTURE_FORMATS
    from matcher.alignment.align import align as run
    from matcher.cli.result import check_each

    wanted = {"warped": output, "blend": blend, "checkerboard": checkerboard, "difference": difference}
    outputs = {view: path for view, path in wanted.items() if path is not None}
    inputs = (image0, image1, mask0, mask1)
    check_each([(path, tuple(PICTURE_FORMATS)) for path in outputs.values()], inputs, overwrite=overwrite)
    found = run(image0, image1, model=model, mask0=mask0, mask1=mask1, **given)
    if found.found:
        for view, path in outputs.items():
            found.save(path, view, overwrite=True)  # check_each has refused files of others
    if as_json:
        show(json.dumps(found.to_dict(), allow_nan=False), always=True)
    else:
        _show(found, outputs)
    return 0 if found.found else PARTIAL


def _show(found: Alignment, outputs: dict[str, Path]) -> None:
    """The summary, and the matrix or what was not written."""
    lines = found.summary().splitlines()
    if not found.found:
        show("\n".join(lines[:-1]))
        complain(lines[-1] + ("; nothing was written" if outputs else ""))
        return
    show("\n".join(lines))
    rows = [" ".join(f"{value: .10g}" for value in row) for row in found.matrix]
    show("\n".join([f"# {found.model}, x1 ~ H x0, stored pixels:", *rows]), always=True)
    for path in outputs.values():
        show(f"wrote {path}")
