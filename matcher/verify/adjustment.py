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
from matcher.errors import optional
from matcher.types import TwoViewGeometry

# Hypotheses

LOSS_SCALE = 0.5  # pixels; errors well above it no longer pull a refined model
RANSAC_CONFIDENCE, MAX_ITERATIONS = 0.9999, 10_000  # of sampling: probability that a sample was right, limit


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

    def select(self, part: np.ndarray) -> MatchedPoints:
        """Some of them, by a mask or indices."""
        known = None if self.covariances is None else self.covariances[part]
        return MatchedPoints(self.points0[part], self.points1[part], self.probable[part], known)

    def best_first(self) -> np.ndarray | None:
        """The order (N,) for progressive sampling (PROSAC, Chum and Matas 2005), if there is one."""
        return np.argsort(-self.probable, kind="stable") if np.ptp(self.probable) > 0 else None

    @cached_property
    def variances(self) -> Variances:
        """Variances of the positions; those without covariances are all as exact."""
        if self.covariances is None:
            same = np.full(len(self), _UNKNOWN**2)
            return Variances(same, np.zeros(len(self)), same, _UNKNOWN**2)
        known = np.nan_to_num(self.covariances, nan=_VAST, posinf=_VAST, neginf=0.0)
        xx, yy = (np.clip(known[:, axis, axis], 0.0, _VAST) for axis in (0, 1))
        bound = np.sqrt(xx * yy)
        xy = np.clip(known[:, 0, 1], -bound, bound)  # also where somebody's own are no covariances
        return Variances(xx + _KNOWN**2, xy, yy + _KNOWN**2, _KNOWN**2)

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

    def trials(self, plan: Iterable[tuple[float, float]]) -> Iterator[tuple[float, MatchedPoints]]:
        """Each factor of a plan with the most probable matches, its share of all or more; none twice."""
        done = set()
        for factor, share in plan:
            part = self.probable >= np.quantile(self.probable, 1 - share, method="higher")
            count = int(np.count_nonzero(part))
            if (factor, count) not in done:
                done.add((factor, count))
                yield factor, self if count == len(self) else self.select(part)


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A model that may be right."""

    model: TwoViewGeometry  # in resized pixels
    likelihood: float  # logarithm of how much likelier all matches are with it than if all were wrong
    agreeing: float  # share of all matches, by the threshold that it was found with


def until_most_agree(hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses up to the first that four of five matches agree with; later ones are not sought."""
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
TINY, _VAST = 1e-300, 1e8  # pixels²; TINY: no divisor is smaller
_SKEW = np.array(  # skew-symmetric: derivatives of a rotation about x, y and z
    [
        [[0, 0, 0], [0, 0, -1], [0, 1, 0]],
        [[0, 0, 1], [0, 0, 0], [-1, 0, 0]],
        [[0, -1, 0], [1, 0, 0], [0, 0, 0]],
    ],
    dtype=np.float64,
)

Model = TypeVar("Model")
Residuals = tuple[np.ndarray, np.ndarray]  # (N, d) and their derivatives (N, d, P)


class Variances(NamedTuple):
    """Variances of the matched positions, in pixels²."""

    xx: np.ndarray  # (N,) of points1
    xy: np.ndarray
    yy: np.ndarray
    image0: float  # of points0, the same for all and along both axes


def refined(
    refine: Callable[[np.ndarray, MatchedPoints], np.ndarray],
    matched: MatchedPoints,
    model: np.ndarray,
    inliers: np.ndarray,
) -> np.ndarray:
    """What `refine` makes of a model by its inliers; the model itself if they are few or that fails."""
    if np.count_nonzero(inliers) <= 8:
        return model
    found = refine(model, matched.select(inliers))
    return found if np.isfinite(found).all() and found.any() else model


