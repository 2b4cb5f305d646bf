"""Quarter turns of the steerable descriptors of a batch; torch. `matcher.match.turns` says what they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matcher.data.features import Features
from matcher.match.tables import turned_orientations
from matcher.match.turns import (
    CERTAIN,
    COMPARED,
    DECISIVE,
    FEW,
    MIN_DISTANCE,
    MIN_GAIN,
    STEERABLE,
    TURNS,
)


def steered(descriptors: Tensor, turns: Tensor) -> Tensor:
    """Descriptors (B, N, D) as they would be after turns[b] (B,) clockwise quarter turns of image b."""
    groups = descriptors.unflatten(-1, (TURNS, -1))
    order = (torch.arange(TURNS, device=turns.device) - turns[:, None]) % TURNS
    return groups.gather(2, order[:, None, :, None].expand_as(groups)).flatten(-2)


def aligned(features0: Features, features1: Features, kind: str) -> Features:
    """`features1` of B pairs turned by quarters to fit `features0` best.

    Points stay where they are; `view_orientation` is the turn.

    Args:
        features0, features1: batches.
        kind: the front end that made them; features whose descriptors are not steerable are returned as
            they are.
    """
    if kind != STEERABLE or 0 in (len(features0), len(features1)):
        return features1
    turns = quarter_turns(features0, features1)
    if not bool(turns.any()):
        return features1
    return _turned(features1, turns)


def turned_by(features: Features, turns: int | Tensor) -> Features:
    """Features of B images after clockwise quarter turns, one number or (B,); `view_orientation` has them."""
    if isinstance(turns, int):
        turns = torch.full((len(features.mask),), turns, device=features.mask.device)
    return _turned(features, turns)


def _turned(features: Features, turns: Tensor) -> Features:
    view, further = features.matched_orientation, turned_orientations(turns.device)
    for count in range(1, TURNS):
        view = torch.where(turns >= count, further[view], view)
    return features.with_valid(descriptors=steered(features.descriptors, turns), view_orientation=view)


@torch.no_grad()
def quarter_turns(features0: Features, features1: Features) -> Tensor:
    """(B,) clockwise quarter turns of image 1 after which its descriptors fit those of image 0 best.

    A few of the strongest keypoints decide most pairs; for the others more keypoints are compared.
    """
    few = turn_evidence(features0, features1, strongest=FEW, certain=CERTAIN)
    sure = few[0] > CERTAIN * features0.mask[:, :FEW].sum(1)  # whatever the other pairs of the batch are
    few[0] += MIN_GAIN
    turns = few.argmax(0).masked_fill(sure, 0)
    if len(few) < 2 or max(len(features0), len(features1)) <= FEW:
        return turns
    best, second = few.topk(2, dim=0).values
    undecided = (~sure & (best <= DECISIVE * second)).nonzero()[:, 0]
    if len(undecided):
        many = turn_evidence(*(f.entries(undecided) for f in (features0, features1)))
        many[0] += MIN_GAIN
        turns[undecided] = many.argmax(0)
    return turns


@torch.no_grad()
def turn_evidence(
    features0: Features, features1: Features, *, strongest: int = COMPARED, certain: float = math.inf
) -> Tensor:
    """(T, B) evidence that image 1 matches image 0 after 0 … T - 1 clockwise quarter turns.

    It measures how distinctive mutual nearest neighbours are: the sum of (1 - r)², with r the ratio of the
    distances to the nearest and to the second nearest descriptor, the larger one of both images. (A sum of
    similarities is dominated by wrong neighbours where views differ by more than a rotation.)

    Args:
        features0, features1: batches of B images, of steerable descriptors whatever their `kind` says.
        strongest: how many keypoints of each image are compared.
        certain: evidence per keypoint for no turn above which no other turn is tried (T is 1).
    """
    own, others = (f.descriptors[:, :strongest].float() for f in (features0, features1))
    valid0, valid1 = (f.mask[:, :strongest] for f in (features0, features1))
    padding = ~(valid0[:, :, None] & valid1[:, None])
    evidence = []
    with torch.autocast(own.device.type, enabled=False):
        for turn in torch.arange(TURNS, device=others.device):
            evidence.append(_evidence(own @ steered(others, turn.expand(len(own))).mT, padding))
            if bool((evidence[0] > certain * valid0.sum(1)).all()):
                break
    return torch.stack(evidence)


def _evidence(similarity: Tensor, padding: Tensor) -> Tensor:
    """(B,) evidence from similarities (B, N, M); those of padding do not count."""
    similarity = similarity.masked_fill(padding, -1.0)
    best0, best1 = similarity.amax(2, keepdim=True), similarity.amax(1, keepdim=True)
    # Reductions over values alone are several times as fast as those that return indices too.
    top0, top1 = similarity == best0, similarity == best1
    pair, row, column = (top0 & top1 & ~padding).nonzero(as_tuple=True)
    second0 = similarity.masked_fill(top0, -1.0).amax(2)[pair, row]
    second1 = similarity.masked_fill(top1, -1.0).amax(1)[pair, column]
    second_distance = 1 - torch.maximum(second0, second1)  # the larger ratio is that of the smaller distance
    ratio = (1 - best0[pair, row, 0]) / second_distance.clamp(min=MIN_DISTANCE)
    evidence = similarity.new_zeros(len(similarity))
    return evidence.index_add_(0, pair, (1 - ratio).clamp(min=0) ** 2)
