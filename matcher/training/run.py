"""From a folder of photos to a weights file: what `matcher train` does."""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import torch

from matcher.config import to_dict
from matcher.training.loop import Trainer
from matcher.training.pairs import PairBatch, PairSampler
from matcher.training.recipe import Recipe, fingerprint
from matcher.training.validation import validate, validation_pairs
from matcher.training.views import ViewCache, find_photos
from matcher.types import MatcherError, UsageError
from matcher.weights import save_model

ENOUGH_SCENES = 64  # to begin with; the others are made while training goes on
VALIDATION_SCENES = 48
MOST_SKIPPED = 50


@dataclass(frozen=True)
class RunOptions:
    """Where a run takes place."""

    photos: Path
    validation_photos: Path
    folder: Path  # checkpoint, log and views
    device: str = "cpu"
    view_workers: int = 1  # processes that render views beside the training


def train(recipe: Recipe, options: RunOptions, log: Callable[[str], None]) -> Path:
    """Train until the recipe's steps are done, from the last checkpoint if the folder has one.

    Returns:
        The weights file of the best validated parameters.

    Raises:
        UsageError: no photos, or a folder that belongs to another recipe.
        MatcherError: the loss kept being infinite or NaN.
    """
    options.folder.mkdir(parents=True, exist_ok=True)
    _claim(options.folder, recipe)
    keep_memory()
    trainer = Trainer(recipe, torch.device(options.device))
    checkpoint = options.folder / "checkpoint.pt"
    if checkpoint.exists():
        trainer.resume(checkpoint)
        log(f"resumed at step {trainer.progress.step}")
    with views_in_background(recipe, options, log) as cache:
        sampler = PairSampler(cache, recipe.pair, recipe.seed)
        pairs = _validation(recipe, options)
        _first_stage(trainer, sampler, pairs, options, log)
        return _second_stage(trainer, sampler, pairs, options, log)


def _first_stage(
    trainer: Trainer, sampler: PairSampler, pairs: list, options: RunOptions, log: Callable[[str], None]
) -> None:
    recipe, progress = trainer.recipe, trainer.progress
    losses: list[float] = []
    for batch in _prefetched(sampler, progress.step, recipe.optimiser.steps):
        losses.append(trainer.step(batch))
        if progress.skipped > MOST_SKIPPED:
            raise MatcherError(f"the loss was not finite {progress.skipped} times; lower the learning rate")
        last = progress.step == recipe.optimiser.steps
        if progress.step % 20 == 0:
            finite = [x for x in losses if math.isfinite(x)]
            rate = progress.pairs / progress.seconds
            log(f"step {progress.step} loss {sum(finite) / max(1, len(finite)):.4f} {rate:.1f} pairs/s")
            losses.clear()
        if progress.step % recipe.validate_every == 0 or last:
            _record(trainer, validate(trainer.average, pairs, recipe.pair), options.folder, log)
        if progress.step % recipe.save_every == 0 or last:
            trainer.save(options.folder / "checkpoint.pt")


