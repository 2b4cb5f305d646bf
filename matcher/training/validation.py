"""Precision and recall of a network on views of photos that it never trains on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from matcher.config import AdaptivityConfig
from matcher.network.inference import AttentionMatcher
from matcher.network.model import Model
from matcher.training.pairs import PairSampler, reproject, to_features, true_assignment
from matcher.training.recipe import PairRecipe
from matcher.training.views import CachedView
from matcher.types import Features


def validation_pairs(sampler: PairSampler, count: int, points: int) -> list[list[CachedView]]:
    """`count` fixed pairs of views with at most `points` points each."""
    rng = np.random.default_rng(12345)
    return [
        [view.select(np.arange(len(view.keypoints))[:points]) for view in sampler.draw(rng)]
        for _ in range(count)
    ]


def validate(model: Model, pairs: list[list[CachedView]], recipe: PairRecipe) -> dict[str, float]:
    """Mean precision and recall at the recipe's match distance, full depth, and matches kept per pair.

    Precision: share of matches whose reprojection is visible and near. Recall: share of true matches found.
    """
    matcher = AttentionMatcher(model)
    full_depth = AdaptivityConfig(early_exit=False, pruning=False)
    matcher.model.config = replace(model.config, adaptivity=full_depth)
    precision, recall, kept = [], [], []
    for view0, view1 in pairs:
        matches = matcher(*(Features.stack([to_features(v)]) for v in (view0, view1)))[0]
        truth = true_assignment(view0, view1, recipe)
        error = np.linalg.norm(reproject(matches.points0, view0, view1) - matches.points1, axis=1)
        correct = np.nan_to_num(error, nan=np.inf) < recipe.match_distance
        found = truth.partner0[matches.indices[:, 0]] == matches.indices[:, 1]
        possible = (truth.partner0 >= 0).sum()
        kept.append(len(matches))
        if len(matches):
            precision.append(correct.mean())
        if possible:
            recall.append(found.sum() / possible)
    return {
        "precision": float(np.mean(precision)) if precision else 0.0,
        "recall": float(np.mean(recall)) if recall else 0.0,
        "matches": float(np.mean(kept)),
    }
