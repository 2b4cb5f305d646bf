"""Pairs worth matching with all keypoints, found by matching their strongest few first.

Preemptive matching (Wu, Towards linear-time incremental structure from motion, 3DV 2013): most pairs of a
collection show different places, or too little of one, and a few hundred keypoints are enough to see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from matcher.data.features import Features
from matcher.data.strongest import strongest
from matcher.loading import with_estimation
from matcher.match.retrieval import similar_pairs
from matcher.pipeline import Pipeline
from matcher.verify.verdict import NOT, verdict_of

KEYPOINTS = 512  # strongest ones of an image that are matched first
BEST = 6  # partners of an image that are matched in any case where they agree, those with most inliers
_SURE = 2  # candidates of an image without any likely partner that are matched nevertheless
_CACHED = 128  # images whose strongest keypoints are kept

Progress = Callable[[int, int], None]  # candidates done, of all


def candidate_pairs(
    names: Sequence[str],
    features: Callable[[str], Features],
    k: int,
    nearby: Sequence[tuple[str, str]] = (),
) -> list[tuple[str, str]]:
    """Each image with the `k` most similar ones, all pairs where there are no more, and pairs taken nearby.

    Raises:
        UsageError: k below 1, or descriptors of several sizes.
    """
    names = list(dict.fromkeys(names))
    if k >= len(names) - 1:
        return list(combinations(names, 2))
    similar = list(similar_pairs(names, features, k))
    known = {frozenset(pair) for pair in similar}
    return similar + [pair for pair in nearby if frozenset(pair) not in known]


def preemptive_pairs(
    candidates: Sequence[tuple[str, str]],
    features: Callable[[str], Features],
    pipeline: Pipeline,
    *,
    partners: Mapping[str, int] | None = None,
    on_progress: Progress | None = None,
) -> list[tuple[str, str]]:
    """Of these pairs, those whose strongest keypoints agree.

    A pair is taken where the verdict on its strongest keypoints is not "different places", and where it is
    among the `BEST` of one of its images by the number of inliers. An image without such a pair keeps its
    two best candidates, so that none is lost here, and one with few such pairs those of its partners'
    partners.

    Args:
        candidates: names of two images each, every pair once.
        features: the features of an image, unbatched.
        partners: how many others an image is matched with already; they count among its `BEST`.
        pipeline: matches and verifies; by a fundamental matrix where its geometry needs cameras.
        on_progress: called after every candidate.
    """
    verifier = _without_cameras(pipeline)
    strongest_of = lru_cache(_CACHED)(lambda name: strongest(features(name), KEYPOINTS))
    tried = np.zeros((len(candidates), 2))  # inliers, probability of the same place
    for row, (name0, name1) in enumerate(candidates):
        tried[row] = _agreement(pipeline, verifier, strongest_of(name0), strongest_of(name1))
        if on_progress is not None:
            on_progress(row + 1, len(candidates))
    return _chosen(candidates, tried[:, 0], tried[:, 1] > NOT, partners or {})


def _without_cameras(pipeline: Pipeline) -> Pipeline:
    """The pipeline, with a geometry that needs no cameras."""
    estimation = pipeline.config.estimation
    if estimation.kind != "essential":
        return pipeline
    return with_estimation(pipeline, replace(estimation, kind="fundamental"))


def _agreement(
    pipeline: Pipeline, verifier: Pipeline, features0: Features, features1: Features
) -> tuple[int, float]:
    """Inliers of a pair, and the probability that it shows one place."""
    if min(len(features0), len(features1)) == 0:
        return 0, 0.0
    matches = pipeline.match_features(features0, features1)
    geometry = verifier.verify(features0, features1, matches)
    verdict = verdict_of(matches, geometry, features0.image_size, features1.image_size)
    return int(geometry.inliers.sum()), 1.0 if verdict is None else verdict.probability


def _chosen(
    candidates: Sequence[tuple[str, str]],
    inliers: np.ndarray,
    likely: np.ndarray,
    partners: Mapping[str, int],
) -> list[tuple[str, str]]:
    """The pairs to match, in the order of the candidates."""
    of_image: dict[str, list[int]] = {}
    for row, pair in enumerate(candidates):
        for name in pair:
            of_image.setdefault(name, []).append(row)
    taken: set[int] = set()
    for name, rows in of_image.items():
        best = sorted(rows, key=lambda row: -inliers[row])
        agreeing = [row for row in best if likely[row]]
        before = partners.get(name, 0)
        taken.update(agreeing[: max(0, BEST - before)] if agreeing or before else best[:_SURE])
    _add_indirect(taken, candidates, of_image, inliers, likely)
    return [candidates[row] for row in sorted(taken)]


def _add_indirect(
    taken: set[int],
    candidates: Sequence[tuple[str, str]],
    of_image: Mapping[str, list[int]],
    inliers: np.ndarray,
    likely: np.ndarray,
) -> None:
    """Add pairs of images that agree with a common third one, where they have fewer than `BEST` partners.

    Along a path, such wide pairs are the ones whose rays meet at angles that a reconstruction can begin with.
    """
    agreeing: dict[str, set[str]] = {}
    for row in taken:
        if likely[row]:
            for name, other in (candidates[row], candidates[row][::-1]):
                agreeing.setdefault(name, set()).add(other)
    for name, rows in of_image.items():
        near = agreeing.get(name, set())
        wide = [
            row
            for row in rows
            if row not in taken
            and any(near & agreeing.get(other, set()) for other in candidates[row] if other != name)
        ]
        wide.sort(key=lambda row: -inliers[row])
        taken.update(wide[: max(0, BEST - len(near))])
