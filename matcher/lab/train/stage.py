"""The steps of a training: optimisers, a moving average of the parameters, checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from matcher.errors import IntegrityError, UsageError
from matcher.lab.train.optimisers import Schedule, done_share, learning_rate_share, set_learning_rate
from matcher.lab.train.recipe import fingerprint
from matcher.lab.train.state import load_state, save_state
from matcher.match.network.inference import resolve_precision


class Batch(Protocol):
    """The data of one step; its length is the number of pairs."""

    def __len__(self) -> int: ...


Net = TypeVar("Net", bound=nn.Module)
TrainingBatch = TypeVar("TrainingBatch", bound=Batch)


@dataclass
class Progress:
    """The progress of a run; kept in its checkpoint."""

    step: int = 0
    pairs: int = 0
    seconds: float = 0.0  # of steps and of waiting for batches
    skipped: int = 0  # steps whose loss or gradient was not finite
    best: float = -math.inf  # F1 of the best validation
    history: list[dict[str, float]] = field(default_factory=list)  # rows of the log


class Stage(Generic[Net, TrainingBatch]):
    """A network, its moving average and its optimisers; `step` takes one batch.

    A subclass defines the loss.

    Args:
        recipe: of the subclass.
        schedule: learning rate, moving average and end.
        model: the network.
        optimisers: of its parameters.
        device: that it is on.
        rates: learning rate of each optimiser, relative to the schedule's.
    """

    def __init__(
        self,
        recipe: Any,
        schedule: Schedule,
        model: Net,
        optimisers: Sequence[Optimizer],
        device: torch.device,
        rates: Sequence[float],
    ) -> None:
        self.recipe, self.schedule, self.device = recipe, schedule, device
        self.model, self.optimisers, self.rates = model, list(optimisers), rates
        self.average = copy.deepcopy(model).requires_grad_(False).eval()
        self.progress = Progress()

    def loss(self, batch: TrainingBatch) -> Tensor:
        """The loss of one batch, with gradients."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the time is over."""
        return done_share(self.schedule, self.progress.step, self.progress.seconds) == 1

    def step(self, batch: TrainingBatch) -> float:
        """One update; returns the loss, NaN if it or its gradient was not finite and the step was skipped."""
        schedule, progress = self.schedule, self.progress
        rate = schedule.learning_rate * learning_rate_share(schedule, progress.step, progress.seconds)
        set_learning_rate(self.optimisers, [rate * relative for relative in self.rates])
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), schedule.gradient_clip)
        # The only time in a step that a GPU is waited for: both numbers are read together.
        value, norm = torch.stack([loss.detach(), norm]).tolist()
        finite = math.isfinite(value) and math.isfinite(norm)
        if finite:
            for optimiser in self.optimisers:
                optimiser.step()
            self._update_average()
        progress.skipped += not finite
        progress.step += 1
        progress.pairs += len(batch)
        return value if finite else math.nan

    @torch.no_grad()
    def _update_average(self) -> None:
        """Exponential moving average, over few steps at first, so that early validations are meaningful."""
        decay = min(self.schedule.average_decay, (1 + self.progress.step) / (10 + self.progress.step))
        for mean, value in zip(self._values(self.average), self._values(self.model), strict=True):
            mean.lerp_(value, 1 - decay)

    @staticmethod
    def _values(model: nn.Module) -> list[Tensor]:
        """Parameters, and the statistics of batch normalisation."""
        return [value for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()]

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
        # Checkpoints of the first version do not name their recipe; recipe.json in their folder does.
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
