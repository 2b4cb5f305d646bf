"""Assignment by candidates, and consensus, in the compiled kernels; without gradients, on the CPU.

The candidates of a pair of images are the best columns of every row and the best rows of every column of its
scores: a sparse matrix, of which the dense one is never there as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, c_long
from typing import NamedTuple

import torch
from torch import Tensor

from matcher.kernels.calls import threads_for
from matcher.kernels.library import kernels
from matcher.kernels.trials import Trial, granted


class CandidateSet(NamedTuple):
    """Which candidates there are: E of them, ordered by row and then by column; int32."""

    starts: Tensor  # (N+1,) where the candidates of each row begin
    columns: Tensor  # (E,)
    column_starts: Tensor  # (M+1,) the same ordered by column and then by row
    rows: Tensor  # (E,)
    order: Tensor  # (E,) the place of each of these in the order by rows

    @property
    def sizes(self) -> tuple[int, int]:
        """N and M."""
        return len(self.starts) - 1, len(self.column_starts) - 1


def have_candidates(x: Tensor) -> bool:
    """Whether the functions of this file are there for tensors on the device of `x`, without gradients."""
    if x.device.type != "cpu" or torch.is_grad_enabled() or kernels() is None:
        return False
    return granted("candidates", try_candidates)


def try_candidates() -> Trial:
    """Beside dense scores and twenty iterations of Sinkhorn, fewer than a match takes."""
    rng = torch.Generator().manual_seed(0)
    left, bins, most = torch.randn(1200, 128, generator=rng) / 4, torch.zeros(1200), 16
    right = left.roll(1, 0) + torch.randn(1200, 128, generator=rng) / 16

    def stock() -> Tensor:
        scores = left @ right.t()
        kernel = scores.exp()
        for _ in range(20):
            columns = torch.mv(kernel, bins)
            torch.mv(kernel.t(), columns)
        return scores.amax(1)

    def kernel() -> Tensor:
        where, values, *_ = find_candidates(left, right, bins, bins, most)
        rows = torch.repeat_interleave(torch.arange(1200), where.starts.long().diff())
        return torch.full((1200,), -torch.inf).scatter_reduce(0, rows, values, "amax")

    return Trial(kernel, stock, 0.02)


def find_candidates(
    left: Tensor, right: Tensor, bins0: Tensor, bins1: Tensor, most: int
) -> tuple[CandidateSet, Tensor, tuple[Tensor, Tensor], Tensor]:
    """The `most` best of every row and column of left rightᵀ − bins0 − bins1; needs `have_candidates`.

    Args:
        left, right: (N, D), (M, D) float32, neither empty.
        bins0, bins1: (N,), (M,) float32, finite scores of the dustbins.
        most: at least 1.

    Returns:
        The set; its values (E,), to 16 bits or better; Σ exp of the other values of every row (N,) and
        column (M,), none counted as more than e⁸; and these exponentials (N, M) bfloat16, 0 for candidates.
    """
    library = kernels()
    left, right, bins0, bins1 = (x.float().contiguous() for x in (left, right, bins0, bins1))
    (n, width), m = left.shape, len(right)
    most = min(most, max(n, m))
    columns, rows = (torch.empty(count, most, dtype=torch.int32) for count in (n, m))
    values, column_values = left.new_empty(n, most), left.new_empty(m, most)
    rests, weights = (left.new_empty(n), left.new_empty(m)), left.new_empty(n, m, dtype=torch.bfloat16)
    lists = _places(columns, values, rows, column_values)
    given = _places(left, right, bins0, bins1)
    library.matcher_candidates(*given, n, m, width, most, *lists, *_places(*rests, weights), threads_for(n))
    room = (n + m) * most
    starts, column_starts, others, turned, order = (
        torch.empty(size, dtype=torch.int32) for size in (n + 1, m + 1, room, room, room)
    )
    joined = left.new_empty(room)
    made = _places(starts, others, joined, column_starts, turned, order, *rests, weights)
    count = library.matcher_join(n, m, most, *lists, *made)
    found = CandidateSet(starts, others[:count], column_starts, turned[:count], order[:count])
    return found, joined[:count], rests, weights


def transport_candidates(
    where: CandidateSet,
    scores: Tensor,
    bins: tuple[Tensor, Tensor, float],
    rests: tuple[Tensor, Tensor],
    weights: Tensor | None,
    start: tuple[Tensor, Tensor] | None,
    limits: tuple[int, float],
    columns_first: bool,
) -> tuple[Tensor, Tensor, int, bool]:
    """Dual potentials of the transport problem of candidates and dustbins.

    Args:
        where, scores: the candidates and their scores (E,).
        bins: scores of the dustbins (N,), (M,), and of their corner.
        rests: (N,), (M,); row i weighs exp(rests_i + rests_j) with every column j beside its candidates,
            times weights_ij where these are given.
        weights: (N, M) bfloat16, 0 for candidates; or None.
        start: potentials (N+1,), (M+1,) to begin with.
        limits: most iterations, and the error of the rows at which they end.
        columns_first: update the columns before the rows.

    Returns:
        Potentials (N+1,), (M+1,), iterations, and whether the error fell to its limit.
    """
    n, m = where.sizes
    begun = start is not None
    u, v = (x.clone() for x in start) if begun else (scores.new_empty(n + 1), scores.new_empty(m + 1))
    weighed = [x.contiguous() for x in (scores, *bins[:2], *rests)]
    iterations = c_long(0)
    others = 0 if weights is None else weights.data_ptr()
    given, potentials = (*_places(*where, *weighed), others), _places(u, v)
    threads = threads_for(len(scores) // 32)
    converged = kernels().matcher_transport(
        n, m, *given, bins[2], *potentials, begun, columns_first, *limits, addressof(iterations), threads
    )
    return u, v, iterations.value, bool(converged)


def best_candidates(
    where: CandidateSet, scores: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The best column of every row under scores (E,) + u (N+1,) + v (M+1,).

    Returns:
        Sums (N,), columns (N,) int64, and whether the row is the column's best and first too (N,) bool.
    """
    n, m = where.sizes
    best, partners, mutual = (
        u.new_empty(n),
        torch.empty(n, dtype=torch.int64),
        torch.empty(n, dtype=torch.bool),
    )
    given = (where.starts, where.columns, scores.contiguous(), u.contiguous(), v.contiguous())
    kernels().matcher_best(n, m, *_places(*given, best, partners, mutual))
    return best, partners, mutual


