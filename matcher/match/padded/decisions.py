"""Early exit and pruning as masks, by the rules of `matcher.match.network.adaptivity`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matcher.config import MatchingPolicy
from matcher.match.network.adaptivity import keep_mask
from matcher.match.rules import NEGLIGIBLE


class LayerDecision(NamedTuple):
    """What happens to pairs and points after a layer."""

    stops: Tensor  # (B,) bool
    live: Tensor  # (B, P) bool, the points that go on, or are assigned where the pair stops


def decide_masked(
    live: Tensor,
    confident: Tensor,
    probability: Tensor,
    totals: Tensor,
    policy: MatchingPolicy,
    *,
    predicted: bool,
) -> LayerDecision:
    """Which pairs stop after a layer, and which points stay.

    Args:
        live: (B, P) bool, points of both images that were not dropped.
        confident: (B, P) bool.
        probability: (B, P) of a partner.
        totals: (B,) points of each pair before any pruning.
        policy: with exit and pruning.
        predicted: whether heads of their own predict `probability`.
    """
    keep = keep_mask(probability, confident, policy)
    stops = torch.zeros_like(live[:, 0])
    if policy.early_exit and predicted:
        expected = (probability.double() * live).sum(1)
        open_ = (torch.where(confident, 0.0, probability).double() * live).sum(1)
        stops = open_ < (1 - policy.exit_share) * expected + NEGLIGIBLE
    elif policy.early_exit:
        stops = (~confident & live).sum(1) < (1 - policy.exit_share) * totals.double()
    spared = (keep & live).sum(1) > (1 - policy.min_pruned_share) * live.sum(1).double()
    kept = keep | spared[:, None]
    assigned = keep if predicted else torch.ones_like(keep)
    return LayerDecision(stops, live & torch.where(stops[:, None], assigned, kept))
