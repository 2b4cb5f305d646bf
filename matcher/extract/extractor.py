"""All front ends but SIFT, by name; images with few keypoints are searched enlarged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from matcher.config import ExtractorConfig
from matcher.errors import UsageError, unknown_name
from matcher.types import Extractor, Features, Image, one_for_each

if TYPE_CHECKING:
    from matcher.extract.front_end import FrontEnd


def find_front_end(kind: str) -> FrontEnd:
    """The front end of that name.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    from matcher.extract import learned, superpoint

    own = {**learned.FRONT_ENDS, **superpoint.FRONT_ENDS}
    if kind in own:
        return own[kind]
    from matcher.extract import kornia_adapters as kornia

    if kind not in kornia.FRONT_ENDS:
        raise UsageError(unknown_name("front end", kind, dict.fromkeys(["sift", *own, *kornia.FRONT_ENDS])))
    return kornia.FRONT_ENDS[kind]


LARGEST = 2.0  # factor
ENOUGH = 2048  # keypoints, even if more are wanted: no more are taken of an enlarged image


def extracted(extractor: Extractor, images: Sequence[Image], config: ExtractorConfig) -> list[Features]:
    """The features of each image; of one with too few keypoints those of the image enlarged, if more.

    The network's finest map has a sample for every second pixel, and keypoints keep some pixels apart: where
    few places are worth a keypoint, both cost matches.

    Args:
        extractor: a front end.
        images: as they are read.
        config: with `sparse_resize`; without, nothing is enlarged.

    Returns:
        Features in stored pixels, of `scale` 1 where they are of an enlarged image: no position becomes more
        exact than the pixels are.
    """
    features = one_for_each(extractor(images), Features, len(images), "extractor", extractor)
    factors = {
        place: factor
        for place, (found, image) in enumerate(zip(features, images, strict=True))
        if 0 < len(found) < min(config.max_keypoints, ENOUGH)
        and (factor := _factor(image, config.sparse_resize)) > 1
    }
    if not factors:
        return features
    larger = [images[place].resized(factor) for place, factor in factors.items()]
    again = one_for_each(extractor(larger), Features, len(larger), "extractor", extractor)
    for place, found in zip(factors, again, strict=True):
        if len(found) > len(features[place]):
            strongest = found.select(np.arange(min(len(found), ENOUGH)))  # they come first
            features[place] = replace(strongest, scale=features[place].scale)
    return features


def _factor(image: Image, longer_side: int | None) -> float:
    """By how much to enlarge an image towards this longer side; not one that was made smaller."""
    if longer_side is None or min(image.scale) < 1:
        return 1.0
    return min(LARGEST, longer_side / max(image.pixels.shape[:2]))
