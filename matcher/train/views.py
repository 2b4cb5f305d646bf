"""Views with depth and poses, and photos, in a device's memory: what new pairs are cut from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import max_pool2d

from matcher.config import ExtractorConfig
from matcher.errors import UsageError
from matcher.evaluate.folders import MIN_OVERLAP
from matcher.evaluate.posed import (
    ANY_ROLL_SHARE,
    BORDER_SHARE,
    HIDDEN_STATE,
    NOTHING,
    ROLL,
    ROTATION,
    SAME_DEPTH,
    SAME_PIXEL,
    STRIDE,
    SURELY_SAME_PIXEL,
    UNKNOWN,
    UNKNOWN_STATE,
    VISIBLE_STATE,
    DensePair,
    PairSource,
    StoredSet,
    dominant_turn,
    find_sets,
    quarter_turned,
    read_view,
)
from matcher.evaluate.protocols import read_texture
from matcher.extract.learned import BORDER, NMS_RADIUS, SCORE_THRESHOLD, candidates, refine, sample
from matcher.match.steering import TURNS, turned_by
from matcher.torch_engine import build_extractor
from matcher.train.cached_pairs import IGNORED, PairBatch
from matcher.train.recipe import FrontEndRecipe, PairRecipe, Recipe
from matcher.types import UNMATCHED, Features

# --- views: Views with depth and poses, and photos, in a device's memory: what new pairs are cut from.

LONGEST_SIDE = 720  # pixels; larger images are shrunk
DEPTH_STEP = 2  # pixels from one sample of the inverse depth to the next
PHOTO_FOCAL = 1.2  # of a photo's camera, in lengths of its longer side
READERS = 8  # threads


@dataclass(frozen=True, eq=False)
class DeviceViews:
    """V images of one canvas size, each in its upper left corner, with depth and cameras."""

    images: Tensor  # (V, H, W) uint8, 0 beyond an image
    inverse_depth: Tensor  # (V, ⌈H/2⌉, ⌈W/2⌉) float32 1 / z at every second pixel; 0 unknown, −1 beyond
    sizes: Tensor  # (V, 2) float32 width, height
    K: Tensor  # (V, 3, 3) float64
    cam_from_world: Tensor  # (V, 4, 4) float64
    scenes: Tensor  # (V,) int64; views of different scenes have nothing in common
    pairs: dict[str, list[np.ndarray]]  # by source: (P, 2) overlapping views of each set
    photos: np.ndarray  # (P,) views that are photos, without depth

    def __len__(self) -> int:
        """Views."""
        return len(self.images)


@dataclass(frozen=True, eq=False)
class _View:
    grey: np.ndarray  # (h, w) uint8
    inverse_depth: np.ndarray  # (⌈h/2⌉, ⌈w/2⌉) float32
    K: np.ndarray
    cam_from_world: np.ndarray


def load_views(
    photos: Sequence[Path],
    folders: dict[str, Path],
    device: torch.device,
    log: Callable[[str], None] = lambda line: None,
) -> DeviceViews:
    """Read photos, and the stored views below the folders of each source.

    Args:
        photos: files; those that cannot be read are left out and counted in the log.
        folders: by source, such as `rendered`.
        device: that keeps them, 0.5 MB a view of 640 × 480.
        log: receives a line about what was read.

    Raises:
        UsageError: a folder holds no views, or no photo can be read.
        IntegrityError: a stored view is damaged.
    """
    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(_read_photo, photos))
        views = [view for view in found if view is not None]
        if photos and not views:
            raise UsageError(f"{photos[0].parent}: none of the {len(photos)} photos can be read")
        count = len(views)
        scenes, pairs = list(range(count)), {source: [] for source in folders}
        numbers: dict[tuple[str, str], int] = {}  # of scenes, of which one may have several sets
        for source, stored in _sets(folders):
            pairs[source].append(stored.pairs + len(views))
            scene = numbers.setdefault((source, stored.scene), count + len(numbers))
            scenes += [scene] * len(stored.views)
            views += pool.map(_read_stored, [stored] * len(stored.views), range(len(stored.views)))
    if len(found) > count:
        log(f"skipped {len(found) - count} photos that cannot be read")
    log(f"{count} photos and {len(views) - count} views with depth in the memory of the device")
    return _on_device(views, scenes, pairs, count, device)


def _sets(folders: dict[str, Path]) -> Iterator[tuple[str, StoredSet]]:
    for source, folder in folders.items():
        for stored in find_sets(folder):
            yield source, stored


def _on_device(
    views: Sequence[_View],
    scenes: Sequence[int],
    pairs: dict[str, list[np.ndarray]],
    photos: int,
    device: torch.device,
) -> DeviceViews:
    height, width = (max(view.grey.shape[axis] for view in views) for axis in (0, 1))
    images = torch.zeros(len(views), height, width, dtype=torch.uint8, device=device)
    shape = (len(views), -(-height // DEPTH_STEP), -(-width // DEPTH_STEP))
    inverse_depth = torch.full(shape, NOTHING, device=device)
    for number, view in enumerate(views):
        for target, values in ((images, view.grey), (inverse_depth, view.inverse_depth)):
            h, w = values.shape
            target[number, :h, :w] = torch.from_numpy(values).to(device)

    def as_tensor(values: Sequence, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.array(values)).to(device, dtype)

    return DeviceViews(
        images,
        inverse_depth,
        as_tensor([view.grey.shape[::-1] for view in views], torch.float32),
        as_tensor([view.K for view in views], torch.float64),
        as_tensor([view.cam_from_world for view in views], torch.float64),
        as_tensor(scenes, torch.int64),
        pairs,
        np.arange(photos),
    )


def _read_photo(path: Path) -> _View | None:
    grey = read_texture(path)
    if grey is None:
        return None
    grey, _ = _shrunk(grey)
    height, width = grey.shape
    focal = PHOTO_FOCAL * max(height, width)
    K = np.array([[focal, 0, (width - 1) / 2], [0, focal, (height - 1) / 2], [0, 0, 1]])
    return _View(grey, np.zeros_like(grey[::DEPTH_STEP, ::DEPTH_STEP], np.float32), K, np.eye(4))


def _read_stored(stored: StoredSet, number: int) -> _View:
    view = read_view(stored, number).grey()
    grey, scale = _shrunk(view.pixels)
    x, y = (
        np.rint((np.arange(0, side, DEPTH_STEP) + 0.5) / s - 0.5).astype(int)
        for side, s in zip(grey.shape[::-1], scale, strict=True)
    )
    depth = view.inverse_depth[np.ix_(y.clip(0, view.size[1] - 1), x.clip(0, view.size[0] - 1))]
    resized = np.array([[scale[0], 0, (scale[0] - 1) / 2], [0, scale[1], (scale[1] - 1) / 2], [0, 0, 1]])
    return _View(grey, np.ascontiguousarray(depth, np.float32), resized @ view.K, view.cam_from_world)


def _shrunk(grey: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """An image of at most `LONGEST_SIDE`, and its scale in x and y."""
    height, width = grey.shape
    factor = min(1.0, LONGEST_SIDE / max(height, width))
    size = max(1, round(width * factor)), max(1, round(height * factor))
    if size == (width, height):
        return grey, (1.0, 1.0)
    return cv2.resize(grey, size, interpolation=cv2.INTER_AREA), (size[0] / width, size[1] / height)


# --- draws: Random numbers on a device, the same for the same seed and kind of device.


class Draws:
    """A generator of uniform and normal numbers on a device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers from `low` to `high`."""
        return torch.rand(*shape, generator=self.generator, device=self.device) * (high - low) + low

    def normal(self, *shape: int) -> Tensor:
        """Numbers of mean 0 and variance 1."""
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def happens(self, count: int, share: float) -> Tensor:
        """(count,) bool, true with the probability `share`."""
        return self.uniform(count) < share


# --- small: Small tensors without waiting for a GPU, as every plain upload and every inverse that is
# checked does.


@cache
def constant(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers, in nested tuples, as a tensor; uploaded once, so not to be written to."""
    return torch.tensor(values, dtype=dtype, device=device)


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the processor's memory on the device, which is not waited for."""
    return values.to(device, non_blocking=True)