def adjusted_homography(
    homography: np.ndarray, inliers: MatchedPoints, model: PlanarModel = "homography"
) -> np.ndarray:
    """The homography (3, 3) of the kind `model` of least loss near one; its scale is arbitrary."""
    # The changes model @ (1 + e), by the entries of e, that keep its kind; H[2, 2] is not free.
    entries, condition = np.eye(9), _conditioning(inliers.points0)
    changes = entries[:, : 6 if model == "affine" else 8]
    if model == "similarity":
        changes = np.stack([entries[0] + entries[4], entries[3] - entries[1], entries[2], entries[5]], axis=1)
    x, variances = lifted(inliers.points0) @ condition.T, inliers.variances
    covariances = np.stack([variances.xx, variances.xy, variances.xy, variances.yy], 1).reshape(-1, 2, 2)
    whiten = np.linalg.inv(np.linalg.cholesky(covariances))

    def residuals(model: np.ndarray) -> Residuals:
        moved = x @ model.T
        depth = np.where(np.abs(moved[:, 2:]) < TINY, TINY, moved[:, 2:])
        place = moved[:, :2] / depth
        # Of model @ (1 + e_ij): the i-th column of the model times the j-th coordinate.
        change = np.einsum("ci,nj->ncij", model, x).reshape(len(x), 3, 9) @ changes
        slope = (change[:, :2] - place[:, :, None] * change[:, 2:]) / depth[:, :, None]
        return np.einsum("nij,nj->ni", whiten, place - inliers.points1), whiten @ slope

    def moved(model: np.ndarray, step: np.ndarray) -> np.ndarray:
        return model @ (np.eye(3) + (changes @ step).reshape(3, 3))

    return _minimised(homography @ np.linalg.inv(condition), residuals, moved, inliers) @ condition


def adjusted_fundamental(fundamental: np.ndarray, inliers: MatchedPoints) -> np.ndarray:
    """The fundamental matrix of least loss near one: two rotations and the ratio of its singular values."""
    right, left = _conditioning(inliers.points0), _conditioning(inliers.points1).T
    u, values, v = np.linalg.svd(np.linalg.inv(left) @ fundamental @ np.linalg.inv(right))
    if not values[0] > 0:
        return fundamental
    across = _across(inliers)

    def residuals(model: tuple[np.ndarray, float, np.ndarray]) -> Residuals:
        u, ratio, v = model
        middle = np.diag([1.0, ratio, 0.0])
        slopes = np.concatenate([u @ _SKEW @ middle @ v, u @ middle @ _SKEW @ v, [np.outer(u[:, 1], v[1])]])
        return across(left @ (u @ middle @ v) @ right, left @ slopes @ right)

    def moved(model: tuple[np.ndarray, float, np.ndarray], step: np.ndarray) -> tuple:
        u, ratio, v = model
        return u @ cv2.Rodrigues(step[:3])[0], ratio + step[6], cv2.Rodrigues(step[3:6])[0] @ v

    u, ratio, v = _minimised((u, values[1] / values[0], v), residuals, moved, inliers)
    return left @ (u @ np.diag([1.0, ratio, 0.0]) @ v) @ right


def adjusted_pose(
    cam1_from_cam0: np.ndarray, inliers: MatchedPoints, cameras: tuple[Camera, Camera]
) -> np.ndarray:
    """The pose (4, 4) of least loss near one; its translation keeps length 1."""
    right, left = np.linalg.inv(cameras[0].K), np.linalg.inv(cameras[1].K).T
    across = _across(inliers)

    def tangents(direction: np.ndarray) -> np.ndarray:
        return np.linalg.svd(direction[None])[2][1:]  # (2, 3) normal to it and to each other

    def residuals(model: tuple[np.ndarray, np.ndarray]) -> Residuals:
        rotation, translation = model[0], cross(model[1])
        slopes = [translation @ rotation @ _SKEW, [cross(axis) @ rotation for axis in tangents(model[1])]]
        return across(left @ translation @ rotation @ right, left @ np.concatenate(slopes) @ right)

    def moved(model: tuple[np.ndarray, np.ndarray], step: np.ndarray) -> tuple:
        towards = model[1] + step[3:] @ tangents(model[1])
        return model[0] @ cv2.Rodrigues(step[:3])[0], towards / np.linalg.norm(towards)

    pose, start = np.eye(4), (cam1_from_cam0[:3, :3], cam1_from_cam0[:3, 3])
    pose[:3, :3], pose[:3, 3] = _minimised(start, residuals, moved, inliers)
    return pose


