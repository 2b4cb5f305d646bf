"""Pairs drawn from views, with their true assignment.

Matched: the two points see the same texture and each reprojects onto the other within `match_distance`, each the
other's nearest. Unmatched: nothing lies within `unmatched_distance` of where the point reprojects, or it is out of
sight there. Between the two a point is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from matcher.frontends.sift import root_sift
from matcher.training.recipe import PairRecipe
from matcher.training.views import NOTHING, CachedView, ViewCache, plane_of
from matcher.types import Features

IGNORED, UNMATCHED = -2, -1


@dataclass(frozen=True, eq=False)
class Truth:
    """The true partner of each point, or UNMATCHED, or IGNORED."""

    partner0: np.ndarray  # (N,) int64
    partner1: np.ndarray  # (M,)


@dataclass(frozen=True, eq=False)
class PairBatch:
    """B pairs with the same number of points in every picture."""

    features0: Features
    features1: Features
    partner0: Tensor  # (B, N) int64
    partner1: Tensor  # (B, M)


def reproject(points: np.ndarray, source: CachedView, target: CachedView) -> np.ndarray:
    """Where points (N, 2) of one view lie in another of the same scene; NaN where they are not to be seen."""
    plane = plane_of(points, source.labels)
    found = np.full((len(points), 2), np.nan)
    for p in np.intersect1d(plane[plane != NOTHING], target.labels):
        chosen = plane == p
        H = target.homographies[p] @ np.linalg.inv(source.homographies[p])
        lifted = np.column_stack([points[chosen], np.ones(chosen.sum())]) @ H.T
        # Depths of both views are positive where the plane is seen, so the sign of the product decides.
        front = lifted[:, 2] > 1e-9
        moved = np.where(front[:, None], lifted[:, :2] / np.where(front, lifted[:, 2], 1)[:, None], np.nan)
        moved[plane_of(moved, target.labels) != p] = np.nan
        found[chosen] = moved
    return found


def true_assignment(view0: CachedView, view1: CachedView, recipe: PairRecipe) -> Truth:
    """Who matches whom, by reprojection; equally near candidates are told apart by descriptor."""
    moved0 = reproject(view0.keypoints, view0, view1)
    moved1 = reproject(view1.keypoints, view1, view0)
    there = _distances(moved0, view1.keypoints)
    back = _distances(moved1, view0.keypoints).T
    error = np.maximum(there, back)
    # SIFT puts several orientations on one point; the descriptor says which of them belong together.
    alike = root_sift(view0.descriptors) @ root_sift(view1.descriptors).T
    cost = np.where(error < recipe.match_distance, error + 2 * (1 - alike), np.inf)
    rows, columns = np.arange(len(there)), cost.argmin(1)
    mutual = (cost.argmin(0)[columns] == rows) & np.isfinite(cost[rows, columns])
    partner0 = np.where(there.min(1) > recipe.unmatched_distance, UNMATCHED, IGNORED)
    partner1 = np.where(back.min(0) > recipe.unmatched_distance, UNMATCHED, IGNORED)
    partner0[mutual], partner1[columns[mutual]] = columns[mutual], rows[mutual]
    return Truth(partner0, partner1)


def _distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N, M) distances; infinite from points that are NaN."""
    squared = ((points[:, None] - others[None]) ** 2).sum(-1)
    return np.sqrt(np.nan_to_num(squared, nan=np.inf))


def choose_points(
    view: CachedView, count: int, recipe: PairRecipe, centre: np.ndarray | None, rng: np.random.Generator
) -> CachedView:
    """The strongest `count` points after dropout, of the whole view or of a window around `centre` (2,)."""
    alive = np.flatnonzero(rng.random(len(view.keypoints)) >= rng.uniform(0, recipe.dropout))
    if centre is not None:
        offset = np.abs(view.keypoints[alive] - centre) / view.size
        pool = int(rng.uniform(1.0, 2.0) * count)
        alive = np.sort(alive[np.argsort(offset.max(1), kind="stable")[:pool]])
    return view.select(alive[:count])


