"""Mutual nearest neighbours with the ratio test, behind the `Matcher` protocol."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from matcher.config import NearestConfig
from matcher.data.features import Features
from matcher.data.matches import Matches
from matcher.errors import UsageError
from matcher.match.steering import aligned


class NearestMatcher:
    """Each point's nearest descriptor in the other image, if mutual and clearly nearer than the second.

    The ratio is nearest / second nearest Euclidean distance (Lowe 2004, section 7.1), tested in both
    directions, so that swapping the images swaps the matches. A match's score is 1 minus the larger of its
    two ratios: 0 is ambiguous, 1 is certain. `config.ratio` limits the ratio, `config.match_threshold` the
    score; a ratio of 0.8 and a threshold of 0.2 are equivalent. Without a second candidate the ratio is 1,
    since nothing supports the match.
    """

    def __init__(self, config: NearestConfig, *, device: torch.device | str = "cpu") -> None:
        if not 0 < config.ratio <= 1:
            raise UsageError(
                f"the ratio must be above 0 and at most 1 (1 switches the test off), not {config.ratio}"
            )
        if not 0 <= config.match_threshold <= 1:
            raise UsageError(f"match_threshold must be a number from 0 to 1, not {config.match_threshold}")
        self.config = config
        self.device = torch.device(device)

    @torch.inference_mode()
    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch, best first; descriptors of any kind and size.

        Raises:
            UsageError: the two sides come from different front ends or have descriptors of different sizes.
        """
        _check(features0, features1)
        features0, features1 = (f.to(self.device) for f in (features0, features1))
        features1 = aligned(features0, features1, features0.kind)
        batch = features0.keypoints.shape[0]
        return [self._match(features0, features1, pair) for pair in range(batch)]

    def _match(self, features0: Features, features1: Features, pair: int) -> Matches:
        """One pair at a time: a padded batch of distance matrices would only cost memory."""
        valid = [f.mask[pair].nonzero().squeeze(1).cpu() for f in (features0, features1)]
        descriptors = [
            f.descriptors[pair].float()[index.to(self.device)]
            for f, index in zip((features0, features1), valid, strict=True)
        ]
        local, scores = mutual_nearest(*descriptors, self.config.ratio)
        kept = scores >= self.config.match_threshold
        local, scores = local[kept], scores[kept]
        indices = torch.stack([valid[0][local[:, 0]], valid[1][local[:, 1]]], dim=1).numpy()
        keypoints = [f.keypoints[pair].cpu().numpy() for f in (features0, features1)]
        return Matches(
            indices=indices,
            points0=keypoints[0][indices[:, 0]],
            points1=keypoints[1][indices[:, 1]],
            scores=scores.numpy().astype(np.float32),
            kept0=len(valid[0]),
            kept1=len(valid[1]),
        )


def mutual_nearest(descriptors0: Tensor, descriptors1: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Descriptors (N, D), (M, D) float32 → indices (K, 2) int64 and scores (K,), on the CPU, best first."""
    if 0 in (len(descriptors0), len(descriptors1)):
        return torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0)
    # For ranking, |a − b|² is needed only up to a constant per query; exact distances come after.
    products = descriptors0 @ descriptors1.T
    half0, half1 = (d.square().sum(1) / 2 for d in (descriptors0, descriptors1))
    nearest0, ratios0 = _nearest(descriptors0, descriptors1, products - half1)
    nearest1, ratios1 = _nearest(descriptors1, descriptors0, products.T - half0)
    here = torch.arange(len(descriptors0), device=descriptors0.device)
    worst = torch.maximum(ratios0, ratios1[nearest0])
    keep = (nearest1[nearest0] == here) & (worst <= ratio)
    indices = torch.stack([here[keep], nearest0[keep]], dim=1).cpu()
    scores = (1 - worst[keep]).cpu()
    order = torch.argsort(scores, descending=True, stable=True)
    return indices[order], scores[order]


def _nearest(queries: Tensor, candidates: Tensor, closeness: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest candidate (N,) of every query, and its distance over the second's (N,), 1 where undefined."""
    best = closeness.topk(min(2, len(candidates)), dim=1).indices
    if len(candidates) == 1:
        return best[:, 0], queries.new_ones(len(queries))
    # Taken from the differences, because products lose the digits of small distances.
    distances = torch.stack([(queries - candidates[best[:, i]]).norm(dim=1) for i in range(2)], dim=1)
    ratios = torch.where(distances[:, 1] > 0, distances[:, 0] / distances[:, 1], 1.0)
    return best[:, 0], ratios.clamp(max=1.0)


def _check(features0: Features, features1: Features) -> None:
    kinds = (features0.kind, features1.kind)
    if "any" not in kinds and kinds[0] != kinds[1]:
        raise UsageError(
            f"features of two front ends cannot be compared: {kinds[0]} and {kinds[1]}; use one for both"
        )
    sizes = [f.descriptors.shape[-1] for f in (features0, features1)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"descriptors of two sizes cannot be compared: {sizes[0]} and {sizes[1]}; use one front end"
        )
    if features0.keypoints.dim() != 3 or features0.keypoints.shape[0] != features1.keypoints.shape[0]:
        raise UsageError("a matcher takes two batches of the same number of images; stack the features first")
