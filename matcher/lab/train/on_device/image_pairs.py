"""Pairs of images that are made on the device, and where points of each lie in the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from matcher.lab.pairs.dense import HIDDEN_STATE, VISIBLE_STATE
from matcher.lab.train.on_device.draws import Draws
from matcher.lab.train.on_device.framing import PROBES, draw_framings, render
from matcher.lab.train.on_device.photometry import capture
from matcher.lab.train.on_device.small import constant, inverse, uploaded
from matcher.lab.train.on_device.transfer import Transferred, overlap, project, transfer, within
from matcher.lab.train.on_device.views import DeviceViews

_LITTLE_OVERLAP_SHARE = 0.1  # pairs that are kept whatever they have in common


@dataclass(frozen=True)
class DrawnPairs:
    """How pairs are drawn."""

    size: tuple[int, int]  # width and height of the images
    shares: Mapping[str, float]  # of `planes` (a photo and itself), `rendered` and `real` views
    min_overlap: float  # below it nine in ten pairs give way to another
    turned_share: float = 0.0  # pairs of which image 1 is rotated by 90, 180 or 270 degrees
    negative_share: float = 0.0  # pairs of which image 1 is that of another pair, of another scene


@dataclass(frozen=True, eq=False)
class ImagePairs:
    """B pairs of images cut from views."""

    views: DeviceViews
    first: Tensor  # (B,) int64 views that images 0 are cut from
    second: Tensor
    flat: Tensor  # (B,) bool, a photo and itself
    unrelated: Tensor  # (B,) bool, images of different scenes
    framings: tuple[Tensor, Tensor]  # (B, 3, 3) float64 from pixels of a view to those of its image
    images: Tensor  # (2B, 1, H, W) in [0, 1], first all images 0, then all images 1

    def __len__(self) -> int:
        """Pairs."""
        return len(self.first)

    def leading(self, pairs: int) -> ImagePairs:
        """The first pairs."""
        framings = tuple(framing[:pairs] for framing in self.framings)
        images = torch.cat([images[:pairs] for images in self.images.chunk(2)])
        columns = (x[:pairs] for x in (self.first, self.second, self.flat, self.unrelated))
        return ImagePairs(self.views, *columns, framings, images)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the images."""
        return self.images.shape[3], self.images.shape[2]

    def found(self, side: int, points: Tensor) -> Transferred:
        """Points (B, N, 2) of images `side` in the other image of their pair, NaN where not visible."""
        sides = (self.first, self.second), self.framings
        (source, target), (framing, other) = (each if side == 0 else each[::-1] for each in sides)
        old, _ = project(inverse(framing).float(), points)
        inside = within(old, self.views.sizes[source])
        found, states = transfer(self.views, source, target, old)
        found = torch.where(self.flat.view(-1, 1, 1), old, found)
        states = torch.where(self.flat.unsqueeze(1), VISIBLE_STATE, states).where(inside, HIDDEN_STATE)
        new, depth = project(other.float(), found)
        shown = within(new, constant(self.size, new.dtype, new.device).expand(len(new), 2)) & (depth > 0)
        hidden = (states == VISIBLE_STATE) & ~shown | self.unrelated.unsqueeze(1)
        states = torch.where(hidden, HIDDEN_STATE, states)
        return Transferred(new.masked_fill((states != VISIBLE_STATE).unsqueeze(2), torch.nan), states)


def draw_images(
    views: DeviceViews, count: int, drawn: DrawnPairs, rng: np.random.Generator, draws: Draws
) -> ImagePairs:
    """New pairs of images.

    Args:
        views: to cut them from.
        count: of pairs.
        drawn: how they are drawn.
        rng: chooses the views.
        draws: the source of all other randomness.
    """
    first, second, flat, real = _choose(views, count, drawn, rng, draws)
    framings = draw_framings(views, first, second, flat, drawn.size, draws, drawn.turned_share)
    images = [
        render(views, side, framing, drawn.size)
        for side, framing in zip((first, second), framings, strict=True)
    ]
    captured = capture(torch.cat(images), ~torch.cat([real, real]), draws)
    here = torch.arange(count, device=draws.device)
    unrelated = draws.happens(count, drawn.negative_share)
    unrelated &= views.scenes[first] != views.scenes[second.roll(-1)]
    other = torch.where(unrelated, here.roll(-1), here)  # whose image 1 a pair gets
    captured = torch.cat([captured[:count], captured[count:][other]])
    framings = framings[0], framings[1][other]
    return ImagePairs(views, first, second[other], flat, unrelated, framings, captured)


def _choose(
    views: DeviceViews, count: int, drawn: DrawnPairs, rng: np.random.Generator, draws: Draws
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B,) views of images 0 and 1, whether they are a photo, and whether a camera took them.

    A pair of little overlap gives way to another one, mostly.
    """
    names = [name for name, share in drawn.shares.items() if share > 0]
    shares = np.array([drawn.shares[name] for name in names])
    sources = [names[k] for k in rng.choice(len(names), count, p=shares / shares.sum())]
    candidates = [_pairs(views, sources, rng) for _ in range(2)]
    kinds = [[source == name for source in sources] for name in ("planes", "real")]
    drawn_here = torch.from_numpy(np.concatenate([*candidates, kinds]))
    *numbers, flat, real = uploaded(drawn_here, draws.device)
    candidates, flat, real = [numbers[:2], numbers[2:]], flat.bool(), real.bool()
    first, second = candidates[0]
    probes = draws.uniform(count, PROBES, 2) * (views.sizes[first] - 1).unsqueeze(1)
    kept = overlap(views, first, second, probes) >= drawn.min_overlap
    kept |= flat | draws.happens(count, _LITTLE_OVERLAP_SHARE)
    first, second = (torch.where(kept, a, b) for a, b in zip(*candidates, strict=True))
    return first, second, flat, real


def _pairs(views: DeviceViews, sources: list[str], rng: np.random.Generator) -> np.ndarray:
    """(2, B) int64 views; a set of a source is drawn as often as the root of its number of pairs."""
    drawn = []
    for source in sources:
        if source == "planes":
            drawn.append((rng.choice(views.photos),) * 2)
            continue
        tables = views.pairs[source]
        weights = np.sqrt([len(table) for table in tables])
        table = tables[rng.choice(len(tables), p=weights / weights.sum())]
        pair = table[rng.integers(len(table))]
        drawn.append(pair if rng.random() < 0.5 else pair[::-1])
    return np.array(drawn, np.int64).T
