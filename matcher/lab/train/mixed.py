"""Batches of pairs of planes and of other sources, with the shares of the recipe."""

from __future__ import annotations

import numpy as np

from matcher.lab.train.labels import ViewPair, as_unrelated
from matcher.lab.train.pair_cache import CorrespondingPair, PairCache
from matcher.lab.train.recipe import Recipe
from matcher.lab.train.sampler import UNRELATED_ATTEMPTS, PairSampler
from matcher.lab.train.views import ViewCache


class MixedSampler(PairSampler):
    """As `PairSampler`, with a share of the pairs from a second cache.

    Args:
        cache: scenes of planes.
        pairs: pairs of other sources.
        recipe: shares, and how pairs are drawn.
        seed: of the random draws.
    """

    def __init__(self, cache: ViewCache, pairs: PairCache, recipe: Recipe, seed: int) -> None:
        super().__init__(cache, recipe.pair, seed)
        self.pairs, self.share = pairs, recipe.sources.share
        self.numbers = pairs.ready()

    def refresh(self) -> None:
        """Also use what was made meanwhile."""
        super().refresh()
        self.numbers = self.pairs.ready()

    def draw(self, rng: np.random.Generator) -> ViewPair:
        """A pair of either kind, or an unrelated pair."""
        if len(self.numbers) < 2 or rng.random() >= self.share:
            return super().draw(rng)
        if rng.random() < self.recipe.negative_share:
            pair = self._unrelated(rng)
            if pair is not None:
                return pair
        return self._read(rng)

    def _read(self, rng: np.random.Generator) -> CorrespondingPair:
        view0, view1 = self.pairs.read(int(rng.choice(self.numbers)))
        return (view0, view1) if rng.random() < 0.5 else (view1, view0)

    def _unrelated(self, rng: np.random.Generator) -> ViewPair | None:
        """Images of two pairs without a common scene; None where random draws find none."""
        for _ in range(UNRELATED_ATTEMPTS):
            view0, view1 = self._read(rng)[0], self._read(rng)[1]
            if not view0.scenes & view1.scenes:
                return as_unrelated(view0), as_unrelated(view1)
        return None
