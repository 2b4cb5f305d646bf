"""Reading matches off an assignment: entries that are the best of their row and of their column."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class MutualBest(NamedTuple):
    """The best partner of every row."""

    scores: Tensor  # (B, N) log probabilities
    partners: Tensor  # (B, N) int64
    mutual: Tensor  # (B, N) bool: the row is its column's best too, the first of equal ones


def best_of_both(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's best column, and whether no row is better for that column; equal rows all count.

    Args:
        scores: (B, N, M) with M > 0.

    Returns:
        best scores (B, N), their columns (B, N) int64, and whether each is its column's best too (B, N) bool.
    """
    best, partner = scores.max(dim=2)
    # Along columns the values alone are several times as fast as the indices.
    return best, partner, best == scores.amax(dim=1).gather(1, partner)


def mutual_best(log_scores: Tensor) -> MutualBest:
    """As `best_of_both`, but of equal rows only the first counts, so that no column has two."""
    if 0 in log_scores.shape[1:]:
        nowhere = log_scores.new_zeros(log_scores.shape[:2], dtype=torch.int64)
        return MutualBest(torch.full_like(nowhere, -torch.inf, dtype=torch.float32), nowhere, nowhere > 0)
    best, partner, top = best_of_both(log_scores)
    rows = log_scores.shape[1]
    here = torch.arange(rows, device=log_scores.device).expand_as(partner)
    first = here.new_full((len(best), log_scores.shape[2]), rows)
    first.scatter_reduce_(1, partner, torch.where(top, here, rows), "amin")
    return MutualBest(best, partner, first.gather(1, partner) == here)


def mutual_matches(
    log_scores: Tensor, threshold: float, threshold_doubles_at: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`credible_matches` of (N, M) log probabilities."""
    return credible_matches(mutual_best(log_scores.unsqueeze(0)), threshold, threshold_doubles_at)


def credible_matches(
    found: MutualBest, threshold: float, threshold_doubles_at: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mutual best entries of one pair above `threshold`, best first.

    Args:
        found: B = 1.
        threshold: of the probability.
        threshold_doubles_at: expected matches at which the threshold is twice as high. With S expected, the
            sum of the probabilities above it, it is threshold · (1 + threshold_doubles_at / S): a lone match
            is less credible than one among hundreds, since images of unrelated scenes give a few.

    Returns:
        indices (K, 2) int64 and probabilities (K,) float32.
    """
    best, partner, mutual = (x[0] for x in found)
    keep = (mutual & (best > (math.log(threshold) if threshold > 0 else -math.inf))).nonzero().squeeze(1)
    indices = torch.stack([keep, partner[keep]], dim=1)
    probabilities = best[keep].exp().clamp(max=1.0)
    order = torch.argsort(probabilities, descending=True, stable=True)
    indices, probabilities = indices[order], probabilities[order]
    if threshold_doubles_at and len(probabilities):
        credible = probabilities > threshold * (1 + threshold_doubles_at / probabilities.sum())
        indices, probabilities = indices[credible], probabilities[credible]
    return indices, probabilities
