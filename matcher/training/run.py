"""From a folder of photos to a weights file: what `matcher train` does."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from matcher.config import to_dict
from matcher.files import write_whole
from matcher.training.confidence import ConfidenceTrainer
from matcher.training.folder import claim_folder
from matcher.training.memory import keep_memory
from matcher.training.pairs import ViewPair
from matcher.training.photos import PhotoSet, find_photos, hold_out
from matcher.training.recipe import Recipe, check_recipe
from matcher.training.sampler import PairSampler
from matcher.training.state import load_state, save_state
from matcher.training.trainer import Trainer
from matcher.training.validation import validate, validation_pairs
from matcher.training.views import ViewCache
from matcher.training.workers import ViewWorkers
from matcher.types import MatcherError, UsageError
from matcher.weights import save_model

ENOUGH_SCENES = 64  # to begin with; the others are made while training goes on
VALIDATION_SCENES = 48
VALIDATION_POINTS = 512
MOST_SKIPPED = 50
LOG_EVERY = 20  # steps
CONFIDENCE_OFFSET = 10_000_000  # batches of the second stage are none of the first
CUDA_FACTOR, CUDA_READERS = 4, 8  # a GPU takes larger batches, and more threads to prepare them

Log = Callable[[str], None]
Row = dict[str, float]


@dataclass(frozen=True)
class RunOptions:
    """Where a run takes place."""

    photos: Path
    validation_photos: Path | None  # None: a tenth of the photos is held out
    folder: Path  # checkpoint, log and weights; the views lie beside it in `cache/`
    device: str = "cpu"
    view_workers: int = 1  # processes that render views beside the training


class Stopped(Exception):
    """The caller asked to stop; what was done is saved."""


def train(
    recipe: Recipe,
    options: RunOptions,
    log: Log,
    *,
    stopped: Callable[[], bool] = lambda: False,
    on_validation: Callable[[Sequence[Row]], None] = lambda rows: None,
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
    training, held_out = _split(recipe, options, log)
    claim_folder(options.folder, recipe)
    keep_memory()
    trainer = Trainer(recipe, torch.device(options.device))
    try:
        with _views(recipe, training, options, log, stopped) as workers:
            pairs = _validation_pairs(recipe, held_out, options, log, stopped)
            run = Run(trainer, workers, pairs, options.folder, log, stopped, on_validation)
            run.resume()
            run.first_stage()
            return run.second_stage()
    except Stopped:
        return None


@dataclass
class Run:
    """The two stages of a run and what they write into its folder."""

    trainer: Trainer
    workers: ViewWorkers
    pairs: Sequence[ViewPair]
    folder: Path
    log: Log
    stopped: Callable[[], bool]
    on_validation: Callable[[Sequence[Row]], None]
    sampler: PairSampler = field(init=False)
    readers: int = field(init=False)

    def __post_init__(self) -> None:
        pair, cuda = self.trainer.recipe.pair, self.trainer.device.type == "cuda"
        if cuda:
            pair = replace(pair, points_per_batch=CUDA_FACTOR * pair.points_per_batch)
        self.sampler = PairSampler(self.workers.cache, pair, self.trainer.recipe.seed)
        self.readers = CUDA_READERS if cuda else 1

    def resume(self) -> None:
        """Continue from the folder's checkpoint, if there is one; the log is cut back to it."""
        checkpoint = self.folder / "checkpoint.pt"
        if checkpoint.exists():
            self.trainer.resume(checkpoint)
            self.log(f"resumed at step {self.trainer.progress.step}")
        lines = "".join(json.dumps(row) + "\n" for row in self.trainer.progress.history)
        write_whole(self.folder / "log.jsonl", lines.encode())

    def first_stage(self) -> None:
        """All steps that are left, with validations and checkpoints."""
        recipe, progress = self.trainer.recipe, self.trainer.progress
        losses: list[float] = []
        started = time.perf_counter()
        for batch in self.sampler.batches(progress.step, recipe.optimiser.steps, self.readers):
            losses.append(self.trainer.step(batch))
            progress.seconds += time.perf_counter() - started
            if progress.skipped > MOST_SKIPPED:
                raise MatcherError(
                    f"the loss was not finite in {progress.skipped} steps; lower "
                    "optimiser.learning_rate in the recipe and start in another --run folder"
                )
            last = progress.step == recipe.optimiser.steps
            if progress.step % LOG_EVERY == 0 or last:
                self._report(losses)
                losses.clear()
            if progress.step % recipe.validate_every == 0 or last:
                self._validate()
            stopping = self.stopped()
            if progress.step % recipe.save_every == 0 or last or stopping:
                self.trainer.save(self.folder / "checkpoint.pt")
            if stopping:
                self.log(f"stopped at step {progress.step}; the same command continues")
                raise Stopped
            started = time.perf_counter()

    def second_stage(self) -> Path:
        """Confidence heads on the best parameters, then the weights file."""
        trainer, recipe, checkpoint = self.trainer, self.trainer.recipe, self.folder / "confidence.pt"
        trainer.average.load_state_dict(load_state(self.folder / "best.pt"))
        if recipe.network.context.depth > 1 and recipe.optimiser.confidence_steps > 0:
            heads = ConfidenceTrainer(trainer.average, recipe.optimiser, trainer.device)
            if checkpoint.exists():
                heads.resume(checkpoint)
            self._train_heads(heads, checkpoint)
        scores = validate(trainer.average, self.pairs, recipe.pair, str(trainer.device))
        path = self.folder / f"{recipe.name}.safetensors"
        validations = [row for row in trainer.progress.history if "f1" in row]
        summary = {"recipe": to_dict(recipe), "validation": scores, "history": validations}
        save_model(trainer.average, path, {"training": json.dumps(summary)})
        self.log(f"wrote {path}")
        return path

    def _train_heads(self, heads: ConfidenceTrainer, checkpoint: Path) -> None:
        recipe = self.trainer.recipe
        steps = recipe.optimiser.confidence_steps
        first, last = CONFIDENCE_OFFSET + heads.done, CONFIDENCE_OFFSET + steps
        for batch in self.sampler.batches(first, last, self.readers):
            loss = heads.step(batch)
            if heads.done % LOG_EVERY == 0:
                self.log(f"confidence step {heads.done} of {steps} loss {loss:.4f}")
            stopping = self.stopped()
            if heads.done % recipe.save_every == 0 or heads.done == steps or stopping:
                heads.save(checkpoint)
            if stopping:
                self.log(f"stopped at confidence step {heads.done}; the same command continues")
                raise Stopped

    def _report(self, losses: Sequence[float]) -> None:
        """Log the mean loss since the last report, and what the view workers found."""
        progress = self.trainer.progress
        finite = [loss for loss in losses if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        skipped = f", {progress.skipped} steps skipped" if progress.skipped else ""
        rate = progress.pairs / progress.seconds
        self.log(f"step {progress.step} loss {mean:.4f} {rate:.1f} pairs/s{skipped}")
        if finite:
            self._note({"loss": mean})
        self.workers.listen()

    def _validate(self) -> None:
        """Note a validation; keep the averaged parameters if they are the best so far (F1 of the matches)."""
        trainer, progress = self.trainer, self.trainer.progress
        scores = validate(trainer.average, self.pairs, trainer.recipe.pair, str(trainer.device))
        self._note(scores)
        words = " ".join(f"{name} {value:.3f}" for name, value in scores.items())
        self.log(f"step {progress.step} validation: {words}")
        if scores["f1"] > progress.best:
            progress.best = scores["f1"]
            save_state(self.folder / "best.pt", trainer.average.state_dict())
        self.on_validation(progress.history)

    def _note(self, values: Row) -> None:
        """Append a row to the history and to its file."""
        progress = self.trainer.progress
        row = {
            "step": progress.step,
            "pairs": progress.pairs,
            "seconds": round(progress.seconds, 1),
            **values,
        }
        progress.history.append(row)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def _split(recipe: Recipe, options: RunOptions, log: Log) -> tuple[list[Path], list[Path]]:
    """Photos to train on and photos to validate on, none in both."""
    photos = find_photos(options.photos)
    if options.validation_photos is None:
        training, held_out = hold_out(photos, recipe.seed)
    else:
        held_out = find_photos(options.validation_photos)
        taken = {photo.resolve() for photo in held_out}
        training = [photo for photo in photos if photo.resolve() not in taken]
        if not training:
            raise UsageError(
                f"{options.photos}: every photo is also one to validate on; give different folders"
            )
    log(f"{len(training)} photos to train on, {len(held_out)} to validate on")
    return training, held_out


@contextmanager
def _views(
    recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log, stopped: Callable[[], bool]
) -> Iterator[ViewWorkers]:
    """Workers that fill the cache of a run; entered once there are enough scenes to begin."""
    cache = ViewCache(options.folder.parent / "cache", recipe, photos)
    with ViewWorkers(cache, photos, options.view_workers, log) as workers:
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
        yield workers


def _validation_pairs(
    recipe: Recipe, photos: Sequence[Path], options: RunOptions, log: Log, stopped: Callable[[], bool]
) -> list[ViewPair]:
    ours = replace(recipe, seed=recipe.seed + 1, scene=replace(recipe.scene, scenes=VALIDATION_SCENES))
    cache, album = ViewCache(options.folder.parent / "cache", ours, photos), PhotoSet(photos)
    for _ in cache.make(album, range(VALIDATION_SCENES)):
        if stopped():
            raise Stopped
    if album.unreadable:
        log(f"skipped {len(album.unreadable)} validation photos that cannot be read")
    return validation_pairs(PairSampler(cache, recipe.pair, 0), VALIDATION_SCENES, VALIDATION_POINTS)
