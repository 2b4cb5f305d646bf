"""`matcher sfm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    suggestion,
)
from matcher.cli.exits import PARTIAL
from matcher.cli.export import CameraModel, Cameras, GivenCamera, camera_choice
from matcher.cli.messages import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matcher.collection.reconstruction.reconstruct import Reconstruction
    from matcher.collection.sources import FeatureSource
    from matcher.collection.store import Store

RESIZE, MAX_KEYPOINTS, KEEP = 2048, 4096, "largest"
# Images up to which a reconstruction matches every pair, and neighbours of each image in larger collections.
LIMITS = {"exhaustive_up_to": 100, "neighbours": 30}
_ALWAYS = {"preset", "device", "upright"}  # options that always have a value

RunOrPhotos = Annotated[
    Path, typer.Argument(metavar="RUN_DIR|IMAGES", show_default=False, help="Folder of photos, or of a run.")
]
ModelFolder = Annotated[Path, typer.Option("--out", metavar="MODEL", help="Folder to create for the model.")]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN_DIR", help="Folder for the matches of photos; by default MODEL-run."),
]
MapperChoice = Annotated[
    Literal["incremental", "global"],
    typer.Option("--mapper", help="COLMAP's incremental or global (GLOMAP) mapper."),
]
Threads = Annotated[
    int,
    typer.Option(metavar="N", help="COLMAP's threads; -1 uses all cores, 1 makes the result reproducible."),
]
MinImages = Annotated[
    int, typer.Option("--min-images", metavar="N", min=2, help="Discard models with fewer images.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of COLMAP's random numbers.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check the input and print what would be done, without writing anything."),
]

SfmOptions = Annotated[
    dict[str, Any],
    ("geometry", "second_pass"),
    {"resize": RESIZE, "max_keypoints": MAX_KEYPOINTS, "keep": KEEP},
]


def sfm(
    source: RunOrPhotos,
    out: ModelFolder,
    given: SfmOptions,
    run: RunFolder = None,
    pairs: PairFile = None,
    exhaustive: Exhaustive = False,
    sequential: Sequential = None,
    similar: Similar = None,
    include: Include = None,
    exclude: Exclude = None,
    features: FeaturesFile = None,
    masks: Masks = None,
    workers: WorkerCount = None,
    restart: Restart = False,
    camera: GivenCamera = None,
    camera_model: CameraModel = "SIMPLE_RADIAL",
    cameras: Cameras = "auto",
    mapper: MapperChoice = "incremental",
    min_images: MinImages = 3,
    threads: Threads = -1,
    seed: Seed = 0,
    overwrite: options.Overwrite = False,
    dry_run: DryRun = False,
) -> int:
    """Reconstruct cameras and 3D points with COLMAP, from photos or from a run of `matcher collection`.

    Photos are matched first, with more keypoints and larger images than in `matcher collection`: up to 100
    exhaustively, more of them each with the 30 most similar ones. The run is kept: run the same command again
    to continue after an interruption, or `matcher sfm RUN_DIR` to reconstruct again without matching.
    """
    _check_first(out, overwrite)
    wanted = choose_pairs(pairs, exhaustive, sequential, similar)
    mapping = dict(mapper=mapper, min_images=min_images, threads=threads, seed=seed, overwrite=overwrite)
    mapping["choice"] = camera_choice(camera, camera_model, cameras)
    selection = dict(include=include or (), exclude=exclude or ())
    sources = dict(masks=masks, features=features)
    if is_run(source):
        chosen = wanted or restart or set(given) - _ALWAYS
        if chosen or any(value is not None for value in (run, workers, *sources.values())):
            raise typer.BadParameter("RUN_DIR is already matched; matching options apply only to photos")
        return _from_run(source, out, selection, mapping, dry_run)
    run = run or out.with_name(f"{out.name}-run")
    found = _find_photos(source, selection, sources)
    if dry_run:
        return _preview_photos(found, run, out, wanted)
    code = _match(source, run, given, wanted, workers, {**selection, **sources, "restart": restart})
    return max(code, _reconstruct(run, out, found.names()[0], mapping))


def _check_first(out: Path, overwrite: bool) -> None:
    """Refuse what could not be finished before hours of matching."""
    from matcher.collection.exporting.colmap import import_pycolmap
    from matcher.collection.exporting.output import check_folder

    import_pycolmap()
    check_folder(out, overwrite=overwrite)


def _find_photos(images: Path, selection: dict[str, Any], sources: dict[str, Any]) -> FeatureSource:
    """The photos of a reconstruction; `UsageError` for too few of them."""
    from matcher.collection.hloc_features import find_source
    from matcher.collection.selection import Selection
    from matcher.collection.sources import check_masks
    from matcher.errors import UsageError

    source = find_source(images, **sources, selection=Selection.parse(**selection))
    check_masks(source)
    count = len(source.names()[0])
    if count < 2:
        raise UsageError(f"a reconstruction needs at least two photos, and {images} holds {count}")
    return source


def _match(
    images: Path,
    run: Path,
    given: dict[str, Any],
    wanted: dict[str, Any],
    workers: int | None,
    how: dict[str, Any],
) -> int:
    """Match a folder of photos, with the defaults of a reconstruction."""
    from matcher.collection.collection import Collection
    from matcher.options import configure
    from matcher.presets import find_preset

    defaults = {"max_keypoints": MAX_KEYPOINTS, "resize": RESIZE}
    extractor = configure(find_preset(given["preset"]), {"frontend": given.get("frontend")}).extractor
    if extractor.kind == "sift":
        defaults["keep"] = KEEP
    opened = Collection.open(run, workers=workers, **(defaults | given))
    enter_images(opened, images, **how)
    return match_pairs(opened, wanted, LIMITS)


def _from_run(run: Path, out: Path, selection: dict[str, Any], mapping: dict[str, Any], dry_run: bool) -> int:
    """Reconstruct the selected images of a run, or print what would be done; returns the exit code."""
    from matcher.collection.selection import Selection
    from matcher.collection.store import Store

    with Store.open(run) as store:
        counts = store.counts()
        names = Selection.parse(**selection).apply(image.name for image in store.images())
    if not dry_run:
        return _reconstruct(run, out, names, mapping)
    show(f"images: {len(names)} of {counts.images} in {run}")
    show(f"pairs: {counts.pairs_done} matched, {counts.pairs_waiting} waiting, {counts.pairs_failed} failed")
    show(f"would create {out}")
    return 0


def _reconstruct(run: Path, out: Path, names: Sequence[str], mapping: dict[str, Any]) -> int:
    """Reconstruct these images of a run, print statistics and return the exit code."""
    from matcher.collection.reconstruction.reconstruct import reconstruct
    from matcher.collection.store import Store

    with Store.open(run) as store:
        made = reconstruct(store, out, only=names, **mapping)
        for line in summary_lines(made, resized_scale(store)):
            show(line)
    return PARTIAL if made.largest.registered < made.images or made.export.left_out else 0


def _preview_photos(source: FeatureSource, run: Path, out: Path, wanted: dict[str, Any]) -> int:
    """Print what would be matched and reconstructed."""
    from matcher.collection.pair_choice import default_choice
    from matcher.collection.sources import check_masks

    names, _ = source.names()
    masked = check_masks(source)
    show(f"images: {len(names)}" + ("" if masked is None else f", {masked} with a mask"))
    if wanted:
        ((method, value),) = wanted.items()
        show(f"pairs: --{method.replace('file', 'pairs')}" + ("" if value is True else f" {value}"))
    else:
        show(f"pairs: {suggestion(default_choice(len(names), **LIMITS), len(names))}")
    show(f"would {'continue' if is_run(run) else 'create'} {run}, then create {out}")
    return 0


def is_run(source: Path) -> bool:
    """Whether a folder holds a store rather than photos."""
    from matcher.collection.schema import DATABASE

    return (source / DATABASE).is_file()


def resized_scale(store: Store) -> float | None:
    """Resized size / stored size of the largest image; None if none was resized."""
    settings = store.settings
    resize = settings.get("config", {}).get("extractor", {}).get("resize")
    if not resize or settings.get("source", {}).get("kind") != "photos":
        return None
    longest = max((max(image.size) for image in store.images()), default=0)
    return resize / longest if longest > resize else None


def summary_lines(made: Reconstruction, scale: float | None) -> list[str]:
    """The statistics of a reconstruction, as lines to print."""
    from matcher.collection.reconstruction.reconstruct import PLOT

    model = made.largest
    error = f"{model.mean_reprojection_error:.3f} px of the stored image"
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
        lines.append(f"{len(made.models) - 1} more models share no image with it: {sizes} images")
    return [*lines, f"wrote {made.folder} (look at {made.folder / PLOT})"]
