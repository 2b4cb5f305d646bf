"""Keypoints of a batch of image pairs, and the partner of each: what a matcher is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from matcher.arrays import root_sift
from matcher.config import ExtractorConfig
from matcher.extract.learned import (
    BORDER,
    NMS_RADIUS,
    FeatureNetwork,
    candidates,
    subpixel,
)
from matcher.extract.sift import detect_sift
from matcher.match.steering import STEERABLE, TURNS, turned_by
from matcher.torch_engine import build_extractor
from matcher.train.pairs import Draws, ImagePairs, constant
from matcher.train.recipe import SIFT, Recipe
from matcher.train.views import HIDDEN, UNKNOWN, VISIBLE, Transferred
from matcher.types import UNMATCHED, Features

IGNORED = -2  # a value of partners, beside UNMATCHED: losses ignore the keypoint
CONTOUR = 7  # pixels; the width of the edges of surfaces


@dataclass(frozen=True, eq=False)
class Keypoints:
    """Keypoints of the 2B images of B pairs, the strongest first, with their descriptors."""

    positions: Tensor  # (2B, K, 2)
    descriptors: Tensor  # (2B, K, D), as the images are turned
    valid: Tensor  # (2B, K) bool, keypoints that exist
    scales: Tensor | None = None  # (2B, K), where the front end has them
    orientations: Tensor | None = None  # (2B, K)

    def map(self, change: Callable[[Tensor], Tensor]) -> Keypoints:
        """The same change of every field."""
        values = (getattr(self, f.name) for f in fields(self))
        return Keypoints(*(None if value is None else change(value) for value in values))

    def first(self, pairs: int, count: int) -> Keypoints:
        """So many of each image, of the first pairs."""
        return self.map(lambda values: torch.cat([side[:pairs, :count] for side in values.chunk(2)]))


class Describer:
    """The front end of a recipe, whose parameters are not trained: images to keypoints."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.device, self._dropout = device, recipe.pair.dropout
        self._network = None if recipe.kind == SIFT else front_end(recipe.front_end.start, device)

    @torch.no_grad()
    def __call__(self, images: Tensor, count: int, draws: Draws | None = None) -> Keypoints:
        """Up to `count` keypoints of images (2B, 1, H, W) in [0, 1], the strongest; `draws` drops some first,
        as many as the recipe says at most."""
        if self._network is None:
            return self._sift(images, count, draws)
        kept = None
        if draws is not None:
            rate = draws.uniform(len(images), 1, 1, high=self._dropout)
            kept = draws.uniform(*images[:, 0].shape) >= rate
        return detected(self._network, images, count, kept)

    def _sift(self, images: Tensor, count: int, draws: Draws | None) -> Keypoints:
        config = ExtractorConfig(max_keypoints=2 * count)
        tables = np.zeros((len(images), count, 4 + 128), np.float32)
        valid = np.zeros((len(images), count), bool)
        for number, image in enumerate((255 * images[:, 0]).round().byte().cpu().numpy()):
            points, diameters, angles, _, descriptors = detect_sift(image, None, config)
            chosen = np.arange(len(points))
            if draws is not None:
                share = float(draws.uniform(1, high=self._dropout))
                chosen = chosen[draws.uniform(len(points)).cpu().numpy() >= share]
            chosen = chosen[:count]
            columns = points, diameters[:, None], angles[:, None], root_sift(descriptors)
            tables[number, : len(chosen)] = np.concatenate(columns, axis=1)[chosen]
            tables[number, len(chosen) :, 2] = 1.0  # the diameter of no keypoint
            valid[number, : len(chosen)] = True
        table = torch.from_numpy(tables).to(self.device)
        own = table[..., :2], table[..., 4:], torch.from_numpy(valid).to(self.device)
        return Keypoints(*own, table[..., 2], table[..., 3])


def front_end(weights: str, device: torch.device | str = "cpu", precision: str = "auto") -> FeatureNetwork:
    """Our front end with the parameters of a file, or with the shipped ones ("learned")."""
    path = None if weights == "learned" else weights
    return build_extractor(ExtractorConfig(kind="learned"), path, device, precision).network


@torch.no_grad()
def detected(network: FeatureNetwork, images: Tensor, count: int, kept: Tensor | None = None) -> Keypoints:
    """The strongest keypoints of images by our front end, of those `kept` (2B, H, W)."""
    logits, maps = network(images)
    maxima, valid = strongest(logits, count, kept)
    positions = subpixel(logits, maxima)
    return Keypoints(positions, network.describe(maps, positions), valid)


