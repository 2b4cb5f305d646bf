"""Batches of image pairs for a front end that are made on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from matcher.lab.pairs.dense import HIDDEN, STRIDE, UNKNOWN, UNKNOWN_STATE, VISIBLE_STATE
from matcher.lab.pairs.sources import MIN_OVERLAP
from matcher.lab.train.keypoints.batches import ImageBatch
from matcher.lab.train.keypoints.recipe import FrontEndRecipe
from matcher.lab.train.on_device.draws import Draws
from matcher.lab.train.on_device.image_pairs import DrawnPairs, ImagePairs, draw_images
from matcher.lab.train.on_device.labels import quarter_turns_of
from matcher.lab.train.on_device.views import DeviceViews
from matcher.match.turns import TURNS


class DeviceImageSampler:
    """Batches of image pairs, the same for the same recipe, step and kind of device.

    Args:
        views: to cut images from.
        recipe: shares of `planes` (photos), `rendered` and `real` views, size and number of images.
        device: of the views.
    """

    def __init__(self, views: DeviceViews, recipe: FrontEndRecipe, device: torch.device) -> None:
        self.views, self.recipe, self.device = views, recipe, device
        scene, shares = recipe.scene, recipe.sources.shares()
        size = scene.width, scene.height
        self._drawn = DrawnPairs(size, shares, MIN_OVERLAP, recipe.batch.turned_share)
        y, x = torch.meshgrid(torch.arange(scene.height), torch.arange(scene.width), indexing="ij")
        self._pixels = torch.stack([x, y], dim=2).float().to(device)  # (H, W, 2)

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[ImageBatch]:
        """The batches of steps start … stop−1; `readers` have nothing to do."""
        for step in range(start, stop):
            yield self.batch(step)

    @torch.no_grad()
    def batch(self, step: int) -> ImageBatch:
        """The batch of a step."""
        rng = np.random.default_rng([self.recipe.seed, 3, step])
        draws = Draws(int(rng.integers(2**62)), self.device)
        pairs = draw_images(self.views, self.recipe.batch.pairs, self._drawn, rng, draws)
        # Images 2b and 2b + 1 are a pair.
        images = torch.stack(pairs.images.chunk(2), dim=1).flatten(0, 1)
        positions = torch.stack([self._positions(pairs, side) for side in (0, 1)], dim=1).flatten(0, 1)
        coarse = self._pixels[::STRIDE, ::STRIDE].flatten(0, 1).expand(len(pairs), -1, -1)
        # How image 1 is rotated, which is undone by the opposite turn.
        turned = -quarter_turns_of(coarse, pairs.found(0, coarse).positions) % TURNS
        turns = torch.stack([torch.zeros_like(turned), turned], dim=1).flatten()
        return ImageBatch(images, positions, turns)

    def _positions(self, pairs: ImagePairs, side: int) -> Tensor:
        """(B, 2, H, W) positions of all pixels of images `side` in the other one, HIDDEN or UNKNOWN."""
        points = self._pixels.flatten(0, 1).expand(len(pairs), -1, -1)
        found, states = pairs.found(side, points)
        nowhere = torch.where(states == UNKNOWN_STATE, UNKNOWN, HIDDEN).unsqueeze(2)
        found = torch.where((states == VISIBLE_STATE).unsqueeze(2), found, nowhere)
        return found.mT.unflatten(2, self._pixels.shape[:2])
