"""Camera poses from the depths of a keyframe, and depths from poses.

With two cameras depths are measured, and what all disparities are short of is estimated from the motion. With
one, the first keyframe's depths are triangulated, and each frame's pose and the depths are found together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import cv2
import numpy as np
import poselib

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import resize_points
from matcher.sequence.frames import FrameLinks, KeptFrame, MeasuredDisparities, PoseStatus
from matcher.sequence.stereo import depths_of
from matcher.verify.estimation import RobustEstimator

MIN_POINTS = 12  # with a known depth that agree with a pose


# --- Pixels, rays and points.


def rays(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 3) points of depth 1 seen at pixels (N, 2)."""
    x = (points[:, 0] - camera.cx) / camera.fx
    y = (points[:, 1] - camera.cy) / camera.fy
    return np.column_stack([x, y, np.ones(len(points))]).astype(np.float64)


def move(points: np.ndarray, T: np.ndarray) -> np.ndarray:
    """Points (N, 3) under a rigid transform (4, 4)."""
    return points @ T[:3, :3].T + T[:3, 3]


def project(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 2) pixels of points (N, 3); those behind the camera are NaN."""
    z = np.where(points[:, 2] > 1e-9, points[:, 2], np.nan)
    return np.column_stack(
        [camera.fx * points[:, 0] / z + camera.cx, camera.fy * points[:, 1] / z + camera.cy]
    )


def _slopes(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(K, 2, 3) derivatives of pixels by the coordinates of points (K, 3) before the camera."""
    inverse = 1 / points[:, 2]
    found = np.zeros((len(points), 2, 3))
    found[:, 0, 0], found[:, 1, 1] = camera.fx * inverse, camera.fy * inverse
    found[:, 0, 2] = -camera.fx * points[:, 0] * inverse**2
    found[:, 1, 2] = -camera.fy * points[:, 1] * inverse**2
    return found


def solve_pose(
    points0: np.ndarray, depths0: np.ndarray, points1: np.ndarray, camera: Camera, scale: float = 1.0
) -> tuple[np.ndarray | None, np.ndarray]:
    """The pose of a frame that sees points whose depth an earlier one knows (LO-RANSAC, PoseLib).

    Args:
        points0: (K, 2) pixels in the earlier frame.
        depths0: (K,) along its z axis, NaN where unknown.
        points1: (K, 2) pixels in the frame.
        camera: of both.
        scale: camera pixels for one of the resized image, in which the threshold of one pixel is.

    Returns:
        cam1_from_cam0 (4, 4) in the unit of the depths, or None; and (K,) bool, the points that agree.
    """
    inliers = np.zeros(len(points0), bool)
    known = np.flatnonzero(np.isfinite(depths0))
    if len(known) < MIN_POINTS:
        return None, inliers
    world = rays(points0[known], camera) * depths0[known, None]
    parameters = [camera.fx, camera.fy, camera.cx, camera.cy]
    pinhole = {"model": "PINHOLE", "width": 0, "height": 0, "params": parameters}
    options = {
        "max_reproj_error": scale,
        "max_iterations": 2000,
        "min_iterations": 100,  # links have been verified before, so that few are wrong
        "success_prob": 0.9999,
        "seed": 0,
    }
    refinement = {"loss_type": "CAUCHY", "loss_scale": 0.5 * scale}
    seen = points1[known].astype(np.float64)
    pose, report = poselib.estimate_absolute_pose(seen, world, pinhole, options, refinement)
    inliers[known] = np.asarray(report["inliers"], dtype=bool)
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = pose.R, pose.t
    if inliers.sum() < MIN_POINTS or not np.isfinite(T).all():
        return None, np.zeros(len(points0), bool)
    return T, inliers