@torch.no_grad()
def strongest(logits: Tensor, count: int, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The strongest local maxima (B, K, 2) int64 xy of logits (B, H, W), and (B, K) bool which exist."""
    allowed = candidates(logits, NMS_RADIUS, BORDER)
    allowed = allowed if kept is None else allowed & kept
    top = logits.masked_fill(~allowed, -torch.inf).flatten(1).topk(count, dim=1)
    width = logits.shape[2]
    return torch.stack([top.indices % width, top.indices // width], dim=-1), top.values.isfinite()


# --- Partners.


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Keypoints of B pairs with ground truth."""

    features0: Features
    features1: Features
    partner0: Tensor  # (B, N) int64, UNMATCHED or IGNORED
    partner1: Tensor  # (B, M)
    corresponding0: Tensor  # (B, N, 2) float32 positions in the other image, NaN where not visible
    corresponding1: Tensor  # (B, M, 2)

    def __len__(self) -> int:
        """Pairs."""
        return len(self.partner0)


def labelled(points: Keypoints, pairs: ImagePairs, recipe: Recipe) -> PairBatch:
    """Keypoints with their partners, image 1 turned as image 0 is where descriptors are steerable."""
    with torch.no_grad():
        positions = points.positions.detach()
        found, states = pairs.transfer(positions)
        # A hidden point with a visible one among nine in a square around it may lie on either surface.
        reach = torch.arange(-1, 2, device=positions.device) * (CONTOUR // 2)
        around = positions.unsqueeze(2) + torch.cartesian_prod(reach, reach)
        near = pairs.transfer(around.flatten(1, 2)).states.unflatten(1, (-1, 9))
        states = states.masked_fill((states == HIDDEN) & (near == VISIBLE).any(2), UNKNOWN)
        states = states.masked_fill(~points.valid, UNKNOWN)
        there = positions.masked_fill(~points.valid.unsqueeze(2), torch.inf)
        found = found.masked_fill(((states != VISIBLE) | ~points.valid).unsqueeze(2), torch.nan)
        seen = (Transferred(*side) for side in zip(found.chunk(2), states.chunk(2), strict=True))
        own, other = points.descriptors.chunk(2)
        similarity = own @ other.mT if recipe.kind == SIFT else None
        partner0, partner1 = partners(*there.chunk(2), *seen, similarity)
    count, device = len(pairs), positions.device
    features0, features1 = (
        Features.of_valid(
            keypoints=own.positions.detach(),
            descriptors=own.descriptors.float(),
            size=constant(pairs.size, positions.dtype, device).expand(count, 2),
            mask=own.valid,
            scales=own.scales,
            orientations=own.orientations,
            view_orientation=torch.ones(count, dtype=torch.int64, device=device),
            kind=recipe.kind,
        )
        for own in (points.map(lambda values, side=side: values.chunk(2)[side]) for side in (0, 1))
    )
    if recipe.kind == STEERABLE:
        features1 = turned_by(features1, -pairs.turns % TURNS)
    return PairBatch(features0, features1, partner0, partner1, *found.chunk(2))


def partners(
    points0: Tensor,
    points1: Tensor,
    found0: Transferred,
    found1: Transferred,
    similarity: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, N) and (B, M) int64 partners, UNMATCHED or IGNORED, of points (B, N, 2), (B, M, 2).

    Points are infinite where there is none; `found0`, `found1` are where they lie in the other image. By the
    `similarity` (B, N, M) one of several at a place is chosen: SIFT has a keypoint for each orientation.
    """

    def distances(found: Tensor, points: Tensor) -> Tensor:
        # By differences: products of coordinates lose a fraction of a pixel, and `torch.cdist` without
        # products is made for long vectors: on a GPU it took more than half of a training step.
        dx, dy = (found.nan_to_num(-1e6)[..., k, None] - points[:, None, :, k] for k in (0, 1))
        return dx.square_().add_(dy.square_()).sqrt_()

    known0, known1 = (found.states != UNKNOWN for found in (found0, found1))
    forward, backward = distances(found0.positions, points1), distances(found1.positions, points0).mT
    # Where one direction is unknown, the other one counts twice.
    error = torch.where(known0.unsqueeze(2), forward, backward)
    error = (error + torch.where(known1.unsqueeze(1), backward, forward)) / 2
    cost = error if similarity is None else error + 2 * (1 - similarity)
    # Mutual nearest neighbours match within 3 pixels; points farther than 4 from all others are unmatched.
    cost = cost.masked_fill(error >= 3, torch.inf)
    (best0, partner0), (best1, partner1) = cost.min(2), cost.min(1)
    decided = []
    for best, partner, back, nearest, known in (
        (best0, partner0, partner1, error.amin(2), known0),
        (best1, partner1, partner0, error.amin(1), known1),
    ):
        here = torch.arange(partner.shape[1], device=partner.device)
        mutual = (back.gather(1, partner) == here) & best.isfinite()
        alone = torch.where((nearest > 4) & known, UNMATCHED, IGNORED)
        decided.append(torch.where(mutual, partner, alone))
    return decided[0], decided[1]
