"""A model of two views adjusted to its inliers, each weighed by how exactly its position is known.

Levenberg-Marquardt under a Cauchy loss. The residual of a match is divided by its standard deviation: of its
refined position along the residual (for an epipolar line, across the line; a match on an edge along the line
says much, one on an edge across it little), and of what no covariance knows, the same for all. A match also
counts by how probable it is (`refined`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.config import GeometryKind, PlanarModel
from matcher.errors import UsageError, install_command

# Hypotheses

LOSS_SCALE = 0.5  # pixels; errors well above it no longer pull a refined model
CONFIDENCE = 0.9999
MAX_ITERATIONS = 10_000


@dataclass(frozen=True, eq=False)
class MatchedPoints:
    """Distinct, finite matches of a pair, in resized pixels."""

    points0: np.ndarray  # (N, 2)
    points1: np.ndarray  # (N, 2)
    probable: np.ndarray  # (N,) match probabilities
    covariances: np.ndarray | None = None  # (N, 2, 2) of points1

    def __len__(self) -> int:
        return len(self.points0)

    @property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """The points of both images."""
        return self.points0, self.points1

    def best_first(self) -> np.ndarray | None:
        """The order (N,) for progressive sampling (PROSAC, Chum and Matas 2005), if there is one."""
        return np.argsort(-self.probable, kind="stable") if np.ptp(self.probable) > 0 else None

    def most_probable(self, share: float) -> MatchedPoints:
        """At least a share of the matches, in the same order: all as probable as the last of them."""
        least = np.quantile(self.probable, 1 - share, method="higher")
        part = self.probable >= least
        if part.all():
            return self
        covariances = None if self.covariances is None else self.covariances[part]
        return MatchedPoints(self.points0[part], self.points1[part], self.probable[part], covariances)

    @cached_property
    def weights(self) -> np.ndarray:
        """(N,) how much each match says, 1 on average: less where there are many others.

        Neighbours lie off their true places by the same lens distortion, rolling shutter or motion, so a
        hundred on one poster say little more than ten, and less than ten all over the image. Divided by
        the matches in the same cell of a grid, the geometric mean over both images.
        """
        counts = []
        for points in self.sides:
            cells = np.floor(points / 32.0)  # pixels of the resized image
            _, cell, count = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
            counts.append(count[cell.reshape(-1)])
        weights = 1 / np.sqrt(counts[0] * counts[1])
        return weights / weights.mean()


def trials(
    matched: MatchedPoints, plan: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, MatchedPoints]]:
    """Each factor of the threshold in a plan, with its share of the matches; none twice."""
    done = set()
    for factor, share in plan:
        part = matched.most_probable(share)
        if (factor, len(part)) not in done:
            done.add((factor, len(part)))
            yield factor, part


@dataclass(frozen=True, eq=False)
class TwoViewModel:
    """A two-view geometry of N matches, in resized pixels."""

    matrix: np.ndarray  # (3, 3)
    inliers: np.ndarray  # (N,) bool
    cam1_from_cam0: np.ndarray | None = None
    homography: np.ndarray | None = None  # (3, 3) of the plane that most inliers lie on
    alternatives: tuple[np.ndarray, ...] = ()  # poses (4, 4) that the plane allows, the likeliest first
    evidence: float | None = None  # logarithm of how much likelier the first is than the second

    def fundamental(self, cameras: tuple[Camera, Camera] | None) -> np.ndarray:
        """The fundamental matrix (3, 3); `cameras` are those of an essential one."""
        if cameras is None:
            return self.matrix
        return np.linalg.inv(cameras[1].K).T @ self.matrix @ np.linalg.inv(cameras[0].K)


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A model that may be the right one."""

    model: TwoViewModel
    likelihood: float  # logarithm, of `verdict.py`
    agreeing: float  # share of all matches, by the threshold that it was found with


