"""Guided matching: links that matching missed, searched near where the verified ones predict them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np

from matcher.match.minima import mutual_minima

_NEIGHBOURS = 6  # links whose median motion predicts a point's
_ONE_TREE, _UNLIMITED = 4, -1  # FLANN's exact tree of few dimensions
_CLOSER = 0.95  # the best candidate is nearer than this share of the second one's distance
_PREDICTED = 80  # percentile of the links' own prediction errors within which others are searched
_LINK_PERCENTILE = 98  # percentile of the links' descriptor distances that a new one must keep below


@dataclass(frozen=True, eq=False)
class Guide:
    """What the verified links of two frames predict: where other points are, and how similar they look."""

    start: np.ndarray  # (K, 2) pixels of the links in the earlier frame
    end: np.ndarray  # (K, 2) and in the later one
    limit: float  # distance of descriptors that nearly all links keep below
    radius: float  # pixels around a predicted position in which a partner is searched
    fundamental: np.ndarray | None = None  # (3, 3) of the two frames
    tolerance: float = 1.5  # pixels to the epipolar line in the later frame

    @property
    def usable(self) -> bool:
        """Whether there are links enough to predict anything."""
        return len(self.start) >= _NEIGHBOURS

    def motions(self, points: np.ndarray) -> np.ndarray:
        """(N, 6, 2) motions of the links that begin nearest to each point (N, 2)."""
        return (self.end - self.start)[nearest(self.start, points, _NEIGHBOURS)]

    def narrowed(self, least_radius: float) -> Guide:
        """Search only as far as the links themselves are from their lines and from what is predicted.

        What is found further off is often a wrong point that looks similar, and poses suffer from it: with
        this, the error of `hybrid` on kitti_mini fell from 1.6 to 1.3 %.
        """
        if not self.usable:
            return self
        errors = np.linalg.norm(self.start + self.motion(self.start) - self.end, axis=1)
        radius = min(self.radius, max(least_radius, float(np.percentile(errors, _PREDICTED))))
        tolerance = self.tolerance
        if self.fundamental is not None:
            sides = (side.astype(np.float64) for side in (self.start, self.end))
            tolerance = min(tolerance, float(np.median(_line_distance(*sides, self.fundamental))))
        return replace(self, radius=radius, tolerance=tolerance)

    def motion(self, points: np.ndarray) -> np.ndarray:
        """(N, 2) their median."""
        return np.median(self.motions(points), axis=1)


def nearest(points: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """(N, count) rows of the `points` (K, 2), K ≥ count, nearest to each query (N, 2), the nearest first."""
    if len(queries) == 0:
        return np.zeros((0, count), np.int64)
    known, asked = (np.ascontiguousarray(each, dtype=np.float32) for each in (points, queries))
    tree = cv2.flann_Index(known, {"algorithm": _ONE_TREE})
    return tree.knnSearch(asked, count, params={"checks": _UNLIMITED})[0]


def typical_limit(descriptors0: np.ndarray, descriptors1: np.ndarray) -> float:
    """The distance below which `_LINK_PERCENTILE` percent of linked descriptors (K, D) lie; 0 without any."""
    if len(descriptors0) == 0:
        return 0.0
    return float(np.percentile(np.linalg.norm(descriptors0 - descriptors1, axis=1), _LINK_PERCENTILE))


def search_guided(
    points0: np.ndarray,
    descriptors0: np.ndarray,
    points1: np.ndarray,
    descriptors1: np.ndarray,
    guide: Guide,
) -> tuple[np.ndarray, np.ndarray]:
    """Partners near the predicted position and the epipolar line: similar, clearly the best, and mutual.

    Args:
        points0: (N, 2) pixels in the earlier frame that have no partner.
        descriptors0: (N, D) float32, of any one kind; the guide says how similar is similar enough.
        points1: (M, 2) pixels in the later frame that have none.
        descriptors1: (M, D) float32.
        guide: from the links that the two frames have.

    Returns:
        (L, 2) int64 rows of the two sides and (L,) float32 scores, 1 − distance / distance of the second.
    """
    if not guide.usable or 0 in (len(points0), len(points1)):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.float32)
    near = _squares(points0 + guide.motion(points0), points1) <= guide.radius**2
    rows, columns = np.nonzero(near)
    if guide.fundamental is not None:
        good = _line_distance(points0[rows], points1[columns], guide.fundamental) <= guide.tolerance
        rows, columns = rows[good], columns[good]
    distance = np.full(near.shape, np.inf, np.float32)
    distance[rows, columns] = np.linalg.norm(descriptors0[rows] - descriptors1[columns], axis=1)
    return _mutual(distance, guide.limit)


def _squares(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """(N, M) squared distances of pixels (N, 2) and (M, 2)."""
    return (points0[:, :1] - points1[:, 0]) ** 2 + (points0[:, 1:] - points1[:, 1]) ** 2


def _line_distance(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(C,) distance of points of image 1 (C, 2) to the lines of their partners in image 0 (C, 2)."""
    lines = np.column_stack([points0, np.ones(len(points0))]) @ fundamental.T
    residual = np.sum(lines[:, :2] * points1, axis=1) + lines[:, 2]
    return np.abs(residual) / np.maximum(np.linalg.norm(lines[:, :2], axis=1), 1e-12)


def _mutual(distance: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns (L, 2) of entries that are the least of both, within the limit and clearly so."""
    rows, columns = mutual_minima(distance)
    best = distance[rows, columns]
    rest = distance[rows]
    rest[np.arange(len(rows)), columns] = np.inf
    second = rest.min(axis=1)
    keep = (best <= limit) & (best <= _CLOSER * second)
    scores = 1 - best[keep] / np.maximum(np.minimum(second[keep], 2 * limit), 1e-12)
    pairs = np.stack([rows[keep], columns[keep]], axis=1).astype(np.int64)
    return pairs, np.clip(scores, 0, 1).astype(np.float32)
