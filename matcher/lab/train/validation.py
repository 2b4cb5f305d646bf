"""Precision and recall of a network on views of photos that are not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from matcher.data.features import Features
from matcher.lab.train.labels import ViewPair, correspondences, label_partners, to_features
from matcher.lab.train.recipe import PairRecipe
from matcher.lab.train.sampler import PairSampler
from matcher.lab.train.views import CachedView
from matcher.match.network.inference import AttentionMatcher
from matcher.match.network.model import MatchingNetwork

THRESHOLDS = (0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


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
    """Precision and recall at the recipe's match distance, with all layers, means over the pairs.

    Of several thresholds of the match probability (`credible_matches`) the one with the highest F1 counts:
    training also moves the probabilities, and at one threshold that would show as better or worse matches.

    Returns:
        precision: share of matches with a reprojection error below the match distance.
        recall: share of ground-truth matches that are found.
        matches: number a pair.
        f1: harmonic mean of precision and recall.
        threshold: the one they are of.
    """
    policy = replace(
        model.config.policy,
        early_exit=False,
        pruning=False,
        match_threshold=THRESHOLDS[0],
        threshold_doubles_at=0.0,
    )
    matcher = AttentionMatcher(model.with_policy(policy), device=device)
    judged = [_judge(matcher, view0, view1, recipe) for view0, view1 in pairs]
    doubles_at = model.config.policy.threshold_doubles_at
    found = (_mean_scores(judged, threshold, doubles_at) for threshold in THRESHOLDS)
    return max(found, key=lambda scores: scores["f1"])


class _Judged(NamedTuple):
    """The matches of one pair, beside what is known of them."""

    probabilities: np.ndarray  # (K,)
    known: np.ndarray  # (K,) bool: the true place of either point is known
    correct: np.ndarray  # (K,) bool, where known
    found: np.ndarray  # (K,) bool: a ground-truth match
    possible: int  # ground-truth matches

    def above(self, threshold: float, doubles_at: float) -> np.ndarray:
        """(K,) bool: which matches are kept; see `credible_matches`."""
        expected = self.probabilities[self.probabilities > threshold].sum()
        raised = threshold * (1 + doubles_at / expected) if expected else threshold
        return self.probabilities > raised


def _mean_scores(judged: Sequence[_Judged], threshold: float, doubles_at: float) -> dict[str, float]:
    """What `validate` returns, at one threshold; pairs without matches have no precision."""
    kept = [each.above(threshold, doubles_at) for each in judged]
    precisions = [
        each.correct[chosen & each.known].mean()
        for each, chosen in zip(judged, kept, strict=True)
        if (chosen & each.known).any()
    ]
    recalls = [
        each.found[chosen].sum() / each.possible
        for each, chosen in zip(judged, kept, strict=True)
        if each.possible
    ]
    precision, recall = (float(np.mean(x)) if x else 0.0 for x in (precisions, recalls))
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    matches = float(np.mean([chosen.sum() for chosen in kept])) if kept else 0.0
    return {"precision": precision, "recall": recall, "matches": matches, "f1": f1, "threshold": threshold}


def _judge(matcher: AttentionMatcher, view0: CachedView, view1: CachedView, recipe: PairRecipe) -> _Judged:
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
    correct = np.nan_to_num(error, nan=np.inf) < recipe.match_distance
    possible = int((labels.partner0 >= 0).sum())
    found = labels.partner0[index0] == index1
    return _Judged(matches.scores, known0[index0] | known1[index1], correct, found, possible)
