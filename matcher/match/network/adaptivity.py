"""When a pair may stop early and which points it may drop.

LightGlue (Lindenberger et al. 2023), section 3.3.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from matcher.config import MatchingPolicy
from matcher.match.network.packed import Layout, image_sums
from matcher.match.network.precision import widest_float
from matcher.match.network.tokens import Tokens
from matcher.match.rules import NEGLIGIBLE


class Decision(NamedTuple):
    """What happens to the pairs and points of a batch after a layer."""

    exiting: tuple[int, ...]  # entries of the layout that stop here
    assigned: Tensor | None  # (T,) bool, points that are assigned if their pair stops here; None: all
    kept: Tensor | None  # (T,) bool, points that go on if their pair does; None: all


def decide(
    tokens: Tokens,
    confident: Tensor,
    probability: Tensor,
    totals: dict[int, int],
    policy: MatchingPolicy,
    *,
    predicted: bool,
) -> Decision:
    """Which pairs stop after a layer, and which of their points are dropped.

    Args:
        tokens: the live points.
        confident: (T,) bool, points that are confident of their partner.
        probability: (T,) of a match.
        totals: points of each input pair before any pruning.
        policy: with exit and pruning.
        predicted: whether heads of their own predict `probability`. Then points that are unlikely to match
            take no part in an exiting pair's assignment; without (LightGlue) all live points do.
    """
    keep, exiting = keep_mask(probability, confident, policy), []
    if policy.early_exit and predicted:
        exiting = ready_by_match_probability(tokens, confident, probability, policy)
    elif policy.early_exit:
        exiting = ready_by_confidence(tokens, confident, totals, policy)
    kept = keep_unless_few(keep, tokens.layout, policy.min_pruned_share)
    return Decision(tuple(exiting), keep if predicted else None, None if bool(kept.all()) else kept)


def ready_by_confidence(
    tokens: Tokens, confident: Tensor, totals: dict[int, int], policy: MatchingPolicy
) -> list[int]:
    """Entries of the layout whose share of confident points lets them stop.

    Args:
        tokens: the live points.
        confident: (T,) bool.
        totals: points of each input pair before any pruning; dropped points count as confident.
        policy: with `exit_share`.
    """
    unconfident = _per_pair(~confident, tokens.layout)
    return [
        entry
        for entry, pair in enumerate(tokens.pairs)
        if unconfident[entry] < (1 - policy.exit_share) * totals[pair]
    ]


def ready_by_match_probability(
    tokens: Tokens, confident: Tensor, probability: Tensor, policy: MatchingPolicy
) -> list[int]:
    """Entries of the layout where enough of the expected matches are found already.

    Points without a partner are confident of that from the first layer on, so every point counts by its match
    probability.

    Args:
        tokens: the live points.
        confident: (T,) bool.
        probability: (T,) of a partner at the last layer.
        policy: with `exit_share`.
    """
    probability = probability.to(widest_float(probability.device))
    expected = _per_pair(probability, tokens.layout)
    unconfident = _per_pair(probability.masked_fill(confident, 0.0), tokens.layout)
    return [
        entry
        for entry in range(len(tokens.pairs))
        if unconfident[entry] < (1 - policy.exit_share) * expected[entry] + NEGLIGIBLE
    ]


def keep_mask(probability: Tensor, confident: Tensor, policy: MatchingPolicy) -> Tensor:
    """(T,) bool: points that may still find a partner, by its probability (T,); without pruning all may."""
    if not policy.pruning:
        return torch.ones_like(confident)
    keep = probability > policy.prune_matchability
    return keep | ~confident if policy.prune_confident_only else keep


def keep_unless_few(keep: Tensor, layout: Layout, least: float) -> Tensor:
    """`keep` (T,) bool, but all points of pairs that would lose less than the share `least`.

    Images with equally many points run faster than those that differ by a few.
    """
    kept, starts = _per_pair(keep.int(), layout), layout.starts[::2]
    lengths = [end - start for start, end in pairwise(starts)]
    spared = torch.tensor([k > (1 - least) * n for k, n in zip(kept, lengths, strict=True)])
    return keep | spared.repeat_interleave(torch.tensor(lengths)).to(keep.device)


def _per_pair(values: Tensor, layout: Layout) -> list[float]:
    """Sums of values (T,) over both images of each entry of the layout."""
    sums = image_sums(values, layout).tolist()
    return [a + b for a, b in zip(sums[0::2], sums[1::2], strict=True)]
