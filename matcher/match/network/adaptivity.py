"""When a pair may stop early and which points it may drop.

LightGlue (Lindenberger et al. 2023), section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from matcher.config import MatchingPolicy
from matcher.match.network.packed import Layout

NEGLIGIBLE = 0.5  # points: a pair that expects fewer matches than this need not go on


@dataclass(frozen=True, eq=False)
class Tokens:
    """The live points of the pairs still running, packed."""

    x: Tensor  # (T, dim)
    rotations: Tensor | None  # (T, 2, head_dim/2)
    index: Tensor  # (T,) int64, the input point each token is
    layout: Layout
    pairs: tuple[int, ...]  # which input pair each entry of the layout is
    positions: Tensor  # (T, 2) normalised positions
    predicted: Tensor | None = None  # (T, 2) places of partners that the last layer stated, if guided

    def keep(self, keep: Tensor, pairs: list[int]) -> Tokens:
        """Only the tokens marked in `keep` (T,) bool and only the entries `pairs` of the layout."""
        lengths = [int(n) for n in _sums(keep, self.layout)]
        counts = tuple((lengths[2 * p], lengths[2 * p + 1]) for p in pairs)
        alive = torch.zeros_like(keep)
        for p in pairs:
            alive[self.layout.starts[2 * p] : self.layout.starts[2 * p + 2]] = True
        chosen = (keep & alive).nonzero().squeeze(1)
        return replace(
            self,
            x=self.x[chosen],
            rotations=None if self.rotations is None else self.rotations[chosen],
            index=self.index[chosen],
            positions=self.positions[chosen],
            predicted=None if self.predicted is None else self.predicted[chosen],
            layout=Layout(counts),
            pairs=tuple(self.pairs[p] for p in pairs),
        )


def confidence_threshold(layer: int, depth: int) -> float:
    """λ of layer 0 … depth−1: 0.8 + 0.1·exp(−4ℓ/L), eq. 11: early layers must be surer."""
    return 0.8 + 0.1 * math.exp(-4.0 * layer / depth)


def ready_by_confidence(
    tokens: Tokens, confident: Tensor, totals: list[int], config: MatchingPolicy
) -> list[int]:
    """Entries of the layout whose share of confident points lets them stop.

    Args:
        tokens: the live points.
        confident: (T,) bool.
        totals: points of each input pair before any pruning; dropped points count as confident.
        config: with `exit_share`.
    """
    doubtful = _per_pair(~confident, tokens.layout)
    return [
        entry
        for entry, pair in enumerate(tokens.pairs)
        if doubtful[entry] < (1 - config.exit_share) * totals[pair]
    ]


def ready_by_match_probability(
    tokens: Tokens, confident: Tensor, match_probability: Tensor, config: MatchingPolicy
) -> list[int]:
    """Entries of the layout where enough of the matches to be expected are there already.

    Points without a partner are sure of that from the first layer on, so every point counts by its match
    probability.

    Args:
        tokens: the live points.
        confident: (T,) bool.
        match_probability: (T,) probability of a partner at the last layer.
        config: with `exit_share`.
    """
    expected = _per_pair(match_probability.double(), tokens.layout)
    doubtful = _per_pair(torch.where(confident, 0.0, match_probability).double(), tokens.layout)
    return [
        entry
        for entry in range(len(tokens.pairs))
        if doubtful[entry] < (1 - config.exit_share) * expected[entry] + NEGLIGIBLE
    ]


def keep_mask(matchable: Tensor, confident: Tensor, config: MatchingPolicy) -> Tensor:
    """(T,) bool: points that may still find a partner, by its probability `matchable` (T,); without pruning
    all may."""
    if not config.pruning:
        return torch.ones_like(confident)
    keep = matchable > config.prune_matchability
    return keep | ~confident if config.prune_confident_only else keep


def keep_unless_few(keep: Tensor, layout: Layout, least: float) -> Tensor:
    """`keep` (T,) bool, but all points of pairs that would lose less than the share `least`.

    Pictures with equally many points run faster than those that differ by a few.
    """
    kept, starts = _per_pair(keep.int(), layout), layout.starts[::2]
    lengths = [end - start for start, end in pairwise(starts)]
    spared = torch.tensor([k > (1 - least) * n for k, n in zip(kept, lengths, strict=True)])
    return keep | spared.repeat_interleave(torch.tensor(lengths)).to(keep.device)


def _per_pair(values: Tensor, layout: Layout) -> list[float]:
    """Sums of values (T,) over both pictures of each entry of the layout."""
    sums = _sums(values, layout).tolist()
    return [a + b for a, b in zip(sums[0::2], sums[1::2], strict=True)]


def _sums(values: Tensor, layout: Layout) -> Tensor:
    """Sums of values (T,) over each picture of the layout."""
    starts = torch.tensor(layout.starts, device=values.device)
    sums = values.cumsum(0)
    totals = torch.cat([sums.new_zeros(1), sums])
    return totals[starts[1:]] - totals[starts[:-1]]
