"""Views with depth and poses, and photos, in a device's memory: what new pairs are cut from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

from matcher.errors import UsageError
from matcher.lab.pairs.posed import NOTHING
from matcher.lab.pairs.stored import StoredSet, find_sets, read_view
from matcher.lab.pairs.textures import read_texture

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
