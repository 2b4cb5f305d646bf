"""Losses for repeatable, accurate and distinctive keypoints. Images 2b and 2b + 1 of a batch are a pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

_MASKED = -1e4  # a logit without probability


def other_of_pair(values: Tensor) -> Tensor:
    """For each image, the values of the other image of its pair."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def refinement_loss(corresponding: Tensor, others: Tensor, nearest: Tensor, counted: Tensor) -> Tensor:
    """Distance of each transferred keypoint from the nearest keypoint of the other image.

    The reprojection loss of ALIKE (Zhao et al. 2022, eq. 6).

    Args:
        corresponding: (2B, K, 2) positions of the keypoints in the other image.
        others: (2B, K, 2) keypoints of the other image.
        nearest: (2B, K) index of the nearest of them.
        counted: (2B, K) bool, keypoints that count.
    """
    target = others.gather(1, nearest[..., None].expand(-1, -1, 2))
    return mean_of(smooth_l1_loss(corresponding, target, reduction="none", beta=0.25).sum(-1), counted)


def reliability_loss(logits: Tensor, matched: Tensor, visible: Tensor) -> Tensor:
    """Binary cross-entropy of keypoint scores, as probabilities of being repeatable and matched correctly.

    As in SiLK (Gleize et al. 2023, section 3.2), the current descriptors decide which keypoints match.
    """
    return mean_of(binary_cross_entropy_with_logits(logits, matched.float(), reduction="none"), visible)


@dataclass(frozen=True)
class DescribedKeypoints:
    """Keypoints of 2B images with their descriptors; images 2b and 2b + 1 are a pair."""

    descriptors: Tensor  # (2B, K, D)
    corresponding_descriptors: Tensor  # (2B, K, D) at their positions in the other image
    positions: Tensor  # (2B, K, 2)
    corresponding: Tensor  # (2B, K, 2) positions in the other image
    valid: Tensor  # (2B, K) bool, keypoints that exist


def description_loss(
    points: DescribedKeypoints, chosen: Tensor, visible: Tensor, scale: Tensor, apart: float
) -> Tensor:
    """Negative log-likelihood (dual softmax) of matching keypoints to their positions in the other image.

    Negatives are the other chosen points and every keypoint that was detected, in this image and in the other
    one, whether it is visible in both or not.

    Args:
        points: all keypoints.
        chosen: (N,) int64, those that are supervised.
        visible: (2B, N) bool, which of them are visible in the other image.
        scale: of the similarities.
        apart: pixels; the descriptors of nearer points need not differ.
    """
    own, corresponding = points.descriptors[:, chosen], points.corresponding[:, chosen]
    matching = points.corresponding_descriptors[:, chosen]
    itself = chosen.unsqueeze(1) == torch.arange(points.valid.shape[1], device=own.device)
    # Each chosen point with the corresponding positions and the keypoints of the other image.
    near = (torch.cdist(corresponding, corresponding) < apart) | ~visible[:, None]
    near &= ~torch.eye(len(chosen), dtype=torch.bool, device=own.device)
    others = other_of_pair(points.positions)
    masked = (torch.cdist(corresponding, others) < apart) | ~other_of_pair(points.valid)[:, None]
    similarity = torch.cat([own @ matching.mT, own @ other_of_pair(points.descriptors).mT], dim=2)
    similarity = (scale * similarity).masked_fill(torch.cat([near, masked], dim=2), _MASKED)
    forward = similarity.log_softmax(2)[:, :, : len(chosen)].diagonal(dim1=1, dim2=2)
    # Each corresponding position with the keypoints of this image.
    masked = torch.cdist(points.positions[:, chosen], points.positions) < apart
    masked = (masked | ~points.valid[:, None]) & ~itself
    similarity = (scale * matching @ points.descriptors.mT).masked_fill(masked, _MASKED)
    backward = similarity.log_softmax(2).gather(2, chosen.expand(len(own), -1).unsqueeze(2)).squeeze(2)
    return mean_of(-(forward + backward), visible)


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; 0 without any."""
    return (values * chosen).sum() / chosen.sum().clamp(min=1)
