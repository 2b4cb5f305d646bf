"""From a folder of photos to a weights file: what `matcher train` does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from matcher.config_tables import to_dict
from matcher.errors import UsageError
from matcher.lab.pairs.textures import PhotoSet, split_photos
from matcher.lab.train.confidence import ConfidenceTrainer, train_heads
from matcher.lab.train.folder import claim_folder
from matcher.lab.train.labels import PairBatch, ViewPair
from matcher.lab.train.loop import Log, LogRow, Loop, RunOptions, Stopped
from matcher.lab.train.memory import keep_memory
from matcher.lab.train.mixed import MixedSampler
from matcher.lab.train.on_device.sampler import DeviceSampler
from matcher.lab.train.on_device.views import load_views
from matcher.lab.train.pair_cache import PairCache
from matcher.lab.train.projection import fit_projection
from matcher.lab.train.reading import check_recipe
from matcher.lab.train.recipe import Recipe
from matcher.lab.train.sampler import PairSampler
from matcher.lab.train.state import load_state
from matcher.lab.train.trainer import Trainer, blend_with_start
from matcher.lab.train.validation import validate, validation_pairs
from matcher.lab.train.views import ViewCache
from matcher.lab.train.workers import ViewWorkers
from matcher.weights.files import save_model

ENOUGH_SCENES = 64  # before training begins; the others are rendered meanwhile
VALIDATION_POINTS = 512
CUDA_READERS = 8  # threads that prepare batches for a GPU


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
        recipe: what to train.
        options: folders and device.
        log: receives progress as lines of text.
        stopped: called after every step; True saves and ends the run.
        on_validation: receives all rows of the log so far, after every validation.

    Returns:
        The weights file of the parameters with the best validation, or None if the run was stopped.

    Raises:
        UsageError: no photos, photos that cannot be used, or a folder that belongs to another recipe.
        IntegrityError: a damaged checkpoint or view.
        MatcherError: the loss was infinite or NaN in too many steps.
        OSError: the disk is full; the last good checkpoint is kept.
    """
    check_recipe(recipe)
    options.stored_folders(recipe.used_shares())  # before anything is made
    training, held_out = split_photos(options.photos, options.validation_photos, recipe.seed)
    log(f"{len(training)} photos to train on, {len(held_out)} to validate on")
    claim_folder(options.folder, recipe, held_out)
    keep_memory()
    trainer = Trainer(recipe, torch.device(options.device))
    if recipe.start_front_end and not (options.folder / "checkpoint.pt").exists():
        _fit_projection(trainer, training, log)
    try:
        with _training_pairs(recipe, training, options, log, stopped) as source:
            pairs = _validation_pairs(recipe, held_out, options, log, stopped)

            def scores() -> LogRow:
                return validate(trainer.average, pairs, recipe.pair, options.device)

            loop = Loop(trainer, scores, options.folder, log, stopped, on_validation, source.on_report)
            loop.resume()
            loop.run(source.batches(trainer.progress.step, recipe.optimiser.steps))
            return SecondStage(loop, source).run()
    except Stopped:
        return None
    finally:
        _log_kept_views(options.views_folder, log)


def _fit_projection(trainer: Trainer, photos: Sequence[Path], log: Log) -> None:
    recipe = trainer.recipe
    before = recipe.start_front_end.removeprefix("shipped")
    explained = fit_projection(trainer.model, before, recipe.front_end, photos)
    trainer.average.load_state_dict(trainer.model.state_dict())
    log(f"fitted the projection to the front end: {explained:.1%} of the tokens' variance explained")


def _log_kept_views(views: Path, log: Log) -> None:
    """Log where the rendered views, which later runs use, are kept, and their size."""
    size = sum(file.stat().st_size for file in views.rglob("*") if file.is_file())
    log(f"rendered views ({size / 1e6:.0f} MB) are kept in {views} for later runs; you may delete them")


@dataclass(frozen=True)
class TrainingPairs:
    """Where batches come from."""

    sampler: PairSampler | DeviceSampler
    readers: int  # threads that prepare batches
    on_report: Callable[[], None] = lambda: None  # called when progress is reported

    def batches(self, start: int, stop: int) -> Iterator[PairBatch]:
        """The batches of steps start … stop−1."""
        return self.sampler.batches(start, stop, self.readers)


@contextmanager
def _training_pairs(
    recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log, stopped: Callable[[], bool]
) -> Iterator[TrainingPairs]:
    """Pairs made on the device, or read from caches that workers fill while the context is open."""
    if recipe.pairs_on_device:
        if options.view_workers > 1:
            raise UsageError("the device makes the pairs of this recipe; leave out `--view-workers`")
        device = torch.device(options.device)
        used = photos if recipe.sources.planes else ()
        views = load_views(used, options.stored_folders(recipe.used_shares()), device, log)
        yield TrainingPairs(DeviceSampler(views, recipe, device), 1)
        return
    with _views(recipe, photos, options, log, stopped) as (workers, others):
        yield _cached_pairs(workers, others, recipe, options.device)


