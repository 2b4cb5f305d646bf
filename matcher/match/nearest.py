"""Mutual nearest neighbours with the ratio test, behind the `Matcher` protocol."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from matcher.arrays import JOINED, UNNORMALISED, is_raw_sift, to_numpy, typical_norm
from matcher.config import NearestConfig, NetworkConfig
from matcher.errors import UsageError
from matcher.match.steering import STEERABLE, best_turn, turned
from matcher.types import RAW_SIFT, Features, Matches

# --- nearest: Mutual nearest neighbours with the ratio test, behind the `Matcher` protocol.

Found = tuple[np.ndarray, np.ndarray]  # indices (K, 2) int64 and scores (K,) float32


class NearestMatcher:
    """Each point's nearest descriptor in the other image, if mutual and clearly nearer than the second.

    The ratio is nearest / second nearest Euclidean distance (Lowe 2004, section 7.1), tested in both
    directions, so that swapping the images swaps the matches. A match's score is 1 minus the larger of its
    two ratios: 0 is ambiguous, 1 is certain. `config.ratio` limits the ratio, `config.match_threshold` the
    score; a ratio of 0.8 and a threshold of 0.2 are equivalent. Without a second candidate the ratio is 1,
    since nothing supports the match.
    """

    def __init__(self, config: NearestConfig, *, device: object = "cpu") -> None:
        """Keep the settings; `device` is where descriptors are compared, a torch one unless it is the CPU."""
        if not 0 < config.ratio <= 1:
            raise UsageError(
                f"the ratio must be above 0 and at most 1 (1 switches the test off), not {config.ratio}"
            )
        if not 0 <= config.match_threshold <= 1:
            raise UsageError(f"match_threshold must be a number from 0 to 1, not {config.match_threshold}")
        self.config = config
        self.device = device

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch, best first; descriptors of any kind and size.

        Raises:
            UsageError: the two sides come from different front ends or have descriptors of different sizes.
        """
        _check(features0, features1)
        fields = [{name: to_numpy(getattr(f, name)) for name in _USED} for f in (features0, features1)]
        pairs = range(len(fields[0]["mask"]))
        entries = [
            [{name: values[pair] for name, values in side.items()} for side in fields] for pair in pairs
        ]
        steerable = STEERABLE in (features0.kind, features1.kind)  # the other may be of "any"
        return [self._match(*sides, steerable) for sides in entries]

    def _match(self, side0: dict[str, np.ndarray], side1: dict[str, np.ndarray], steerable: bool) -> Matches:
        """One pair at a time: a padded batch of distance matrices would only cost memory."""
        valid = [np.flatnonzero(side["mask"]) for side in (side0, side1)]
        descriptors = [
            side["descriptors"][index].astype(np.float32, copy=False)
            for side, index in zip((side0, side1), valid, strict=True)
        ]
        if steerable and all(map(len, descriptors)):
            descriptors[1] = turned(descriptors[1], best_turn(*descriptors))
        local, scores = self._compare(*descriptors)
        kept = scores >= self.config.match_threshold
        local, scores = local[kept], scores[kept]
        indices = np.stack([valid[0][local[:, 0]], valid[1][local[:, 1]]], axis=1)
        return Matches(
            indices=indices,
            points0=side0["keypoints"][indices[:, 0]],
            points1=side1["keypoints"][indices[:, 1]],
            scores=scores.astype(np.float32),
            kept0=len(valid[0]),
            kept1=len(valid[1]),
        )

    def _compare(self, descriptors0: np.ndarray, descriptors1: np.ndarray) -> Found:
        if str(self.device) == "cpu":
            return mutual_nearest(descriptors0, descriptors1, self.config.ratio)

        return mutual_nearest_on(self.device, descriptors0, descriptors1, self.config.ratio)


_USED = ("keypoints", "descriptors", "mask")


def mutual_nearest(descriptors0: np.ndarray, descriptors1: np.ndarray, ratio: float) -> Found:
    """Descriptors (N, D), (M, D) float32 → indices (K, 2) and scores (K,), best first."""
    if 0 in (len(descriptors0), len(descriptors1)):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.float32)
    # For ranking, |a − b|² is needed only up to a constant per query; exact distances come after.
    products = descriptors0 @ descriptors1.T
    half0, half1 = (np.square(d).sum(axis=1) / 2 for d in (descriptors0, descriptors1))
    nearest0, ratios0 = _nearest_nearest(descriptors0, descriptors1, products - half1)
    nearest1, ratios1 = _nearest_nearest(
        descriptors1, descriptors0, np.subtract(products.T, half0, order="C")
    )
    here = np.arange(len(descriptors0))
    worst = np.maximum(ratios0, ratios1[nearest0])
    keep = np.flatnonzero((nearest1[nearest0] == here) & (worst <= ratio))
    scores = 1 - worst[keep]
    order = np.argsort(-scores, kind="stable")
    return np.stack([keep, nearest0[keep]], axis=1)[order], scores[order]


