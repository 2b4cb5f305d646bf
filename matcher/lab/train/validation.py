"""Precision and recall of a network on views of photos that are not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from matcher.data.features import Features
from matcher.lab.train.labels import ViewPair, correspondences, label_partners, to_features
from matcher.lab.train.recipe import PairRecipe
from matcher.lab.train.sampler import PairSampler
from matcher.lab.train.views import CachedView
from matcher.match.network.inference import AttentionMatcher
from matcher.match.network.model import MatchingNetwork


def validation_pairs(sampler: PairSampler, count: int, points: int) -> list[ViewPair]:
    """`count` fixed pairs of views with at most `points` points each."""
    rng = np.random.default_rng(12345)
    drawn = (sampler.draw(rng) for _ in range(count))
    return [(_strongest(view0, points), _strongest(view1, points)) for view0, view1 in drawn]


def _strongest(view: CachedView, points: int) -> CachedView:
    return view.select(np.arange(min(points, len(view.keypoints))))


def validate(
    model: MatchingNetwork, pairs: Sequence[ViewPair], recipe: PairRecipe, device: str = "cpu"
) -> dict[str, float]:
    """Mean precision and recall at the recipe's match distance, with all layers, and matches per pair.

    Precision: share of matches with a reprojection error below that distance. Recall: share of ground-truth
    matches that are found. `f1` is the harmonic mean of the two.
    """
    full_depth = replace(model.config.policy, early_exit=False, pruning=False)
    matcher = AttentionMatcher(model.with_policy(full_depth), device=device)
    rows = [_measure(matcher, view0, view1, recipe) for view0, view1 in pairs]
    precisions, recalls, kept = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    precision, recall = (
        float(x[np.isfinite(x)].mean()) if np.isfinite(x).any() else 0.0 for x in (precisions, recalls)
    )
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"precision": precision, "recall": recall, "matches": float(kept.mean()), "f1": f1}


def _measure(
    matcher: AttentionMatcher, view0: CachedView, view1: CachedView, recipe: PairRecipe
) -> tuple[float, float, int]:
    """Precision (NaN without matches), recall (NaN without ground-truth matches) and matches of one pair."""
    matches = matcher(*(Features.stack([to_features(view)]) for view in (view0, view1)))[0]
    labels = label_partners(view0, view1, recipe)
    (corresponding0, known0), (corresponding1, known1) = (
        correspondences(view0, view1),
        correspondences(view1, view0),
    )
    index0, index1 = matches.indices.T
    forward = np.linalg.norm(corresponding0[index0] - view1.keypoints[index1], axis=1)
    backward = np.linalg.norm(corresponding1[index1] - view0.keypoints[index0], axis=1)
    error = (np.where(known0[index0], forward, backward) + np.where(known1[index1], backward, forward)) / 2
    known = known0[index0] | known1[index1]
    correct = np.nan_to_num(error[known], nan=np.inf) < recipe.match_distance
    found = labels.partner0[index0] == index1
    possible = (labels.partner0 >= 0).sum()
    precision = correct.mean() if len(correct) else np.nan
    return float(precision), float(found.sum() / possible) if possible else np.nan, len(matches)
