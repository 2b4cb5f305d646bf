"""`matcher collection`, `matcher status` and `matcher merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from matcher.cli import options
from matcher.cli.collecting import (
    Exclude,
    Exhaustive,
    FeaturesFile,
    Include,
    Masks,
    PairFile,
    Restart,
    Sequential,
    Similar,
    WorkerCount,
    choose_pairs,
    enter_images,
    match_pairs,
    show_status,
)
from matcher.cli.loading import Given
from matcher.cli.messages import say

RunDir = Annotated[Path, typer.Option("--run", metavar="RUN_DIR", help="Folder that keeps the results.")]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads of each worker; default: cores / workers.")
]
Shard = Annotated[
    str | None, typer.Option(metavar="i/n", help="Match only part i of n; `matcher merge` joins them.")
]
EngineChoice = Annotated[
    Literal["local", "ray"],
    typer.Option("--engine", help="Work in processes of this machine, or on a Ray cluster."),
]
CameraText = Annotated[
    str | None,
    typer.Option(metavar="fx,fy,cx,cy", help="Camera of every image, in pixels; for --geometry essential."),
]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")]
Descriptors = Annotated[
    bool, typer.Option("--descriptors", help="Extract every image, also where descriptors were deleted.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)]


def collection(
    images: Annotated[Path, typer.Argument(metavar="IMAGES", show_default=False, help="Folder of images.")],
    run: RunDir,
    given: Given,
    pairs: PairFile = None,
    exhaustive: Exhaustive = False,
    sequential: Sequential = None,
    similar: Similar = None,
    include: Include = None,
    exclude: Exclude = None,
    features: FeaturesFile = None,
    masks: Masks = None,
    camera: CameraText = None,
    workers: WorkerCount = None,
    threads: Threads = None,
    engine: EngineChoice = "local",
    shard: Shard = None,
    restart: Restart = False,
    retry_failed: RetryFailed = False,
    descriptors: Descriptors = False,
) -> int:
    """Match the images of a folder: features once an image, every pair once, geometry verified.

    Which pairs: those that --pairs, --exhaustive, --sequential or --similar choose; without any of these
    every pair of up to 50 images, and of more each image with the 20 most similar ones. Finished work stays
    in RUN_DIR, so the same command goes on after an interruption, and matches images that were added or
    changed.
    """
    from matcher.collection.collection import Collection
    from matcher.collection.engines import Workers

    choice = choose_pairs(pairs, exhaustive, sequential, similar)
    pinhole = options.parse_camera(camera, "--camera")
    _check_camera(given.get("geometry"), camera, run)
    means = dict(workers=Workers(engine, workers, threads), camera=pinhole)
    opened = Collection.open(run, shard=shard, **means, **given)
    selection = dict(include=include or (), exclude=exclude or ())
    enter_images(opened, images, masks=masks, features=features, restart=restart, **selection)
    return match_pairs(opened, choice, {}, retry_failed=retry_failed, everything=descriptors)


def _check_camera(geometry: str | None, camera: str | None, run: Path) -> None:
    """Refuse at once a new run that could verify none of its pairs; an existing one may know its cameras."""
    from matcher.collection.schema import DATABASE
    from matcher.errors import UsageError

    if geometry == "essential" and camera is None and not (run / DATABASE).exists():
        raise UsageError("--geometry essential needs --camera fx,fy,cx,cy, in pixels of the image files")


def status(
    run: RunArgument,
    check: Annotated[bool, typer.Option("--check", help="Read everything and look for damage.")] = False,
    tracks: Annotated[
        bool, typer.Option("--tracks", help="Join the verified matches to tracks and measure them.")
    ] = False,
) -> int:
    """Print how far a run has come and what failed; also while it is going on."""
    return show_status(run, check=check, tracks=tracks)


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", show_default=False)],
    into: Annotated[
        Path, typer.Option("--into", metavar="RUN_DIR", help="The run that is made or added to.")
    ],
    descriptors: Annotated[
        bool, typer.Option("--descriptors", help="Copy descriptor files too; more pairs need them.")
    ] = False,
) -> int:
    """Join runs of parts of one collection (--shard) to one run."""
    from matcher.collection.merging import merge as join

    join(runs, into, descriptors=descriptors, on_report=say)
    return show_status(into)
