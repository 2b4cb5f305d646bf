"""Sets of image pairs with ground truth; the kind of ground truth is the protocol of evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from matcher.data.image import Image
from matcher.data.images import image_from_array, read_image
from matcher.errors import UsageError
from matcher.lab.pairs.depth import DepthCamera

ProtocolName = Literal["homography", "pose", "depth", "correspondences", "unrelated"]


@dataclass(frozen=True, eq=False)
class PairImage:
    """One image of a pair: a file, or pixels rendered from it."""

    path: Path
    pixels: np.ndarray | None = None  # (H, W) or (H, W, 3) uint8; if given, these are the stored image

    def open(
        self, resize: int | None, shorter_side: int | None = None, soft_resize: int | None = None
    ) -> Image:
        """The image, resized for a front end.

        Args:
            resize: the longer side in pixels; images are never enlarged.
            shorter_side: the shorter side instead (480 for HPatches); images are never enlarged.
            soft_resize: as in `read_image`; not used with `shorter_side`, which a benchmark prescribes.

        Raises:
            ImageError: the file cannot be read.
        """
        if self.pixels is None and shorter_side is None:
            return read_image(self.path, resize=resize, soft_resize=soft_resize)
        pixels = self.pixels
        if pixels is None:
            pixels = read_image(self.path, resize=None, upright=False).pixels
        if shorter_side is not None:
            height, width = pixels.shape[:2]
            resize, soft_resize = round(shorter_side * max(width, height) / min(width, height)), None
        return replace(image_from_array(pixels, resize=resize, soft_resize=soft_resize), path=self.path)


@dataclass(frozen=True, eq=False)
class _Pair:
    name: str
    group: str  # of which results are reported: a level, a frame gap, a category
    image0: PairImage
    image1: PairImage

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups that the pair belongs to."""
        return (self.group,)


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
    more_groups: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of overlap, angle and light."""
        return (self.group, *self.more_groups)


@dataclass(frozen=True, eq=False)
class CorrespondencePair(_Pair):
    """Two images with labelled correspondences: set by hand, or one per pixel from a disparity map."""

    points0: np.ndarray  # (K, 2) stored pixels
    points1: np.ndarray  # (K, 2)
    dense: bool = True  # whether labels are dense enough to decide about single matches


@dataclass(frozen=True, eq=False)
class UnrelatedPair(_Pair):
    """Two images of different things: every match is wrong."""


Pair = HomographyPair | PosePair | DepthPair | CorrespondencePair | UnrelatedPair


@dataclass(frozen=True, eq=False)
class PairSet:
    """A benchmark; `pairs[i]` may read or render images, so only one pair is in memory at a time."""

    name: str
    protocol: ProtocolName
    pairs: Sequence[Pair]
    shorter_side: int | None = None  # of the resized images, where published results prescribe it
    oracle: bool = False  # whether the ground truth decides which keypoints correspond
    note: str = ""  # printed with the table

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.pairs)

    def first(self, count: int) -> PairSet:
        """`count` pairs spread evenly over the set, or all if it has fewer.

        Raises:
            UsageError: a count below 1.
        """
        if count < 1:
            raise UsageError(f"the number of pairs must be at least 1, not {count}")
        if count >= len(self):
            return self
        index = np.linspace(0, len(self) - 1, count).round().astype(int).tolist()
        return replace(self, pairs=PairSubset(self.pairs, tuple(index)))


@dataclass(frozen=True, eq=False)
class PairSubset(Sequence[Pair]):
    """Some pairs of a sequence, opened one at a time."""

    pairs: Sequence[Pair]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Pair:
        return self.pairs[self.indices[position]]

    def __iter__(self) -> Iterator[Pair]:
        return (self.pairs[i] for i in self.indices)
