"""A model of two views adjusted to its inliers, each weighed by how exactly its position is known.

Levenberg-Marquardt under a Cauchy loss. The residual of a match is divided by its standard deviation: of its
refined position along the residual (for an epipolar line, across the line; a match on an edge along the line
says much, one on an edge across it little), and of what no covariance knows, the same for all. A match also
counts by how probable it is (`_weights`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from matcher.config import PlanarModel
from matcher.verify.hypotheses import MatchedPoints

_KNOWN, _UNKNOWN = 0.2, 0.5  # pixels of the resized image: standard deviation beside covariances, and without
_ROUNDS, _ATTEMPTS = 15, 8
# A step must lower the loss by this for another one to follow. As the loss is the negative logarithm of a
# likelihood, what is left to gain is a small part of the model's own uncertainty. Of a loss below 1, as of
# points without noise, it is a share.
_ENOUGH = 0.001
_DAMPING = 1e-5  # at first: where the matches nearly lie on a plane, one direction is that much weaker
_TINY = 1e-300
_VAST = 1e8  # pixels²
_LEAST_REFINED = 8  # inliers below which there is nothing to refine from
_TURNS = np.array(  # derivatives of a rotation about x, y and z
    [
        [[0.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]],
        [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 0.0]],
        [[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
    ]
)
# Matrices e, row by row, that span the changes model @ (1 + e) of a similarity.
_OF_SIMILARITIES = np.array(
    [
        [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, -1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
    ]
)

Model = TypeVar("Model")
Residuals = tuple[np.ndarray, np.ndarray]  # (N, d) and their derivatives (N, d, P)


class Spread(NamedTuple):
    """Variances of the matched positions, in pixels²."""

    xx: np.ndarray  # (N,) of points1
    xy: np.ndarray
    yy: np.ndarray
    first: float  # of points0

    @staticmethod
    def of(covariances: np.ndarray | None, count: int) -> Spread:
        """From covariances (N, 2, 2) of points1, or of `count` matches without any."""
        if covariances is None:
            same = np.full(count, _UNKNOWN**2)
            return Spread(same, np.zeros(count), same, _UNKNOWN**2)
        known = np.nan_to_num(covariances, nan=_VAST, posinf=_VAST, neginf=0.0)
        xx, yy = (np.clip(known[:, axis, axis], 0.0, _VAST) for axis in (0, 1))
        bound = np.sqrt(xx * yy)
        xy = np.clip(known[:, 0, 1], -bound, bound)  # also where somebody's own are no covariances
        return Spread(xx + _KNOWN**2, xy, yy + _KNOWN**2, _KNOWN**2)


def refined(
    refine: Callable[..., np.ndarray], matched: MatchedPoints, model: np.ndarray, inliers: np.ndarray
) -> np.ndarray:
    """What `refine` makes of a model by its inliers; the model itself if they are few or that fails."""
    if np.count_nonzero(inliers) <= _LEAST_REFINED:
        return model
    known = None if matched.covariances is None else matched.covariances[inliers]
    sides, weights = (points[inliers] for points in matched.sides), _weights(matched.probable[inliers])
    found = refine(model, *sides, known, weights)
    return found if np.isfinite(found).all() and found.any() else model


def _weights(probable: np.ndarray) -> np.ndarray:
    """(N,) how much each match counts, 1 on average, from match probabilities.

    The square root: nearly as good as the probability itself where that is calibrated, and hardly worse than
    the same for all where it is only a similarity of descriptors.
    """
    weights = np.sqrt(probable)
    return weights / weights.mean()


def adjusted_homography(
    homography: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    covariances: np.ndarray | None,
    weights: np.ndarray,
    model: PlanarModel = "homography",
) -> np.ndarray:
    """The homography, affine map or similarity of least loss near one; its scale is arbitrary.

    Args:
        homography: (3, 3), of the model.
        points0, points1: (N, 2) its inliers, resized pixels.
        covariances: (N, 2, 2) of points1, if they are known.
        weights: (N,) of the matches.
        model: what it remains.
    """
    changes = _OF_SIMILARITIES.T if model == "similarity" else np.eye(9)[:, : 6 if model == "affine" else 8]
    condition = _conditioning(points0)
    x, spread = _lifted(points0) @ condition.T, Spread.of(covariances, len(points0))
    root = np.linalg.cholesky(np.stack([spread.xx, spread.xy, spread.xy, spread.yy], 1).reshape(-1, 2, 2))
    whiten = np.linalg.inv(root)

    def residuals(model: np.ndarray) -> Residuals:
        moved = x @ model.T
        depth = np.where(np.abs(moved[:, 2:]) < _TINY, _TINY, moved[:, 2:])
        place = moved[:, :2] / depth
        # Of model @ (1 + e_ij): the i-th column of the model times the j-th coordinate.
        change = np.einsum("ci,nj->ncij", model, x).reshape(len(x), 3, 9) @ changes
        slope = (change[:, :2] - place[:, :, None] * change[:, 2:]) / depth[:, :, None]
        return np.einsum("nij,nj->ni", whiten, place - points1), whiten @ slope

    def moved(model: np.ndarray, step: np.ndarray) -> np.ndarray:
        return model @ (np.eye(3) + (changes @ step).reshape(3, 3))

    return _minimised(homography @ np.linalg.inv(condition), residuals, moved, weights) @ condition


def adjusted_fundamental(
    fundamental: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    covariances: np.ndarray | None,
    weights: np.ndarray,
) -> np.ndarray:
    """The fundamental matrix of least loss near one: two rotations and the ratio of its singular values.

    Args:
        fundamental: (3, 3).
        points0, points1: (N, 2) its inliers, resized pixels.
        covariances: (N, 2, 2) of points1, if they are known.
        weights: (N,) of the matches.
    """
    right, left = _conditioning(points0), _conditioning(points1).T
    u, values, v = np.linalg.svd(np.linalg.inv(left) @ fundamental @ np.linalg.inv(right))
    if not values[0] > 0:
        return fundamental
    spread = Spread.of(covariances, len(points0))
    sides = _lifted(points0).T.copy(), _lifted(points1).T.copy()

    def residuals(model: tuple[np.ndarray, float, np.ndarray]) -> Residuals:
        u, ratio, v = model
        middle = np.diag([1.0, ratio, 0.0])
        slopes = np.concatenate([u @ _TURNS @ middle @ v, u @ middle @ _TURNS @ v, [np.outer(u[:, 1], v[1])]])
        return _across(left @ (u @ middle @ v) @ right, left @ slopes @ right, *sides, spread)

    def moved(model: tuple[np.ndarray, float, np.ndarray], step: np.ndarray) -> tuple:
        u, ratio, v = model
        return u @ _rotation(step[:3]), ratio + step[6], _rotation(step[3:6]) @ v

    u, ratio, v = _minimised((u, values[1] / values[0], v), residuals, moved, weights)
    return left @ (u @ np.diag([1.0, ratio, 0.0]) @ v) @ right


def adjusted_pose(
    cam1_from_cam0: np.ndarray,
    inverse_calibrations: tuple[np.ndarray, np.ndarray],
    points0: np.ndarray,
    points1: np.ndarray,
    covariances: np.ndarray | None,
    weights: np.ndarray,
) -> np.ndarray:
    """The pose of least loss near one; its translation keeps length 1.

    Args:
        cam1_from_cam0: (4, 4), |t| = 1.
        inverse_calibrations: K⁻¹ (3, 3) of image 0 and 1, for resized pixels.
        points0, points1: (N, 2) its inliers, resized pixels.
        covariances: (N, 2, 2) of points1, if they are known.
        weights: (N,) of the matches.
    """
    right, left = inverse_calibrations[0], inverse_calibrations[1].T
    sides = _lifted(points0).T.copy(), _lifted(points1).T.copy()
    spread = Spread.of(covariances, len(points0))

    def residuals(model: tuple[np.ndarray, np.ndarray]) -> Residuals:
        rotation, across = model[0], _cross(model[1])
        tangents = np.stack([_cross(axis) for axis in _tangents(model[1])])
        slopes = np.concatenate([across @ rotation @ _TURNS, tangents @ rotation])
        return _across(left @ across @ rotation @ right, left @ slopes @ right, *sides, spread)

    def moved(model: tuple[np.ndarray, np.ndarray], step: np.ndarray) -> tuple:
        towards = model[1] + step[3:] @ _tangents(model[1])
        return model[0] @ _rotation(step[:3]), towards / np.linalg.norm(towards)

    pose = np.eye(4)
    start = cam1_from_cam0[:3, :3], cam1_from_cam0[:3, 3]
    pose[:3, :3], pose[:3, 3] = _minimised(start, residuals, moved, weights)
    return pose


def _across(
    fundamental: np.ndarray, slopes: np.ndarray, x0: np.ndarray, x1: np.ndarray, spread: Spread
) -> Residuals:
    """Signed distances (N, 1) from the epipolar lines in standard deviations, after Sampson, and derivatives.

    Args:
        fundamental: (3, 3) pixels.
        slopes: (P, 3, 3) its derivatives.
        x0, x1: (3, N) homogeneous points.
        spread: of the points.
    """
    lines1, lines0 = fundamental @ x0, fundamental.T @ x1
    a, b = lines1[:2]
    along = np.stack([spread.xx * a + spread.xy * b, spread.xy * a + spread.yy * b])
    variance = a * along[0] + b * along[1] + spread.first * np.sum(lines0[:2] ** 2, axis=0)
    inverse = 1 / np.sqrt(np.maximum(variance, _TINY))
    residual = np.sum(x1 * lines1, axis=0) * inverse
    share = residual * inverse**2  # of a change of half the variance in one of the residual
    # By the entries of F', which takes x0 to lines1 and x1 to lines0.
    entries = (x1 * inverse)[:, None] * x0
    entries[:2] -= (along * share)[:, None] * x0
    entries[:, :2] -= x1[:, None] * (spread.first * share * lines0[:2])
    columns = slopes.reshape(-1, 9) @ entries.reshape(9, -1)
    return residual[:, None], columns.T[:, None]


def _minimised(
    model: Model,
    residuals: Callable[[Model], Residuals],
    moved: Callable[[Model, np.ndarray], Model],
    weights: np.ndarray,
) -> Model:
    """The model of least Cauchy loss, one standard deviation wide, that steps downhill lead to."""
    found, slopes = residuals(model)
    loss, damping = _loss(found, weights), _DAMPING
    for _ in range(_ROUNDS):
        weight = weights / (1 + np.sum(found**2, axis=1))
        flat, rows = slopes.reshape(-1, slopes.shape[2]), np.repeat(weight, found.shape[1])
        normal, gradient = (flat.T * rows) @ flat, (flat.T * rows) @ found.reshape(-1)
        before = loss
        for _ in range(_ATTEMPTS):
            try:
                step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + _TINY), gradient)
            except np.linalg.LinAlgError:
                return model
            other = moved(model, step)
            values, derivatives = residuals(other)
            if (lower := _loss(values, weights)) < loss:
                model, found, slopes, loss, damping = other, values, derivatives, lower, damping / 10
                break
            damping *= 10
        if not before - loss > _ENOUGH * min(before, 1.0):
            return model
    return model


def _loss(found: np.ndarray, weights: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        loss = float(weights @ np.log1p(np.sum(found**2, axis=1)))
    return np.inf if np.isnan(loss) else loss


def _lifted(points: np.ndarray) -> np.ndarray:
    return np.column_stack([points, np.ones(len(points))])


def _conditioning(points: np.ndarray) -> np.ndarray:
    """(3, 3) that centres points and brings them to unit spread."""
    centre, size = points.mean(axis=0), max(float(points.std()), 1e-6)
    return np.array([[1 / size, 0, -centre[0] / size], [0, 1 / size, -centre[1] / size], [0, 0, 1]])


def _cross(vector: np.ndarray) -> np.ndarray:
    return np.einsum("k,kij->ij", vector, _TURNS)


def _rotation(vector: np.ndarray) -> np.ndarray:
    """(3, 3) of an axis times an angle (Rodrigues)."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-12:
        return np.eye(3) + _cross(vector)
    axis = _cross(vector / angle)
    return np.eye(3) + np.sin(angle) * axis + (1 - np.cos(angle)) * axis @ axis


def _tangents(direction: np.ndarray) -> np.ndarray:
    """(2, 3) unit vectors that are normal to a direction and to each other."""
    other = np.eye(3)[np.argmin(np.abs(direction))]
    first = np.cross(direction, other)
    first /= np.linalg.norm(first)
    return np.stack([first, np.cross(direction, first)])
