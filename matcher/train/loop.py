"""Training steps, their schedule, validations and checkpoints: one loop for front ends and matchers."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matcher.config import to_dict
from matcher.errors import IntegrityError, MatcherError, UsageError
from matcher.extract.learned import subpixel, unfolded
from matcher.files import is_ours, write_whole
from matcher.match.sinkhorn import mutual_best
from matcher.match.steering import TURNS, steered
from matcher.train.keypoints import IGNORED, Describer, Keypoints, PairBatch, labelled, strongest
from matcher.train.losses import (
    DescribedKeypoints,
    assigned,
    decisions,
    description_loss,
    head_loss,
    labelled_layers,
    matching_loss,
    mixed_precision,
    nearest_of_other,
    refinement_loss,
    reliability_loss,
)
from matcher.train.pairs import Draws, ImagePairs, PairSampler, other_of_pair
from matcher.train.recipe import OptimiserRecipe, Recipe, differences, fingerprint
from matcher.train.start import Networks, build_networks, optimisers_of
from matcher.train.views import VISIBLE, Log, duration

LogRow = dict[str, float]
CORRECT = 3.0  # pixels; validation


# --- Batches.


@dataclass(frozen=True, eq=False)
class Batch:
    """New pairs, and their keypoints where the front end is not trained."""

    pairs: ImagePairs
    points: int  # of an image, which are matched
    keypoints: Keypoints | None


class BatchMaker:
    """Makes the batch of a step, the same for the same recipe, views and kind of device."""

    def __init__(self, recipe: Recipe, sampler: PairSampler, describer: Describer | None) -> None:
        self.recipe, self.sampler, self.describer = recipe, sampler, describer

    def __call__(self, step: int) -> Batch:
        """The pairs of a step, and their keypoints if the front end is not trained."""
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        points = self.recipe.pair.points
        points = points[int(torch.randint(len(points), (1,), generator=rng))]
        pairs = self.sampler.batch(self.recipe.pairs_of(points), step)
        if self.describer is None:
            return Batch(pairs, points, None)
        draws = Draws(int(torch.randint(2**62, (1,), generator=rng)), self.sampler.device)
        return Batch(pairs, points, self.describer(pairs.images, points, draws))


def known_matches(batch: Batch, keypoints: Keypoints, recipe: Recipe) -> PairBatch:
    """As many keypoints and pairs as the matcher sees, with their partners."""
    pairs = recipe.matched_pairs_of(batch.points)
    return labelled(keypoints.strongest(batch.points).leading(pairs), batch.pairs.leading(pairs), recipe)


@torch.no_grad()
def found_keypoints(networks: Networks, batch: Batch) -> Keypoints:
    """The keypoints of a batch, by the front end where it is trained."""
    if batch.keypoints is not None:
        return batch.keypoints
    network = networks.front_end.eval()
    logits, maps = network(batch.pairs.images)
    maxima, valid = strongest(logits, batch.points)
    positions = subpixel(logits, maxima)
    return Keypoints(positions, network.describe(maps, positions), valid)


def turned_alike(descriptors: Tensor, pairs: ImagePairs) -> Tensor:
    """Descriptors (2B, …, D) with those of image 1 as image 0 is turned."""
    return steered(descriptors, -torch.cat([torch.zeros_like(pairs.turns), pairs.turns]) % TURNS)


# --- One step.


@dataclass
class Progress:
    """The progress of a stage; kept in its checkpoint."""

    step: int = 0
    pairs: int = 0
    seconds: float = 0.0  # of steps and of waiting for batches
    skipped: int = 0  # steps whose loss or gradient was not finite
    best: float = -math.inf  # F1 of the best validation
    history: list[LogRow] = field(default_factory=list)  # rows of the log


def done_share(recipe: OptimiserRecipe, step: int, seconds: float) -> float:
    """How much of a run is done, by steps or by time, whichever is more; 1 at its end."""
    by_time = seconds / (60 * recipe.minutes) if recipe.minutes else 0.0
    return min(1.0, max(step / recipe.steps, by_time))


def learning_rate_share(recipe: OptimiserRecipe, step: int, seconds: float = 0.0) -> float:
    """Share of the learning rate at a step, after so many seconds: linear warm-up, a plateau, then a linear
    decay to `final_share`. A run on the plateau can be prolonged, and ended from any of its checkpoints."""
    left = 1 - done_share(recipe, step, seconds)
    fall = min(1.0, left / max(1e-9, 1 - recipe.hold_share))
    return max(recipe.final_share, fall) * min(1.0, (step + 1) / max(1, recipe.warmup_steps))


class Stage:
    """What `Loop.run` drives: steps over batches, with a checkpoint of networks, optimisers and progress."""

    name, file = "", "checkpoint.pt"  # in the lines of the log; of the checkpoint

    def __init__(self, recipe: Recipe, steps: int, networks: dict[str, nn.Module]) -> None:
        self.recipe, self.steps, self.networks, self.progress = recipe, steps, networks, Progress()
        self.optimisers: list[torch.optim.Optimizer] = []

    @property
    def share(self) -> float:
        """How much is done; 1 at the end."""
        return self.progress.step / self.steps if self.steps else 1.0

    def step(self, batch: Batch) -> float:
        """One update; returns the loss, NaN if it or its gradient was not finite and the step was skipped."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all; `OSError` where the disk is full."""
        state: dict[str, Any] = {name: network.state_dict() for name, network in self.networks.items()}
        state["optimisers"] = [optimiser.state_dict() for optimiser in self.optimisers]
        state |= {"recipe": fingerprint(self.recipe), "progress": vars(self.progress)}
        save_state(path, state)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            IntegrityError: the checkpoint is damaged.
            UsageError: it belongs to another recipe.
        """
        state = load_state(path)
        if state.get("recipe") != fingerprint(self.recipe):
            raise UsageError(f"{path} is a checkpoint of another recipe; give another --run folder")
        try:
            for name, network in self.networks.items():
                network.load_state_dict(state[name])
            for optimiser, values in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(values)
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise IntegrityError(
                f"{path} does not fit this network ({reason}); delete it to start again"
            ) from error


class Trainer(Stage):
    """The networks of a recipe, their moving average and their optimisers.

    Raises:
        IntegrityError, UsageError: weights to start from are absent or do not fit.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.device = device
        self.model, self._start, self._unscaled = build_networks(recipe)
        self.model.to(device)
        if self.model.front_end is not None:
            self.model.front_end.to(memory_format=torch.channels_last)
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        super().__init__(recipe, recipe.optimiser.steps, {"model": self.model, "average": self.average})
        self.optimisers, self.rates = optimisers_of(self.model, recipe)

    @property
    def share(self) -> float:
        """How much is done, by steps or by time."""
        return done_share(self.recipe.optimiser, self.progress.step, self.progress.seconds)

    def step(self, batch: Batch) -> float:
        """One update of the networks and of their average."""
        recipe, progress = self.recipe.optimiser, self.progress
        if progress.step == 0:
            self._begin(batch)
        rate = recipe.learning_rate * learning_rate_share(recipe, progress.step, progress.seconds)
        for optimiser, relative in zip(self.optimisers, self.rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * relative
            optimiser.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.gradient_clip)
        # The only time in a step that a GPU is waited for: both numbers are read together.
        value, norm = torch.stack([loss.detach(), norm]).tolist()
        finite = math.isfinite(value) and math.isfinite(norm)
        if finite:
            for optimiser in self.optimisers:
                optimiser.step()
            self._update_average()
        progress.skipped += not finite
        progress.step += 1
        progress.pairs += len(batch.pairs)
        return value if finite else math.nan

    @torch.no_grad()
    def _begin(self, batch: Batch) -> None:
        """Before the first step: restore batch normalisation from images, scale a new projection."""
        for networks in (self.model, self.average):
            if self._start is not None:
                network = unfolded(self._start.to(self.device), batch.pairs.images)
                networks.front_end.load_state_dict(network.state_dict())
            if self._unscaled and networks.matcher is not None and batch.keypoints is not None:
                descriptors = batch.keypoints.descriptors[batch.keypoints.valid].float()
                networks.matcher.standardise(descriptors)

    def loss(self, batch: Batch) -> Tensor:
        """The losses of what is trained; random choices depend on the step only."""
        recipe = self.recipe
        rng = torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.progress.step)
        keypoints, total = batch.keypoints, 0.0
        if recipe.front_end.train:
            keypoints, total = self._keypoint_loss(batch, rng)
            own, gradient = keypoints.descriptors, recipe.matcher.gradient
            keypoints = replace(keypoints, descriptors=own.detach().lerp(own, gradient))
        if recipe.matcher.train:
            known = known_matches(batch, keypoints, recipe)
            total = total + matching_loss(self.model.matcher, known, recipe.matcher, rng)
        return total

    def _keypoint_loss(self, batch: Batch, rng: torch.Generator) -> tuple[Keypoints, Tensor]:
        """The keypoints of a batch, and the loss of their positions, scores and descriptors."""
        recipe, network, count = self.recipe.front_end, self.model.front_end, self.recipe.front_end.points
        matched = batch.points if self.recipe.matcher.train else 0
        with mixed_precision(self.device):
            logits, maps = network(batch.pairs.images)
        maxima, valid = strongest(logits, max(count, matched))
        positions = subpixel(logits, maxima)
        corresponding, states = batch.pairs.transfer(positions)
        corresponding, visible = corresponding.nan_to_num(0.0), (states == VISIBLE) & valid
        with mixed_precision(self.device):
            # Descriptors of an image at its own keypoints and at those transferred from the other image.
            both = torch.cat([positions, other_of_pair(corresponding[:, :count])], dim=1).detach()
            described = network.describe(maps, both)
        found = Keypoints(positions, described[:, : positions.shape[1]], valid)
        at = maxima[..., 1] * logits.shape[2] + maxima[..., 0]
        scored = logits.flatten(1).gather(1, at[:, :count])
        positions, corresponding = positions[:, :count], corresponding[:, :count]
        visible, valid = visible[:, :count], valid[:, :count]
        nearest, distance, mutual = nearest_of_other(corresponding, positions, valid)
        own, others = (turned_alike(x, batch.pairs) for x in (described[:, :count], described[:, -count:]))
        chosen = torch.randperm(count, generator=rng)[: recipe.described].to(self.device, non_blocking=True)
        near = visible & mutual & (distance.amin(2) < 1.5 * recipe.match_distance)
        repeatable = matched_correctly(own, valid, distance, recipe.match_distance)[0]
        points = DescribedKeypoints(
            own, other_of_pair(others), positions.detach(), corresponding.detach(), valid
        )
        refinement = refinement_loss(corresponding, other_of_pair(positions), nearest, near)
        total = description_loss(points, chosen, visible[:, chosen], self.model.log_scale.exp())
        total = total + reliability_loss(scored, repeatable, visible)
        return found, total + recipe.refinement_weight * refinement

    @torch.no_grad()
    def _update_average(self) -> None:
        """Exponential moving average, over few steps at first, so that early validations are meaningful."""
        decay = min(self.recipe.optimiser.average_decay, (1 + self.progress.step) / (10 + self.progress.step))
        means, values = ((*n.parameters(), *n.buffers()) for n in (self.average, self.model))
        for mean, value in zip(means, values, strict=True):
            if value.is_floating_point():
                mean.lerp_(value, 1 - decay)


