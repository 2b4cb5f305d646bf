"""Photos, and views with depth and poses, in a device's memory: what training pairs are cut from."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.errors import ImageError, IntegrityError, UsageError, duration, few
from matcher.evaluate.folders import StoredSet, find_stored_sets
from matcher.images import find_images, read_image
from matcher.train.recipe import Recipe

T = TypeVar("T")
Log = Callable[[str], None]

VISIBLE, HIDDEN, UNKNOWN = 1, 0, -1  # states of a point of one image in another
NOTHING = -1.0  # inverse depth of pixels outside the scene: borders, backdrops
SAME_DEPTH = 0.03  # largest relative difference of the inverse depths of one surface

LONGEST_SIDE = 720  # pixels; larger images are shrunk
DEPTH_STEP = 2  # pixels from one sample of the inverse depth to the next
SPACE_VIEWS = 4  # of photos on planes in space


@dataclass(frozen=True, eq=False)
class PosedView:
    """An image of a known camera: x = K (R X + t); the centre of the first pixel is (0, 0)."""

    pixels: np.ndarray  # (H, W) uint8
    inverse_depth: np.ndarray  # (H, W), or at every n-th pixel; 1 / z, 0 unknown, NOTHING outside the scene
    K: np.ndarray  # (3, 3) float64, last row (0, 0, 1)
    cam_from_world: np.ndarray  # (4, 4) float64


@dataclass(frozen=True, eq=False)
class DeviceViews:
    """V images of one canvas size, each in its upper left corner: first photos, then views with depth."""

    images: Tensor  # (V, H, W) uint8, 0 beyond an image
    inverse_depth: Tensor  # (D, ⌈H/2⌉, ⌈W/2⌉) float32 1 / z at every second pixel; 0 unknown, NOTHING beyond
    sizes: Tensor  # (V, 2) float32 width, height
    K: Tensor  # (V, 3, 3) float64
    cam_from_world: Tensor  # (V, 4, 4) float64
    scenes: Tensor  # (V,) int64; views of different scenes have nothing in common
    captured: Tensor  # (V,) bool, images that a camera took as they are
    pairs: dict[str, list[np.ndarray]]  # by source: (P, 2) overlapping views of each set
    photos: int

    def transfer(self, source: Tensor, target: Tensor, points: Tensor) -> Transferred:
        """Points (B, N, 2) of views `source` (B,) in views `target` (B,) of their scenes."""
        depths = (self.inverse_depth[(k - self.photos).clamp_min(0), None] for k in (source, target))
        own, other = (
            Cameras(depth, self.K[k], self.cam_from_world[k], self.sizes[k])
            for depth, k in zip(depths, (source, target), strict=True)
        )
        return reproject(own, other, points, DEPTH_STEP)


def load_views(
    recipe: Recipe,
    photos: Sequence[Path],
    stored: dict[str, Path],
    device: torch.device,
    pairs: int,
    log: Log = lambda line: None,
) -> DeviceViews:
    """Read photos and stored views (folders by source), and draw photos on planes in space, as many as
    `pairs` pairs need; the device keeps 0.5 MB a view of 640 × 480."""
    shares, rng, views = vars(recipe.sources), np.random.default_rng([recipe.seed, 4]), []
    with ThreadPoolExecutor(8) as pool:
        if shares["planes"] or shares["spaces"]:
            order, tried, wanted = [photos[k] for k in rng.permutation(len(photos))], 0, 2 * pairs
            unread: list[str] = []
            while tried < len(order) and len(views) < wanted:
                part = order[tried : tried + max(16, wanted - len(views))]
                tried += len(part)
                reading = counted(pool.map(read_photo, part), len(part), "reading photos", log)
                for photo, pixels in zip(part, reading, strict=True):
                    if pixels is None:
                        unread.append(photo.name)
                    else:
                        K = _intrinsics(pixels.shape[::-1], 1.2)  # any that is usual
                        views.append(PosedView(pixels, np.zeros((0, 0), np.float32), K, np.eye(4)))
            if unread:
                log(f"skipped {len(unread)} photos that cannot be read: {few(unread)}")
            if not views:
                raise UsageError(f"{photos[0].parent}: none of the {len(photos)} photos can be read")
        count, scenes, found = len(views), list(range(len(views))), {name: [] for name in (*stored, "spaces")}
        captured = [False] * count
        if shares["spaces"]:
            # A space more for 20 pairs, as long as they take less than 300 MB.
            spaces = int(np.clip(pairs * shares["spaces"] / sum(shares.values()) / 20, 2, 120))
            size, textures = (recipe.pair.width, recipe.pair.height), [view.pixels for view in views]
            for space in counted(range(spaces), spaces, "photos on planes in space", log):
                found["spaces"].append(np.stack(np.triu_indices(SPACE_VIEWS, 1), 1) + len(views))
                views += draw_space(textures, size, rng)
                scenes += [count + space] * SPACE_VIEWS
                captured += [False] * SPACE_VIEWS
        numbers: dict[tuple[str, str], int] = {}  # of scenes, of which one may have several sets
        first = max(scenes, default=-1) + 1
        for source, folder in stored.items():
            sets = find_stored_sets(folder)
            every = [(each, number) for each in sets for number in range(len(each.views))]
            reading = counted(pool.map(_read_stored, *zip(*every, strict=True)), len(every), source, log)
            for each in sets:
                found[source].append(each.pairs + len(views))
                views += [next(reading) for _ in each.views]
                # Sets of one scene are named after it and a number, as `castle_7` or `castle-1`.
                scene = source, re.sub(r"[-_]\d+$", "", each.folder.name)
                scenes += [numbers.setdefault(scene, first + len(numbers))] * len(each.views)
                captured += [source == "real"] * len(each.views)
    log(f"{count} photos and {len(views) - count} views with depth in memory")
    height, width = (max(view.pixels.shape[axis] for view in views) for axis in (0, 1))
    images = torch.zeros(len(views), height, width, dtype=torch.uint8, device=device)
    shape = (max(1, len(views) - count), -(-height // DEPTH_STEP), -(-width // DEPTH_STEP))
    inverse_depth = torch.full(shape, NOTHING, device=device)
    for number, view in enumerate(views):
        h, w = view.pixels.shape
        images[number, :h, :w] = torch.from_numpy(view.pixels).to(device)
        if number >= count:
            h, w = view.inverse_depth.shape
            inverse_depth[number - count, :h, :w] = torch.from_numpy(view.inverse_depth).to(device)
    columns = (
        (torch.float32, [view.pixels.shape[::-1] for view in views]),
        (torch.float64, [view.K for view in views]),
        (torch.float64, [view.cam_from_world for view in views]),
        (torch.int64, scenes),
        (torch.bool, captured),
    )
    known = (torch.from_numpy(np.array(values)).to(device, dtype) for dtype, values in columns)
    return DeviceViews(images, inverse_depth, *known, found, count)


def counted(items: Iterable[T], total: int, what: str, log: Log) -> Iterator[T]:
    """The items, with a line every few seconds on how far they are and how long the rest may take."""
    began = said = time.perf_counter()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.perf_counter()
        if now - said > 5 and done < total:
            said = now
            log(f"{what}: {done} of {total}, {duration((now - began) / done * (total - done))} left")


def split_photos(folder: Path, validation: Path | None, seed: int) -> tuple[list[Path], list[Path]]:
    """Photos to train on, and others to validate on: those of `validation`, or a tenth."""
    photos = find_images(folder)
    if validation is not None:
        held_out = find_images(validation)
        taken = {photo.resolve() for photo in held_out}
        if not (training := [photo for photo in photos if photo.resolve() not in taken]):
            raise UsageError(f"{folder}: every photo is also one to validate on; give different folders")
        if all(read_photo(photo) is None for photo in held_out):
            raise UsageError(f"{validation}: none of the {len(held_out)} photos can be read")
        return training, held_out
    wanted, order = max(1, round(len(photos) / 10)), np.random.default_rng([seed, 2]).permutation(len(photos))
    for start in range(0, len(order) - 1, wanted):
        chosen = {*order[start : start + wanted].tolist()}
        if any(read_photo(photos[number]) is not None for number in chosen):
            break
    else:
        raise UsageError(f"{folder}: fewer than two of {len(photos)} photos can be read, but two are needed")
    kept = [photo for number, photo in enumerate(photos) if number not in chosen]
    return kept, [photos[number] for number in sorted(chosen)]


def read_photo(path: Path) -> np.ndarray | None:
    """(h, w) uint8 grey, at most 720 pixels long; None where the file cannot be read or is too small."""
    try:
        pixels = read_image(path, resize=LONGEST_SIDE).grey()
    except ImageError:
        return None
    return pixels if min(pixels.shape) >= 32 else None


def stored_folders(shares: Mapping[str, float], rendered: Path | None, real: Path | None) -> dict[str, Path]:
    """Folders of stored views by source; `UsageError`: the recipe lacks one, or has no use for it."""
    given = {"rendered": rendered, "real": real}
    for name, folder in given.items():
        if shares[name] and folder is None:
            raise UsageError(f"sources.{name}: the recipe needs stored views: give --{name} DIR")
        if folder is not None and not shares[name]:
            raise UsageError(f"sources.{name}: the recipe has no share of {folder}; leave it out")
        if shares[name]:
            find_stored_sets(folder)
    return {name: folder for name, folder in given.items() if folder is not None}


def _read_stored(stored: StoredSet, number: int) -> PosedView:
    """A view of a set, at most 720 pixels long; `IntegrityError` where its files cannot be read."""
    view = stored.views[number]
    grey = cv2.imread(str(stored.folder / view["image"]), cv2.IMREAD_GRAYSCALE)
    depth = cv2.imread(str(stored.folder / view["depth"]), cv2.IMREAD_UNCHANGED)
    known = grey is not None and depth is not None and depth.ndim == 2 and depth.dtype == np.uint16
    if not (known and np.abs(np.multiply(depth.shape, stored.step) - grey.shape).max() <= stored.step):
        raise IntegrityError(f"{stored.folder / view['image']}: it or its 16-bit depth map cannot be read")
    height, width = grey.shape
    factor = min(1.0, LONGEST_SIDE / max(height, width))
    size = max(1, round(width * factor)), max(1, round(height * factor))
    (sx, sy), z = np.divide(size, (width, height)), depth.astype(np.float32) / 1000
    inverse = np.divide(1, z, out=np.zeros_like(z), where=z > 0)
    x, y = (
        (((np.arange(0, side, DEPTH_STEP) + 0.5) / scale - 0.5) / stored.step).clip(0, most - 1)
        for side, scale, most in zip(size, (sx, sy), inverse.shape[::-1], strict=True)
    )
    at = [np.ascontiguousarray(grid, np.float32) for grid in np.meshgrid(x, y)]
    linear, nearest = (cv2.remap(inverse, *at, how) for how in (cv2.INTER_LINEAR, cv2.INTER_NEAREST))
    inverse = np.where(np.abs(linear - nearest) <= SAME_DEPTH * nearest, linear, nearest)
    resized = np.array([[sx, 0, (sx - 1) / 2], [0, sy, (sy - 1) / 2], [0, 0, 1]])
    K, pose = (np.array(view[key], dtype=np.float64) for key in ("K", "E"))
    return PosedView(cv2.resize(grey, size, interpolation=cv2.INTER_AREA), inverse, resized @ K, pose)


def draw_space(
    photos: Sequence[np.ndarray], size: tuple[int, int], rng: np.random.Generator
) -> list[PosedView]:
    """Views of a wall and tilted planes before it, all covered with photos, by cameras that look at them."""
    textures = [photos[k] for k in rng.choice(len(photos), int(rng.integers(3, 6)))]
    planes, views = [], []
    for texture in textures:
        if planes:
            depth, limit = rng.uniform(0.7, 1.5), 60
            centre = depth * np.array([rng.uniform(-0.5, 0.5), rng.uniform(-0.4, 0.4), 1])
            longer = rng.uniform(0.4, 1.1) * depth
        else:
            centre, longer, limit = np.array([0, 0, rng.uniform(1.5, 2.5)]), rng.uniform(3, 4.5), 20
        height, width = texture.shape
        right, down = _tilt(limit, rng)[:, :2].T * longer / max(height, width)
        corner = centre - right * (width - 1) / 2 - down * (height - 1) / 2
        planes.append(np.column_stack([right, down, corner]))  # from texture pixels (u, v, 1) to space
    for _ in range(SPACE_VIEWS):
        backdrop = np.full(size[::-1], int(rng.integers(256)), np.uint8)
        if rng.random() < 0.5:
            backdrop = cv2.resize(photos[rng.integers(len(photos))], size, interpolation=cv2.INTER_AREA)
        # A camera that looks at the middle from somewhere in front of it.
        K, pose = _intrinsics(size, rng.uniform(0.8, 1.4)), np.eye(4)
        roll = np.deg2rad(rng.uniform(-30, 30))
        pose[:3, :3] = cv2.Rodrigues(np.array([0, 0, roll]))[0] @ _tilt(36, rng)
        target = np.append(rng.uniform(-0.2, 0.2, 2), 1.0)
        distance = 0.8 * K[0, 0] / max(size) * 2.2 ** rng.uniform(-0.6, 0.6)
        pose[:3, 3] = np.array([0, 0, distance]) - pose[:3, :3] @ target
        views.append(render_planes(textures, planes, K, pose, backdrop))
    return views


def _intrinsics(size: tuple[int, int], focal: float) -> np.ndarray:
    """K (3, 3) of an image (width, height), the focal length in longer sides."""
    (width, height), focal = size, focal * max(size)
    return np.array([[focal, 0, (width - 1) / 2], [0, focal, (height - 1) / 2], [0, 0, 1.0]])


def _tilt(limit: float, rng: np.random.Generator) -> np.ndarray:
    """A rotation about a random axis in the image plane by up to `limit` degrees."""
    direction, angle = rng.uniform(0, 2 * np.pi), np.deg2rad(limit) * rng.random()
    return cv2.Rodrigues(angle * np.array([np.cos(direction), np.sin(direction), 0.0]))[0]


def render_planes(
    textures: Sequence[np.ndarray],
    planes: Sequence[np.ndarray],
    K: np.ndarray,
    cam_from_world: np.ndarray,
    backdrop: np.ndarray,
) -> PosedView:
    """The nearest plane at each pixel, `backdrop` (H, W) uint8 without depth where there is none; `textures`
    (h, w) uint8; `planes` (3, 3) from texture pixels (u, v, 1) to points in space."""
    height, width = backdrop.shape
    pixels, nearest = backdrop.copy(), np.full(backdrop.shape, NOTHING, np.float32)
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)[None]
    for texture, plane in zip(textures, planes, strict=True):
        H = K @ (cam_from_world[:3, :3] @ plane + cam_from_world[:3, 3:] * [0, 0, 1])
        a, b, c = np.linalg.inv(H)[2].astype(np.float32)  # inverse depth is linear in the pixel
        inverse = a * x + b * y + c
        middle = H[2] @ [texture.shape[1] / 2, texture.shape[0] / 2, 1]
        shrink = max(abs(middle), 1e-6) ** 1.5 / max(abs(np.linalg.det(H)), 1e-12) ** 0.5
        if shrink > 1.3:  # texels a pixel: blurred against aliasing
            texture = cv2.GaussianBlur(texture, (0, 0), 0.4 * float(min(shrink, 8)))
        warped = cv2.warpPerspective(texture, H, (width, height), flags=cv2.INTER_LINEAR)
        extent = np.full(texture.shape, 255, np.uint8)
        covered = cv2.warpPerspective(extent, H, (width, height), flags=cv2.INTER_NEAREST) > 0
        visible = covered & (inverse > np.maximum(nearest, 0))
        pixels[visible], nearest[visible] = warped[visible], inverse[visible]
    return PosedView(pixels, np.ascontiguousarray(nearest[::DEPTH_STEP, ::DEPTH_STEP]), K, cam_from_world)


# --- Where points of one view lie in another, by depth and poses.


class Transferred(NamedTuple):
    """Points of one image in another."""

    positions: Tensor  # (B, N, 2) float32; meaningless, or NaN, where not visible
    states: Tensor  # (B, N) int64 VISIBLE, HIDDEN or UNKNOWN


class Cameras(NamedTuple):
    """Depth and cameras of B views."""

    inverse_depth: Tensor  # (B, 1, h, w) float32
    K: Tensor  # (B, 3, 3) float64
    cam_from_world: Tensor  # (B, 4, 4) float64
    sizes: Tensor  # (B, 2) float32


def inverse(matrices: Tensor) -> Tensor:
    """Inverses of regular matrices (B, N, N), without a check, for which a GPU would be waited for."""
    return torch.linalg.inv_ex(matrices).inverse


def within(points: Tensor, sizes: Tensor) -> Tensor:
    """(B, N) bool: points (B, N, 2) that lie on images of sizes (B, 2)."""
    return ((points >= 0) & (points <= sizes[:, None] - 1)).all(2)


def reproject(own: Cameras, other: Cameras, points: Tensor, step: int) -> Transferred:
    """Points (B, N, 2) of views in other views of their scenes; `step` pixels between samples of depth."""
    linear, nearest = _sampled(own.inverse_depth, points, step)
    near = torch.where((linear - nearest).abs() <= SAME_DEPTH * nearest.abs(), linear, nearest)
    pose = other.cam_from_world @ inverse(own.cam_from_world)
    rotation = (other.K @ pose[:, :3, :3] @ inverse(own.K)).float()
    translation = (other.K @ pose[:, :3, 3:])[..., 0].float()
    x = points @ rotation[:, :, :2].mT + rotation[:, None, :, 2] + near.unsqueeze(2) * translation[:, None]
    depth = torch.where(x[..., 2] > 1e-6, x[..., 2], torch.ones_like(x[..., 2]))
    found = x[..., :2] / depth.unsqueeze(2)
    inside = (x[..., 2] > 1e-6) & within(found, other.sizes)
    found = torch.where(inside.unsqueeze(2), found, torch.zeros_like(found))
    # Pixels in the source by which the way back changes per unit of inverse depth in the target.
    back = (own.K @ inverse(pose)[:, :3, 3:])[..., 0].float()
    rate = torch.hypot(*(back[:, None, k] - points[..., k] * back[:, None, 2] for k in (0, 1))) * depth
    # The surface expected there: hidden behind a nearer one, or unknown where depths are inconsistent.
    expected, (linear, nearest) = near / depth, _sampled(other.inverse_depth, found, step)
    error = torch.minimum((linear - expected).abs(), (nearest - expected).abs())
    # Within .3 pixels it is the same whatever the depths are, as those of far points are uncertain.
    same = (error <= SAME_DEPTH * expected) | (error * rate <= 0.3)
    visible = same & (error * rate <= 0.8) & (nearest > 0)
    occluded = ~same & (torch.minimum(linear, nearest) > expected * (1 + SAME_DEPTH))
    states = torch.where(occluded | (nearest == NOTHING), HIDDEN, UNKNOWN)
    states = torch.where(visible, VISIBLE, states).where(inside, HIDDEN)
    return Transferred(found, torch.where(near > 0, states, torch.where(near == NOTHING, HIDDEN, UNKNOWN)))


def _sampled(maps: Tensor, points: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """(B, N) values of maps of inverse depth (B, 1, h, w) at points (B, N, 2): linear and of the nearest."""
    height, width = maps.shape[-2:]
    grid = torch.stack([(2 * points[..., 0] / step + 1) / width, (2 * points[..., 1] / step + 1) / height], 2)
    grid = (grid - 1).nan_to_num(-9.0).clamp(-9, 9).unsqueeze(2)
    modes, above = ("bilinear", "nearest"), maps - NOTHING  # beyond the map everything is NOTHING
    found = (F.grid_sample(above, grid, mode=mode, align_corners=False) for mode in modes)
    return tuple(values[:, 0, :, 0] + NOTHING for values in found)
