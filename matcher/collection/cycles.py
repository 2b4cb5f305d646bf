"""Matches of several images that contradict each other: going round a third image leads elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Pair = tuple[int, int]
_SAME_POINT = 1.5  # pixels of the resized images; detectors find some points twice
_FEWEST = 2  # third images that see both keypoints; one alone does not tell which of three matches is wrong
_CONFIRMED = 0.3  # share of them that confirm a right match, at least, even if many other matches are wrong


def consistent_matches(
    pairs: Mapping[Pair, np.ndarray], keypoints: Sequence[np.ndarray], scales: Sequence[float]
) -> dict[Pair, np.ndarray]:
    """Which matches of each pair (K,) bool are confirmed by enough third images, of those that can tell.

    A third image confirms a match if both of its keypoints match the same point there, and contradicts it if
    they match different ones (Zach et al., Disambiguating visual relations using loop constraints, 2010). A
    right match is contradicted where another match of its keypoints is wrong, so in three images none of the
    three is known to be wrong and all are kept; the most probable ones decide then (`build_tracks`).

    Args:
        pairs: (K, 2) keypoints of images i < j, each keypoint once on its side.
        keypoints: (N, 2) stored pixels of every image.
        scales: resized size / stored size of every image.
    """
    partner = _partners(pairs, [len(points) for points in keypoints])
    kept = {}
    for (first, second), indices in pairs.items():
        confirmed, seen = np.zeros((2, len(indices)), np.int64)
        for third in range(len(keypoints)):
            if (first, third) not in partner or (second, third) not in partner:
                continue
            ends = np.stack([partner[first, third][indices[:, 0]], partner[second, third][indices[:, 1]]])
            both = np.flatnonzero((ends >= 0).all(axis=0))
            here, there = keypoints[third][ends[:, both]]
            confirmed[both] += np.linalg.norm(here - there, axis=1) * scales[third] <= _SAME_POINT
            seen[both] += 1
        kept[first, second] = (seen < _FEWEST) | (confirmed >= _CONFIRMED * seen)
    return kept


def _partners(pairs: Mapping[Pair, np.ndarray], counts: Sequence[int]) -> dict[Pair, np.ndarray]:
    """For images (i, j) in either order, the keypoint of j that each of i matches (N,), −1 without one."""
    found = {}
    for (first, second), indices in pairs.items():
        for source, target, (column0, column1) in (
            (first, second, indices.T),
            (second, first, indices.T[::-1]),
        ):
            found[source, target] = np.full(counts[source], -1, np.int64)
            found[source, target][column0] = column1
    return found
