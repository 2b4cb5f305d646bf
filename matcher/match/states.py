"""What the network's run yields after each layer: tokens, what is decided, and assignments on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from matcher.config import MatchingPolicy
from matcher.match.adaptivity import Decision, confidence_threshold, decide
from matcher.match.position import Points
from matcher.match.sinkhorn import Assignment
from matcher.types import to_numpy

if TYPE_CHECKING:
    from matcher.match.network import MatchingNetwork


@dataclass(frozen=True, eq=False)
class Tokens:
    """The points of B pairs that are still running; those of both images are one sequence, image 0 first."""

    x: Tensor  # (B, N+M, dim)
    n: int  # N
    index: np.ndarray  # (B, N+M) int64, the input point each token is
    positions: Tensor  # (B, N+M, 2) normalised positions
    rotations: Tensor | None  # (B, N+M, 2, head_dim) that turn queries and keys
    pairs: tuple[int, ...]  # which input pair each entry is
    valid: np.ndarray  # (B, N+M) bool; what is not valid is padding
    totals: np.ndarray  # (B, 2) points of image 0 and of image 1 before any was dropped
    mask: Tensor | None = None  # the same where the network runs; None: all are, as where B is 1
    predicted: Tensor | None = None  # (B, N+M, 2) positions of partners as the last layer predicts them

    @property
    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """`mask` of either image."""
        return (None, None) if self.mask is None else (self.mask[:, : self.n], self.mask[:, self.n :])

    @property
    def points(self) -> Points:
        """The points of both images."""
        return Points(self.x, self.positions, self.predicted)

    def counts(self) -> list[list[int]]:
        """Valid points of image 0 and of image 1, for each pair."""
        return np.stack([part.sum(1) for part in np.split(self.valid, [self.n], axis=1)], axis=1).tolist()

    def take(self, entries: Sequence[int], keep: np.ndarray) -> Tokens:
        """Some entries of the batch, and of their points those that `keep` (B, N+M) marks."""
        entries = list(entries)
        keep = keep[entries]
        if len(keep) == len(self.x) and bool(keep.all()):
            return self
        sides = np.split(keep, [self.n], axis=1)
        most = [int(side.sum(1).max()) for side in sides]
        # Marked points first, in their order.
        orders = [np.argsort(~s, axis=1, kind="stable")[:, :m] for s, m in zip(sides, most, strict=True)]
        order = np.concatenate([orders[0], orders[1] + self.n], axis=1)
        valid, index = (np.take_along_axis(each, order, 1) for each in (keep, self.index[entries]))
        places = np.stack(np.broadcast_arrays(np.array(entries)[:, None], order))
        (rows, order), columns = torch.from_numpy(places).to(self.x.device), {}
        for name in ("x", "positions", "rotations", "predicted"):
            column = getattr(self, name)
            columns[name] = None if column is None else column[rows, order]
        columns["mask"] = None if valid.all() else torch.from_numpy(valid).to(self.x.device)
        columns |= dict(index=index, valid=valid, totals=self.totals[entries])
        return replace(self, n=most[0], pairs=tuple(self.pairs[e] for e in entries), **columns)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The network's output for pairs that stop at the same layer."""

    tokens: Tokens  # whose points the rows and columns of the assignment are
    assignment: Assignment
    layers_run: int


@dataclass(frozen=True, eq=False)
class LayerState:
    """The pairs still running after one layer; everything but the tokens is computed once, when asked for."""

    network: MatchingNetwork
    policy: MatchingPolicy
    layer: int  # 0 is the first
    before: Tokens  # what the layer took
    tokens: Tokens  # what it gave, before any point is dropped

    @property
    def is_last(self) -> bool:
        """Whether this is the network's last layer, where every pair stops."""
        return self.layer == len(self.network.layers) - 1

    @cached_property
    def _probabilities(self) -> np.ndarray:
        """(1 or 2, B, N+M) of having a partner and, where there are heads for it, of knowing it.

        A GPU is waited for here, once a layer.
        """
        found = self.network.decision_logits(self.tokens.x, self.layer).sigmoid()
        return np.moveaxis(to_numpy(found), -1, 0)

    @property
    def match_probabilities(self) -> np.ndarray:
        """(B, N+M) probability that a point has a partner."""
        return self._probabilities[0]

    @property
    def confidences(self) -> np.ndarray | None:
        """(B, N+M) probability that the last layer would not change a point's partner; None without heads."""
        return self._probabilities[1] if self.layer < len(self.network.confidence) else None

    @property
    def confident(self) -> np.ndarray | None:
        """(B, N+M) bool: points whose confidence is above this layer's threshold; None without heads."""
        if self.confidences is None:
            return None
        return self.confidences > confidence_threshold(self.layer, len(self.network.layers))

    @cached_property
    def decision(self) -> Decision | None:
        """Which pairs stop here, and which points are dropped; None where nothing is to be decided."""
        if self.is_last or not (self.policy.early_exit or self.policy.pruning):
            return None
        predicted = self.network.config.match_probability
        tokens, known = self.tokens, (self.confident, self.match_probabilities)
        return decide(tokens.valid, *known, tokens.totals.sum(1), self.policy, predicted=predicted)

    @property
    def exiting(self) -> tuple[int, ...]:
        """Entries of the batch that stop here."""
        if self.decision is None:
            return tuple(range(len(self.tokens.pairs))) if self.is_last else ()
        return tuple(np.flatnonzero(self.decision.stops).tolist())

    @property
    def dropped(self) -> np.ndarray:
        """(B, N+M) bool: points that neither go on nor take part in the assignment of a pair that stops."""
        if self.decision is None:
            return ~self.tokens.valid
        stops, assigned, kept = self.decision
        return ~np.where(stops[:, None], assigned, kept)

    @cached_property
    def remaining(self) -> Tokens | None:
        """What the next layer takes; None where no pair goes on."""
        if self.decision is None:
            return None if self.is_last else self.tokens
        staying = np.flatnonzero(~self.decision.stops).tolist()
        tokens = replace(self.tokens, predicted=None)  # the next layer predicts again
        return tokens.take(staying, self.decision.kept) if staying else None

    def assign(self, entries: Sequence[int] | None = None) -> Prediction:
        """Assignments of some pairs, of those that stop here by default, as if the network ended here."""
        entries, tokens = self.exiting if entries is None else entries, self.tokens
        if self.decision is not None or len(entries) < len(tokens.pairs):
            keep = tokens.valid if self.decision is None else self.decision.assigned
            tokens = replace(tokens, rotations=None).take(entries, keep)
        return self.network.assign(tokens, self.layer)
