"""What the network's run yields after each layer: tokens, what is decided, and assignments on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from matcher.attention import mapped
from matcher.config import MatchingPolicy
from matcher.match.adaptivity import Decision, confidence_threshold, decide
from matcher.match.position import Side
from matcher.match.sinkhorn import Assignment

if TYPE_CHECKING:
    from matcher.match.network import MatchingNetwork


@dataclass(frozen=True, eq=False)
class Tokens:
    """The points of B pairs that are still running; those of both images are one sequence, image 0 first."""

    x: Tensor  # (B, N+M, dim)
    n: int  # N
    index: Tensor  # (B, N+M) int64, the input point each token is
    positions: Tensor  # (B, N+M, 2) normalised positions
    rotations: Tensor | None  # (B, N+M, 2, head_dim) that turn queries and keys
    pairs: tuple[int, ...]  # which input pair each entry is
    mask: Tensor | None = None  # (B, N+M) bool, True = valid; None: all, as where B is 1
    predicted: Tensor | None = None  # (B, N+M, 2) positions of partners as the last layer predicts them

    @property
    def valid(self) -> Tensor:
        """(B, N+M) bool."""
        return torch.ones_like(self.index, dtype=torch.bool) if self.mask is None else self.mask

    @property
    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """`mask` of either image."""
        return (None, None) if self.mask is None else (self.mask[:, : self.n], self.mask[:, self.n :])

    @property
    def sides(self) -> tuple[Side, Side]:
        """The points of image 0 and of image 1."""
        columns = [c for c in (self.x, self.positions, self.predicted) if c is not None]
        return Side(*(c[:, : self.n] for c in columns)), Side(*(c[:, self.n :] for c in columns))

    def counts(self) -> list[list[int]]:
        """Valid points of image 0 and of image 1, for each pair."""
        if self.mask is None:
            return [[self.n, self.x.shape[1] - self.n]] * len(self.x)
        return torch.stack([mask.sum(1) for mask in self.masks], dim=1).tolist()

    def take(self, entries: Sequence[int], keep: Tensor, counts: Sequence[Sequence[int]]) -> Tokens:
        """Some pairs, and of their points those that are marked; of no more length than they need.

        Args:
            entries: of the batch.
            keep: (B, N+M) bool.
            counts: how many points of image 0 and of image 1 are marked, for each of the B pairs.
        """
        most = [max(counts[entry][side] for entry in entries) for side in (0, 1)]
        some, rows = len(entries) < len(self.x), torch.arange(len(entries), device=keep.device)[:, None]
        if some:
            rows = torch.tensor(entries, device=keep.device)[:, None]
            keep = keep[rows[:, 0]]
        # Marked points first, in their order.
        order0, order1 = (
            (~part).sort(dim=1, stable=True).indices
            for part in keep.split([self.n, keep.shape[1] - self.n], 1)
        )
        order = torch.cat([order0[:, : most[0]], order1[:, : most[1]] + self.n], 1)
        mask = None if all(list(counts[entry]) == most for entry in entries) else keep.gather(1, order)
        names = ("x", "index", "positions", "rotations", "predicted")
        columns = {name: None if (c := getattr(self, name)) is None else c[rows, order] for name in names}
        return replace(self, n=most[0], pairs=tuple(self.pairs[e] for e in entries), mask=mask, **columns)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The network's output for pairs that stop at the same layer."""

    tokens: Tokens  # whose points the rows and columns of the assignment are
    assignment: Assignment
    layers_run: int


@dataclass(frozen=True, eq=False)
class LayerState:
    """The pairs still running, after one layer.

    Nothing but the tokens is computed before it is asked for, and everything is computed once.
    """

    network: MatchingNetwork
    policy: MatchingPolicy
    layer: int  # 0 is the first
    before: Tokens  # what the layer took
    tokens: Tokens  # what it gave, before any point is dropped
    totals: Tensor  # (B,) points of each pair before any pruning

    @property
    def is_last(self) -> bool:
        """Whether this is the network's last layer, where every pair stops."""
        return self.layer == len(self.network.layers) - 1

    @cached_property
    def confidences(self) -> Tensor | None:
        """(B, N+M) probability that the last layer would not change a point's partner; None without heads."""
        if self.layer >= len(self.network.confidence):
            return None
        return mapped(self.network.confidence[self.layer], self.tokens.x).squeeze(-1).float().sigmoid()

    @cached_property
    def match_probabilities(self) -> Tensor:
        """(B, N+M) probability that a point has a partner."""
        return self.network.match_probabilities(self.tokens.x, self.layer)

    @cached_property
    def confident(self) -> Tensor | None:
        """(B, N+M) bool: points whose confidence is above this layer's threshold; None without heads."""
        if self.confidences is None:
            return None
        return self.confidences > confidence_threshold(self.layer, len(self.network.layers))

    @cached_property
    def decision(self) -> Decision | None:
        """Which pairs stop here, and which points are dropped; None where nothing is to be decided."""
        if self.is_last or not (self.policy.early_exit or self.policy.pruning):
            return None
        return decide(
            self.tokens.valid,
            self.confident,
            self.match_probabilities,
            self.totals,
            self.policy,
            predicted=self.network.config.match_probability,
        )

    @cached_property
    def _outcome(self) -> list[list[int]]:
        """For each pair whether it stops, points of either image that are assigned then, and kept otherwise.

        The one time in a layer that a GPU is waited for.
        """
        n, (stops, assigned, kept) = self.tokens.n, self.decision
        sums = [part.sum(1) for mask in (assigned, kept) for part in (mask[:, :n], mask[:, n:])]
        return torch.stack([stops, *sums], dim=1).tolist()

    @property
    def exiting(self) -> tuple[int, ...]:
        """Entries of the batch that stop here."""
        if self.decision is None:
            return tuple(range(len(self.tokens.pairs))) if self.is_last else ()
        return tuple(entry for entry, (stops, *_) in enumerate(self._outcome) if stops)

    @property
    def dropped(self) -> Tensor:
        """(B, N+M) bool: points that neither go on nor take part in the assignment of a pair that stops."""
        if self.decision is None:
            return ~self.tokens.valid
        stops, assigned, kept = self.decision
        return ~torch.where(stops.unsqueeze(1), assigned, kept)

    @cached_property
    def remaining(self) -> Tokens | None:
        """What the next layer takes; None where no pair goes on."""
        if self.decision is None:
            return None if self.is_last else self.tokens
        staying = [entry for entry, (stops, *_) in enumerate(self._outcome) if not stops]
        return self._taken(staying, self.decision.kept, 3) if staying else None

    def assign(self, entries: Sequence[int] | None = None, *, record_errors: bool = False) -> Prediction:
        """Assignments of some pairs as the network gives them if it stops here.

        Args:
            entries: of the batch; those that stop here when absent.
            record_errors: keep the error of every Sinkhorn iteration.
        """
        entries, tokens = self.exiting if entries is None else entries, self.tokens
        if self.decision is not None:
            tokens = self._taken(entries, self.decision.assigned, 1)
        elif len(entries) < len(tokens.pairs):
            tokens = tokens.take(entries, tokens.valid, tokens.counts())
        return self.network.assign(tokens, self.layer, record_errors=record_errors)

    def _taken(self, entries: Sequence[int], keep: Tensor, column: int) -> Tokens:
        counts, tokens = [row[column : column + 2] for row in self._outcome], self.tokens
        if len(entries) == len(counts) and counts == [[tokens.n, tokens.x.shape[1] - tokens.n]] * len(counts):
            return tokens
        return tokens.take(entries, keep, counts)
