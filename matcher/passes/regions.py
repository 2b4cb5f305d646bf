"""The common region of two images and its change of scale, from the matches that agree with a geometry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.data.image import Image
from matcher.passes.crops import Crop, crop, image_points

MARGIN = 0.15  # of the longer side of the box of the matched points, added on every side
_MARGIN_PIXELS = 8  # and so many pixels, because matches are rare along edges
_TAIL = 0.02  # share of the points that may lie beyond the box on each side: some are wrong
_DRAWN = 2000  # pairs of matches whose distances are compared
_LEAST_DISTANCE = 8.0  # pixels; shorter ones say little of the scale
_LARGEST_ENLARGEMENT = 2.0  # beyond it there is nothing more to see


@dataclass(frozen=True, eq=False)
class CommonRegion:
    """Where the images show the same, in pixels of `Image.pixels`."""

    box0: tuple[int, int, int, int]  # x0, y0, x1, y1
    box1: tuple[int, int, int, int]
    scale_change: float  # a distance in image 1 / the same in image 0


def change_of_scale(points0: np.ndarray, points1: np.ndarray) -> float:
    """The median ratio of distances between matched points (K, 2), image 1 to image 0; 1 without evidence.

    Pairs of matches are drawn at random, with a fixed seed, so that a few wrong matches do not count.
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
    """Both parts of the region at one scale: as large as `longer_side` allows, enlarged twice at most.

    The finer part is made smaller where the coarser one would have to be enlarged more than that.
    """
    side0, side1 = (max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in (region.box0, region.box1))
    change = region.scale_change
    # factor0 = change · factor1 brings both to one scale.
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
