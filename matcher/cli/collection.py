"""`matcher collection`, `matcher status` and `matcher merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from matcher.cli import options
from matcher.cli.collecting import (
    Exclude,
    Exhaustive,
    FeaturesFile,
    Include,
    Masks,
    Nearby,
    PairFile,
    Preemptive,
    Restart,
    Sequential,
    Similar,
    Tiles,
    WorkerCount,
    choose_pairs,
    enter_images,
    match_pairs,
    show_status,
    with_tiles,
)
from matcher.cli.messages import say

RunDir = Annotated[
    Path, typer.Option("--run", metavar="RUN_DIR", help="Folder for the results; it can be continued.")
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads per worker; by default cores / workers.")
]
Shard = Annotated[
    str | None,
    typer.Option(metavar="i/n", help="Match only part i of n; join the parts with `matcher merge`."),
]
EngineChoice = Annotated[
    Literal["torch", "onnx", "ray", "local"],
    typer.Option(
        "--engine",
        help="Library that runs front end and networks, in local processes; ray: torch on a Ray cluster.",
    ),
]
CameraText = Annotated[
    str | None,
    typer.Option(
        metavar="fx,fy,cx,cy",
        help="Intrinsics of every image in pixels, for --geometry essential and exports.",
    ),
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Retry images and pairs that failed before.")
]
Descriptors = Annotated[
    bool,
    typer.Option("--descriptors", help="Extract every image, even those whose descriptors were deleted."),
]
CollectionOptions = Annotated[dict[str, Any], ("second_pass", "engine"), {}]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="Folder of a run.")]


def collection(
    images: Annotated[Path, typer.Argument(metavar="IMAGES", show_default=False, help="Folder of images.")],
    run: RunDir,
    given: CollectionOptions,
    pairs: PairFile = None,
    exhaustive: Exhaustive = False,
    sequential: Sequential = None,
    similar: Similar = None,
    preemptive: Preemptive = None,
    nearby: Nearby = None,
    include: Include = None,
    exclude: Exclude = None,
    features: FeaturesFile = None,
    masks: Masks = None,
    tiles: Tiles = False,
    camera: CameraText = None,
    workers: WorkerCount = None,
    threads: Threads = None,
    engine: EngineChoice = "torch",
    shard: Shard = None,
    restart: Restart = False,
    retry_failed: RetryFailed = False,
    descriptors: Descriptors = False,
) -> int:
    """Match the images of a folder: extract every image once, match every pair once, verify the geometry.

    Choose the pairs with --pairs, --exhaustive, --sequential, --similar, --preemptive or --nearby. By
    default, up to 50 images are matched exhaustively; in a larger folder, each image is matched with the 20
    most similar ones. Finished work stays in RUN_DIR: run the same command again to continue after an
    interruption, or to match images that were added or changed.
    """
    from matcher.collection.collection import Collection
    from matcher.collection.engines import Workers

    counts = dict(sequential=sequential, similar=similar, preemptive=preemptive, nearby=nearby)
    choice = choose_pairs(pairs, exhaustive, **counts)
    pinhole = options.parse_camera(camera, "--camera")
    _check_camera(given.get("geometry"), camera, run)
    processes = engine if engine == "ray" else "local"
    means = dict(workers=Workers(processes, workers, threads), camera=pinhole)
    given["engine"] = "onnx" if engine == "onnx" else "torch"
    given = with_tiles(given) if tiles else given
    opened = Collection.open(run, shard=shard, **means, **given)
    selection = dict(include=include or (), exclude=exclude or ())
    enter_images(opened, images, masks=masks, features=features, restart=restart, **selection)
    return match_pairs(opened, choice, {}, retry_failed=retry_failed, everything=descriptors)


def _check_camera(geometry: str | None, camera: str | None, run: Path) -> None:
    """Refuse a new run that could not verify any pair; an existing run may already have cameras."""
    from matcher.collection.schema import DATABASE
    from matcher.errors import UsageError

    if geometry == "essential" and camera is None and not (run / DATABASE).exists():
        raise UsageError("--geometry essential needs --camera fx,fy,cx,cy, in pixels of the stored images")


def status(
    run: RunArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Read all stored data and check it for damage.")
    ] = False,
    tracks: Annotated[
        bool,
        typer.Option("--tracks", help="Build tracks from the verified matches and print their statistics."),
    ] = False,
) -> int:
    """Print the progress of a run and what failed, also while it is running."""
    return show_status(run, check=check, tracks=tracks)


def merge(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", show_default=False, help="Folders of the runs to join."),
    ],
    into: Annotated[Path, typer.Option("--into", metavar="RUN_DIR", help="Run to create or to add to.")],
    descriptors: Annotated[
        bool,
        typer.Option("--descriptors", help="Also copy descriptors, which are needed to match more pairs."),
    ] = False,
) -> int:
    """Join the runs of the parts of a collection (--shard) into one run."""
    from matcher.collection.merging import merge as join

    join(runs, into, descriptors=descriptors, on_report=say)
    return show_status(into)
