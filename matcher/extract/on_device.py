"""The best points of a batch of score maps on a GPU, which is read once.

How many points an image has is not known before they are read; so every image gets as many as are wanted, and
those whose score is not above the threshold are cut off afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from matcher.data.image import Image
from matcher.extract.shared import Found, mask_of


def allowed_pixels(images: Sequence[Image], device: torch.device) -> Tensor:
    """(B, H, W) or (1, 1, 1) bool: where points of images of one size may lie."""
    masks = [mask_of(image, torch.device("cpu")) for image in images]
    if all(mask is None for mask in masks):
        return torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    whole = torch.ones(images[0].pixels.shape[:2], dtype=torch.bool)
    return torch.stack([whole if mask is None else mask.bool() for mask in masks]).to(device)


def inner_pixels(maps: Tensor, border: int) -> Tensor:
    """(B, H, W) bool: pixels of such maps that are `border` or more away from the edge."""
    inner = torch.zeros_like(maps, dtype=torch.bool)
    height, width = maps.shape[1:]
    inner[:, border : height - border, border : width - border] = True
    return inner


def best_pixels(scores: Tensor, keep: Tensor, threshold: float, limit: int) -> tuple[Tensor, Tensor]:
    """The pixels (B, K, 2) int64 xy of maps (B, H, W) that score most, and their scores (B, K).

    Args:
        scores: positive.
        keep: broadcast to (B, H, W) bool, pixels that may be points.
        threshold: the others score more.
        limit: K, if there are as many pixels. Where fewer are points, scores of the rest are 0.
    """
    found = torch.where(keep & (scores > threshold), scores, 0.0).flatten(1)
    best, index = found.topk(min(limit, found.shape[1]), dim=1)
    width = scores.shape[2]
    return torch.stack([index % width, index.div(width, rounding_mode="floor")], dim=2), best


def read_together(points: Tensor, scores: Tensor, descriptors: Tensor, threshold: float) -> list[Found]:
    """Points (B, K, 2), scores (B, K) and descriptors (B, K, D) of each image, on the processor."""
    table = torch.cat([points.float(), scores.float()[..., None], descriptors.float()], dim=2).cpu()
    found = []
    for rows in table:
        rows = rows[: int((rows[:, 2] > threshold).sum())]
        found.append(Found(rows[:, :2], rows[:, 2], rows[:, 3:]))
    return found
