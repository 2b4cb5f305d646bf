"""Pairs of images made on the device that trains, their keypoints, and the partners of these.

The images of a batch of B pairs are in this order everywhere: first all images 0, then all images 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.config import ExtractorConfig
from matcher.extract.extractor import detect_sift
from matcher.extract.learned import BORDER, NMS_RADIUS, FeatureNetwork, candidates, subpixel
from matcher.match.steering import STEERABLE_KIND, TURNS, turned_by
from matcher.torch_engine import build_extractor
from matcher.train.recipe import SIFT, Recipe
from matcher.train.views import HIDDEN, UNKNOWN, VISIBLE, DeviceViews, Transferred, inverse, within
from matcher.types import UNMATCHED, Features, root_sift

T = TypeVar("T")
PROBES = 256  # pixels of view 0 by which overlap is measured, and among which a covisible one is looked for
IGNORED = -2  # a value of partners, beside UNMATCHED: losses ignore the keypoint


class Draws:
    """Random numbers on a device, the same for the same seed and kind of device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers from `low` to `high`."""
        return torch.rand(*shape, generator=self.generator, device=self.device) * (high - low) + low

    def normal(self, *shape: int) -> Tensor:
        """Numbers of mean 0 and variance 1."""
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def happens(self, count: int, share: float) -> Tensor:
        """(count,) bool, true with the probability `share`."""
        return self.uniform(count) < share


@cache
def constant(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers, in nested tuples, as a tensor; uploaded once, so not to be written to."""
    return torch.tensor(values, dtype=dtype, device=device)


def other_of_pair(values: Tensor) -> Tensor:
    """For each of 2B images the values of the other image of its pair."""
    return torch.cat(values.chunk(2)[::-1])