def _cached_pairs(
    workers: ViewWorkers, others: ViewWorkers | None, recipe: Recipe, device: str
) -> TrainingPairs:
    if others is None:
        sampler = PairSampler(workers.cache, recipe.pair, recipe.seed)
    else:
        sampler = MixedSampler(workers.cache, others.cache, recipe, recipe.seed)
    readers = CUDA_READERS if device == "cuda" else 1
    return TrainingPairs(sampler, readers, partial(_report, (workers, others)))


def _report(all_workers: Sequence[ViewWorkers | None]) -> None:
    """Log what workers could not read; raises the error that ended one."""
    for workers in all_workers:
        if workers is not None:
            workers.log_unreadable()


@dataclass(frozen=True)
class SecondStage:
    """Training of the confidence heads on the best parameters of the first stage; writes the weights file."""

    first: Loop
    source: TrainingPairs

    def run(self) -> Path:
        """Train the heads; returns the weights file."""
        trainer, recipe, folder = self.first.trainer, self.first.trainer.recipe, self.first.folder
        trainer.average.load_state_dict(load_state(folder / "best.pt"))
        if recipe.optimiser.start_share and recipe.start:
            blend_with_start(
                trainer.average,
                recipe.start,
                recipe.optimiser.start_share,
                projection=not recipe.start_front_end,
                layers=recipe.start_layers,
            )
        if len(trainer.average.confidence) and recipe.optimiser.confidence_steps > 0:
            heads = ConfidenceTrainer(trainer.average, recipe.optimiser, trainer.device)
            checkpoint, stopped = folder / "confidence.pt", self.first.stopped
            train_heads(heads, self.source.batches, checkpoint, recipe.save_every, self.first.log, stopped)
        scores, path = self.first.validate(), folder / f"{recipe.name}.safetensors"
        validations = [row for row in trainer.progress.history if "f1" in row]
        summary = {"recipe": to_dict(recipe), "validation": scores, "history": validations}
        save_model(trainer.average, path, {"training": json.dumps(summary)})
        self.first.log(f"wrote {path}")
        return path


@contextmanager
def _views(
    recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log, stopped: Callable[[], bool]
) -> Iterator[tuple[ViewWorkers, ViewWorkers | None]]:
    """Workers that fill the caches of scenes and of other pairs; entered with enough scenes to begin."""
    cache = ViewCache(options.views_folder, recipe, photos)
    with ExitStack() as stack:
        workers = stack.enter_context(ViewWorkers(cache, photos, options.view_workers, log))
        others = _pair_workers(stack, recipe, photos, options, log)
        enough = min(ENOUGH_SCENES, workers.wanted)
        while len(cache.ready()) < enough:
            working = workers.alive()
            _report((workers, others))
            if not working and len(cache.ready()) < enough:
                raise UsageError(f"{options.photos}: the photos gave no views to train on")
            if stopped():
                raise Stopped
            time.sleep(0.2)
        log(f"{len(cache.ready())} of {workers.wanted} scenes ready in {cache.folder}")
        yield workers, others


def _pair_workers(
    stack: ExitStack, recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log
) -> ViewWorkers | None:
    """A worker that makes missing pairs of other sources while `stack` is open."""
    if not recipe.sources.share:
        return None
    root = options.views_folder
    cache = PairCache(root, recipe, photos, options.rendered, options.real)
    workers = stack.enter_context(ViewWorkers(cache, photos, 1, log))
    log(f"{len(cache.ready())} of {cache.wanted} pairs ready in {cache.folder}")
    return workers


def _validation_pairs(
    recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log, stopped: Callable[[], bool]
) -> list[ViewPair]:
    ours = replace(recipe, seed=recipe.seed + 1, scene=replace(recipe.scene, scenes=recipe.validation_scenes))
    cache, photo_set = ViewCache(options.views_folder, ours, photos), PhotoSet(photos)
    for _ in cache.make(photo_set, range(recipe.validation_scenes)):
        if stopped():
            raise Stopped
    if photo_set.unreadable:
        log(f"skipped {len(photo_set.unreadable)} validation photos that cannot be read")
    sampler = PairSampler(cache, recipe.pair, 0)
    if not recipe.sources.share:
        return validation_pairs(sampler, recipe.validation_pairs, VALIDATION_POINTS)
    # Stored views are not made of the held-out photos; relief replaces them here.
    sources = replace(recipe.sources, pairs=recipe.validation_scenes, rendered=0.0, real=0.0, relief=1.0)
    ours = replace(ours, sources=sources)
    pairs = PairCache(options.views_folder, ours, photos)
    for _ in pairs.make(pairs.photo_set(photos), range(pairs.wanted)):
        if stopped():
            raise Stopped
    mixed = MixedSampler(cache, pairs, ours, 0)
    return validation_pairs(mixed, recipe.validation_pairs, VALIDATION_POINTS)
