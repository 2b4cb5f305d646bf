"""`matcher train`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from matcher.cli import options

if TYPE_CHECKING:
    from matcher.lab.train.keypoints.recipe import FrontEndRecipe
    from matcher.lab.train.recipe import Recipe


Rendered = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Rendered views, for recipes with a share of them.")
]
Real = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Views of real places with depth and poses, likewise.")
]


def train(
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="What to train; the shipped weights' recipe if absent."),
    ] = None,
    photos: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Photos to train on; $MATCHER_DATA/photos/train if absent."),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Other photos to validate on; a tenth is held out if absent."),
    ] = None,
    rendered: Rendered = None,
    real: Real = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint, log, curve and weights; runs/NAME if absent."),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the network is trained.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the network.")] = None,
    view_workers: Annotated[int, typer.Option(min=1, help="Processes that render views.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of the recipe's.")] = None,
) -> None:
    """Train a network on photos. The same command continues a run that was interrupted."""
    if threads:
        # Read when torch is first imported, which is below.
        os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    from matcher.cli.curve import write_curve
    from matcher.errors import UsageError
    from matcher.lab.train.loop import RunOptions

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    chosen = _recipe(recipe, steps)
    photos, validation = _folders(photos, validation)
    run = run or Path("runs") / chosen.name
    with _stop_signals() as received:
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
    return recipe if steps is None else replace(recipe, optimiser=replace(recipe.optimiser, steps=steps))


def _folders(photos: Path | None, validation: Path | None) -> tuple[Path, Path | None]:
    """The user's folders; without them the shared photos, which come split into `train` and `val`."""
    if photos is not None:
        return photos, validation
    shared = Path(os.environ.get("MATCHER_DATA", "../shared")) / "photos"
    return shared / "train", validation or shared / "val"


def _log(line: str) -> None:
    import time

    typer.echo(f"{time.strftime('%H:%M:%S')} {line}")


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Signals received: the first asks the run to stop after its step, a second one ends the process."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        received.append(number)
        typer.echo("stopping after this step", err=True)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
