"""From described points to a soft partial assignment: log-domain optimal transport with dustbins.

SuperGlue (Sarlin et al. 2020), section 3.2; stabilised scaling after Schmitzer 2019, "Stabilized sparse
scaling algorithms for entropy regularized transport problems", section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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


def row_blocks(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Rows whose numbers stay in the caches of all threads; all at once on other devices than a CPU."""
    step = rows if device.type != "cpu" else max(1, BLOCK * torch.get_num_threads() // max(columns, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


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
        tolerance: stop a pair once every mass, dustbins included, is right to this relative error; None runs
            all iterations, rows first. With a tolerance the side of fewer points comes first (between equals
            the one of lower dustbins), so that swapping the images transposes the plan to rounding.

    Returns:
        Potentials in float32, −inf at masked points; finite elsewhere for scores of ±1e4.
    """
    scores = scores.detach().float()
    log_mu, log_nu = log_masses(scores, mask0, mask1)
    singles = []
    for s, mu, nu in zip(scores, log_mu, log_nu, strict=True):
        if tolerance is not None and _columns_first(s, mu, nu):
            v, u, *report = _sinkhorn_pair(s.t(), nu, mu, max_iterations, tolerance)
        else:
            u, v, *report = _sinkhorn_pair(s, mu, nu, max_iterations, tolerance)
        singles.append((u, v, *report))
    u, v, iterations, converged = (list(x) for x in zip(*singles, strict=True))
    device = scores.device
    return Potentials(
        torch.stack(u),
        torch.stack(v),
        torch.tensor(iterations, device=device),
        torch.tensor(converged, device=device),
    )


def _columns_first(scores: Tensor, log_mu: Tensor, log_nu: Tensor) -> bool:
    """Whether the columns come first, in a way that does not depend on which image is called 0."""
    if log_mu[-1] != log_nu[-1]:
        return bool(log_mu[-1] < log_nu[-1])  # a dustbin counts the points of the other side
    bins0 = torch.where(log_mu[:-1].isfinite(), scores[:-1, -1], 0.0)
    bins1 = torch.where(log_nu[:-1].isfinite(), scores[-1, :-1], 0.0)
    return bool(bins1.sum() < bins0.sum())


def _sinkhorn_pair(
    scores: Tensor, log_mu: Tensor, log_nu: Tensor, max_iterations: int, tolerance: float | None
) -> tuple[Tensor, Tensor, int, bool]:
    """One pair by stabilised scaling: matrix–vector products on a kernel that has absorbed the potentials.

    Rows are updated first, so columns are exact after each iteration and rows tell how far it is.
    """
    mu, nu = log_mu.exp(), log_nu.exp()
    scores = scores.contiguous()
    v = torch.where(log_nu.isfinite(), torch.zeros_like(log_nu), -math.inf)
    tops = (scores if bool(log_nu.isfinite().all()) else scores + v).amax(1)
    u = torch.where(log_mu.isfinite(), -tops, -math.inf)
    kernel, iterations = absorbed(scores, u, v), 1
    a, b, _ = _scale(kernel, torch.ones_like(mu), torch.ones_like(nu), mu, nu)
    while True:
        if not _in_range(a, b):
            # Redo this update in the log domain from the last absorbed potentials, then absorb.
            safe_a, safe_b = (x.clamp(1 / SCALING_LIMIT, SCALING_LIMIT).nan_to_num(1.0) for x in (a, b))
            u, v = _log_iteration(scores, u + safe_a.log(), v + safe_b.log(), log_mu, log_nu)
            kernel, a, b = absorbed(scores, u, v), torch.ones_like(mu), torch.ones_like(nu)
        next_a, next_b, rows = _scale(kernel, a, b, mu, nu)
        near = ((a * rows - mu).abs() <= (tolerance or 0.0) * mu) | (mu == 0)
        converged = tolerance is not None and bool(near.all())
        if converged or iterations >= max_iterations:
            break
        a, b = next_a, next_b
        iterations += 1
    return u + a.log(), v + b.log(), iterations, converged


def _scale(kernel: Tensor, a: Tensor, b: Tensor, mu: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next scalings of rows and columns, and the rows' sums under b; the kernel is read once."""
    rows, columns, a = torch.empty_like(a), torch.zeros_like(b), torch.empty_like(a)
    for part in row_blocks(*kernel.shape, kernel.device):
        torch.mv(kernel[part], b, out=rows[part])
        a[part] = torch.where(mu[part] > 0, mu[part] / rows[part], 1.0)
        columns.addmv_(kernel[part].t(), a[part])
    return a, torch.where(nu > 0, nu / columns, 1.0), rows


def _in_range(a: Tensor, b: Tensor) -> bool:
    low = torch.minimum(a.amin(), b.amin())
    high = torch.maximum(a.amax(), b.amax())
    return bool((low > 1 / SCALING_LIMIT) & (high < SCALING_LIMIT))


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
    """One row and one column update in the log domain; masked points stay at −inf."""
    v = torch.where(log_nu.isfinite(), v, -math.inf)
    u = torch.where(log_mu.isfinite(), log_mu - torch.logsumexp(scores + v, dim=1), -math.inf)
    v = torch.where(log_nu.isfinite(), log_nu - torch.logsumexp(scores + u[:, None], dim=0), -math.inf)
    return u, v


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


def drop_unmatched(assignment: Assignment) -> Assignment:
    """Points for which the dustbin is likelier than any partner are nobody's partner any more.

    LoFTR's reading of a transport plan; others may then be mutual partners of whom they would have preferred.
    """
    log_scores = assignment.log_scores
    if 0 in log_scores.shape[1:]:
        return assignment
    alone0 = assignment.log_unmatched0 > log_scores.amax(2)
    alone1 = assignment.log_unmatched1 > log_scores.amax(1)
    alone = alone0.unsqueeze(2) | alone1.unsqueeze(1)
    return replace(assignment, log_scores=log_scores.masked_fill(alone, -math.inf))


def mutual_matches(log_scores: Tensor, threshold: float, doubt: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mutual best entries of (N, M) log probabilities above `threshold`, best first.

    Args:
        log_scores: (N, M) of one pair.
        threshold: of the probability.
        doubt: number of matches to be expected at which the threshold is twice as high; with S expected, the
            sum of the probabilities above it, it is threshold · (1 + doubt / S). A lone match is less
            credible than one among hundreds: pictures of different places give a few.

    Returns:
        indices (K, 2) int64 and probabilities (K,) float32.
    """
    rows, columns = log_scores.shape
    if not rows or not columns:
        return log_scores.new_zeros(0, 2, dtype=torch.int64), log_scores.new_zeros(0)
    best, partner = log_scores.max(dim=1)
    here = torch.arange(rows, device=log_scores.device)
    # Along columns the values alone are several times as fast as the places; of equal rows the first wins.
    top = best == log_scores.amax(dim=0)[partner]
    first = here.new_full((columns,), rows).scatter_reduce(0, partner[top], here[top], "amin")
    keep = (first[partner] == here) & (best > math.log(threshold) if threshold > 0 else best > -math.inf)
    indices = torch.stack([here[keep], partner[keep]], dim=1)
    probabilities = best[keep].exp().clamp(max=1.0)
    order = torch.argsort(probabilities, descending=True, stable=True)
    indices, probabilities = indices[order], probabilities[order]
    if doubt and len(probabilities):
        credible = probabilities > threshold * (1 + doubt / probabilities.sum())
        indices, probabilities = indices[credible], probabilities[credible]
    return indices, probabilities
