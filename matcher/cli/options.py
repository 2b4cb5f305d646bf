"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from matcher.data.camera import Camera

DEFAULT_PRESET = "hybrid-learned"  # that of matcher.presets, which would import torch

Preset = Annotated[str, typer.Option("--preset", help="Configuration; `matcher presets` lists them.")]
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="FILE", help="Weights file, or a name from `matcher weights list`."),
]
FrontEnd = Annotated[
    str | None,
    typer.Option("--frontend", help="Another front end, such as disk, for a matcher that takes it."),
]
Variant = Annotated[
    str | None, typer.Option("--variant", help="Which of the front end's networks, such as aliked-n32.")
]
MaxKeypoints = Annotated[int | None, typer.Option("--max-keypoints", help="Keypoints a picture.")]
Resize = Annotated[
    int | None, typer.Option("--resize", help="Longer side in pixels; larger pictures are made smaller.")
]
Keep = Annotated[
    Literal["strongest", "largest"] | None,
    typer.Option("--keep", help="Of SIFT's points, where a picture has more than asked for."),
]
Threshold = Annotated[float | None, typer.Option("--threshold", help="Least score of a match, 0 to 1.")]
Geometry = Annotated[
    Literal["fundamental", "homography", "essential", "none"] | None,
    typer.Option("--geometry", help="What verifies the matches; essential needs cameras."),
]
Precision = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option("--precision", help="Of the network; auto is what the device is fast at."),
]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|mps", help="Where the network runs.")]
NoUpright = Annotated[
    bool, typer.Option("--no-upright", help="Take pictures as stored; ignore their EXIF orientation.")
]
MaxPixels = Annotated[
    int | None, typer.Option("--max-pixels", help="Refuse larger pictures before decoding them.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output that this program did not write.")
]


def parse_camera(text: str | None, option: str) -> Camera | None:
    """`fx,fy,cx,cy` in stored pixels as a camera; None stays None.

    Raises:
        UsageError: not four numbers.
    """
    from matcher.data.camera import Camera
    from matcher.errors import UsageError

    if text is None:
        return None
    try:
        fx, fy, cx, cy = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} must be four numbers fx,fy,cx,cy in pixels, not {text!r}") from error
    return Camera(fx, fy, cx, cy)
