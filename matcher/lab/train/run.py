"""From a folder of photos to a weights file: what `matcher train` does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from matcher.config import to_dict
from matcher.errors import UsageError
from matcher.lab.pairs.textures import PhotoSet, split_photos
from matcher.lab.train.confidence import ConfidenceTrainer
from matcher.lab.train.folder import claim_folder
from matcher.lab.train.labels import ViewPair
from matcher.lab.train.loop import LOG_EVERY, Log, LogRow, Loop, RunOptions, Stopped
from matcher.lab.train.memory import keep_memory
from matcher.lab.train.mixed import MixedSampler
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

ENOUGH_SCENES = 64  # to begin with; the others are made while training goes on
VALIDATION_POINTS = 512
CONFIDENCE_OFFSET = 10_000_000  # batches of the second stage are none of the first
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
        options: where.
        log: takes lines for a person.
        stopped: asked after every step; True saves and ends the run.
        on_validation: takes all rows of the log so far, after every validation.

    Returns:
        The weights file of the best validated parameters, or None when it was stopped.

    Raises:
        UsageError: no photos, photos that cannot be used, or a folder that belongs to another recipe.
        IntegrityError: a damaged checkpoint or view.
        MatcherError: the loss kept being infinite or NaN.
        OSError: the disk is full; the last good checkpoint is kept.
    """
    check_recipe(recipe)
    training, held_out = split_photos(options.photos, options.validation_photos, recipe.seed)
    log(f"{len(training)} photos to train on, {len(held_out)} to validate on")
    claim_folder(options.folder, recipe)
    keep_memory()
    trainer = Trainer(recipe, torch.device(options.device))
    if recipe.start_front_end and not (options.folder / "checkpoint.pt").exists():
        _fit_projection(trainer, training, log)
    try:
        with _views(recipe, training, options, log, stopped) as (workers, described):
            pairs = _validation_pairs(recipe, held_out, options, log, stopped)

            def scores() -> LogRow:
                return validate(trainer.average, pairs, recipe.pair, options.device)

            loop = Loop(trainer, scores, options.folder, log, stopped, on_validation, workers.listen)
            loop.resume()
            sampler, readers = _sampler(workers, described, recipe, options.device)
            loop.run(sampler.batches(trainer.progress.step, recipe.optimiser.steps, readers))
            return SecondStage(loop, sampler, readers).run()
    except Stopped:
        return None
    finally:
        _say_what_stays(options.views_folder, log)


def _fit_projection(trainer: Trainer, photos: Sequence[Path], log: Log) -> None:
    recipe = trainer.recipe
    before = recipe.start_front_end.removeprefix("shipped")
    explained = fit_projection(trainer.model, before, recipe.front_end, photos)
    trainer.average.load_state_dict(trainer.model.state_dict())
    log(f"fitted the projection to the front end: {explained:.1%} of the tokens' variance explained")


def _say_what_stays(views: Path, log: Log) -> None:
    """Rendered views are kept, because the next run can use them; say where and how large they are."""
    size = sum(file.stat().st_size for file in views.rglob("*") if file.is_file())
    log(f"rendered views ({size / 1e6:.0f} MB) stay in {views} for further runs; delete it if there are none")


def _sampler(
    workers: ViewWorkers, described: PairCache | None, recipe: Recipe, device: str
) -> tuple[PairSampler, int]:
    """Pairs of the views, and how many threads prepare them."""
    readers = CUDA_READERS if device == "cuda" else 1
    if described is None:
        return PairSampler(workers.cache, recipe.pair, recipe.seed), readers
    return MixedSampler(workers.cache, described, recipe, recipe.seed), readers


