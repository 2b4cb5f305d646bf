"""Matchers of fewer or more layers than the weights that they start from."""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from matcher.config import to_dict
from matcher.errors import IntegrityError, MatcherError, UsageError
from matcher.evaluate.posed import find_sets
from matcher.evaluate.protocols import PhotoSet, split_photos
from matcher.files import cache_folder, write_whole
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.match.position import Side
from matcher.train.cached_pairs import (
    CachedView,
    MixedSampler,
    PairBatch,
    PairCache,
    PairSampler,
    ViewCache,
    ViewPair,
    ViewWorkers,
    check_recipe,
    correspondences,
    keep_memory,
    label_partners,
    to_features,
)
from matcher.train.losses import (
    Pruning,
    Stage,
    assignments,
    confidence_loss,
    decisions,
    fit_projection,
    labelled_layers,
    match_probability_loss,
    matching_loss,
)
from matcher.train.optimisers import build_optimisers, set_learning_rate
from matcher.train.recipe import OptimiserRecipe, PairRecipe, Recipe, claim_folder, load_state, save_state
from matcher.train.views import DeviceSampler, load_views
from matcher.types import Features
from matcher.weights.files import load_model, save_model

# --- start_layers: Matchers of fewer or more layers than the weights that they start from.

# One of a layer's tensors, such as `heads.5.projection.weight`.
_OF_A_LAYER = re.compile(r"((?:layers|heads|confidence|match_probability|guidance\.\w+)\.)(\d+)(\..+)?")
# What a layer adds to its tokens.
_ADDED = re.compile(r"layers\.\d+\.\w+\.ffn\.narrow\..+|guidance\.encode\.\d+\.weight")


def layer_of(name: str) -> int | None:
    """The layer, the first is 0, that a tensor belongs to, or None."""
    entry = _OF_A_LAYER.fullmatch(name)
    return None if entry is None else int(entry[2])


