"""Whether a pass was sure: what its matches and the geometry that they agree with say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.config import SecondPassConfig
from matcher.data.matches import TwoViewGeometry


@dataclass(frozen=True)
class Evidence:
    """What speaks for a pair after a pass."""

    matches: int
    inliers: int  # of the geometry
    keypoints: int  # of the image with fewer

    @staticmethod
    def of(geometry: TwoViewGeometry, keypoints: int) -> Evidence:
        """The evidence of a geometry, estimated from matches of images with so many keypoints at least."""
        inliers = int(np.count_nonzero(geometry.inliers)) if geometry.status == "ok" else 0
        return Evidence(len(geometry.inliers), inliers, keypoints)

    def is_sure(self, config: SecondPassConfig) -> bool:
        """Whether another pass would find little more: many matches, of which most agree."""
        enough = min(config.sure_inliers, config.sure_share * self.keypoints)
        return self.inliers >= enough and self.inliers >= config.sure_ratio * self.matches > 0
