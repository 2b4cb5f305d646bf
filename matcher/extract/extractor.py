"""SIFT, and the other front ends by name; images with few keypoints are searched enlarged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import cv2
import numpy as np

from matcher.config import ExtractorConfig, resolve
from matcher.errors import UsageError, unknown_name
from matcher.types import Extractor, Features, Image, one_for_each, root_sift

if TYPE_CHECKING:
    from matcher.extract.front_end import FrontEnd


def find_front_end(kind: str) -> FrontEnd:
    """The front end of that name, which is not "sift"."""
    from matcher.extract import learned, superpoint

    own = {**learned.FRONT_ENDS, **superpoint.FRONT_ENDS}
    if kind in own:
        return own[kind]
    from matcher.extract import kornia_adapters as kornia

    if kind in kornia.VARIANTS:
        raise UsageError(f"{kind} is a variant: give frontend='aliked' and variant={kind!r}")
    if kind not in kornia.FRONT_ENDS:
        raise UsageError(unknown_name("front end", kind, dict.fromkeys(["sift", *own, *kornia.FRONT_ENDS])))
    return kornia.FRONT_ENDS[kind]


LARGEST = 2.0  # factor
ENOUGH = 2048  # keypoints, even if more are wanted: no more are taken of an enlarged image


def extracted(extractor: Extractor, images: Sequence[Image], config: ExtractorConfig) -> list[Features]:
    """The features of each image; of one with too few keypoints those of the image enlarged, if more.

    The network's finest map has a sample for every second pixel, and keypoints keep some pixels apart: where
    few places are worth a keypoint, both cost matches. `scale` stays that of the image as it was read, as no
    position becomes more exact than its pixels.
    """
    features = one_for_each(extractor(images), Features, len(images), "extractor", extractor)
    longer, larger = config.sparse_resize or 0, {}
    for place, (found, image) in enumerate(zip(features, images, strict=True)):
        few, side = 0 < len(found) < min(config.max_keypoints, ENOUGH), max(image.pixels.shape[:2])
        if few and side < longer and min(image.scale) >= 1:  # none that was made smaller
            larger[place] = image.resized(min(LARGEST, longer / side))
    if not larger:
        return features
    again = one_for_each(extractor([*larger.values()]), Features, len(larger), "extractor", extractor)
    for place, found in zip(larger, again, strict=True):
        if len(found) > len(features[place]):
            strongest = found.select(np.arange(min(len(found), ENOUGH)))  # they come first
            features[place] = replace(strongest, scale=features[place].scale)
    return features


# SIFT keypoints (Lowe 2004) with RootSIFT descriptors (Arandjelović and Zisserman 2012).


class SiftExtractor:
    """OpenCV's SIFT on the upright, resized image; keypoints, scales and angles in stored pixels."""

    def __init__(self, config: ExtractorConfig) -> None:
        """Keep the configuration; `UsageError` for a setting that SIFT does not have."""
        self.config = resolve(config, {})

    def limited(self, max_keypoints: int) -> SiftExtractor:
        """The same with another number of keypoints."""
        return SiftExtractor(replace(self.config, max_keypoints=max_keypoints))

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image, strongest first; `kind` is "sift", descriptors are (N, 128) float32."""
        found = []
        for image in images:
            points, diameters, angles, scores, raw = detect_sift(image.pixels, image.mask, self.config)
            own = dict(diameters=diameters, angles=angles, scores=scores, kind="sift")
            found.append(Features.from_image(image, points, root_sift(raw), **own))
        return found


def detect_sift(
    pixels: np.ndarray, mask: np.ndarray | None, config: ExtractorConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """SIFT on uint8 pixels (H, W[, 3]): float32 points (N, 2), diameters (N,), angles (N,) in radians from x
    towards y, responses (N,) and raw descriptors (N, 128), the best inside `mask`, strongest first."""
    grey = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    # OpenCV keeps the strongest before it looks at the mask, so with a mask the cut is made here.
    limit = config.max_keypoints if mask is None and config.keep == "strongest" else 0
    # A low contrast of the difference of Gaussians is enough, because the strongest points are kept anyway.
    detector = cv2.SIFT_create(nfeatures=limit, contrastThreshold=0.01, enable_precise_upscale=True)
    area = None if mask is None else mask.astype(np.uint8) * 255
    keypoints, descriptors = detector.detectAndCompute(grey, area)
    descriptors = np.zeros((0, 128), np.float32) if descriptors is None else descriptors
    rows = [(*k.pt, k.size, k.angle, k.response) for k in keypoints]
    table = np.array(rows, dtype=np.float32).reshape(-1, 5)
    order = np.argsort(-table[:, 4], kind="stable")
    if config.keep == "largest":
        largest = np.argsort(-table[order, 2], kind="stable")[: config.max_keypoints]
        order = order[np.sort(largest)]
    order = order[: config.max_keypoints]
    table = table[order]
    return table[:, :2], table[:, 2], np.deg2rad(table[:, 3]), table[:, 4], descriptors[order]
