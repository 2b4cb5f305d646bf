"""From a folder of photos to weights files: what `matcher train` does."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from matcher.config import to_dict
from matcher.train.keypoints import Describer
from matcher.train.loop import (
    Batch,
    BatchMaker,
    HeadTrainer,
    LogRow,
    Loop,
    Stopped,
    Trainer,
    claim_folder,
    load_state,
    locked,
    validate,
)
from matcher.train.pairs import PairSampler, made_ahead
from matcher.train.recipe import Recipe, check_recipe
from matcher.train.start import Networks, finished
from matcher.train.views import Log, counted, load_views, split_photos, stored_folders
from matcher.weights.files import save_front_end, save_model


@dataclass(frozen=True)
class RunOptions:
    """Folders and device of a run."""

    photos: Path
    validation_photos: Path | None  # None: a tenth of the photos is held out
    folder: Path  # checkpoint, log and weights
    device: str = "cpu"
    rendered: Path | None = None  # folders of stored views, for recipes with a share of them
    real: Path | None = None


def train(
    recipe: Recipe,
    options: RunOptions,
    log: Log,
    *,
    stopped: Callable[[], bool] = lambda: False,
    on_validation: Callable[[Sequence[LogRow]], None] = lambda rows: None,
) -> Path | None:
    """Train until the recipe's steps are done, from the last checkpoint if the folder has one.

    Args:
        recipe: what to train, and how.
        options: folders and device.
        log: receives progress as lines of text.
        stopped: called after every step; True saves and ends the run.
        on_validation: receives all rows of the log so far, after every validation.

    Returns:
        The weights file of the parameters with the best validation (of the front end, if one is trained; the
        matcher's lies beside it), or None if the run was stopped.

    Raises:
        UsageError: no photos, photos that cannot be used, or a folder that belongs to another recipe or in
            which another process trains.
        IntegrityError: a damaged checkpoint or view.
        MatcherError: the loss was infinite or NaN in too many steps.
        OSError: the disk is full; the last good checkpoint is kept.
    """
    check_recipe(recipe)
    # Before anything is made.
    stored = stored_folders(recipe.sources.shares(), options.rendered, options.real)
    training, held_out = split_photos(options.photos, options.validation_photos, recipe.seed)
    log(f"{len(training)} photos to train on, {len(held_out)} to validate on")
    claim_folder(options.folder, recipe, _digest(held_out))
    with locked(options.folder):
        keep_memory()
        device = torch.device(options.device)
        trainer = Trainer(recipe, device)
        describer = None if recipe.front_end.train else Describer(recipe, device)
        batches: list[Batch] = []  # made when they are first needed

        def scores(networks: Networks) -> LogRow:
            if not batches:
                batches.extend(_validation_batches(recipe, held_out, describer, device, log))
            return validate(networks, counted(batches, len(batches), "validation", log), recipe)

        loop = Loop(trainer, scores, options.folder, log, stopped, on_validation)
        loop.resume(trainer)
        views = load_views(recipe, training, stored, device, recipe.all_pairs, log)
        make = BatchMaker(recipe, PairSampler(views, recipe), describer)
        try:
            loop.run(trainer, made_ahead(make, trainer.progress.step, trainer.steps, device))
            trainer.average.load_state_dict(load_state(options.folder / "best.pt"))
            networks = finished(trainer.average, recipe)
            if networks.matcher is not None and len(networks.matcher.confidence):
                heads, others = HeadTrainer(recipe, networks), 10_000_000  # for other batches
                loop.resume(heads)
                done = others + heads.progress.step
                loop.run(heads, made_ahead(make, done, others + heads.steps, device))
        except Stopped:
            return None
        return _write(loop, networks, scores)


def keep_memory() -> None:
    """Make glibc keep freed blocks: large tensors are otherwise mapped again, page by page, at every step.

    Halves the time of a training step on a CPU. Only this process is affected; without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped on its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _digest(photos: Sequence[Path]) -> str:
    """A short hash of names and sizes."""
    lines = [f"{photo.parent.name}/{photo.name} {photo.stat().st_size}" for photo in photos]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def _validation_batches(
    recipe: Recipe, photos: Sequence[Path], describer: Describer | None, device: torch.device, log: Log
) -> list[Batch]:
    """Single pairs of photos that are not trained on; photos in space replace stored views, none of which are
    held out."""
    shares = recipe.sources
    shares = replace(shares, spaces=shares.spaces + shares.rendered + shares.real, rendered=0.0, real=0.0)
    points = (max(recipe.pair.points),)
    pair = replace(recipe.pair, pairs=1, points=points, dropout=0.0, negative_share=0.0)
    ours = replace(recipe, seed=recipe.seed + 1, sources=shares, pair=pair)
    views = load_views(ours, photos, {}, device, recipe.validation_pairs)
    make, count = BatchMaker(ours, PairSampler(views, ours), describer), recipe.validation_pairs
    return list(counted(map(make, range(count)), count, "pairs to validate on", log))


def _write(loop: Loop, networks: Networks, scores: Callable[[Networks], LogRow]) -> Path:
    """Write the weights files; returns the front end's if one was trained, else the matcher's."""
    recipe = loop.trainer.recipe
    validations = [row for row in loop.trainer.progress.history if "f1" in row]
    summary = {"recipe": to_dict(recipe), "validation": scores(networks), "history": validations}
    header, written = {"training": json.dumps(summary)}, []
    networks = networks.cpu()
    if networks.front_end is not None:
        written.append(loop.folder / f"{recipe.front_end.name}.safetensors")
        save_front_end(networks.front_end, "learned", written[-1], header, dtype=torch.float16)
    if networks.matcher is not None:
        written.append(loop.folder / f"{recipe.matcher.name}.safetensors")
        save_model(networks.matcher, written[-1], header)
    for path in written:
        loop.log(f"wrote {path}")
    return written[0]
