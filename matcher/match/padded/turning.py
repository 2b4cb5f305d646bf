"""Quarter turns of steerable descriptors as `matcher.match.steering` chooses them; nothing is read."""

from __future__ import annotations

import torch
from torch import Tensor

from matcher.data.features import Features
from matcher.match.steering import turned_by
from matcher.match.turns import CERTAIN, COMPARED, DECISIVE, FEW, MIN_DISTANCE, MIN_GAIN, TURNS


def best_turns(both: Features) -> Tensor:
    """(B,) int64 clockwise quarter turns of image 1 that fit image 0 best; features of `paired` images."""
    descriptors = both.descriptors.float().unflatten(0, (-1, 2))
    valid = both.mask.unflatten(0, (-1, 2))
    few = _evidence_of_turns(descriptors, valid, FEW)
    sure = few[0] > CERTAIN * valid[:, 0, :FEW].sum(1)
    found = _chosen(few)
    if both.mask.shape[1] > FEW:
        few[0] += MIN_GAIN
        best, second = few.topk(2, dim=0).values
        many = _chosen(_evidence_of_turns(descriptors, valid, COMPARED))
        found = torch.where(best <= DECISIVE * second, many, found)
    return torch.where(sure, 0, found)


def _chosen(evidence: Tensor) -> Tensor:
    """The turn of most evidence (T, B), with a margin for none."""
    return torch.cat([evidence[:1] + MIN_GAIN, evidence[1:]]).argmax(0)


def _evidence_of_turns(descriptors: Tensor, valid: Tensor, strongest: int) -> Tensor:
    """(T, B) of descriptors (B, 2, N, D): see `matcher.match.steering.turn_evidence`."""
    own, others = descriptors[:, :, :strongest].unbind(1)
    valid0, valid1 = valid[:, :, :strongest].unbind(1)
    padding = ~(valid0[:, :, None] & valid1[:, None])
    groups = others.unflatten(-1, (TURNS, -1))
    turned = [groups.roll(turn, dims=2).flatten(-2) for turn in range(TURNS)]
    return torch.stack([_evidence(own @ each.mT, padding, valid0) for each in turned])


def _evidence(similarity: Tensor, padding: Tensor, valid: Tensor) -> Tensor:
    """(B,) from similarities (B, N, M); those of padding do not count."""
    similarity = similarity.masked_fill(padding, -1.0)
    best0, column = similarity.max(2)
    best1 = similarity.amax(1)
    second0 = similarity.masked_fill(similarity == best0[:, :, None], -1.0).amax(2)
    second1 = similarity.masked_fill(similarity == best1[:, None], -1.0).amax(1).gather(1, column)
    mutual = (best0 == best1.gather(1, column)) & valid
    ratio = (1 - best0) / (1 - torch.maximum(second0, second1)).clamp(min=MIN_DISTANCE)
    return ((1 - ratio).clamp(min=0) ** 2).mul(mutual).sum(1)


def turned(both: Features, turns: Tensor) -> Features:
    """Features of `paired` images after turns (B,) of image 1."""
    return turned_by(both, torch.stack([torch.zeros_like(turns), turns], dim=1).flatten())
