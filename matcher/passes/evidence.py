"""Whether the matches of a pair so far are confident, by the inliers of their geometry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.config import SecondPassConfig
from matcher.data.matches import TwoViewGeometry


@dataclass(frozen=True)
class Evidence:
    """Support of a pair after a pass."""

    matches: int
    inliers: int  # of the geometry
    probable_inliers: int  # of these, those of probable matches
    keypoints: int  # of the image with fewer

    @staticmethod
    def of(geometry: TwoViewGeometry, probable: np.ndarray, keypoints: int) -> Evidence:
        """The evidence of a geometry.

        Args:
            geometry: estimated from K matches.
            probable: (K,) bool, matches that are probable enough to count as support.
            keypoints: their number in the image with fewer.
        """
        inliers = geometry.inliers if geometry.status == "ok" else np.zeros_like(geometry.inliers)
        counts = (int(np.count_nonzero(each)) for each in (inliers, inliers & probable))
        return Evidence(len(geometry.inliers), *counts, keypoints)

    def is_confident(self, config: SecondPassConfig) -> bool:
        """Whether no further pass is needed: enough inliers, which are most of the matches."""
        enough = min(config.confident_inliers, config.confident_keypoint_share * self.keypoints)
        return (
            self.probable_inliers >= enough
            and self.inliers >= config.confident_inlier_ratio * self.matches > 0
        )
