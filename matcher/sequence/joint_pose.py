"""The pose of a frame and the depths of its keyframe's points together, each with what was known before.

A point seen twice from nearly the same place has a depth that is hardly known, and a pose that takes it for
exact is wrong. So depths carry their errors, as inverse depths, which are nearly Gaussian (Civera et al.
2008), and a frame adds what it knows: bundle adjustment of two views in which earlier depths are priors.
Points of unknown depth take part; they show how the camera turned, and which way it went.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from matcher.data.camera import Camera
from matcher.sequence.odometry import MIN_POINTS, project, rays

_NOISE = 0.5  # pixels of the resized image: what a link is off, both ends together
_VAGUE = 4.0  # times the typical inverse depth: the error of one that nothing is known of
_STEPS, _SETTLED = 8, 1e-6  # rounds, and the change of the pose at which they end
_OUTLIER = 9.0  # squared deviations from which a point does not agree
_FORGET = 2.0  # times as large becomes the error of a depth that a frame contradicts
_SHARE = 0.4  # of the links that have to agree


@dataclass(frozen=True, eq=False)
class JointPose:
    """What `adjust` finds."""

    cam1_from_cam0: np.ndarray  # (4, 4)
    inverse_depths: np.ndarray  # (K,) in frame 0; NaN where still unknown
    errors: np.ndarray  # (K,) their standard deviations
    agreeing: np.ndarray  # (K,) bool


@dataclass(frozen=True, eq=False)
class _Views:
    """K points in two frames."""

    rays0: np.ndarray  # (K, 3) of depth 1
    points1: np.ndarray  # (K, 2) pixels
    prior: np.ndarray  # (K,) inverse depths
    certainty: np.ndarray  # (K,) their inverse variances
    noise: float  # pixels
    camera: Camera

    def linearise(
        self, T: np.ndarray, inverse: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Residuals (K, 2), derivatives by the pose (K, 2, 6) and by inverse depths (K, 2), usable rows.

        Everything is in units of the noise. The pose changes by exp(twist) · T, rotation first.
        """
        turned, t = self.rays0 @ T[:3, :3].T, T[:3, 3]
        seen = turned + inverse[:, None] * t
        usable = seen[:, 2] > 1e-6
        seen[~usable] = (0, 0, 1)
        x, y, z = seen.T
        fx, fy = self.camera.fx / self.noise, self.camera.fy / self.noise
        error = (self.points1 - project(seen, self.camera)) / self.noise
        by_seen = np.zeros((len(seen), 2, 3))
        by_seen[:, 0, 0], by_seen[:, 0, 2] = fx / z, -fx * x / z**2
        by_seen[:, 1, 1], by_seen[:, 1, 2] = fy / z, -fy * y / z**2
        by_pose = np.empty((len(seen), 2, 6))
        by_pose[:, :, :3] = np.cross(seen[:, None], by_seen)  # d(w × X) = w · (X × row)
        by_pose[:, :, 3:] = by_seen * inverse[:, None, None]
        return error, by_pose, by_seen @ t, usable


def adjust(
    points0: np.ndarray,
    inverse0: np.ndarray,
    errors0: np.ndarray,
    points1: np.ndarray,
    start: np.ndarray,
    camera: Camera,
    scale: float = 1.0,
) -> JointPose | None:
    """Pose and inverse depths that agree best with both frames and with what was known.

    Robust Gauss-Newton steps (Cauchy); each inverse depth is eliminated (Schur complement).

    Args:
        points0, points1: (K, 2) pixels.
        inverse0, errors0: (K,) inverse depths in frame 0 and their standard deviations, NaN where unknown.
        start: cam1_from_cam0 (4, 4) in the unit of the depths.
        camera: of both.
        scale: camera pixels for one of the resized image.

    Returns:
        None where too few points agree.
    """
    known = np.isfinite(inverse0) & (errors0 > 0)
    typical = float(np.median(inverse0[known]))
    prior = np.where(known, inverse0, typical)
    deviations = np.where(known, errors0, _VAGUE * typical)
    views = _Views(rays(points0, camera), points1, prior, deviations**-2.0, _NOISE * scale, camera)
    T, inverse = start.copy(), prior.copy()
    inverse = _settle(views, T, inverse, rounds=3)
    for _ in range(_STEPS):
        step, inverse = _step(views, T, inverse)
        T = _moved(T, step)
        if np.abs(step).max() < _SETTLED:
            break
    inverse = _settle(views, T, inverse, rounds=2)
    error, _, by_inverse, usable = views.linearise(T, inverse)
    agreeing = usable & (_squares(views, error, inverse) < _OUTLIER)
    if agreeing.sum() < max(MIN_POINTS, _SHARE * len(points0)) or not np.isfinite(T).all():
        return None
    found = 1 / np.sqrt((by_inverse**2).sum(1) + views.certainty)
    values = np.where(agreeing, inverse, np.where(known, inverse0, np.nan))
    spread = np.where(agreeing, found, _FORGET * errors0)
    return JointPose(T, np.where(values > 0, values, np.nan), spread, agreeing)


