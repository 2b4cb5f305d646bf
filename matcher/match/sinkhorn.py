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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import mapped
from matcher.config import AssignmentConfig
from matcher.errors import UsageError

NO_DUSTBIN = -1e4  # score of a dustbin that nothing goes to; finite, since it is multiplied by 0
LEAST_EXPONENT = -80.0  # where exp underflows it is fifty times slower on some processors
LARGEST_SCALE = 1e12  # scales beyond it go into the potentials, before float32 runs out of range
EXTREME_SCALE = 1e16  # the product of two with e⁻⁸⁰, which stands for less, is still small
LEAST_SUM = 1e-30  # of a row or column in training, where nothing is absorbed
CACHE_LINE = 16  # float32 numbers
CHECKED = 4  # iterations between looks at the error, for which a GPU is waited for


class Potentials(NamedTuple):
    """Dual potentials of transport problems: log P = scores + u + v."""

    u: Tensor  # (B, N+1), −∞ at masked points
    v: Tensor  # (B, M+1)
    iterations: list[int]  # of every pair
    converged: list[bool]  # False: the iteration limit ended it
    row_errors: tuple[float, ...] = ()  # of the first pair after every iteration, where recorded

    def log_plan(self, scores: Tensor) -> Tensor:
        """(B, N+1, M+1) log P."""
        return (scores.detach() + self.u.unsqueeze(2)).add_(self.v.unsqueeze(1))


