"""Precision and recall of a network on views of photos that it never trains on."""

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
    """Mean precision and recall at the recipe's match distance, full depth, and matches kept per pair.

    Precision: share of matches whose reprojection is visible and near. Recall: share of true matches found.
    `f1` is the harmonic mean of the two.
    """
    full_depth = replace(model.config.policy, early_exit=False, pruning=False)
    matcher = AttentionMatcher(model.with_policy(full_depth), device=device)
    rows = [_judge(matcher, view0, view1, recipe) for view0, view1 in pairs]
    precisions, recalls, kept = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    precision, recall = (
        float(x[np.isfinite(x)].mean()) if np.isfinite(x).any() else 0.0 for x in (precisions, recalls)
    )
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"precision": precision, "recall": recall, "matches": float(kept.mean()), "f1": f1}


def _judge(
    matcher: AttentionMatcher, view0: CachedView, view1: CachedView, recipe: PairRecipe
) -> tuple[float, float, int]:
    """Precision (NaN without matches), recall (NaN where nothing can be matched) and matches of one pair."""
    matches = matcher(*(Features.stack([to_features(view)]) for view in (view0, view1)))[0]
    truth = label_partners(view0, view1, recipe)
    (moved0, known0), (moved1, known1) = correspondences(view0, view1), correspondences(view1, view0)
    at0, at1 = matches.indices.T
    there = np.linalg.norm(moved0[at0] - view1.keypoints[at1], axis=1)
    back = np.linalg.norm(moved1[at1] - view0.keypoints[at0], axis=1)
    error = (np.where(known0[at0], there, back) + np.where(known1[at1], back, there)) / 2
    judged = known0[at0] | known1[at1]
    correct = np.nan_to_num(error[judged], nan=np.inf) < recipe.match_distance
    found = truth.partner0[matches.indices[:, 0]] == matches.indices[:, 1]
    possible = (truth.partner0 >= 0).sum()
    precision = correct.mean() if len(correct) else np.nan
    return float(precision), float(found.sum() / possible) if possible else np.nan, len(matches)