def made(hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses up to the first that most matches agree with; those after it are not made."""
    found = []
    for one in hypotheses:
        found.append(one)
        if one.agreeing >= 0.8:
            break
    return found


def likeliest(hypotheses: Sequence[Hypothesis]) -> Hypothesis | None:
    """The likeliest hypothesis, the earliest of equals; None where none has a likelihood."""
    known = [one for one in hypotheses if not np.isnan(one.likelihood)]
    return max(known, key=lambda one: one.likelihood, default=None)


# Adjustment

_KNOWN, _UNKNOWN = 0.2, 0.5  # pixels of the resized image: standard deviation beside covariances, and without
_ROUNDS, _ATTEMPTS = 15, 8
# A step must lower the loss by this for another one to follow. As the loss is the negative logarithm of a
# likelihood, what is left to gain is a small part of the model's own uncertainty. Of a loss below 1, as of
# points without noise, it is a share.
_ENOUGH = 0.001
_DAMPING = 1e-5  # at first: where the matches nearly lie on a plane, one direction is that much weaker
_TINY = 1e-300
_VAST = 1e8  # pixels²
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
    if np.count_nonzero(inliers) <= 8:
        return model
    known = None if matched.covariances is None else matched.covariances[inliers]
    # By the square root of the probability: nearly as good as that itself where it is calibrated, and hardly
    # worse than the same for all where it is only a similarity of descriptors.
    weights = np.sqrt(matched.probable[inliers])
    sides = (points[inliers] for points in matched.sides)
    found = refine(model, *sides, known, weights / weights.mean())
    return found if np.isfinite(found).all() and found.any() else model


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
    x, spread = lifted(points0) @ condition.T, Spread.of(covariances, len(points0))
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

    The other arguments are those of `adjusted_homography`.
    """
    right, left = _conditioning(points0), _conditioning(points1).T
    u, values, v = np.linalg.svd(np.linalg.inv(left) @ fundamental @ np.linalg.inv(right))
    if not values[0] > 0:
        return fundamental
    spread = Spread.of(covariances, len(points0))
    sides = lifted(points0).T.copy(), lifted(points1).T.copy()

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
        points0, points1, covariances, weights: as of `adjusted_homography`.
    """
    right, left = inverse_calibrations[0], inverse_calibrations[1].T
    sides = lifted(points0).T.copy(), lifted(points1).T.copy()
    spread = Spread.of(covariances, len(points0))

    def residuals(model: tuple[np.ndarray, np.ndarray]) -> Residuals:
        rotation, across = model[0], cross(model[1])
        tangents = np.stack([cross(axis) for axis in _tangents(model[1])])
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

    `slopes` (P, 3, 3) are derivatives of the matrix; x0, x1 (3, N) homogeneous points.
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


def lifted(points: np.ndarray) -> np.ndarray:
    """(N, 3) homogeneous points."""
    return np.column_stack([points, np.ones(len(points))])


def _conditioning(points: np.ndarray) -> np.ndarray:
    """(3, 3) that centres points and brings them to unit spread."""
    centre, size = points.mean(axis=0), max(float(points.std()), 1e-6)
    return np.array([[1 / size, 0, -centre[0] / size], [0, 1 / size, -centre[1] / size], [0, 0, 1]])


def cross(vector: np.ndarray) -> np.ndarray:
    """(3, 3) that multiplies by a vector (3,) as the cross product does."""
    return np.einsum("k,kij->ij", vector, _TURNS)


def _rotation(vector: np.ndarray) -> np.ndarray:
    """(3, 3) of an axis times an angle (Rodrigues)."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-12:
        return np.eye(3) + cross(vector)
    axis = cross(vector / angle)
    return np.eye(3) + np.sin(angle) * axis + (1 - np.cos(angle)) * axis @ axis


def _tangents(direction: np.ndarray) -> np.ndarray:
    """(2, 3) unit vectors that are normal to a direction and to each other."""
    other = np.eye(3)[np.argmin(np.abs(direction))]
    first = np.cross(direction, other)
    first /= np.linalg.norm(first)
    return np.stack([first, np.cross(direction, first)])


# Mean pose


def mean_pose(hypotheses: Sequence[Hypothesis], likeliest: Hypothesis) -> np.ndarray | None:
    """The mean pose (4, 4) with a translation of length 1; None where no other is near the likeliest.

    Rotations have the chordal mean (Hartley et al. 2013, section 5.3), translations the mean direction.

    Args:
        hypotheses: with poses.
        likeliest: the one among them that others must be near.
    """
    best = likeliest.model.cam1_from_cam0
    near = [
        one
        for one in hypotheses
        if np.isfinite(one.likelihood) and degrees_apart(one.model.cam1_from_cam0, best) < 10
    ]
    if len(near) < 2 or not np.isfinite(likeliest.likelihood):
        return None
    gains = np.array([one.likelihood for one in near]) - likeliest.likelihood
    weights = np.exp(gains / 10.0)
    total = np.einsum("n,nij->ij", weights, np.stack([one.model.cam1_from_cam0 for one in near]))
    left, _, right = np.linalg.svd(total[:3, :3])
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = left @ right, total[:3, 3] / np.linalg.norm(total[:3, 3])
    return pose


def degrees_apart(pose0: np.ndarray, pose1: np.ndarray) -> float:
    """The larger of the angles between two rotations and between two directions of translation."""
    between = (np.trace(pose0[:3, :3] @ pose1[:3, :3].T) - 1) / 2
    cosines = np.array([between, pose0[:3, 3] @ pose1[:3, 3]])
    return float(np.degrees(np.arccos(cosines.clip(-1, 1))).max())


# Residuals


def epipolar_distance(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(K,) symmetric epipolar distance in pixels: the mean of the distances to the line in either image.

    Hartley and Zisserman, Multiple View Geometry, 2nd edition, section 11.4.
    """
    lifted0, lifted1 = lifted(points0), lifted(points1)
    lines1, lines0 = lifted0 @ fundamental.T, lifted1 @ fundamental
    residual = np.abs(np.sum(lines1 * lifted1, axis=1))
    norm0 = np.maximum(np.linalg.norm(lines0[:, :2], axis=1), 1e-12)
    norm1 = np.maximum(np.linalg.norm(lines1[:, :2], axis=1), 1e-12)
    return 0.5 * residual * (1 / norm0 + 1 / norm1)


def fundamental_from_pose(K0: np.ndarray, K1: np.ndarray, cam1_from_cam0: np.ndarray) -> np.ndarray:
    """F (3, 3) with x1ᵀ F x0 = 0 from intrinsics and the pose that takes camera-0 points to camera 1."""
    x, y, z = cam1_from_cam0[:3, 3]
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.linalg.inv(K1).T @ cross @ cam1_from_cam0[:3, :3] @ np.linalg.inv(K0)


def sampson(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(N,) Sampson's distance in pixels."""
    lifted0, lifted1 = lifted(points0), lifted(points1)
    lines1, lines0 = lifted0 @ fundamental.T, lifted1 @ fundamental
    slope = np.sqrt(np.sum(lines0[:, :2] ** 2, axis=1) + np.sum(lines1[:, :2] ** 2, axis=1))
    return np.abs(np.sum(lines1 * lifted1, axis=1)) / np.maximum(slope, 1e-300)


def in_front(
    points0: np.ndarray,
    points1: np.ndarray,
    inverse_calibrations: tuple[np.ndarray, np.ndarray],
    cam1_from_cam0: np.ndarray,
) -> np.ndarray:
    """(N,) bool: matches whose rays come nearest to each other in front of both cameras.

    Args:
        points0, points1: (N, 2) pixels.
        inverse_calibrations: K⁻¹ (3, 3) of image 0 and 1.
        cam1_from_cam0: (4, 4).
    """
    sides = zip((points0, points1), inverse_calibrations, strict=True)
    rays = [lifted(points) @ inverse.T for points, inverse in sides]
    first, second = (ray / np.linalg.norm(ray, axis=1, keepdims=True) for ray in rays)
    first = first @ cam1_from_cam0[:3, :3].T
    # The lengths a, b of least |a first + t − b second|, times a positive number.
    cosine = np.sum(first * second, axis=1)
    along0, along1 = -first @ cam1_from_cam0[:3, 3], second @ cam1_from_cam0[:3, 3]
    return (along0 + cosine * along1 > 0) & (cosine * along0 + along1 > 0)


# Thresholds


def threshold_scale(
    scale0: Sequence[float] | np.ndarray, scale1: Sequence[float] | np.ndarray, kind: GeometryKind
) -> float:
    """Stored pixels for one pixel of the resized images, for a threshold on the residual of that geometry.

    The residual of homographies lies in image 1. An epipolar residual mixes both images as Sampson's distance
    does (Hartley and Zisserman, section 11.4.3): 1/e² is the sum of the 1/e² of either image alone.

    Args:
        scale0, scale1: (sx, sy), resized / stored size of image 0 and 1, as `Features.scale` holds it.
        kind: of the geometry.
    """
    stored0, stored1 = (1 / float(np.sqrt(scale[0] * scale[1])) for scale in (scale0, scale1))
    return (
        stored1 if kind in ("homography", "homographies") else float(np.sqrt(2 / (stored0**-2 + stored1**-2)))
    )


# Lens distortion

_PINHOLE = ("PINHOLE", "SIMPLE_PINHOLE")
_RADIAL = ("SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV")  # COLMAP took these from OpenCV
_FISHEYE = ("SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE", "OPENCV_FISHEYE")


def undistort(points: np.ndarray, camera: Camera) -> np.ndarray:
    """Where an ideal pinhole camera with `camera.K` would see the points.

    OpenCV inverts its own models, the radial and the fisheye ones; pycolmap the others.

    Args:
        points: (K, 2) stored pixels; rows that are not finite stay so.
        camera: of the image.

    Returns:
        (K, 2) float64; NaN where the model cannot be inverted.

    Raises:
        UsageError: a model that only pycolmap can invert, and it is not installed.
    """
    points = np.asarray(points, dtype=np.float64)
    if camera.model in _PINHOLE or not len(points):
        return points
    distortion = np.array([*camera.distortion, *(0.0,) * (4 - len(camera.distortion))])
    if camera.model in _RADIAL:
        # In OpenCV 4 another function has the criteria; its default stops after five steps.
        until = (cv2.TERM_CRITERIA_COUNT + cv2.TERM_CRITERIA_EPS, 100, 1e-10)
        invert = getattr(cv2, "undistortPointsIter", cv2.undistortPoints)
        found = invert(points[:, None], camera.K, distortion, P=camera.K, criteria=until, R=np.eye(3))
        return found[:, 0]
    if camera.model in _FISHEYE:
        found = cv2.fisheye.undistortPoints(points[:, None], camera.K, distortion, P=camera.K)
        # OpenCV marks what it cannot invert by −1000000 before it applies P.
        return np.where(np.abs(found[:, 0]) < 1e5 * camera.fx, found[:, 0], np.nan)
    try:
        import pycolmap
    except ModuleNotFoundError:
        raise UsageError(
            f"points of the camera model {camera.model} are undistorted by pycolmap: "
            + install_command("pycolmap")
        ) from None
    model, params = camera.to_colmap()
    width, height = camera.size or (1, 1)
    lens = pycolmap.Camera(model=model, width=width, height=height, params=params)
    found = lens.cam_from_img(points + 0.5)
    return found * (camera.fx, camera.fy) + (camera.cx, camera.cy)
