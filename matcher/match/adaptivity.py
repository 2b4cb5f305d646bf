"""When a pair may stop early and which points it may drop, on NumPy arrays.

After LightGlue (Lindenberger et al. 2023), section 3.3; `decide` says what is otherwise in the default.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from matcher.config import MatchingPolicy

NEGLIGIBLE = 0.5  # matches: a pair of which fewer than this are still open need not go on


def confidence_threshold(layer: int, depth: int) -> float:
    """λ of layer 0 … depth−1: 0.8 + 0.1·exp(−4ℓ/L), eq. 11: early layers need more confidence."""
    return 0.8 + 0.1 * math.exp(-4.0 * layer / depth)


class Decision(NamedTuple):
    """What happens to pairs and their points after a layer."""

    stops: np.ndarray  # (B,) bool
    assigned: np.ndarray  # (B, T) bool, points that are assigned if their pair stops here
    kept: np.ndarray  # (B, T) bool, points that go on if their pair does


def decide(
    valid: np.ndarray,
    confident: np.ndarray,
    probability: np.ndarray,
    totals: np.ndarray,
    policy: MatchingPolicy,
    *,
    predicted: bool,
) -> Decision:
    """Which pairs stop after a layer, and which of their points are dropped.

    Of points of both images (B, T): `valid` were not dropped before, `confident` are sure of their partner,
    `probability` is that of having one; `totals` (B,) count those before any pruning.

    - As in LightGlue a pair stops when enough of its points are confident, dropped ones included.
    - Where the probability is `predicted`, by heads of its own, it stops when enough of the expected matches
      are found, as points without a partner are confident of that from the first layer on. So each counts by
      its probability, and unlikely ones take no part in the assignment.
    """
    keep, stops = valid, np.zeros(len(valid), dtype=bool)
    if policy.pruning:
        keep = probability > policy.prune_matchability
        keep = valid & (keep | ~confident if policy.prune_confident_only else keep)
    if policy.early_exit and predicted:
        expected = probability * valid
        unsettled = (expected * ~confident).sum(1)
        stops = unsettled < (1 - policy.exit_share) * expected.sum(1) + NEGLIGIBLE
    elif policy.early_exit:
        stops = (valid & ~confident).sum(1) < (1 - policy.exit_share) * totals
    # Dropping few points costs more time than it saves.
    few = keep.sum(1) > (1 - policy.min_pruned_share) * valid.sum(1)
    return Decision(stops, keep if predicted else valid, keep | (few[:, None] & valid))


def can_be_cut(matcher: object) -> bool:
    """Whether any number of a matcher's layers gives an assignment."""
    return hasattr(matcher, "first_layers") and matcher.model.config.assignment.every_layer


def with_layers(
    matcher: object, layers: int, iterations: int | None = None, *, pruning: bool = True
) -> object:
    """The first layers of an attention matcher, with at most so many Sinkhorn iterations; others as they are.

    Without `pruning` no point is dropped.
    """
    if not can_be_cut(matcher) or (layers >= len(matcher.model.layers) and iterations is None):
        return matcher
    policy = matcher.model.config.policy
    policy = replace(policy, pruning=pruning and policy.pruning)
    return matcher.first_layers(layers, iterations).with_policy(policy)
