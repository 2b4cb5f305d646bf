"""The affine map around every match, fitted to the matches nearest to it."""

from __future__ import annotations

import cv2
import numpy as np

_SCALES = (0.5, 0.2, 0.1)  # of residuals, one a pass, as a share of the neighbours' distance
_LEAST = 3  # neighbours that determine a map
_RIDGE = 1e-3
_KD_TREE = {"algorithm": 4}  # FLANN's exact search in one tree
_MOST_STRETCH, _MOST_SCALE = 6.0, 10.0


def fit_affine_maps(
    points0: np.ndarray, points1: np.ndarray, neighbours: int
) -> tuple[np.ndarray, np.ndarray]:
    """How image 1 moves where image 0 does, around every match; robust, under Geman and McClure's loss.

    Args:
        points0, points1: (K, 2) matched points, finite.
        neighbours: matches that a map is fitted to, the match itself left out.

    Returns:
        (K, 2, 2) float64 maps and (K,) bool, whether the neighbours determine one that an image can undergo:
        no mirror image, no collapse. The others are the identity.
    """
    count = len(points0)
    if count <= _LEAST:
        return np.tile(np.eye(2), (count, 1, 1)), np.zeros(count, dtype=bool)
    nearest = _nearest(points0, min(neighbours, count - 1))
    steps0 = points0[nearest] - points0[:, None]  # (K, n, 2)
    steps1 = points1[nearest] - points1[:, None]
    square = (steps0**2).sum(axis=2)
    reach = np.sqrt(square.max(axis=1, keepdims=True)) + 1e-9
    base = np.exp(-0.5 * (1.5 / reach) ** 2 * square)
    weights = base
    for scale in (*_SCALES, None):
        maps, rest = _fit(steps0, steps1, weights, reach)
        if scale is not None:
            weights = base / (1 + rest / (scale * reach) ** 2) ** 2
    return _possible(maps)


def _nearest(points: np.ndarray, wanted: int) -> np.ndarray:
    """(K, wanted) indices of the nearest other points, in no order."""
    tree = cv2.flann_Index(np.ascontiguousarray(points, dtype=np.float32), _KD_TREE)
    found, _ = tree.knnSearch(
        np.ascontiguousarray(points, dtype=np.float32), wanted + 1, params={"checks": -1}
    )
    own = found == np.arange(len(points))[:, None]
    own[~own.any(axis=1), -1] = True  # among points in one place the search may leave the point itself out
    return found[~own].reshape(len(points), wanted)


def _fit(
    steps0: np.ndarray, steps1: np.ndarray, weights: np.ndarray, reach: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted maps (K, 2, 2) of steps, with a shift, and squared residuals (K, n)."""
    share = weights / weights.sum(axis=1, keepdims=True)
    x, y = (steps0[..., k] - (share * steps0[..., k]).sum(axis=1, keepdims=True) for k in (0, 1))
    xx, xy, yy = ((share * product).sum(axis=1) for product in (x * x, x * y, y * y))
    ridge = _RIDGE * reach[:, 0] ** 2
    xx, yy = xx + ridge, yy + ridge
    determinant = xx * yy - xy * xy
    maps = np.empty((len(steps0), 2, 2))
    rest = 0.0
    for k in (0, 1):
        t = steps1[..., k] - (share * steps1[..., k]).sum(axis=1, keepdims=True)
        xt, yt = (share * x * t).sum(axis=1), (share * y * t).sum(axis=1)
        maps[:, k, 0] = (xt * yy - yt * xy) / determinant
        maps[:, k, 1] = (yt * xx - xt * xy) / determinant
        rest = rest + (t - maps[:, k, :1] * x - maps[:, k, 1:] * y) ** 2
    return maps, rest


def _possible(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The maps with the identity for those that no view of a surface undergoes, and which those are not."""
    determinant = np.linalg.det(maps)
    size = (maps**2).sum(axis=(1, 2)) / 2
    # For singular values a ≥ b: size / determinant = (a / b + b / a) / 2.
    usable = (determinant > _MOST_SCALE**-2) & (determinant < _MOST_SCALE**2)
    usable &= size < determinant * (_MOST_STRETCH + 1 / _MOST_STRETCH) / 2
    return np.where(usable[:, None, None], maps, np.eye(2)), usable
