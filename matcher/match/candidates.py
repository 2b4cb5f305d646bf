"""Optimal transport between the candidates of every point, and the dustbins.

Candidates are the best columns of each row and the best rows of each column. The other entries are small, but
together they are not where points look alike: before consensus all of them stay in the problem, in bfloat16.
Consensus makes most of them negligible; from then on they are a matrix of rank one. With b the scores of the
dustbins, r_i = Σ_j exp(s_ij − b_i − b_j) over what is left out of row i, c_j of column j, and
R = Σ_i r_i = Σ_j c_j, such an entry is taken for exp(b_i + b_j) r_i c_j / R: rows and columns weigh what they
weigh, and only who of many unlikely partners weighs how much is smoothed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from matcher.kernels.candidates import CandidateSet, best_candidates, find_candidates, transport_candidates
from matcher.match.mutual import MutualBest
from matcher.match.sinkhorn import Potentials

# Of a row, and of a column. With 24 up to 8 % of the matches of a pair are others than with all scores.
MOST = 96
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of one pair of images, and the dustbins."""

    where: CandidateSet
    scores: Tensor  # (E,)
    bins0: Tensor  # (N,) scores of the dustbins
    bins1: Tensor  # (M,)
    corner: float
    rests: tuple[Tensor, Tensor]  # (N,), (M,) whose sums are the scores of all other entries
    weights: Tensor | None = None  # (N, M) bfloat16, exp(scores − bins0 − bins1) of the others instead

    @cached_property
    def rows(self) -> Tensor:
        """(E,) int64, the row of each candidate."""
        starts = self.where.starts.long()
        return torch.repeat_interleave(torch.arange(len(self.bins0)), starts.diff())

    @cached_property
    def columns(self) -> Tensor:
        """(E,) int64."""
        return self.where.columns.long()

    def sinkhorn(self, max_iterations: int, tolerance: float, start: Potentials | None = None) -> Potentials:
        """Potentials of the plan, as `sinkhorn.sinkhorn` finds them for dense scores (B = 1)."""
        n, m = len(self.bins0), len(self.bins1)
        columns_first = m < n if m != n else bool(self.bins1.sum() < self.bins0.sum())
        begin = None if start is None else (start.u[0], start.v[0])
        bins, limits = (self.bins0, self.bins1, self.corner), (max_iterations, tolerance)
        rests = self.rests if self.weights is None else bins[:2]
        u, v, iterations, converged = transport_candidates(
            self.where, self.scores, bins, rests, self.weights, begin, limits, columns_first
        )
        return Potentials(u[None], v[None], torch.tensor([iterations]), torch.tensor([converged]))

    def unmatched(self, found: Potentials) -> tuple[Tensor, Tensor]:
        """Log probabilities (N,), (M,) that points have no partner."""
        u, v = found.u[0], found.v[0]
        return self.bins0 + u[:-1] + v[-1], self.bins1 + v[:-1] + u[-1]

    def mutual_best(self, found: Potentials) -> MutualBest:
        """The best candidate of every row (B = 1)."""
        best = best_candidates(self.where, self.scores, found.u[0], found.v[0])
        return MutualBest(*(x[None] for x in best))

    def moved(self, scores: Tensor, bins: tuple[Tensor, Tensor], rests: tuple[Tensor, Tensor]) -> Candidates:
        """The same candidates with other scores; the other entries are of rank one."""
        changed = replace(self, scores=scores, bins0=bins[0], bins1=bins[1], rests=rests, weights=None)
        for name in ("rows", "columns"):  # computed at most once
            if name in self.__dict__:
                changed.__dict__[name] = self.__dict__[name]
        return changed


@dataclass(frozen=True, eq=False)
class CandidateAssignment:
    """A soft partial assignment of candidates; to its readers an `Assignment` with B = 1."""

    candidates: Candidates
    potentials: Potentials
    row_errors: tuple[tuple[float, ...], ...] = ()

    @property
    def iterations(self) -> int:
        """Sinkhorn iterations run."""
        return int(self.potentials.iterations)

    @property
    def converged(self) -> bool:
        """False: the iteration limit ended it."""
        return bool(self.potentials.converged)

    @property
    def log_unmatched0(self) -> Tensor:
        """(1, N) log probability that point i of image 0 has no partner."""
        return self.candidates.unmatched(self.potentials)[0][None]

    @property
    def log_unmatched1(self) -> Tensor:
        """(1, M)."""
        return self.candidates.unmatched(self.potentials)[1][None]

    @cached_property
    def log_scores(self) -> Tensor:
        """(1, N, M) log probability that i and j are the same point, −∞ but for candidates."""
        found, (u, v) = self.candidates, (self.potentials.u[0], self.potentials.v[0])
        out = found.scores.new_full((1, len(found.bins0), len(found.bins1)), -torch.inf)
        out[0, found.rows, found.columns] = found.scores + u[found.rows] + v[found.columns]
        return out

    @cached_property
    def mutual_best(self) -> MutualBest:
        """The best partner of every row."""
        return self.candidates.mutual_best(self.potentials)


def candidates_of(
    left: Tensor, right: Tensor, bins0: Tensor, bins1: Tensor, corner: float, most: int = MOST
) -> Candidates:
    """The candidates of scores left rightᵀ with dustbins; needs `have_candidates`.

    Args:
        left, right: (N, D), (M, D), neither empty.
        bins0, bins1: (N,), (M,) finite scores of the dustbins.
        corner: that of the dustbins with each other.
        most: candidates of a row, and of a column.
    """
    where, odds, left_out, weights = find_candidates(left, right, bins0, bins1, most)
    shares = [x.clamp_min(_TINY).log() for x in left_out]
    total = float(left_out[0].sum() + left_out[1].sum()) / 2
    half = math.log(max(total, _TINY)) / 2
    rests = shares[0] + bins0 - half, shares[1] + bins1 - half
    made = Candidates(where, odds, bins0, bins1, corner, rests)
    scores = odds + bins0[made.rows] + bins1[made.columns]
    return replace(made.moved(scores, (bins0, bins1), rests), weights=weights)
