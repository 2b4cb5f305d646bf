"""Frames that are kept: the last one, and the keyframes that later ones are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from matcher.data.features import Features
from matcher.data.tensors import to_numpy
from matcher.refine.refinement import ImagePyramid
from matcher.sequence.frames import FrameLinks

_FEW = 20  # close links below which their share means nothing


class MeasuredDisparities(NamedTuple):
    """What a rectified pair says of the points of its left image."""

    disparities: np.ndarray  # (N,) pixels of the camera, as measured; NaN where unknown
    offset: float  # that was added to them for the depths
    focal_baseline: float  # depth times disparity


@dataclass(eq=False)
class KeptFrame:
    """A frame's features and what has become known of it; nothing of it is extracted or matched twice."""

    index: int
    features: Features
    keypoints: np.ndarray  # (N, 2) float32 pixels
    descriptors: np.ndarray  # (N, D) float32
    track_ids: np.ndarray  # (N,) int64
    depths: np.ndarray  # (N,) float64, NaN where unknown
    inverse_errors: np.ndarray  # (N,) of inverse depths that one camera knows; NaN for others
    world_from_cam: np.ndarray | None = None  # (4, 4)
    most_links: int = 0  # that a later frame had to it
    most_close_links: int = 0  # the same, of points that are close
    begins_anew: bool = False  # it was linked to nothing before it
    measured: MeasuredDisparities | None = None  # where depths come from a pair
    pyramid: ImagePyramid | None = None  # its image; None where points are not refined

    @classmethod
    def of(cls, index: int, features: Features, pyramid: ImagePyramid | None) -> KeptFrame:
        """A frame of which nothing is known yet but its features, and its image where points are refined."""
        points, descriptors = (
            np.array(to_numpy(values), np.float32)  # copied: refinement moves the points of the frame only
            for values in (features.keypoints, features.descriptors)
        )
        unknown = np.full(len(points), -1, np.int64), *np.full((2, len(points)), np.nan)
        return cls(index, features, points, descriptors, *unknown, pyramid=pyramid)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in stored pixels."""
        width, height = self.features.size.tolist()
        return int(width), int(height)

    @property
    def scale(self) -> tuple[float, float]:
        """(sx, sy): size in which its points were found / stored size."""
        sx, sy = self.features.scale.tolist()
        return sx, sy


@dataclass(frozen=True)
class KeyframeRule:
    """When a frame becomes a keyframe."""

    kept: float = 0.65  # fewer of the tracks that the keyframe's next frame had are left
    parallax: float = 0.12  # median way since the keyframe, as a share of the image's diagonal

    def wants(self, kept: float, parallax: float, size: tuple[int, int]) -> bool:
        """Whether a frame with this share of tracks and this parallax (pixels) is to be the next keyframe."""
        return kept < self.kept or parallax > self.parallax * float(np.hypot(*size))


def share_left(keyframe: KeptFrame, links: FrameLinks, close: float | None) -> float:
    """Share of a keyframe's links that a later frame still has, of the most that any frame had.

    Far points show how the camera turned, only close ones how far it moved (Mur-Artal and Tardós 2017,
    section III-E), and close ones are the first to leave the image. So of all points and the close ones,
    the smaller share counts.

    Args:
        keyframe: its record of the most links is kept up to date.
        links: keyframe → later frame.
        close: depth below which a point is close; None: none is.
    """
    rows = links.indices[links.consistent, 0]
    keyframe.most_links = max(keyframe.most_links, len(rows))
    share = len(rows) / max(keyframe.most_links, 1)
    if close is None:
        return share
    with np.errstate(invalid="ignore"):
        near = int(np.count_nonzero(keyframe.depths[rows] < close))
    keyframe.most_close_links = max(keyframe.most_close_links, near)
    return min(share, near / keyframe.most_close_links) if keyframe.most_close_links >= _FEW else share


def through(keyframe: KeptFrame, previous: KeptFrame, links: FrameLinks) -> np.ndarray:
    """(K, 2) int64 points of the keyframe and of a frame that `links` joins to the previous one.

    They are joined where the previous frame's point of a consistent link is on a track of the keyframe.
    """
    indices = links.indices[links.consistent]
    _, here, there = np.intersect1d(
        keyframe.track_ids, previous.track_ids[indices[:, 0]], assume_unique=True, return_indices=True
    )
    return np.stack([here, indices[there, 1]], axis=1).astype(np.int64)


def median_parallax(earlier: KeptFrame, keypoints: np.ndarray, links: FrameLinks) -> float:
    """Median way in pixels of the points of consistent links; 0 without any."""
    indices = links.indices[links.consistent]
    if len(indices) == 0:
        return 0.0
    step = keypoints[indices[:, 1]] - earlier.keypoints[indices[:, 0]]
    return float(np.median(np.linalg.norm(step, axis=1)))
