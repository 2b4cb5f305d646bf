"""Camera poses from the depths of a keyframe; with one camera these are triangulated first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from matcher.config import EstimationConfig
from matcher.data.camera import Camera
from matcher.sequence.calibration import Calibration
from matcher.sequence.disparity_offset import DisparityOffset
from matcher.sequence.frames import FrameLinks, PoseStatus
from matcher.sequence.joint_pose import adjust, carry, errors_seen
from matcher.sequence.keyframes import KeptFrame, MeasuredDisparities
from matcher.sequence.odometry import MIN_POINTS, solve_pose, triangulate
from matcher.sequence.stereo import depths_of
from matcher.verify.estimation import RobustEstimator

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
