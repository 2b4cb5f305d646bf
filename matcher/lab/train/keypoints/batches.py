"""Batches of image pairs with dense ground truth, to train the front end on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from matcher.extract.feature_network import sample
from matcher.lab.pairs.dense import UNKNOWN, DensePair, PairSource, dominant_turn, quarter_turned
from matcher.lab.train.keypoints.recipe import FrontEndRecipe

CONTOUR = 7  # pixels; a hidden point with a visible one in a square of that size may lie on either surface


@dataclass(frozen=True, eq=False)
class ImageBatch(ABC):
    """2B images; images 2b and 2b + 1 are a pair."""

    pixels: Tensor  # (2B, 1, H, W) float32 in [0, 1]
    turns: Tensor  # (2B,) int64 clockwise 90-degree rotations of each image relative to the first of its pair

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.pixels) // 2

    @abstractmethod
    def transfer(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (2B, N, 2) of points in the other image, and (2B, N) bool whether it shows them."""

    @abstractmethod
    def surely_hidden(self, points: Tensor) -> Tensor:
        """(2B, N) bool: points that the other image does not show, nor what lies around them (`CONTOUR`)."""

    @abstractmethod
    def first(self, pairs: int) -> ImageBatch:
        """The first pairs."""

    @abstractmethod
    def to(self, device: torch.device) -> ImageBatch:
        """The same batch on another device."""


@dataclass(frozen=True, eq=False)
class DenseBatch(ImageBatch):
    """Images with the positions of all their pixels."""

    positions: Tensor  # (2B, 2, H, W) float32, as in `dense.DensePair`

    def transfer(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """As `ImageBatch.transfer`, by interpolation; visible are points between visible pixels."""
        visible = sample((self.positions[:, :1] >= 0).float(), points, "zeros")[..., 0] > 0.999
        return sample(self.positions.clamp(min=0), points, "zeros"), visible

    def surely_hidden(self, points: Tensor) -> Tensor:
        """As `ImageBatch.surely_hidden`, by the nearest pixel."""
        state = self.positions[:, 0]
        height, width = state.shape[1:]
        at = points.round().long()
        at = at[..., 1].clamp(0, height - 1) * width + at[..., 0].clamp(0, width - 1)
        around = max_pool2d((state[:, None] >= 0).float(), CONTOUR, 1, CONTOUR // 2)[:, 0]
        return (state.flatten(1).gather(1, at) > UNKNOWN) & (around.flatten(1).gather(1, at) == 0)

    def first(self, pairs: int) -> DenseBatch:
        """As `ImageBatch.first`."""
        return DenseBatch(*(values[: 2 * pairs] for values in vars(self).values()))

    def to(self, device: torch.device) -> DenseBatch:
        """As `ImageBatch.to`."""
        return DenseBatch(*(values.to(device) for values in vars(self).values()))


class BatchSampler:
    """Batches of pairs drawn from a source, reproducible from source, recipe and step.

    Args:
        source: of the pairs.
        recipe: image size, batch size and share of rotated images.
    """

    def __init__(self, source: PairSource, recipe: FrontEndRecipe) -> None:
        self.source, self.recipe = source, recipe

    def batch(self, step: int) -> DenseBatch:
        """The batch of a step.

        Raises:
            UsageError: not one photo can be read, or stored views hardly overlap.
            IntegrityError: a stored view is damaged.
        """
        rng = np.random.default_rng([self.recipe.seed, 3, step])
        pixels, positions, turns = [], [], []
        for _ in range(self.recipe.batch.pairs):
            pair, turn = self._pair(rng)
            pixels += [pair.pixels0, pair.pixels1]
            positions += [pair.positions0, pair.positions1]
            turns += [0, turn]
        grey = torch.from_numpy(np.stack(pixels))[:, None].float() / 255
        return DenseBatch(grey, torch.tensor(turns), torch.from_numpy(np.stack(positions)))

    def _pair(self, rng: np.random.Generator) -> tuple[DensePair, int]:
        """A pair in random order, and by how many clockwise 90-degree rotations its images differ."""
        share = self.recipe.batch.turned_share
        turn = int(rng.integers(1, 4)) if share and rng.random() < share else 0
        pair = self.source.pair(rng, (self.recipe.scene.width, self.recipe.scene.height))
        turned = quarter_turned(pair if rng.random() < 0.5 else pair.swapped(), turn)
        return turned, dominant_turn(turned)

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[DenseBatch]:
        """The batches of steps start … stop−1, as many prepared ahead as there are readers (threads)."""
        with ThreadPoolExecutor(readers) as pool:
            ahead = [pool.submit(self.batch, step) for step in range(start, min(stop, start + readers))]
            for step in range(start, stop):
                batch = ahead.pop(0).result()
                if step + readers < stop:
                    ahead.append(pool.submit(self.batch, step + readers))
                yield batch
