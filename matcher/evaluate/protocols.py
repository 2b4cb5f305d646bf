"""Sets of image pairs with ground truth; the kind of ground truth is the protocol of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

from matcher.errors import ImageError, UsageError
from matcher.images import read_image
from matcher.types import Image

ProtocolName = Literal["homography", "pose", "depth", "correspondences", "unrelated", "trap"]


@dataclass(frozen=True, eq=False)
class PairImage:
    """One image of a pair: a file, or pixels rendered from it."""

    path: Path
    pixels: np.ndarray | None = None  # (H, W) or (H, W, 3) uint8; if given, these are the stored image

    def given(self, shorter_side: int | None = None) -> Path | np.ndarray | Image:
        """For `Pipeline.match`: the file or the pixels, or an image of a prescribed shorter side."""
        if shorter_side is None:
            return self.path if self.pixels is None else self.pixels
        pixels = self.pixels
        if pixels is None:
            pixels = read_image(self.path, resize=None, upright=False).pixels
        resize = round(shorter_side * max(pixels.shape[:2]) / min(pixels.shape[:2]))  # never enlarged
        return replace(read_image(pixels, resize=resize), path=self.path)


@dataclass(frozen=True, eq=False)
class _Pair:
    name: str
    group: str  # of which results are reported: a level, a frame gap, a category; several in a row by "; "
    image0: PairImage
    image1: PairImage

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups that the pair belongs to."""
        return tuple(self.group.split("; "))


@dataclass(frozen=True, eq=False)
class HomographyPair(_Pair):
    """Two images of a plane, or from one viewpoint."""

    H_1_from_0: np.ndarray  # (3, 3) stored pixels of image 0 to stored pixels of image 1


@dataclass(frozen=True, eq=False)
class PosePair(_Pair):
    """Two calibrated images with their relative pose."""

    K0: np.ndarray  # (3, 3) of the stored image
    K1: np.ndarray
    cam1_from_cam0: np.ndarray  # (4, 4), the translation up to scale


@dataclass(frozen=True, eq=False)
class DepthPair(PosePair):
    """Two calibrated images with their relative pose and depth maps."""

    view0: DepthCamera
    view1: DepthCamera


@dataclass(frozen=True, eq=False)
class CorrespondencePair(_Pair):
    """Two images with correspondences labelled by hand, or of every pixel by a disparity map."""

    points0: np.ndarray  # (K, 2) stored pixels
    points1: np.ndarray  # (K, 2)
    dense: bool = True  # whether labels are dense enough to decide about single matches


@dataclass(frozen=True, eq=False)
class UnrelatedPair(_Pair):
    """Two images of different things: every match is wrong."""


Pair = HomographyPair | PosePair | DepthPair | CorrespondencePair | UnrelatedPair


@dataclass(frozen=True, eq=False)
class PairsOnAccess(Sequence[Pair]):
    """Pairs that are made, or opened, by number when they are asked for."""

    total: int
    make: Callable[[int], Pair]

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, position: int) -> Pair:
        if not 0 <= position < self.total:
            raise IndexError(position)
        return self.make(position)


@dataclass(frozen=True, eq=False)
class PairSet:
    """A benchmark; `pairs[i]` may read or render images, so only one pair is in memory at a time."""

    name: str
    protocol: ProtocolName
    pairs: Sequence[Pair]
    shorter_side: int | None = None  # of the resized images, where published results prescribe it
    note: str = ""  # printed with the table

    def __len__(self) -> int:
        return len(self.pairs)

    def first(self, count: int) -> PairSet:
        """`count` pairs spread evenly over the set, or all if it has fewer."""
        if count < 1:
            raise UsageError(f"the number of pairs must be at least 1, not {count}")
        if count >= len(self):
            return self
        index = np.linspace(0, len(self) - 1, count).round().astype(int).tolist()
        return replace(self, pairs=PairsOnAccess(count, lambda position: self.pairs[index[position]]))


@dataclass(frozen=True, eq=False)
class DepthCamera:
    """The camera and the depth map of an image."""

    path: Path | np.ndarray  # of the depth map, a 16-bit PNG in millimetres; or (h, w) float32 metres
    stride: int
    K: np.ndarray  # (3, 3) of the stored image
    cam_from_world: np.ndarray  # (4, 4), metres

    def depth(self) -> np.ndarray:
        """(h, w) float32 metres; `ImageError` where the file cannot be read."""
        if isinstance(self.path, np.ndarray):
            return self.path
        found = cv2.imread(str(self.path), cv2.IMREAD_UNCHANGED)
        if found is None or found.ndim != 2 or found.dtype != np.uint16:
            raise ImageError(f"{self.path}: no depth map; a grey 16-bit PNG in millimetres is needed")
        return found.astype(np.float32) * np.float32(1e-3)


def depth_at(points: np.ndarray, camera: DepthCamera) -> np.ndarray:
    """(N,) depth at points (N, 2), interpolated bilinearly in inverse depth; NaN where it is unknown, outside
    the image, or between neighbouring depths that differ by more than 5 %, of two surfaces."""
    depth = camera.depth()
    at = np.nan_to_num(points, nan=-1e6).clip(-1e6, 1e6) / camera.stride
    low = np.floor(at).astype(np.int64)
    known = (low >= 0).all(axis=1) & (low < np.subtract(depth.shape[::-1], 1)).all(axis=1)
    x, y = (low * known[:, None]).T
    corners = np.stack([depth[y, x], depth[y, x + 1], depth[y + 1, x], depth[y + 1, x + 1]], axis=1)
    nearest = corners.min(axis=1)
    known &= (nearest > 0) & (corners.max(axis=1) <= nearest * 1.05)
    u, v = (at - low).T
    weights = np.stack([(1 - u) * (1 - v), u * (1 - v), (1 - u) * v, u * v], axis=1)
    inverse = (weights / np.where(corners > 0, corners, 1)).sum(axis=1)
    return np.where(known, 1 / np.where(known, inverse, 1), np.nan)


def reproject(points: np.ndarray, source: DepthCamera, target: DepthCamera) -> tuple[np.ndarray, np.ndarray]:
    """Points (N, 2) of one image in another: (N, 2) stored pixels, NaN where depth cannot decide and infinite
    where they are occluded, behind the camera or outside; and (N,) bool which are visible: depths agree
    within 3 % and 2 cm."""
    z = depth_at(points, source)
    rays = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(source.K).T
    pose = target.cam_from_world @ np.linalg.inv(source.cam_from_world)
    points1 = (rays * z[:, None]) @ pose[:3, :3].T + pose[:3, 3]
    front = points1[:, 2] > 1e-6
    pixels = (points1 @ target.K.T)[:, :2] / np.where(front, points1[:, 2], 1)[:, None]
    measured = depth_at(np.where(front[:, None], pixels, np.nan), target)
    limit = np.array(target.depth().shape[::-1]) * target.stride
    with np.errstate(invalid="ignore"):
        outside = front & ((pixels < -0.5) | (pixels > limit - 0.5)).any(axis=1)
        consistent = np.abs(measured - points1[:, 2]) < 0.03 * points1[:, 2] + 0.02
    visible = np.isfinite(z) & front & consistent
    hidden = np.isfinite(z) & (~front | outside | (np.isfinite(measured) & ~consistent))
    pixels[hidden], pixels[~visible & ~hidden] = np.inf, np.nan
    return pixels, visible
