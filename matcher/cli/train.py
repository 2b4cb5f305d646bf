"""`matcher train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import matcher
from matcher.cli import options
from matcher.cli.match import ENDING, show_calibration
from matcher.cli.options import PARTIAL, complain, pair_progress, say, show

if TYPE_CHECKING:
    from matcher.evaluate.protocols import PairSet
    from matcher.evaluate.run import Method, MethodOptions
    from matcher.train.recipe import FrontEndRecipe, Recipe


# --- train: `matcher train`.

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

    from matcher.cli.match import write_curve
    from matcher.cli.options import stop_signals
    from matcher.errors import UsageError
    from matcher.train.matcher_training import RunOptions

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
    from matcher.train.front_end_training import train_front_end
    from matcher.train.matcher_training import train as train_matcher
    from matcher.train.recipe import Recipe

    return train_matcher if isinstance(recipe, Recipe) else train_front_end


def _recipe(path: Path | None, steps: int | None) -> Recipe | FrontEndRecipe:
    from matcher.train.cached_pairs import read_recipe, shipped_recipe

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
    from matcher.images import data_folder

    shared = data_folder() / "photos"
    return shared / "train", validation or shared / "val"


def _log(line: str) -> None:
    import time

    show(f"{time.strftime('%H:%M:%S')} {line}")


# --- evaluate: `matcher evaluate`.

_SUFFIXES = (".md", ".json")
LEVELS = "1,2,3,4"

Where = Annotated[
    str,
    typer.Argument(
        metavar="SET|DIR|FILE", show_default=False, help="Name of a set, a folder, or a list of pairs."
    ),
]
Presets = Annotated[
    list[str] | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        autocompletion=options.complete_preset,
        help=f"Preset to measure; repeatable.  [default: {options.DEFAULT_PRESET}]",
    ),
]
WeightsFiles = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Matcher weights to measure; repeatable, each adds a row."),
]
FrontEnds = Annotated[
    list[str] | None,
    typer.Option(
        "--frontend-weights",
        metavar="FILE",
        help="Weights of the learned front end, or `shipped`; repeatable, each adds a row.",
    ),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare",
        metavar="PRESET|FILE",
        help="Measure only these presets, matcher weights or front-end weights (repeat for at least two) and "
        "report the paired differences from the first.",
    ),
]
FullDepth = Annotated[
    bool, typer.Option("--full-depth", help="Add a row per network without early exit and pruning.")
]
Pairs = Annotated[
    int | None, typer.Option(metavar="N", help="Measure at most N pairs, evenly spread over the set.")
]
Levels = Annotated[
    str,
    typer.Option(metavar="LIST", help="Difficulty levels of synthetic pairs, from 0 (lighting only) to 4."),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of synthetic pairs and of the bootstrap.")]
EstimatorSeeds = Annotated[
    int, typer.Option(min=1, metavar="N", help="Estimate each pose with N seeds and average.")
]
Images = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the images that a list of pairs names.")
]
Calibration = Annotated[
    bool,
    typer.Option(
        "--calibration", help="Measure how often match probabilities hold (within 3 px), and the verdicts."
    ),
]
Output = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write the tables to this folder as SET.md and SET.json.")
]


def evaluate(
    where: Where,
    preset: Presets = None,
    weights: WeightsFiles = None,
    frontend_weights: FrontEnds = None,
    compare: Compare = None,
    full_depth: FullDepth = False,
    max_keypoints: options.MaxKeypoints = None,
    resize: options.Resize = None,
    threshold: options.Threshold = None,
    second_pass: options.SecondPass = None,
    no_refine: options.NoRefine = False,
    pairs: Pairs = None,
    levels: Levels = LEVELS,
    seed: Seed = 0,
    estimator_seeds: EstimatorSeeds = 3,
    images: Images = None,
    calibration: Calibration = False,
    output: Output = None,
    overwrite: options.Overwrite = False,
    engine: options.Engine = None,
    precision: options.Precision = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> int:
    """Measure the accuracy of presets on image pairs with ground truth.

    Without --compare, nearest-neighbour matching is always measured as the baseline of the other rows.

    SET is one of the sets in $MATCHER_DATA: synthetic, zoom, sensors, unrelated, oxford_graf, opencv_pairs,
    iguazu, multimodal, middlebury2003, kitti_mini, sceaux_castle, bench (the last seven), kitchen, bookstore,
    multiview (the last two), kitchen_angles (240 other pairs of the kitchen, by angle).

    DIR is a folder with the layout of HPatches, MegaDepth-1500, ScanNet-1500, WxBS or one of the sets above,
    or any folder of photos, from which synthetic pairs are made. FILE is a list of image pairs with
    intrinsics and poses, in the format of SuperGlue and glue-factory.
    """
    options.limit_threads(threads)
    from matcher.evaluate.run import MethodOptions, build_methods

    sets = _sets(where, pairs, levels, seed, images)
    _check_and_say(where, sets, output, overwrite, calibration)
    own = {"max_keypoints": max_keypoints, "resize": resize, "second_pass": second_pass}
    own |= {"engine": engine, "device": device} | ({"refine": False} if no_refine else {})
    shared = MethodOptions(own, {"match_threshold": threshold, "precision": precision}, full_depth)
    chosen = preset or [options.DEFAULT_PRESET], weights or [], frontend_weights or []
    methods = _compared(compare, *chosen, shared) if compare else build_methods(*chosen, shared)
    table = TableOptions(seed, methods[0].name if compare else None, output, calibration)
    return _skipped(sum(_measure(pair_set, methods, estimator_seeds, table) for pair_set in sets))


def _skipped(count: int) -> int:
    """Tell of pairs that were skipped; the exit code."""
    if count:
        complain(f"{count} pairs were skipped; the tables give the reasons")
    return PARTIAL if count else 0


def _say_if_synthetic(where: str, sets: Sequence[PairSet]) -> None:
    """A folder of plain photos is measured on warps of them, which a user may not expect."""
    if Path(where).is_dir() and [pair_set.name for pair_set in sets] == ["synthetic"]:
        complain(
            f"{where} has no ground truth: measuring on {len(sets[0])} synthetic warps of its photos "
            "(--pairs N for fewer)"
        )


@dataclass(frozen=True)
class TableOptions:
    """How results are reported."""

    seed: int  # of the bootstrap
    baseline: str | None  # the method that the others are compared with; None for `nearest`
    folder: Path | None  # of the written files
    calibration: bool = False  # of match probabilities, in place of accuracy


def _measure(pair_set: PairSet, methods: list[Method], estimator_seeds: int, options: TableOptions) -> int:
    """Measure one set, print its table, write its files; the number of pairs that were skipped."""
    from matcher.evaluate.run import BASELINE, as_markdown, as_object
    from matcher.evaluate.run import evaluate as run

    if options.calibration:
        return show_calibration(pair_set, methods, options.folder)
    with pair_progress(pair_set.name) as progress:
        found = run(pair_set, methods, seeds=estimator_seeds, progress=progress)
    table = as_object(found, baseline=options.baseline or BASELINE, seed=options.seed)
    table["version"] = matcher.__version__
    show(as_markdown(table), always=True)
    if options.folder is not None:
        _write(options.folder, pair_set.name, table)
    return len(found.skipped)


def _compared(
    compare: list[str],
    presets: list[str],
    weights: list[Path],
    front_ends: list[str],
    shared: MethodOptions,
) -> list[Method]:
    from matcher.errors import UsageError
    from matcher.evaluate.run import compared_methods

    for name, given in (("--preset", presets), ("--weights", weights), ("--frontend-weights", front_ends)):
        if len(given) > 1:
            raise UsageError(
                f"with --compare, {name} can be given only once; repeat --compare for what is to be compared"
            )
    front_end = front_ends[0] if front_ends and front_ends[0] != "shipped" else None
    return compared_methods(compare, presets[0], weights[0] if weights else None, front_end, shared)


def _sets(where: str, pairs: int | None, levels: str, seed: int, images: Path | None) -> list[PairSet]:
    """What is measured; refuses options of other sets."""
    from matcher.evaluate.sets import SetOptions, find_sets

    sets = find_sets(where, SetOptions(pairs, _levels(levels), seed, images))
    names = {pair_set.name for pair_set in sets}
    if levels != LEVELS and "synthetic" not in names:
        raise typer.BadParameter(f"{where} has no synthetic pairs, so --levels has no effect; leave it out")
    if images is not None and (not Path(where).exists() or "synthetic" in names):
        raise typer.BadParameter(f"{where} is no list of pairs, so --images has no effect; leave it out")
    return sets


def _levels(text: str) -> tuple[int, ...]:
    from matcher.errors import UsageError

    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise UsageError(f"--levels must be a list of numbers such as 1,2,3,4, not {text!r}") from error


def _check_and_say(
    where: str, sets: Sequence[PairSet], output: Path | None, overwrite: bool, calibration: bool
) -> None:
    """What is done before anything is measured."""
    _say_if_synthetic(where, sets)
    ending, suffixes = (ENDING, (*_SUFFIXES, ".png")) if calibration else ("", _SUFFIXES)
    _check_output(output, [f"{pair_set.name}{ending}" for pair_set in sets], suffixes, overwrite)


def _check_output(folder: Path | None, names: list[str], suffixes: Sequence[str], overwrite: bool) -> None:
    """Make the folder, and refuse at once if a file in it may not be overwritten."""
    from matcher.errors import UsageError
    from matcher.files import check_output

    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: the folder cannot be made ({error.strerror})") from error
    for name in names:
        for suffix in suffixes:
            check_output(folder / f"{name}{suffix}", (suffix,), overwrite=overwrite)


def _write(folder: Path, name: str, table: dict[str, object]) -> None:
    import json

    from matcher.evaluate.run import as_markdown
    from matcher.files import write_output

    texts = (as_markdown(table), json.dumps(table, indent=1, allow_nan=False))
    for suffix, text in zip(_SUFFIXES, texts, strict=True):
        path = folder / f"{name}{suffix}"
        write_output(path, text.encode())
        say(f"wrote {path}")
