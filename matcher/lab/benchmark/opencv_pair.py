"""What OpenCV offers for a pair of images: SIFT, FLANN with Lowe's ratio test, and MAGSAC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np

from matcher.data.images import read_image

Work = Callable[[], dict[str, Any]]  # what is timed in a process of its own; it says what it found
_RATIO = 0.8  # of Lowe's test
_LEAST = 8  # matches for a fundamental matrix


def sift_matches(images: Sequence[np.ndarray], points: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Indices (K, 2) of the matches of two images, and the fundamental matrix (3, 3) that they agree with."""
    sift = cv2.SIFT_create(points)
    (keypoints0, descriptors0), (keypoints1, descriptors1) = (sift.detectAndCompute(i, None) for i in images)
    matches = flann_matches(descriptors0, descriptors1)
    return matches, fundamental(keypoints0, keypoints1, matches)


def flann_matches(descriptors0: np.ndarray | None, descriptors1: np.ndarray | None) -> np.ndarray:
    """Indices (K, 2) of the matches that pass the ratio test."""
    if descriptors0 is None or descriptors1 is None:
        return np.empty((0, 2), int)
    both = cv2.FlannBasedMatcher().knnMatch(descriptors0, descriptors1, k=2)
    good = [m for m, n in (pair for pair in both if len(pair) == 2) if m.distance < _RATIO * n.distance]
    return np.array([(m.queryIdx, m.trainIdx) for m in good], int).reshape(-1, 2)


def fundamental(
    keypoints0: Sequence[cv2.KeyPoint], keypoints1: Sequence[cv2.KeyPoint], matches: np.ndarray
) -> np.ndarray | None:
    """The fundamental matrix (3, 3) of matches (K, 2) by MAGSAC; None of too few."""
    if len(matches) < _LEAST:
        return None
    sides = zip((keypoints0, keypoints1), matches.T, strict=True)
    points = [np.array([keypoints[k].pt for k in column]) for keypoints, column in sides]
    return cv2.findFundamentalMat(*points, cv2.USAC_MAGSAC, 1.0, 0.999)[0]


def resized(images: Sequence[str], size: tuple[int, int]) -> list[np.ndarray]:
    """The pixels of image files at one size (width, height)."""
    return [cv2.resize(read_image(path).pixels, tuple(size), interpolation=cv2.INTER_AREA) for path in images]
