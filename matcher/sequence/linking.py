"""From the features of two frames to verified links: match, verify, search for what was missed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.data.matches import Matches, TwoViewGeometry
from matcher.data.protocols import Estimator
from matcher.sequence.frames import FrameLinks
from matcher.sequence.guided import Guide, search_guided, typical_limit
from matcher.sequence.keyframes import KeptFrame
from matcher.verify.thresholds import threshold_scale

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
