"""What makes points found again, exact, and told apart. Pictures 2b and 2b + 1 of a batch are a pair."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from matcher.extract.learned import sample

_BARRED = -1e4  # a logit of no probability


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


def description_loss(
    own: Tensor, there: Tensor, points: Tensor, moved: Tensor, valid: Tensor, scale: Tensor, apart: float
) -> Tensor:
    """Negative log likelihood (dual softmax) that a descriptor finds that of its place in the other picture.

    Args:
        own: (2B, N, D) descriptors of points.
        there: (2B, N, D) of the same points in the other picture.
        points: (2B, N, 2), and `moved` where they lie in the other picture.
        valid: (2B, N) bool, points that are seen there.
        scale: of the similarities.
        apart: pixels; nearer points are not told apart.
    """
    near = (torch.cdist(points, points) < apart) | (torch.cdist(moved, moved) < apart)
    barred = near | ~valid[:, None] | ~valid[:, :, None]
    barred &= ~torch.eye(points.shape[1], dtype=torch.bool, device=points.device)
    similarity = (scale * own @ there.mT).masked_fill(barred, _BARRED)
    log_p = similarity.log_softmax(1) + similarity.log_softmax(2)
    return mean_of(-log_p.diagonal(dim1=1, dim2=2), valid)


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; 0 where none is."""
    return (values * chosen).sum() / chosen.sum().clamp(min=1)
