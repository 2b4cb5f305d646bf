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
from matcher.data.matches import UNMATCHED
from matcher.lab.train.keypoints.batches import ImageBatch
from matcher.lab.train.keypoints.losses import other_of_pair
from matcher.lab.train.keypoints.recipe import JointRecipe
from matcher.lab.train.labelled_layers import Pruning, labelled_layers
from matcher.lab.train.labels import IGNORED, PairBatch
from matcher.lab.train.losses import decisions
from matcher.lab.train.matching_loss import assignments, matching_loss
from matcher.lab.train.recipe import OptimiserRecipe, PairRecipe
from matcher.lab.train.stage import mixed_precision
from matcher.match.network.model import MatchingNetwork
from matcher.match.steering import turned_by

OPTIMISER = OptimiserRecipe(inner_layers=1)
LABELS = PairRecipe()
_FAR = 1e4


@dataclass(frozen=True, eq=False)
class BatchKeypoints:
    """The keypoints of a batch of 2B images; images 2b and 2b + 1 are a pair."""

    positions: Tensor  # (2B, K, 2)
    descriptors: Tensor  # (2B, K, D), as the images are turned
    corresponding: Tensor  # (2B, K, 2) positions in the other image
    visible: Tensor  # (2B, K) bool, in the other image
    valid: Tensor  # (2B, K) bool, keypoints that exist

    def first(self, pairs: int) -> BatchKeypoints:
        """Those of the first pairs."""
        return BatchKeypoints(*(values[: 2 * pairs] for values in vars(self).values()))


def labelled(points: BatchKeypoints, batch: ImageBatch, count: int) -> PairBatch:
    """The first `count` keypoints of each image as pairs with ground-truth partners.

    Labels are those of `matcher.lab.train.labels`. Keypoints are ignored that do not exist, whose visibility
    is unknown, or that are hidden beside a contour.
    """
    positions, corresponding, visible, valid = (
        values[:, :count] for values in (points.positions, points.corresponding, points.visible, points.valid)
    )
    known = valid & (visible | batch.surely_hidden(positions))
    apart = torch.cdist(corresponding, other_of_pair(positions))
    apart = apart.masked_fill(~(visible[..., None] & other_of_pair(valid)[:, None]), _FAR)
    forward, backward = apart[0::2], apart[1::2].mT
    known0, known1 = known[0::2], known[1::2]
    # Where one direction is unknown, the other one counts twice.
    error = torch.where(known0[..., None], forward, backward) + torch.where(
        known1[:, None], backward, forward
    )
    error = error / 2
    partner0, partner1 = _partners(error, known0), _partners(error.mT, known1)
    partner0, partner1 = _mutual(partner0, partner1), _mutual(partner1, partner0)
    sides = [_features(points, batch, side, count) for side in (0, 1)]
    nowhere = corresponding.masked_fill(~visible[..., None], torch.nan)
    return PairBatch(*sides, partner0, partner1, nowhere[0::2], nowhere[1::2])


def _partners(error: Tensor, known: Tensor) -> Tensor:
    """(B, N) the nearest partner by errors (B, N, M), UNMATCHED or IGNORED."""
    least, nearest = error.min(2)
    unmatched = torch.where(known & (least > LABELS.unmatched_distance), UNMATCHED, IGNORED)
    return torch.where(least < LABELS.match_distance, nearest, unmatched)


def _mutual(partner0: Tensor, partner1: Tensor) -> Tensor:
    """Partners (B, N) of one image; those that are not partners of each other are ignored."""
    back = partner1.gather(1, partner0.clamp(min=0))
    own = torch.arange(partner0.shape[1], device=partner0.device)
    return torch.where((partner0 < 0) | (back == own), partner0, IGNORED)


def _features(points: BatchKeypoints, batch: ImageBatch, side: int, count: int) -> Features:
    """The keypoints of one image of each pair, turned as the first image of the pair."""
    height, width = batch.pixels.shape[2:]
    positions = points.positions[side::2, :count].detach()
    features = Features(
        keypoints=positions,
        descriptors=points.descriptors[side::2, :count].float(),
        size=positions.new_tensor([width, height]).expand(len(positions), 2),
        view_orientation=torch.ones(len(positions), dtype=torch.int64, device=positions.device),
        kind="learned",
    )
    return turned_by(features, -batch.turns[side::2] % 4)


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
