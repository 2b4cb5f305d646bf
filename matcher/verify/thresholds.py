"""Thresholds are pixels of the resized images; here they become pixels of the stored ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from matcher.config import GeometryKind


def threshold_scale(
    scale0: Sequence[float] | np.ndarray, scale1: Sequence[float] | np.ndarray, kind: GeometryKind
) -> float:
    """Stored pixels for one pixel of the resized images, for a threshold on the residual of that geometry.

    The residual of homographies lies in image 1. An epipolar residual mixes both images as Sampson's distance
    does (Hartley and Zisserman, section 11.4.3): 1/e² is the sum of the 1/e² of either image alone.

    Args:
        scale0, scale1: (sx, sy), resized / stored size of image 0 and 1, as `Features.scale` holds it.
        kind: of the geometry.
    """
    stored0, stored1 = (1 / float(np.sqrt(scale[0] * scale[1])) for scale in (scale0, scale1))
    return (
        stored1 if kind in ("homography", "homographies") else float(np.sqrt(2 / (stored0**-2 + stored1**-2)))
    )
