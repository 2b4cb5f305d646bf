"""Camera poses from the depths of a keyframe; with one camera these are triangulated first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.sequence.frames import FrameLinks, Guide, PoseStatus, search_guided
from matcher.sequence.keyframes import KeptFrame, MeasuredDisparities
from matcher.sequence.stereo import (
    MIN_POINTS,
    Calibration,
    DisparityOffset,
    depths_of,
    project,
    rays,
    solve_pose,
    triangulate,
)
from matcher.verify.estimation import RobustEstimator

# --- joint_pose: The pose of a frame and the depths of its keyframe's points together, each with what was
# known before.

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


# --- pose_tracking: Camera poses from the depths of a keyframe; with one camera these are triangulated
# first.

_START_ANGLE = 1.0  # degrees of parallax with which one camera may start
_START_SHARE = 0.3  # of the points that must have it
_SURE = 0.2  # relative error up to which one camera knows a depth
_MOST = 0.5  # of the known depths: where fewer agree with a pose, another one is tried


class PoseTracker:
    """Follows the pose from keyframe to frame and fills in the depths of keyframes.

    With two cameras depths are measured. With one, the first keyframe's are triangulated once enough parallax
    shows; that first baseline is the unit of length. Frames make depths surer, and later keyframes inherit
    them.
    """

    def __init__(
        self, camera: Camera | None, *, measured: bool, estimation: EstimationConfig = EstimationConfig()
    ) -> None:
        """Set up.

        Args:
            camera: of all frames; None: there are no poses.
            measured: depths come from pairs, so none may be made of an unknown scale.
            estimation: thresholds of the essential matrix with which one camera starts.

        Raises:
            UsageError: a camera whose lens distorts.
        """
        self.camera = camera
        self.calibration = None if camera is None else Calibration(camera)
        self._measured = measured
        self.offset = DisparityOffset()
        self._essential_matrix = RobustEstimator(replace(estimation, kind="essential"))
        self._last: tuple[int, np.ndarray] | None = None  # frame and its pose
        self._motion = np.eye(4)  # of one frame in its own camera's coordinates

    def begin(self, frame: KeptFrame) -> PoseStatus:
        """The first frame, whose camera is the world."""
        if self.calibration is None:
            return "no_camera"
        self.calibration.begin(frame.size)
        return "other_size" if self._pixels(frame) is None else self._settle(frame, np.eye(4))

    def measure(self, frame: KeptFrame, right: np.ndarray, baseline: float) -> None:
        """Set a frame's depths from where the right image shows its points (N, 2), NaN where unknown.

        The offset of disparities that motion has shown so far is taken into account. Nothing is set for a
        frame whose shape is not the camera's.
        """
        if self.calibration is None:
            return
        self.calibration.begin(frame.size)
        sides = [self.calibration.pixels(points, frame.size) for points in (frame.keypoints, right)]
        if sides[0] is not None:
            product, used = self.camera.fx * baseline, self.offset.value
            disparities = product / depths_of(*sides, self.camera.fx, baseline)
            frame.measured = MeasuredDisparities(disparities, used, product)
            frame.depths[:] = product / (disparities + used)

    def camera_of(self, frame: KeptFrame) -> Camera | None:
        """The camera of a frame's own pixels; None where there is none, or none for its shape."""
        return None if self.calibration is None else self.calibration.of(frame.size)

    def locate(
        self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks
    ) -> tuple[PoseStatus, np.ndarray | None]:
        """Status and cam_from_keyframe of a frame that is linked to a keyframe; sets its pose.

        Depths of the keyframe that one camera could not know before may be filled in.
        """
        if self.camera is None:
            return "no_camera", None
        sides = [self._pixels(f) for f in (keyframe, frame)]
        if any(pixels is None for pixels in sides):
            return "other_size", None
        indices = links.indices[links.consistent]
        points = sides[0][indices[:, 0]], sides[1][indices[:, 1]]
        find = self._with_measured if self._measured else self._with_one
        status, T = find(keyframe, frame, indices[:, 0], points)
        if T is not None and keyframe.world_from_cam is not None:
            self._settle(frame, keyframe.world_from_cam @ np.linalg.inv(T))
        return status, T

    def _with_measured(
        self, keyframe: KeptFrame, frame: KeptFrame, rows: np.ndarray, points: tuple[np.ndarray, np.ndarray]
    ) -> tuple[PoseStatus, np.ndarray | None]:
        """The pose from depths that pairs have measured; others are triangulated."""
        (points0, points1), depths, scale = points, keyframe.depths[rows], self._coarseness(frame)
        T, agree = solve_pose(points0, depths, points1, self.camera, scale)
        if T is None:
            return "too_few", None
        if keyframe.measured is not None:
            disparities, used, product = keyframe.measured
            given = disparities[rows]
            kept = agree & np.isfinite(given)
            self.offset.observe(
                points0[kept], given[kept], used, points1[kept], T, self.camera, product, scale
            )
        unknown = ~np.isfinite(depths)
        new, _ = triangulate(points0[unknown], points1[unknown], T, self.camera, scale)
        keyframe.depths[rows[unknown]] = new
        return "ok", T

    def _with_one(
        self, keyframe: KeptFrame, frame: KeptFrame, rows: np.ndarray, points: tuple[np.ndarray, np.ndarray]
    ) -> tuple[PoseStatus, np.ndarray | None]:
        """The pose together with the depths, which each frame makes surer."""
        (points0, points1), scale = points, self._coarseness(frame)
        depths, errors = keyframe.depths[rows], keyframe.inverse_errors[rows]
        if np.count_nonzero(np.isfinite(depths)) < MIN_POINTS:
            T = self._start(keyframe, frame, points0, points1)
            if T is None:
                return "starting", None
            depths, _ = triangulate(points0, points1, T, self.camera, scale)
            keyframe.depths[rows] = depths
            keyframe.inverse_errors[rows] = errors_seen(points0, 1 / depths, points1, T, self.camera, scale)
            return "ok", T
        found = None
        for start in self._starts(points0, depths, points1, scale):
            trial = adjust(points0, 1 / depths, errors, points1, start, self.camera, scale)
            if trial is not None and (found is None or trial.agreeing.sum() > found.agreeing.sum()):
                found = trial
        if found is None:
            return "too_few", None
        sure = found.errors < _SURE * found.inverse_depths
        keyframe.depths[rows] = np.where(sure, 1 / found.inverse_depths, np.nan)
        keyframe.inverse_errors[rows] = np.where(sure, found.errors, np.nan)
        return "ok", found.cam1_from_cam0

    def _starts(
        self, points0: np.ndarray, depths: np.ndarray, points1: np.ndarray, scale: float
    ) -> Iterator[np.ndarray]:
        """Poses to adjust: from the depths, and where few agree, from all links, with the depths' scale."""
        T, agree = solve_pose(points0, depths, points1, self.camera, scale)
        if T is not None:
            yield T
        if agree.sum() >= _MOST * np.count_nonzero(np.isfinite(depths)):
            return
        T, _ = self._essential(points0, points1, scale)
        if T is None:
            return
        ratios = depths / triangulate(points0, points1, T, self.camera, scale)[0]
        if np.isfinite(ratios).any():
            T[:3, 3] *= np.nanmedian(ratios)
            yield T

    def promote(self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks, T: np.ndarray | None) -> None:
        """Give a frame that becomes a keyframe the depths that the keyframe before it knows."""
        if T is None:
            return
        sides = [self._pixels(f) for f in (keyframe, frame)]
        indices = links.indices[links.consistent]
        rows = indices[:, 0]
        known = 1 / keyframe.depths[rows], keyframe.inverse_errors[rows]
        inverse, errors = carry(sides[0][rows], *known, T, self.camera)
        unknown = ~np.isfinite(frame.depths[indices[:, 1]])
        frame.depths[indices[unknown, 1]] = 1 / inverse[unknown]
        frame.inverse_errors[indices[unknown, 1]] = errors[unknown]

    def relative(
        self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Pose from keyframe to frame, and world_from_cam, of a frame outside the sequence; nothing changes.

        Where the keyframe's depths are not known, the first has a translation of length 1 and the second is
        None; where no pose is found, both are None.
        """
        if self.camera is None:
            return None, None
        sides = [self._pixels(f) for f in (keyframe, frame)]
        if any(pixels is None for pixels in sides):
            return None, None
        indices = links.indices[links.consistent]
        points0, points1 = (pixels[indices[:, side]] for side, pixels in enumerate(sides))
        depths = keyframe.depths[indices[:, 0]]
        T, _ = solve_pose(points0, depths, points1, self.camera, self._coarseness(frame))
        if T is None:
            return self._essential(points0, points1, self._coarseness(frame))[0], None
        world = keyframe.world_from_cam
        return T, None if world is None else world @ np.linalg.inv(T)

    def bridge(self, frame: KeptFrame) -> PoseStatus:
        """After a loss, extrapolate the last motion, so that the path continues: a guess."""
        if self.camera is None:
            return "no_camera"
        if self._last is None:
            return "starting"
        before, pose = self._last
        frame.world_from_cam = pose @ np.linalg.matrix_power(self._motion, frame.index - before)
        return "bridged"

    def _settle(self, frame: KeptFrame, pose: np.ndarray) -> PoseStatus:
        if self._last is not None:
            before, last = self._last
            step = np.linalg.inv(last) @ pose
            # Over a gap of several frames the motion of one is not known exactly; its share is near enough.
            step[:3, 3] /= max(1, frame.index - before)
            self._motion = step if frame.index - before == 1 else _translation(step)
        frame.world_from_cam = pose
        self._last = (frame.index, pose)
        return "ok"

    def _start(
        self, keyframe: KeptFrame, frame: KeptFrame, points0: np.ndarray, points1: np.ndarray
    ) -> np.ndarray | None:
        """The pose by an essential matrix once there is parallax; its baseline has the length last known."""
        T, inliers = self._essential(points0, points1, self._coarseness(frame))
        if T is None:
            return None
        _, angles = triangulate(points0[inliers], points1[inliers], T, self.camera)
        if np.mean(angles >= _START_ANGLE) < _START_SHARE:
            return None
        step = float(np.linalg.norm(self._motion[:3, 3]))
        T[:3, 3] *= step * (frame.index - keyframe.index) if step > 0 else 1.0
        return T

    def _essential(
        self, points0: np.ndarray, points1: np.ndarray, scale: float
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """cam1_from_cam0 (4, 4) of unit translation, or None; and (K,) bool, the points that agree."""
        cameras = (self.camera, self.camera)
        geometry = self._essential_matrix(points0, points1, cameras=cameras, thresholds_scale=scale)
        return (geometry.cam1_from_cam0 if geometry.status == "ok" else None), geometry.inliers

    def _coarseness(self, frame: KeptFrame) -> float:
        return self.calibration.coarseness(frame)

    def _pixels(self, frame: KeptFrame) -> np.ndarray | None:
        """(N, 2) keypoints in pixels of the camera; None where the frame has another shape."""
        return self.calibration.pixels(frame.keypoints, frame.size)


def _translation(step: np.ndarray) -> np.ndarray:
    moved = np.eye(4)
    moved[:3, 3] = step[:3, 3]
    return moved


# --- lost_tracks: Tracks that the last frames did not show: detectors miss points, and often find them
# again later.


class LostTracks:
    """Points seen up to `patience` frames ago, moved along with what is still seen around them."""

    def __init__(self, patience: int = 6) -> None:
        self._patience = patience
        self.clear()

    def clear(self) -> None:
        """Forget all, as after a loss."""
        self._positions = np.zeros((0, 2), np.float32)
        self._descriptors = np.zeros((0, 0), np.float32)
        self.track_ids = np.zeros(0, np.int64)
        self._ages = np.zeros(0, np.int64)

    def find(self, current: KeptFrame, taken: np.ndarray, guide: Guide) -> np.ndarray:
        """(L, 2) int64: entry of `track_ids`, point of the current frame that is not among `taken` (T,)."""
        free = np.setdiff1d(np.arange(len(current.keypoints)), taken)
        pairs, _ = search_guided(
            self._positions, self._descriptors, current.keypoints[free], current.descriptors[free], guide
        )
        return np.stack([pairs[:, 0], free[pairs[:, 1]]], axis=1)

    def update(self, previous: KeptFrame, current: KeptFrame, links: FrameLinks, guide: Guide) -> None:
        """Take in what the previous frame had and the current one, whose ids are known, has not."""
        if not guide.usable or not links.consistent.any():
            self.clear()
            return
        young = self._ages < self._patience
        ids = np.concatenate([self.track_ids[young], previous.track_ids])
        positions = np.concatenate([self._positions[young], previous.keypoints])
        ages = np.concatenate([self._ages[young] + 1, np.ones(len(previous.track_ids), np.int64)])
        parts = [self._descriptors[young]] if young.any() else []
        descriptors = np.concatenate([*parts, previous.descriptors])
        positions = positions + guide.motion(positions)
        width, height = current.size
        inside = (positions >= 0).all(axis=1) & (positions < (width, height)).all(axis=1)
        gone = ~np.isin(ids, current.track_ids) & inside
        self.track_ids, self._positions = ids[gone], positions[gone].astype(np.float32)
        self._descriptors, self._ages = descriptors[gone], ages[gone]
