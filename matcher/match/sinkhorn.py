"""Log-domain optimal transport with dustbins, a pair at a time.

SuperGlue (Sarlin et al. 2020), section 3.2; stabilised scaling after Schmitzer 2019, "Stabilized sparse
scaling algorithms for entropy regularized transport problems", section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.config import AssignmentConfig
from matcher.kernels.calls import absorb_compiled, linear
from matcher.match.blocks import LEAST_EXPONENT, exponentials, raised, row_blocks
from matcher.match.nearest import MutualBest, mutual_best

# --- sinkhorn: Log-domain optimal transport with dustbins, a pair at a time.

# Beyond this the scaling vectors are absorbed into the potentials before float32 runs out of range.
SCALING_LIMIT = 1e12
LEAST_SUM = 1e-30  # of a row or column in training, where nothing is absorbed


@dataclass(frozen=True, eq=False)
class Potentials:
    """Dual potentials of a transport problem: log P = scores + u + v."""

    u: Tensor  # (B, N+1)
    v: Tensor  # (B, M+1)
    iterations: Tensor  # (B,) int64
    converged: Tensor  # (B,) bool
    row_errors: tuple[tuple[float, ...], ...] = ()  # of each pair after every iteration, where recorded


def log_masses(
    scores: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log masses of rows (B, N+1) and columns (B, M+1).

    A valid point has mass 1, a masked one 0, each dustbin the number of valid points of the other image.
    """
    batch, rows, columns = scores.shape
    valid0 = scores.new_ones(batch, rows - 1) if mask0 is None else mask0.to(scores.dtype)
    valid1 = scores.new_ones(batch, columns - 1) if mask1 is None else mask1.to(scores.dtype)
    mu = torch.cat([valid0, valid1.sum(1, keepdim=True)], dim=1)
    nu = torch.cat([valid1, valid0.sum(1, keepdim=True)], dim=1)
    return mu.log(), nu.log()


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
    """Scale exp(scores) until its rows and columns have their masses.

    Args:
        scores: (B, N+1, M+1) with the dustbins last.
        mask0, mask1: (B, N), (B, M) bool, True = valid; masked points carry no mass.
        max_iterations: row and column updates at most, one at least.
        tolerance: stop a pair once the error of its rows is this small, see `row_error`; None runs all
            iterations, rows first. With a tolerance the side of fewer points comes first (between equals the
            one of lower dustbins), so that swapping the images transposes the plan to rounding.
        start: of similar scores under the same masks; none: rows of maximum 0.
        record_errors: keep `row_error` of every iteration.

    Returns:
        Potentials in float32, −inf at masked points; finite elsewhere for scores of ±1e4.
    """
    scores = scores.detach().float()
    log_mu, log_nu = log_masses(scores, mask0, mask1)
    solve = _solve if mask0 is None and mask1 is None else _solve_valid
    starts = [None] * len(scores) if start is None else zip(start.u, start.v, strict=True)
    problems = map(Problem, scores, log_mu, log_nu, starts)
    limits = Limits(max_iterations, tolerance, record_errors)
    u, v, iterations, converged, errors = zip(*(solve(problem, limits) for problem in problems), strict=True)
    device = scores.device
    return Potentials(
        torch.stack(u),
        torch.stack(v),
        torch.tensor(iterations, device=device),
        torch.tensor(converged, device=device),
        errors if record_errors else (),
    )


class Problem(NamedTuple):
    """One pair."""

    scores: Tensor  # (N+1, M+1)
    log_mu: Tensor  # (N+1,)
    log_nu: Tensor  # (M+1,)
    start: tuple[Tensor, Tensor] | None  # potentials (N+1,), (M+1,) to begin with


class Limits(NamedTuple):
    """When to stop, and whether to keep the error of every iteration."""

    max_iterations: int
    tolerance: float | None
    record_errors: bool = False


class Solution(NamedTuple):
    """Of one pair."""

    u: Tensor  # (N+1,)
    v: Tensor  # (M+1,)
    iterations: int
    converged: bool
    errors: tuple[float, ...] = ()


