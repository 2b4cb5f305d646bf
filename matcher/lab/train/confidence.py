"""The second stage: training of the confidence heads on a frozen network (LightGlue, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from matcher.errors import IntegrityError
from matcher.lab.train.labelled_layers import labelled_layers
from matcher.lab.train.labels import PairBatch
from matcher.lab.train.loop import LOG_EVERY, Log, Stopped
from matcher.lab.train.losses import confidence_loss, decisions, match_probability_loss
from matcher.lab.train.matching_loss import assignments
from matcher.lab.train.optimisers import set_learning_rate
from matcher.lab.train.recipe import OptimiserRecipe
from matcher.lab.train.state import load_state, save_state
from matcher.match.network.correspondence import Side
from matcher.match.network.model import MatchingNetwork

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