def supported_candidates(
    where: CandidateSet, scores: Tensor, priors: tuple[Tensor, Tensor], positions: tuple[Tensor, Tensor]
) -> Tensor:
    """Scores (E,) with what the priors of both sides add where a position is the predicted one.

    Args:
        where, scores: the candidates and their scores (E,).
        priors: (N, 5), (M, 5): predicted x and y, 1 / squared tolerance, height there, penalty elsewhere.
        positions: (N, 2), (M, 2).
    """
    out, n = torch.empty_like(scores, memory_format=torch.contiguous_format), where.sizes[0]
    given = (scores.contiguous(), *(x.contiguous() for x in (*priors, *positions)))
    kernels().matcher_support(n, *_places(where.starts, where.columns, *given, out), threads_for(n))
    return out


def fit_compiled(
    positions: Tensor, targets: Tensor, confidence: Tensor, trial: Callable[[], Trial]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What local affine maps predict, as `consensus.fit_local_maps`, or None where the kernel is not there.

    Args:
        positions, targets: (B, N, 2) float32 on the CPU.
        confidence: (B, N), 0 for points without a match.
        trial: that of this kernel beside stock operators.

    Returns:
        Predicted positions (B, N, 2), support (B, N), spread (B, N).
    """
    library = kernels()
    given = (positions, targets, confidence)
    suits = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in given)
    if library is None or not suits or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return None
    if not granted("local maps", trial):
        return None
    given = tuple(x.contiguous() for x in given)
    made = (torch.empty_like(given[0]), torch.empty_like(given[2]), torch.empty_like(given[2]))
    for b, count in enumerate([positions.shape[1]] * len(positions)):
        into = _places(*(x[b] for x in made))
        library.matcher_fit(*_places(*(x[b] for x in given)), count, *into, threads_for(count))
    return made


def _places(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)
