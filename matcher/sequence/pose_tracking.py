"""Camera poses by the depths of a keyframe's points, and these depths by the poses.

Both are found together, each weighed by what is known of it. With two cameras depths are measured, and what
all disparities are short of is estimated from the motion; with one, the first keyframe's are triangulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import cv2
import numpy as np
import poselib

from matcher.cameras import Camera, check_size
from matcher.config import EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import resize_points
from matcher.sequence.frames import FrameLinks, KeptFrame, MeasuredDisparities, PoseStatus
from matcher.verify.estimation import RobustEstimator

MIN_POINTS = 12  # that agree with a pose
NOISE = 0.25  # pixels of the resized image that a refined link is off, both ends together
MOST_DOUBT, LEAST_AGREEMENT = 0.1, 2 / 3  # of a pose that is "ok"
REPEATED = 10  # observations that count as one: neighbouring points and frames share errors of lens and link


def rays(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 3) points of depth 1 seen at pixels (N, 2)."""
    return np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(camera.K).T


def project(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(N, 2) pixels of points (N, 3); those behind the camera are NaN."""
    z = np.where(points[:, 2:] > 1e-9, points[:, 2:], np.nan)
    return points[:, :2] / z * (camera.fx, camera.fy) + (camera.cx, camera.cy)


@dataclass(frozen=True, eq=False)
class LinkedPoints:
    """K points of a frame 0, and where frame 1 shows them."""

    rays0: np.ndarray  # (K, 3) of depth 1
    points1: np.ndarray  # (K, 2) pixels
    camera1: Camera
    scale: float = 1.0  # pixels of frame 1 for one of the resized image

    def __getitem__(self, rows: np.ndarray) -> LinkedPoints:
        return replace(self, rays0=self.rays0[rows], points1=self.points1[rows])

    def linearise(
        self, T: np.ndarray, inverse: np.ndarray, noise: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Residuals (K, 2), derivatives by the pose (K, 2, 6) and by inverse depths (K, 2), usable rows. All
        in units of the noise (pixels of the resized image). T, cam1_from_cam0, changes by exp(twist) · T,
        rotation first."""
        camera, unit = self.camera1, noise * self.scale
        seen = self.rays0 @ T[:3, :3].T + inverse[:, None] * T[:3, 3]
        usable = seen[:, 2] > 1e-6
        seen[~usable] = (0, 0, 1)
        error = (self.points1 - project(seen, camera)) / unit
        by_seen = np.zeros((len(seen), 2, 3))
        for row, focal in enumerate((camera.fx, camera.fy)):
            by_seen[:, row, row] = focal / unit / seen[:, 2]
            by_seen[:, row, 2] = -by_seen[:, row, row] * seen[:, row] / seen[:, 2]
        turn = np.cross(seen[:, None], by_seen)  # d(w × X) = w · (X × row)
        by_pose = np.concatenate([turn, by_seen * inverse[:, None, None]], axis=2)
        return error, by_pose, by_seen @ T[:3, 3], usable


def solve_pose(points: LinkedPoints, depths0: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """cam1_from_cam0 (4, 4) by depths (K,) in frame 0, NaN where unknown, or None (LO-RANSAC, PoseLib). And
    (K,) bool, points that agree within a pixel of the resized image."""
    inliers, camera = np.zeros(len(depths0), bool), points.camera1
    known = np.flatnonzero(np.isfinite(depths0))
    if len(known) < MIN_POINTS:
        return None, inliers
    pinhole = {"model": "PINHOLE", "width": 0, "height": 0, "params": list(camera.params)}
    # Links have been verified before, so that few are wrong.
    options = dict(max_iterations=2000, min_iterations=100, success_prob=0.9999, seed=0)
    options["max_reproj_error"] = points.scale
    refinement = {"loss_type": "CAUCHY", "loss_scale": NOISE * points.scale}
    seen, world = points.points1[known], points.rays0[known] * depths0[known, None]
    pose, report = poselib.estimate_absolute_pose(seen, world, pinhole, options, refinement)
    inliers[known] = np.asarray(report["inliers"], dtype=bool)
    T = np.vstack([pose.Rt, [0, 0, 0, 1]])
    if inliers.sum() < MIN_POINTS or not np.isfinite(T).all():
        return None, np.zeros(len(depths0), bool)
    return T, inliers


def triangulate(rays0: np.ndarray, rays1: np.ndarray, T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depths (K,) along z in frame 0 by rays of depth 1 and T, cam1_from_cam0, and the rays' angles, degrees.
    The midpoint of the shortest line between both rays (Hartley and Sturm 1997, section 5.3); NaN for points
    behind a camera, or seen at less than .6 degrees."""
    a, b, t = rays0 @ T[:3, :3].T, rays1, T[:3, 3]
    angles = np.rad2deg(np.arctan2(np.linalg.norm(np.cross(a, b), axis=1), np.sum(a * b, axis=1)))
    aa, bb, ab = np.sum(a * a, axis=1), np.sum(b * b, axis=1), np.sum(a * b, axis=1)
    apart = np.maximum(aa * bb - ab * ab, 1e-15)
    depths = (ab * (b @ t) - bb * (a @ t)) / apart  # least squares of depth0·a + t = depth1·b
    ahead = (depths > 0) & (aa * (b @ t) - ab * (a @ t) > 0)
    return np.where(ahead & (angles >= 0.6), depths, np.nan), angles


@dataclass(frozen=True, eq=False)
class JointPose:
    """What `adjust` finds."""

    cam1_from_cam0: np.ndarray  # (4, 4)
    inverse_depths: np.ndarray  # (K,) in frame 0; NaN where still unknown
    errors: np.ndarray  # (K,) their standard deviations
    agreeing: np.ndarray  # (K,) bool
    deviation: float  # standard deviation of the camera's position in its least certain direction
    shift: float  # by how much it moves where all inverse depths that were known are one larger


def adjust(
    points: LinkedPoints,
    inverse0: np.ndarray,
    errors0: np.ndarray,
    start: np.ndarray,
    doubtful: np.ndarray | None = None,
    share: float = 0.4,
) -> JointPose | None:
    """Pose and inverse depths that agree best with both frames and with what was known. Robust Gauss-Newton
    steps (Geman and McClure's loss) from `start`, cam1_from_cam0 in the unit of the depths; each inverse
    depth (NaN: unknown) is eliminated (Schur complement). Where none is known, the translation keeps its
    length. `doubtful` points do not move the pose; depths that are contradicted become twice as uncertain.
    None where fewer than 12 points, or than the `share`, agree within five deviations."""
    known = np.isfinite(inverse0) & (errors0 > 0)
    if known.any():
        typical = inverse0[known]
    else:
        typical = 1 / triangulate(points.rays0, rays(points.points1, points.camera1), start)[0]
    if not np.isfinite(typical).any():
        return None
    typical = float(np.nanmedian(typical))
    prior = np.where(known, inverse0, typical)
    certainty = np.where(known, errors0, 4.0 * typical) ** -2.0  # hardly any of one that nothing is known of

    def settled(T: np.ndarray, inverse: np.ndarray, rounds: int) -> np.ndarray:
        """The inverse depths for a pose that stays."""
        for _ in range(rounds):
            error, _, by_inverse, _ = points.linearise(T, inverse, NOISE)
            pull = (by_inverse * error).sum(1) + certainty * (prior - inverse)
            inverse = inverse + pull / ((by_inverse**2).sum(1) + certainty)
        return inverse

    def squares(error: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """(K,) squared deviations from the frame and from what was known."""
        return (error**2).sum(1) + certainty * (inverse - prior) ** 2

    T, inverse = start.copy(), settled(start, prior, rounds=3)
    counted = True if doubtful is None else ~doubtful
    for _ in range(8):
        error, by_pose, by_inverse, usable = points.linearise(T, inverse, NOISE)
        weights = counted * usable / (1 + squares(error, inverse) / 9) ** 2
        own = (by_inverse**2).sum(1) + certainty
        pull = (by_inverse * error).sum(1) + certainty * (prior - inverse)
        mixed = np.einsum("kip,ki->kp", by_pose, by_inverse)
        flat = (by_pose * weights[:, None, None]).reshape(-1, 6)
        hessian = flat.T @ by_pose.reshape(-1, 6) - (mixed * (weights / own)[:, None]).T @ mixed
        gradient = flat.T @ error.reshape(-1) - mixed.T @ (weights * pull / own)
        hessian[np.diag_indices(6)] *= 1 + 1e-6
        if not known.any():  # the length of the translation is a convention
            hessian[3:, 3:] += 1e8 * np.outer(T[:3, 3], T[:3, 3]) / (T[:3, 3] @ T[:3, 3]) ** 2
        step = np.linalg.lstsq(hessian, gradient, rcond=1e-12)[0]
        inverse = inverse + (pull - mixed @ step) / own
        change = np.eye(4)
        change[:3, :3], change[:3, 3] = cv2.Rodrigues(step[:3])[0], step[3:]
        T = change @ T
        if np.abs(step).max() < 1e-6:
            break
    inverse = settled(T, inverse, rounds=2)
    error, _, by_inverse, usable = points.linearise(T, inverse, NOISE)
    certain = 1 / np.sqrt((by_inverse**2).sum(1) + certainty)
    agreeing = usable & (squares(error, inverse) < 25.0) & (inverse > -2.0 * certain)
    if agreeing.sum() < max(MIN_POINTS, share * len(agreeing)) or not np.isfinite(T).all():
        return None
    values = np.where(agreeing, inverse, np.where(known, inverse0, np.nan))
    errors = np.where(agreeing, certain, 2.0 * errors0)
    # exp(twist) leaves the camera where it is, so its position is as uncertain as the translation: by what
    # the observations leave open, and by how well they fit (the a posteriori variance of unit weight).
    redundancy = agreeing.sum() + (agreeing & known).sum() - 6
    variance = squares(error, inverse)[agreeing].sum() / redundancy
    covariance = np.linalg.pinv(hessian)
    deviation = float(np.sqrt(REPEATED * variance * np.linalg.eigvalsh(covariance[3:, 3:])[-1]))
    shift = float(np.linalg.norm((covariance @ mixed.T @ (weights * known * certainty / own))[3:]))
    return JointPose(T, np.where(values > 0, values, np.nan), errors, agreeing, deviation, shift)


def standing_still(
    trials: list[JointPose], goes_on: list[bool], pixels: np.ndarray
) -> tuple[JointPose, bool]:
    """Of several motions that of the scene, and whether another may be it; cars move otherwise. A car fills a
    small part of space, so of the points (K, 2) that agree with one motion and not with another cells of 32
    pixels and an octave of depth count, twice if the motion goes on as before."""

    def support(one: int, other: int) -> float:
        first, second = trials[one], trials[other]
        only = first.agreeing & np.isfinite(first.inverse_depths) & ~second.agreeing
        cells = np.column_stack([pixels[only] / 32, np.log2(first.inverse_depths[only])])
        return len(np.unique(np.floor(cells), axis=0)) * (2.0 if goes_on[one] else 1.0)

    best = 0
    for other in range(1, len(trials)):
        best = other if support(other, best) > support(best, other) else best
    others = (other for other in range(len(trials)) if other != best)
    return trials[best], any(support(each, best) > max(3, support(best, each) / 2) for each in others)


class DisparityOffset:
    """What all disparities, in pixels, are short of, as cameras are not rectified exactly; by all frames."""

    def __init__(self) -> None:
        self.value, self.deviation = 0.0, 0.3  # to be added to measured disparities, before any frame is seen

    def observe(self, points: LinkedPoints, measured: MeasuredDisparities, T: np.ndarray) -> None:
        """Take in what a frame at cam1_from_cam0 says of the disparities `measured` of its points in frame 0.
        The pose is eliminated (Schur complement): a motion that does not show the offset, as a turn, adds
        0."""
        inverse = (measured.disparities + measured.offset) / measured.focal_baseline
        residual, by_pose, by_inverse, usable = points.linearise(T, inverse, NOISE / 2)
        usable &= inverse > 0
        if np.count_nonzero(usable) < MIN_POINTS / 2:
            return
        by_offset = by_inverse / measured.focal_baseline
        variance = 1 + np.square(measured.deviations[:, None] * by_offset).sum(axis=1)
        weights = usable / (REPEATED * variance * (1 + np.square(residual).sum(axis=1) / (4 * variance)))
        both = np.stack([by_offset, residual], axis=2)
        pose_both = np.einsum("kia,k,kib->ab", by_pose, weights, both)
        pose_pose = np.einsum("kia,k,kib->ab", by_pose, weights, by_pose)
        absorbed = np.linalg.lstsq(pose_pose, pose_both, rcond=None)[0]
        information, moved = np.einsum("ki,k,kib->b", by_offset, weights, both) - pose_both[:, 0] @ absorbed
        if information > 0:
            gain = information / (self.deviation**-2 + information)
            self.value += gain * (measured.offset + moved / information - self.value)
            self.deviation *= (1 - gain) ** 0.5


class PoseTracker:
    """Follows the pose from keyframe to frame and fills in the depths of keyframes; later ones inherit them.
    With one camera, the first keyframe's are triangulated once enough parallax shows and nearly all links
    agree; that first baseline is the unit of length."""

    def __init__(
        self, camera: Camera | None, baseline: float | None, estimation: EstimationConfig = EstimationConfig()
    ) -> None:
        """Without a camera there are no poses; `UsageError`: its lens distorts."""
        if camera is not None and camera.distortion:
            raise UsageError(f"undistort the {camera.model} images (cv2.undistort) and give their pinhole")
        self.camera, self.baseline = camera, baseline
        self._size = None if camera is None else camera.size  # that the camera is for
        self.offset = DisparityOffset()
        self._essential_matrix = RobustEstimator(replace(estimation, kind="essential"))
        self.doubt = 0.0  # standard deviation of the last position, by the last step or the baseline
        # Shorter steps, as of a camera that stands still, are judged as one of this length: the baseline, or
        # one camera's mean step while it began.
        self._least = baseline or 1.0
        self._last: tuple[int, np.ndarray, int] | None = None  # frame, its pose and stretch
        self._stretches = 0  # that have begun after the first
        self._motion = np.eye(4)  # of one frame in its own camera's coordinates
        self._sure = False  # whether it is to be relied on

    def camera_of(self, size: tuple[int, int]) -> Camera | None:
        """The camera of frames of a (width, height); None for another ratio: they may be cropped anywhere."""
        if self.camera is None:
            return None
        if self._size is None:
            check_size(self.camera, size)
            self._size = size
        scale = size[0] / self._size[0], size[1] / self._size[1]
        if abs(scale[0] / scale[1] - 1) > 0.01:
            return None
        centre = resize_points(np.array([self.camera.cx, self.camera.cy]), scale)
        return Camera(self.camera.fx * scale[0], self.camera.fy * scale[1], *centre.tolist(), size=size)

    def begin(self, frame: KeptFrame) -> PoseStatus:
        """The first frame, whose camera is the world."""
        if self.camera_of(frame.size) is None:
            return "no_camera" if self.camera is None else "other_size"
        return self._settle(frame, np.eye(4), 0.0, 0.0, False)

    def measure(self, frame: KeptFrame, right: np.ndarray, deviations: np.ndarray) -> None:
        """Set depths by points (N, 2) in the right image, and deviations (N,) of their x; NaN: unknown."""
        camera = self.camera_of(frame.size)
        if camera is None or self.baseline is None:
            return
        product, offset = self.camera.fx * self.baseline, self.offset
        step = frame.keypoints.astype(np.float64) - right
        with np.errstate(invalid="ignore"):  # none where rows differ, and below half a pixel: "far"
            good = (np.abs(step[:, 1]) <= 2.0) & (step[:, 0] >= 0.5)
        disparities = np.where(good, step[:, 0], np.nan) * (self.camera.fx / camera.fx)
        # Some are not located exactly, and no pixel stands for a point alone.
        located = np.where(np.isfinite(deviations), deviations, 0.3 / frame.scale[0])
        noise = np.hypot(located, 0.05 / frame.scale[0]) * self.camera.fx / camera.fx
        frame.measured = MeasuredDisparities(disparities, noise, offset.value, offset.deviation, product)
        frame.depths[:] = product / (disparities + offset.value)
        frame.inverse_errors[:] = np.where(np.isfinite(disparities), noise / product, np.nan)

    def locate(
        self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks
    ) -> tuple[PoseStatus, np.ndarray | None]:
        """Status and cam_from_keyframe of a frame that is linked to a keyframe; sets its pose. Depths of the
        keyframe's points are filled in, made surer, or forgotten where the frame disagrees."""
        cameras = self.camera_of(keyframe.size), self.camera_of(frame.size)
        if None in cameras:
            return "no_camera" if self.camera is None else "other_size", None
        rows, here = links.inliers.T
        points1, scale = frame.keypoints[here].astype(np.float64), 1 / frame.scale[0]
        points = LinkedPoints(rays(keyframe.keypoints[rows], cameras[0]), points1, cameras[1], scale)
        alone = self.baseline is None
        # The poses of frames hang together by the depths, so that what frames of one camera say of these has
        # errors in common: they improve depths, and only the next keyframe takes them for surer.
        errors = (keyframe.first_errors if alone else keyframe.inverse_errors)[rows]
        depths = keyframe.depths[rows]
        starting = np.count_nonzero(np.isfinite(depths)) < MIN_POINTS
        if starting and alone:
            depths, errors = np.full((2, len(rows)), np.nan)
            T, _, angles = self._essential(points)
            starts, step = [], float(np.linalg.norm(self._motion[:3, 3]))
            if np.mean(angles >= 1.0) >= 0.3:  # its baseline has the length last known
                T[:3, 3] *= step * (frame.index - keyframe.index) if step > 0 else 1.0
                starts = [(T, None)]
        else:
            starts = self._starts(points, depths)
        # What moves may show more points than what stands still. One camera cannot tell them apart: it begins
        # where nearly all is one scene. At true beginnings .87 of the links agreed or more, behind cars .82.
        share = (0.85 if starting else 0.4) if alone else 0.2
        trials: list[JointPose] = []
        for start, doubtful in starts:
            trial = adjust(points, 1 / depths, errors, start, doubtful, share)
            trials += [] if trial is None else [trial]
            if not alone and trial is not None and trial.agreeing.mean() >= 0.8:
                break
        if not trials:
            return "starting" if starting and alone else "too_few", None
        if alone:
            found, rivalled = max(trials, key=lambda trial: trial.agreeing.sum()), False
        else:
            known = self._sure and keyframe.world_from_cam is not None
            ways = (np.linalg.inv(trial.cam1_from_cam0) for trial in trials)
            goes_on = [known and not self._jumps(keyframe.world_from_cam @ way, frame.index) for way in ways]
            found, rivalled = standing_still(trials, goes_on, points1 / scale)
        T, measured, common = found.cam1_from_cam0, keyframe.measured, 0.0
        way = float(np.linalg.norm(T[:3, 3]))
        frame.stretch = keyframe.stretch
        if alone:  # points that this step shows first have a unit as uncertain as its length
            frame.unit_doubt = max(keyframe.unit_doubt, found.deviation / max(1.0, way))
            self._least = way / (frame.index - keyframe.index) if starting else self._least
        learnt = np.ones(len(rows), bool)  # from frames, where no pair has measured it
        if measured is not None:
            common = found.shift * measured.offset_error / measured.focal_baseline / max(self.baseline, way)
            learnt = np.isnan(measured.disparities[rows])
            kept = rows[seen := found.agreeing & ~learnt]
            known = dict(disparities=measured.disparities[kept], deviations=measured.deviations[kept])
            self.offset.observe(points[seen], measured._replace(**known), T)
        sure = learnt & (found.errors < 0.2 * found.inverse_depths)  # up to this error a depth is known
        keyframe.depths[rows[learnt]], keyframe.inverse_errors[rows[learnt]] = np.nan, np.nan
        keyframe.depths[rows[sure]] = 1 / found.inverse_depths[sure]
        keyframe.inverse_errors[rows[sure]] = found.errors[sure]
        if starting:
            keyframe.first_errors[:] = keyframe.inverse_errors
        if keyframe.world_from_cam is None:
            return "ok", T
        begins = starting and alone  # two views, which nothing confirms yet
        doubted = rivalled or begins or found.agreeing.mean() < LEAST_AGREEMENT
        doubted |= keyframe.unit_doubt > MOST_DOUBT / 5  # which bends depths, and these bend later steps more
        pose = keyframe.world_from_cam @ np.linalg.inv(T)
        return self._settle(frame, pose, found.deviation, common, doubted), T

    def _jumps(self, pose: np.ndarray, index: int) -> bool:
        """Whether the way to a frame is not as the last motion: cameras hardly stop at once."""
        before, step = self._motion[:3, 3], np.linalg.inv(self._last[1]) @ pose
        change = np.linalg.norm(step[:3, 3] / max(1, index - self._last[0]) - before)
        return change > max(np.linalg.norm(before), self.baseline or 1.0) / 2

    def _starts(
        self, points: LinkedPoints, depths: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Poses to adjust, the first from the depths, and points that are not to move them. Where one camera
        made these and fewer than half agree, one from all links; where pairs measured them, two from the
        points that do not agree with it, which may be a car's."""
        T, agree = solve_pose(points, depths)
        if T is not None:
            yield T, ~agree if self.baseline else None
        others = ~agree if self.baseline else np.ones(len(depths), bool)
        if self.baseline:
            T, also = solve_pose(points, np.where(others, depths, np.nan))
            if T is not None:
                yield T, ~also
        elif agree.sum() >= 0.5 * np.count_nonzero(np.isfinite(depths)):
            return
        T, found, _ = self._essential(points[others])
        ratios = depths[others] / found
        if np.isfinite(ratios).any():
            T[:3, 3] *= np.nanmedian(ratios)
            yield T, agree if self.baseline else None

    def _essential(self, points: LinkedPoints) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """cam1_from_cam0 (4, 4) of unit translation, and depths (K,) and angles of `triangulate`, or NaN."""
        given, cameras = (project(points.rays0, points.camera1), points.points1), (points.camera1,) * 2
        geometry = self._essential_matrix(*given, cameras=cameras, thresholds_scale=points.scale)
        if geometry.status != "ok":
            return np.eye(4), *np.full((2, len(points.rays0)), np.nan)
        T = geometry.cam1_from_cam0.copy()
        return T, *triangulate(points.rays0, rays(points.points1, points.camera1), T)

    def promote(self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks, T: np.ndarray | None) -> None:
        """Give a frame that becomes a keyframe the depths that the keyframe before it knows."""
        if T is None:
            return
        rows, here = links.inliers.T
        rows = rows[unknown := ~np.isfinite(frame.depths[here])]
        inverse = 1 / keyframe.depths[rows]
        turned = rays(keyframe.keypoints[rows], self.camera_of(keyframe.size)) @ T[2, :3]
        ahead = turned + inverse * T[2, 3]
        ahead = np.where(ahead > 0, ahead, np.nan)
        frame.depths[here[unknown]] = ahead / inverse
        frame.inverse_errors[here[unknown]] = keyframe.inverse_errors[rows] * np.abs(turned) / ahead**2
        frame.first_errors[:] = frame.inverse_errors

    def bridge(self, frame: KeptFrame) -> PoseStatus:
        """After a loss, extrapolate the last motion, so that the path continues: a guess."""
        if self.camera is None:
            return "no_camera"
        if self._last is None:
            return "starting"
        before, pose, _ = self._last
        self._stretches += 1
        frame.stretch, frame.unit_doubt = self._stretches, 0.0
        frame.world_from_cam = pose @ np.linalg.matrix_power(self._motion, frame.index - before)
        return "bridged"

    def _settle(
        self, frame: KeptFrame, pose: np.ndarray, deviation: float, common: float, doubted: bool
    ) -> PoseStatus:
        """Take a frame's pose, whose position has a `deviation`, and all lengths a `common` share."""
        length, least = self.baseline or 1.0, self._least
        moved = self._last is not None and self._last[2] == frame.stretch  # and not partly by a guess
        if moved:
            frames = frame.index - self._last[0]
            step = np.linalg.inv(self._last[1]) @ pose
            moving = np.linalg.norm(self._motion[:3, 3]) > length
            doubted = doubted or (moving and self._jumps(pose, frame.index))
            length, least = np.maximum((length, least), np.linalg.norm(step[:3, 3])).tolist()
            if frames != 1:  # over a gap the motion of one frame is only known roughly, by its share
                step[:3, :3], step[:3, 3] = np.eye(3), step[:3, 3] / max(1, frames)
            self._motion = step
        frame.world_from_cam, self._last = pose, (frame.index, pose, frame.stretch)
        self.doubt = deviation / length
        sure = not doubted and self.doubt <= MOST_DOUBT
        self._sure = sure and moved
        return "ok" if sure and np.hypot(deviation / least, common) <= MOST_DOUBT else "uncertain"
