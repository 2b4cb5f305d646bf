"""Batches of pairs that are made on the device: no pair comes twice, and no processor has to keep up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from matcher.config import ExtractorConfig
from matcher.data.features import Features
from matcher.extract.learned import BORDER, NMS_RADIUS, SCORE_THRESHOLD, candidates, refine
from matcher.lab.pairs.dense import HIDDEN_STATE, VISIBLE_STATE
from matcher.lab.train.labels import PairBatch
from matcher.lab.train.on_device.draws import Draws
from matcher.lab.train.on_device.framing import PROBES, draw_framings, render
from matcher.lab.train.on_device.labels import partners, quarter_turns_of
from matcher.lab.train.on_device.photometry import capture
from matcher.lab.train.on_device.transfer import Transferred, overlap, project, transfer, within
from matcher.lab.train.on_device.views import DeviceViews
from matcher.lab.train.recipe import Recipe
from matcher.match.steering import turned_by
from matcher.torch_engine import build_extractor

_LITTLE_OVERLAP_SHARE = 0.1  # pairs that are kept whatever they have in common
_WEAK = 1e-4  # factor of the scores of pixels that are no keypoints; they come last


class _Choice(NamedTuple):
    """Views of B pairs."""

    first: Tensor  # (B,) int64
    second: Tensor
    flat: Tensor  # (B,) bool, a photo and itself
    real: Tensor  # (B,) bool, images that a camera took


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
        self.size = recipe.sources.width, recipe.sources.height
        config = ExtractorConfig(kind=recipe.network.kind)
        self._front_end = build_extractor(config, recipe.front_end or None, device).network
        shares = {name: share for name, share in recipe.sources.shares().items() if share > 0}
        self._sources, total = tuple(shares), sum(shares.values())
        self._shares = [share / total for share in shares.values()]

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[PairBatch]:
        """The batches of steps start … stop−1; `readers` have nothing to do."""
        for step in range(start, stop):
            yield self.batch(step)

    @torch.no_grad()
    def batch(self, step: int) -> PairBatch:
        """The batch of a step."""
        rng = np.random.default_rng([self.recipe.seed, 1, step])
        points = int(rng.choice(self.recipe.pair.points))
        count = max(1, self.recipe.pair.points_per_batch // (2 * points))
        draws = Draws(int(rng.integers(2**62)), self.device)
        chosen = self._choose(count, rng, draws)
        framing0, framing1 = draw_framings(
            self.views, chosen.first, chosen.second, chosen.flat, self.size, draws
        )
        images = [
            render(self.views, chosen.first, framing0, self.size),
            render(self.views, chosen.second, framing1, self.size),
        ]
        images = capture(torch.cat(images), ~torch.cat([chosen.real, chosen.real]), draws)
        keypoints, descriptors = self._described(images, points, draws)
        (points0, points1), (described0, described1) = keypoints.chunk(2), descriptors.chunk(2)
        found0 = self._found(chosen.first, chosen.second, chosen.flat, (framing0, framing1), points0)
        found1 = self._found(chosen.second, chosen.first, chosen.flat, (framing1, framing0), points1)
        other, unrelated = self._unrelated(chosen, draws)
        points1, described1 = points1[other], described1[other]
        found1 = Transferred(*(values[other] for values in found1))
        found0, found1 = (_hidden(found, unrelated) for found in (found0, found1))
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

    def _choose(self, count: int, rng: np.random.Generator, draws: Draws) -> _Choice:
        """Views of pairs by the shares; a pair of little overlap gives way to another one, mostly."""
        sources = rng.choice(len(self._sources), count, p=self._shares)
        candidates = [self._pairs(sources, rng) for _ in range(2)]
        flat, real = (
            torch.tensor(np.array([self._sources[s] == name for s in sources]), device=self.device)
            for name in ("planes", "real")
        )
        first, second = candidates[0]
        probes = draws.uniform(count, PROBES, 2) * (self.views.sizes[first] - 1).unsqueeze(1)
        kept = overlap(self.views, first, second, probes) >= self.recipe.pair.min_overlap
        kept |= flat | draws.happens(count, _LITTLE_OVERLAP_SHARE)
        first, second = (torch.where(kept, a, b) for a, b in zip(*candidates, strict=True))
        return _Choice(first, second, flat, real)

    def _pairs(self, sources: np.ndarray, rng: np.random.Generator) -> Tensor:
        """(2, B) int64 views; a set of a source is drawn as often as the root of its number of pairs."""
        drawn = []
        for source in sources:
            if self._sources[source] == "planes":
                drawn.append((rng.choice(self.views.photos),) * 2)
                continue
            tables = self.views.pairs[self._sources[source]]
            weights = np.sqrt([len(table) for table in tables])
            table = tables[rng.choice(len(tables), p=weights / weights.sum())]
            pair = table[rng.integers(len(table))]
            drawn.append(pair if rng.random() < 0.5 else pair[::-1])
        return torch.tensor(np.array(drawn).T, device=self.device)

    def _described(self, images: Tensor, count: int, draws: Draws) -> tuple[Tensor, Tensor]:
        """`count` keypoints (B, N, 2) of each image, the strongest after dropout, and descriptors."""
        logits, maps = self._front_end(images)
        rate = draws.uniform(len(images), 1, 1, high=self.recipe.pair.dropout)
        kept = candidates(logits, NMS_RADIUS, BORDER) & (draws.uniform(*logits.shape) >= rate)
        scores = logits.sigmoid()
        scores = torch.where(kept & (scores > SCORE_THRESHOLD), scores, _WEAK * scores).flatten(1)
        index = scores.topk(count, dim=1).indices
        points = torch.stack([index % self.size[0], index // self.size[0]], dim=2)
        points = refine(logits, points)
        return points, self._front_end.describe(maps, points)

    def _found(
        self, source: Tensor, target: Tensor, flat: Tensor, framings: tuple[Tensor, Tensor], points: Tensor
    ) -> Transferred:
        """Keypoints of an image in the other image of its pair, NaN where not visible."""
        old, _ = project(torch.linalg.inv(framings[0]).float(), points)
        inside = within(old, self.views.sizes[source])
        found, states = transfer(self.views, source, target, old)
        found = torch.where(flat.view(-1, 1, 1), old, found)
        states = torch.where(flat.unsqueeze(1), VISIBLE_STATE, states).where(inside, HIDDEN_STATE)
        new, depth = project(framings[1].float(), found)
        shown = within(new, new.new_tensor(self.size).expand(len(new), 2)) & (depth > 0)
        states = torch.where((states == VISIBLE_STATE) & ~shown, HIDDEN_STATE, states)
        return Transferred(new.masked_fill((states != VISIBLE_STATE).unsqueeze(2), torch.nan), states)

    def _unrelated(self, chosen: _Choice, draws: Draws) -> tuple[Tensor, Tensor]:
        """(B,) whose image 1 each pair gets, and whether it is another one's, of a scene of its own."""
        count = len(chosen.first)
        here = torch.arange(count, device=self.device)
        following = here.roll(-1)
        scenes = self.views.scenes
        unrelated = draws.happens(count, self.recipe.pair.negative_share)
        unrelated &= scenes[chosen.first] != scenes[chosen.second[following]]
        return torch.where(unrelated, following, here), unrelated

    def _features(self, points: Tensor, descriptors: Tensor) -> Features:
        size = points.new_tensor(self.size).expand(len(points), 2)
        return Features(points, descriptors, size=size, kind=self.recipe.network.kind)


def _hidden(found: Transferred, where: Tensor) -> Transferred:
    """All points of the pairs `where` (B,) bool as hidden."""
    return Transferred(
        found.positions.masked_fill(where.view(-1, 1, 1), torch.nan),
        found.states.masked_fill(where.unsqueeze(1), HIDDEN_STATE),
    )
