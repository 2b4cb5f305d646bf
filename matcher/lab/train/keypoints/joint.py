"""A matcher that is trained along with the front end: the labels of a batch's keypoints, its loss, its F1.

Descriptors alone cannot know what a matcher makes of them; its loss reaches them here, as in SuperGlue's
end-to-end training (Sarlin et al. 2020, section 5.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matcher.data.features import Features
from matcher.lab.pairs.dense import HIDDEN_STATE, UNKNOWN_STATE, VISIBLE_STATE
from matcher.lab.train.keypoints.batches import ImageBatch
from matcher.lab.train.keypoints.recipe import JointRecipe
from matcher.lab.train.labelled_layers import Pruning, labelled_layers
from matcher.lab.train.labels import IGNORED, PairBatch
from matcher.lab.train.losses import decisions
from matcher.lab.train.matching_loss import assignments, matching_loss
from matcher.lab.train.on_device.labels import partners
from matcher.lab.train.on_device.small import constant
from matcher.lab.train.on_device.transfer import Transferred
from matcher.lab.train.recipe import OptimiserRecipe, PairRecipe
from matcher.lab.train.stage import mixed_precision
from matcher.match.network.model import MatchingNetwork
from matcher.match.steering import turned_by

OPTIMISER = OptimiserRecipe(inner_layers=1)
LABELS = PairRecipe()


@dataclass(frozen=True, eq=False)
class BatchKeypoints:
    """The keypoints of a batch of 2B images; images 2b and 2b + 1 are a pair."""

    positions: Tensor  # (2B, K, 2), the strongest first
    descriptors: Tensor  # (2B, K, D), as the images are turned
    corresponding: Tensor  # (2B, K, 2) positions in the other image
    visible: Tensor  # (2B, K) bool, in the other image
    valid: Tensor  # (2B, K) bool, keypoints that exist

    def first(self, pairs: int) -> BatchKeypoints:
        """Those of the first pairs."""
        return BatchKeypoints(*(values[: 2 * pairs] for values in vars(self).values()))

    def strongest(self, count: int) -> BatchKeypoints:
        """The first of each image."""
        return BatchKeypoints(*(values[:, :count] for values in vars(self).values()))


def labelled(points: BatchKeypoints, batch: ImageBatch, count: int) -> PairBatch:
    """The first `count` keypoints of each image as pairs with ground-truth partners.

    Keypoints are ignored that do not exist, whose visibility is unknown, or that are hidden beside a contour.
    """
    points = points.strongest(count)
    positions, corresponding = points.positions.detach(), points.corresponding.detach()
    visible, valid = points.visible, points.valid
    hidden = torch.where(batch.surely_hidden(positions), HIDDEN_STATE, UNKNOWN_STATE)
    states = torch.where(visible, VISIBLE_STATE, hidden).masked_fill(~valid, UNKNOWN_STATE)
    found = corresponding.masked_fill(~visible[..., None], torch.nan)
    there = positions.masked_fill(~valid[..., None], torch.inf)
    labels = partners(
        there[0::2],
        there[1::2],
        Transferred(found[0::2], states[0::2]),
        Transferred(found[1::2], states[1::2]),
        LABELS,
    )
    sides = [_features(points, batch, side) for side in (0, 1)]
    return PairBatch(*sides, *labels, found[0::2], found[1::2])


def _features(points: BatchKeypoints, batch: ImageBatch, side: int) -> Features:
    """The keypoints of one image of each pair, turned as the first image of the pair."""
    height, width = batch.pixels.shape[2:]
    positions = points.positions[side::2].detach()
    features = Features.of_valid(
        keypoints=positions,
        descriptors=points.descriptors[side::2].float(),
        size=constant((width, height), positions.dtype, positions.device).expand(len(positions), 2),
        view_orientation=torch.ones(len(positions), dtype=torch.int64, device=positions.device),
        kind="learned",
    )
    return turned_by(features, -batch.turns[side::2] % 4)


def drawn_count(recipe: JointRecipe, rng: torch.Generator) -> int:
    """Keypoints of each image that are matched in a step."""
    return recipe.points[int(torch.randint(len(recipe.points), (1,), generator=rng))]


def matched_pairs(points: BatchKeypoints, batch: ImageBatch, count: int, recipe: JointRecipe) -> PairBatch:
    """As `labelled`, of as many of the pairs as the recipe has points for."""
    pairs = len(batch)
    if recipe.points_per_batch:
        pairs = min(pairs, max(1, recipe.points_per_batch // (2 * count)))
    return labelled(points.first(pairs), batch.first(pairs), count)


def joint_loss(
    matcher: MatchingNetwork,
    pairs: PairBatch,
    recipe: JointRecipe,
    device: torch.device,
    rng: torch.Generator,
) -> Tensor:
    """The loss of the matcher, with gradients to the descriptors."""
    optimiser = replace(OPTIMISER, kept_shares=recipe.kept_shares)
    pruning = Pruning.drawn(recipe.kept_shares, len(matcher.layers), rng)
    layers = labelled_layers(matcher, pairs, device, pruning, align=False)
    return matching_loss(matcher, layers, optimiser, rng)


@torch.no_grad()
def match_scores(
    matcher: MatchingNetwork, batches: Sequence[PairBatch], device: torch.device
) -> dict[str, float]:
    """Precision, recall and F1 of the most probable partners, over keypoints whose partner is known."""
    counts = torch.stack([_counted(matcher, pairs, device) for pairs in batches]).sum(0)
    right, found, wanted = counts.tolist()
    precision, recall = right / max(found, 1), right / max(wanted, 1)
    f1 = 2 * right / max(found + wanted, 1)
    return {"precision": precision, "recall": recall, "f1": f1}


def _counted(matcher: MatchingNetwork, pairs: PairBatch, device: torch.device) -> Tensor:
    """(3,) right matches, matches, and matches there are."""
    sides = labelled_layers(matcher, pairs, device, align=False)[-1].sides
    with mixed_precision(device):
        scores = matcher.scores(*sides, len(matcher.layers) - 1)
    rounds = matcher.config.assignment.consensus
    found = decisions(assignments(matcher, scores, sides, OPTIMISER, rounds)[-1])
    wanted = torch.cat([pairs.partner0, pairs.partner1], dim=1).to(device)
    known = wanted != IGNORED
    return torch.stack(
        [
            ((found == wanted) & (wanted >= 0)).sum(),
            ((found >= 0) & known).sum(),
            (wanted >= 0).sum(),
        ]
    )
