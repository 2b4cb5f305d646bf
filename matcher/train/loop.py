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
from matcher.train.keypoints import IGNORED, Describer, Keypoints, labelled, strongest
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
from matcher.train.pairs import Draws, ImagePairs, PairSampler, made_ahead, other_of_pair
from matcher.train.recipe import OptimiserRecipe, Recipe, differences, fingerprint
from matcher.train.start import Networks, build_networks, optimisers_of
from matcher.train.views import duration

Log = Callable[[str], None]
LogRow = dict[str, float]

LOG_EVERY, SAVE_EVERY = 10.0, 300.0  # seconds
CORRECT = 3.0  # pixels; validation


# --- One step.


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


@dataclass
class Progress:
    """The progress of a run; kept in its checkpoint."""

    step: int = 0
    pairs: int = 0
    seconds: float = 0.0  # of steps and of waiting for batches
    skipped: int = 0  # steps whose loss or gradient was not finite
    best: float = -math.inf  # F1 of the best validation
    head_steps: int = 0  # of the confidence stage
    history: list[LogRow] = field(default_factory=list)  # rows of the log


class Trainer:
    """The networks of a recipe, their moving average and their optimisers; `step` takes one batch.

    Raises:
        IntegrityError, UsageError: weights to start from are absent or do not fit.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.model, self._start, self._unscaled = build_networks(recipe)
        self.model.to(device)
        if self.model.front_end is not None:
            self.model.front_end.to(memory_format=torch.channels_last)
        self.optimisers, self.rates = optimisers_of(self.model, recipe)
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.progress = Progress()

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the time is over."""
        return done_share(self.recipe.optimiser, self.progress.step, self.progress.seconds) == 1

    def step(self, batch: Batch) -> float:
        """One update; returns the loss, NaN if it or its gradient was not finite and the step was skipped."""
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
            gradient = recipe.matcher.gradient
            keypoints = replace(
                keypoints, descriptors=keypoints.descriptors.detach().lerp(keypoints.descriptors, gradient)
            )
        if recipe.matcher.train:
            pairs = recipe.matched_pairs_of(batch.points)
            few = keypoints.strongest(batch.points).leading(pairs)
            known = labelled(few, batch.pairs.leading(pairs), recipe)
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
        corresponding, visible = corresponding.nan_to_num(0.0), (states == 1) & valid
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
        turns = torch.cat([torch.zeros_like(batch.pairs.turns), batch.pairs.turns])
        own, others = (
            steered(each, -turns % TURNS) for each in (described[:, :count], described[:, -count:])
        )
        chosen = torch.randperm(count, generator=rng)[: recipe.described].to(self.device, non_blocking=True)
        near = visible & mutual & (distance.amin(2) < 1.5 * recipe.match_distance)
        repeatable = matched_correctly(own, valid, distance, recipe.match_distance)[0]
        points = DescribedKeypoints(
            own, other_of_pair(others), positions.detach(), corresponding.detach(), valid
        )
        refinement = refinement_loss(corresponding, other_of_pair(positions), nearest, near)
        scale = self.model.log_scale.exp()
        total = description_loss(points, chosen, visible[:, chosen], scale)
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

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all; `OSError` where the disk is full."""
        state = {
            "recipe": fingerprint(self.recipe),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "progress": vars(self.progress),
        }
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
            self.model.load_state_dict(state["model"])
            self.average.load_state_dict(state["average"])
            for optimiser, values in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(values)
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise IntegrityError(
                f"{path} does not fit this network ({reason}); delete it to start again"
            ) from error


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
    for batch in batches:
        points = batch.keypoints
        if networks.front_end is not None:
            points = _found(networks, batch, counts)
        if networks.matcher is not None:
            counts[:3] += _match_counts(networks, labelled(points, batch.pairs, recipe), recipe)
    right, matches, wanted, repeated, visible = counts.tolist()
    scores = {
        "precision": right / max(matches, 1),
        "recall": right / max(wanted, 1),
        "f1": 2 * right / max(matches + wanted, 1),
    }
    return {"repeatability": repeated / max(visible, 1), **scores} if visible else scores


def _found(networks: Networks, batch: Batch, counts: Tensor) -> Keypoints:
    """The keypoints of a front end; adds to the counts what it found."""
    network = networks.front_end.eval()
    logits, maps = network(batch.pairs.images)
    maxima, valid = strongest(logits, batch.points)
    positions = subpixel(logits, maxima)
    found = Keypoints(positions, network.describe(maps, positions), valid)
    corresponding, states = batch.pairs.transfer(positions)
    visible = (states == 1) & valid
    _, distance, _ = nearest_of_other(corresponding.nan_to_num(0.0), positions, valid)
    repeated = visible & (distance.amin(2) < CORRECT)
    counts[3:] += torch.stack([repeated.sum(), visible.sum()]).cpu()
    if networks.matcher is None:
        turns = torch.cat([torch.zeros_like(batch.pairs.turns), batch.pairs.turns])
        own = steered(found.descriptors, -turns % TURNS)
        correct, mutual = matched_correctly(own, valid, distance, CORRECT)
        counts[:3] += torch.stack([(correct & visible).sum(), (mutual & visible).sum(), repeated.sum()]).cpu()
    return found


def _match_counts(networks: Networks, known: Any, recipe: Recipe) -> Tensor:
    """(3,) right matches, matches of keypoints whose partner is known, and matches there are."""
    matcher = networks.matcher
    layer = labelled_layers(matcher, known)[-1]
    log_p = assigned(matcher, layer, len(matcher.layers) - 1, recipe.matcher.sinkhorn_iterations)
    found, wanted = decisions(log_p), torch.cat([known.partner0, known.partner1], dim=1)
    right = (found == wanted) & (wanted >= 0)
    return torch.stack([right.sum(), ((found >= 0) & (wanted != IGNORED)).sum(), (wanted >= 0).sum()]).cpu()


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

    def resume(self) -> None:
        """Continue from the folder's checkpoint, if there is one; the log is truncated to it."""
        checkpoint = self.folder / "checkpoint.pt"
        if checkpoint.exists():
            self.trainer.resume(checkpoint)
            self.log(f"resumed at step {self.trainer.progress.step}")
        lines = "".join(json.dumps(row) + "\n" for row in self.trainer.progress.history)
        write_whole(self.folder / "log.jsonl", lines.encode())

    def run(self, batches: Iterator[Batch]) -> None:
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
        first = progress.step
        started = reported = saved = time.perf_counter()
        for batch in batches:
            losses.append(self.trainer.step(batch))
            now = time.perf_counter()
            progress.seconds += now - started
            if progress.skipped > 50:  # it will not recover
                raise MatcherError(
                    f"the loss was not finite in {progress.skipped} steps; lower "
                    "optimiser.learning_rate in the recipe and start in another --run folder"
                )
            last = self.trainer.finished
            if now - reported > LOG_EVERY or last or progress.step == first + 1:
                self._report(losses)
                losses, reported = [], now
            if progress.step % recipe.validate_every == 0 or last:
                self._validate()
            stopping = self.stopped()
            if progress.step % recipe.save_every == 0 or now - saved > SAVE_EVERY or last or stopping:
                self.trainer.save(self.folder / "checkpoint.pt")
                saved = now
            if stopping:
                self.log(f"stopped at step {progress.step}; the same command continues")
                raise Stopped
            if last:
                return
            started = time.perf_counter()

    def _report(self, losses: Sequence[float]) -> None:
        """Log the mean loss since the last report, and the time left."""
        progress, recipe = self.trainer.progress, self.trainer.recipe.optimiser
        finite = [loss for loss in losses if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        skipped = f", {progress.skipped} steps skipped" if progress.skipped else ""
        done = done_share(recipe, progress.step, progress.seconds)
        left = f", {duration(progress.seconds * (1 - done) / done)} left" if done < 1 else ""
        rate = progress.pairs / max(progress.seconds, 1e-9)
        steps = f"{progress.step} of {recipe.steps}"
        self.log(f"step {steps} loss {mean:.4f} {rate:.1f} pairs/s{skipped}{left}")
        if finite:
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

    def train_heads(self, networks: Networks, make: Callable[[int], Batch]) -> None:
        """The last stage: the heads for early exit and pruning on the finished network (LightGlue, 3.3).

        Args:
            networks: of which the matcher's heads are trained.
            make: makes the batch of a step.

        Raises:
            Stopped: the caller asked for it.
            IntegrityError: a damaged checkpoint.
            OSError: the disk is full.
        """
        recipe, device, matcher = self.trainer.recipe, self.trainer.device, networks.matcher
        steps, checkpoint = recipe.matcher.confidence_steps, self.folder / "confidence.pt"
        heads = nn.ModuleList([matcher.confidence, matcher.match_probability]).requires_grad_(True)
        optimiser, done = torch.optim.AdamW(heads.parameters(), weight_decay=0.0), 0
        if checkpoint.exists():
            state = load_state(checkpoint)
            try:
                heads.load_state_dict(state["heads"])
                optimiser.load_state_dict(state["optimiser"])
                done = state["done"]
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise IntegrityError(f"{checkpoint} does not fit this network; delete it") from error
        began = reported = time.perf_counter()
        first = done
        others = 10_000_000  # added to the steps, so that the batches are others
        for batch in made_ahead(make, others + done, others + steps, device):
            for group in optimiser.param_groups:
                group["lr"] = 2e-3 * (1 - done / steps)  # linearly to zero
            known = self._known(networks, batch)
            loss = head_loss(matcher, known, recipe.matcher)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            done, now, stopping = done + 1, time.perf_counter(), self.stopped()
            if now - reported > LOG_EVERY or done == steps:
                left, reported = duration((now - began) / (done - first) * (steps - done)), now
                self.log(f"confidence step {done} of {steps} loss {float(loss.detach()):.4f}, {left} left")
            if done % recipe.save_every == 0 or done == steps or stopping:
                state = {"done": done, "heads": heads.state_dict(), "optimiser": optimiser.state_dict()}
                save_state(checkpoint, state)
            if stopping:
                self.log(f"stopped at confidence step {done}; the same command continues")
                raise Stopped
        heads.requires_grad_(False)

    def _known(self, networks: Networks, batch: Batch) -> Any:
        recipe = self.trainer.recipe
        pairs = recipe.matched_pairs_of(batch.points)
        few, keypoints = batch.pairs.leading(pairs), batch.keypoints
        if keypoints is None:
            with torch.no_grad():
                keypoints = _found(
                    networks, Batch(few, batch.points, None), torch.zeros(5, dtype=torch.float64)
                )
        return labelled(keypoints.strongest(batch.points).leading(pairs), few, recipe)


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
        IntegrityError: its recipe.json is damaged or was changed.
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
            own = {"fingerprint": fingerprint(recipe), "recipe": values, "held_out": held_out}
            write_whole(note, json.dumps(own, indent=1).encode())
            return
        stored = json.loads(note.read_text(encoding="utf-8"))
        owner, before, photos = stored["fingerprint"], stored["recipe"], stored["held_out"]
    except UsageError:  # a ValueError, too
        raise
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{folder}: no run can be kept there ({error.strerror}); give another --run"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{note} is damaged; restore it or delete the run folder") from error
    changes = ", ".join(differences(before, values))
    if owner != fingerprint(recipe) and not changes:
        raise IntegrityError(f"{note} was changed: give another --run or delete the folder")
    if owner != fingerprint(recipe):
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