def _solve_valid(problem: Problem, limits: Limits) -> Solution:
    """`_solve` for the points and dustbins of one pair that have mass; the others' potentials are −inf."""
    scores, log_mu, log_nu, start = problem
    u, v = torch.full_like(log_mu, -math.inf), torch.full_like(log_nu, -math.inf)
    rows, columns = (x.isfinite().nonzero().squeeze(1) for x in (log_mu, log_nu))
    if not len(rows) or not len(columns):
        return Solution(u, v, 1, True)
    start = start and (start[0][rows], start[1][columns])
    inner = Problem(scores[rows[:, None], columns], log_mu[rows], log_nu[columns], start)
    u[rows], v[columns], *rest = _solve(inner, limits)
    return Solution(u, v, *rest)


def _solve(problem: Problem, limits: Limits) -> Solution:
    scores, log_mu, log_nu, start = problem
    if limits.tolerance is not None and _columns_first(scores, log_mu, log_nu):
        transposed = Problem(scores.t(), log_nu, log_mu, start and start[::-1])
        v, u, *rest = _sinkhorn_pair(transposed, limits)
        return Solution(u, v, *rest)
    return _sinkhorn_pair(problem, limits)


def _columns_first(scores: Tensor, log_mu: Tensor, log_nu: Tensor) -> bool:
    """Whether the columns come first, in a way that does not depend on which image is called 0."""
    if log_mu[-1] != log_nu[-1]:
        return bool(log_mu[-1] < log_nu[-1])  # a dustbin counts the points of the other side
    return bool(scores[-1, :-1].sum() < scores[:-1, -1].sum())


def row_error(ratios: Tensor) -> float:
    """Error of the rows of a plan, from the ratios (N+1,) of their sums to their masses.

    The relative error of the points' rows as a vector, ‖sums − 1‖ / ‖1‖, or that of the dustbin's row if it
    is greater. Single points between two partners take several times the iterations of all others, and would
    alone decide if the greatest error counted.
    """
    errors = (ratios - 1).abs_()
    points = errors[:-1]
    return max(float(points.norm()) / max(len(points), 1) ** 0.5, float(errors[-1]))


def _sinkhorn_pair(problem: Problem, limits: Limits) -> Solution:
    """One pair by stabilised scaling: matrix–vector products on a kernel that has absorbed the potentials.

    Rows are updated first, so columns are exact after each iteration and the rows' error measures
    convergence.
    """
    scores, log_mu, log_nu, start = problem
    masses = torch.cat([log_mu, log_nu]).exp_()
    ones = torch.ones_like(masses)
    u, v = start or (-scores.amax(1), torch.zeros_like(log_nu))
    rows = len(log_mu)
    max_iterations, tolerance, record = limits
    kernel, iterations, errors = ScaledKernel(scores, u, v), 1, []
    scales = kernel.update(ones, masses)
    while True:
        low, high = scales.aminmax()
        if not (low > 1 / SCALING_LIMIT and high < SCALING_LIMIT):
            # Redo this update in the log domain from the last absorbed potentials, then absorb.
            safe = scales.clamp(1 / SCALING_LIMIT, SCALING_LIMIT).nan_to_num(1.0).log_()
            u, v = _log_iteration(scores, v + safe[rows:], log_mu, log_nu)
            kernel, scales = ScaledKernel(scores, u, v), ones
        if tolerance is None and iterations >= max_iterations and not record:
            converged = False
            break
        following = kernel.update(scales, masses)
        # A row's next scale is its mass over its sum, so this is how much too large its sum is.
        if record or tolerance is not None:
            errors.append(row_error(scales[:rows] / following[:rows]))
        converged = tolerance is not None and errors[-1] <= tolerance
        if converged or iterations >= max_iterations:
            break
        scales = following
        iterations += 1
    return Solution(u + scales[:rows].log(), v + scales[rows:].log(), iterations, converged, tuple(errors))


