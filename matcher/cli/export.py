"""`matcher export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from matcher.cli import options
from matcher.cli.exits import PARTIAL
from matcher.cli.messages import show
from matcher.collection.exporting.formats import FORMATS

if TYPE_CHECKING:
    from matcher.collection.exporting.cameras import CameraChoice

GivenCamera = Annotated[
    str | None,
    typer.Option(
        "--camera",
        metavar="fx,fy,cx,cy",
        help="Known intrinsics of every photo, in stored pixels; they are not refined.",
    ),
]
CameraModel = Annotated[
    str,
    typer.Option(
        "--camera-model",
        metavar="MODEL",
        help="COLMAP camera model where --camera is not given, such as PINHOLE, RADIAL or OPENCV.",
    ),
]
Cameras = Annotated[
    Literal["auto", "single", "each"],
    typer.Option(
        "--cameras",
        help="Photos that share a camera: those with the same size, folder and EXIF (auto), all (single) or "
        "none (each).",
    ),
]

GivenRig = Annotated[
    Path | None,
    typer.Option(
        "--rig",
        metavar="FILE",
        help="Cameras that are fixed to each other, as COLMAP's rig_config.json; pictures of one moment are "
        "named alike after the prefix of their camera.",
    ),
]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="Folder of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="File or folder to create.")],
    to: Annotated[
        Literal[tuple(FORMATS)],
        typer.Option(
            "--to",
            help="Format. colmap writes a .db file and npz a .npz file; most formats fill a folder.",
        ),
    ],
    camera: GivenCamera = None,
    camera_model: CameraModel = "SIMPLE_RADIAL",
    cameras: Cameras = "auto",
    rig: GivenRig = None,
    overwrite: options.Overwrite = False,
) -> int:
    """Export the keypoints and matches of a run to the files of another program."""
    from matcher.collection.exporting.formats import export as write
    from matcher.collection.store import Store

    choice = None
    if FORMATS[to].has_cameras:
        choice = camera_choice(camera, camera_model, cameras, rig)
    elif rig is not None:
        raise typer.BadParameter(f"the format {to} stores no cameras", param_hint="--rig")
    elif camera is not None:
        raise typer.BadParameter(f"the format {to} stores no cameras", param_hint="--camera")
    with Store.open(run) as store:
        report = write(store, to, out, choice, overwrite=overwrite)
    for line in report.lines():
        show(line)
    show(f"wrote {out}")
    return PARTIAL if report.left_out else 0


def camera_choice(
    camera: str | None, camera_model: str, cameras: Literal["auto", "single", "each"], rig: Path | None
) -> CameraChoice:
    """The camera choice that the options describe.

    Raises:
        UsageError: the camera is not four numbers, or the file of the rig holds something else.
    """
    from matcher.collection.exporting.cameras import CameraChoice
    from matcher.data.rig_config import read_rig_config

    fixed = None if rig is None else read_rig_config(rig)
    return CameraChoice(options.parse_camera(camera, "--camera"), cameras, camera_model, rig=fixed)
