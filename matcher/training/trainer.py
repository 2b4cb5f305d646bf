"""The first stage: assignment at every layer, one batch a step, with a moving average of the parameters."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matcher.network.adaptivity import Tokens
from matcher.network.guidance import Side
from matcher.network.inference import resolve_precision
from matcher.network.model import Model
from matcher.network.position import normalise_positions
from matcher.training.losses import (
    assignment_loss,
    log_assignment,
    log_dual_softmax,
    matchability_loss,
    statement_loss,
)
from matcher.training.optimisers import build_optimisers, learning_rate_share, set_learning_rate
from matcher.training.pairs import PairBatch
from matcher.training.recipe import OptimiserRecipe, Recipe, fingerprint
from matcher.training.state import load_state, save_state
from matcher.types import IntegrityError, UsageError
from matcher.weights import load_model


@dataclass
class Progress:
    """Where a run is; kept in its checkpoint."""

    step: int = 0
    pairs: int = 0
    seconds: float = 0.0  # spent on steps and on waiting for their batches
    skipped: int = 0  # steps whose loss or gradient was not finite
    best: float = -math.inf  # F1 of the best validation
    history: list[dict[str, float]] = field(default_factory=list)  # rows of the log


class Trainer:
    """A network, its moving average and its optimisers; `step` takes one batch."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = Model(recipe.network)
        if recipe.start:
            continue_from(self.model, recipe.start)
        self.model.to(device)
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.optimisers = build_optimisers(self.model, recipe.optimiser)
        self.progress = Progress()

    def step(self, batch: PairBatch) -> float:
        """One update; returns the loss, NaN if it or its gradient was not finite and the step was skipped."""
        recipe, progress = self.recipe.optimiser, self.progress
        rate = recipe.learning_rate * learning_rate_share(recipe, progress.step)
        set_learning_rate(self.optimisers, rate, recipe.muon_rate)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        if progress.step == 0 and not self.recipe.start:
            self._standardise(batch)
        loss = self._loss(batch)
        sound = bool(loss.isfinite())
        if sound:
            loss.backward()
            sound = bool(nn.utils.clip_grad_norm_(self.model.parameters(), recipe.gradient_clip).isfinite())
        if sound:
            for optimiser in self.optimisers:
                optimiser.step()
            self._update_average()
        progress.skipped += not sound
        progress.step += 1
        progress.pairs += len(batch.partner0)
        return float(loss.detach()) if sound else math.nan

    def _standardise(self, batch: PairBatch) -> None:
        """Begin with tokens of mean 0 and variance 1."""
        descriptors = torch.cat([batch.features0.descriptors, batch.features1.descriptors], dim=1)
        self.model.standardise(descriptors.to(self.device).flatten(0, 1))
        self.average.load_state_dict(self.model.state_dict())

    def _loss(self, batch: PairBatch) -> Tensor:
        """Mean over the last layer, which counts twice, and some inner ones, drawn anew at each step."""
        recipe, states = self.recipe.optimiser, paired_states(self.model, batch, self.device)
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        inner = torch.randperm(len(states) - 1, generator=rng)[: recipe.inner_layers].tolist()
        partners = batch.partner0.to(self.device), batch.partner1.to(self.device)
        losses = []
        for depth in (*inner, len(states) - 1):
            with mixed_precision(self.device):
                scores = self.model.scores(*states[depth], depth)
            matchability = recipe.matchability_weight * matchability_loss(scores, *partners)
            rounds = 0 if depth in inner else self.model.config.assignment.consensus
            found = assignments(self.model, scores, states[depth], recipe, rounds)
            losses += [assignment_loss(log_p, *partners) + matchability for log_p in found]
        loss = torch.stack(losses).mean() + losses[-1]
        if self.model.guidance is None:
            return loss
        return loss + recipe.statement_weight * self._statement_loss(states, batch)

    def _statement_loss(self, states: list[tuple[Side, Side]], batch: PairBatch) -> Tensor:
        """Mean over all layers, of both sides."""
        losses = []
        for side, place, seer in ((0, batch.place0, batch.features1), (1, batch.place1, batch.features0)):
            seen = place.isfinite().all(-1).to(self.device)
            truth = normalise_positions(replace(seer, keypoints=place.nan_to_num(0.0))).to(self.device)
            losses += [statement_loss(pair[side].stated, truth, seen) for pair in states]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _update_average(self) -> None:
        """Exponential moving average, short at first so that early validation means something."""
        decay = min(self.recipe.optimiser.average_decay, (1 + self.progress.step) / (10 + self.progress.step))
        for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(value, 1 - decay)

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all.

        Raises:
            OSError: the disk is full; an earlier checkpoint is kept.
        """
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
        # Checkpoints of the first version do not name their recipe; the note in their folder does.
        if state.get("recipe", fingerprint(self.recipe)) != fingerprint(self.recipe):
            raise UsageError(f"{path} is a checkpoint of another recipe; give another --run folder")
        try:
            self._restore(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise IntegrityError(
                f"{path} does not fit this network ({reason}); delete it to start again"
            ) from error

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimiser, values in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(values)
        self.progress = Progress(**state["progress"])


def continue_from(model: Model, start: str) -> None:
    """Fill a network with trained parameters; heads of exit and pruning that the file lacks stay as they are.

    Args:
        model: of the shape that the file has.
        start: a shipped name or the path of a weights file.

    Raises:
        IntegrityError: no such weights, or a damaged file.
        UsageError: they are of a network of another shape.
    """
    trained, _, name = load_model(start)
    wanted, found = model.state_dict(), trained.state_dict()
    odd = [key for key in wanted.keys() ^ found.keys() if not key.startswith(("confidence", "prospect"))]
    odd += [key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape]
    if odd:
        raise UsageError(
            f"start: the weights {name} are of another network than the recipe's ({len(odd)} tensors differ, "
            f"such as {min(odd)}); make [network] the same, or leave start away"
        )
    model.load_state_dict({**wanted, **found})


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 where the device is fast at it, else float32."""
    fast = resolve_precision("auto", device) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def paired_states(model: Model, batch: PairBatch, device: torch.device) -> list[tuple[Side, Side]]:
    """The points of image 0 and 1 after each layer, (B, N, …) float32."""
    with mixed_precision(device):
        tokens = model.tokens(batch.features0.to(device), batch.features1.to(device))
        return [_paired(state) for state in model.states(tokens)]


def _paired(tokens: Tokens) -> tuple[Side, Side]:
    """Tokens of pictures with equally many points as (B, N, …)."""
    columns = [x for x in (tokens.x, tokens.places, tokens.stated) if x is not None]
    columns = [x.float().view(-1, 2, tokens.layout.uniform, x.shape[-1]) for x in columns]
    return Side(*(x[:, 0] for x in columns)), Side(*(x[:, 1] for x in columns))


def assignments(
    model: Model, scores: Tensor, sides: tuple[Side, Side], recipe: OptimiserRecipe, rounds: int
) -> list[Tensor]:
    """Differentiable log P (B, N+1, M+1) of scores, and after each round of consensus."""
    if model.config.assignment.kind == "dual_softmax":
        return [log_dual_softmax(scores)]
    found = [log_assignment(scores, recipe.sinkhorn_iterations, recipe.unrolled_iterations)]
    for _ in range(rounds):
        heard = model.consensus(scores, *(side.places for side in sides), found[-1][:, :-1, :-1])
        found.append(log_assignment(heard, recipe.sinkhorn_iterations, recipe.unrolled_iterations))
    return found
