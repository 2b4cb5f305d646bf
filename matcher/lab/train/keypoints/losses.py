"""Losses for repeatable, exact and distinctive keypoints. Images 2b and 2b + 1 of a batch are a pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from matcher.extract.learned import sample

_MASKED = -1e4  # a logit without probability


def other_of_pair(values: Tensor) -> Tensor:
    """Of each picture, the values of the other picture of its pair."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def transfer(points: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Points (B, N, 2) as they lie in the other picture, and (B, N) bool whether they are seen there."""
    seen = sample((positions[:, :1] >= 0).float(), points, "zeros")[..., 0] > 0.999
    return sample(positions.clamp(min=0), points, "zeros"), seen


def refinement_loss(moved: Tensor, others: Tensor, near: Tensor, hit: Tensor) -> Tensor:
    """Distance of each point, carried over, from the nearest of the other picture.

    The reprojection loss of ALIKE (Zhao et al. 2022, eq. 6).

    Args:
        moved: (2B, K, 2) points as they lie in the other picture.
        others: (2B, K, 2) points of the other picture.
        near: (2B, K) index of the nearest.
        hit: (2B, K) bool, points that count.
    """
    target = others.gather(1, near[..., None].expand(-1, -1, 2))
    return mean_of(smooth_l1_loss(moved, target, reduction="none", beta=0.25).sum(-1), hit)


def reliability_loss(logits: Tensor, found: Tensor, seen: Tensor) -> Tensor:
    """The score of a point is the probability that it is found again and matched; as in SiLK (Gleize et al.
    2023, section 3.2), what matches is decided by the descriptors of the moment."""
    return mean_of(binary_cross_entropy_with_logits(logits, found.float(), reduction="none"), seen)


@dataclass(frozen=True)
class Described:
    """Keypoints of 2B images with their descriptors; images 2b and 2b + 1 are a pair."""

    own: Tensor  # (2B, K, D) descriptors
    transferred: Tensor  # (2B, K, D) of the same points at their positions in the other image
    positions: Tensor  # (2B, K, 2)
    moved: Tensor  # (2B, K, 2) positions in the other image
    held: Tensor  # (2B, K) bool, keypoints that exist


def description_loss(
    points: Described, chosen: Tensor, visible: Tensor, scale: Tensor, apart: float
) -> Tensor:
    """Negative log likelihood (dual softmax) that a descriptor matches its own in the other image.

    Negatives are the other chosen points and every keypoint that was detected, in this image and in the other
    one, whether it is visible in both or not.

    Args:
        points: all keypoints.
        chosen: (N,) int64, those that are supervised.
        visible: (2B, N) bool, which of them are visible in the other image.
        scale: of the similarities.
        apart: pixels; the descriptors of nearer points need not differ.
    """
    own, moved = points.own[:, chosen], points.moved[:, chosen]
    there = points.transferred[:, chosen]
    itself = torch.zeros(len(chosen), points.own.shape[1], dtype=torch.bool, device=own.device)
    itself[torch.arange(len(chosen)), chosen] = True
    # Each chosen point against its position in the other image, those of the others, and the keypoints there.
    near = (torch.cdist(moved, moved) < apart) | ~visible[:, None]
    near &= ~torch.eye(len(chosen), dtype=torch.bool, device=own.device)
    others = other_of_pair(points.positions)
    taken = (torch.cdist(moved, others) < apart) | ~other_of_pair(points.held)[:, None]
    similarity = torch.cat([own @ there.mT, own @ other_of_pair(points.own).mT], dim=2)
    similarity = (scale * similarity).masked_fill(torch.cat([near, taken], dim=2), _MASKED)
    forth = similarity.log_softmax(2)[:, :, : len(chosen)].diagonal(dim1=1, dim2=2)
    # Each position in the other image against the keypoints of this one.
    taken = torch.cdist(points.positions[:, chosen], points.positions) < apart
    taken = (taken | ~points.held[:, None]) & ~itself
    similarity = (scale * there @ points.own.mT).masked_fill(taken, _MASKED)
    back = similarity.log_softmax(2)[:, itself]
    return mean_of(-(forth + back), visible)


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; 0 where none is."""
    return (values * chosen).sum() / chosen.sum().clamp(min=1)
