"""The first stage: assignment at every layer, one batch a step, with a moving average of the parameters."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matcher.network.attention import Layout
from matcher.network.inference import resolve_precision
from matcher.network.model import Model
from matcher.training.losses import assignment_loss
from matcher.training.optimisers import build_optimisers, learning_rate_share, set_learning_rate
from matcher.training.pairs import PairBatch
from matcher.training.recipe import Recipe, fingerprint
from matcher.training.state import load_state, save_state
from matcher.types import IntegrityError, UsageError


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
            self.model = Model(recipe.network).to(device)
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
        if progress.step == 0:
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
        """The mean over the last layer and some inner ones, drawn anew at each step."""
        states = paired_states(self.model, batch, self.device)
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        inner = torch.randperm(len(states) - 1, generator=rng)[: self.recipe.optimiser.inner_layers].tolist()
        partners = batch.partner0.to(self.device), batch.partner1.to(self.device)
        losses = []
        for depth in (*inner, len(states) - 1):
            with mixed_precision(self.device):
                scores = self.model.heads[depth](*states[depth])
            losses.append(assignment_loss(scores, *partners, self.recipe.optimiser))
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


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 where the device is fast at it, else float32."""
    fast = resolve_precision("auto", device) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def paired_states(model: Model, batch: PairBatch, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """States of image 0 and 1, (B, N, dim) float32, after each layer."""
    with mixed_precision(device):
        tokens = model.tokens(batch.features0.to(device), batch.features1.to(device))
        states = list(model.states(tokens))
    return [_paired(x, tokens.layout) for x in states]


def _paired(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Tokens (T, dim) of pictures with equally many points → (B, N, dim) of image 0 and of image 1."""
    states = x.float().view(-1, 2, layout.uniform, x.shape[-1])
    return states[:, 0], states[:, 1]
