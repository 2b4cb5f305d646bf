"""When a pair may stop early and which points it may drop.

LightGlue (Lindenberger et al. 2023), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from matcher.config import MatchingPolicy, RefinementConfig
from matcher.match.blocks import Layout, image_sums, widest_float
from matcher.match.context import Tokens, build_layer
from matcher.match.sinkhorn import PairPrediction
from matcher.match.steering import NEGLIGIBLE, confidence_threshold

# --- adaptivity: When a pair may stop early and which points it may drop.


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


# --- states: What the network's one run yields after each layer: states, decisions, and assignments on
# demand.


@dataclass(frozen=True, eq=False)
class LayerState:
    """The pairs still running, after one layer.

    Nothing but the tokens is computed before it is asked for, and everything is computed once.
    """

    network: nn.Module  # the `MatchingNetwork` that runs
    policy: MatchingPolicy
    layer: int  # 0 is the first
    before: Tokens  # what the layer took
    tokens: Tokens  # what it gave, before any point is dropped
    totals: dict[int, int]  # points of each input pair before any pruning

    @property
    def is_last(self) -> bool:
        """Whether this is the network's last layer, where every pair stops."""
        return self.layer == len(self.network.layers) - 1

    @cached_property
    def confidences(self) -> Tensor | None:
        """(T,) probability that the last layer would not change a point's partner; None without heads."""
        if self.layer >= len(self.network.confidence):
            return None
        return self.network.confidences(self.tokens.x, self.layer)

    @cached_property
    def match_probabilities(self) -> Tensor:
        """(T,) probability that a point has a partner."""
        return self.network.match_probabilities(self.tokens.x, self.layer)

    @cached_property
    def confident(self) -> Tensor | None:
        """(T,) bool: points whose confidence is above this layer's threshold; None without heads."""
        if self.confidences is None:
            return None
        return self.confidences > confidence_threshold(self.layer, len(self.network.layers))

    @cached_property
    def decision(self) -> Decision:
        """Which pairs stop here, and which points are dropped."""
        if self.is_last:
            return Decision(tuple(range(len(self.tokens.pairs))), None, None)
        if not (self.policy.early_exit or self.policy.pruning):
            return Decision((), None, None)
        return decide(
            self.tokens,
            self.confident,
            self.match_probabilities,
            self.totals,
            self.policy,
            predicted=self.network.config.match_probability,
        )

    @property
    def exiting(self) -> tuple[int, ...]:
        """Entries of the layout that stop here."""
        return self.decision.exiting

    @cached_property
    def dropped(self) -> Tensor:
        """(T,) bool: points that neither go on nor take part in the assignment of a pair that stops here."""
        starts, exits = self.tokens.layout.starts, torch.zeros_like(self.tokens.index, dtype=torch.bool)
        for entry in self.exiting:
            exits[starts[2 * entry] : starts[2 * entry + 2]] = True
        everything = torch.ones_like(exits)
        assigned, kept = (everything if mask is None else mask for mask in self.decision[1:])
        return ~torch.where(exits, assigned, kept)

    @cached_property
    def remaining(self) -> Tokens:
        """What the next layer takes."""
        exiting, _, kept = self.decision
        if kept is None and not exiting:
            return self.tokens
        staying = [entry for entry in range(len(self.tokens.pairs)) if entry not in exiting]
        return self.tokens.keep(self._everything if kept is None else kept, staying)

    def assign(
        self, entries: Sequence[int] | None = None, *, record_errors: bool = False
    ) -> dict[int, PairPrediction]:
        """Assignments of some pairs as the network gives them if it stops here.

        Args:
            entries: of the layout; those that stop here when absent.
            record_errors: keep the marginal error of every Sinkhorn iteration.

        Returns:
            By input pair.
        """
        entries = self.exiting if entries is None else tuple(entries)
        if not entries:
            return {}
        tokens, assigned = self.tokens, self.decision.assigned
        if assigned is not None or len(entries) < len(tokens.pairs):
            tokens = tokens.keep(self._everything if assigned is None else assigned, list(entries))
        return self.network.assign(tokens, self.layer, record_errors=record_errors)

    @property
    def _everything(self) -> Tensor:
        return torch.ones_like(self.tokens.index, dtype=torch.bool)


# --- refinement: Matches of cells, moved to a fraction of a pixel (LoFTR, Sun et al. 2021, section 3.4).


class Refinement(nn.Module):
    """A window of the fine map around either cell, attention between the two, and the expected position.

    Its parameters are `reduce` and `merge` (the published fine_preprocess.down_proj and merge_feat) and
    `layers.{n}` (loftr_fine), which are those of the context.
    """

    def __init__(self, config: RefinementConfig, coarse_dim: int) -> None:
        super().__init__()
        dim = config.context.dim
        self.config = config
        self.reduce = nn.Linear(coarse_dim, dim)
        self.merge = nn.Linear(2 * dim, dim)
        self.layers = nn.ModuleList(build_layer(config.context) for _ in range(config.context.depth))

    def forward(
        self, states: tuple[Tensor, Tensor], maps: tuple[Tensor, Tensor], cells: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Where in image 1 the centre of image 0's window lies, K matches of one pair.

        Args:
            states: of the matched cells in image 0 and 1 after the context, (K, coarse_dim) each.
            maps: fine, (C, h, w) of either image.
            cells: column and row, (K, 2) each.

        Returns:
            (K, 2) xy offsets from image 1's cells, in cells of the coarse grid.
        """
        count, size = len(cells[0]), self.config.window**2
        if not count:
            return cells[0].new_zeros(0, 2)
        windows = [self._window(*side) for side in zip(states, maps, cells, strict=True)]
        tokens = torch.stack(windows, dim=1).flatten(0, 2)
        layout = Layout(((size, size),) * count)
        for layer in self.layers:
            tokens = layer(tokens, None, layout)
        first, second = tokens.view(count, 2, size, -1).unbind(1)
        similarity = second @ first[:, size // 2, :, None] / tokens.shape[-1] ** 0.5
        steps = torch.cartesian_prod(self._steps(tokens), self._steps(tokens)).flip(-1)
        return similarity.squeeze(-1).softmax(dim=-1) @ steps / self.config.stride

    def _steps(self, like: Tensor) -> Tensor:
        side = self.config.window
        return torch.arange(side, device=like.device, dtype=like.dtype) - side // 2

    def _window(self, states: Tensor, fine: Tensor, cells: Tensor) -> Tensor:
        """(K, window², dim) what lies around cells on the map, zeros beyond it, with the cells' states."""
        x, y = (cells * self.config.stride).unsqueeze(-1).add(self._steps(cells)).long().unbind(1)
        height, width = fine.shape[-2:]
        inside = ((y >= 0) & (y < height)).unsqueeze(2) & ((x >= 0) & (x < width)).unsqueeze(1)
        taken = fine[:, y.clamp(0, height - 1).unsqueeze(2), x.clamp(0, width - 1).unsqueeze(1)]
        window = (taken * inside).permute(1, 2, 3, 0).flatten(1, 2)
        state = self.reduce(states).unsqueeze(1).expand(-1, window.shape[1], -1)
        return self.merge(torch.cat([window, state], dim=-1))