@dataclass(frozen=True, eq=False)
class ImagePairs:
    """B pairs of images cut from views."""

    views: DeviceViews
    sources: Tensor  # (2B,) int64 views that the images are cut from
    flat: Tensor  # (B,) bool, a photo and itself
    unrelated: Tensor  # (B,) bool, images of different scenes
    framings: Tensor  # (2B, 3, 3) float64 from pixels of a view to those of its image
    images: Tensor  # (2B, 1, H, W) in [0, 1]
    turns: Tensor | None = None  # (B,) int64 clockwise quarter turns of image 1 relative to image 0

    def leading(self, pairs: int) -> ImagePairs:
        """The first pairs."""
        names = "sources", "framings", "images"
        both = {name: torch.cat([x[:pairs] for x in getattr(self, name).chunk(2)]) for name in names}
        own = {name: getattr(self, name)[:pairs] for name in ("flat", "unrelated", "turns")}
        return replace(self, **own, **both)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the images."""
        return self.images.shape[3], self.images.shape[2]

    def transfer(self, points: Tensor) -> Transferred:
        """Points (2B, N, 2) of the images in the other image of their pair, NaN where not visible."""
        flat = self.flat.repeat(2).view(-1, 1, 1)
        old, _ = _project(inverse(self.framings).float(), points)
        inside = within(old, self.views.sizes[self.sources])
        found, states = self.views.transfer(self.sources, other_of_pair(self.sources), old)
        found = torch.where(flat, old, found)
        states = torch.where(flat[..., 0], VISIBLE, states).where(inside, HIDDEN)
        new, depth = _project(other_of_pair(self.framings).float(), found)
        size = constant(self.size, new.dtype, new.device).expand(len(new), 2)
        hidden = (states == VISIBLE) & ~(within(new, size) & (depth > 0))
        states = torch.where(hidden | self.unrelated.repeat(2).unsqueeze(1), HIDDEN, states)
        return Transferred(new.masked_fill((states != VISIBLE).unsqueeze(2), torch.nan), states)


class PairSampler:
    """Batches of pairs, the same for the same recipe, step, views and kind of device."""

    def __init__(self, views: DeviceViews, recipe: Recipe) -> None:
        self.views, self.recipe, self.device = views, recipe, views.images.device
        shares = {name: share for name, share in vars(recipe.sources).items() if share > 0}
        self._names = list(shares)
        self._weights = np.array([*shares.values()]) / sum(shares.values())
        size = recipe.pair.width, recipe.pair.height
        grid = torch.cartesian_prod(*(torch.arange(0, side, 8) for side in size))
        self._grid = grid.float().to(self.device)

    @torch.no_grad()
    def batch(self, count: int, step: int) -> ImagePairs:
        """`count` new pairs; one of little overlap gives way to another, nine times in ten."""
        recipe, views = self.recipe.pair, self.views
        rng = np.random.default_rng([self.recipe.seed, 3, step])
        draws = Draws(int(rng.integers(2**62)), self.device)
        names = [self._names[k] for k in rng.choice(len(self._names), count, p=self._weights)]
        drawn = np.array([[self._pair(name, rng) for name in names] for _ in range(2)], np.int64)
        flat = np.array([[name == "planes" for name in names]])
        table = torch.from_numpy(np.concatenate([*drawn.transpose(0, 2, 1), flat]))
        first, second, *others, flat = table.to(self.device, non_blocking=True)
        flat = flat.bool()
        probes = draws.uniform(count, PROBES, 2) * (views.sizes[first] - 1).unsqueeze(1)
        states = views.transfer(first, second, probes).states
        overlap = (states == VISIBLE).sum(1) / (states != UNKNOWN).sum(1).clamp_min(1)
        kept = (overlap >= recipe.min_overlap) | flat | draws.happens(count, 0.1)
        sources = torch.where(kept.repeat(2), torch.cat([first, second]), torch.cat(others))
        framings = draw_framings(views, sources, flat, self.recipe, draws)
        images = render(views, sources, framings, (recipe.width, recipe.height))
        images = capture(images, ~views.captured[sources], draws)
        here = torch.arange(count, device=self.device)
        unrelated = draws.happens(count, recipe.negative_share)
        unrelated &= views.scenes[sources[:count]] != views.scenes[sources[count:].roll(-1)]
        # Whose image 1 a pair gets.
        order = torch.cat([here, count + torch.where(unrelated, here.roll(-1), here)])
        pairs = ImagePairs(views, sources[order], flat, unrelated, framings[order], images[order])
        # The quarter turns of image 1 by which the grid of image 0 and its positions there fit best; 0 where
        # fewer than 8 are visible.
        grid = self._grid.expand(2 * count, -1, -1)
        found = pairs.transfer(grid).positions[:count]
        seen = found.isfinite().all(2, keepdim=True)
        centred = []
        for positions in (grid[:count], found.nan_to_num(0.0)):
            mean = (positions * seen).sum(1) / seen.sum(1).clamp_min(1)
            centred.append((positions - mean.unsqueeze(1)) * seen)
        (x0, y0), (x1, y1) = (positions.unbind(2) for positions in centred)
        angle = torch.atan2((x0 * y1 - y0 * x1).sum(1), (x0 * x1 + y0 * y1).sum(1))
        turns = (angle / (math.pi / 2)).round().long() % TURNS
        return replace(pairs, turns=torch.where(seen.sum((1, 2)) >= 8, turns, 0))

    def _pair(self, source: str, rng: np.random.Generator) -> np.ndarray:
        """Two views; a set of a source is drawn as often as the root of its number of pairs."""
        if source == "planes":
            return np.full(2, rng.integers(self.views.photos))
        tables = self.views.pairs[source]
        weights = np.sqrt([len(table) for table in tables])
        table = tables[rng.choice(len(tables), p=weights / weights.sum())]
        pair = table[rng.integers(len(table))]
        return pair if rng.random() < 0.5 else pair[::-1]


def made_ahead(make: Callable[[int], T], start: int, stop: int, device: torch.device) -> Iterator[T]:
    """What `make` gives for the steps start … stop−1, one at least; on a processor a thread makes the next
    one meanwhile, a GPU has one queue for everything."""
    if device.type != "cpu":
        yield from map(make, range(start, stop))
        return
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(make, start)
        for step in range(start + 1, stop):
            made, ahead = ahead.result(), pool.submit(make, step)
            yield made
        yield ahead.result()


# --- Framing: new images of views; zooms, crops and rotations of the camera as homographies.

BORDER_SHARE = 0.12  # images that may reach beyond the view they are cut from


def _project(homographies: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Points (B, N, 2) by homographies (B, 3, 3): (B, N, 2), and (B, N) their third coordinates."""
    x = points @ homographies[:, :, :2].mT + homographies[:, None, :, 2]
    depth = x[..., 2]
    safe = torch.where(depth.abs() > 1e-9, depth, torch.full_like(depth, 1e-9))
    return x[..., :2] / safe.unsqueeze(2), depth


