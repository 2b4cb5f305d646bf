"""`matcher evaluate`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import matcher
from matcher.cli import options
from matcher.cli.messages import complain, say, show, wants_progress

if TYPE_CHECKING:
    from matcher.lab.evaluate.run import Entrant, Progress
    from matcher.lab.pairs.protocols import PairSet

PARTIAL = 4
_SUFFIXES = (".md", ".json")

Where = Annotated[
    str,
    typer.Argument(metavar="SET_OR_DIR", show_default=False, help="A named set, a folder or a pair list."),
]
Presets = Annotated[
    list[str] | None,
    typer.Option(
        "--preset",
        help=f"May be repeated; default: {options.DEFAULT_PRESET}. Nearest neighbours are always a row.",
    ),
]
WeightsFiles = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Weights file; may be repeated, a row each.")
]
FrontEnds = Annotated[
    list[str] | None,
    typer.Option(
        "--frontend-weights",
        metavar="FILE",
        help="Of the front end `learned`; may be repeated, rows for each. `shipped` is the usual file.",
    ),
]
FullDepth = Annotated[
    bool, typer.Option("--full-depth", help="Add a row for each network without early exit and pruning.")
]
Pairs = Annotated[int | None, typer.Option(help="At most so many pairs, spread over the set.")]
Levels = Annotated[str, typer.Option(help="Of synthetic pairs: how hard.")]
Seed = Annotated[int, typer.Option(min=0, help="Of synthetic pairs and intervals.")]
EstimatorSeeds = Annotated[int, typer.Option(min=1, help="Poses are estimated so often.")]
Images = Annotated[Path | None, typer.Option(metavar="DIR", help="Where a pair list's pictures are.")]
Output = Annotated[Path | None, typer.Option(metavar="DIR", help="Write SET.md and SET.json there.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of the processor; default: all.")]


def evaluate(
    where: Where,
    preset: Presets = None,
    weights: WeightsFiles = None,
    frontend_weights: FrontEnds = None,
    full_depth: FullDepth = False,
    max_keypoints: options.MaxKeypoints = None,
    resize: options.Resize = None,
    threshold: options.Threshold = None,
    pairs: Pairs = None,
    levels: Levels = "1,2,3,4",
    seed: Seed = 0,
    estimator_seeds: EstimatorSeeds = 3,
    images: Images = None,
    output: Output = None,
    overwrite: options.Overwrite = False,
    precision: options.Precision = None,
    device: options.Device = "auto",
    threads: Threads = None,
) -> int:
    """Measure presets side by side on pairs with a known truth.

    SET_OR_DIR: synthetic, unrelated, oxford_graf, opencv_pairs, iguazu, multimodal, middlebury2003,
    kitti_mini, sceaux_castle or bench (all of these folders), kitchen, bookstore or multiview (both), found
    in the folder named by MATCHER_DATA; or a folder with the layout of HPatches, MegaDepth-1500,
    ScanNet-1500, WxBS or one of the above; or any folder of photos, which are warped into synthetic pairs.
    """
    _limit(threads)
    from matcher.lab.pairs.sets import SetOptions, find_sets

    sets = find_sets(where, SetOptions(pairs, _levels(levels), seed, images))
    _check_output(output, [pair_set.name for pair_set in sets], overwrite)
    common = {"max_keypoints": max_keypoints, "resize": resize, "device": device}
    network = {"match_threshold": threshold, "precision": precision}
    chosen = preset or [options.DEFAULT_PRESET]
    entrants = _entrants(chosen, weights or [], frontend_weights or [], full_depth, common, network)
    skipped = sum(_measure(pair_set, entrants, seed, estimator_seeds, output) for pair_set in sets)
    if skipped:
        complain(f"{skipped} pairs were skipped; the tables say why")
    return PARTIAL if skipped else 0


def _measure(
    pair_set: PairSet, entrants: list[Entrant], seed: int, estimator_seeds: int, output: Path | None
) -> int:
    """Measure one set, print its table, write its files; the number of pairs that were skipped."""
    from matcher.lab.evaluate.run import evaluate as run
    from matcher.lab.evaluate.tables import as_markdown, as_object

    with _progress(pair_set.name) as progress:
        found = run(pair_set, entrants, seeds=estimator_seeds, progress=progress)
    table = {**as_object(found, seed=seed), "version": matcher.__version__}
    show(as_markdown(table), always=True)
    if output is not None:
        _write(output, pair_set.name, table)
    return len(found.skipped)


def _levels(text: str) -> tuple[int, ...]:
    from matcher.errors import UsageError

    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise UsageError(f"--levels must be numbers such as 1,2,3,4, not {text!r}") from error


def _entrants(
    presets: list[str],
    weights: list[Path],
    front_ends: list[str],
    full_depth: bool,
    common: dict[str, object],
    network: dict[str, object],
) -> list[Entrant]:
    """A row for every preset, weights file and front-end file, full-depth rows where asked for; before them
    `nearest`, and nearest neighbours of the same keypoints."""
    from matcher.config import NearestConfig
    from matcher.lab.evaluate.run import Entrant
    from matcher.loading import load
    from matcher.presets import PRESETS, find_preset

    kinds = {find_preset(name).extractor.kind for name in presets} | {find_preset("nearest").extractor.kind}
    plain = [
        name
        for name, config in PRESETS.items()
        if isinstance(config.matcher, NearestConfig) and config.extractor.kind in kinds
    ]
    rows = {}

    def add(name: str, words: str = "", **given: object) -> None:
        for front_end, title in _front_ends(find_preset(name).extractor.kind, front_ends):
            row = " ".join(filter(None, (name, words, title)))
            for ending, more in _DEPTHS[: 1 + (full_depth and name not in plain)]:
                pipeline = load(name, frontend_weights=front_end, **given, **more, **common)
                rows[row + ending] = Entrant(row + ending, pipeline)

    for name in plain:
        add(name)
    for name in presets:
        if name not in plain:
            for file in weights or [None]:
                add(name, "" if file is None else _short(file, weights), weights=file, **network)
    return list(rows.values())


_DEPTHS = (("", {}), (", full depth", {"early_exit": False, "pruning": False}))


def _front_ends(kind: str, files: list[str]) -> list[tuple[str | None, str]]:
    """The weights files of a preset's front end, each with what its row is called."""
    if kind != "learned" or not files:
        return [(None, "")]
    paths = [Path(file) for file in files]
    return [
        (None, "with the shipped front end") if file == "shipped" else (file, f"with {_short(path, paths)}")
        for file, path in zip(files, paths, strict=True)
    ]