def triangulate(
    points0: np.ndarray, points1: np.ndarray, cam1_from_cam0: np.ndarray, camera: Camera, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Depths of points that two frames see, where they can be known.

    The midpoint of the shortest line between both rays (Hartley and Sturm 1997, section 5.3).

    Args:
        points0, points1: (K, 2) pixels.
        cam1_from_cam0: (4, 4).
        camera: of both.
        scale: as in `solve_pose`.

    Returns:
        depths (K,) along z in frame 0, NaN for points behind a camera, seen at less than .6 degrees or
        projected more than two pixels away; and the angle between the rays (K,) in degrees.
    """
    a = rays(points0, camera) @ cam1_from_cam0[:3, :3].T  # rays of frame 0, turned into frame 1
    b, t = rays(points1, camera), cam1_from_cam0[:3, 3]
    angles = np.rad2deg(np.arctan2(np.linalg.norm(np.cross(a, b), axis=1), np.sum(a * b, axis=1)))
    aa, bb, ab = np.sum(a * a, axis=1), np.sum(b * b, axis=1), np.sum(a * b, axis=1)
    at, bt = a @ t, b @ t
    apart = np.maximum(aa * bb - ab * ab, 1e-15)
    depths = (ab * bt - bb * at) / apart  # least squares of depth0·a + t = depth1·b
    depths1 = (aa * bt - ab * at) / apart
    middle = (a * depths[:, None] + t + b * depths1[:, None]) / 2
    with np.errstate(invalid="ignore"):
        error = np.linalg.norm(project(middle, camera) - points1, axis=1)
        good = (depths > 0) & (depths1 > 0) & (angles >= 0.6) & (error <= 2 * scale)
    return np.where(good, depths, np.nan), angles


# --- The pose of a frame and the depths of its keyframe's points together, each with what was known before.


@dataclass(frozen=True, eq=False)
class JointPose:
    """What `adjust` finds."""

    cam1_from_cam0: np.ndarray  # (4, 4)
    inverse_depths: np.ndarray  # (K,) in frame 0; NaN where still unknown
    errors: np.ndarray  # (K,) their standard deviations
    agreeing: np.ndarray  # (K,) bool


@dataclass(frozen=True, eq=False)
class _Views:
    """K points in two frames, with what is known of their inverse depths."""

    rays0: np.ndarray  # (K, 3) of depth 1
    points1: np.ndarray  # (K, 2) pixels
    prior: np.ndarray  # (K,) inverse depths
    certainty: np.ndarray  # (K,) their inverse variances
    noise: float  # pixels that a link is off, both ends together
    camera: Camera

    def linearise(
        self, T: np.ndarray, inverse: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Residuals (K, 2), derivatives by the pose (K, 2, 6) and by inverse depths (K, 2), usable rows.

        Everything is in units of the noise. The pose changes by exp(twist) · T, rotation first.
        """
        t = T[:3, 3]
        seen = self.rays0 @ T[:3, :3].T + inverse[:, None] * t
        usable = seen[:, 2] > 1e-6
        seen[~usable] = (0, 0, 1)
        error = (self.points1 - project(seen, self.camera)) / self.noise
        by_seen = _slopes(seen, self.camera) / self.noise
        turn = np.cross(seen[:, None], by_seen)  # d(w × X) = w · (X × row)
        by_pose = np.concatenate([turn, by_seen * inverse[:, None, None]], axis=2)
        return error, by_pose, by_seen @ t, usable

    def settle(self, T: np.ndarray, inverse: np.ndarray, rounds: int) -> np.ndarray:
        """The inverse depths for a pose that stays."""
        for _ in range(rounds):
            error, _, by_inverse, _ = self.linearise(T, inverse)
            pull = (by_inverse * error).sum(1) + self.certainty * (self.prior - inverse)
            inverse = inverse + pull / ((by_inverse**2).sum(1) + self.certainty)
        return inverse

    def squares(self, error: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """(K,) squared deviations from the frame and from what was known."""
        return (error**2).sum(1) + self.certainty * (inverse - self.prior) ** 2


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
        None where fewer than 12 points or 40 % of the links agree within three deviations. A depth that the
        frame contradicts becomes twice as uncertain.
    """
    known = np.isfinite(inverse0) & (errors0 > 0)
    typical = float(np.median(inverse0[known]))
    prior = np.where(known, inverse0, typical)
    deviations = np.where(known, errors0, 4.0 * typical)  # of one that nothing is known of
    views = _Views(rays(points0, camera), points1, prior, deviations**-2.0, 0.5 * scale, camera)
    T, inverse = start.copy(), views.settle(start, prior, rounds=3)
    for _ in range(8):
        error, by_pose, by_inverse, usable = views.linearise(T, inverse)
        weights = usable / (1 + views.squares(error, inverse) / 4)  # Cauchy, of two deviations
        own = (by_inverse**2).sum(1) + views.certainty
        pull = (by_inverse * error).sum(1) + views.certainty * (prior - inverse)
        mixed = np.einsum("kip,ki->kp", by_pose, by_inverse)
        flat = (by_pose * weights[:, None, None]).reshape(-1, 6)
        hessian = flat.T @ by_pose.reshape(-1, 6) - (mixed * (weights / own)[:, None]).T @ mixed
        gradient = flat.T @ error.reshape(-1) - mixed.T @ (weights * pull / own)
        hessian[np.diag_indices(6)] *= 1 + 1e-6
        step = np.linalg.lstsq(hessian, gradient, rcond=1e-12)[0]
        inverse = inverse + (pull - mixed @ step) / own
        change = np.eye(4)
        change[:3, :3], change[:3, 3] = cv2.Rodrigues(step[:3])[0], step[3:]
        T = change @ T
        if np.abs(step).max() < 1e-6:
            break
    inverse = views.settle(T, inverse, rounds=2)
    error, _, by_inverse, usable = views.linearise(T, inverse)
    agreeing = usable & (views.squares(error, inverse) < 9.0)
    if agreeing.sum() < max(MIN_POINTS, 0.4 * len(points0)) or not np.isfinite(T).all():
        return None
    values = np.where(agreeing, inverse, np.where(known, inverse0, np.nan))
    spread = np.where(agreeing, 1 / np.sqrt((by_inverse**2).sum(1) + views.certainty), 2.0 * errors0)
    return JointPose(T, np.where(values > 0, values, np.nan), spread, agreeing)


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
    views = _Views(rays(points0, camera), points1, inverse, np.zeros(len(inverse)), 0.5 * scale, camera)
    _, _, by_inverse, usable = views.linearise(cam1_from_cam0, inverse)
    return np.where(usable, 1 / np.linalg.norm(by_inverse, axis=1), np.nan)


# --- What all disparities of a pair are short of, because its cameras are not rectified exactly.


class DisparityOffset:
    """The offset, in pixels of the camera, estimated from every frame whose pose was found."""

    def __init__(self) -> None:
        self._information, self._sum = 1 / 0.3**2, 0.0  # before anything was seen: 0, give or take .3 pixels

    @property
    def value(self) -> float:
        """To be added to every measured disparity; 0 until motion has shown it."""
        return self._sum / self._information

    @property
    def deviation(self) -> float:
        """Its standard deviation."""
        return self._information**-0.5

    def observe(
        self,
        points0: np.ndarray,
        measured: MeasuredDisparities,
        points1: np.ndarray,
        cam1_from_cam0: np.ndarray,
        camera: Camera,
        scale: float = 1.0,
    ) -> None:
        """Take in what one frame says of the disparities of an earlier one.

        The pose is estimated along with the offset and eliminated (the Schur complement), so that a motion
        which does not show the offset, such as a turn, says nothing.

        Args:
            points0: (K, 2) pixels of the camera in the earlier frame.
            measured: there, of these points, and the offset with which the pose was found.
            points1: (K, 2) where the frame shows the points that agree with the pose.
            cam1_from_cam0: (4, 4).
            camera: of both.
            scale: camera pixels for one of the image as points were found.
        """
        disparities, used, product = measured
        depths = product / (disparities + used)
        found = move(rays(points0, camera) * depths[:, None], cam1_from_cam0)
        ahead = (found[:, 2] > 0) & (depths > 0)
        if np.count_nonzero(ahead) < 6:
            return
        found, points0, depths, points1 = (each[ahead] for each in (found, points0, depths, points1))
        residual = points1 - project(found, camera)
        slopes = _slopes(found, camera)
        turned = rays(points0, camera) @ cam1_from_cam0[:3, :3].T  # change of a point with its depth
        by_offset = np.einsum("kij,kj->ki", slopes, turned) * (-(depths**2) / product)[:, None]
        by_pose = np.concatenate([np.cross(found[:, None], slopes), slopes], axis=2)
        # Disparities and positions are .3 pixels off. Ten observations count as one: frames linked to one
        # keyframe repeat the errors of its disparities, and neighbouring points those of the lens.
        variance = (0.3 * scale) ** 2 * (1 + np.square(by_offset).sum(axis=1))
        weights = 1 / (10 * variance * (1 + np.square(residual).sum(axis=1) / (4 * variance)))
        pose_pose = np.einsum("kia,k,kib->ab", by_pose, weights, by_pose)
        pose_offset = np.einsum("kia,k,ki->a", by_pose, weights, by_offset)
        pose_residual = np.einsum("kia,k,ki->a", by_pose, weights, residual)
        absorbed = np.linalg.lstsq(pose_pose, np.column_stack([pose_offset, pose_residual]), rcond=None)[0]
        information = weights @ np.square(by_offset).sum(axis=1) - pose_offset @ absorbed[:, 0]
        moved = weights @ (by_offset * residual).sum(axis=1) - pose_offset @ absorbed[:, 1]
        if information > 0:
            self._information += information
            self._sum += moved + information * used


class Calibration:
    """A pinhole camera and the image size it is for: the one it names, or else that of the first frame.

    A frame of another size but the same shape is taken for a resized one, and the camera is rescaled to it.
    For a frame of another shape, which may be cropped anywhere, there is no camera.

    Raises:
        UsageError: a camera whose lens distorts.
    """

    def __init__(self, camera: Camera) -> None:
        if camera.distortion:
            raise UsageError(
                f"a tracker needs images without distortion, and the camera is {camera.model}: "
                "undistort them (cv2.undistort) and give the pinhole camera of the result"
            )
        self.camera, self._size = camera, camera.size

    def begin(self, size: tuple[int, int]) -> None:
        """The first frame has this (width, height)."""
        self._size = self._size or size

    def of(self, size: tuple[int, int]) -> Camera | None:
        """The camera of frames of a (width, height), or None where the shape differs."""
        if self._size is None or size == self._size:
            return replace(self.camera, size=size)
        scale = (size[0] / self._size[0], size[1] / self._size[1])
        if abs(scale[0] / scale[1] - 1) > 0.01:
            return None
        centre = resize_points(np.array([self.camera.cx, self.camera.cy]), scale)
        return Camera(self.camera.fx * scale[0], self.camera.fy * scale[1], *centre.tolist(), size=size)

    def pixels(self, points: np.ndarray, size: tuple[int, int]) -> np.ndarray | None:
        """(N, 2) float64: a frame's pixels as pixels of the camera; None where the shape differs."""
        points = points.astype(np.float64)
        if self.of(size) is None:
            return None
        if self._size is None or size == self._size:
            return points
        return resize_points(points, (self._size[0] / size[0], self._size[1] / size[1]))

    def coarseness(self, frame: KeptFrame) -> float:
        """Camera pixels for one pixel of the frame as its points were found."""
        width = frame.size[0] if self._size is None else self._size[0]
        return width / (frame.size[0] * frame.scale[0])


# --- From frame to frame.


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
        return "other_size" if self.calibration.of(frame.size) is None else self._settle(frame, np.eye(4))

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
        points = self._linked(keyframe, frame, links)
        if points is None:
            return "other_size", None
        find = self._with_measured if self._measured else self._with_one
        status, T = find(keyframe, frame, links.inliers[:, 0], *points)
        if T is not None and keyframe.world_from_cam is not None:
            self._settle(frame, keyframe.world_from_cam @ np.linalg.inv(T))
        return status, T

    def _linked(
        self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """The linked points (K, 2) of both in pixels of the camera; None where one has another shape."""
        sides = [self.calibration.pixels(f.keypoints, f.size) for f in (keyframe, frame)]
        if sides[0] is None or sides[1] is None:
            return None
        return sides[0][links.inliers[:, 0]], sides[1][links.inliers[:, 1]]

    def _with_measured(
        self,
        keyframe: KeptFrame,
        frame: KeptFrame,
        rows: np.ndarray,
        points0: np.ndarray,
        points1: np.ndarray,
    ) -> tuple[PoseStatus, np.ndarray | None]:
        """The pose from depths that pairs have measured; others are triangulated."""
        depths, scale = keyframe.depths[rows], self.calibration.coarseness(frame)
        T, agree = solve_pose(points0, depths, points1, self.camera, scale)
        if T is None:
            return "too_few", None
        if keyframe.measured is not None:
            given = keyframe.measured.disparities[rows]
            kept = agree & np.isfinite(given)
            measured = keyframe.measured._replace(disparities=given[kept])
            self.offset.observe(points0[kept], measured, points1[kept], T, self.camera, scale)
        unknown = ~np.isfinite(depths)
        new, _ = triangulate(points0[unknown], points1[unknown], T, self.camera, scale)
        keyframe.depths[rows[unknown]] = new
        return "ok", T

    def _with_one(
        self,
        keyframe: KeptFrame,
        frame: KeptFrame,
        rows: np.ndarray,
        points0: np.ndarray,
        points1: np.ndarray,
    ) -> tuple[PoseStatus, np.ndarray | None]:
        """The pose together with the depths, which each frame makes surer."""
        scale = self.calibration.coarseness(frame)
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
        sure = found.errors < 0.2 * found.inverse_depths  # up to this relative error a depth is known
        keyframe.depths[rows] = np.where(sure, 1 / found.inverse_depths, np.nan)
        keyframe.inverse_errors[rows] = np.where(sure, found.errors, np.nan)
        return "ok", found.cam1_from_cam0

    def _starts(
        self, points0: np.ndarray, depths: np.ndarray, points1: np.ndarray, scale: float
    ) -> Iterator[np.ndarray]:
        """Poses to adjust: from the depths, and where fewer than half agree, from all links."""
        T, agree = solve_pose(points0, depths, points1, self.camera, scale)
        if T is not None:
            yield T
        if agree.sum() >= 0.5 * np.count_nonzero(np.isfinite(depths)):
            return
        T, _ = self._essential(points0, points1, scale)
        if T is None:
            return
        ratios = depths / triangulate(points0, points1, T, self.camera, scale)[0]
        if np.isfinite(ratios).any():
            T[:3, 3] *= np.nanmedian(ratios)
            yield T

    def _start(
        self, keyframe: KeptFrame, frame: KeptFrame, points0: np.ndarray, points1: np.ndarray
    ) -> np.ndarray | None:
        """The pose by an essential matrix once three in ten points have a degree of parallax.

        Its baseline has the length last known.
        """
        T, inliers = self._essential(points0, points1, self.calibration.coarseness(frame))
        if T is None:
            return None
        _, angles = triangulate(points0[inliers], points1[inliers], T, self.camera)
        if np.mean(angles >= 1.0) < 0.3:
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

    def promote(self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks, T: np.ndarray | None) -> None:
        """Give a frame that becomes a keyframe the depths that the keyframe before it knows."""
        if T is None:
            return
        rows, here = links.inliers.T
        known = 1 / keyframe.depths[rows], keyframe.inverse_errors[rows]
        inverse, errors = carry(self._linked(keyframe, frame, links)[0], *known, T, self.camera)
        unknown = ~np.isfinite(frame.depths[here])
        frame.depths[here[unknown]] = 1 / inverse[unknown]
        frame.inverse_errors[here[unknown]] = errors[unknown]

    def relative(
        self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Pose from keyframe to frame, and world_from_cam, of a frame outside the sequence; nothing changes.

        Where the keyframe's depths are not known, the first has a translation of length 1 and the second is
        None; where no pose is found, both are None.
        """
        points = None if self.camera is None else self._linked(keyframe, frame, links)
        if points is None:
            return None, None
        scale = self.calibration.coarseness(frame)
        T, _ = solve_pose(points[0], keyframe.depths[links.inliers[:, 0]], points[1], self.camera, scale)
        if T is None:
            return self._essential(*points, scale)[0], None
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
            if frame.index - before != 1:
                # Over a gap of several frames the motion of one is only known roughly, by its share.
                share = np.eye(4)
                share[:3, 3] = step[:3, 3] / max(1, frame.index - before)
                step = share
            self._motion = step
        frame.world_from_cam = pose
        self._last = (frame.index, pose)
        return "ok"
