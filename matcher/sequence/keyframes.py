"""Frames that are kept: the last one, and the keyframes that later ones are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from matcher.arrays import to_numpy
from matcher.config import RefineConfig
from matcher.refine import ImagePyramid, refine_matches
from matcher.sequence.frames import FrameLinks, Guide, search_guided, typical_limit
from matcher.types import Estimator, Features, Matches, TwoViewGeometry
from matcher.verify.adjustment import threshold_scale

# --- keyframes: Frames that are kept: the last one, and the keyframes that later ones are compared with.

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


# --- keyframe_refinement: Points of a frame refined against the keyframe that they are linked to, on the
# images themselves.


class KeyframeRefinement:
    """Moves the points of each frame to where their surroundings look most like those in the keyframe.

    The reference of a point is the keyframe, not the frame before: errors of one frame are not handed on to
    the next.
    """

    def __init__(self, config: RefineConfig | None) -> None:
        """`config` None: points stay where the front end found them."""
        self.config = config
        self._last: KeptFrame | None = None  # keyframe

    def refine(self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks) -> None:
        """Move the points of `frame` that consistent links join to the keyframe, where that is reliable."""
        if self.config is None or keyframe.pyramid is None or frame.pyramid is None:
            return
        if self._last is not None and self._last is not keyframe:
            self._last.pyramid.release()
        self._last = keyframe
        rows = links.indices[links.consistent]
        points = keyframe.keypoints[rows[:, 0]], frame.keypoints[rows[:, 1]]
        matches = Matches(rows, *points, links.scores[links.consistent])
        refined = refine_matches(keyframe.pyramid, frame.pyramid, matches, self.config)
        accepted = refined.refinement.accepted
        frame.keypoints[rows[accepted, 1]] = refined.points1[accepted]


# --- linking: From the features of two frames to verified links: match, verify, search for what was missed.

MIN_LINKS = 12  # consistent ones; with fewer, two frames do not show one scene
_SEARCH = 0.02  # largest radius of the search around a prediction, as a share of the image's diagonal
_LEAST_RADIUS = 2.0  # pixels of the resized image


@dataclass(frozen=True, eq=False)
class Linker:
    """Verifies links by one epipolar geometry and adds those that it predicts."""

    estimator: Estimator  # of kind "fundamental"
    max_epipolar_error: float = 1.5  # pixels of the resized image; the estimator's own threshold
    guided: bool = True

    def verify(self, frame0: KeptFrame, frame1: KeptFrame, matches: Matches) -> tuple[FrameLinks, Guide]:
        """Links of two frames from the matches of their features, and what they predict for other points.

        Points of a scene that does not move, and of what moves with it, are consistent. Where fewer than
        `MIN_LINKS` agree, none is.
        """
        return self._link(frame0, frame1, matches.indices, matches.scores)

    def complete(self, frame0: KeptFrame, frame1: KeptFrame, common: np.ndarray) -> FrameLinks:
        """Links to a frame further back, from the tracks (K, 2) that both see; their score is 1."""
        return self._link(frame0, frame1, common, np.ones(len(common), np.float32))[0]

    def _link(
        self, frame0: KeptFrame, frame1: KeptFrame, indices: np.ndarray, scores: np.ndarray
    ) -> tuple[FrameLinks, Guide]:
        scale = threshold_scale(frame0.scale, frame1.scale, "fundamental")
        points = [f.keypoints[indices[:, side]] for side, f in enumerate((frame0, frame1))]
        geometry = self.estimator(*points, thresholds_scale=scale)
        links = FrameLinks(frame0.index, indices, scores, _agreeing(geometry))
        good = indices[links.consistent]
        guide = Guide(
            start=points[0][links.consistent],
            end=points[1][links.consistent],
            limit=typical_limit(*(f.descriptors[good[:, side]] for side, f in enumerate((frame0, frame1)))),
            radius=_SEARCH * float(np.hypot(*frame1.size)),
            fundamental=geometry.matrix,
            tolerance=self.max_epipolar_error * scale,
        )
        if self.guided:
            links = self._search(frame0, frame1, links, guide.narrowed(_LEAST_RADIUS * scale))
        return links, guide

    def _search(self, frame0: KeptFrame, frame1: KeptFrame, links: FrameLinks, guide: Guide) -> FrameLinks:
        """The links and those that the guide finds, which take the place of matches that did not agree."""
        good = links.indices[links.consistent]
        free = [np.setdiff1d(np.arange(len(f.keypoints)), good[:, i]) for i, f in enumerate((frame0, frame1))]
        sides = [
            (f.keypoints[rows], f.descriptors[rows]) for f, rows in zip((frame0, frame1), free, strict=True)
        ]
        pairs, scores = search_guided(*sides[0], *sides[1], guide)
        found = np.stack([free[0][pairs[:, 0]], free[1][pairs[:, 1]]], axis=1)
        replaced = np.isin(links.indices[:, 0], found[:, 0]) | np.isin(links.indices[:, 1], found[:, 1])
        kept = links.consistent | ~replaced
        return FrameLinks(
            links.frame,
            np.concatenate([links.indices[kept], found]),
            np.concatenate([links.scores[kept], scores]),
            np.concatenate([links.consistent[kept], np.ones(len(found), bool)]),
        )


def _agreeing(geometry: TwoViewGeometry) -> np.ndarray:
    """(K,) bool inliers, none if they are few."""
    enough = geometry.status == "ok" and int(geometry.inliers.sum()) >= MIN_LINKS
    return geometry.inliers if enough else np.zeros_like(geometry.inliers)