def draw_framings(views: DeviceViews, sources: Tensor, flat: Tensor, recipe: Recipe, draws: Draws) -> Tensor:
    """Homographies (2B, 3, 3) float64 from pixels of the views (2B,) to those of new images of one size."""
    count, pair, (first, second) = len(flat), recipe.pair, sources.chunk(2)
    # A pixel of view 0 that view 1 sees, and its position there; the centres where none is found.
    rows = torch.arange(count, device=first.device)
    probes = draws.uniform(count, PROBES, 2) * (views.sizes[first] - 1).unsqueeze(1)
    positions, states = views.transfer(first, second, probes)
    seen = (states == VISIBLE) | flat.unsqueeze(1)
    chosen, some = seen.float().argmax(1), seen.any(1, keepdim=True)
    here = probes[rows, chosen]
    there = torch.where(flat.unsqueeze(1), here, positions[rows, chosen])
    centre0 = torch.where(some, here, views.sizes[first] / 2)
    centre1 = torch.where(some, there, views.sizes[second] / 2)
    new = constant((pair.width, pair.height), views.sizes.dtype, views.sizes.device).expand(count, 2)
    turns = torch.where(draws.happens(count, pair.turned_share), (3 * draws.uniform(count)).long() + 1, 0)
    new1 = torch.where((turns % 2 == 1).unsqueeze(1), new.flip(1), new)  # before it is turned
    whole = draws.happens(count, 0.4)
    zoom = torch.where(whole, 1.0, draws.uniform(count, high=math.log(1.8)).exp())
    change = (draws.normal(count) * torch.where(whole, 0.15, 0.35)).exp().clamp(0.4, 2.5)
    least = torch.where(draws.happens(count, BORDER_SHARE), 0.6, 1.0)
    zoom1 = torch.minimum(torch.maximum(zoom * change, least), torch.full_like(zoom, 2.5))
    # Deviations in degrees, of photos and of views with depth, and of the log of a photo's aspect.
    roll, tilt = torch.where(flat, 15.0, 5.0), torch.where(flat, 11.0, 2.5)
    spread0, spread1 = (roll / 2, tilt / 3, 0 * tilt), (roll, tilt, 0.22 * flat.float())
    orbit = draws.uniform(count, high=pair.max_tilt) * flat

    framings = []
    # The pixels `centre` (B, 2) of the views `chosen` come near the middle of images of `sizes` (B, 2),
    # enlarged by `factor`; `spread` of roll, tilts and stretch; `around` (B,) degrees of the camera's way.
    for chosen, centre, factor, spread, around, sizes in (
        (first, centre0, zoom, spread0, 0 * orbit, new),
        (second, centre1, zoom1, spread1, orbit, new1),
    ):
        K, old = views.K[chosen], views.sizes[chosen]
        factor = factor * (sizes / old).amax(1)
        # The centre of a window that contains `centre` and usually stays inside the old image.
        half = sizes / factor.unsqueeze(1) / 2
        middle = centre + draws.uniform(count, 2, low=-0.6, high=0.6) * half
        inside = torch.where(half * 2 < old, torch.minimum(torch.maximum(middle, half), old - half), old / 2)
        middle = torch.where(draws.happens(count, BORDER_SHARE).unsqueeze(1), middle, inside).double()
        back = inverse(K)
        any_roll, wide = draws.happens(count, 0.08), draws.uniform(count, low=-180, high=180)
        roll = torch.where(any_roll, wide, draws.normal(count) * spread[0])
        tilts = draws.normal(count, 2) * spread[1].unsqueeze(1)
        motion = _rotations(torch.deg2rad(torch.cat([tilts, roll.unsqueeze(1)], dim=1)).double())
        direction = draws.uniform(count, high=2 * math.pi)
        axes = torch.stack([direction.cos(), direction.sin(), torch.zeros_like(direction)], dim=1)
        moved = _rotations((torch.deg2rad(around).unsqueeze(1) * axes).double())
        # The photo is the plane z = 1, and its point at `centre` stays where it is.
        fixed = back @ F.pad(centre.double(), (0, 1), value=1.0).unsqueeze(2)
        motion = motion @ (moved + F.pad(fixed - moved @ fixed, (2, 0)))
        focal = factor.double().unsqueeze(1) * K.diagonal(dim1=1, dim2=2)[:, :2]
        focal[:, 0] *= (draws.normal(count) * spread[2]).exp()
        ray = (motion @ back @ F.pad(middle, (0, 1), value=1.0).unsqueeze(2))[..., 0]
        camera = torch.diag_embed(F.pad(focal, (0, 1), value=1.0))
        camera[:, :2, 2] = (sizes.to(focal) - 1) / 2 - focal * ray[:, :2] / ray[:, 2:]
        framings.append(camera @ motion @ back)
    # After clockwise quarter turns of image 1, which change its size.
    quarters = ((1, 0), (0, 1)), ((0, -1), (1, 0)), ((-1, 0), (0, -1)), ((0, 1), (-1, 0))
    turn = torch.eye(3, dtype=torch.float64, device=first.device).repeat(count, 1, 1)
    turn[:, :2, :2] = constant(quarters, turn.dtype, turn.device)[turns]
    before, after = (((size - 1) / 2).to(turn).unsqueeze(2) for size in (new1, new))
    turn[:, :2, 2:] = after - turn[:, :2, :2] @ before
    return torch.cat([framings[0], turn @ framings[1]])


