"""The common region of two images and its change of scale, from the inliers of a geometry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.data.image import Image
from matcher.passes.crops import Crop, crop, image_points

MARGIN = 0.15  # added on every side, as a share of the longer side of the matched points' bounding box
_MARGIN_PIXELS = 8  # added too, because matches are rare near image borders
_TAIL = 0.02  # share of the points left outside the box on each side: some are outliers
_DRAWN = 2000  # random pairs of matches whose distances are compared
_LEAST_DISTANCE = 8.0  # pixels; shorter ones are too noisy
_LARGEST_ENLARGEMENT = 2.0  # beyond it there is no more detail


@dataclass(frozen=True, eq=False)
class CommonRegion:
    """The part of the scene that both images show, in pixels of `Image.pixels`."""

    box0: tuple[int, int, int, int]  # x0, y0, x1, y1
    box1: tuple[int, int, int, int]
    scale_change: float  # a distance in image 1 / the same in image 0


def change_of_scale(points0: np.ndarray, points1: np.ndarray) -> float:
    """The median ratio of distances between matched points (K, 2), image 1 to image 0; 1 without evidence.

    Pairs of matches are drawn at random, with a fixed seed; the median is robust to a few wrong matches.
    """
    if len(points0) < 2:
        return 1.0
    first, second = np.random.default_rng(0).integers(0, len(points0), (2, _DRAWN))
    distance0, distance1 = (np.linalg.norm(p[first] - p[second], axis=1) for p in (points0, points1))
    far = (distance0 > _LEAST_DISTANCE) & (distance1 > _LEAST_DISTANCE)
    if not far.any():
        return 1.0
    return float(np.exp(np.median(np.log(distance1[far] / distance0[far]))))


def common_region(image0: Image, image1: Image, points0: np.ndarray, points1: np.ndarray) -> CommonRegion:
    """The boxes around matched points (K, 2), stored pixels, with a margin, and the change of scale."""
    inner0, inner1 = image_points(image0, points0), image_points(image1, points1)
    return CommonRegion(_box(inner0, image0), _box(inner1, image1), change_of_scale(inner0, inner1))


def crops_of(region: CommonRegion, image0: Image, image1: Image, longer_side: int) -> tuple[Crop, Crop]:
    """Both crops of the region at equal scale: as large as `longer_side` allows, enlarged twice at most.

    The crop of higher resolution is reduced where the other would have to be enlarged by more.
    """
    side0, side1 = (max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in (region.box0, region.box1))
    change = region.scale_change
    # factor0 = change · factor1 gives both the same scale.
    fitting = min(longer_side / side1, longer_side / (side0 * change))
    factor1 = min(fitting, _LARGEST_ENLARGEMENT, _LARGEST_ENLARGEMENT / change)
    return crop(image0, region.box0, factor1 * change), crop(image1, region.box1, factor1)


def _box(points: np.ndarray, image: Image) -> tuple[int, int, int, int]:
    height, width = image.pixels.shape[:2]
    low, high = np.quantile(points, [_TAIL, 1 - _TAIL], axis=0)
    margin = MARGIN * (high - low).max() + _MARGIN_PIXELS
    x0, y0 = np.floor(np.clip(low - margin, 0, [width - 1, height - 1])).astype(int).tolist()
    x1, y1 = np.ceil(np.clip(high + margin, [x0 + 1, y0 + 1], [width, height])).astype(int).tolist()
    return x0, y0, x1, y1
