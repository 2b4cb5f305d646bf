"""From scores with dustbins to a soft partial assignment: by optimal transport or by dual softmax."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.config import AssignmentConfig
from matcher.match.network.blocks import exponentials, raised, row_blocks
from matcher.match.prediction import Assignment
from matcher.match.sinkhorn import Potentials, sinkhorn

LEAST_SUM = 1e-24  # sums below it may hold numbers that were cut off


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
    if bool((columns <= LEAST_SUM).any()):
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
