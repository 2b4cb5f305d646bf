"""Batches of image pairs with dense ground truth, to train the front end on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from matcher.lab.pairs.dense import DensePair, PairSource, dominant_turn, quarter_turned
from matcher.lab.train.keypoints.recipe import FrontEndRecipe


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """2B images; images 2b and 2b + 1 are a pair."""

    pixels: Tensor  # (2B, 1, H, W) float32 in [0, 1]
    positions: Tensor  # (2B, 2, H, W) float32, as in `dense.DensePair`
    turns: Tensor  # (2B,) int64 clockwise 90-degree rotations of each image relative to the first of its pair

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.pixels) // 2

    def first(self, pairs: int) -> ImageBatch:
        """The first pairs."""
        return ImageBatch(*(values[: 2 * pairs] for values in vars(self).values()))

    def to(self, device: torch.device) -> ImageBatch:
        """The same batch on another device."""
        return ImageBatch(self.pixels.to(device), self.positions.to(device), self.turns.to(device))


class BatchSampler:
    """Batches of pairs drawn from a source, reproducible from source, recipe and step.

    Args:
        source: of the pairs.
        recipe: image size, batch size and share of rotated images.
    """

    def __init__(self, source: PairSource, recipe: FrontEndRecipe) -> None:
        self.source, self.recipe = source, recipe

    def batch(self, step: int) -> ImageBatch:
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
        return ImageBatch(grey, torch.from_numpy(np.stack(positions)), torch.tensor(turns))

    def _pair(self, rng: np.random.Generator) -> tuple[DensePair, int]:
        """A pair in random order, and by how many clockwise 90-degree rotations its images differ."""
        share = self.recipe.batch.turned_share
        turn = int(rng.integers(1, 4)) if share and rng.random() < share else 0
        pair = self.source.pair(rng, (self.recipe.scene.width, self.recipe.scene.height))
        turned = quarter_turned(pair if rng.random() < 0.5 else pair.swapped(), turn)
        return turned, dominant_turn(turned)

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[ImageBatch]:
        """The batches of steps start … stop−1, as many prepared ahead as there are readers (threads)."""
        with ThreadPoolExecutor(readers) as pool:
            ahead = [pool.submit(self.batch, step) for step in range(start, min(stop, start + readers))]
            for step in range(start, stop):
                batch = ahead.pop(0).result()
                if step + readers < stop:
                    ahead.append(pool.submit(self.batch, step + readers))
                yield batch
