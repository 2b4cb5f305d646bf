"""What a benchmark is: pairs of pictures, each with one kind of truth, in a set opened one by one."""

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
class Picture:
    """One side of a pair: a file, or pixels that were made from it."""

    path: Path
    pixels: np.ndarray | None = None  # (H, W) or (H, W, 3) uint8; then they are the stored picture

    def open(self, resize: int | None, shorter_side: int | None = None) -> Image:
        """The picture ready for a front end.

        Args:
            resize: longer side in pixels; only ever made smaller.
            shorter_side: instead, the shorter side (HPatches is measured at 480); only ever made smaller.

        Raises:
            ImageError: the file cannot be read.
        """
        if self.pixels is None and shorter_side is None:
            return read_image(self.path, resize=resize)
        pixels = self.pixels
        if pixels is None:
            pixels = read_image(self.path, resize=None, upright=False).pixels
        if shorter_side is not None:
            height, width = pixels.shape[:2]
            resize = round(shorter_side * max(width, height) / min(width, height))
        return replace(image_from_array(pixels, resize=resize), path=self.path)


@dataclass(frozen=True, eq=False)
class _Pair:
    name: str
    group: str  # pairs of one group are also reported together: a level, a frame gap, a category
    image0: Picture
    image1: Picture

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups that the pair is reported in."""
        return (self.group,)


@dataclass(frozen=True, eq=False)
class HomographyPair(_Pair):
    """Two pictures of a plane, or from one place."""

    H_1_from_0: np.ndarray  # (3, 3) stored pixels of image 0 to stored pixels of image 1


@dataclass(frozen=True, eq=False)
class PosePair(_Pair):
    """Two calibrated pictures."""

    K0: np.ndarray  # (3, 3) of the stored picture
    K1: np.ndarray
    cam1_from_cam0: np.ndarray  # (4, 4) takes camera-0 points to camera 1; any scale


@dataclass(frozen=True, eq=False)
class DepthPair(PosePair):
    """Two calibrated pictures with depth."""

    view0: DepthCamera
    view1: DepthCamera
    more_groups: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Of overlap, angle, light."""
        return (self.group, *self.more_groups)


@dataclass(frozen=True, eq=False)
class CorrespondencePair(_Pair):
    """Two pictures with points known to correspond: set by hand, or one a pixel from a disparity map."""

    points0: np.ndarray  # (K, 2) stored pixels
    points1: np.ndarray  # (K, 2)
    dense: bool = True  # whether a label is near every keypoint, so that matches can be judged one by one


@dataclass(frozen=True, eq=False)
class UnrelatedPair(_Pair):
    """Two pictures of different things: every match is wrong."""


Pair = HomographyPair | PosePair | DepthPair | CorrespondencePair | UnrelatedPair
_PROTOCOLS: dict[type, ProtocolName] = {
    HomographyPair: "homography",
    PosePair: "pose",
    DepthPair: "depth",
    CorrespondencePair: "correspondences",
    UnrelatedPair: "unrelated",
}


def protocol_of(pair: Pair) -> ProtocolName:
    """The name of the protocol that a pair is judged by."""
    return _PROTOCOLS[type(pair)]


@dataclass(frozen=True, eq=False)
class PairSet:
    """A benchmark; `pairs[i]` may read and render, so that only one pair is in memory at a time."""

    name: str
    protocol: ProtocolName
    pairs: Sequence[Pair]
    shorter_side: int | None = None  # the size that the set's published figures are measured at
    oracle: bool = False  # whether the truth tells which keypoints belong together
    note: str = ""  # what a reader of the table must know

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.pairs)

    def first(self, count: int) -> PairSet:
        """`count` pairs spread evenly over the set; all where it has fewer.

        Raises:
            UsageError: a count below 1.
        """
        if count < 1:
            raise UsageError(f"the number of pairs must be at least 1, not {count}")
        if count >= len(self):
            return self
        index = np.linspace(0, len(self) - 1, count).round().astype(int).tolist()
        return replace(self, pairs=Chosen(self.pairs, tuple(index)))


@dataclass(frozen=True, eq=False)
class Chosen(Sequence[Pair]):
    """Some pairs of a sequence, still opened one at a time."""

    pairs: Sequence[Pair]
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, position: int) -> Pair:
        return self.pairs[self.places[position]]

    def __iter__(self) -> Iterator[Pair]:
        return (self.pairs[i] for i in self.places)
