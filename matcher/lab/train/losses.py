"""Negative log likelihood of the true assignment, and the targets of the confidence heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.data.matches import UNMATCHED
from matcher.match.assignment import dual_softmax

STATEMENT_SCALE = 0.05  # of normalised positions


def log_dual_softmax(scores: Tensor) -> Tensor:
    """Log P (B, N+1, M+1) of `dual_softmax`; the corner, which no loss reads, is 0."""
    found = dual_softmax(scores)
    rows = torch.cat([found.log_scores, found.log_unmatched0.unsqueeze(2)], dim=2)
    return torch.cat([rows, F.pad(found.log_unmatched1, (0, 1)).unsqueeze(1)], dim=1)


def assignment_loss(log_p: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Mean −log P of true matches, and of the dustbins of unmatched points (SuperGlue, eq. 10), halves each.

    Args:
        log_p: (B, N+1, M+1), from `log_assignment`.
        partner0, partner1: (B, N), (B, M) true partners, UNMATCHED or IGNORED.
    """
    found = log_p[:, :-1].gather(2, partner0.clamp_min(0).unsqueeze(2)).squeeze(2)
    lonely0 = _mean(log_p[:, :-1, -1], partner0 == UNMATCHED)
    lonely1 = _mean(log_p[:, -1, :-1], partner1 == UNMATCHED)
    return -0.5 * _mean(found, partner0 >= 0) - 0.25 * (lonely0 + lonely1)


def matchability_loss(scores: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Binary cross-entropy that keeps the logits probabilities, so that pruning can have a threshold."""
    return _matchability_loss(-scores[:, :-1, -1], partner0) + _matchability_loss(
        -scores[:, -1, :-1], partner1
    )


def correspondence_loss(predicted: Tensor, truth: Tensor, seen: Tensor) -> Tensor:
    """How far predicted positions (…, N, 2) are from the true ones, over points marked in `seen` (…, N).

    Steep near the truth and flat far from it, so that precision is worth something and the lost are let go.
    """
    distance = (predicted - truth).norm(dim=-1)
    return 0.25 * _mean(torch.log1p(distance / STATEMENT_SCALE), seen)


def _matchability_loss(logits: Tensor, partner: Tensor) -> Tensor:
    known = (partner >= 0) | (partner == UNMATCHED)
    return _mean(F.binary_cross_entropy_with_logits(logits, (partner >= 0).float(), reduction="none"), known)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum() / chosen.sum().clamp_min(1)


def decisions(log_p: Tensor) -> Tensor:
    """(B, N + M) what each point is assigned to: a point of the other picture, or UNMATCHED."""
    columns, rows = log_p.shape[2] - 1, log_p.shape[1] - 1
    partner0, partner1 = log_p[:, :-1].argmax(2), log_p[:, :, :-1].argmax(1)
    return torch.cat(
        [p.masked_fill(p == dustbin, UNMATCHED) for p, dustbin in ((partner0, columns), (partner1, rows))],
        dim=1,
    )


def confidence_loss(logits: Tensor, here: Tensor, final: Tensor) -> Tensor:
    """Binary cross-entropy of "this layer decides as the last one does" (LightGlue, section 3.3).

    Points that the last layer leaves without a partner are not asked: nearly all are sure of that at once,
    and would hide those that matter.

    Args:
        logits: (B, N + M) of the confidence head.
        here, final: (B, N + M) decisions of this and of the last layer.
    """
    right = (here == final).float()
    return _mean(F.binary_cross_entropy_with_logits(logits, right, reduction="none"), final >= 0)


def match_probability_loss(logits: Tensor, final: Tensor) -> Tensor:
    """Binary cross-entropy of "the last layer finds a partner"; arguments as in `confidence_loss`."""
    return F.binary_cross_entropy_with_logits(logits, (final >= 0).float())
