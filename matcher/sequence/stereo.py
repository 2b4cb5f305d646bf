"""Rectified pairs: where the right image shows the left one's points, and how far away they are."""

from __future__ import annotations

import numpy as np

from matcher.sequence.frames import FrameLinks

MAX_ROW_ERROR = 2.0  # pixels between the rows of two points that depth is taken from
_MIN_DISPARITY = 0.5  # pixels; below it a depth says little more than "far"


def partners(points0: np.ndarray, points1: np.ndarray, links: FrameLinks) -> np.ndarray:
    """(N, 2) float32 pixels in the right image of the left one's points, NaN where there is none.

    Args:
        points0: (N, 2) keypoints of the left image.
        points1: (M, 2) of the right one.
        links: left → right; the consistent ones count.
    """
    found = np.full((len(points0), 2), np.nan, np.float32)
    indices = links.indices[links.consistent]
    found[indices[:, 0]] = points1[indices[:, 1]]
    return found


def within(points0: np.ndarray, right: np.ndarray, window: float) -> np.ndarray:
    """The same, NaN also where rows differ by more than `window` pixels, and behind the cameras."""
    step = points0 - right
    with np.errstate(invalid="ignore"):
        good = (np.abs(step[:, 1]) <= window) & (step[:, 0] > 0)
    return np.where(good[:, None], right, np.float32(np.nan))


def depths_of(points0: np.ndarray, right: np.ndarray, focal: float, baseline: float) -> np.ndarray:
    """(N,) depth along z of the left image's points, in units of the baseline; NaN where unknown.

    z = f·b / (x_left − x_right). Only points whose rows agree within `MAX_ROW_ERROR` have one.

    Args:
        points0: (N, 2) in pixels of images with one focal length and one principal point.
        right: (N, 2) the same points in the right image, NaN where unknown.
        focal: fx in pixels.
        baseline: distance between the cameras.
    """
    step = points0.astype(np.float64) - right
    with np.errstate(invalid="ignore"):
        good = (np.abs(step[:, 1]) <= MAX_ROW_ERROR) & (step[:, 0] >= _MIN_DISPARITY)
    return np.where(good, focal * baseline / np.where(good, step[:, 0], 1.0), np.nan)