def _rotations(axes: Tensor) -> Tensor:
    """Rotation matrices (B, 3, 3) of rotation vectors (B, 3), by Rodrigues' formula."""
    x, y, z = axes.unbind(1)
    nothing = torch.zeros_like(x)
    cross = torch.stack([nothing, -z, y, z, nothing, -x, -y, x, nothing], dim=1).view(-1, 3, 3)
    angle = axes.norm(dim=1).view(-1, 1, 1) / math.pi
    straight = torch.eye(3, dtype=axes.dtype, device=axes.device)
    return straight + torch.sinc(angle) * cross + torch.sinc(angle / 2).square() / 2 * (cross @ cross)


def render(views: DeviceViews, chosen: Tensor, framing: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, 1, height, width) in [0, 1]: views `chosen` as their framings show them, black beyond."""
    width, height = size
    device = views.images.device
    y, x = (torch.arange(side, dtype=torch.float32, device=device) for side in (height, width))
    pixels = torch.cartesian_prod(y, x).flip(1).unsqueeze(0)
    old, depth = _project(inverse(framing).float(), pixels.expand(len(chosen), -1, -1))
    old = old.masked_fill((depth <= 0).unsqueeze(2), -1e4)
    images = views.images[chosen].unsqueeze(1).float() / 255
    area = framing[:, 0, 0] * framing[:, 1, 1] - framing[:, 0, 1] * framing[:, 1, 0]
    shrinking = area.abs() < 0.7
    images = torch.where(shrinking.view(-1, 1, 1, 1), F.avg_pool2d(images, 3, 1, 1), images)
    canvas = constant((images.shape[-1], images.shape[-2]), old.dtype, device)
    grid = ((2 * old + 1) / canvas - 1).view(-1, height, width, 2)
    return F.grid_sample(images, grid, align_corners=False)


# --- Photometry: what a camera does to grey images; shares and ranges of each change.

BLUR_RADIUS = 5  # pixels of the kernel on either side
SHARP = 0.05  # a blur so small that nothing changes
BLOCK = 8  # pixels of JPEG's blocks
# Steps of quantisation of a block's cosines at quality 50 (T.81, table K.1).
QUANTISATION = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)


def capture(images: Tensor, clean: Tensor, draws: Draws) -> Tensor:
    """Grey images (B, 1, H, W) in [0, 1] as cameras would take and store them; H and W multiples of 8. Those
    that are `clean` (B,), as no camera took them, get sensor noise; half of the others get none."""
    count = len(images)

    def some(share: float) -> Tensor:
        return draws.happens(count, share).view(-1, 1, 1, 1)

    def between(low: float, high: float) -> Tensor:
        return draws.uniform(count, 1, 1, 1, low=low, high=high)

    images = _blurred(images, draws)
    y, x = (torch.linspace(-1, 1, side, device=images.device) for side in images.shape[2:])
    vignette = 1 - between(0.05, 0.35) * (x.square() + y.square().unsqueeze(1)) / 2
    images = torch.where(some(0.5), images * vignette, images)
    light = (images.clamp(0, 1) + 1e-6) ** between(-0.7, 0.7).exp()
    toned = ((light - 0.5) * between(0.5, 1.3) + 0.5 + between(-0.15, 0.15)).clamp(0, 1)
    images = torch.where(some(0.6), toned, images)
    # Any tone curve, linear between grey values at knots, as other sensors have it.
    knots = draws.uniform(count, 7)
    place = (images.clamp(0, 1) * (knots.shape[1] - 1)).flatten(1)
    lower = place.long().clamp_max(knots.shape[1] - 2)
    low, high = knots.gather(1, lower), knots.gather(1, lower + 1)
    curved = (low + (high - low) * (place - lower)).view(images.shape)
    images = torch.where(some(0.04), curved, torch.where(some(0.02), 1 - images, images))
    coarse = draws.uniform(count, 1, 3, 4, low=0.5, high=1.2)
    shading = F.interpolate(coarse, images.shape[2:], mode="bicubic", align_corners=True)
    images = torch.where(some(0.25), images * shading, images)
    quiet, coarse = some(0.5) & ~clean.view(-1, 1, 1, 1), some(0.4)  # of more than a pixel's size
    noise = draws.normal(*images.shape)
    noise = torch.where(coarse, 2.2 * F.avg_pool2d(noise, 3, 1, 1), noise)
    reading, shot = (between(math.log(0.002), math.log(0.025)).exp() for _ in range(2))
    noise = noise * (reading + shot * images.clamp(0, 1).sqrt())
    images = images + torch.where(quiet, 0.0, noise)
    # As JPEG of qualities from 1 to 100 would store them, but for the rounding of pixels.
    stored, quality = some(0.6), between(30, 96)
    scale = torch.where(quality < 50, 50 / quality, 2 - quality / 50)
    steps = (constant(QUANTISATION, images.dtype, images.device) * scale).clamp_min(1).unsqueeze(1)
    k = torch.arange(BLOCK, device=images.device)
    cosines = torch.cos(math.pi * (2 * k + 1) * k.unsqueeze(1) / (2 * BLOCK)) / 2
    cosines[0] /= 2**0.5
    height, width = images.shape[2:]
    blocks = (255 * images[:, 0] - 128).view(count, height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    levels = (cosines @ blocks.transpose(2, 3) @ cosines.T / steps).round() * steps
    pixels = (cosines.T @ levels @ cosines).transpose(2, 3).reshape(images.shape)
    images = torch.where(stored, (pixels + 128) / 255, images)
    return (images.clamp(0, 1) * 255).floor() / 255


def _blurred(images: Tensor, draws: Draws) -> Tensor:
    """A third out of focus; of these some in one direction only, as by motion along x or y."""
    count = len(images)
    width = torch.where(draws.happens(count, 0.38), draws.uniform(count, low=0.4, high=2.0), SHARP)
    moving, along_y = draws.happens(count, 0.3), draws.happens(count, 0.5)
    offsets = torch.arange(-BLUR_RADIUS, BLUR_RADIUS + 1, device=images.device)
    for axis in (2, 3):
        along = along_y if axis == 2 else ~along_y
        spread = torch.where(moving, torch.where(along & (width > SHARP), 2 * width, SHARP), width)
        kernel = (-offsets.square() / (2 * spread.view(-1, 1).square())).exp()
        kernel = kernel / kernel.sum(1, keepdim=True)
        shape = (count, 1, -1, 1) if axis == 2 else (count, 1, 1, -1)
        reach = (BLUR_RADIUS, 0) if axis == 2 else (0, BLUR_RADIUS)
        images = F.conv2d(images.transpose(0, 1), kernel.view(shape), padding=reach, groups=count)
        images = images.transpose(0, 1)
    return images


# --- Keypoints, and the partner of each.


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
        self.device = device
        self._network = None if recipe.kind == SIFT else front_end(recipe.front_end.start, device)

    @torch.no_grad()
    def __call__(self, images: Tensor, count: int, draws: Draws, dropout: float) -> Keypoints:
        """Up to `count` keypoints of images (2B, 1, H, W) in [0, 1], the strongest after `draws` dropped a
        share of up to `dropout`."""
        if self._network is not None:
            rate = draws.uniform(len(images), 1, 1, high=dropout)
            kept = draws.uniform(*images[:, 0].shape) >= rate
            return detected(self._network, images, count, kept)
        config = ExtractorConfig(max_keypoints=2 * count)
        tables = np.zeros((len(images), count, 4 + 128), np.float32)
        valid = np.zeros((len(images), count), bool)
        for number, image in enumerate((255 * images[:, 0]).round().byte().cpu().numpy()):
            points, diameters, angles, _, descriptors = detect_sift(image, None, config)
            kept = draws.uniform(1, high=dropout) <= draws.uniform(len(points))
            chosen = kept.cpu().numpy().nonzero()[0][:count]
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


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Keypoints of B pairs with ground truth."""

    features0: Features
    features1: Features
    partner0: Tensor  # (B, N) int64, UNMATCHED or IGNORED
    partner1: Tensor  # (B, M)
    corresponding0: Tensor  # (B, N, 2) float32 positions in the other image, NaN where not visible
    corresponding1: Tensor  # (B, M, 2)