def log_assignment(scores: Tensor, iterations: int, unrolled: int) -> Tensor:
    """Differentiable log P (B, N+1, M+1) of scores with dustbins, in batches, for training.

    The potentials are found without gradients; the last `unrolled` iterations are then repeated with them,
    which is the truncated Neumann series of the implicit gradient at that point (Eisenberger et al. 2022,
    section 4).

    Args:
        scores: (B, N+1, M+1) float32 with the dustbins last, no point masked.
        iterations: row and column updates that find the potentials, after a first one in the log domain.
        unrolled: updates that carry gradients.
    """
    log_mu, log_nu = log_masses(scores)
    mu, nu = log_mu.exp(), log_nu.exp()
    with torch.no_grad():
        u, v = _log_iteration(scores, torch.zeros_like(log_nu), log_mu, log_nu)
        a, b = _scale_batch(_clamped_exp(scores + u.unsqueeze(2) + v.unsqueeze(1)), mu, nu, iterations)
        u, v = u + a.log(), v + b.log()
    base = scores + u.unsqueeze(2) + v.unsqueeze(1)
    a, b = _scale_batch(_clamped_exp(base), mu, nu, unrolled)
    return base + a.log().unsqueeze(2) + b.log().unsqueeze(1)


def _clamped_exp(base: Tensor) -> Tensor:
    return base.clamp_min(LEAST_EXPONENT).exp()


