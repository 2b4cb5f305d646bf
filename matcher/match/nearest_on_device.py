"""Mutual nearest neighbours on a GPU, by torch: the steps of `matcher.match.nearest`; it is read once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


@torch.inference_mode()
def mutual_nearest_on(
    device: torch.device | str, descriptors0: np.ndarray, descriptors1: np.ndarray, ratio: float
) -> tuple[np.ndarray, np.ndarray]:
    """Descriptors (N, D), (M, D) float32 → indices (K, 2) int64 and scores (K,), best first."""
    if 0 in (len(descriptors0), len(descriptors1)):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.float32)
    first, second = (torch.from_numpy(each).to(device) for each in (descriptors0, descriptors1))
    # For ranking, |a − b|² is needed only up to a constant per query; exact distances come after.
    products = first @ second.T
    half0, half1 = (each.square().sum(1) / 2 for each in (first, second))
    nearest0, ratios0 = _nearest(first, second, products - half1)
    nearest1, ratios1 = _nearest(second, first, products.T - half0)
    here = torch.arange(len(first), device=first.device)
    partner = torch.where(nearest1[nearest0] == here, nearest0, -1)
    worst = torch.maximum(ratios0, ratios1[nearest0]).float()
    partner, worst = torch.stack([partner.int(), worst.view(torch.int32)]).cpu()
    partner, worst = partner.numpy().astype(np.int64), worst.view(torch.float32).numpy()
    keep = np.flatnonzero((partner >= 0) & (worst <= ratio))
    scores = 1 - worst[keep]
    order = np.argsort(-scores, kind="stable")
    return np.stack([keep, partner[keep]], axis=1)[order], scores[order]


def _nearest(queries: Tensor, candidates: Tensor, closeness: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest candidate (N,) of every query, and its distance over the second's (N,), 1 where undefined."""
    best = closeness.topk(min(2, len(candidates)), dim=1).indices
    if len(candidates) == 1:
        return best[:, 0], queries.new_ones(len(queries))
    # Taken from the differences, because products lose the digits of small distances.
    distances = torch.stack([(queries - candidates[best[:, i]]).norm(dim=1) for i in range(2)], dim=1)
    ratios = torch.where(distances[:, 1] > 0, distances[:, 0] / distances[:, 1], 1.0)
    return best[:, 0], ratios.clamp(max=1.0)
