"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from matcher.data.camera import Camera

DEFAULT_PRESET = "hybrid-learned"  # that of matcher.presets; a test compares them


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with `incomplete`, for shell completion."""
    from matcher.plugins import plugin_names
    from matcher.presets import PRESETS

    return [name for name in dict.fromkeys([*PRESETS, *plugin_names()]) if name.startswith(incomplete)]


Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="NAME",
        autocompletion=complete_preset,
        help="Front end, matcher and weights; see `matcher presets`.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="Matcher weights: a file, or a name from `matcher weights list`.",
    ),
]
FrontEnd = Annotated[
    str | None,
    typer.Option(
        "--frontend", metavar="NAME", help="Use another front end than the preset's, for example disk."
    ),
]
FrontEndWeights = Annotated[
    str | None,
    typer.Option(
        "--frontend-weights",
        metavar="FILE",
        help="Weights file of the front end; needed only for front ends of your own.",
    ),
]
Variant = Annotated[
    str | None,
    typer.Option("--variant", metavar="NAME", help="Variant of the front end, for example aliked-n32."),
]
MaxKeypoints = Annotated[
    int | None, typer.Option("--max-keypoints", metavar="N", help="Keep at most N keypoints per image.")
]
Resize = Annotated[
    int | None,
    typer.Option(
        "--resize",
        metavar="PX",
        help="Shrink larger images until the longer side has PX pixels. Without it, the learned front end's "
        "presets shrink soft images further, to 640 at least, and enlarge small ones with few keypoints.",
    ),
]
Keep = Annotated[
    Literal["strongest", "largest"] | None,
    typer.Option("--keep", help="Which SIFT keypoints to keep if an image has more than --max-keypoints."),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="P",
        help="Keep matches whose probability, before calibration, is at least P, 0 to 1.",
    ),
]
Ratio = Annotated[
    float | None,
    typer.Option(
        "--ratio",
        metavar="R",
        help="Ratio test of the nearest* presets: keep matches whose distance ratio is at most R, 0 to 1.",
    ),
]
Geometry = Annotated[
    Literal["fundamental", "homography", "homographies", "essential", "none"] | None,
    typer.Option(
        "--geometry",
        help="Model that verifies the matches; homographies: of several planes; essential needs cameras.",
    ),
]
SecondPass = Annotated[
    bool | None,
    typer.Option(
        "--second-pass/--no-second-pass",
        help="Where too few matches of the first pass agree, match other features, scales and the common "
        "region too.",
    ),
]
Precision = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--precision", help="Arithmetic of the networks; auto picks the fastest one that suits the device."
    ),
]
Engine = Annotated[
    Literal["torch", "onnx"] | None,
    typer.Option("--engine", help="Library that runs front end and networks; onnx needs no torch."),
]
Device = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda|mps", help="Device to run on; auto prefers CUDA.")
]
NoRefine = Annotated[
    bool, typer.Option("--no-refine", help="Leave matches where keypoints were found; faster, less exact.")
]
NoUpright = Annotated[
    bool,
    typer.Option("--no-upright", help="Match images as stored, without applying their EXIF orientation."),
]
NoAlphaMask = Annotated[
    bool,
    typer.Option(
        "--no-alpha-mask",
        help="Ignore transparency. Without this, transparent pixels (alpha 0) yield no keypoints.",
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels", metavar="N", help="Refuse images of more than N pixels before decoding them."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, help="Number of CPU threads.  [default: all cores]"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output even if matcher did not write it.")
]


def limit_threads(count: int | None) -> None:
    """Use so many CPU threads, if a number is given; to be called before torch and OpenCV are imported."""
    from matcher.threads import thread_environment

    if count is not None:
        os.environ.update(thread_environment(count))


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