def _across(matched: MatchedPoints) -> Callable[[np.ndarray, np.ndarray], Residuals]:
    """By a fundamental matrix and its derivatives (P, 3, 3): Sampson's distances, signed, in deviations."""
    x0, x1 = (lifted(points).T.copy() for points in matched.sides)
    variances = matched.variances

    def across(fundamental: np.ndarray, slopes: np.ndarray) -> Residuals:
        lines1, lines0 = fundamental @ x0, fundamental.T @ x1
        a, b = lines1[:2]
        along = np.stack([variances.xx * a + variances.xy * b, variances.xy * a + variances.yy * b])
        variance = a * along[0] + b * along[1] + variances.image0 * np.sum(lines0[:2] ** 2, axis=0)
        inverse = 1 / np.sqrt(np.maximum(variance, TINY))
        residual = np.sum(x1 * lines1, axis=0) * inverse
        share = residual * inverse**2  # of a change of half the variance in one of the residual
        # By the entries of F', which takes x0 to lines1 and x1 to lines0.
        entries = (x1 * inverse)[:, None] * x0
        entries[:2] -= (along * share)[:, None] * x0
        entries[:, :2] -= x1[:, None] * (variances.image0 * share * lines0[:2])
        columns = slopes.reshape(-1, 9) @ entries.reshape(9, -1)
        return residual[:, None], columns.T[:, None]

    return across


def _minimised(
    model: Model,
    residuals: Callable[[Model], Residuals],
    moved: Callable[[Model, np.ndarray], Model],
    matched: MatchedPoints,
) -> Model:
    """The model of least Cauchy loss, one standard deviation wide, that steps downhill lead to."""
    # By the square root of the probability: nearly as good as that itself where it is calibrated, and hardly
    # worse than the same for all where it is only a similarity of descriptors.
    weights = np.sqrt(matched.probable)
    weights = weights / weights.mean()

    def loss_of(found: np.ndarray) -> float:
        with np.errstate(over="ignore"):
            loss = float(weights @ np.log1p(np.sum(found**2, axis=1)))
        return np.inf if np.isnan(loss) else loss

    found, slopes = residuals(model)
    # Damped little at first: where the matches nearly lie on a plane, one direction is that much weaker.
    loss, damping = loss_of(found), 1e-5
    for _ in range(15):  # steps at most, each tried with at most eight dampings
        weight = weights / (1 + np.sum(found**2, axis=1))
        flat, rows = slopes.reshape(-1, slopes.shape[2]), np.repeat(weight, found.shape[1])
        normal, gradient = (flat.T * rows) @ flat, (flat.T * rows) @ found.reshape(-1)
        before = loss
        for _ in range(8):
            try:
                step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + TINY), gradient)
            except np.linalg.LinAlgError:
                return model
            other = moved(model, step)
            values, derivatives = residuals(other)
            if (lower := loss_of(values)) < loss:
                model, found, slopes, loss, damping = other, values, derivatives, lower, damping / 10
                break
            damping *= 10
        # The loss is the negative logarithm of a likelihood: to gain less than .001 is a small part of the
        # model's own uncertainty. Of a loss below 1, as of points without noise, it is a share.
        if not before - loss > 0.001 * min(before, 1.0):
            return model
    return model