def _record(trainer: Trainer, scores: dict[str, float], folder: Path, log: Callable[[str], None]) -> None:
    """Note a validation; keep the averaged parameters if they are the best so far (F1 of the matches)."""
    progress = trainer.progress
    total = scores["precision"] + scores["recall"]
    f1 = 2 * scores["precision"] * scores["recall"] / total if total else 0.0
    row = {
        "step": progress.step,
        "pairs": progress.pairs,
        "seconds": round(progress.seconds),
        **scores,
        "f1": f1,
    }
    progress.history.append(row)
    with (folder / "log.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
    log(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if f1 > progress.best:
        progress.best = f1
        temporary = folder / "best.partial"
        torch.save(trainer.average.state_dict(), temporary)
        temporary.replace(folder / "best.pt")


def _second_stage(
    trainer: Trainer, sampler: PairSampler, pairs: list, options: RunOptions, log: Callable[[str], None]
) -> Path:
    """Confidence heads on the best parameters, then the weights file."""
    recipe = trainer.recipe
    best = torch.load(options.folder / "best.pt", map_location=trainer.device, weights_only=True)
    trainer.average.load_state_dict(best)
    heads = trainer.average.confidence.requires_grad_(True)
    optimiser = torch.optim.AdamW(heads.parameters(), lr=1e-3, weight_decay=0.0)
    steps = recipe.optimiser.confidence_steps
    for number, batch in enumerate(_prefetched(sampler, 10_000_000, 10_000_000 + steps), start=1):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * (1 - (number - 1) / steps)
        loss = trainer.confidence_step(batch, optimiser)
        if number % 20 == 0:
            log(f"confidence step {number} loss {loss:.4f}")
    scores = validate(trainer.average, pairs, recipe.pair)
    path = options.folder / f"{recipe.name}.safetensors"
    summary = {"recipe": to_dict(recipe), "validation": scores, "history": trainer.progress.history}
    save_model(trainer.average, path, {"training": json.dumps(summary)})
    log(f"wrote {path}")
    return path


def _prefetched(sampler: PairSampler, start: int, stop: int) -> Iterator[PairBatch]:
    """Batches of steps start … stop−1, the next one prepared while this one is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(sampler.batch, start)
        for step in range(start, stop):
            batch = following.result()
            if step % 50 == 0:
                sampler.refresh()
            if step + 1 < stop:
                following = pool.submit(sampler.batch, step + 1)
            yield batch


def _validation(recipe: Recipe, options: RunOptions) -> list:
    ours = replace(recipe, seed=recipe.seed + 1, scene=replace(recipe.scene, scenes=VALIDATION_SCENES))
    cache = ViewCache(options.folder.parent / "cache", ours)
    for _ in cache.make(find_photos(options.validation_photos), range(VALIDATION_SCENES)):
        pass
    return validation_pairs(PairSampler(cache, recipe.pair, 0), VALIDATION_SCENES, 512)


@contextmanager
def views_in_background(
    recipe: Recipe, options: RunOptions, log: Callable[[str], None]
) -> Iterator[ViewCache]:
    """A cache that other processes fill; entered once there are enough scenes to begin."""
    cache = ViewCache(options.folder.parent / "cache", recipe)
    photos, wanted = find_photos(options.photos), recipe.scene.scenes
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(
            target=make_views, args=(cache, photos, range(i, wanted, options.view_workers)), daemon=True
        )
        for i in range(options.view_workers)
        if len(cache.ready()) < wanted
    ]
    for worker in workers:
        worker.start()
    try:
        while len(cache.ready()) < min(ENOUGH_SCENES, wanted):
            if not any(worker.is_alive() for worker in workers):
                raise UsageError(f"{options.photos}: the photos gave no views to train on")
            time.sleep(0.5)
        log(f"{len(photos)} photos, {len(cache.ready())} of {wanted} scenes ready")
        yield cache
    finally:
        for worker in workers:
            worker.terminate()


def make_views(cache: ViewCache, photos: Sequence[Path], scenes: Sequence[int]) -> None:
    """Fill a cache; the body of a worker process."""
    cv2.setNumThreads(1)
    for _ in cache.make(photos, scenes):
        pass


def _claim(folder: Path, recipe: Recipe) -> None:
    """A run's folder belongs to one recipe."""
    note = folder / "recipe.json"
    if note.exists() and json.loads(note.read_text())["fingerprint"] != fingerprint(recipe):
        raise UsageError(
            f"{folder} holds a run of another recipe; give another --run folder or delete this one"
        )
    note.write_text(json.dumps({"fingerprint": fingerprint(recipe), "recipe": to_dict(recipe)}, indent=1))


def keep_memory() -> None:
    """Tell glibc to keep freed blocks: large tensors are otherwise mapped anew, page by page, at every step.

    Halves the time of a training step on a CPU; only this process is affected. Elsewhere it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_max, trim_threshold = -4, -1
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
