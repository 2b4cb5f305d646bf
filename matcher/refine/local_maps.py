"""The local affine map at every match, fitted to its nearest neighbours."""

from __future__ import annotations

import cv2
import numpy as np

SCALES = (0.5, 0.2, 0.1)  # of the robust loss, one per iteration, as a share of the neighbourhood's radius
MIN_NEIGHBOURS = 3  # that determine a map
RIDGE = 1e-3
LEAST_RADIUS = 1e-3  # pixels, of matches that coincide
_KD_TREE = {"algorithm": 4}  # FLANN's exact search in one tree
MAX_ANISOTROPY, MAX_SCALE = 6.0, 10.0


def fit_affine_maps(
    points0: np.ndarray, points1: np.ndarray, neighbours: int
) -> tuple[np.ndarray, np.ndarray]:
    """Local affine maps from image 0 to image 1 at every match, under the robust loss of Geman and McClure.

    Args:
        points0, points1: (K, 2) matched points, finite.
        neighbours: number of nearest matches that a map is fitted to, the match itself excluded.

    Returns:
        (K, 2, 2) float64 maps and (K,) bool, whether the neighbours determine a plausible one: no reflection,
        no extreme scale or anisotropy. The others are the identity.
    """
    count = len(points0)
    if count <= MIN_NEIGHBOURS:
        return np.tile(np.eye(2), (count, 1, 1)), np.zeros(count, dtype=bool)
    # Neighbours come first, (n, K), so that sums over them run along the matches.
    nearest = np.ascontiguousarray(_nearest(points0, min(neighbours, count - 1)).T)
    offsets0, offsets1 = (
        [(side[nearest] - side).astype(np.float32) for side in points.T] for points in (points0, points1)
    )
    square = offsets0[0] ** 2 + offsets0[1] ** 2
    radius = np.sqrt(square.max(axis=0)).clip(LEAST_RADIUS)
    base = np.exp(-0.5 * (1.5 / radius) ** 2 * square)
    weights = base
    for scale in (*SCALES, None):
        maps, residual = _fit(offsets0, offsets1, weights, radius)
        if scale is not None:
            weights = base / (1 + residual / (scale * radius) ** 2) ** 2
    return _plausible(maps)


def _nearest(points: np.ndarray, wanted: int) -> np.ndarray:
    """(K, wanted) indices of the nearest other points, unordered."""
    tree = cv2.flann_Index(np.ascontiguousarray(points, dtype=np.float32), _KD_TREE)
    found, _ = tree.knnSearch(
        np.ascontiguousarray(points, dtype=np.float32), wanted + 1, params={"checks": -1}
    )
    own = found == np.arange(len(points))[:, None]
    own[~own.any(axis=1), -1] = True  # among coincident points the search may omit the point itself
    return found[~own].reshape(len(points), wanted)


def _fit(
    offsets0: list[np.ndarray], offsets1: list[np.ndarray], weights: np.ndarray, radius: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Maps (K, 2, 2) by weighted least squares with a translation, and squared residuals (n, K).

    Args:
        offsets0, offsets1: x and y (n, K) of the neighbours of each match, in image 0 and in image 1.
        weights: (n, K).
        radius: (K,) of the neighbourhood.
    """
    share = weights / weights.sum(axis=0)
    x, y = (offset - (share * offset).sum(axis=0) for offset in offsets0)
    share_x, share_y, ridge = share * x, share * y, RIDGE * radius**2
    xx, xy, yy = (
        (share_x * x).sum(axis=0) + ridge,
        (share_x * y).sum(axis=0),
        (share_y * y).sum(axis=0) + ridge,
    )
    determinant = xx * yy - xy * xy
    maps, residual = np.empty((len(radius), 2, 2)), 0.0
    for k, offset in enumerate(offsets1):
        t = offset - (share * offset).sum(axis=0)
        xt, yt = (share_x * t).sum(axis=0), (share_y * t).sum(axis=0)
        along_x, along_y = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
        residual = residual + (t - along_x * x - along_y * y) ** 2
        maps[:, k, 0], maps[:, k, 1] = along_x, along_y
    return maps, residual


def _plausible(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The maps, with implausible ones replaced by the identity, and (K,) bool, which are plausible."""
    determinant = np.linalg.det(maps)
    size = (maps**2).sum(axis=(1, 2)) / 2
    # For singular values a ≥ b: size / determinant = (a / b + b / a) / 2.
    plausible = (determinant > MAX_SCALE**-2) & (determinant < MAX_SCALE**2)
    plausible &= size < determinant * (MAX_ANISOTROPY + 1 / MAX_ANISOTROPY) / 2
    return np.where(plausible[:, None, None], maps, np.eye(2)), plausible