def _nearest_nearest(
    queries: np.ndarray, candidates: np.ndarray, closeness: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Nearest candidate (N,) of every query, and its distance over the second's (N,), 1 where undefined.

    `closeness` (N, M) is overwritten.
    """
    rows, best = np.arange(len(queries)), closeness.argmax(axis=1)
    if len(candidates) == 1:
        return best, np.ones(len(queries), np.float32)
    closeness[rows, best] = -np.inf
    # Taken from the differences, because products lose the digits of small distances.
    first, second = (
        np.linalg.norm(queries - candidates[index], axis=1) for index in (best, closeness.argmax(axis=1))
    )
    ratios = np.divide(first, second, out=np.ones_like(first), where=second > 0)
    return best, np.minimum(ratios, 1.0)


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
    if features0.keypoints.ndim != 3 or features0.keypoints.shape[0] != features1.keypoints.shape[0]:
        raise UsageError("a matcher takes two batches of the same number of images; stack the features first")


# --- nearest_on_device: Mutual nearest neighbours on a GPU, by torch: the steps of `matcher.match.nearest`;
# it is read once.


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
    nearest0, ratios0 = _nearest_nearest_on_device(first, second, products - half1)
    nearest1, ratios1 = _nearest_nearest_on_device(second, first, products.T - half0)
    here = torch.arange(len(first), device=first.device)
    partner = torch.where(nearest1[nearest0] == here, nearest0, -1)
    worst = torch.maximum(ratios0, ratios1[nearest0]).float()
    partner, worst = torch.stack([partner.int(), worst.view(torch.int32)]).cpu()
    partner, worst = partner.numpy().astype(np.int64), worst.view(torch.float32).numpy()
    keep = np.flatnonzero((partner >= 0) & (worst <= ratio))
    scores = 1 - worst[keep]
    order = np.argsort(-scores, kind="stable")
    return np.stack([keep, partner[keep]], axis=1)[order], scores[order]


def _nearest_nearest_on_device(
    queries: Tensor, candidates: Tensor, closeness: Tensor
) -> tuple[Tensor, Tensor]:
    """Nearest candidate (N,) of every query, and its distance over the second's (N,), 1 where undefined."""
    best = closeness.topk(min(2, len(candidates)), dim=1).indices
    if len(candidates) == 1:
        return best[:, 0], queries.new_ones(len(queries))
    # Taken from the differences, because products lose the digits of small distances.
    distances = torch.stack([(queries - candidates[best[:, i]]).norm(dim=1) for i in range(2)], dim=1)
    ratios = torch.where(distances[:, 1] > 0, distances[:, 0] / distances[:, 1], 1.0)
    return best[:, 0], ratios.clamp(max=1.0)


# --- mutual: Reading matches off an assignment: entries that are the best of their row and of their column.


class MutualBest(NamedTuple):
    """The best partner of every row."""

    scores: Tensor  # (B, N) log probabilities
    partners: Tensor  # (B, N) int64
    mutual: Tensor  # (B, N) bool: the row is its column's best too, the first of equal ones


def best_of_both(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's best column, and whether no row is better for that column; equal rows all count.

    Args:
        scores: (B, N, M) with M > 0.

    Returns:
        best scores (B, N), their columns (B, N) int64, and whether each is its column's best too (B, N) bool.
    """
    best, partner = scores.max(dim=2)
    # Along columns the values alone are several times as fast as the indices.
    return best, partner, best == scores.amax(dim=1).gather(1, partner)


def mutual_best(log_scores: Tensor) -> MutualBest:
    """As `best_of_both`, but of equal rows only the first counts, so that no column has two."""
    if 0 in log_scores.shape[1:]:
        nowhere = log_scores.new_zeros(log_scores.shape[:2], dtype=torch.int64)
        return MutualBest(torch.full_like(nowhere, -torch.inf, dtype=torch.float32), nowhere, nowhere > 0)
    best, partner, top = best_of_both(log_scores)
    rows = log_scores.shape[1]
    here = torch.arange(rows, device=log_scores.device).expand_as(partner)
    first = here.new_full((len(best), log_scores.shape[2]), rows)
    first.scatter_reduce_(1, partner, torch.where(top, here, rows), "amin")
    return MutualBest(best, partner, first.gather(1, partner) == here)


def mutual_matches(
    log_scores: Tensor, threshold: float, threshold_doubles_at: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`credible_matches` of (N, M) log probabilities."""
    return credible_matches(mutual_best(log_scores.unsqueeze(0)), threshold, threshold_doubles_at)


def credible_matches(
    found: MutualBest, threshold: float, threshold_doubles_at: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mutual best entries of one pair above `threshold`, best first.

    Args:
        found: B = 1.
        threshold: of the probability.
        threshold_doubles_at: expected matches at which the threshold is twice as high. With S expected, the
            sum of the probabilities above it, it is threshold · (1 + threshold_doubles_at / S): a lone match
            is less credible than one among hundreds, since images of unrelated scenes give a few.

    Returns:
        indices (K, 2) int64 and probabilities (K,) float32.
    """
    best, partner, mutual = (x[0] for x in found)
    keep = (mutual & (best > (math.log(threshold) if threshold > 0 else -math.inf))).nonzero().squeeze(1)
    indices = torch.stack([keep, partner[keep]], dim=1)
    probabilities = best[keep].exp().clamp(max=1.0)
    order = torch.argsort(probabilities, descending=True, stable=True)
    indices, probabilities = indices[order], probabilities[order]
    if threshold_doubles_at and len(probabilities):
        credible = probabilities > threshold * (1 + threshold_doubles_at / probabilities.sum())
        indices, probabilities = indices[credible], probabilities[credible]
    return indices, probabilities


# --- minima: Mutual minima of a matrix of costs; no torch.


def mutual_minima(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns (K,) int64 of the finite entries of costs (N, M) that are the least of both.

    Of equal entries the first counts.
    """
    if 0 in costs.shape:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows, columns = np.arange(len(costs)), costs.argmin(1)
    mutual = (costs.argmin(0)[columns] == rows) & np.isfinite(costs[rows, columns])
    return rows[mutual], columns[mutual]


# --- features: What the features that a network is given must satisfy.

_SAMPLED = 64  # descriptors of an image whose norm is looked at
_NORM_TOLERANCE = 0.1  # half precision is far within it


def check_features(config: NetworkConfig, features: Features, *, norms: bool = True) -> None:
    """Refuse features that a network was not trained on.

    Args:
        config: of the network.
        features: a batch.
        norms: whether to look at descriptors, too; `unlike_norms` does so on a device.

    Raises:
        UsageError: kind, descriptor size or descriptor norm does not fit, or the features are not a batch.
    """
    size = features.descriptors.shape[-1]
    if features.keypoints.ndim != 3:
        raise UsageError("the network takes batches, keypoints (B, N, 2): Features.stack([features])")
    if features.kind == JOINED:
        raise UsageError(
            "these are the joined features of several passes, which cannot be matched again; take those of "
            "`Pipeline.extract`"
        )
    if features.kind not in ("any", config.kind):
        raise UsageError(
            f"this matcher takes {config.kind} features, not {features.kind}; load a preset for "
            f"{features.kind} features, or the front end {config.kind}"
        )
    if size != config.descriptor_dim:
        raise UsageError(f"this matcher takes {config.descriptor_dim}-d descriptors, not {size}-d")
    if norms and config.kind not in UNNORMALISED:
        _check_norms(config.kind, features)
    needed = ["cells", "grid"] if config.assignment.border else []
    needed += ["cells", "affine_frames", "maps"] if config.refinement else []
    if absent := [name for name in needed if getattr(features, name) is None]:
        raise UsageError(f"this matcher needs Features.{absent[0]}, which its own front end gives")


def _check_norms(kind: str, features: Features) -> None:
    """Refuse a batch with an image most of whose first descriptors are not of norm 1; zeros do not count."""
    some = to_numpy(features.descriptors[:, :_SAMPLED]).astype(np.float32)
    norms = np.linalg.norm(some, axis=-1)
    counted = to_numpy(features.mask[:, :_SAMPLED]) & (norms > 0)
    wrong = 2 * (counted & (np.abs(norms - 1) > _NORM_TOLERANCE)).sum(axis=1) > counted.sum(axis=1)
    if not wrong.any():
        return
    entry = int(np.flatnonzero(wrong)[0])
    image = some[entry][counted[entry]]
    if kind == "sift" and is_raw_sift(image):
        raise UsageError(RAW_SIFT)
    raise UsageError(
        f"this matcher takes descriptors of norm 1, not of {typical_norm(image):.3g}; normalise them first"
    )


def unlike_norms(kind: str, features: Features) -> Tensor:
    """(B,) bool, images whose descriptors `check_features` refuses; torch, on the device of the features."""
    norms = features.descriptors[:, :_SAMPLED].float().norm(dim=-1)
    counted = features.mask[:, :_SAMPLED] & (norms > 0) & (kind not in UNNORMALISED)
    return 2 * (counted & ((norms - 1).abs() > _NORM_TOLERANCE)).sum(1) > counted.sum(1)