def window_centres(
    view0: CachedView, view1: CachedView, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """A point of view 0 and where it lies in view 1; None where nothing is common."""
    if not len(view0.keypoints):
        return None, None
    candidates = view0.keypoints[rng.choice(len(view0.keypoints), 8)]
    moved = reproject(candidates, view0, view1)
    common = np.flatnonzero(np.isfinite(moved[:, 0]))
    return (candidates[common[0]], moved[common[0]]) if len(common) else (None, None)


def to_features(view: CachedView) -> Features:
    """A cached view as the network sees it."""
    return Features(
        keypoints=view.keypoints,
        descriptors=root_sift(view.descriptors),
        size=np.asarray(view.size, dtype=np.float32),
        scales=view.scales,
        orientations=view.angles,
        kind="sift",
    )


class PairSampler:
    """Batches of pairs, the same for the same seed, step and set of scenes."""

    def __init__(self, cache: ViewCache, recipe: PairRecipe, seed: int) -> None:
        self.cache, self.recipe, self.seed = cache, recipe, seed
        self.scenes = cache.ready()

    def refresh(self) -> None:
        """Take in scenes that were made meanwhile."""
        self.scenes = self.cache.ready()

    def batch(self, step: int) -> PairBatch:
        """The batch of a step."""
        rng = np.random.default_rng([self.seed, 1, step])
        count = int(rng.choice(self.recipe.points))
        pairs = []
        while len(pairs) < max(1, self.recipe.points_per_batch // (2 * count)):
            views = self.draw(rng)
            windowed = rng.random() < self.recipe.crop_share
            centres = window_centres(*views, rng) if windowed else (None, None)
            chosen = [
                choose_points(v, count, self.recipe, c, rng) for v, c in zip(views, centres, strict=True)
            ]
            if min(len(v.keypoints) for v in chosen) == count:
                pairs.append(chosen)
        return collate(pairs, self.recipe)

    def draw(self, rng: np.random.Generator) -> list[CachedView]:
        """Two views of one scene that mostly see something in common, or, in a share of cases, strangers."""
        first, second = (int(v) for v in rng.choice(self.cache.recipe.scene.views, 2, replace=False))
        if rng.random() < self.recipe.negative_share:
            scenes = rng.choice(self.scenes, 2, replace=False)
            views = [self.cache.read(int(s), [v])[0] for s, v in zip(scenes, (first, second), strict=True)]
            return [views[0], unrelated(views[1])]
        while True:
            views = self.cache.read(int(rng.choice(self.scenes)), [first, second])
            if overlap(*views, rng) > self.recipe.min_overlap or rng.random() < 0.1:
                return views


def overlap(view0: CachedView, view1: CachedView, rng: np.random.Generator) -> float:
    """Share of the points of view 0 whose place is visible in view 1, by a sample of 64."""
    if not len(view0.keypoints):
        return 0.0
    sample = view0.keypoints[rng.choice(len(view0.keypoints), 64)]
    return float(np.isfinite(reproject(sample, view0, view1)[:, 0]).mean())


def unrelated(view: CachedView) -> CachedView:
    """The view as seen from another scene: it shows nothing of it."""
    return replace(view, labels=np.full_like(view.labels, NOTHING))


def collate(pairs: list[tuple[CachedView, CachedView]], recipe: PairRecipe) -> PairBatch:
    """Pairs of views with equal point counts as one batch with its truth."""
    truths = [true_assignment(view0, view1, recipe) for view0, view1 in pairs]
    return PairBatch(
        Features.stack([to_features(view0) for view0, _ in pairs]),
        Features.stack([to_features(view1) for _, view1 in pairs]),
        torch.from_numpy(np.stack([t.partner0 for t in truths]).astype(np.int64)),
        torch.from_numpy(np.stack([t.partner1 for t in truths]).astype(np.int64)),
    )
