"""Batches of pairs for a matcher that are made on the device: no pair comes twice, and no processor has to
keep up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from matcher.config import ExtractorConfig
from matcher.data.features import Features
from matcher.extract.learned import BORDER, NMS_RADIUS, SCORE_THRESHOLD, candidates, refine
from matcher.lab.train.labels import PairBatch
from matcher.lab.train.on_device.ahead import made_ahead
from matcher.lab.train.on_device.draws import Draws
from matcher.lab.train.on_device.image_pairs import DrawnPairs, draw_images
from matcher.lab.train.on_device.labels import partners, quarter_turns_of
from matcher.lab.train.on_device.small import constant
from matcher.lab.train.on_device.views import DeviceViews
from matcher.lab.train.recipe import Recipe
from matcher.match.steering import turned_by
from matcher.torch_engine import build_extractor

_WEAK = 1e-4  # factor of the scores of pixels that are no keypoints; they come last


class DeviceSampler:
    """Batches of pairs, the same for the same recipe, step and kind of device.

    Args:
        views: to cut images from.
        recipe: shares of `planes` (photos), `rendered` and `real` views, and how pairs are drawn.
        device: of the views.

    Raises:
        IntegrityError, UsageError: as `build_extractor`, for the recipe's front end.
    """

    def __init__(self, views: DeviceViews, recipe: Recipe, device: torch.device) -> None:
        self.views, self.recipe, self.device = views, recipe, device
        size = recipe.sources.width, recipe.sources.height
        pair = recipe.pair
        self._drawn = DrawnPairs(
            size, recipe.sources.shares(), pair.min_overlap, negative_share=pair.negative_share
        )
        config = ExtractorConfig(kind=recipe.network.kind)
        self._front_end = build_extractor(config, recipe.front_end or None, device).network

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[PairBatch]:
        """The batches of steps start … stop−1; `readers` have nothing to do."""
        return made_ahead(self.batch, start, stop, self.device)

    @torch.no_grad()
    def batch(self, step: int) -> PairBatch:
        """The batch of a step."""
        rng = np.random.default_rng([self.recipe.seed, 1, step])
        points = int(rng.choice(self.recipe.pair.points))
        count = max(1, self.recipe.pair.points_per_batch // (2 * points))
        draws = Draws(int(rng.integers(2**62)), self.device)
        pairs = draw_images(self.views, count, self._drawn, rng, draws)
        keypoints, descriptors = self._described(pairs.images, points, draws)
        (points0, points1), (described0, described1) = keypoints.chunk(2), descriptors.chunk(2)
        found0, found1 = pairs.found(0, points0), pairs.found(1, points1)
        labels = partners(points0, points1, found0, found1, self.recipe.pair)
        turns = quarter_turns_of(points0, found0.positions)
        return PairBatch(
            self._features(points0, described0),
            turned_by(self._features(points1, described1), turns),
            *labels,
            found0.positions,
            found1.positions,
            turns_known=True,
        )

    def _described(self, images: Tensor, count: int, draws: Draws) -> tuple[Tensor, Tensor]:
        """`count` keypoints (B, N, 2) of each image, the strongest after dropout, and descriptors."""
        logits, maps = self._front_end(images)
        width = logits.shape[2]
        rate = draws.uniform(len(images), 1, 1, high=self.recipe.pair.dropout)
        kept = candidates(logits, NMS_RADIUS, BORDER) & (draws.uniform(*logits.shape) >= rate)
        scores = logits.sigmoid()
        scores = torch.where(kept & (scores > SCORE_THRESHOLD), scores, _WEAK * scores).flatten(1)
        index = scores.topk(count, dim=1).indices
        points = torch.stack([index % width, index // width], dim=2)
        points = refine(logits, points)
        return points, self._front_end.describe(maps, points)

    def _features(self, points: Tensor, descriptors: Tensor) -> Features:
        size = constant(self._drawn.size, points.dtype, points.device).expand(len(points), 2)
        kind = self.recipe.network.kind
        return Features.of_valid(keypoints=points, descriptors=descriptors, size=size, kind=kind)
