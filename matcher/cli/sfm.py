"""`matcher sfm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from matcher.cli import options
from matcher.cli.collection import (
    Exhaustive,
    PairFile,
    Sequential,
    Similar,
    WorkerCount,
    choose_pairs,
    enter_images,
    match_pairs,
)
from matcher.cli.exits import PARTIAL
from matcher.cli.export import CameraModel, Cameras, GivenCamera, camera_choice
from matcher.cli.messages import show

if TYPE_CHECKING:
    from matcher.collection.exporting.cameras import CameraChoice
    from matcher.collection.reconstruction.reconstruct import Reconstruction
    from matcher.collection.store import Store

RESIZE, MAX_KEYPOINTS, KEEP = 2048, 4096, "largest"
EXHAUSTIVE_UP_TO = 100  # images; 4,950 pairs
NEIGHBOURS = 30  # of an image, of more of them
_ALWAYS = {"preset", "device", "upright"}  # options that have a value without being given

Source = Annotated[
    Path, typer.Argument(metavar="RUN_DIR|IMAGES", show_default=False, help="A run, or a folder of photos.")
]
ModelFolder = Annotated[Path, typer.Option("--out", metavar="MODEL", help="Folder to make.")]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN_DIR", help="From photos: where matches are kept; default MODEL-run."),
]
MapperChoice = Annotated[
    Literal["incremental", "global"], typer.Option("--mapper", help="Which of COLMAP's mappers.")
]
Threads = Annotated[
    int, typer.Option(help="Of COLMAP; -1: all processors. 1 gives the same model every time.")
]
MinImages = Annotated[int, typer.Option("--min-images", min=2, help="Leave smaller models out.")]
Seed = Annotated[int, typer.Option("--seed", help="Of COLMAP.")]

SfmOptions = Annotated[
    dict[str, Any],
    ("geometry",),
    {"resize": RESIZE, "max_keypoints": MAX_KEYPOINTS, "keep": KEEP},
]


def sfm(
    source: Source,
    out: ModelFolder,
    given: SfmOptions,
    run: RunFolder = None,
    pairs: PairFile = None,
    exhaustive: Exhaustive = False,
    sequential: Sequential = None,
    similar: Similar = None,
    workers: WorkerCount = None,
    camera: GivenCamera = None,
    camera_model: CameraModel = "SIMPLE_RADIAL",
    cameras: Cameras = "auto",
    mapper: MapperChoice = "incremental",
    min_images: MinImages = 3,
    threads: Threads = -1,
    seed: Seed = 0,
    overwrite: options.Overwrite = False,
) -> int:
    """From photos, or from a run of `matcher collection`, to cameras and points (by COLMAP).

    From photos, images are resized to 2048 and given 4096 keypoints unless said otherwise, of SIFT the
    largest, which more images share; up to 100 are matched each with each, of more each with the 30 that
    look most like it. What is matched stays in the run, so the same command goes on after an interruption.
    """
    _check_first(out, overwrite)
    choice = camera_choice(camera, camera_model, cameras)
    wanted = choose_pairs(pairs, exhaustive, sequential, similar)
    if is_run(source):
        if wanted or set(given) - _ALWAYS or not (run is workers is None):
            raise typer.BadParameter("RUN_DIR is matched already; options of the matching are for photos")
        run, code = source, 0
    else:
        run = run or out.with_name(f"{out.name}-run")
        code = _match(source, run, given, wanted, workers)
    mapping = dict(mapper=mapper, min_images=min_images, threads=threads, seed=seed, overwrite=overwrite)
    return max(code, _reconstruct(run, out, choice, mapping))


def _check_first(out: Path, overwrite: bool) -> None:
    """Refuse before hours of matching what could not be finished."""
    from matcher.collection.exporting.colmap import import_pycolmap
    from matcher.collection.exporting.output import check_folder

    import_pycolmap()
    check_folder(out, overwrite=overwrite)


def _match(
    images: Path, run: Path, given: dict[str, Any], wanted: dict[str, Any], workers: int | None
) -> int:
    """Make the run of a folder of photos, with the defaults of a reconstruction."""
    from matcher.collection.collection import Collection
    from matcher.collection.sources import Photos
    from matcher.presets import configure, find_preset

    defaults = {"max_keypoints": MAX_KEYPOINTS, "resize": RESIZE}
    extractor = configure(find_preset(given["preset"]), {"frontend": given.get("frontend")}).extractor
    if extractor.kind == "sift":
        defaults["keep"] = KEEP
    opened = Collection.open(run, workers=workers, **(defaults | given))
    enter_images(opened, images)
    if not wanted:
        few = len(Photos(images).names()[0]) <= EXHAUSTIVE_UP_TO
        wanted = {"exhaustive": True} if few else {"similar": NEIGHBOURS}
    return match_pairs(opened, wanted)


def _reconstruct(run: Path, out: Path, choice: CameraChoice, mapping: dict[str, Any]) -> int:
    from matcher.collection.reconstruction.reconstruct import reconstruct
    from matcher.collection.store import Store

    with Store.open(run) as store:
        made = reconstruct(store, out, choice=choice, **mapping)
        for line in told(made, resized_scale(store)):
            show(line)
    return PARTIAL if made.largest.registered < made.images or made.export.left_out else 0


def is_run(source: Path) -> bool:
    """Whether a folder holds a store rather than photos."""
    from matcher.collection.schema import DATABASE

    return (source / DATABASE).is_file()


def resized_scale(store: Store) -> float | None:
    """Pixels of the resized image for one of the largest file; None where none was resized."""
    settings = store.settings
    resize = settings.get("config", {}).get("extractor", {}).get("resize")
    if not resize or settings.get("source", {}).get("kind") != "photos":
        return None
    longest = max((max(image.size) for image in store.images()), default=0)
    return resize / longest if longest > resize else None


def told(made: Reconstruction, scale: float | None) -> list[str]:
    """A reconstruction for people."""
    from matcher.collection.reconstruction.reconstruct import PLOT

    model = made.largest
    error = f"{model.mean_reprojection_error:.3f} px of the file"
    if scale is not None:
        error += f", {model.mean_reprojection_error * scale:.3f} px of the resized image"
    lines = [
        *made.export.notes,
        *(f"left out: {reason}" for reason in made.export.left_out),
        f"registered images: {model.registered} of {made.images}",
        f"points: {model.points}, observations: {model.observations}",
        f"mean track length: {model.mean_track_length:.2f}",
        f"mean reprojection error: {error}",
    ]
    if len(made.models) > 1:
        sizes = ", ".join(str(other.registered) for other in made.models[1:])
        lines.append(f"{len(made.models) - 1} more models that do not hang together with it: {sizes} images")
    return [*lines, f"wrote {made.folder} (look at {made.folder / PLOT})"]
