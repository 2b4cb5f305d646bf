"""Batches of pairs drawn from cached views."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from matcher.errors import UsageError
from matcher.lab.train.labels import PairBatch, ViewPair, as_unrelated, collate, correspondences, reproject
from matcher.lab.train.recipe import PairRecipe
from matcher.lab.train.views import CachedView, ViewCache

REFRESH_EVERY = 50  # batches
ATTEMPTS = 100  # for each pair of a batch
UNRELATED_ATTEMPTS = 10  # to find two scenes without a common photo


class PairSampler:
    """Batches of pairs, the same for the same seed, step and set of scenes."""

    def __init__(self, cache: ViewCache, recipe: PairRecipe, seed: int) -> None:
        self.cache, self.recipe, self.seed = cache, recipe, seed
        self.scenes = cache.ready()

    def refresh(self) -> None:
        """Also use scenes that were made meanwhile."""
        self.scenes = self.cache.ready()

    def batch(self, step: int) -> PairBatch:
        """The batch of a step.

        Raises:
            UsageError: hardly any view has as many keypoints as the recipe asks for.
            IntegrityError: a cached scene is damaged.
        """
        rng = np.random.default_rng([self.seed, 1, step])
        count = int(rng.choice(self.recipe.points))
        wanted = max(1, self.recipe.points_per_batch // (2 * count))
        pairs: list[ViewPair] = []
        for _ in range(ATTEMPTS * wanted):
            chosen = self._crop(self.draw(rng), count, rng)
            if min(len(view.keypoints) for view in chosen) == count:
                pairs.append(chosen)
            if len(pairs) == wanted:
                return collate(pairs, self.recipe, rng)
        raise UsageError(
            f"hardly any view of the photos has {count} keypoints; "
            "lower pair.points in the recipe or use sharper, larger photos"
        )

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[PairBatch]:
        """The batches of steps start … stop−1, as many as there are readers (threads) prepared ahead."""
        with ThreadPoolExecutor(readers) as pool:
            ahead = deque(pool.submit(self.batch, step) for step in range(start, min(stop, start + readers)))
            for step in range(start, stop):
                batch = ahead.popleft().result()
                if step % REFRESH_EVERY == 0:
                    self.refresh()
                if step + readers < stop:
                    ahead.append(pool.submit(self.batch, step + readers))
                yield batch

    def draw(self, rng: np.random.Generator) -> ViewPair:
        """Two views of one scene, mostly with enough overlap, or sometimes an unrelated pair."""
        first, second = (int(v) for v in rng.choice(self.cache.recipe.scene.views, 2, replace=False))
        if rng.random() < self.recipe.negative_share:
            pair = self._unrelated_pair(first, second, rng)
            if pair:
                return pair
        while True:
            views = self.cache.read(int(rng.choice(self.scenes)), [first, second])
            if overlap(*views, rng) > self.recipe.min_overlap or rng.random() < 0.1:
                return views[0], views[1]

    def _unrelated_pair(self, first: int, second: int, rng: np.random.Generator) -> ViewPair | None:
        """Views of two scenes without a common photo; None where there are too few photos for that."""
        for _ in range(UNRELATED_ATTEMPTS):
            scene0, scene1 = (int(s) for s in rng.choice(self.scenes, 2, replace=False))
            view0, view1 = self.cache.read(scene0, [first])[0], self.cache.read(scene1, [second])[0]
            if not view0.photos & view1.photos:
                return view0, as_unrelated(view1)
        return None

    def _crop(self, views: ViewPair, count: int, rng: np.random.Generator) -> ViewPair:
        """At most `count` keypoints of each view, sometimes from a window around a covisible point."""
        cropped = rng.random() < self.recipe.crop_share
        centres = window_centres(*views, rng) if cropped else (None, None)
        view0, view1 = (
            choose_points(view, count, self.recipe, centre, rng)
            for view, centre in zip(views, centres, strict=True)
        )
        return view0, view1


def choose_points(
    view: CachedView, count: int, recipe: PairRecipe, centre: np.ndarray | None, rng: np.random.Generator
) -> CachedView:
    """The strongest `count` keypoints after dropout, of the view or of a window around `centre` (2,)."""
    alive = np.flatnonzero(rng.random(len(view.keypoints)) >= rng.uniform(0, recipe.dropout))
    if centre is not None:
        offset = np.abs(view.keypoints[alive] - centre) / view.size
        pool = int(rng.uniform(1.0, 2.0) * count)
        alive = np.sort(alive[np.argsort(offset.max(1), kind="stable")[:pool]])
    return view.select(alive[:count])


def window_centres(
    view0: CachedView, view1: CachedView, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """A keypoint of view 0 and its position in view 1; None where none is covisible."""
    if not len(view0.keypoints):
        return None, None
    chosen = rng.choice(len(view0.keypoints), 8)
    candidates, corresponding = view0.keypoints[chosen], correspondences(view0.select(chosen), view1)[0]
    visible = np.flatnonzero(np.isfinite(corresponding[:, 0]))
    return (candidates[visible[0]], corresponding[visible[0]]) if len(visible) else (None, None)


def overlap(view0: CachedView, view1: CachedView, rng: np.random.Generator) -> float:
    """Share of the keypoints of view 0 that are visible in view 1, by a sample of 64."""
    if not len(view0.keypoints):
        return 0.0
    sample = view0.keypoints[rng.choice(len(view0.keypoints), 64)]
    return float(np.isfinite(reproject(sample, view0, view1)[:, 0]).mean())
