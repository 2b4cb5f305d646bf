"""Optimisers and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer

from matcher.errors import UsageError
from matcher.match.network import MatchingNetwork
from matcher.train.recipe import OptimiserRecipe


def build_optimisers(model: MatchingNetwork, recipe: OptimiserRecipe) -> list[Optimizer]:
    """AdamW, and Muon (Jordan et al. 2024) for the matrices of the layers if the recipe asks for it.

    The heads for early exit are left out; the second stage trains them. So are those for pruning, unless the
    recipe drops points by them, and parameters that take no gradients.

    Raises:
        UsageError: the recipe asks for Muon, which this PyTorch lacks.
    """
    if recipe.muon_rate and not hasattr(torch.optim, "Muon"):
        raise UsageError(
            f"optimiser.muon_rate needs PyTorch 2.9 or later, this is {torch.__version__}; set it to 0"
        )
    matrices = [p for p in model.layers.parameters() if recipe.muon_rate and p.ndim == 2 and p.requires_grad]
    chosen = {id(p) for p in matrices}
    later = "confidence" if prunes(recipe) else ("confidence", "match_probability")
    trained = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith(later)]
    rest = [p for p in trained if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimisers: list[Optimizer] = [torch.optim.AdamW(groups, lr=recipe.learning_rate)]
    if matrices:
        muon = torch.optim.Muon(
            matrices,
            lr=recipe.learning_rate * recipe.muon_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimisers.append(muon)
    return optimisers


class HasKeptShares(Protocol):
    """Part of a recipe; see `OptimiserRecipe`."""

    kept_shares: tuple[float, ...]


def prunes(recipe: HasKeptShares) -> bool:
    """Whether points are dropped in training, by heads that learn along."""
    return min(recipe.kept_shares) < 1


class Schedule(Protocol):
    """Learning rate and moving average; see `OptimiserRecipe`."""

    steps: int
    minutes: float
    learning_rate: float
    warmup_steps: int
    hold_share: float
    final_share: float
    gradient_clip: float
    average_decay: float


def done_share(recipe: Schedule, step: int, seconds: float) -> float:
    """How much of a run is done, by steps or by time, whichever is more; 1 at its end."""
    by_time = seconds / (60 * recipe.minutes) if recipe.minutes else 0.0
    return min(1.0, max(step / max(1, recipe.steps), by_time))


def learning_rate_share(recipe: Schedule, step: int, seconds: float = 0.0) -> float:
    """Share of the learning rate at a step, after so many seconds: linear warm-up, a plateau, then a linear
    decay to `final_share`.

    A run on the plateau can be prolonged, and ended from any of its checkpoints.
    """
    left = 1 - done_share(recipe, step, seconds)
    fall = min(1.0, left / max(1e-9, 1 - recipe.hold_share))
    return max(recipe.final_share, fall) * min(1.0, (step + 1) / max(1, recipe.warmup_steps))


def set_learning_rate(optimisers: Sequence[Optimizer], rates: Sequence[float]) -> None:
    """The rate of each optimiser, for all its groups."""
    for optimiser, rate in zip(optimisers, rates, strict=True):
        for group in optimiser.param_groups:
            group["lr"] = rate