class HeadTrainer(Stage):
    """The last stage: the heads for early exit and pruning on the finished network (LightGlue, 3.3)."""

    name, file = "confidence ", "confidence.pt"

    def __init__(self, recipe: Recipe, networks: Networks) -> None:
        self.trained, matcher = networks, networks.matcher
        heads = nn.ModuleList([matcher.confidence, matcher.match_probability]).requires_grad_(True)
        super().__init__(recipe, recipe.matcher.confidence_steps, {"heads": heads})
        self.optimisers = [torch.optim.AdamW(heads.parameters(), weight_decay=0.0)]

    def step(self, batch: Batch) -> float:
        """One update of the heads; the learning rate falls linearly to zero."""
        (optimiser,) = self.optimisers
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * (1 - self.share)
        known = known_matches(batch, found_keypoints(self.trained, batch), self.recipe)
        loss = head_loss(self.trained.matcher, known, self.recipe.matcher)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        self.progress.step += 1
        self.progress.pairs += len(known)
        return float(loss.detach())


# --- Validation.


@torch.no_grad()
def matched_correctly(own: Tensor, valid: Tensor, distance: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(2B, K) bool: keypoints whose descriptor's mutual nearest neighbour lies at most `limit` pixels from
    where they are in the other image; and which have a mutual nearest neighbour.

    Args:
        own: (2B, K, D) descriptors, turned alike.
        valid: (2B, K) bool, keypoints that exist.
        distance: (2B, K, K) of each keypoint in the other image to the keypoints there.
        limit: in pixels.
    """
    similarity = own @ other_of_pair(own).mT
    similarity = similarity.masked_fill(~(valid[:, :, None] & other_of_pair(valid)[:, None]), -2)
    _, chosen, mutual = mutual_best(similarity)
    mutual &= valid
    return mutual & (distance.gather(2, chosen[..., None])[..., 0] < limit), mutual


@torch.no_grad()
def validate(networks: Networks, batches: Iterable[Batch], recipe: Recipe) -> LogRow:
    """Scores over batches of photos that are not trained on.

    Returns:
        `precision`, `recall` and `f1` of the matches: of the matcher, over keypoints whose partner is known,
        or without one of mutual nearest neighbours, at 3 pixels. Of a front end that is trained also
        `repeatability`: share of the covisible keypoints that are detected in the other image too.
    """
    counts = torch.zeros(5, dtype=torch.float64)  # right, matches, wanted, repeated, visible
    matcher = networks.matcher
    for batch in batches:
        points = found_keypoints(networks, batch)
        if networks.front_end is not None:
            corresponding, states = batch.pairs.transfer(points.positions)
            visible = (states == VISIBLE) & points.valid
            distance = nearest_of_other(corresponding.nan_to_num(0.0), points.positions, points.valid)[1]
            repeated = visible & (distance.amin(2) < CORRECT)
            counts[3:] += torch.stack([repeated.sum(), visible.sum()]).cpu()
        if matcher is None:
            own = turned_alike(points.descriptors, batch.pairs)
            right, mutual = matched_correctly(own, points.valid, distance, CORRECT)
            right, matched, wanted = right & visible, mutual & visible, repeated
        else:
            known = labelled(points, batch.pairs, recipe)
            layer, last = labelled_layers(matcher, known)[-1], len(matcher.layers) - 1
            found = decisions(assigned(matcher, layer, last, recipe.matcher.sinkhorn_iterations))
            partners = torch.cat([known.partner0, known.partner1], dim=1)
            right, matched = (found == partners) & (partners >= 0), (found >= 0) & (partners != IGNORED)
            wanted = partners >= 0
        counts[:3] += torch.stack([right.sum(), matched.sum(), wanted.sum()]).cpu()
    right, matches, wanted, repeated, visible = counts.tolist()
    scores = {
        "precision": right / max(matches, 1),
        "recall": right / max(wanted, 1),
        "f1": 2 * right / max(matches + wanted, 1),
    }
    return {"repeatability": repeated / max(visible, 1), **scores} if visible else scores


# --- The loop.


class Stopped(Exception):
    """The caller asked to stop; the progress is saved."""


@dataclass
class Loop:
    """A trainer, its folder and its callbacks."""

    trainer: Trainer
    validate: Callable[[Networks], LogRow]  # the best parameters have the highest "f1"
    folder: Path
    log: Log
    stopped: Callable[[], bool]
    on_validation: Callable[[Sequence[LogRow]], None]

    def resume(self, stage: Stage) -> None:
        """Continue from the folder's checkpoint, if there is one; the log is truncated to it."""
        if (self.folder / stage.file).exists():
            stage.resume(self.folder / stage.file)
            self.log(f"resumed at {stage.name}step {stage.progress.step}")
        lines = "".join(json.dumps(row) + "\n" for row in self.trainer.progress.history)
        write_whole(self.folder / "log.jsonl", lines.encode())

    def run(self, stage: Stage, batches: Iterator[Batch]) -> None:
        """One step per batch until the stage is done, with validations of the trainer, and checkpoints.

        Raises:
            Stopped: the caller asked for it.
            MatcherError: the loss was infinite or NaN in too many steps.
            OSError: the disk is full; the last good checkpoint is kept.
        """
        recipe, progress = self.trainer.recipe, stage.progress
        if stage.share == 1:
            return
        losses: list[float] = []
        first, validated = progress.step, stage is self.trainer
        started = reported = saved = time.perf_counter()
        for batch in batches:
            losses.append(stage.step(batch))
            now = time.perf_counter()
            progress.seconds += now - started
            if progress.skipped > 50:  # it will not recover
                raise MatcherError(
                    f"the loss was not finite in {progress.skipped} steps; lower "
                    "optimiser.learning_rate in the recipe and start in another --run folder"
                )
            last = stage.share == 1
            if now - reported > 10 or last or progress.step == first + 1:
                self._report(stage, losses)
                losses, reported = [], now
            if validated and (progress.step % recipe.validate_every == 0 or last):
                self._validate()
            stopping = self.stopped()
            if progress.step % recipe.save_every == 0 or now - saved > 300 or last or stopping:
                stage.save(self.folder / stage.file)
                saved = now
            if stopping:
                self.log(f"stopped at {stage.name}step {progress.step}; the same command continues")
                raise Stopped
            if last:
                return
            started = time.perf_counter()

    def _report(self, stage: Stage, losses: Sequence[float]) -> None:
        """Log the mean loss since the last report, and the time left."""
        progress, done = stage.progress, stage.share
        finite = [loss for loss in losses if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        skipped = f", {progress.skipped} steps skipped" if progress.skipped else ""
        left = f", {duration(progress.seconds * (1 - done) / done)} left" if done < 1 else ""
        rate = progress.pairs / max(progress.seconds, 1e-9)
        steps = f"{stage.name}step {progress.step} of {stage.steps}"
        self.log(f"{steps} loss {mean:.4f} {rate:.1f} pairs/s{skipped}{left}")
        if finite and stage is self.trainer:
            self._record({"loss": mean})

    def _validate(self) -> None:
        """Validate; save the averaged parameters if they are the best so far (by F1)."""
        progress = self.trainer.progress
        scores = self.validate(self.trainer.average)
        self._record(scores)
        words = " ".join(f"{name} {value:.3f}" for name, value in scores.items())
        self.log(f"step {progress.step} validation: {words}")
        if scores["f1"] > progress.best:
            progress.best = scores["f1"]
            save_state(self.folder / "best.pt", self.trainer.average.state_dict())
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


# --- The folder of a run.


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While it is entered, no other process trains in the folder.

    Raises:
        UsageError: one does.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"{folder}: another process trains there; wait for it, or give another --run"
            ) from None
        yield


def claim_folder(folder: Path, recipe: Recipe, held_out: str) -> None:
    """Make the folder of a run, or check that it belongs to this recipe and is validated on these photos.

    Args:
        folder: of the run.
        recipe: of the run.
        held_out: a digest of the photos that are validated on.

    Raises:
        UsageError: it is another recipe's, other photos are held out, it holds files but no run, or it cannot
            be made.
        IntegrityError: its recipe.json is damaged.
    """
    note, values = folder / "recipe.json", json.loads(json.dumps(to_dict(recipe)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            strange = [file for file in sorted(folder.iterdir()) if file.name[0] != "." and not is_ours(file)]
            if strange:
                raise UsageError(
                    f"{folder} holds {strange[0].name}, but no training run; give another folder with --run"
                )
            write_whole(note, json.dumps({"recipe": values, "held_out": held_out}, indent=1).encode())
        stored = json.loads(note.read_text(encoding="utf-8"))
        changes, photos = ", ".join(differences(stored["recipe"], values)), stored["held_out"]
    except UsageError:  # a ValueError, too
        raise
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{folder}: no run can be kept there ({error.strerror}); give another --run"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{note} is damaged; restore it or delete the run folder") from error
    if changes:
        raise UsageError(
            f"{folder} holds a run of another recipe ({changes}); give another --run or delete the folder"
        )
    if photos != held_out:
        raise UsageError(
            f"{folder} holds a run that is validated on other photos, some of which would be trained on now: "
            "give the photos as they were, or another --run"
        )


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint to a temporary file and rename it, so that the last good one survives a failure.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_whole(path, buffer.getvalue())
    except OSError as error:
        left = "the last good one is kept" if path.exists() else "there was none before"
        raise OSError(error.errno, f"{error.strerror}: this checkpoint is lost, {left}", str(path)) from error


def load_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint, its tensors on the CPU.

    Raises:
        IntegrityError: absent, cut short or damaged; the message names the file and the remedy.
    """
    remedy = "restore a copy of it, or delete the run folder to start again"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise IntegrityError(f"{path} is absent: {remedy}") from None
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise IntegrityError(f"{path} is damaged ({reason}): {remedy}") from error
    if not isinstance(state, dict):
        raise IntegrityError(f"{path} is not a checkpoint: {remedy}")
    return state