def sinkhorn(
    scores: Tensor,
    mask0: Tensor | None = None,
    mask1: Tensor | None = None,
    *,
    max_iterations: int = 100,
    tolerance: float | None = 1e-2,
    start: Potentials | None = None,
    record_errors: bool = False,
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
        max_iterations: row and column updates at most, one at least.
        tolerance: of the rows' relative error, ‖sums − 1‖ / ‖1‖ over points together with that of the
            dustbin, at which a pair stops; looked at after every fourth iteration. None: never.
        start: of similar scores under the same masks.
        record_errors: keep the error of every iteration.

    Returns:
        Potentials in float32; finite at valid points for scores of ±1e4.
    """
    scores = scores.detach().float()
    limits = (max_iterations, tolerance, record_errors)
    turned = [False] if tolerance is None else _turned(scores, mask0, mask1)
    if not any(turned):
        return _solve(scores, mask0, mask1, start, *limits)
    if all(turned):
        start = start and start._replace(u=start.v, v=start.u)
        found = _solve(scores.mT, mask1, mask0, start, *limits)
        return found._replace(u=found.v, v=found.u)
    u, v = scores.new_empty(scores.shape[:2]), scores.new_empty(len(scores), scores.shape[2])
    iterations, converged = [0] * len(scores), [False] * len(scores)
    for way in (False, True):  # pairs of either kind by themselves
        some = [pair for pair, other in enumerate(turned) if other == way]
        own = start and Potentials(start.u[some], start.v[some], [], [])
        masks = (None, None) if mask0 is None else (mask0[some], mask1[some])
        found = sinkhorn(scores[some], *masks, max_iterations=max_iterations, tolerance=tolerance, start=own)
        u[some], v[some] = found.u, found.v
        for pair, count, done in zip(some, found.iterations, found.converged, strict=True):
            iterations[pair], converged[pair] = count, done
    return Potentials(u, v, iterations, converged)


def _turned(scores: Tensor, mask0: Tensor | None, mask1: Tensor | None) -> list[bool]:
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
    record_errors: bool,
) -> Potentials:
    """`sinkhorn`, rows first."""
    mu, nu, weight = masses(scores, mask0, mask1)
    masked = None if mask0 is None else torch.cat([mu, nu], 1) == 0
    tiny = torch.finfo(scores.dtype).tiny
    if start is None:
        some = scores if masked is None else scores.masked_fill(nu.mT == 0, -LARGEST_SCALE)
        u, v = -some.amax(2, keepdim=True), torch.zeros_like(nu)
        u = u if masked is None else u.masked_fill(mu == 0, 0.0)
    else:
        u, v = start.u.unsqueeze(2).clone(), start.v.unsqueeze(2).clone()
    kernel = _absorbed(scores, u, v)
    scales = torch.cat([mu, nu], 1).clamp_(max=1.0)
    (a, b), turned = scales.split([scores.shape[1], scores.shape[2]], dim=1), kernel.mT
    sums = torch.bmm(kernel, b).clamp_min(tiny)
    count, errors, stopped = 0, [], {}
    while True:
        torch.div(mu, sums, out=a)
        below = torch.bmm(turned, a)
        torch.div(nu, below if masked is None else below.clamp_min(tiny), out=b)
        sums = torch.bmm(kernel, b)
        if masked is not None:  # where a pair has no point
            sums = sums.clamp_min(tiny)
        count += 1
        last, looks = count >= max_iterations, count % CHECKED == 0
        if not (last or looks or record_errors):
            continue
        error = torch.linalg.vector_norm(torch.addcmul(mu, a, sums, value=-1).mul_(weight), dim=1)
        extremes = torch.aminmax(scales if masked is None else scales + masked, dim=1)
        error, low, high = zip(*torch.cat([error, *extremes], 1).tolist(), strict=True)
        errors.append(error[0])
        for pair in range(len(scores)):
            if pair in stopped:
                continue
            if not (low[pair] > 1 / LARGEST_SCALE and high[pair] < LARGEST_SCALE):
                # One more update, whose scales go into the potentials; in the log domain if extreme.
                some = slice(pair, pair + 1)
                within = b[some].clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
                if low[pair] > 1 / EXTREME_SCALE and high[pair] < EXTREME_SCALE:
                    row = mu[some] / torch.bmm(kernel[some], within).clamp_min(tiny)
                    column = nu[some] / torch.bmm(turned[some], row).clamp_min(tiny)
                    u[some] += row.log()
                    v[some] += column.log()
                else:
                    rest = (within.nan_to_num(1.0).log() + v[some]).masked_fill(nu[some] == 0, -math.inf)
                    u[some] = mu[some].log() - torch.logsumexp(scores[some] + rest.mT, 2, keepdim=True)
                    v[some] = nu[some].log() - torch.logsumexp(scores[some] + u[some], 1, keepdim=True).mT
                a[some], b[some] = mu[some].clamp(max=1.0), nu[some].clamp(max=1.0)
                if not last:
                    kernel[some] = _absorbed(scores[some], u[some], v[some])
                    sums[some] = torch.bmm(kernel[some], b[some])
            elif tolerance is not None and (looks or last) and error[pair] <= tolerance:
                potentials = (u[pair] + a[pair].log(), v[pair] + b[pair].log()) if len(scores) > 1 else ()
                stopped[pair] = count, *potentials
        if last or len(stopped) == len(scores):
            break
    u, v = u + a.log(), v + b.log()
    for pair, (_, row, column) in stopped.items() if len(scores) > 1 else ():
        u[pair], v[pair] = row, column
    iterations = [stopped[pair][0] if pair in stopped else count for pair in range(len(scores))]
    converged = [pair in stopped for pair in range(len(scores))]
    recorded = tuple(errors) if record_errors else ()
    return Potentials(u.squeeze(2), v.squeeze(2), iterations, converged, recorded)


def masses(
    scores: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Masses of rows (B, N+1, 1) and columns (B, M+1, 1), and what each row's error weighs (B, N+1, 1)."""
    valid, counts = [], []
    for axis, mask in ((1, mask0), (2, mask1)):
        points = scores.shape[axis] - 1
        if mask is None:
            valid.append(scores.new_ones(len(scores), points, 1))
            counts.append(scores.new_full((len(scores), 1, 1), points))
        else:
            valid.append(mask.unsqueeze(2).to(scores.dtype))
            counts.append(valid[-1].sum(1, keepdim=True))
    least = [count.clamp_min(1.0) for count in counts]
    weight = torch.cat([valid[0] * least[0].rsqrt(), least[1].reciprocal()], 1)
    return torch.cat([valid[0], counts[1]], 1), torch.cat([valid[1], counts[0]], 1), weight


def _absorbed(scores: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """exp(scores + u + v), from e⁻⁸⁰ to e⁸⁰."""
    return (scores + u).add_(v.mT).clamp_(LEAST_EXPONENT, -LEAST_EXPONENT).exp_()


def log_assignment(scores: Tensor, iterations: int, unrolled: int) -> Tensor:
    """Differentiable log P (B, N+1, M+1) of float32 scores with dustbins, no point masked, for training.

    The potentials are found without gradients; the last `unrolled` updates are then repeated with them, which
    is the truncated Neumann series of the implicit gradient there (Eisenberger et al. 2022, section 4).
    """
    return log_plan(scores, sinkhorn(scores, max_iterations=iterations + 1, tolerance=None), unrolled)


def log_plan(scores: Tensor, found: Potentials, unrolled: int) -> Tensor:
    """`log_assignment` by the potentials of these scores."""
    mu, nu, _ = masses(scores)
    base = scores + found.u.unsqueeze(2) + found.v.unsqueeze(1)
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


@dataclass(frozen=True, eq=False)
class Assignment:
    """A soft partial assignment in the log domain (float32)."""

    log_scores: Tensor  # (B, N, M) log probability that i and j are the same point; −∞ where masked
    log_unmatched0: Tensor  # (B, N) log probability that point i of image 0 has no partner
    log_unmatched1: Tensor  # (B, M)
    iterations: Sequence[int] = ()  # of Sinkhorn, for every pair
    converged: Sequence[bool] = ()  # False: the iteration limit ended it
    row_errors: tuple[float, ...] = ()  # of the first pair after every iteration, where recorded

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
    record_errors: bool = False,
) -> Assignment:
    """Scores with dustbins (B, N+1, M+1) → `Assignment`, by the method that a configuration names.

    The masks (B, N), (B, M) and `start` are as `sinkhorn` takes them. Gradients flow, through ten updates
    more than there are without them; `UsageError`: not those of a transport plan with masked points.
    """
    if config.kind == "dual_softmax":
        found = dual_softmax(scores, mask0, mask1)
    else:
        limits = {"max_iterations": config.max_iterations, "tolerance": config.tolerance}
        potentials = sinkhorn(scores, mask0, mask1, **limits, start=start, record_errors=record_errors)
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
    if 0 in log_scores.shape[1:]:
        nowhere = log_scores.new_zeros(log_scores.shape[:2], dtype=torch.int64)
        return MutualBest(torch.full_like(nowhere, -torch.inf, dtype=torch.float32), nowhere, nowhere > 0)
    best, partner = log_scores.max(dim=2)
    # Along columns the values alone are several times as fast as the indices.
    top = best == log_scores.amax(dim=1).gather(1, partner)
    rows = log_scores.shape[1]
    here = torch.arange(rows, device=log_scores.device).expand_as(partner)
    first = here.new_full((len(best), log_scores.shape[2]), rows)
    first.scatter_reduce_(1, partner, torch.where(top, here, rows), "amin")
    return MutualBest(best, partner, first.gather(1, partner) == here)


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
            self.register_buffer("dustbin", torch.tensor(NO_DUSTBIN), persistent=False)

    def forward(self, x0: Tensor, x1: Tensor, more: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Tokens (B, N, dim), (B, M, dim) → scores with dustbins (B, N+1, M+1), float32.

        A point's dustbin score is minus its matchability logit, the corner is 0; one number (SuperGlue,
        eq. 8) is the score of all dustbins and of the corner. The products of `more`, (B, N, C) and
        (B, M, C), are added to the similarities.
        """
        left, right = (mapped(self.projection, x).float() / self.divisor for x in (x0, x1))
        columns = right.shape[1] + 1
        # Rows that begin at cache lines: the product takes two thirds of the time.
        more_rows = 1 if torch.compiler.is_compiling() else 1 + -columns % CACHE_LINE
        if hasattr(self, "matchability"):
            bin0, bin1 = (-self.logits(x).unsqueeze(-1) for x in (x0, x1))
            corner = bin1.new_zeros(len(x1), more_rows, 1)
        else:
            corner = self.dustbin.float().expand(len(x1), more_rows, 1)
            bin0, bin1 = (corner[:, :1].expand(-1, x.shape[1], 1) for x in (x0, x1))
        if more is not None:
            left, right = torch.cat([left, more[0]], -1), torch.cat([right, more[1]], -1)
        # The dustbins are one more row and column of the product, [l b₀ 0; 0 0 1] [r 0 b₁; 0 1 corner]ᵀ.
        ends0, ends1 = (0, 0, 0, 1), (0, 0, 0, more_rows)
        one0, one1 = (F.pad(torch.zeros_like(x), e, value=1.0) for x, e in ((bin0, ends0), (bin1, ends1)))
        left = torch.cat([F.pad(torch.cat([left, bin0], -1), ends0), one0], -1)
        right = torch.cat([F.pad(right, ends1), one1, torch.cat([bin1, corner], 1)], -1)
        with torch.autocast(x0.device.type, enabled=False):
            return (left @ right.mT)[..., :columns]

    def logits(self, x: Tensor) -> Tensor:
        """Matchability logit (…, N) of tokens (…, N, dim), float32."""
        return mapped(self.matchability, x).squeeze(-1).float()