def _short(file: Path, weights: list[Path]) -> str:
    """The file's stem, or its whole path where another file has the same stem."""
    return file.stem if sum(other.stem == file.stem for other in weights) == 1 else str(file)


def _check_output(folder: Path | None, names: list[str], overwrite: bool) -> None:
    """Make the folder, and refuse before any work files that may not be written there."""
    from matcher.errors import UsageError
    from matcher.files import check_output

    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: not a folder that can be made ({error.strerror})") from error
    for name in names:
        for suffix in _SUFFIXES:
            check_output(folder / f"{name}{suffix}", (suffix,), overwrite=overwrite)


def _write(folder: Path, name: str, table: dict[str, object]) -> None:
    import json

    from matcher.files import write_output
    from matcher.lab.evaluate.tables import as_markdown

    texts = (as_markdown(table), json.dumps(table, indent=1, allow_nan=False))
    for suffix, text in zip(_SUFFIXES, texts, strict=True):
        path = folder / f"{name}{suffix}"
        write_output(path, text.encode())
        say(f"wrote {path}")


def _limit(threads: int | None) -> None:
    """Torch and OpenCV read these when they are loaded, which is after this."""
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"):
            os.environ[variable] = str(threads)


@contextmanager
def _progress(name: str) -> Iterator[Progress]:
    """A bar on a terminal, a line every tenth of the way elsewhere; on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal and wants_progress()):
        yield lambda done, total: _say_progress(name, done, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _say_progress(name: str, done: int, total: int) -> None:
    if done == total or (done * 10) // total > ((done - 1) * 10) // total:
        say(f"{name}: {done} of {total} pairs")
