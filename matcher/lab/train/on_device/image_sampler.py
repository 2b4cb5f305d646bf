"""Batches of image pairs for a front end that are made on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from matcher.lab.pairs.dense import HIDDEN_STATE, STRIDE, VISIBLE_STATE
from matcher.lab.pairs.sources import MIN_OVERLAP
from matcher.lab.train.keypoints.batches import CONTOUR, ImageBatch
from matcher.lab.train.keypoints.recipe import FrontEndRecipe
from matcher.lab.train.on_device.ahead import made_ahead
from matcher.lab.train.on_device.draws import Draws
from matcher.lab.train.on_device.image_pairs import DrawnPairs, ImagePairs, draw_images
from matcher.lab.train.on_device.labels import quarter_turns_of
from matcher.lab.train.on_device.transfer import Transferred
from matcher.lab.train.on_device.views import DeviceViews
from matcher.match.turns import TURNS


@dataclass(frozen=True, eq=False)
class DrawnBatch(ImageBatch):
    """Images that know where any of their points are in each other."""

    pairs: ImagePairs

    def transfer(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """As `ImageBatch.transfer`."""
        found = self._found(points)
        return found.positions.nan_to_num(0.0), found.states == VISIBLE_STATE

    @torch.no_grad()
    def surely_hidden(self, points: Tensor) -> Tensor:
        """As `ImageBatch.surely_hidden`; around a point it probes eight others."""
        reach = torch.arange(-1, 2, device=points.device) * (CONTOUR // 2)
        around = points.unsqueeze(2) + torch.cartesian_prod(reach, reach)
        states = self._found(around.flatten(1, 2)).states.unflatten(1, (-1, 9))
        return (states[..., 4] == HIDDEN_STATE) & ~(states == VISIBLE_STATE).any(2)

    def first(self, pairs: int) -> DrawnBatch:
        """As `ImageBatch.first`."""
        return DrawnBatch(self.pixels[: 2 * pairs], self.turns[: 2 * pairs], self.pairs.leading(pairs))

    def to(self, device: torch.device) -> DrawnBatch:
        """The batch itself; it stays on its device, which trains.

        Raises:
            ValueError: another device.
        """
        if device.type != self.pixels.device.type:
            raise ValueError(f"this batch was made on {self.pixels.device}, not on {device}")
        return self

    def _found(self, points: Tensor) -> Transferred:
        sides = (self.pairs.found(side, points[side::2]) for side in (0, 1))
        return Transferred(*(interleaved(*values) for values in zip(*sides, strict=True)))


def interleaved(first: Tensor, second: Tensor) -> Tensor:
    """Values of images 0 and of images 1 of B pairs, in the order of a batch: (2B, …)."""
    return torch.stack([first, second], dim=1).flatten(0, 1)


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
        self._drawn = DrawnPairs(
            size, shares, MIN_OVERLAP, recipe.batch.turned_share, recipe.batch.negative_share
        )
        sides = (torch.arange(0, side, STRIDE) for side in size)
        self._probes = torch.cartesian_prod(*sides).float().to(device)

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[DrawnBatch]:
        """The batches of steps start … stop−1; `readers` have nothing to do."""
        return made_ahead(self.batch, start, stop, self.device)

    @torch.no_grad()
    def batch(self, step: int) -> DrawnBatch:
        """The batch of a step."""
        rng = np.random.default_rng([self.recipe.seed, 3, step])
        draws = Draws(int(rng.integers(2**62)), self.device)
        pairs = draw_images(self.views, self.recipe.batch.pairs, self._drawn, rng, draws)
        probes = self._probes.expand(len(pairs), -1, -1)
        # How image 1 is rotated, which is undone by the opposite turn.
        turned = -quarter_turns_of(probes, pairs.found(0, probes).positions) % TURNS
        turns = interleaved(torch.zeros_like(turned), turned)
        return DrawnBatch(interleaved(*pairs.images.chunk(2)), turns, pairs)
