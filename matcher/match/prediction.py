"""The network's output for pairs: soft assignments of the points that it kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from matcher.match.mutual import MutualBest, mutual_best


@dataclass(frozen=True, eq=False)
class Assignment:
    """A soft partial assignment in the log domain (float32)."""

    log_scores: Tensor  # (B, N, M) log probability that i and j are the same point
    log_unmatched0: Tensor  # (B, N) log probability that point i of image 0 has no partner
    log_unmatched1: Tensor  # (B, M)
    iterations: int = 0  # Sinkhorn iterations run
    converged: bool = True  # False: the iteration limit ended it
    # For each pair the relative error of the rows after every iteration; empty where it was not recorded.
    row_errors: tuple[tuple[float, ...], ...] = ()

    @cached_property
    def mutual_best(self) -> MutualBest:
        """The best partner of every row."""
        return mutual_best(self.log_scores)


@dataclass(frozen=True, eq=False)
class PairPrediction:
    """The network's output for one pair: an assignment of the points it kept."""

    assignment: Assignment  # B = 1
    index0: Tensor  # (N',) int64, row i of the assignment is input point index0[i] of image 0
    index1: Tensor  # (M',)
    layers_run: int
    states0: Tensor | None = None  # (N', dim) the tokens behind the rows, kept when they are refined
    states1: Tensor | None = None  # (M', dim)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The network's output for a batch, one entry per pair."""

    pairs: tuple[PairPrediction, ...]
