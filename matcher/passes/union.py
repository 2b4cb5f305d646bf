"""The union of the matches of several passes, and of their keypoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from matcher.data.descriptors import JOINED
from matcher.data.features import Features
from matcher.data.matches import Matches
from matcher.data.tensors import to_numpy
from matcher.passes.crops import PassMatches


def joined_matches(passes: Sequence[PassMatches], radius: tuple[float, float]) -> list[np.ndarray]:
    """Which matches of each pass (K,) bool are kept after duplicates across passes are removed.

    Points of different passes are the same if they are less than `radius` apart, stored pixels in image 0 and
    1. Of two matches that share a point in either image, the one of higher probability is kept; among
    equals, that of the earlier pass.
    """
    kept = [np.ones(len(one.scores), dtype=bool) for one in passes]
    for later in range(1, len(passes)):
        for earlier in range(later):
            same = _shared(passes[earlier], passes[later], radius)
            same &= kept[earlier][:, None] & kept[later]
            better = passes[later].scores > passes[earlier].scores[:, None]
            kept[later] &= ~(same & ~better).any(axis=0)
        for earlier in range(later):
            same = _shared(passes[earlier], passes[later], radius) & kept[later]
            kept[earlier] &= ~same.any(axis=1)
    return kept


def _shared(first: PassMatches, second: PassMatches, radius: tuple[float, float]) -> np.ndarray:
    """(K, L) bool: matches of two passes that share a point in either image."""
    near = np.zeros((len(first.scores), len(second.scores)), dtype=bool)
    sides = ((first.points0, second.points0), (first.points1, second.points1))
    for (own, other), reach in zip(sides, radius, strict=True):
        own, other = own / reach, other / reach
        x, y = (own[:, None, axis] - other[None, :, axis] for axis in (0, 1))
        near |= x * x + y * y < 1
    return near


def with_points(features: Features, points: np.ndarray) -> Features:
    """The keypoints of an image followed by `points` (K, 2), stored pixels, which have no descriptors.

    As nothing can be matched to them, the result has descriptors of size 0 and the kind `JOINED`, which
    matchers refuse.
    """
    values, count = features.numpy(), len(points)
    keypoints = np.concatenate([values["keypoints"], np.asarray(points, dtype=np.float32)])
    return replace(
        features,
        keypoints=keypoints,
        descriptors=np.zeros((len(keypoints), 0), np.float32),
        scores=np.concatenate([values["scores"], np.zeros(count, np.float32)]),
        mask=np.concatenate([values["mask"], np.ones(count, bool)]),
        **dict.fromkeys(("scales", "orientations", "affine_frames", "cells", "grid", "maps")),
        kind=JOINED,
    )


def joined(
    features0: Features, features1: Features, first: Matches, further: Sequence[PassMatches], radius: float
) -> tuple[Features, Features, Matches]:
    """Join the first pass and further ones.

    Args:
        features0, features1: of the first pass.
        first: matches of the first pass.
        further: matches of the other passes.
        radius: pixels of the resized images within which points are the same.

    Returns:
        The keypoints of the first pass and, after them, those matched by further ones; and the matches
        kept, best first, each with the probability that its pass gave it.
    """
    passes = [PassMatches("first", first.points0, first.points1, first.scores), *further]
    reach = tuple(radius / float(np.sqrt(np.prod(to_numpy(f.scale)))) for f in (features0, features1))
    kept = joined_matches(passes, reach)
    new = [one.points0[keep] for one, keep in zip(further, kept[1:], strict=True)]
    new1 = [one.points1[keep] for one, keep in zip(further, kept[1:], strict=True)]
    scores = [one.scores[keep] for one, keep in zip(further, kept[1:], strict=True)]
    count = sum(map(len, new))
    added = np.arange(count)[:, None] + [len(features0), len(features1)]
    indices = np.concatenate([first.indices[kept[0]], added])
    points = (np.concatenate([first.points0[kept[0]], *new]), np.concatenate([first.points1[kept[0]], *new1]))
    score = np.concatenate([first.scores[kept[0]], *scores])
    order = np.argsort(-score, kind="stable")
    found = replace(
        first,
        indices=indices[order],
        points0=points[0][order],
        points1=points[1][order],
        scores=score[order],
        refinement=None,
        prior=None,
    )
    return (
        with_points(features0, points[0][len(indices) - count :]),
        with_points(features1, points[1][len(indices) - count :]),
        found,
    )
