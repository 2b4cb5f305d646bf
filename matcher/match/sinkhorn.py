"""From token states to a soft partial assignment: by optimal transport with dustbins, or by dual softmax.

SuperGlue (Sarlin et al. 2020), section 3.2, and LightGlue (Lindenberger et al. 2023), eq. 8. Scores are a
matrix (B, N+1, M+1) with the dustbins last; points that are masked carry no mass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import mapped
from matcher.config import AssignmentConfig
from matcher.errors import UsageError
from matcher.types import converted, to_numpy

IMPOSSIBLE = -1e4  # score of what nothing goes to; finite, since it may be multiplied by 0
LEAST_EXPONENT = -80.0  # where exp underflows it is fifty times slower on some processors
LARGEST_SCALE = 1e12  # scales beyond it go into the potentials, before float32 runs out of range
EXTREME_SCALE = 1e16  # the product of two with e⁻⁸⁰, which stands for less, is still small
LEAST_SUM = 1e-30  # of a row or column in training, where nothing is absorbed
CACHE_LINE = 16  # float32 numbers
CHECKED = 4  # iterations between looks at the error, for which a GPU is waited for


class Potentials(NamedTuple):
    """Dual potentials of transport problems: log P = scores + u + v."""

    u: Tensor  # (B, N+1, 1), −∞ at masked points
    v: Tensor  # (B, M+1, 1)
    iterations: list[int]  # of every pair
    converged: list[bool]  # False: the iteration limit ended it
    row_errors: Sequence[float] = ()  # of the first pair, at every look

    @torch.no_grad()
    def log_plan(self, scores: Tensor) -> Tensor:
        """(B, N+1, M+1) log P."""
        return (scores + self.u).add_(self.v.mT)


@torch.no_grad()
def sinkhorn(
    scores: Tensor,
    mask0: Tensor | None = None,
    mask1: Tensor | None = None,
    *,
    max_iterations: int = 100,
    tolerance: float | None = 1e-2,
    start: Potentials | None = None,
) -> Potentials:
    """Scale exp(scores) until its rows and columns have their masses; no gradients.

    A valid point has mass 1, a masked one 0, each dustbin the number of valid points of the other image.
    Rows are updated first, so columns are exact after each iteration and the rows' error measures
    convergence. With a tolerance the side of fewer points counts as the rows (between equals the one of
    lower dustbins), so that swapping the images transposes the plan. Iterations are matrix–vector products on
    a kernel that has absorbed the potentials (Schmitzer 2019, "Stabilized sparse scaling algorithms for
    entropy regularized transport problems", section 3.2).

    Args:
        scores: (B, N+1, M+1) with the dustbins last.
        mask0, mask1: (B, N), (B, M) bool, True = valid; all are when absent.
        max_iterations: row and column updates at most.
        tolerance: of the rows' relative error, ‖sums − 1‖ / ‖1‖ over points together with that of the
            dustbin, at which a pair stops; looked at after every fourth iteration. None: never.
        start: of similar scores under the same masks.

    Returns:
        Potentials in float32; finite at valid points for scores of ±1e4.
    """
    scores = converted(scores, torch.float32)
    transposed = [False] if tolerance is None else _transposed(scores, mask0, mask1)
    if not any(transposed):
        return _solve(scores, mask0, mask1, start, max_iterations, tolerance)
    if all(transposed):
        start = start and start._replace(u=start.v, v=start.u)
        found = _solve(scores.mT, mask1, mask0, start, max_iterations, tolerance)
        return found._replace(u=found.v, v=found.u)
    u, v = (scores.new_empty(len(scores), side, 1) for side in scores.shape[1:])
    iterations, converged = [0] * len(scores), [False] * len(scores)
    for way in (False, True):  # pairs of either kind by themselves
        some = [pair for pair, other in enumerate(transposed) if other == way]
        own = start and Potentials(start.u[some], start.v[some], [], [])
        masks = (None, None) if mask0 is None else (mask0[some], mask1[some])
        found = sinkhorn(scores[some], *masks, max_iterations=max_iterations, tolerance=tolerance, start=own)
        u[some], v[some] = found.u, found.v
        for pair, count, done in zip(some, found.iterations, found.converged, strict=True):
            iterations[pair], converged[pair] = count, done
    return Potentials(u, v, iterations, converged)


def _transposed(scores: Tensor, mask0: Tensor | None, mask1: Tensor | None) -> list[bool]:
    """For each pair whether image 1 counts as the rows."""
    if mask0 is None and scores.shape[1] != scores.shape[2]:
        return [scores.shape[1] > scores.shape[2]] * len(scores)
    bins0, bins1 = scores[:, :-1, -1], scores[:, -1, :-1]
    if mask0 is None:
        return (bins1.sum(1) < bins0.sum(1)).tolist()
    more = mask0.sum(1) - mask1.sum(1)
    lower = (bins1 * mask1).sum(1) < (bins0 * mask0).sum(1)
    return torch.where(more == 0, lower, more > 0).tolist()


def _solve(
    scores: Tensor,
    mask0: Tensor | None,
    mask1: Tensor | None,
    start: Potentials | None,
    max_iterations: int,
    tolerance: float | None,
) -> Potentials:
    """`sinkhorn`, rows first."""
    (mu, nu), sizes = masses(scores, mask0, mask1), scores.shape[1:]
    masked, counts = None, np.array([[side - 1.0 for side in sizes]])  # points of the rows and the columns
    if mask0 is not None:
        masked, counts = torch.cat([mu, nu], 1) == 0, to_numpy(torch.cat([nu[:, -1], mu[:, -1]], 1))
    n, m = counts.clip(1).T
    tiny = torch.finfo(scores.dtype).tiny
    if start is None:
        some = scores if masked is None else scores.masked_fill(nu.mT == 0, -LARGEST_SCALE)
        highest = some.amax(2, keepdim=True)
        highest = highest if masked is None else highest.masked_fill(mu == 0, 0.0)
        potentials = F.pad(-highest, (0, 0, 0, sizes[1]))
    else:
        potentials = torch.cat([start.u, start.v], 1)
    scales = torch.ones_like(potentials) if masked is None else (~masked).to(scores.dtype)
    (u, v), (a, b) = potentials.split(sizes, dim=1), scales.split(sizes, dim=1)

    def product(matrix: Tensor, factors: Tensor) -> Tensor:
        sums = torch.bmm(matrix, factors)
        return sums if masked is None else sums.clamp_min(tiny)  # where a pair has no point

    kernel = _absorbed(scores, u, v)
    kernel_t, sums = kernel.mT, product(kernel, b)
    count, errors, stopped = 0, [], {}
    while True:
        for _ in range(min(CHECKED, max_iterations - count)):
            torch.div(mu, sums, out=a)
            torch.div(nu, product(kernel_t, a), out=b)
            sums = product(kernel, b)
            count += 1
        missing = torch.addcmul(mu, a, sums, value=-1)  # mass of the rows
        looked_at = to_numpy(torch.cat([missing, scales if masked is None else scales + masked], 1))[..., 0]
        missing, factors = np.split(looked_at, [sizes[0]], axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            error = np.sqrt((missing[:, :-1] ** 2).sum(1) / n + (missing[:, -1] / m) ** 2)
            low, high = factors.min(1), factors.max(1)
        errors.append(float(error[0]))
        within = (low > 1 / LARGEST_SCALE) & (high < LARGEST_SCALE)
        if tolerance is not None:
            for pair in (p for p in np.flatnonzero(within & (error <= tolerance)) if p not in stopped):
                stopped[pair] = count, potentials[pair] + scales[pair].log() if len(scores) > 1 else None
        running = np.array([pair not in stopped for pair in range(len(scores))])
        if not within[running].all():
            # One more update, whose scales go into the potentials; in the log domain if extreme.
            inside = b.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
            inside = inside if masked is None else inside.masked_fill(nu == 0, 0.0)
            if low[running].min() > 1 / EXTREME_SCALE and high[running].max() < EXTREME_SCALE:
                row = mu / torch.bmm(kernel, inside).clamp_min(tiny)
                u += row.log()
                v += (nu / torch.bmm(kernel_t, row).clamp_min(tiny)).log()
            else:
                log_columns = (inside.nan_to_num(1.0).log() + v).masked_fill(nu == 0, -math.inf)
                u.copy_(mu.log() - torch.logsumexp(scores + log_columns.mT, 2, keepdim=True))
                v.copy_(nu.log() - torch.logsumexp(scores + u, 1, keepdim=True).mT)
            torch.clamp(mu, max=1.0, out=a)
            torch.clamp(nu, max=1.0, out=b)
            if count < max_iterations:
                sums = product(_absorbed(scores, u, v, kernel), b)
        if count >= max_iterations or not running.any():
            break
    potentials = potentials + scales.log()
    for pair, (_, own) in stopped.items() if len(scores) > 1 else ():
        potentials[pair] = own
    iterations = [stopped[pair][0] if pair in stopped else count for pair in range(len(scores))]
    converged = [pair in stopped for pair in range(len(scores))]
    return Potentials(*potentials.split(sizes, dim=1), iterations, converged, errors)


def masses(scores: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Masses of rows (B, N+1, 1) and columns (B, M+1, 1)."""
    if mask0 is None:
        (n, m), one = (side - 1 for side in scores.shape[1:]), scores.new_ones
        sides = (n, m), (m, n)
        return tuple(F.pad(one(len(scores), own, 1), (0, 0, 0, 1), value=other) for own, other in sides)
    valid = [mask.unsqueeze(2).to(scores.dtype) for mask in (mask0, mask1)]
    counts = [each.sum(1, keepdim=True) for each in valid]
    return torch.cat([valid[0], counts[1]], 1), torch.cat([valid[1], counts[0]], 1)


def _absorbed(scores: Tensor, u: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(scores + u + v), from e⁻⁸⁰ to e⁸⁰."""
    return torch.add(scores, u, out=out).add_(v.mT).clamp_(LEAST_EXPONENT, -LEAST_EXPONENT).exp_()


def log_assignment(scores: Tensor, iterations: int, unrolled: int) -> Tensor:
    """Differentiable log P (B, N+1, M+1) of float32 scores with dustbins, no point masked, for training.

    The potentials are found without gradients; the last `unrolled` updates are then repeated with them, which
    is the truncated Neumann series of the implicit gradient there (Eisenberger et al. 2022, section 4).
    """
    return log_plan(scores, sinkhorn(scores, max_iterations=iterations + 1, tolerance=None), unrolled)


def log_plan(scores: Tensor, found: Potentials, unrolled: int) -> Tensor:
    """`log_assignment` by the potentials of these scores."""
    mu, nu = masses(scores)
    base = scores + found.u + found.v.mT
    kernel, a, b = base.clamp_min(LEAST_EXPONENT).exp(), torch.ones_like(mu), torch.ones_like(nu)
    for _ in range(unrolled):
        a = mu / torch.bmm(kernel, b).clamp_min(LEAST_SUM)
        b = nu / torch.bmm(kernel.mT, a).clamp_min(LEAST_SUM)
    return base + a.log() + b.log().mT


# Soft assignments, and the matches that are read off them.


class MutualBest(NamedTuple):
    """The best partner of every row."""

    scores: Tensor  # (B, N) log probabilities
    partners: Tensor  # (B, N) int64
    mutual: Tensor  # (B, N) bool: the row is its column's best too, the first of equal ones
    rows: Tensor  # (B, M) int64, the row whose mutual best the column is; N where none is

    def of_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first three as arrays, in one transfer: float32 holds indices up to 2²⁴."""
        scores, partners, mutual = to_numpy(torch.stack(self[:3]))
        return scores, partners.astype(np.int64), mutual > 0


@dataclass(frozen=True, eq=False)
class Assignment:
    """A soft partial assignment in the log domain (float32)."""

    log_scores: Tensor  # (B, N, M) log probability that i and j are the same point; −∞ where masked
    log_unmatched0: Tensor  # (B, N) log probability that point i of image 0 has no partner
    log_unmatched1: Tensor  # (B, M)
    iterations: Sequence[int] = ()  # of Sinkhorn, for every pair
    converged: Sequence[bool] = ()  # False: the iteration limit ended it
    row_errors: Sequence[float] = ()  # of the first pair, at every look

    @cached_property
    def mutual_best(self) -> MutualBest:
        """The best partner of every row."""
        return mutual_best(self.log_scores)


def assign(
    scores: Tensor,
    config: AssignmentConfig,
    mask0: Tensor | None = None,
    mask1: Tensor | None = None,
    *,
    start: Potentials | None = None,
) -> Assignment:
    """Scores with dustbins (B, N+1, M+1) → `Assignment`, by the method that a configuration names.

    The masks (B, N), (B, M) and `start` are as `sinkhorn` takes them. Gradients flow, through ten updates
    more than there are without them; `UsageError`: not those of a transport plan with masked points.
    """
    if config.kind == "dual_softmax":
        found = dual_softmax(scores, mask0, mask1)
    else:
        limits = {"max_iterations": config.max_iterations, "tolerance": config.tolerance}
        potentials = sinkhorn(scores, mask0, mask1, **limits, start=start)
        if torch.is_grad_enabled() and scores.requires_grad:
            if mask0 is not None:
                raise UsageError("no gradients of a padded batch: stack features of equally many points")
            log_p = log_plan(scores.float(), potentials, unrolled=10)
        else:
            log_p = potentials.log_plan(scores)
        found = Assignment(log_p[:, :-1, :-1], log_p[:, :-1, -1], log_p[:, -1, :-1], *potentials[2:])
    if not config.drop_unmatched or 0 in found.log_scores.shape:
        return found
    # How LoFTR reads a transport plan: points that prefer the dustbin are removed, others may match instead.
    alone0 = found.log_unmatched0 > found.log_scores.amax(2)
    alone1 = found.log_unmatched1 > found.log_scores.amax(1)
    alone = alone0.unsqueeze(2) | alone1.unsqueeze(1)
    return replace(found, log_scores=found.log_scores.masked_fill(alone, -math.inf))


def dual_softmax(scores: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None) -> Assignment:
    """Scores with dustbins (B, N+1, M+1) → row softmax × column softmax × both matchabilities.

    LightGlue (Lindenberger et al. 2023), eq. 8; the dustbin scores are minus the matchability logits. Without
    a dustbin every point is matchable, and this is LoFTR's dual softmax (Sun et al. 2021, eq. 2).
    """
    similarity = scores[:, :-1, :-1].float()
    logit0, logit1 = -scores[:, :-1, -1].float(), -scores[:, -1, :-1].float()
    if mask0 is not None:
        similarity = similarity.masked_fill(~(mask0.unsqueeze(2) & mask1.unsqueeze(1)), -math.inf)
    gain0 = F.logsigmoid(logit0) - torch.logsumexp(similarity, 2)
    gain1 = F.logsigmoid(logit1) - torch.logsumexp(similarity, 1)
    log_scores = 2 * similarity + gain0.unsqueeze(2) + gain1.unsqueeze(1)
    if mask0 is not None:
        log_scores = log_scores.nan_to_num(-math.inf, posinf=-math.inf)  # rows without anything
    return Assignment(log_scores, F.logsigmoid(-logit0), F.logsigmoid(-logit1))


def mutual_best(log_scores: Tensor) -> MutualBest:
    """Each row's best column, and whether the row is that column's best, of (B, N, M) log probabilities.

    Of equal rows only the first counts, so that no column has two.
    """
    rows, columns = log_scores.shape[1:]
    if 0 in (rows, columns):
        nowhere, alone = (log_scores.sum(axis).long() for axis in (2, 1))  # 0, the sum of nothing
        return MutualBest(nowhere.float() - torch.inf, nowhere, nowhere > 0, alone)
    best, partner = log_scores.max(dim=2)
    # Along columns the values alone are several times as fast as the indices.
    top = best == log_scores.amax(dim=1).gather(1, partner)
    here = torch.arange(rows, device=log_scores.device)
    first = partner.new_full((len(best), columns), rows)
    first.scatter_reduce_(1, partner, torch.where(top, here, rows), "amin")
    return MutualBest(best, partner, first.gather(1, partner) == here, first)


class AssignmentHead(nn.Module):
    """One projection for similarities, and a dustbin score: a logit of each point, one number, or none."""

    def __init__(self, config: AssignmentConfig, dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, dim) if config.project else nn.Identity()
        # Similarities of projected tokens are scaled by 1/√dim, those of tokens (LoFTR, section 3.3) by
        # 1/dim, both by 1/temperature.
        self.divisor = (config.temperature * (dim**0.5 if config.project else dim)) ** 0.5  # of either side
        if config.dustbin == "point":
            self.matchability = nn.Linear(dim, 1)
        elif config.dustbin == "learned":
            self.dustbin = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("dustbin", torch.tensor(IMPOSSIBLE), persistent=False)

    def forward(self, x: Tensor, n: int, more: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Tokens (B, N+M, dim), N of image 0 first → scores with dustbins (B, N+1, M+1), float32.

        A point's dustbin score is minus its matchability logit, the corner, which is of no point, 0; one
        number (SuperGlue, eq. 8) is the score of all dustbins and of the corner. Of `more`, (B, N+M, C)
        twice, the products of the first in one image with the second in the other are added.
        """
        left = right = converted(mapped(self.projection, x), torch.float32) / self.divisor
        columns = x.shape[1] - n + 1
        # Rows that begin at cache lines: the product takes two thirds of the time.
        more_rows = 1 if torch.compiler.is_compiling() else 1 + -columns % CACHE_LINE
        if hasattr(self, "matchability"):
            bins = -converted(mapped(self.matchability, x), torch.float32)
            corner = bins.new_zeros(len(x), more_rows, 1)
        else:
            corner = self.dustbin.float().expand(len(x), more_rows, 1)
            bins = corner[:, :1].expand(-1, x.shape[1], 1)
        if more is not None:
            left, right = torch.cat([left, more[0], more[1]], -1), torch.cat([right, more[1], more[0]], -1)
        # The dustbins are one more row and column of the product, [l b₀ 0; 0 0 1] [r 0 b₁; 0 1 corner]ᵀ:
        # one0 and one1 are 1 in the added rows, where they meet the dustbin scores of the other side.
        bin0, bin1 = bins.split([n, x.shape[1] - n], dim=1)
        ends0, ends1 = (0, 0, 0, 1), (0, 0, 0, more_rows)
        one0, one1 = (F.pad(torch.zeros_like(b), e, value=1.0) for b, e in ((bin0, ends0), (bin1, ends1)))
        left = torch.cat([F.pad(torch.cat([left[:, :n], bin0], -1), ends0), one0], -1)
        right = torch.cat([F.pad(right[:, n:], ends1), one1, torch.cat([bin1, corner], 1)], -1)
        with torch.autocast(x.device.type, enabled=False):
            return (left @ right.mT)[..., :columns]
