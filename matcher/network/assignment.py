"""From described points to a soft partial assignment: log-domain optimal transport with dustbins.

SuperGlue (Sarlin et al. 2020), section 3.2; stabilised scaling after Schmitzer 2019, "Stabilized sparse
scaling algorithms for entropy regularized transport problems", section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.types import Assignment

# Beyond this the scaling vectors are absorbed into the potentials before float32 runs out of range.
SCALING_LIMIT = 1e12
LEAST_EXPONENT = -80.0
LEAST_SUM = 1e-24  # sums below it may hold numbers that were cut off
BLOCK = 2**18  # float32 numbers, half of a core's cache


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
        log_scores = _raised(similarity, gain0, gain1, factor=2.0)
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
    tops = scores.amax(2)
    rows, columns = torch.empty_like(tops), scores.new_zeros(scores.shape[0], scores.shape[2])
    highest = tops.amax(1, keepdim=True)
    for part in row_blocks(*scores.shape[1:], scores.device):
        weights = _exponentials(scores[:, part] - tops[:, part].unsqueeze(2))
        rows[:, part] = weights.sum(2).log_().add_(tops[:, part])
        columns += torch.bmm((tops[:, part] - highest).exp().unsqueeze(1), weights).squeeze(1)
    if bool((columns <= LEAST_SUM).any()):
        return rows, torch.logsumexp(scores, dim=1)
    return rows, columns.log_() + highest


def _exponentials(scores: Tensor) -> Tensor:
    """exp in place, of at least e⁻⁸⁰: where it underflows it is fifty times slower on some processors."""
    return scores.clamp_min_(LEAST_EXPONENT).exp_()


def row_blocks(rows: int, columns: int, device: torch.device, numbers: int = BLOCK) -> list[slice]:
    """Rows whose numbers stay in the caches of all threads; all at once on other devices than a CPU."""
    step = rows if device.type != "cpu" else max(1, numbers * torch.get_num_threads() // max(columns, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, max(step, 1))]


@dataclass(frozen=True, eq=False)
class Potentials:
    """Dual potentials of a transport problem: log P = scores + u + v."""

    u: Tensor  # (B, N+1)
    v: Tensor  # (B, M+1)
    iterations: Tensor  # (B,) int64
    converged: Tensor  # (B,) bool


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
) -> Potentials:
    """Scale exp(scores) until its rows and columns have their masses.

    Args:
        scores: (B, N+1, M+1) with the dustbins last.
        mask0, mask1: (B, N), (B, M) bool, True = valid; masked points carry no mass.
        max_iterations: row and column updates at most, one at least.
        tolerance: stop a pair once its rows are right to this, see `row_error`; None runs all iterations,
            rows first. With a tolerance the side of fewer points comes first (between equals the one of
            lower dustbins), so that swapping the images transposes the plan to rounding.

    Returns:
        Potentials in float32, −inf at masked points; finite elsewhere for scores of ±1e4.
    """
    scores = scores.detach().float()
    log_mu, log_nu = log_masses(scores, mask0, mask1)
    solve = _solve if mask0 is None and mask1 is None else _solve_valid
    pairs = zip(scores, log_mu, log_nu, strict=True)
    u, v, iterations, converged = zip(
        *(solve(*pair, max_iterations, tolerance) for pair in pairs), strict=True
    )
    device = scores.device
    return Potentials(
        torch.stack(u),
        torch.stack(v),
        torch.tensor(iterations, device=device),
        torch.tensor(converged, device=device),
    )


Solution = tuple[Tensor, Tensor, int, bool]  # potentials (N+1,), (M+1,), iterations, converged


def _solve_valid(
    scores: Tensor, log_mu: Tensor, log_nu: Tensor, max_iterations: int, tolerance: float | None
) -> Solution:
    """`_solve` for the points and dustbins of one pair that have mass; the others' potentials are −inf."""
    u, v = torch.full_like(log_mu, -math.inf), torch.full_like(log_nu, -math.inf)
    rows, columns = (x.isfinite().nonzero().squeeze(1) for x in (log_mu, log_nu))
    if not len(rows) or not len(columns):
        return u, v, 1, True
    inner = scores[rows[:, None], columns], log_mu[rows], log_nu[columns]
    u[rows], v[columns], iterations, converged = _solve(*inner, max_iterations, tolerance)
    return u, v, iterations, converged


def _solve(
    scores: Tensor, log_mu: Tensor, log_nu: Tensor, max_iterations: int, tolerance: float | None
) -> Solution:
    if tolerance is not None and _columns_first(scores, log_mu, log_nu):
        v, u, iterations, converged = _sinkhorn_pair(scores.t(), log_nu, log_mu, max_iterations, tolerance)
        return u, v, iterations, converged
    return _sinkhorn_pair(scores, log_mu, log_nu, max_iterations, tolerance)