def labelled(points: Keypoints, pairs: ImagePairs, recipe: Recipe) -> PairBatch:
    """Keypoints with their partners, image 1 turned as image 0 is where descriptors are steerable."""
    with torch.no_grad():
        positions = points.positions.detach()
        found, states = pairs.transfer(positions)
        # A hidden point with a visible one among nine in a square around it may lie on either surface, whose
        # edges are seven pixels wide.
        reach = torch.arange(-1, 2, device=positions.device) * 3
        around = positions.unsqueeze(2) + torch.cartesian_prod(reach, reach)
        near = pairs.transfer(around.flatten(1, 2)).states.unflatten(1, (-1, 9))
        states = states.masked_fill((states == HIDDEN) & (near == VISIBLE).any(2), UNKNOWN)
        states = states.masked_fill(~points.valid, UNKNOWN)
        there = positions.masked_fill(~points.valid.unsqueeze(2), torch.inf)
        found = found.masked_fill(((states != VISIBLE) | ~points.valid).unsqueeze(2), torch.nan)
        own, other = points.descriptors.chunk(2)
        # By differences: products of coordinates lose a fraction of a pixel; without them `torch.cdist`, made
        # for long vectors, took more than half of a training step on a GPU.
        others = other_of_pair(there)
        dx, dy = (found.nan_to_num(-1e6)[..., k, None] - others[:, None, :, k] for k in (0, 1))
        forward, backward = dx.square_().add_(dy.square_()).sqrt_().chunk(2)
        backward, (known0, known1) = backward.mT, (states != UNKNOWN).chunk(2)
        # Where one direction is unknown, the other one counts twice.
        error = torch.where(known0.unsqueeze(2), forward, backward)
        error = (error + torch.where(known1.unsqueeze(1), backward, forward)) / 2
        # SIFT has a keypoint for each orientation: by similarity one of several at a place is chosen.
        cost = error + 2 * (1 - own @ other.mT) if recipe.kind == SIFT else error
        # Mutual nearest neighbours match within 3 pixels; points farther than 4 from all are unmatched.
        cost = cost.masked_fill(error >= 3, torch.inf)
        (best0, partner0), (best1, partner1) = cost.min(2), cost.min(1)
        partners = []
        for best, partner, back, nearest, known in (
            (best0, partner0, partner1, error.amin(2), known0),
            (best1, partner1, partner0, error.amin(1), known1),
        ):
            here = torch.arange(partner.shape[1], device=partner.device)
            mutual = (back.gather(1, partner) == here) & best.isfinite()
            alone = torch.where((nearest > 4) & known, UNMATCHED, IGNORED)
            partners.append(torch.where(mutual, partner, alone))
    count, device = len(pairs.flat), positions.device
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
    if recipe.kind == STEERABLE_KIND:
        features1 = turned_by(features1, -pairs.turns % TURNS)
    return PairBatch(features0, features1, *partners, *found.chunk(2))
