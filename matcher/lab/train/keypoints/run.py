"""From a folder of photos to the front end's weights file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from matcher.config_tables import to_dict
from matcher.errors import UsageError
from matcher.extract.feature_network import folded
from matcher.lab.pairs.sources import build_mixture
from matcher.lab.pairs.textures import PhotoSet, split_photos
from matcher.lab.train.confidence import ConfidenceTrainer, train_heads
from matcher.lab.train.folder import claim_folder
from matcher.lab.train.keypoints.averaging import blend, mean_of
from matcher.lab.train.keypoints.batches import BatchSampler, ImageBatch
from matcher.lab.train.keypoints.joint import drawn_count, matched_pairs
from matcher.lab.train.keypoints.recipe import FrontEndRecipe
from matcher.lab.train.keypoints.trainer import Describer, FrontEndTrainer
from matcher.lab.train.keypoints.validation import keypoints_of, validate
from matcher.lab.train.labels import PairBatch
from matcher.lab.train.loop import Log, LogRow, Loop, RunOptions, Stopped
from matcher.lab.train.memory import keep_memory
from matcher.lab.train.on_device.image_sampler import DeviceImageSampler
from matcher.lab.train.on_device.views import load_views
from matcher.lab.train.recipe import OptimiserRecipe
from matcher.lab.train.state import load_state
from matcher.lab.train.trainer import blend_with_start
from matcher.weights.files import save_front_end, save_model

VALIDATION_ENLARGED = 1.5  # sides of validation images, relative to those of training
CUDA_READERS = 12  # threads that prepare batches for a GPU


def train_front_end(
    recipe: FrontEndRecipe,
    options: RunOptions,
    log: Log,
    *,
    stopped: Callable[[], bool] = lambda: False,
    on_validation: Callable[[Sequence[LogRow]], None] = lambda rows: None,
) -> Path | None:
    """Train until the recipe's steps are done, from the last checkpoint if the folder has one.

    Arguments, result and errors are those of `matcher.lab.train.run.train`. A matcher that is
    trained along has its own weights file beside the front end's.
    """
    options.stored_folders(recipe.sources.shares())  # before anything is made
    training, held_out = split_photos(options.photos, options.validation_photos, recipe.seed)
    log(f"{len(training)} photos to train on, {len(held_out)} to validate on")
    if options.view_workers > 1:
        raise UsageError("a front end's pairs are made while it trains; leave out `--view-workers`")
    claim_folder(options.folder, recipe, held_out)
    keep_memory()
    trainer = FrontEndTrainer(recipe, torch.device(options.device))
    validation = _validation_sampler(recipe, held_out)
    batches = [validation.batch(number) for number in range(recipe.validation_pairs)]
    photo_set = PhotoSet(training, colour=True)

    def scores_of(model: Describer) -> LogRow:
        return validate(model, batches, recipe.validation_points)

    loop = Loop(
        trainer,
        lambda: scores_of(trainer.average),
        options.folder,
        log,
        stopped,
        on_validation,
        _reporting_unreadable(photo_set, log),
    )
    loop.resume()
    readers = CUDA_READERS if options.device == "cuda" else 1
    sampler = _training_sampler(recipe, photo_set, options, log)
    drawn = partial(sampler.batches, readers=readers)
    try:
        loop.run(drawn(trainer.progress.step, recipe.optimiser.steps))
        _finish(loop, drawn)
    except Stopped:
        return None
    return _write(loop, scores_of)


def _reporting_unreadable(photos: PhotoSet, log: Log) -> Callable[[], None]:
    """A function that logs each photo that could not be read since it was called."""
    reported: set[int] = set()

    def report() -> None:
        for number in photos.unreadable - reported:
            log(f"skipped {photos.photos[number]}: it cannot be read")
        reported.update(photos.unreadable)

    return report


def _training_sampler(
    recipe: FrontEndRecipe, photos: PhotoSet, options: RunOptions, log: Log
) -> BatchSampler | DeviceImageSampler:
    """Pairs made on the device, or read and warped by threads."""
    shares = recipe.sources.shares()
    if recipe.pairs_on_device:
        device, used = torch.device(options.device), photos.photos if shares["planes"] else ()
        return DeviceImageSampler(
            load_views(used, options.stored_folders(shares), device, log), recipe, device
        )
    stored = {"rendered": options.rendered, "real": options.real}
    return BatchSampler(build_mixture(photos, shares, **stored, scene=recipe.scene), recipe)


def _validation_sampler(recipe: FrontEndRecipe, photos: Sequence[Path]) -> BatchSampler:
    """Single pairs of larger images; relief replaces stored views, none of which are held out."""
    width, height = recipe.scene.width, recipe.scene.height
    if recipe.batch.turned_share:  # only square images can be turned here
        width = height = min(width, height)
    stride = recipe.network.stride
    width, height = (stride * round(VALIDATION_ENLARGED * side / stride) for side in (width, height))
    scene = replace(recipe.scene, width=width, height=height)
    shares = recipe.sources.shares()
    shares["relief"] += shares.pop("rendered") + shares.pop("real")
    ours = replace(recipe, seed=recipe.seed + 1, scene=scene, batch=replace(recipe.batch, pairs=1))
    return BatchSampler(build_mixture(PhotoSet(photos, colour=True), shares, scene=scene), ours)


def _finish(loop: Loop, batches: Callable[[int, int], Iterator[ImageBatch]]) -> None:
    """Take the best averaged parameters, batch normalisation folded into the convolutions; then train the
    heads for early exit and pruning.

    With `start_share` the parameters are averaged with those that training started from.
    """
    trainer, recipe = loop.trainer, loop.trainer.recipe
    model, share = trainer.average, recipe.optimiser.start_share
    model.load_state_dict(load_state(loop.folder / "best.pt"))
    model.network = folded(model.network).to(trainer.device)
    if share:
        start = [recipe.start, *recipe.start_also]
        blend(model.network, mean_of(start, recipe.network), share)
    if share and model.matcher is not None:
        blend_with_start(model.matcher, recipe.matcher.start, share)
    matching = recipe.matcher
    if not matching.confidence_steps:
        return

    def pairs(first: int, last: int) -> Iterator[PairBatch]:
        for step, batch in enumerate(batches(first, last), start=first):
            there, rng = batch.to(trainer.device), torch.Generator().manual_seed(step)
            count = drawn_count(matching, rng)
            yield matched_pairs(keypoints_of(model.network, there, count), there, count, matching)

    stage = OptimiserRecipe(confidence_steps=matching.confidence_steps)
    heads = ConfidenceTrainer(model.matcher, stage, trainer.device)
    train_heads(heads, pairs, loop.folder / "confidence.pt", recipe.save_every, loop.log, loop.stopped)


def _write(loop: Loop, scores_of: Callable[[Describer], LogRow]) -> Path:
    """Weights files of what `_finish` left; returns the front end's."""
    trainer, recipe = loop.trainer, loop.trainer.recipe
    model, validations = trainer.average.cpu(), [row for row in trainer.progress.history if "f1" in row]
    summary = {"recipe": to_dict(recipe), "validation": scores_of(model), "history": validations}
    header = {"training": json.dumps(summary)}
    path = loop.folder / f"{recipe.name}.safetensors"
    save_front_end(model.network, "learned", path, header, dtype=torch.float16)
    loop.log(f"wrote {path}")
    if model.matcher is not None:
        matcher = loop.folder / f"{recipe.matcher.name}.safetensors"
        save_model(model.matcher, matcher, header)
        loop.log(f"wrote {matcher}")
    return path
