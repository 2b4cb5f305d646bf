"""What the network's one run yields after each layer: states, decisions, and assignments on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from matcher.config import MatchingPolicy
from matcher.match.network.adaptivity import Decision, decide
from matcher.match.network.tokens import Tokens
from matcher.match.prediction import PairPrediction
from matcher.match.rules import confidence_threshold


@dataclass(frozen=True, eq=False)
class LayerState:
    """The pairs still running, after one layer.

    Nothing but the tokens is computed before it is asked for, and everything is computed once.
    """

    network: nn.Module  # the `MatchingNetwork` that runs
    policy: MatchingPolicy
    layer: int  # 0 is the first
    before: Tokens  # what the layer took
    tokens: Tokens  # what it gave, before any point is dropped
    totals: dict[int, int]  # points of each input pair before any pruning

    @property
    def is_last(self) -> bool:
        """Whether this is the network's last layer, where every pair stops."""
        return self.layer == len(self.network.layers) - 1

    @cached_property
    def confidences(self) -> Tensor | None:
        """(T,) probability that the last layer would not change a point's partner; None without heads."""
        if self.layer >= len(self.network.confidence):
            return None
        return self.network.confidences(self.tokens.x, self.layer)

    @cached_property
    def match_probabilities(self) -> Tensor:
        """(T,) probability that a point has a partner."""
        return self.network.match_probabilities(self.tokens.x, self.layer)

    @cached_property
    def confident(self) -> Tensor | None:
        """(T,) bool: points whose confidence is above this layer's threshold; None without heads."""
        if self.confidences is None:
            return None
        return self.confidences > confidence_threshold(self.layer, len(self.network.layers))

    @cached_property
    def decision(self) -> Decision:
        """Which pairs stop here, and which points are dropped."""
        if self.is_last:
            return Decision(tuple(range(len(self.tokens.pairs))), None, None)
        if not (self.policy.early_exit or self.policy.pruning):
            return Decision((), None, None)
        return decide(
            self.tokens,
            self.confident,
            self.match_probabilities,
            self.totals,
            self.policy,
            predicted=self.network.config.match_probability,
        )

    @property
    def exiting(self) -> tuple[int, ...]:
        """Entries of the layout that stop here."""
        return self.decision.exiting

    @cached_property
    def dropped(self) -> Tensor:
        """(T,) bool: points that neither go on nor take part in the assignment of a pair that stops here."""
        starts, exits = self.tokens.layout.starts, torch.zeros_like(self.tokens.index, dtype=torch.bool)
        for entry in self.exiting:
            exits[starts[2 * entry] : starts[2 * entry + 2]] = True
        everything = torch.ones_like(exits)
        assigned, kept = (everything if mask is None else mask for mask in self.decision[1:])
        return ~torch.where(exits, assigned, kept)

    @cached_property
    def remaining(self) -> Tokens:
        """What the next layer takes."""
        exiting, _, kept = self.decision
        if kept is None and not exiting:
            return self.tokens
        staying = [entry for entry in range(len(self.tokens.pairs)) if entry not in exiting]
        return self.tokens.keep(self._everything if kept is None else kept, staying)

    def assign(
        self, entries: Sequence[int] | None = None, *, record_errors: bool = False
    ) -> dict[int, PairPrediction]:
        """Assignments of some pairs as the network gives them if it stops here.

        Args:
            entries: of the layout; those that stop here when absent.
            record_errors: keep the marginal error of every Sinkhorn iteration.

        Returns:
            By input pair.
        """
        entries = self.exiting if entries is None else tuple(entries)
        if not entries:
            return {}
        tokens, assigned = self.tokens, self.decision.assigned
        if assigned is not None or len(entries) < len(tokens.pairs):
            tokens = tokens.keep(self._everything if assigned is None else assigned, list(entries))
        return self.network.assign(tokens, self.layer, record_errors=record_errors)

    @property
    def _everything(self) -> Tensor:
        return torch.ones_like(self.tokens.index, dtype=torch.bool)
