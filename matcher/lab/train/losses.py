"""Losses: negative log-likelihood of the ground-truth assignment, matchability, positions, confidences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.data.matches import UNMATCHED
from matcher.match.assignment import dual_softmax

POSITION_SCALE = 0.05  # in normalised positions


def log_dual_softmax(scores: Tensor) -> Tensor:
    """Log P (B, N+1, M+1) of `dual_softmax`; the corner, which no loss reads, is 0."""
    found = dual_softmax(scores)
    rows = torch.cat([found.log_scores, found.log_unmatched0.unsqueeze(2)], dim=2)
    return torch.cat([rows, F.pad(found.log_unmatched1, (0, 1)).unsqueeze(1)], dim=1)


def assignment_loss(log_p: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Mean −log P of ground-truth matches and of the dustbins of unmatched points, weighted equally.

    SuperGlue, eq. 10.

    Args:
        log_p: (B, N+1, M+1), from `log_assignment`.
        partner0, partner1: (B, N), (B, M) ground-truth partners, UNMATCHED or IGNORED.
    """
    matched = log_p[:, :-1].gather(2, partner0.clamp_min(0).unsqueeze(2)).squeeze(2)
    unmatched0 = _mean(log_p[:, :-1, -1], partner0 == UNMATCHED)
    unmatched1 = _mean(log_p[:, -1, :-1], partner1 == UNMATCHED)
    return -0.5 * _mean(matched, partner0 >= 0) - 0.25 * (unmatched0 + unmatched1)


def matchability_loss(scores: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Binary cross-entropy that calibrates the matchability logits, so that pruning can use a threshold."""
    return _matchability_loss(-scores[:, :-1, -1], partner0) + _matchability_loss(
        -scores[:, -1, :-1], partner1
    )


def mean_similarity_loss(scores: Tensor) -> Tensor:
    """Mean square of each point's mean similarity, over the points of both images.

    What is added to all scores of a point, its dustbin's included, changes no assignment, so that nothing in
    `assignment_loss` keeps it small: without this, similarities drift to hundreds, where rounding and the
    limited number of Sinkhorn iterations spoil assignments.

    Args:
        scores: (B, N+1, M+1) with dustbins, as the head gives them.
    """
    similarities = scores[:, :-1, :-1]
    return similarities.mean(2).square().mean() + similarities.mean(1).square().mean()


def correspondence_loss(predicted: Tensor, ground_truth: Tensor, visible: Tensor) -> Tensor:
    """Robust distance of predicted positions (…, N, 2) from the ground truth, over `visible` points (…, N).

    Logarithmic: steep for small errors, which rewards accuracy, and flat for outliers.
    """
    distance = (predicted - ground_truth).norm(dim=-1)
    return 0.25 * _mean(torch.log1p(distance / POSITION_SCALE), visible)


def _matchability_loss(logits: Tensor, partner: Tensor) -> Tensor:
    known = (partner >= 0) | (partner == UNMATCHED)
    return _mean(F.binary_cross_entropy_with_logits(logits, (partner >= 0).float(), reduction="none"), known)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum() / chosen.sum().clamp_min(1)


def decisions(log_p: Tensor) -> Tensor:
    """(B, N + M) the assigned point of the other image for each point, or UNMATCHED."""
    columns, rows = log_p.shape[2] - 1, log_p.shape[1] - 1
    partner0, partner1 = log_p[:, :-1].argmax(2), log_p[:, :, :-1].argmax(1)
    return torch.cat(
        [p.masked_fill(p == dustbin, UNMATCHED) for p, dustbin in ((partner0, columns), (partner1, rows))],
        dim=1,
    )


def confidence_loss(logits: Tensor, current: Tensor, final: Tensor) -> Tensor:
    """Binary cross-entropy of "this layer has the same assignment as the last one" (LightGlue, section 3.3).

    Points that are unmatched in the last layer are left out: nearly all of them are unmatched from the first
    layer on, and would dominate the loss.

    Args:
        logits: (B, N + M) of the confidence head.
        current, final: (B, N + M) `decisions` of this and of the last layer.
    """
    same = (current == final).float()
    return _mean(F.binary_cross_entropy_with_logits(logits, same, reduction="none"), final >= 0)


def match_probability_loss(logits: Tensor, final: Tensor) -> Tensor:
    """Binary cross-entropy of "matched in the last layer"; arguments as in `confidence_loss`."""
    return F.binary_cross_entropy_with_logits(logits, (final >= 0).float())