@dataclass(frozen=True)
class SecondStage:
    """Confidence heads on the best parameters of the first stage, then the weights file."""

    first: Loop
    sampler: PairSampler
    readers: int

    def run(self) -> Path:
        """Train what is left to train; returns the weights file."""
        trainer, recipe, folder = self.first.trainer, self.first.trainer.recipe, self.first.folder
        trainer.average.load_state_dict(load_state(folder / "best.pt"))
        if recipe.optimiser.start_share and recipe.start:
            blend_with_start(
                trainer.average,
                recipe.start,
                recipe.optimiser.start_share,
                projection=not recipe.start_front_end,
            )
        if len(trainer.average.confidence) and recipe.optimiser.confidence_steps > 0:
            heads = ConfidenceTrainer(trainer.average, recipe.optimiser, trainer.device)
            if (folder / "confidence.pt").exists():
                heads.resume(folder / "confidence.pt")
            self._train_heads(heads, folder / "confidence.pt")
        scores, path = self.first.validate(), folder / f"{recipe.name}.safetensors"
        validations = [row for row in trainer.progress.history if "f1" in row]
        summary = {"recipe": to_dict(recipe), "validation": scores, "history": validations}
        save_model(trainer.average, path, {"training": json.dumps(summary)})
        self.first.log(f"wrote {path}")
        return path

    def _train_heads(self, heads: ConfidenceTrainer, checkpoint: Path) -> None:
        recipe = self.first.trainer.recipe
        steps = recipe.optimiser.confidence_steps
        first, last = CONFIDENCE_OFFSET + heads.done, CONFIDENCE_OFFSET + steps
        for batch in self.sampler.batches(first, last, self.readers):
            loss = heads.step(batch)
            if heads.done % LOG_EVERY == 0:
                self.first.log(f"confidence step {heads.done} of {steps} loss {loss:.4f}")
            stopping = self.first.stopped()
            if heads.done % recipe.save_every == 0 or heads.done == steps or stopping:
                heads.save(checkpoint)
            if stopping:
                self.first.log(f"stopped at confidence step {heads.done}; the same command continues")
                raise Stopped


@contextmanager
def _views(
    recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log, stopped: Callable[[], bool]
) -> Iterator[tuple[ViewWorkers, PairCache | None]]:
    """Workers that fill the caches of a run, of scenes and of pairs of other sources; entered once there are
    enough scenes to begin."""
    cache = ViewCache(options.views_folder, recipe, photos)
    with ExitStack() as stack:
        workers = stack.enter_context(ViewWorkers(cache, photos, options.view_workers, log))
        described = _described_pairs(stack, recipe, photos, options, log)
        enough = min(ENOUGH_SCENES, workers.wanted)
        while len(cache.ready()) < enough:
            working = workers.alive()
            workers.listen()
            if not working and len(cache.ready()) < enough:
                raise UsageError(f"{options.photos}: the photos gave no views to train on")
            if stopped():
                raise Stopped
            time.sleep(0.2)
        log(f"{len(cache.ready())} of {workers.wanted} scenes ready in {cache.folder}")
        yield workers, described


def _described_pairs(
    stack: ExitStack, recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log
) -> PairCache | None:
    """Pairs of other sources, with a worker that makes what is missing as long as `stack` is open."""
    if not recipe.sources.share:
        return None
    root = options.views_folder
    cache = PairCache(root, recipe, photos, options.rendered, options.real)
    stack.enter_context(ViewWorkers(cache, photos, 1, log))
    log(f"{len(cache.ready())} of {cache.wanted} pairs ready in {cache.folder}")
    return cache


def _validation_pairs(
    recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log, stopped: Callable[[], bool]
) -> list[ViewPair]:
    ours = replace(recipe, seed=recipe.seed + 1, scene=replace(recipe.scene, scenes=recipe.validation_scenes))
    cache, album = ViewCache(options.views_folder, ours, photos), PhotoSet(photos)
    for _ in cache.make(album, range(recipe.validation_scenes)):
        if stopped():
            raise Stopped
    if album.unreadable:
        log(f"skipped {len(album.unreadable)} validation photos that cannot be read")
    sampler = PairSampler(cache, recipe.pair, 0)
    if not recipe.sources.share:
        return validation_pairs(sampler, recipe.validation_pairs, VALIDATION_POINTS)
    # Stored views are not of the photos held out, so that relief stands for them here.
    sources = replace(recipe.sources, pairs=recipe.validation_scenes, rendered=0.0, real=0.0, relief=1.0)
    ours = replace(ours, sources=sources)
    described = PairCache(options.views_folder, ours, photos)
    for _ in described.make(described.album(photos), range(described.wanted)):
        if stopped():
            raise Stopped
    mixed = MixedSampler(cache, described, ours, 0)
    return validation_pairs(mixed, recipe.validation_pairs, VALIDATION_POINTS)