def lifted(points: np.ndarray) -> np.ndarray:
    """(N, 3) homogeneous points."""
    return np.column_stack([points, np.ones(len(points))])


def _conditioning(points: np.ndarray) -> np.ndarray:
    """(3, 3) that centres points and brings them to unit variances."""
    centre, size = points.mean(axis=0), max(float(points.std()), 1e-6)
    return np.array([[1 / size, 0, -centre[0] / size], [0, 1 / size, -centre[1] / size], [0, 0, 1]])


def cross(vector: np.ndarray) -> np.ndarray:
    """(3, 3) that multiplies by a vector (3,) as the cross product does."""
    return np.einsum("k,kij->ij", vector, _SKEW)


# Mean pose


def mean_pose(hypotheses: Sequence[Hypothesis], likeliest: Hypothesis) -> np.ndarray | None:
    """The mean pose (4, 4), |t| = 1, of those within 10 degrees of the likeliest; None where it is alone.

    Rotations have the chordal mean (Hartley et al. 2013, section 5.3), translations the mean direction.
    """
    best = likeliest.model.cam1_from_cam0
    known = [one for one in hypotheses if np.isfinite(one.likelihood)]
    near = [one for one in known if degrees_apart(one.model.cam1_from_cam0, best) < 10]
    if len(near) < 2 or not np.isfinite(likeliest.likelihood):
        return None
    ratios = np.array([one.likelihood for one in near]) - likeliest.likelihood
    weights = np.exp(ratios / 10.0)  # flattened, so that others than the likeliest count
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


def fundamental_from_pose(K0: np.ndarray, K1: np.ndarray, cam1_from_cam0: np.ndarray) -> np.ndarray:
    """F (3, 3) with x1ᵀ F x0 = 0 from intrinsics and the pose that takes camera-0 points to camera 1."""
    essential = cross(cam1_from_cam0[:3, 3]) @ cam1_from_cam0[:3, :3]
    return np.linalg.inv(K1).T @ essential @ np.linalg.inv(K0)


