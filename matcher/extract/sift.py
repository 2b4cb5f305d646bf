"""SIFT keypoints (Lowe 2004) with RootSIFT descriptors (Arandjelović and Zisserman 2012)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cv2
import numpy as np

from matcher.config import ExtractorConfig, resolve
from matcher.types import Features, Image, root_sift

CONTRAST = 0.01  # of the difference of Gaussians; low, because the strongest points are kept anyway


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
        return [self._extract(image) for image in images]

    def _extract(self, image: Image) -> Features:
        points, diameters, angles, scores, descriptors = detect_sift(image.pixels, image.mask, self.config)
        return Features.from_image(
            image,
            points,
            root_sift(descriptors),
            scores=scores,
            diameters=diameters,
            angles=angles,
            kind="sift",
        )


def detect_sift(
    pixels: np.ndarray, mask: np.ndarray | None, config: ExtractorConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """SIFT on uint8 pixels (H, W[, 3]), the best `max_keypoints` inside `mask`, strongest first.

    Returns:
        points (N, 2), diameters (N,), angles (N,) in radians from x towards y, responses (N,) and raw
        descriptors (N, 128), all float32, in the pixels given.
    """
    grey = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    # OpenCV keeps the strongest before it looks at the mask, so with a mask the cut is made here.
    limit = config.max_keypoints if mask is None and config.keep == "strongest" else 0
    detector = cv2.SIFT_create(nfeatures=limit, contrastThreshold=CONTRAST, enable_precise_upscale=True)
    area = None if mask is None else mask.astype(np.uint8) * 255
    keypoints, descriptors = detector.detectAndCompute(grey, area)
    if not keypoints:
        empty = np.zeros(0, np.float32)
        return np.zeros((0, 2), np.float32), empty, empty, empty, np.zeros((0, 128), np.float32)
    table = np.array([(*k.pt, k.size, k.angle, k.response) for k in keypoints], dtype=np.float32)
    order = np.argsort(-table[:, 4], kind="stable")
    if config.keep == "largest":
        largest = np.argsort(-table[order, 2], kind="stable")[: config.max_keypoints]
        order = order[np.sort(largest)]
    order = order[: config.max_keypoints]
    table = table[order]
    return table[:, :2], table[:, 2], np.deg2rad(table[:, 3]), table[:, 4], descriptors[order]
