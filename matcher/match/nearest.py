"""Mutual nearest neighbours with the ratio test, behind the `Matcher` protocol."""

from __future__ import annotations

import numpy as np

from matcher.config import NearestConfig
from matcher.data.features import Features
from matcher.data.matches import Matches
from matcher.data.tensors import to_numpy
from matcher.errors import UsageError
from matcher.match.turns import STEERABLE, best_turn, turned

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
        from matcher.match.nearest_on_device import mutual_nearest_on

        return mutual_nearest_on(self.device, descriptors0, descriptors1, self.config.ratio)


_USED = ("keypoints", "descriptors", "mask")


def mutual_nearest(descriptors0: np.ndarray, descriptors1: np.ndarray, ratio: float) -> Found:
    """Descriptors (N, D), (M, D) float32 → indices (K, 2) and scores (K,), best first."""
    if 0 in (len(descriptors0), len(descriptors1)):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.float32)
    # For ranking, |a − b|² is needed only up to a constant per query; exact distances come after.
    products = descriptors0 @ descriptors1.T
    half0, half1 = (np.square(d).sum(axis=1) / 2 for d in (descriptors0, descriptors1))
    nearest0, ratios0 = _nearest(descriptors0, descriptors1, products - half1)
    nearest1, ratios1 = _nearest(descriptors1, descriptors0, np.subtract(products.T, half0, order="C"))
    here = np.arange(len(descriptors0))
    worst = np.maximum(ratios0, ratios1[nearest0])
    keep = np.flatnonzero((nearest1[nearest0] == here) & (worst <= ratio))
    scores = 1 - worst[keep]
    order = np.argsort(-scores, kind="stable")
    return np.stack([keep, nearest0[keep]], axis=1)[order], scores[order]


def _nearest(
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
