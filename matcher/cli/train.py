"""`matcher train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from matcher.cli import options
from matcher.cli.messages import show

if TYPE_CHECKING:
    from matcher.lab.train.keypoints.recipe import FrontEndRecipe
    from matcher.lab.train.recipe import Recipe


RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="FILE.toml",
        help="What to train and how; by default the recipe of the default preset's weights.",
    ),
]
Photos = Annotated[
    Path | None,
    typer.Option(
        "--photos", metavar="DIR", help="Photos to train on; by default $MATCHER_DATA/photos/train."
    ),
]
ValidationPhotos = Annotated[
    Path | None,
    typer.Option(
        "--validation", metavar="DIR", help="Other photos to validate on; by default a tenth of --photos."
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="Folder for checkpoint, log, curve and weights; by default runs/NAME, named after the recipe.",
    ),
]
TrainingDevice = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Device to train on.")]
ViewWorkers = Annotated[
    int, typer.Option("--view-workers", metavar="N", min=1, help="Processes that render training views.")
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        min=1,
        help="Train for N steps instead of the recipe's number; its second stage has at most N too.",
    ),
]
RenderedViews = Annotated[
    Path | None,
    typer.Option("--rendered", metavar="DIR", help="Folder of rendered views, for recipes that use them."),
]
RealViews = Annotated[
    Path | None,
    typer.Option(
        "--real", metavar="DIR", help="Folder of real photos with depth and poses, for recipes that use them."
    ),
]
BatchScale = Annotated[
    int,
    typer.Option(
        "--batch-scale",
        min=1,
        metavar="N",
        help="Make batches N times as large as the recipe's, for a GPU; recorded in the run and the weights.",
    ),
]


def train(
    recipe: RecipeFile = None,
    photos: Photos = None,
    validation: ValidationPhotos = None,
    rendered: RenderedViews = None,
    real: RealViews = None,
    run: RunFolder = None,
    device: TrainingDevice = "cpu",
    threads: options.Threads = None,
    view_workers: ViewWorkers = 1,
    steps: Steps = None,
    batch_scale: BatchScale = 1,
) -> None:
    """Train a matcher or a front end on views rendered from your photos.

    Run the same command again to continue after an interruption. Rendered views are kept in the cache
    (MATCHER_CACHE) for later runs.
    """
    options.limit_threads(threads)
    import torch

    from matcher.cli.curve import write_curve
    from matcher.cli.interruptions import stop_signals
    from matcher.errors import UsageError
    from matcher.lab.train.loop import RunOptions

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    chosen = enlarged(_recipe(recipe, steps), batch_scale)
    photos, validation = _folders(photos, validation)
    run = run or Path("runs") / chosen.name
    with stop_signals() as received:
        weights = _training_of(chosen)(
            chosen,
            RunOptions(photos, validation, run, device, rendered, real, view_workers),
            _log,
            stopped=lambda: bool(received),
            on_validation=lambda rows: write_curve(rows, run / "curve.png", chosen.name),
        )
    if weights is None:
        raise typer.Exit(128 + received[0])


def _training_of(recipe: Recipe | FrontEndRecipe) -> Callable[..., Path | None]:
    """What trains by a recipe of this kind."""
    from matcher.lab.train.keypoints.run import train_front_end
    from matcher.lab.train.recipe import Recipe
    from matcher.lab.train.run import train as train_matcher

    return train_matcher if isinstance(recipe, Recipe) else train_front_end


def _recipe(path: Path | None, steps: int | None) -> Recipe | FrontEndRecipe:
    from matcher.lab.train.reading import read_recipe, shipped_recipe

    recipe = read_recipe(path or shipped_recipe(options.DEFAULT_PRESET))
    return recipe if steps is None else limited(recipe, steps)


def limited(recipe: Recipe | FrontEndRecipe, steps: int) -> Recipe | FrontEndRecipe:
    """The recipe with this number of steps, whatever its minutes, and at most as many in later stages."""
    part = "matcher" if hasattr(recipe, "matcher") else "optimiser"
    later = getattr(recipe, part)
    later = replace(later, confidence_steps=min(steps, later.confidence_steps))
    recipe = replace(recipe, **{part: later})
    return replace(recipe, optimiser=replace(recipe.optimiser, steps=steps, minutes=0.0))


def enlarged(recipe: Recipe | FrontEndRecipe, scale: int) -> Recipe | FrontEndRecipe:
    """The recipe with batches `scale` times as large."""
    if hasattr(recipe, "batch"):
        matching = replace(recipe.matcher, points_per_batch=scale * recipe.matcher.points_per_batch)
        return replace(
            recipe, batch=replace(recipe.batch, pairs=scale * recipe.batch.pairs), matcher=matching
        )
    points = scale * recipe.pair.points_per_batch
    return replace(recipe, pair=replace(recipe.pair, points_per_batch=points))


def _folders(photos: Path | None, validation: Path | None) -> tuple[Path, Path | None]:
    """The user's folders; without them the shared photos, which come split into `train` and `val`."""
    if photos is not None:
        return photos, validation
    from matcher.data.photos import data_folder

    shared = data_folder() / "photos"
    return shared / "train", validation or shared / "val"


def _log(line: str) -> None:
    import time

    show(f"{time.strftime('%H:%M:%S')} {line}")
