"""What a store holds about an image and a pair; K matches, points in stored pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matcher.data.camera import Camera
from matcher.data.matches import Matches, TwoViewGeometry

Status = Literal["done", "failed", "waiting"]


@dataclass(frozen=True)
class StoredImage:
    """One image of a collection."""

    name: str  # path below the image folder, with forward slashes
    path: Path  # where the image was found
    sha256: str  # of the file, or of its entry in a features file; empty while unknown
    size: tuple[int, int]  # (width, height) as stored; (0, 0) while unknown
    count: int  # keypoints N
    camera: Camera | None
    status: Status
    reason: str  # why it failed; empty otherwise


@dataclass(frozen=True, eq=False)
class StoredPair:
    """One finished pair; name0 sorts before name1."""

    name0: str
    name1: str
    matches: Matches  # scores to within 1/131070; points are keypoints unless the matcher refined them
    geometry: TwoViewGeometry
    seconds: float  # matching and verifying


@dataclass(frozen=True)
class FailedPair:
    """A pair that could not be matched, and why."""

    name0: str
    name1: str
    reason: str


@dataclass(frozen=True)
class Counts:
    """Progress of a run."""

    images: int  # all of them: done, failed and waiting
    images_failed: int
    images_waiting: int
    pairs: int  # all of them: done, failed and waiting
    pairs_failed: int
    pairs_waiting: int

    @property
    def images_done(self) -> int:
        """Images with keypoints."""
        return self.images - self.images_failed - self.images_waiting

    @property
    def pairs_done(self) -> int:
        """Finished pairs."""
        return self.pairs - self.pairs_failed - self.pairs_waiting
