"""What all disparities of a pair are short of, because its cameras are not rectified exactly.

A few hundredths of a degree between the cameras shift every disparity by tenths of a pixel, and lengths with
them: at 15 pixels .2 of a pixel are more than one per cent. Rows do not show such a shift, motion does. When
the camera moves, near and far points agree on how far only if all disparities are right (Krešo and Šegvić
2015, "Improving the egomotion estimation by correcting the calibration bias", with true poses; here without).
"""

from __future__ import annotations

import numpy as np

from matcher.data.camera import Camera
from matcher.sequence.odometry import move, project, rays

_PRIOR = 0.3  # standard deviation of the offset before anything was seen, pixels of the camera
_NOISE = 0.3  # of a disparity and of a position, pixels of the image as points were found
# Observations that count as one: the frames linked to a keyframe repeat the errors of its disparities, and
# neighbouring points those of the lens.
_DEPENDENT = 10.0


class DisparityOffset:
    """The offset, in pixels of the camera, estimated from every frame whose pose was found."""

    def __init__(self) -> None:
        self._information, self._sum = 1 / _PRIOR**2, 0.0

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
        disparities0: np.ndarray,
        used: float,
        points1: np.ndarray,
        cam1_from_cam0: np.ndarray,
        camera: Camera,
        focal_baseline: float,
        scale: float = 1.0,
    ) -> None:
        """Take in what one frame says of the disparities of an earlier one.

        The pose is estimated along with the offset and eliminated (the Schur complement), so that a motion
        which does not show the offset, such as a turn, says nothing.

        Args:
            points0: (K, 2) pixels of the camera in the earlier frame.
            disparities0: (K,) measured there, without the offset.
            used: the offset with which the pose was found.
            points1: (K, 2) where the frame shows the points that agree with the pose.
            cam1_from_cam0: (4, 4).
            camera: of both.
            focal_baseline: depth times disparity.
            scale: camera pixels for one of the image as points were found.
        """
        depths = focal_baseline / (disparities0 + used)
        found = move(rays(points0, camera) * depths[:, None], cam1_from_cam0)
        ahead = (found[:, 2] > 0) & (depths > 0)
        if np.count_nonzero(ahead) < 6:
            return
        found, points0, depths, points1 = (each[ahead] for each in (found, points0, depths, points1))
        residual = points1 - project(found, camera)
        slopes = _slopes(found, camera)
        turned = rays(points0, camera) @ cam1_from_cam0[:3, :3].T  # change of a point with its depth
        by_offset = np.einsum("kij,kj->ki", slopes, turned) * (-(depths**2) / focal_baseline)[:, None]
        by_pose = np.concatenate([np.cross(found[:, None], slopes), slopes], axis=2)
        variance = (_NOISE * scale) ** 2 * (1 + np.square(by_offset).sum(axis=1))
        weights = 1 / (_DEPENDENT * variance * (1 + np.square(residual).sum(axis=1) / (4 * variance)))
        pose_pose = np.einsum("kia,k,kib->ab", by_pose, weights, by_pose)
        pose_offset = np.einsum("kia,k,ki->a", by_pose, weights, by_offset)
        pose_residual = np.einsum("kia,k,ki->a", by_pose, weights, residual)
        absorbed = np.linalg.lstsq(pose_pose, np.column_stack([pose_offset, pose_residual]), rcond=None)[0]
        information = weights @ np.square(by_offset).sum(axis=1) - pose_offset @ absorbed[:, 0]
        moved = weights @ (by_offset * residual).sum(axis=1) - pose_offset @ absorbed[:, 1]
        if information > 0:
            self._information += information
            self._sum += moved + information * used


def _slopes(points: np.ndarray, camera: Camera) -> np.ndarray:
    """(K, 2, 3) derivatives of pixels by the coordinates of points (K, 3)."""
    inverse = 1 / points[:, 2]
    found = np.zeros((len(points), 2, 3))
    found[:, 0, 0], found[:, 1, 1] = camera.fx * inverse, camera.fy * inverse
    found[:, 0, 2] = -camera.fx * points[:, 0] * inverse**2
    found[:, 1, 2] = -camera.fy * points[:, 1] * inverse**2
    return found