def chosen(found: Mapping[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of some layers, and of what belongs to none, as a network of so many layers has them.

    Args:
        found: trained tensors by name.
        layers: in the order that they will have.
    """
    kept = {name: value for name, value in found.items() if layer_of(name) is None}
    for name, value in found.items():
        if (entry := _OF_A_LAYER.fullmatch(name)) is not None and int(entry[2]) in layers:
            kept[f"{entry[1]}{layers.index(int(entry[2]))}{entry[3] or ''}"] = value
    return kept


def deepened(found: Mapping[str, Tensor], before: int, depth: int) -> dict[str, Tensor]:
    """The tensors of a network of `before` layers for one of `depth` that computes the same.

    The last layer stays the last. What is put before it are copies of the layer there that leave tokens as
    they are; the heads of these copies see what its heads saw.

    Args:
        found: trained tensors by name.
        before: layers of their network.
        depth: layers of the network that they are for, no fewer.
    """
    deeper = {name: value for name, value in found.items() if layer_of(name) is None}
    for name, value in found.items():
        if (entry := _OF_A_LAYER.fullmatch(name)) is None:
            continue
        part, number, rest = entry[1], int(entry[2]), entry[3] or ""
        if number == before - 1:
            deeper[f"{part}{depth - 1}{rest}"] = value
        else:
            deeper[name] = value
        if number == max(0, before - 2):
            silent = _ADDED.fullmatch(name) is not None
            for added in range(before - 1, depth - 1):
                deeper[f"{part}{added}{rest}"] = torch.zeros_like(value) if silent else value.clone()
    return deeper


# --- trainer: The first stage: assignment at every layer, one batch a step, with a moving average of the
# parameters.

_INNER_HEADS = ("confidence", "match_probability")


class Trainer(Stage[MatchingNetwork, PairBatch]):
    """Trains the matching network: assignment at every layer."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = MatchingNetwork(recipe.network)
        self._projects = bool(recipe.start) and continue_from(model, recipe.start, recipe.start_layers)
        frozen, share = recipe.optimiser.frozen_layers, recipe.optimiser.start_share
        if (frozen or share) and not self._projects:
            raise UsageError(
                f"optimiser.{'frozen_layers' if frozen else 'start_share'}: the start is of another kind of "
                "front end, whose projection is learned anew; leave it 0"
            )
        freeze(model, frozen)
        model.to(device)
        optimisers = build_optimisers(model, recipe.optimiser)
        rates = (1.0, recipe.optimiser.muon_rate)[: len(optimisers)]
        super().__init__(recipe, recipe.optimiser, model, optimisers, device, rates)

    def step(self, batch: PairBatch) -> float:
        """As `Stage.step`; before the first one, a random projection is scaled to the descriptors."""
        if self.progress.step == 0 and not self._projects:
            self._standardise(batch)
        return super().step(batch)

    def _standardise(self, batch: PairBatch) -> None:
        """Scale the projection to tokens of mean 0 and variance 1."""
        descriptors = torch.cat([batch.features0.descriptors, batch.features1.descriptors], dim=1)
        self.model.standardise(descriptors.to(self.device).flatten(0, 1))
        self.average.load_state_dict(self.model.state_dict())

    def loss(self, batch: PairBatch) -> Tensor:
        """As `matching_loss`; random choices depend on the step only."""
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        recipe = self.recipe.optimiser
        pruning = Pruning.drawn(recipe.kept_shares, len(self.model.layers), rng)
        layers = labelled_layers(self.model, batch, self.device, pruning)
        return matching_loss(self.model, layers, recipe, rng)


def freeze(model: MatchingNetwork, layers: int) -> None:
    """Let the first layers of a network, and all before them, keep their parameters; their heads for exit and
    pruning, which change nothing else, do not."""
    for name, parameter in model.named_parameters() if layers else ():
        layer = layer_of(name)
        ahead = layer < layers if layer is not None else not name.startswith("consensus.")
        parameter.requires_grad_(not ahead or name.startswith(_INNER_HEADS))


def continue_from(model: MatchingNetwork, start: str, layers: Sequence[int] = ()) -> bool:
    """Load trained parameters into a network.

    Heads for exit and pruning that the file lacks keep their values; so do the input projections if the file
    is for another front end. Layers that it lacks begin without effect.

    Args:
        model: a network of the same architecture as the file, or of more layers.
        start: a shipped name or the path of a weights file.
        layers: of the file, that are used, in this order; all if empty.

    Returns:
        Whether the projection of descriptors was loaded.

    Raises:
        IntegrityError: no such weights, or a damaged file.
        UsageError: the weights are of another architecture.
    """
    trained, _, name = load_model(start)
    wanted, found = model.state_dict(), trained.state_dict()
    other_front_end = trained.config.kind != model.config.kind
    if other_front_end:
        found = _for_another_front_end(wanted, found)
    before, depth = (network.config.context.depth for network in (trained, model))
    if layers:
        if max(layers) >= before:
            raise UsageError(f"start_layers: the weights {name} have {before} layers, the first is 0")
        found, before = chosen(found, layers), len(layers)
    if before < depth and trained.config.assignment.every_layer:
        found = deepened(found, before, depth)
    found = {key: value for key, value in found.items() if key in wanted or not key.startswith(_INNER_HEADS)}
    different = [key for key in wanted.keys() ^ found.keys() if not key.startswith(_INNER_HEADS)]
    different += [key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape]
    if different:
        raise UsageError(
            f"start: the weights {name} are of another network than the recipe's ({len(different)} tensors "
            f"differ, such as {min(different)}); make [network] the same, or remove start"
        )
    model.load_state_dict({**wanted, **found})
    return not other_front_end


@torch.no_grad()
def blend_with_start(
    model: MatchingNetwork, start: str, share: float, *, projection: bool = True, layers: Sequence[int] = ()
) -> None:
    """Interpolate between initial and trained parameters, to recover accuracy outside the training data.

    WiSE-FT (Wortsman et al. 2022).

    Args:
        model: the trained network; changed in place.
        start: a shipped name or the path of a weights file.
        share: weight of the initial parameters, 0 to 1.
        projection: whether to interpolate that of descriptors too; not if it was fitted to another front end.
        layers: as `continue_from`.

    Raises:
        IntegrityError, UsageError: as `continue_from`.
    """
    before = copy.deepcopy(model)
    if not continue_from(before, start, layers):
        raise UsageError("optimiser.start_share: the start is of another front end")
    for (name, value), first in zip(model.named_parameters(), before.parameters(), strict=True):
        if projection or not name.startswith("project."):
            value.lerp_(first.to(value.device), share)


def _for_another_front_end(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Trained tensors with the projection of `wanted` and only the input columns that both networks have."""
    kept = {}
    for key, value in found.items():
        ours = wanted.get(key, value)
        if key.startswith("project."):
            kept[key] = ours
        elif value.shape != ours.shape and value.shape[:-1] == ours.shape[:-1]:
            kept[key] = value[..., : ours.shape[-1]]
        else:
            kept[key] = value
    return kept


# --- validation: Precision and recall of a network on views of photos that are not trained on.

THRESHOLDS = (0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def validation_pairs(sampler: PairSampler, count: int, points: int) -> list[ViewPair]:
    """`count` fixed pairs of views with at most `points` points each."""
    rng = np.random.default_rng(12345)
    drawn = (sampler.draw(rng) for _ in range(count))
    return [(_strongest(view0, points), _strongest(view1, points)) for view0, view1 in drawn]


def _strongest(view: CachedView, points: int) -> CachedView:
    return view.select(np.arange(min(points, len(view.keypoints))))


def validate(
    model: MatchingNetwork, pairs: Sequence[ViewPair], recipe: PairRecipe, device: str = "cpu"
) -> dict[str, float]:
    """Precision and recall at the recipe's match distance, with all layers, means over the pairs.

    Of several thresholds of the match probability (`credible_matches`) the one with the highest F1 counts:
    training also moves the probabilities, and at one threshold that would show as better or worse matches.

    Returns:
        precision: share of matches with a reprojection error below the match distance.
        recall: share of ground-truth matches that are found.
        matches: number a pair.
        f1: harmonic mean of precision and recall.
        threshold: the one they are of.
    """
    policy = replace(
        model.config.policy,
        early_exit=False,
        pruning=False,
        match_threshold=THRESHOLDS[0],
        threshold_doubles_at=0.0,
    )
    matcher = AttentionMatcher(model.with_policy(policy), device=device)
    judged = [_judge(matcher, view0, view1, recipe) for view0, view1 in pairs]
    doubles_at = model.config.policy.threshold_doubles_at
    found = (_mean_scores(judged, threshold, doubles_at) for threshold in THRESHOLDS)
    return max(found, key=lambda scores: scores["f1"])


class _Judged(NamedTuple):
    """The matches of one pair, beside what is known of them."""

    probabilities: np.ndarray  # (K,)
    known: np.ndarray  # (K,) bool: the true place of either point is known
    correct: np.ndarray  # (K,) bool, where known
    found: np.ndarray  # (K,) bool: a ground-truth match
    possible: int  # ground-truth matches

    def above(self, threshold: float, doubles_at: float) -> np.ndarray:
        """(K,) bool: which matches are kept; see `credible_matches`."""
        expected = self.probabilities[self.probabilities > threshold].sum()
        raised = threshold * (1 + doubles_at / expected) if expected else threshold
        return self.probabilities > raised


def _mean_scores(judged: Sequence[_Judged], threshold: float, doubles_at: float) -> dict[str, float]:
    """What `validate` returns, at one threshold; pairs without matches have no precision."""
    kept = [each.above(threshold, doubles_at) for each in judged]
    precisions = [
        each.correct[chosen & each.known].mean()
        for each, chosen in zip(judged, kept, strict=True)
        if (chosen & each.known).any()
    ]
    recalls = [
        each.found[chosen].sum() / each.possible
        for each, chosen in zip(judged, kept, strict=True)
        if each.possible
    ]
    precision, recall = (float(np.mean(x)) if x else 0.0 for x in (precisions, recalls))
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    matches = float(np.mean([chosen.sum() for chosen in kept])) if kept else 0.0
    return {"precision": precision, "recall": recall, "matches": matches, "f1": f1, "threshold": threshold}


def _judge(matcher: AttentionMatcher, view0: CachedView, view1: CachedView, recipe: PairRecipe) -> _Judged:
    matches = matcher(*(Features.stack([to_features(view)]) for view in (view0, view1)))[0]
    labels = label_partners(view0, view1, recipe)
    (corresponding0, known0), (corresponding1, known1) = (
        correspondences(view0, view1),
        correspondences(view1, view0),
    )
    index0, index1 = matches.indices.T
    forward = np.linalg.norm(corresponding0[index0] - view1.keypoints[index1], axis=1)
    backward = np.linalg.norm(corresponding1[index1] - view0.keypoints[index0], axis=1)
    error = (np.where(known0[index0], forward, backward) + np.where(known1[index1], backward, forward)) / 2
    correct = np.nan_to_num(error, nan=np.inf) < recipe.match_distance
    possible = int((labels.partner0 >= 0).sum())
    found = labels.partner0[index0] == index1
    return _Judged(matches.scores, known0[index0] | known1[index1], correct, found, possible)


# --- loop: The steps of a run, with its log, validations and checkpoints: for the matcher and for the front
# end.

MOST_SKIPPED = 50
LOG_EVERY = 20  # steps

Log = Callable[[str], None]
LogRow = dict[str, float]


@dataclass(frozen=True)
class RunOptions:
    """Folders, device and processes of a run."""

    photos: Path
    validation_photos: Path | None  # None: a tenth of the photos is held out
    folder: Path  # checkpoint, log and weights
    device: str = "cpu"
    rendered: Path | None = None  # folders of stored views, for recipes with a share of them
    real: Path | None = None
    view_workers: int = 1  # processes that render views during training
    views: Path | None = None  # folder of rendered views; None: in the user's cache (MATCHER_CACHE)

    @property
    def views_folder(self) -> Path:
        """The folder of rendered views, used by this run and later ones."""
        return cache_folder() / "views" if self.views is None else self.views

    def stored_folders(self, shares: Mapping[str, float]) -> dict[str, Path]:
        """Folders of stored views by source, of the sources that have a share.

        Raises:
            UsageError: one is missing or holds no views, or one is given that the recipe has no use for.
            IntegrityError: what one holds is damaged.
        """
        folders = {}
        for name, folder in (("rendered", self.rendered), ("real", self.real)):
            if shares[name] and folder is None:
                raise UsageError(
                    f"sources.{name}: the recipe needs stored views, but no folder of them is given: give "
                    f"--{name} DIR, or a recipe whose sources are planes and relief, which photos give"
                )
            if folder is not None and not shares[name]:
                raise UsageError(
                    f"sources.{name}: the recipe has no share of the views in {folder}; leave it out"
                )
            if shares[name]:
                find_sets(folder)  # raises at once, which a worker would do after some time
                folders[name] = folder
        return folders


class Stopped(Exception):
    """The caller asked to stop; the progress is saved."""


@dataclass
class Loop:
    """A trainer, its folder and its callbacks."""

    trainer: Stage
    validate: Callable[[], LogRow]  # of the averaged parameters; the best ones have the highest "f1"
    folder: Path
    log: Log
    stopped: Callable[[], bool]
    on_validation: Callable[[Sequence[LogRow]], None]
    on_report: Callable[[], None] = lambda: None

    def resume(self) -> None:
        """Continue from the folder's checkpoint, if there is one; the log is truncated to it."""
        checkpoint = self.folder / "checkpoint.pt"
        if checkpoint.exists():
            self.trainer.resume(checkpoint)
            self.log(f"resumed at step {self.trainer.progress.step}")
        lines = "".join(json.dumps(row) + "\n" for row in self.trainer.progress.history)
        write_whole(self.folder / "log.jsonl", lines.encode())

    def run(self, batches: Iterable) -> None:
        """One step per batch until the trainer has finished, with validations and checkpoints.

        Raises:
            Stopped: the caller asked for it.
            MatcherError: the loss was infinite or NaN in too many steps.
            OSError: the disk is full; the last good checkpoint is kept.
        """
        recipe, progress = self.trainer.recipe, self.trainer.progress
        if self.trainer.finished:
            return
        losses: list[float] = []
        started = time.perf_counter()
        for batch in batches:
            losses.append(self.trainer.step(batch))
            progress.seconds += time.perf_counter() - started
            if progress.skipped > MOST_SKIPPED:
                raise MatcherError(
                    f"the loss was not finite in {progress.skipped} steps; lower "
                    "optimiser.learning_rate in the recipe and start in another --run folder"
                )
            last = self.trainer.finished
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
            if last:
                return
            started = time.perf_counter()

    def _report(self, losses: Sequence[float]) -> None:
        """Log the mean loss since the last report."""
        progress = self.trainer.progress
        finite = [loss for loss in losses if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        skipped = f", {progress.skipped} steps skipped" if progress.skipped else ""
        rate = progress.pairs / progress.seconds
        self.log(f"step {progress.step} loss {mean:.4f} {rate:.1f} pairs/s{skipped}")
        if finite:
            self._record({"loss": mean})
        self.on_report()

    def _validate(self) -> None:
        """Validate; save the averaged parameters if they are the best so far (by F1)."""
        trainer, progress = self.trainer, self.trainer.progress
        scores = self.validate()
        self._record(scores)
        words = " ".join(f"{name} {value:.3f}" for name, value in scores.items())
        self.log(f"step {progress.step} validation: {words}")
        if scores["f1"] > progress.best:
            progress.best = scores["f1"]
            save_state(self.folder / "best.pt", trainer.average.state_dict())
        self.on_validation(progress.history)

    def _record(self, values: LogRow) -> None:
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


# --- confidence: The second stage: training of the confidence heads on a frozen network (LightGlue, section
# 3.3).

LEARNING_RATE = 2e-3  # falls linearly to zero
OFFSET = 10_000_000  # of the steps, so that their batches differ from those of the first stage


class ConfidenceTrainer:
    """The heads for early exit and pruning, and their optimiser; `step` takes one batch."""

    def __init__(self, model: MatchingNetwork, recipe: OptimiserRecipe, device: torch.device) -> None:
        self.model, self.recipe, self.device = model, recipe, device
        self.heads = nn.ModuleDict(
            {"confidence": model.confidence, "match_probability": model.match_probability}
        )
        self.heads.requires_grad_(True)
        self.optimiser = torch.optim.AdamW(self.heads.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.done = 0  # steps

    def step(self, batch: PairBatch) -> float:
        """One update of the heads below the last layer; returns the loss."""
        rate = LEARNING_RATE * (1 - self.done / self.recipe.confidence_steps)
        set_learning_rate([self.optimiser], [rate])
        with torch.no_grad():
            states = [layer.sides for layer in labelled_layers(self.model, batch, self.device)]
            decided = [decisions(self._assigned(sides, depth)) for depth, sides in enumerate(states)]
        losses = []
        for depth, (sides, current) in enumerate(zip(states[:-1], decided[:-1], strict=True)):
            x = torch.cat([side.x for side in sides], dim=1)
            losses.append(confidence_loss(self.model.confidence[depth](x).squeeze(2), current, decided[-1]))
            if self.model.config.match_probability:
                losses.append(
                    match_probability_loss(self.model.match_probability[depth](x).squeeze(2), decided[-1])
                )
        loss = torch.stack(losses).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.done += 1
        return float(loss.detach())

    def _assigned(self, sides: tuple[Side, Side], depth: int) -> Tensor:
        rounds = self.model.config.assignment.consensus
        return assignments(self.model, self.model.scores(*sides, depth), sides, self.recipe, rounds)[-1]

    def save(self, path: Path) -> None:
        """Write a checkpoint of this stage, whole or not at all.

        Raises:
            OSError: the disk is full; an earlier checkpoint is kept.
        """
        heads, optimiser = self.heads.state_dict(), self.optimiser.state_dict()
        save_state(path, {"done": self.done, "heads": heads, "optimiser": optimiser})

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of this stage.

        Raises:
            IntegrityError: the checkpoint is damaged or of another network.
        """
        state = load_state(path)
        try:
            self.heads.load_state_dict(state["heads"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.done = state["done"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise IntegrityError(
                f"{path} does not fit this network; delete it to repeat the stage"
            ) from error


def train_heads(
    heads: ConfidenceTrainer,
    batches: Callable[[int, int], Iterator[PairBatch]],
    checkpoint: Path,
    save_every: int,
    log: Log,
    stopped: Callable[[], bool],
) -> None:
    """All steps of this stage that are left.

    Args:
        heads: what is trained.
        batches: those of the steps from the first number to before the second one.
        checkpoint: continued from if it exists.
        save_every: steps.
        log: receives the progress.
        stopped: whether to save and stop.

    Raises:
        Stopped: the caller asked for it.
        IntegrityError: a damaged checkpoint.
        OSError: the disk is full.
    """
    if checkpoint.exists():
        heads.resume(checkpoint)
    steps = heads.recipe.confidence_steps
    for batch in batches(OFFSET + heads.done, OFFSET + steps):
        loss = heads.step(batch)
        if heads.done % LOG_EVERY == 0:
            log(f"confidence step {heads.done} of {steps} loss {loss:.4f}")
        stopping = stopped()
        if heads.done % save_every == 0 or heads.done == steps or stopping:
            heads.save(checkpoint)
        if stopping:
            log(f"stopped at confidence step {heads.done}; the same command continues")
            raise Stopped


# --- run: From a folder of photos to a weights file: what `matcher train` does.

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
