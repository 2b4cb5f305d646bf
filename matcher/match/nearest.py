"""Mutual nearest neighbours with the ratio test, and what features matchers take; no torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from matcher import types
from matcher.config import NearestConfig, NetworkConfig
from matcher.errors import UsageError, check_number
from matcher.match.steering import STEERABLE_KIND, best_turn, turned
from matcher.types import Features, Matches


class NearestMatcher:
    """Each point's nearest descriptor in the other image, if mutual and clearly nearer than the second.

    The ratio is nearest / second nearest Euclidean distance (Lowe 2004, section 7.1), tested in both
    directions, so that swapping the images swaps the matches. A match's score is 1 minus the larger of its
    two ratios: 0 is ambiguous, 1 is certain. `config.ratio` limits the ratio, `config.match_threshold` the
    score; a ratio of 0.8 and a threshold of 0.2 are equivalent. Without a second candidate the ratio is 1,
    since nothing supports the match.
    """

    def __init__(self, config: NearestConfig) -> None:
        """Keep the settings; `UsageError` for some out of range."""
        if not 0 < config.ratio <= 1:
            raise UsageError(f"the ratio must be above 0 and at most 1 (no test), not {config.ratio}")
        check_number(config.match_threshold, "match_threshold", 0, 1)
        self.config = config

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch, best first; descriptors of any kind and size; `UsageError`:
        sides of two front ends or descriptor sizes."""
        _check(features0, features1)
        steerable = STEERABLE_KIND in (features0.kind, features1.kind)  # the other may be of "any"
        sides = [features.numpy() for features in (features0, features1)]
        # One pair at a time: a padded batch of distance matrices would only cost memory.
        return [self._match(sides, pair, steerable) for pair in range(len(features0.mask))]

    def _match(self, sides: Sequence[dict[str, np.ndarray]], pair: int, steerable: bool) -> Matches:
        valid = [np.flatnonzero(side["mask"][pair]) for side in sides]
        described = (s["descriptors"][pair][index] for s, index in zip(sides, valid, strict=True))
        first, second = (descriptors.astype(np.float32, copy=False) for descriptors in described)
        if steerable and len(first) and len(second):
            second = turned(second, best_turn(first, second))
        local, scores = mutual_nearest(first, second, self.config.ratio)
        kept = scores >= self.config.match_threshold
        indices = np.stack([valid[k][local[kept, k]] for k in (0, 1)], axis=1)
        points = (s["keypoints"][pair][index] for s, index in zip(sides, indices.T, strict=True))
        return Matches(indices, *points, scores[kept].astype(np.float32), 0, *map(len, valid))


def mutual_nearest(
    descriptors0: np.ndarray, descriptors1: np.ndarray, ratio: float
) -> tuple[np.ndarray, np.ndarray]:
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
    nearest = best, closeness.argmax(axis=1)
    first, second = (np.linalg.norm(queries - candidates[index], axis=1) for index in nearest)
    ratios = np.divide(first, second, out=np.ones_like(first), where=second > 0)
    return best, np.minimum(ratios, 1.0)


def _check(features0: Features, features1: Features) -> None:
    kinds = (features0.kind, features1.kind)
    if "any" not in kinds and kinds[0] != kinds[1]:
        raise UsageError(f"features of two front ends cannot be compared: {kinds[0]} and {kinds[1]}; use one")
    sizes = [f.descriptors.shape[-1] for f in (features0, features1)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"descriptors of two sizes cannot be compared: {sizes[0]} and {sizes[1]}; use one front end"
        )
    if features0.keypoints.ndim != 3 or features0.keypoints.shape[0] != features1.keypoints.shape[0]:
        raise UsageError("a matcher takes two batches of the same number of images; stack the features first")


def mutual_minima(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns (K,) int64 of finite entries of costs (N, M) that are the (first) least of both."""
    if 0 in costs.shape:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows, columns = np.arange(len(costs)), costs.argmin(1)
    mutual = (costs.argmin(0)[columns] == rows) & np.isfinite(costs[rows, columns])
    return rows[mutual], columns[mutual]


_SAMPLED = 64  # descriptors of an image whose norm is looked at


def check_features(config: NetworkConfig, features0: Features, features1: Features) -> None:
    """Refuse, by a `UsageError`, two batches of features that a network of this configuration cannot pair."""
    for features in (features0, features1):
        size = features.descriptors.shape[-1]
        if features.keypoints.ndim != 3:
            raise UsageError("the network takes batches, keypoints (B, N, 2): Features.stack([features])")
        if features.kind == types.JOINED:
            raise UsageError(
                "these are the joined features of several passes, which cannot be matched again; take "
                "those of `Pipeline.extract`"
            )
        if features.kind not in ("any", config.kind):
            raise UsageError(
                f"this matcher takes {config.kind} features, not {features.kind}; load a preset for "
                f"{features.kind} features, or the front end {config.kind}"
            )
        if size != config.descriptor_dim:
            raise UsageError(f"this matcher takes {config.descriptor_dim}-d descriptors, not {size}-d")
        if config.kind not in types.UNNORMALISED:
            _check_norms(config.kind, features)
        needed = ["cells", "grid"] if config.assignment.border else []
        needed += ["cells", "affine_frames", "maps"] if config.refinement else []
        if absent := [name for name in needed if getattr(features, name) is None]:
            raise UsageError(f"this matcher needs Features.{absent[0]}, which its own front end gives")
    if len(features0.mask) != len(features1.mask):
        raise UsageError(f"{len(features0.mask)} images cannot pair with {len(features1.mask)}")


def _check_norms(kind: str, features: Features) -> None:
    """Refuse a batch with an image most of whose first descriptors are not of norm 1; zeros do not count."""
    some = types.to_numpy(features.descriptors[:, :_SAMPLED]).astype(np.float32)
    norms = np.linalg.norm(some, axis=-1)
    other = (norms > 0) & (np.abs(norms - 1) > 0.1)  # half precision is far within it
    if not other.any():  # so that the mask can stay where it is
        return
    counted = types.to_numpy(features.mask[:, :_SAMPLED]) & (norms > 0)
    wrong = 2 * (counted & other).sum(axis=1) > counted.sum(axis=1)
    if not wrong.any():
        return
    entry = int(np.flatnonzero(wrong)[0])
    image = some[entry][counted[entry]]
    if kind == "sift" and types.is_raw_sift(image):
        raise UsageError(types.RAW_SIFT)
    norm = types.typical_norm(image)
    raise UsageError(f"this matcher takes descriptors of norm 1, not of {norm:.3g}; normalise them first")


def needed_fields(config: NetworkConfig) -> list[str]:
    """The fields of `Features` that a network needs of keypoints beside their positions and descriptors."""
    fields = {"score": "scores", "scale": "scales", "raw_scale": "scales", "raw_sigma": "scales"}
    fields |= dict.fromkeys(("orientation", "raw_orientation", "raw_counterclockwise"), "orientations")
    fields["frame"] = "affine_frames"
    return sorted({fields[name] for name in config.position.inputs if name in fields})
