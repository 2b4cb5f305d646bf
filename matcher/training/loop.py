"""The training loop: two stages, resumable, validated on photos it never trains on."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from matcher.network.attention import Layout
from matcher.network.model import Model
from matcher.training.losses import assignment_loss, confidence_loss, decisions
from matcher.training.pairs import PairBatch
from matcher.training.recipe import OptimiserRecipe, Recipe


@dataclass
class Progress:
    """Where a run is; kept in its checkpoint."""

    step: int = 0
    pairs: int = 0
    seconds: float = 0.0
    skipped: int = 0  # steps whose loss was not finite
    best: float = -math.inf
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """A network, its moving average and its optimisers; `step` takes one batch."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.model = Model(recipe.network).to(device)
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.optimisers = build_optimisers(self.model, recipe.optimiser)
        self.progress = Progress()

    def step(self, batch: PairBatch) -> float:
        """One update; returns the loss, NaN if it was not finite and the step was skipped."""
        started, recipe = time.perf_counter(), self.recipe.optimiser
        set_learning_rate(self.optimisers, recipe, self.progress.step)
        loss = self._loss(batch)
        finite = bool(torch.isfinite(loss))
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        if finite:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.gradient_clip)
            for optimiser in self.optimisers:
                optimiser.step()
            self._average()
        self.progress.skipped += not finite
        self.progress.step += 1
        self.progress.pairs += len(batch.partner0)
        self.progress.seconds += time.perf_counter() - started
        return float(loss.detach()) if finite else math.nan

    def _loss(self, batch: PairBatch) -> Tensor:
        states = self._states(batch)
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        inner = torch.randperm(len(states) - 1, generator=rng)[: self.recipe.optimiser.inner_layers].tolist()
        partners = batch.partner0.to(self.device), batch.partner1.to(self.device)
        losses = []
        for depth in (*inner, len(states) - 1):
            with torch.autocast(self.device.type, torch.bfloat16):
                scores = self.model.heads[depth](*states[depth])
            losses.append(assignment_loss(scores, *partners, self.recipe.optimiser))
        return torch.stack(losses).mean()

    def _states(self, batch: PairBatch) -> list[tuple[Tensor, Tensor]]:
        """States of image 0 and 1, (B, N, dim) float32, after each layer."""
        with torch.autocast(self.device.type, torch.bfloat16):
            tokens = self.model.tokens(batch.features0.to(self.device), batch.features1.to(self.device))
            states = list(self.model.states(tokens))
        return [paired(x, tokens.layout) for x in states]

    def confidence_step(self, batch: PairBatch, optimiser: torch.optim.Optimizer) -> float:
        """One update of the confidence heads of the averaged network, which stays as it is."""
        model, iterations = self.average, self.recipe.optimiser.sinkhorn_iterations
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            tokens = model.tokens(batch.features0.to(self.device), batch.features1.to(self.device))
            states = [paired(x, tokens.layout) for x in model.states(tokens)]
        with torch.no_grad():
            decided = [decisions(head(*x), iterations) for head, x in zip(model.heads, states, strict=True)]
        losses = [
            confidence_loss(head(torch.cat(x, dim=1)).squeeze(2), here, decided[-1])
            for head, x, here in zip(model.confidence, states[:-1], decided[:-1], strict=True)
        ]
        loss = torch.stack(losses).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    @torch.no_grad()
    def _average(self) -> None:
        """Exponential moving average, short at first so that early validation means something."""
        decay = min(self.recipe.optimiser.average_decay, (1 + self.progress.step) / (10 + self.progress.step))
        for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(value, 1 - decay)

    def save(self, path: Path) -> None:
        """A checkpoint, whole or absent: written beside `path`, then renamed."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "progress": vars(self.progress),
        }
        temporary = path.with_suffix(".partial")
        torch.save(state, temporary)
        temporary.replace(path)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of the same recipe."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimiser, values in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(values)
        self.progress = Progress(**state["progress"])


def paired(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Tokens (T, dim) of pictures with equally many points → (B, N, dim) of image 0 and of image 1."""
    states = x.float().view(-1, 2, layout.uniform, x.shape[-1])
    return states[:, 0], states[:, 1]


def build_optimisers(model: Model, recipe: OptimiserRecipe) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices if the recipe says so, AdamW for everything else."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2] if recipe.muon else []
    chosen = {id(p) for p in matrices}
    trained = [p for name, p in model.named_parameters() if not name.startswith("confidence")]
    rest = [p for p in trained if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=recipe.learning_rate)]
    if matrices:
        muon = torch.optim.Muon(
            matrices,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimisers.append(muon)
    return optimisers


def set_learning_rate(optimisers: list[torch.optim.Optimizer], recipe: OptimiserRecipe, step: int) -> None:
    """Linear warm-up, then a cosine down to `final_share`."""
    done = min(1.0, step / max(1, recipe.steps))
    cosine = recipe.final_share + (1 - recipe.final_share) * 0.5 * (1 + math.cos(math.pi * done))
    share = cosine * min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * share