def _columns_first(scores: Tensor, log_mu: Tensor, log_nu: Tensor) -> bool:
    """Whether the columns come first, in a way that does not depend on which image is called 0."""
    if log_mu[-1] != log_nu[-1]:
        return bool(log_mu[-1] < log_nu[-1])  # a dustbin counts the points of the other side
    return bool(scores[-1, :-1].sum() < scores[:-1, -1].sum())


def row_error(ratios: Tensor) -> float:
    """How wrong the rows of a plan are, from the ratios (N+1,) of their sums to their masses.

    The relative error of the points' rows as a vector, ‖sums − 1‖ / ‖1‖, or that of the dustbin's row if it
    is greater. Single points between two partners take several times the iterations of all others, and would
    alone decide if the greatest error counted.
    """
    errors = (ratios - 1).abs_()
    points = errors[:-1]
    return max(float(points.norm()) / max(len(points), 1) ** 0.5, float(errors[-1]))


def _sinkhorn_pair(
    scores: Tensor, log_mu: Tensor, log_nu: Tensor, max_iterations: int, tolerance: float | None
) -> Solution:
    """One pair by stabilised scaling: matrix–vector products on a kernel that has absorbed the potentials.

    Rows are updated first, so columns are exact after each iteration and rows tell how far it is.
    """
    masses = torch.cat([log_mu, log_nu]).exp_()
    scores, ones = scores.contiguous(), torch.ones_like(masses)
    u, v, rows = -scores.amax(1), torch.zeros_like(log_nu), len(log_mu)
    kernel, iterations = ScaledKernel(scores, u, v), 1
    scales = kernel.update(ones, masses)
    while True:
        low, high = scales.aminmax()
        if not (low > 1 / SCALING_LIMIT and high < SCALING_LIMIT):
            # Redo this update in the log domain from the last absorbed potentials, then absorb.
            safe = scales.clamp(1 / SCALING_LIMIT, SCALING_LIMIT).nan_to_num(1.0).log_()
            u, v = _log_iteration(scores, u + safe[:rows], v + safe[rows:], log_mu, log_nu)
            kernel, scales = ScaledKernel(scores, u, v), ones
        if tolerance is None and iterations >= max_iterations:
            converged = False
            break
        following = kernel.update(scales, masses)
        # A row's next scale is its mass over its sum, so this is how much too large its sum is.
        converged = tolerance is not None and row_error(scales[:rows] / following[:rows]) <= tolerance
        if converged or iterations >= max_iterations:
            break
        scales = following
        iterations += 1
    return u + scales[:rows].log(), v + scales[rows:].log(), iterations, converged


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
    kernel = torch.empty_like(scores)
    for part in row_blocks(*scores.shape, scores.device):
        torch.add(scores[part], u[part, None], out=kernel[part])
        _exponentials(kernel[part].add_(v))
    return kernel


def _raised(scores: Tensor, u: Tensor, v: Tensor, factor: float = 1.0) -> Tensor:
    """factor · scores (B, N, M) + u (B, N) + v (B, M)."""
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    for part in row_blocks(*scores.shape[1:], scores.device):
        torch.add(u[:, part, None], scores[:, part], alpha=factor, out=out[:, part]).add_(v.unsqueeze(1))
    return out


def _log_iteration(
    scores: Tensor, u: Tensor, v: Tensor, log_mu: Tensor, log_nu: Tensor
) -> tuple[Tensor, Tensor]:
    """One row and one column update in the log domain."""
    u = log_mu - torch.logsumexp(scores + v, dim=1)
    return u, log_nu - torch.logsumexp(scores + u[:, None], dim=0)


def assign(
    scores: Tensor,
    mask0: Tensor | None = None,
    mask1: Tensor | None = None,
    *,
    max_iterations: int = 100,
    tolerance: float | None = 1e-2,
) -> Assignment:
    """Scores with dustbins (B, N+1, M+1) → `Assignment` by Sinkhorn; masked points get −inf."""
    if 0 in (scores.shape[1] - 1, scores.shape[2] - 1):
        return _unassigned(scores)
    found = sinkhorn(scores, mask0, mask1, max_iterations=max_iterations, tolerance=tolerance)
    log_p = _raised(scores.detach().float(), found.u, found.v)
    return Assignment(
        log_scores=log_p[:, :-1, :-1],
        log_unmatched0=log_p[:, :-1, -1],
        log_unmatched1=log_p[:, -1, :-1],
        iterations=int(found.iterations.max()),
        converged=bool(found.converged.all()),
    )


def _unassigned(scores: Tensor) -> Assignment:
    """One side has no points: every point of the other is unmatched for sure."""
    batch, rows, columns = scores.shape
    scores = scores.float()
    return Assignment(
        log_scores=scores.new_zeros(batch, rows - 1, columns - 1),
        log_unmatched0=scores.new_zeros(batch, rows - 1),
        log_unmatched1=scores.new_zeros(batch, columns - 1),
    )
