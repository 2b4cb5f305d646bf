"""`matcher train` and `matcher evaluate`."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import typer

import matcher
from matcher.cli.options import Count, Natural, PresetName, check_outputs, loading
from matcher.cli.output import LOGGER, PARTIAL, ProgressLines, complain, say, show, stop_signals
from matcher.errors import UsageError, counted
from matcher.files import write_output
from matcher.presets import DEFAULT_PRESET

LEVELS = "1,2,3,4"
_LOADING = (
    "max_keypoints", "resize", "match_threshold", "further_passes", "refine", "engine", "precision", "device",
)  # fmt: skip


def train(
    recipe: Path | None = None,
    photos: Path | None = None,
    validation: Path | None = None,
    rendered: Path | None = None,
    real: Path | None = None,
    run: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: Count | None = None,
    steps: Count | None = None,
    batch_scale: Count = 1,
) -> None:
    """Train a matcher, a front end, or both together, on pairs of images made of your photos.

    Run the same command again to continue after an interruption.

    Args:
        recipe (NAME|FILE.toml): What to train and how: hybrid-learned (the default), hybrid, learned or FILE.
        photos (DIR): Photos to train on; by default $MATCHER_DATA/photos/train.
        validation (DIR): Other photos to validate on; by default a tenth of --photos.
        rendered (DIR): Folder of rendered views, for recipes that use them.
        real (DIR): Folder of real photos with depth and poses, for recipes that use them.
        run (DIR): Folder for checkpoint, log, curve and weights; by default runs/NAME, named after the
            recipe.
        device: Device to train on.
        steps (N): Train for N steps instead of the recipe's number; its second stage has at most N too.
        batch_scale (N): Make batches N times as large as the recipe's, for a GPU; recorded in the run and the
            weights.
    """
    from matcher.images import data_folder
    from matcher.train.recipe import enlarged, find_recipe, limited, read_recipe
    from matcher.train.run import RunOptions
    from matcher.train.run import train as train_networks
    from matcher.viz.drawings import draw_training, save_figure

    chosen = read_recipe(find_recipe(recipe or DEFAULT_PRESET))
    chosen = enlarged(chosen if steps is None else limited(chosen, steps), batch_scale)
    if photos is None:  # the shared ones, which come split
        photos = data_folder() / "photos" / "train"
        validation = validation or data_folder() / "photos" / "val"
    run = run or Path("runs") / chosen.name
    with stop_signals() as received:
        weights = train_networks(
            chosen,
            RunOptions(photos, validation, run, device, rendered, real),
            lambda line: show(f"{time.strftime('%H:%M:%S')} {line}"),
            stopped=lambda: bool(received),
            on_validation=lambda rows: save_figure(draw_training(rows, chosen.name), run / "curve.png"),
        )
    if weights is None:
        raise typer.Exit(128 + received[0])


def evaluate(
    where: str,
    /,
    given: loading(only=_LOADING),
    preset: list[PresetName] | None = None,
    weights: list[Path] | None = None,
    frontend_weights: list[str] | None = None,
    compare: list[str] | None = None,
    peer: list[str] | None = None,
    pairs: int | None = None,
    levels: str = LEVELS,
    seed: Natural = 0,
    estimator_seeds: Count | None = None,
    images: Path | None = None,
    calibration: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
    threads: Count | None = None,
) -> int:
    """Measure the accuracy of presets on image pairs with ground truth.

    Without --compare, nearest-neighbour matching is always measured as the baseline of the other rows.

    SET is one of the sets in $MATCHER_DATA: synthetic, zoom, sensors, hard (seen from the side in other
    weather), unrelated, planes, repeats, overlays, facades (pairs that are easily wrong and look sure),
    oxford_graf, iguazu, multimodal, middlebury2003, kitti_mini, sceaux_castle, bench (the last six), kitchen,
    bookstore, multiview (the last two), kitchen_angles (240 other pairs of the kitchen, by angle).

    DIR is a folder with the layout of HPatches, MegaDepth-1500, ScanNet-1500, WxBS or one of the sets above,
    or any folder of photos, from which synthetic pairs are made. FILE is a list of image pairs with
    intrinsics and poses, in the format of SuperGlue and glue-factory.

    Args:
        where (SET|DIR|FILE): Name of a set, a folder, or a list of pairs.
        preset (NAME): Preset to measure; repeatable.  [default: {DEFAULT_PRESET}]
        weights (FILE): Matcher weights to measure; repeatable, each adds a row.
        frontend_weights (FILE): Weights of the learned front end, or `shipped`; repeatable, each adds a row.
        compare (PRESET|FILE): Measure only these presets, matcher weights or front-end weights (repeat for at
            least two) and report the paired differences from the first.
        peer (NAME): Also measure a published implementation, and ours with its weights: lightglue-aliked,
            lightglue-disk, xfeat-lighterglue or xfeat; repeatable.
        pairs (N): Measure at most N pairs, evenly spread over the set.
        levels (LIST): Difficulty levels of synthetic pairs, from 0 (lighting only) to 4.
        seed (N): Seed of synthetic pairs and of the bootstrap.
        estimator_seeds (N): Estimate each pose with N seeds and average.  [default: 3]
        images (DIR): Folder of the images that a list of pairs names.
        calibration: Measure how often match probabilities hold (within 3 px), and the verdicts.
        output (DIR): Write the tables to this folder as SET.md and SET.json, and what was measured of each
            pair as SET-pairs.csv.
    """
    from matcher.evaluate import methods as ways
    from matcher.evaluate import run as measured
    from matcher.evaluate.sets import SetOptions, find_sets

    try:
        chosen = tuple(dict.fromkeys(int(part) for part in levels.split(",")))
    except ValueError as error:
        raise UsageError(f"--levels must be a list of numbers such as 1,2,3,4, not {levels!r}") from error
    sets = find_sets(where, SetOptions(pairs, chosen, seed, images))
    if "resize" in given:  # instead of the size of published results
        sets = [replace(pair_set, shorter_side=None) for pair_set in sets]
    names = [pair_set.name for pair_set in sets]
    if levels != LEVELS and "synthetic" not in names:
        raise typer.BadParameter(f"{where} has no synthetic pairs, so --levels has no effect; leave it out")
    if images is not None and (not Path(where).exists() or "synthetic" in names):
        raise typer.BadParameter(f"{where} is no list of pairs, so --images has no effect; leave it out")
    posed = [pair_set for pair_set in sets if measured.PROTOCOLS[pair_set.protocol].geometry == "essential"]
    if estimator_seeds is not None and (calibration or not posed):
        raise typer.BadParameter("no poses are measured, so --estimator-seeds has no effect; leave it out")
    if Path(where).is_dir() and names == ["synthetic"]:  # which a user may not expect
        complain(
            f"{where} has no ground truth: measuring on {len(sets[0])} synthetic warps of its photos "
            "(--pairs N for fewer)"
        )
    for pair_set in sets if calibration else ():
        measured.check_labels(pair_set)
    ending = "-calibration" if calibration else ""  # of the names of the files, after that of the set
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output {output}: the folder cannot be made ({error.strerror})") from error
        endings = (".md", ".json", ".png") if calibration else (".md", ".json", "-pairs.csv")
        paths = [output / f"{name}{ending}{each}" for name in names for each in endings]
        check_outputs([(path, (path.suffix,)) for path in paths], overwrite=overwrite)
    presets, weights, front_ends = preset or [DEFAULT_PRESET], weights or [], frontend_weights or []
    if compare:
        several = {"--preset": presets, "--weights": weights, "--frontend-weights": front_ends}
        for name, values in several.items():
            if len(values) > 1:
                raise UsageError(f"with --compare, {name} can be given only once; repeat --compare instead")
        front_end = next((name for name in front_ends if name != "shipped"), None)
        own = next(iter(preset or ()), None), next(iter(weights), None), front_end
        methods = ways.compared_methods(compare, *own, given)
    else:
        methods = ways.build_methods(presets, weights, front_ends, given)
    for name in peer or []:
        of_peers = ("max_keypoints", "resize", "device", "precision")
        methods += ways.peer_methods(name, {key: given.get(key) for key in of_peers})
    skipped, passes = 0, logging.getLogger(f"{LOGGER}.passes")
    baseline = methods[0].name if compare else ways.BASELINE
    for pair_set in sets:
        update = partial(ProgressLines(), f"pairs of {pair_set.name}")
        passes.setLevel(logging.WARNING)  # not all that is said of single pairs
        try:
            seeds = 1 if calibration else estimator_seeds or 3
            found = measured.evaluate(pair_set, methods, seeds=seeds, progress=update)
        finally:
            passes.setLevel(logging.NOTSET)
        skipped += len(found.skipped)
        if calibration:
            table = measured.reliability_object(found)
            text = measured.reliability_markdown(table)
        else:
            table = measured.as_object(found, baseline=baseline, seed=seed)
            command = shlex.join(["matcher", *sys.argv[1:]])
            table |= {"version": matcher.__version__, "date": time.strftime("%Y-%m-%d"), "command": command}
            text = measured.as_markdown(table)
        show(text, always=True)
        if output is None:
            continue
        path = output / f"{pair_set.name}{ending}"
        contents = {".md": text, ".json": json.dumps(table, indent=1, allow_nan=False)}
        contents |= {} if calibration else {"-pairs.csv": measured.as_csv(found)}
        for suffix, content in contents.items():
            written, data = path.with_name(path.name + suffix), content.encode(errors="surrogateescape")
            write_output(written, data)
            say(f"wrote {written}")
        if calibration:
            from matcher.viz.drawings import draw_reliability, save_figure

            curves = {r["name"]: (r["confidence"], r["accuracy"], r["count"]) for r in table["rows"]}
            figure = draw_reliability(curves, title=f"reliability of match probabilities: {pair_set.name}")
            say(f"wrote {save_figure(figure, path.with_name(f'{path.name}.png'))}")
    if skipped:
        complain(f"{counted(skipped, 'pair')} skipped; the tables give the reasons")
    return PARTIAL if skipped else 0