def _scale_batch(kernel: Tensor, mu: Tensor, nu: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Row and column scales (B, N+1), (B, M+1) of kernels (B, N+1, M+1) after some updates."""
    a, b = torch.ones_like(mu), torch.ones_like(nu)
    for _ in range(iterations):
        a = mu / torch.bmm(kernel, b.unsqueeze(2)).squeeze(2).clamp_min(LEAST_SUM)
        b = nu / torch.bmm(a.unsqueeze(1), kernel).squeeze(1).clamp_min(LEAST_SUM)
    return a, b


class ScaledKernel:
    """exp(scores + u + v), whose rows and columns are then scaled."""

    def __init__(self, scores: Tensor, u: Tensor, v: Tensor) -> None:
        kernel = absorbed(scores, u, v)
        self.rows = len(kernel)
        self.blocks = [
            (part, kernel[part], kernel[part].t()) for part in row_blocks(*kernel.shape, kernel.device)
        ]

    def update(self, scales: Tensor, masses: Tensor) -> Tensor:
        """The next scales of rows and columns (N+M,) for masses (N+M,); the kernel is read once."""
        out = torch.empty_like(masses)
        old, row_scales, row_masses = scales[self.rows :], out[: self.rows], masses[: self.rows]
        columns = torch.zeros_like(old)
        for part, block, turned in self.blocks:
            scale = row_scales[part]
            torch.div(row_masses[part], torch.mv(block, old), out=scale)
            columns.addmv_(turned, scale)
        torch.div(masses[self.rows :], columns, out=out[self.rows :])
        return out


def absorbed(scores: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """exp(scores + u + v) of (N, M), (N,), (M,), at least e⁻⁸⁰."""
    if (kernel := absorb_compiled(scores, u, v, LEAST_EXPONENT)) is not None:
        return kernel
    kernel = torch.empty_like(scores)
    for part in row_blocks(*scores.shape, scores.device):
        torch.add(scores[part], u[part, None], out=kernel[part])
        exponentials(kernel[part].add_(v))
    return kernel


def _log_iteration(scores: Tensor, v: Tensor, log_mu: Tensor, log_nu: Tensor) -> tuple[Tensor, Tensor]:
    """One row and one column update in the log domain, of (…, N+1, M+1)."""
    u = log_mu - torch.logsumexp(scores + v.unsqueeze(-2), dim=-1)
    return u, log_nu - torch.logsumexp(scores + u.unsqueeze(-1), dim=-2)


# --- prediction: The network's output for pairs: soft assignments of the points that it kept.


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


# --- assignment: From scores with dustbins to a soft partial assignment: by optimal transport or by dual
# softmax.

LEAST_SUM_ASSIGNMENT = 1e-24  # sums below it may hold numbers that were cut off


def dual_softmax(scores: Tensor) -> Assignment:
    """Scores with dustbins (B, N+1, M+1) → row softmax × column softmax × both matchabilities.

    LightGlue (Lindenberger et al. 2023), eq. 8; the dustbin scores are minus the matchability logits. Where
    they are −∞ this is LoFTR's dual softmax (Sun et al. 2021, eq. 2): every point is matchable.
    """
    similarity = scores[:, :-1, :-1].float()
    logit0, logit1 = -scores[:, :-1, -1].float(), -scores[:, -1, :-1].float()
    if not scores.requires_grad and similarity.numel():
        # The same sums in another order: two passes over the matrix instead of six.
        with torch.autocast(scores.device.type, enabled=False):
            rows, columns = _log_sums(similarity)
        gain0, gain1 = F.logsigmoid(logit0) - rows, F.logsigmoid(logit1) - columns
        log_scores = raised(similarity, gain0, gain1, factor=2.0)
    else:
        certainty = F.logsigmoid(logit0).unsqueeze(2) + F.logsigmoid(logit1).unsqueeze(1)
        log_scores = similarity.log_softmax(2) + similarity.log_softmax(1) + certainty
    return Assignment(
        log_scores=log_scores,
        log_unmatched0=F.logsigmoid(-logit0),
        log_unmatched1=F.logsigmoid(-logit1),
    )


def _log_sums(scores: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp over rows (B, N) and columns (B, M) of finite scores (B, N, M), from one exponential.

    It is relative to the rows' maxima; if a column is far below all of them columns are summed by themselves.
    """
    if scores.device.type != "cpu":  # to ask whether a column is far below would hold a GPU up
        return torch.logsumexp(scores, dim=2), torch.logsumexp(scores, dim=1)
    tops = scores.amax(2)
    rows, columns = torch.empty_like(tops), scores.new_zeros(scores.shape[0], scores.shape[2])
    highest = tops.amax(1, keepdim=True)
    for part in row_blocks(*scores.shape[1:], scores.device):
        weights = exponentials(scores[:, part] - tops[:, part].unsqueeze(2))
        rows[:, part] = weights.sum(2).log_().add_(tops[:, part])
        columns += torch.bmm((tops[:, part] - highest).exp().unsqueeze(1), weights).squeeze(1)
    if bool((columns <= LEAST_SUM_ASSIGNMENT).any()):
        return rows, torch.logsumexp(scores, dim=1)
    return rows, columns.log_() + highest


def assign(
    scores: Tensor,
    mask0: Tensor | None = None,
    mask1: Tensor | None = None,
    *,
    max_iterations: int = 100,
    tolerance: float | None = 1e-2,
    start: Potentials | None = None,
    record_errors: bool = False,
) -> Assignment:
    """Scores with dustbins (B, N+1, M+1) → `Assignment` by `sinkhorn`; masked points get −inf."""
    if 0 in (scores.shape[1] - 1, scores.shape[2] - 1):
        return _unassigned(scores)
    options = {"max_iterations": max_iterations, "tolerance": tolerance, "start": start}
    return plan(scores, sinkhorn(scores, mask0, mask1, **options, record_errors=record_errors))


def assigned(
    scores: Tensor, config: AssignmentConfig, start: Potentials | None = None, *, record_errors: bool = False
) -> Assignment:
    """Scores with dustbins (B, N+1, M+1) → `Assignment`, by the method that a configuration names.

    `start` and `record_errors` are for `sinkhorn`; a dual softmax needs neither.
    """
    if config.kind == "dual_softmax":
        found = dual_softmax(scores)
    else:
        options = {"max_iterations": config.max_iterations, "tolerance": config.tolerance}
        found = assign(scores, **options, start=start, record_errors=record_errors)
    return drop_unmatched(found) if config.drop_unmatched else found


def drop_unmatched(assignment: Assignment) -> Assignment:
    """Remove points for which the dustbin is likelier than any match.

    How LoFTR reads a transport plan; other points may then become mutual best matches instead.
    """
    log_scores = assignment.log_scores
    if 0 in log_scores.shape[1:]:
        return assignment
    alone0 = assignment.log_unmatched0 > log_scores.amax(2)
    alone1 = assignment.log_unmatched1 > log_scores.amax(1)
    alone = alone0.unsqueeze(2) | alone1.unsqueeze(1)
    return replace(assignment, log_scores=log_scores.masked_fill(alone, -math.inf))


def plan(scores: Tensor, found: Potentials) -> Assignment:
    """Scores with dustbins (B, N+1, M+1) and their potentials → `Assignment`."""
    log_p = raised(scores.detach().float(), found.u, found.v)
    return Assignment(
        log_scores=log_p[:, :-1, :-1],
        log_unmatched0=log_p[:, :-1, -1],
        log_unmatched1=log_p[:, -1, :-1],
        iterations=int(found.iterations.max()),
        converged=bool(found.converged.all()),
        row_errors=found.row_errors,
    )


def _unassigned(scores: Tensor) -> Assignment:
    """One side has no points: every point of the other is certainly unmatched."""
    batch, rows, columns = scores.shape
    scores = scores.float()
    return Assignment(
        log_scores=scores.new_zeros(batch, rows - 1, columns - 1),
        log_unmatched0=scores.new_zeros(batch, rows - 1),
        log_unmatched1=scores.new_zeros(batch, columns - 1),
    )


# --- head: The assignment head: from token states to scores with dustbins.


class AssignmentHead(nn.Module):
    """One projection for similarities, and a dustbin score: a logit of each point, one number, or −∞."""

    def __init__(
        self, dim: int, dustbin: str = "point", *, project: bool = True, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, dim) if project else None
        self.divisor = (temperature * (dim**0.5 if project else dim)) ** 0.5  # of either side
        if dustbin == "point":
            self.matchability = nn.Linear(dim, 1)
        elif dustbin == "learned":
            self.dustbin = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("dustbin", torch.tensor(-math.inf), persistent=False)

    def forward(self, x0: Tensor, x1: Tensor) -> Tensor:
        """Tokens (…, N, dim), (…, M, dim) → scores with dustbins (…, N+1, M+1), float32.

        Similarities of projected tokens are scaled by 1/√dim, those of tokens (LoFTR, section 3.3) by 1/dim,
        both by 1/temperature. A point's dustbin score is minus its matchability logit, the corner is 0; one
        number (SuperGlue, eq. 8) is the score of all dustbins and of the corner.
        """
        m0, m1 = self.compared(x0, x1)
        bin0, bin1, corner = self.dustbins(x0, x1)
        with torch.autocast(x0.device.type, enabled=False):
            if m0.dim() == 3 and not (m0.requires_grad or bin0.requires_grad):
                return _bordered(m0, m1, bin0, bin1, corner)
            similarity = m0 @ m1.transpose(-1, -2)
        rows = torch.cat([similarity, bin0.unsqueeze(-1)], dim=-1)
        last = torch.cat([bin1, corner.expand(*bin1.shape[:-1], 1)], dim=-1)
        return torch.cat([rows, last.unsqueeze(-2)], dim=-2)

    def compared(self, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        """(…, N, dim), (…, M, dim) float32, whose products are the similarities."""
        return tuple(self._compared(x) / self.divisor for x in (x0, x1))

    def dustbins(self, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the dustbins (…, N), (…, M) and of their corner ()."""
        if hasattr(self, "dustbin"):
            corner = self.dustbin.float()
            return corner.expand(x0.shape[:-1]), corner.expand(x1.shape[:-1]), corner
        bin0, bin1 = (-self.logits(x) for x in (x0, x1))
        return bin0, bin1, bin1.new_zeros(())

    def _compared(self, x: Tensor) -> Tensor:
        if self.projection is None:
            return x.float()
        weight, bias = self.projection.weight, self.projection.bias
        return linear(x.to(weight.dtype).flatten(0, -2), weight, bias).float().unflatten(0, x.shape[:-1])

    def logits(self, x: Tensor) -> Tensor:
        """Matchability logit (…, N) of tokens (…, N, dim), float32."""
        return self.matchability(x.to(self.matchability.weight.dtype)).squeeze(-1).float()


def _bordered(m0: Tensor, m1: Tensor, bin0: Tensor, bin1: Tensor, corner: Tensor) -> Tensor:
    """Products m0 m1ᵀ of (B, N, dim), (B, M, dim) with dustbins, written once: allocations are slow."""
    scores = m0.new_empty(len(m0), m0.shape[1] + 1, m1.shape[1] + 1)
    for pair, inner in enumerate(scores[:, :-1, :-1]):
        torch.mm(m0[pair], m1[pair].t(), out=inner)
    scores[:, :-1, -1], scores[:, -1, :-1], scores[:, -1, -1] = bin0, bin1, corner
    return scores


def build_head(config: AssignmentConfig, dim: int) -> AssignmentHead:
    """The assignment head that a configuration names, for tokens of `dim` channels."""
    return AssignmentHead(dim, config.dustbin, project=config.project, temperature=config.temperature)