def epipolar_distance(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(K,) pixels, the mean distance to both epipolar lines (Hartley and Zisserman, section 11.4)."""
    residual, *norms = _epipolar(points0, points1, fundamental)
    norm0, norm1 = (np.maximum(norm, 1e-12) for norm in norms)
    return 0.5 * residual * (1 / norm0 + 1 / norm1)


def sampson(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(N,) Sampson's distance in pixels."""
    residual, norm0, norm1 = _epipolar(points0, points1, fundamental)
    return residual / np.maximum(np.hypot(norm0, norm1), TINY)


def _epipolar(
    points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """|x1ᵀ F x0|, and the lengths of the normals of the lines in image 0 and 1; (N,) each."""
    lifted0, lifted1 = lifted(points0), lifted(points1)
    lines1, lines0 = lifted0 @ fundamental.T, lifted1 @ fundamental
    norms = (np.linalg.norm(lines[:, :2], axis=1) for lines in (lines0, lines1))
    return np.abs(np.sum(lines1 * lifted1, axis=1)), *norms


def in_front(
    points0: np.ndarray,
    points1: np.ndarray,
    inverse_calibrations: tuple[np.ndarray, np.ndarray],
    cam1_from_cam0: np.ndarray,
) -> np.ndarray:
    """(N,) bool: matches (N, 2) whose rays, by K⁻¹, come nearest to each other in front of both cameras."""
    sides = zip((points0, points1), inverse_calibrations, strict=True)
    rays = [lifted(points) @ inverse.T for points, inverse in sides]
    first, second = (ray / np.linalg.norm(ray, axis=1, keepdims=True) for ray in rays)
    first = first @ cam1_from_cam0[:3, :3].T
    # The lengths a, b of least |a first + t − b second|, times a positive number.
    cosine = np.sum(first * second, axis=1)
    along0, along1 = -first @ cam1_from_cam0[:3, 3], second @ cam1_from_cam0[:3, 3]
    return (along0 + cosine * along1 > 0) & (cosine * along0 + along1 > 0)


def triangulated(
    points0: np.ndarray, points1: np.ndarray, cameras: tuple[Camera, Camera], cam1_from_cam0: np.ndarray
) -> np.ndarray:
    """(P, 3) points before camera 0 where rays of undistorted matches (N, 2) come nearest to those of 1."""
    sides = zip((points0, points1), cameras, strict=True)
    rays, second = (lifted(points) @ np.linalg.inv(camera.K).T for points, camera in sides)
    across = np.cross(second, rays @ cam1_from_cam0[:3, :3].T)
    depth = -np.sum(np.cross(second, cam1_from_cam0[:3, 3]) * across, axis=1)
    depth /= np.maximum(np.sum(across**2, axis=1), 1e-12)
    return (rays * depth[:, None])[depth > 0]


def plane_answers(
    points0: np.ndarray,
    points1: np.ndarray,
    geometry: TwoViewGeometry,
    cameras: tuple[Camera, Camera] | None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each pose of an ambiguous geometry with the points (P, 3) of its inliers; none without cameras."""
    if cameras is None or geometry.status != "ambiguous":
        return []
    sides = zip((points0, points1), cameras, strict=True)
    ends = [undistort(points[geometry.inliers], camera) for points, camera in sides]
    return [(pose, triangulated(*ends, cameras, pose)) for pose in geometry.alternatives]


# Thresholds and lens distortion


def threshold_scale(
    scale0: Sequence[float] | np.ndarray, scale1: Sequence[float] | np.ndarray, kind: GeometryKind
) -> float:
    """Stored pixels for one pixel of the resized images, whose `Features.scale` are (sx, sy), in residuals.

    Those of homographies lie in image 1. An epipolar one mixes both images as Sampson's distance does
    (Hartley and Zisserman, section 11.4.3): 1/e² is the sum of the 1/e² of either image alone.
    """
    stored0, stored1 = (1 / float(np.sqrt(scale[0] * scale[1])) for scale in (scale0, scale1))
    planar = kind in ("homography", "homographies")
    return stored1 if planar else float(np.sqrt(2 / (stored0**-2 + stored1**-2)))


def undistort(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(K, 2) float64: where an ideal pinhole camera with `camera.K` would see points, stored pixels.

    NaN where the model cannot be inverted. OpenCV inverts its own models, the radial and the fisheye ones;
    pycolmap the others (`UsageError` where it is not installed).
    """
    points = np.asarray(points, dtype=np.float64)
    if not camera.distortion or not len(points):
        return points
    distortion = np.array([*camera.distortion, *(0.0,) * (4 - len(camera.distortion))])
    if camera.model in ("SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV"):  # COLMAP has these from OpenCV
        # In OpenCV 4 another function has the criteria; its default stops after five steps.
        until = (cv2.TERM_CRITERIA_COUNT + cv2.TERM_CRITERIA_EPS, 100, 1e-10)
        invert = getattr(cv2, "undistortPointsIter", cv2.undistortPoints)
        found = invert(points[:, None], camera.K, distortion, P=camera.K, criteria=until, R=np.eye(3))
        return found[:, 0]
    if camera.model in ("SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE", "OPENCV_FISHEYE"):
        found = cv2.fisheye.undistortPoints(points[:, None], camera.K, distortion, P=camera.K)
        # OpenCV marks what it cannot invert by −1000000 before it applies P.
        return np.where(np.abs(found[:, 0]) < 1e5 * camera.fx, found[:, 0], np.nan)
    with optional():
        import pycolmap
    model, params = camera.to_colmap()
    width, height = camera.size or (1, 1)
    lens = pycolmap.Camera(model=model, width=width, height=height, params=params)
    return lens.cam_from_img(points + 0.5) * (camera.fx, camera.fy) + (camera.cx, camera.cy)