def _squares(views: _Views, error: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    return (error**2).sum(1) + views.certainty * (inverse - views.prior) ** 2


def _weights(views: _Views, error: np.ndarray, inverse: np.ndarray, usable: np.ndarray) -> np.ndarray:
    return usable / (1 + _squares(views, error, inverse) / 4)  # Cauchy, of two deviations


def _settle(views: _Views, T: np.ndarray, inverse: np.ndarray, rounds: int) -> np.ndarray:
    """The inverse depths for a pose that stays."""
    for _ in range(rounds):
        error, _, by_inverse, _ = views.linearise(T, inverse)
        pull = (by_inverse * error).sum(1) + views.certainty * (views.prior - inverse)
        inverse = inverse + pull / ((by_inverse**2).sum(1) + views.certainty)
    return inverse


def _step(views: _Views, T: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A change of the pose (6,), and the inverse depths that go with it."""
    error, by_pose, by_inverse, usable = views.linearise(T, inverse)
    weights = _weights(views, error, inverse, usable)
    own = (by_inverse**2).sum(1) + views.certainty
    pull = (by_inverse * error).sum(1) + views.certainty * (views.prior - inverse)
    mixed = np.einsum("kip,ki->kp", by_pose, by_inverse)
    flat = (by_pose * weights[:, None, None]).reshape(-1, 6)
    hessian = flat.T @ by_pose.reshape(-1, 6) - (mixed * (weights / own)[:, None]).T @ mixed
    gradient = flat.T @ error.reshape(-1) - mixed.T @ (weights * pull / own)
    hessian[np.diag_indices(6)] *= 1 + 1e-6
    step = np.linalg.lstsq(hessian, gradient, rcond=1e-12)[0]
    return step, inverse + (pull - mixed @ step) / own


def _moved(T: np.ndarray, twist: np.ndarray) -> np.ndarray:
    turned = np.eye(4)
    turned[:3, :3] = cv2.Rodrigues(twist[:3])[0]
    turned[:3, 3] = twist[3:]
    return turned @ T


def carry(
    points0: np.ndarray,
    inverse0: np.ndarray,
    errors0: np.ndarray,
    cam1_from_cam0: np.ndarray,
    camera: Camera,
) -> tuple[np.ndarray, np.ndarray]:
    """Inverse depths (K,) and errors in frame 1 of points (K, 2) of frame 0; NaN stays, and behind is NaN."""
    turned = rays(points0, camera) @ cam1_from_cam0[:3, :3].T
    z = turned[:, 2] + inverse0 * cam1_from_cam0[2, 3]
    with np.errstate(divide="ignore", invalid="ignore"):
        ahead = np.where(z > 0, z, np.nan)
        return inverse0 / ahead, errors0 * np.abs(turned[:, 2]) / ahead**2


def errors_seen(
    points0: np.ndarray,
    inverse: np.ndarray,
    points1: np.ndarray,
    cam1_from_cam0: np.ndarray,
    camera: Camera,
    scale: float = 1.0,
) -> np.ndarray:
    """(K,) standard deviations of inverse depths that these two frames alone have shown; NaN stays."""
    views = _Views(rays(points0, camera), points1, inverse, np.zeros(len(inverse)), _NOISE * scale, camera)
    _, _, by_inverse, usable = views.linearise(cam1_from_cam0, inverse)
    return np.where(usable, 1 / np.linalg.norm(by_inverse, axis=1), np.nan)