def inverse(matrices: Tensor) -> Tensor:
    """Inverses of regular matrices (B, N, N)."""
    return torch.linalg.inv_ex(matrices).inverse


# --- transfer: Where points of one view lie in another, in batches: `lab/pairs/posed.py` on tensors, for
# points only.


class Transferred(NamedTuple):
    """Points of one view in another."""

    positions: Tensor  # (B, N, 2) float32; meaningless where not visible
    states: Tensor  # (B, N) int64 VISIBLE_STATE, HIDDEN_STATE or UNKNOWN_STATE


def project(homographies: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Points (B, N, 2) by homographies (B, 3, 3): (B, N, 2), and (B, N) their third coordinates."""
    x = points @ homographies[:, :, :2].mT + homographies[:, None, :, 2]
    depth = x[..., 2]
    safe = torch.where(depth.abs() > 1e-9, depth, torch.full_like(depth, 1e-9))
    return x[..., :2] / safe.unsqueeze(2), depth


def within(points: Tensor, sizes: Tensor) -> Tensor:
    """(B, N) bool: points (B, N, 2) that lie on images of sizes (B, 2)."""
    return ((points >= 0) & (points <= sizes[:, None] - 1)).all(2)


def transfer(views: DeviceViews, source: Tensor, target: Tensor, points: Tensor) -> Transferred:
    """Points (B, N, 2) of views `source` (B,) in views `target` (B,) of their scenes, by depth and poses."""
    maps = views.inverse_depth.unsqueeze(1)
    linear, nearest = _sampled(maps[source], points)
    near = torch.where((linear - nearest).abs() <= SAME_DEPTH * nearest.abs(), linear, nearest)
    pose = views.cam_from_world[target] @ inverse(views.cam_from_world[source])
    K0, K1 = views.K[source], views.K[target]
    rotation = (K1 @ pose[:, :3, :3] @ inverse(K0)).float()
    translation = (K1 @ pose[:, :3, 3:])[..., 0].float()
    x = points @ rotation[:, :, :2].mT + rotation[:, None, :, 2] + near.unsqueeze(2) * translation[:, None]
    depth = torch.where(x[..., 2] > 1e-6, x[..., 2], torch.ones_like(x[..., 2]))
    found = x[..., :2] / depth.unsqueeze(2)
    inside = (x[..., 2] > 1e-6) & within(found, views.sizes[target])
    found = torch.where(inside.unsqueeze(2), found, torch.zeros_like(found))
    # Pixels in the source by which the way back changes per unit of inverse depth in the target.
    step = (K0 @ inverse(pose)[:, :3, 3:])[..., 0].float()
    rate = torch.hypot(*(step[:, None, k] - points[..., k] * step[:, None, 2] for k in (0, 1))) * depth
    states = _visible(maps[target], found, near / depth, rate).where(inside, HIDDEN_STATE)
    unseen = torch.where(near == NOTHING, HIDDEN_STATE, UNKNOWN_STATE)
    return Transferred(found, torch.where(near > 0, states, unseen))


def _visible(maps: Tensor, points: Tensor, expected: Tensor, rate: Tensor) -> Tensor:
    """(B, N) states of the surface expected at `points`, as `posed` decides them for pixels."""
    linear, nearest = _sampled(maps, points)
    error = torch.minimum((linear - expected).abs(), (nearest - expected).abs())
    same = (error <= SAME_DEPTH * expected) | (error * rate <= SURELY_SAME_PIXEL)
    visible = same & (error * rate <= SAME_PIXEL) & (nearest > 0)
    occluded = ~same & (torch.minimum(linear, nearest) > expected * (1 + SAME_DEPTH))
    states = torch.where(occluded | (nearest == NOTHING), HIDDEN_STATE, UNKNOWN_STATE)
    return torch.where(visible, VISIBLE_STATE, states)


def _sampled(maps: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N) values of maps of inverse depth (B, 1, h, w) at points (B, N, 2): linear and of the nearest."""
    size = constant((maps.shape[-1], maps.shape[-2]), points.dtype, points.device)
    grid = ((2 * points / DEPTH_STEP + 1) / size - 1).nan_to_num(-9.0).clamp(-9, 9).unsqueeze(2)
    linear, nearest = (  # beyond the map everything is NOTHING
        F.grid_sample(maps - NOTHING, grid, mode=mode, align_corners=False)[:, 0, :, 0] + NOTHING
        for mode in ("bilinear", "nearest")
    )
    return linear, nearest


def overlap(views: DeviceViews, first: Tensor, second: Tensor, probes: Tensor) -> Tensor:
    """(B,) share of the probes (B, N, 2) of `first`, of those that are decided, that `second` sees."""
    states = transfer(views, first, second, probes).states
    return (states == VISIBLE_STATE).sum(1) / (states != UNKNOWN_STATE).sum(1).clamp_min(1)


# --- framing: New images of views: zooms, crops and rotations of the camera as homographies;
# `lab/pairs/framing.py` in

PROBES = 256  # pixels of view 0 among which a covisible one is looked for
WHOLE_SHARE = 0.4  # pairs whose images are not zoomed in
PHOTO_ROLL, PHOTO_ROTATION, PHOTO_STRETCH = 15.0, 11.0, 0.22  # degrees; deviation of the log of the aspect
# Rotations of an image by clockwise quarter turns.
_QUARTERS = (((1, 0), (0, 1)), ((0, -1), (1, 0)), ((-1, 0), (0, -1)), ((0, 1), (-1, 0)))
_SHRINKING = 0.7  # of the area, below which an image is smoothed first


def draw_framings(
    views: DeviceViews,
    first: Tensor,
    second: Tensor,
    flat: Tensor,
    size: tuple[int, int],
    draws: Draws,
    turned_share: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Homographies (B, 3, 3) float64 from pixels of both views to those of new images of one size.

    Args:
        views: to cut from.
        first, second: (B,) views of each pair.
        flat: (B,) bool, pairs of a photo and itself.
        size: width and height of the new images.
        draws: the source of randomness.
        turned_share: pairs of which the second image is rotated by 90, 180 or 270 degrees.
    """
    count = len(first)
    centre0, centre1 = _covisible(views, first, second, flat, draws)
    new = constant(size, views.sizes.dtype, views.sizes.device).expand(count, 2)
    turns = torch.where(draws.happens(count, turned_share), (3 * draws.uniform(count)).long() + 1, 0)
    new1 = torch.where((turns % 2 == 1).unsqueeze(1), new.flip(1), new)  # before it is turned
    fitting0, fitting1 = (
        (sides / views.sizes[side]).amax(1) for side, sides in ((first, new), (second, new1))
    )
    whole = draws.happens(count, WHOLE_SHARE)
    zoom = torch.where(whole, 1.0, draws.uniform(count, high=math.log(1.8)).exp())
    change = (draws.normal(count) * torch.where(whole, 0.15, 0.35)).exp().clamp(0.4, 2.5)
    least = torch.where(draws.happens(count, BORDER_SHARE), 0.6, 1.0)
    zoom1 = torch.minimum(torch.maximum(zoom * change, least), torch.full_like(zoom, 2.5))
    roll, tilt = torch.where(flat, PHOTO_ROLL, ROLL), torch.where(flat, PHOTO_ROTATION, ROTATION)
    stretch = PHOTO_STRETCH * flat.float()
    framing0 = _framing(views, first, centre0, fitting0 * zoom, (roll / 2, tilt / 3, 0 * tilt), new, draws)
    framing1 = _framing(views, second, centre1, fitting1 * zoom1, (roll, tilt, stretch), new1, draws)
    return framing0, _turned(framing1, turns, new1, new)


def _turned(framing: Tensor, turns: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Framings (B, 3, 3) of images after clockwise quarter turns (B,), which change their sizes (B, 2)."""
    quarter = constant(_QUARTERS, framing.dtype, framing.device)
    turn = torch.eye(3, dtype=framing.dtype, device=framing.device).repeat(len(framing), 1, 1)
    turn[:, :2, :2] = quarter[turns]
    centre, new_centre = (((size - 1) / 2).to(framing).unsqueeze(2) for size in (before, after))
    turn[:, :2, 2:] = new_centre - turn[:, :2, :2] @ centre
    return turn @ framing


def _covisible(
    views: DeviceViews, first: Tensor, second: Tensor, flat: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """(B, 2) a pixel of view 0 that view 1 sees, and its position there; the centres where none is found."""
    sizes0, rows = views.sizes[first], torch.arange(len(first), device=first.device)
    probes = draws.uniform(len(first), PROBES, 2) * (sizes0 - 1).unsqueeze(1)
    positions, states = transfer(views, first, second, probes)
    seen = (states == VISIBLE_STATE) | flat.unsqueeze(1)
    chosen, some = seen.float().argmax(1), seen.any(1, keepdim=True)
    here, there = probes[rows, chosen], positions[rows, chosen]
    there = torch.where(flat.unsqueeze(1), here, there)
    return torch.where(some, here, sizes0 / 2), torch.where(some, there, views.sizes[second] / 2)


def _framing(
    views: DeviceViews,
    chosen: Tensor,
    centre: Tensor,
    zoom: Tensor,
    spread: tuple[Tensor, Tensor, Tensor],
    sizes: Tensor,
    draws: Draws,
) -> Tensor:
    """(B, 3, 3) of views `chosen` with the pixel `centre` (B, 2) near the middle of images of `sizes` (B, 2);
    `spread` of roll, tilts and stretch."""
    count, (roll_spread, tilt_spread, stretch_spread) = len(chosen), spread
    K = views.K[chosen]
    middle = _window_centre(centre, zoom, views.sizes[chosen], sizes, draws).double()
    any_roll = draws.happens(count, ANY_ROLL_SHARE)
    roll = torch.where(any_roll, draws.uniform(count, low=-180, high=180), draws.normal(count) * roll_spread)
    tilts = draws.normal(count, 2) * tilt_spread.unsqueeze(1)
    rotation = _rotations(torch.deg2rad(torch.cat([tilts, roll.unsqueeze(1)], dim=1)).double())
    focal = zoom.double().unsqueeze(1) * K.diagonal(dim1=1, dim2=2)[:, :2]
    focal[:, 0] *= (draws.normal(count) * stretch_spread).exp()
    back = inverse(K)
    ray = (rotation @ back @ F.pad(middle, (0, 1), value=1.0).unsqueeze(2))[..., 0]
    half = (sizes.to(focal) - 1) / 2
    new = torch.diag_embed(F.pad(focal, (0, 1), value=1.0))
    new[:, :2, 2] = half - focal * ray[:, :2] / ray[:, 2:]
    return new @ rotation @ back


def _window_centre(centre: Tensor, zoom: Tensor, old: Tensor, sizes: Tensor, draws: Draws) -> Tensor:
    """(B, 2) centre of a window that contains `centre` and usually stays inside the old image."""
    half = sizes / zoom.unsqueeze(1) / 2
    middle = centre + draws.uniform(len(centre), 2, low=-0.6, high=0.6) * half
    inside = torch.where(half * 2 < old, torch.minimum(torch.maximum(middle, half), old - half), old / 2)
    return torch.where(draws.happens(len(centre), BORDER_SHARE).unsqueeze(1), middle, inside)


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
    old, depth = project(inverse(framing).float(), pixels.expand(len(chosen), -1, -1))
    old = old.masked_fill((depth <= 0).unsqueeze(2), -1e4)
    images = views.images[chosen].unsqueeze(1).float() / 255
    area = framing[:, 0, 0] * framing[:, 1, 1] - framing[:, 0, 1] * framing[:, 1, 0]
    shrinking = area.abs() < _SHRINKING
    images = torch.where(shrinking.view(-1, 1, 1, 1), F.avg_pool2d(images, 3, 1, 1), images)
    canvas = constant((images.shape[-1], images.shape[-2]), old.dtype, device)
    grid = ((2 * old + 1) / canvas - 1).view(-1, height, width, 2)
    return F.grid_sample(images, grid, align_corners=False)


# --- photometry: What a camera does to grey images, in batches: blur, vignette, tone, shading, noise,
# compression.

_BLUR_RADIUS = 5  # pixels of the kernel on either side
_BLOCK = 8
_KNOTS = 7  # of a tone curve
_SHARP = 0.05  # a blur so small that nothing changes
# Steps of quantisation of a block's cosines at quality 50 (T.81, table K.1).
_STEPS = (
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
    """Images (B, 1, H, W) in [0, 1] as cameras would take and store them; H and W multiples of 8.

    Args:
        images: grey.
        clean: (B,) bool, images that need sensor noise, as no camera took them; half of the others get none.
        draws: the source of randomness.
    """
    count = len(images)

    def some(share: float) -> Tensor:
        return draws.happens(count, share).view(-1, 1, 1, 1)

    def between(low: float, high: float) -> Tensor:
        return draws.uniform(count, 1, 1, 1, low=low, high=high)

    images = _blurred(images, draws)
    images = torch.where(some(0.5), images * _vignette(images, between(0.05, 0.35)), images)
    light = (images.clamp(0, 1) + 1e-6) ** between(-0.7, 0.7).exp()
    toned = ((light - 0.5) * between(0.5, 1.3) + 0.5 + between(-0.15, 0.15)).clamp(0, 1)
    images = torch.where(some(0.6), toned, images)
    curved = _curved(images, draws.uniform(count, _KNOTS))
    images = torch.where(some(0.04), curved, torch.where(some(0.02), 1 - images, images))
    coarse = draws.uniform(count, 1, 3, 4, low=0.5, high=1.2)
    shading = F.interpolate(coarse, images.shape[2:], mode="bicubic", align_corners=True)
    images = torch.where(some(0.25), images * shading, images)
    quiet = some(0.5) & ~clean.view(-1, 1, 1, 1)
    images = images + torch.where(quiet, 0.0, _noise(images, some(0.4), draws))
    images = torch.where(some(0.6), _compressed(images, between(30, 96)), images)
    return (images.clamp(0, 1) * 255).floor() / 255


def _blurred(images: Tensor, draws: Draws) -> Tensor:
    """A third out of focus; of these some in one direction only, as by motion along x or y."""
    count = len(images)
    width = torch.where(draws.happens(count, 0.38), draws.uniform(count, low=0.4, high=2.0), _SHARP)
    moving, along_y = draws.happens(count, 0.3), draws.happens(count, 0.5)
    offsets = torch.arange(-_BLUR_RADIUS, _BLUR_RADIUS + 1, device=images.device)
    for axis in (2, 3):
        along = along_y if axis == 2 else ~along_y
        spread = torch.where(moving, torch.where(along & (width > _SHARP), 2 * width, _SHARP), width)
        kernel = (-offsets.square() / (2 * spread.view(-1, 1).square())).exp()
        kernel = kernel / kernel.sum(1, keepdim=True)
        shape = (count, 1, -1, 1) if axis == 2 else (count, 1, 1, -1)
        reach = (_BLUR_RADIUS, 0) if axis == 2 else (0, _BLUR_RADIUS)
        images = F.conv2d(images.transpose(0, 1), kernel.view(shape), padding=reach, groups=count)
        images = images.transpose(0, 1)
    return images


def _curved(images: Tensor, knots: Tensor) -> Tensor:
    """Any tone curve: grey values in [0, 1] of knots (B, K), linear in between, as other sensors have it."""
    place = (images.clamp(0, 1) * (knots.shape[1] - 1)).flatten(1)
    lower = place.long().clamp_max(knots.shape[1] - 2)
    low, high = knots.gather(1, lower), knots.gather(1, lower + 1)
    return (low + (high - low) * (place - lower)).view(images.shape)


def _vignette(images: Tensor, strength: Tensor) -> Tensor:
    """(B, 1, H, W): 1 in the middle, darker towards the corners."""
    y, x = (torch.linspace(-1, 1, side, device=images.device) for side in images.shape[2:])
    return 1 - strength * (x.square() + y.square().unsqueeze(1)) / 2


def _noise(images: Tensor, coarse: Tensor, draws: Draws) -> Tensor:
    """Read and shot noise, where `coarse` of more than a pixel's size."""
    count = len(images)
    noise = draws.normal(*images.shape)
    noise = torch.where(coarse, 2.2 * F.avg_pool2d(noise, 3, 1, 1), noise)
    low, high = math.log(0.002), math.log(0.025)
    reading, shot = (draws.uniform(count, 1, 1, 1, low=low, high=high).exp() for _ in range(2))
    return noise * (reading + shot * images.clamp(0, 1).sqrt())


def _compressed(images: Tensor, quality: Tensor) -> Tensor:
    """As JPEG of a quality (B, 1, 1, 1) from 1 to 100 would store them, but for the rounding of pixels."""
    count, _, height, width = images.shape
    scale = torch.where(quality < 50, 50 / quality, 2 - quality / 50)
    steps = (constant(_STEPS, images.dtype, images.device) * scale).clamp_min(1).unsqueeze(1)
    cosines = _cosines(images.device)
    blocks = (255 * images[:, 0] - 128).view(count, height // _BLOCK, _BLOCK, width // _BLOCK, _BLOCK)
    levels = (cosines @ blocks.transpose(2, 3) @ cosines.T / steps).round() * steps
    pixels = (cosines.T @ levels @ cosines).transpose(2, 3).reshape(images.shape)
    return (pixels + 128) / 255


def _cosines(device: torch.device) -> Tensor:
    """(8, 8) orthonormal discrete cosine transform."""
    k = torch.arange(_BLOCK, device=device)
    table = torch.cos(math.pi * (2 * k + 1) * k.unsqueeze(1) / (2 * _BLOCK)) / 2
    table[0] /= 2**0.5
    return table


# --- image_pairs: Pairs of images that are made on the device, and where points of each lie in the other.

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


# --- labels: Partners of keypoints, and the quarter turns between images, of batches; as
# `lab/train/labels.py`.

_LEAST_VISIBLE = 8  # points that decide on a turn
_FAR = 1e6  # pixels


def partners(
    points0: Tensor, points1: Tensor, found0: Transferred, found1: Transferred, recipe: PairRecipe
) -> tuple[Tensor, Tensor]:
    """(B, N) and (B, M) int64 partners of points (B, N, 2), (B, M, 2); UNMATCHED, IGNORED.

    Args:
        points0, points1: keypoints.
        found0: points of image 0 in image 1, NaN where not visible.
        found1: points of image 1 in image 0.
        recipe: distances of matched and of unmatched points.
    """
    known0, known1 = (found.states != UNKNOWN_STATE for found in (found0, found1))
    forward = _distances(found0.positions, points1)
    backward = _distances(found1.positions, points0).mT
    # Where one direction is unknown, the other one counts twice.
    error = torch.where(known0.unsqueeze(2), forward, backward)
    error = (error + torch.where(known1.unsqueeze(1), backward, forward)) / 2
    (best0, partner0), (best1, partner1) = error.min(2), error.min(1)
    return (
        _decided(best0, partner0, partner1, known0, recipe),
        _decided(best1, partner1, partner0, known1, recipe),
    )


def _decided(best: Tensor, partner: Tensor, back: Tensor, known: Tensor, recipe: PairRecipe) -> Tensor:
    here = torch.arange(partner.shape[1], device=partner.device)
    mutual = (back.gather(1, partner) == here) & (best < recipe.match_distance)
    alone = torch.where((best > recipe.unmatched_distance) & known, UNMATCHED, IGNORED)
    return torch.where(mutual, partner, alone)


def _distances(found: Tensor, points: Tensor) -> Tensor:
    """(B, N, M) distances of points (B, N, 2) and (B, M, 2), far from those that are NaN.

    By differences: products of coordinates lose a fraction of a pixel, and `torch.cdist` without products is
    made for long vectors: on a GPU it took more than half of a training step.
    """
    dx, dy = (found.nan_to_num(-_FAR)[..., k, None] - points[:, None, :, k] for k in (0, 1))
    return dx.square_().add_(dy.square_()).sqrt_()


def quarter_turns_of(points: Tensor, found: Tensor) -> Tensor:
    """(B,) clockwise quarter turns of image 1 after which it is upright as image 0 is.

    Args:
        points: (B, N, 2) of image 0.
        found: (B, N, 2) their positions in image 1, NaN where not visible; 0 turns where few are.
    """
    seen = found.isfinite().all(2, keepdim=True)
    count = seen.sum(1).clamp_min(1)
    centred = []
    for positions in (points, found.nan_to_num(0.0)):
        mean = (positions * seen).sum(1) / count
        centred.append((positions - mean.unsqueeze(1)) * seen)
    (x0, y0), (x1, y1) = (positions.unbind(2) for positions in centred)
    angle = torch.atan2((x0 * y1 - y0 * x1).sum(1), (x0 * x1 + y0 * y1).sum(1))
    turns = (-(angle / (math.pi / 2)).round()).long() % TURNS
    return torch.where(seen.sum((1, 2)) >= _LEAST_VISIBLE, turns, 0)


# --- ahead: The next batch is made while one is trained on.

Made = TypeVar("Made")


def made_ahead(make: Callable[[int], Made], start: int, stop: int, device: torch.device) -> Iterator[Made]:
    """What `make` gives for the steps start … stop−1.

    On a processor a thread makes the next one meanwhile; a GPU has one queue for everything.
    """
    if device.type != "cpu":
        yield from map(make, range(start, stop))
        return
    with ThreadPoolExecutor(1) as pool:
        ahead = [pool.submit(make, step) for step in range(start, min(start + 1, stop))]
        for step in range(start + 1, stop + 1):
            made = ahead.pop().result()
            if step < stop:
                ahead.append(pool.submit(make, step))
            yield made


# --- batches: Batches of image pairs with dense ground truth, to train the front end on.

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


# --- image_sampler: Batches of image pairs for a front end that are made on the device.


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


# --- sampler: Batches of pairs for a matcher that are made on the device: no pair comes twice, and no
# processor has to

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
