"""Rectified pairs: matches → depth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from matcher.types import Matches

MAX_ROW_ERROR = 2.0  # pixels between the rows of a match that depth is taken from
_MIN_DISPARITY = 0.5  # pixels; below it depth is beyond what SIFT's accuracy can say


def within_window(matches: Matches, window: float | None) -> np.ndarray:
    """(K,) bool: matches whose rows differ by at most `window` pixels and that lie before the cameras.

    None, the window switched off, keeps every match.
    """
    if window is None:
        return np.ones(len(matches), bool)
    step = matches.points0 - matches.points1
    return (np.abs(step[:, 1]) <= window) & (step[:, 0] > 0)


def chosen(matches: Matches, keep: np.ndarray) -> Matches:
    """The matches marked in `keep` (K,) bool."""
    columns = ("indices", "points0", "points1", "scores")
    return replace(matches, **{name: getattr(matches, name)[keep] for name in columns})


def depths_of(matches: Matches, count: int, focal: float, baseline: float) -> np.ndarray:
    """Depth along z of the left picture's points, in units of the baseline; NaN where unknown.

    z = f·b / (x_left − x_right). Only matches with rows within `MAX_ROW_ERROR` say a depth.

    Args:
        matches: left → right, in pixels of pictures with one focal length and one principal point.
        count: points of the left picture N.
        focal: fx in pixels.
        baseline: distance between the cameras.
    """
    depths = np.full(count, np.nan)
    disparity = (matches.points0 - matches.points1).astype(np.float64)
    good = (np.abs(disparity[:, 1]) <= MAX_ROW_ERROR) & (disparity[:, 0] >= _MIN_DISPARITY)
    depths[matches.indices[good, 0]] = focal * baseline / disparity[good, 0]
    return depths
