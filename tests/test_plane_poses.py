"""The two poses that a plane allows: both are found, and what lies off the plane decides."""

import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.geometry import warp_points
from matcher.verify.adjustment import MatchedPoints, fundamental_from_pose, plane_answers, sampson
from matcher.verify.estimation import RobustEstimator
from matcher.verify.homography import poses_of_plane

CAMERAS = Camera(800.0, 780.0, 512.0, 384.0), Camera(600.0, 610.0, 400.0, 300.0)


def pose(degrees=35.0, step=1.0):
    """From one side of a scene three units away to the other."""
    angle, cam1_from_cam0 = np.radians(degrees), np.eye(4)
    cam1_from_cam0[:3, :3] = [
        [np.cos(angle), 0, np.sin(angle)],
        [0, 1, 0],
        [-np.sin(angle), 0, np.cos(angle)],
    ]
    cam1_from_cam0[:3, 3] = step * (np.array([0, 0, 3.0]) - cam1_from_cam0[:3, :3] @ [0, 0, 3.0])
    return cam1_from_cam0


def views(rng, on_plane, beside, cam1_from_cam0, noise=0.0, area=((50, 50), (974, 718))):
    """Matches of a slanted wall and of points before it, in an area of image 0."""
    points0 = rng.uniform(*area, (on_plane + beside, 2))
    rays = np.column_stack([points0, np.ones(len(points0))]) @ np.linalg.inv(CAMERAS[0].K).T
    depth = 3 / (1 + rays @ [0.3, 0.4, 0.0])
    depth[on_plane:] *= rng.uniform(0.6, 0.9, beside)
    scene = depth[:, None] * rays @ cam1_from_cam0[:3, :3].T + cam1_from_cam0[:3, 3]
    projected = scene @ CAMERAS[1].K.T
    return points0, projected[:, :2] / projected[:, 2:] + rng.normal(0, noise, (len(points0), 2))


def degrees_off(found, true):
    cosines = (
        (np.trace(found[:3, :3].T @ true[:3, :3]) - 1) / 2,
        found[:3, 3] @ true[:3, 3] / np.linalg.norm(true[:3, 3]),
    )
    return float(np.degrees(np.arccos(np.clip(cosines, -1, 1))).max())


def test_the_right_pose_and_its_twin(rng):
    points = views(rng, 200, 0, pose())
    found = list(poses_of_plane(MatchedPoints(*points, np.full(200, 0.5)), CAMERAS, 3.0))
    off = sorted(degrees_off(each, pose()) for each in found)
    assert off[0] < 0.01 and off[-1] > 10
    assert all(np.linalg.norm(each[:3, 3]) == pytest.approx(1) for each in found)


def estimated(kind, points0, points1):
    cameras = CAMERAS if kind == "essential" else None
    return RobustEstimator(EstimationConfig(kind=kind))(points0, points1, cameras=cameras)


PART = ((500, 350), (900, 700))  # of image 0, which both poses of the wall have in front of the cameras


def test_a_plane_alone_leaves_both_poses(rng):
    points = views(rng, 300, 0, pose(), noise=0.2, area=PART)
    found = estimated("essential", *points)
    assert found.status == "ambiguous" and found.verified and found.planar
    assert found.cam1_from_cam0 is None and found.matrix is None and found.inliers.mean() > 0.95
    off = sorted(degrees_off(each, pose()) for each in found.alternatives)
    assert len(off) == 2 and off[0] < 3 and off[1] > 10
    answers = plane_answers(*points, found, CAMERAS)  # for drawings: the scene as each pose has it
    assert not plane_answers(*points, found, None)
    right = min(answers, key=lambda each: degrees_off(each[0], pose()))[1]
    residual = np.linalg.svd(right - right.mean(axis=0))[1][2] / np.sqrt(len(right))
    assert len(right) == found.inliers.sum() and residual < 0.1 * right[:, 2].mean()
    again = found.without_rejected()
    assert again.verified and again.inliers.sum() == found.inliers.sum()
    assert found.to_dict()["planar"] and len(found.to_dict()["alternatives"]) == 2


def test_a_pose_that_has_half_of_the_plane_behind_a_camera_is_none(rng):
    found = estimated("essential", *views(rng, 300, 0, pose(), noise=0.2))
    assert found.status == "ok" and found.planar and degrees_off(found.cam1_from_cam0, pose()) < 3


@pytest.mark.parametrize("kind", ["essential", "fundamental"])
def test_what_lies_off_the_plane_decides(rng, kind):
    points0, points1 = views(rng, 300, 14, pose(), noise=0.2, area=PART)
    points1[:60] = rng.uniform((0, 0), (800, 600), (60, 2))  # wrong
    found = estimated(kind, points0, points1)
    assert found.status == "ok" and found.planar
    true = fundamental_from_pose(CAMERAS[0].K, CAMERAS[1].K, pose())
    assert np.median(sampson(points0[-14:], points1[-14:], true)) < 0.5
    if kind == "essential":
        assert degrees_off(found.cam1_from_cam0, pose()) < 3 and found.evidence > 5
    else:
        assert np.median(sampson(points0[-14:], points1[-14:], found.matrix)) < 1


def test_no_fundamental_matrix_of_a_plane_but_its_homography(rng):
    points0, points1 = views(rng, 300, 0, pose(), noise=0.2)
    points1[:90] = rng.uniform((0, 0), (800, 600), (90, 2))
    found = estimated("fundamental", points0, points1)
    assert found.status == "degenerate" and found.verified and found.matrix is None
    assert np.abs(warp_points(points0, found.homography) - points1)[90:].max() < 2
    assert found.inliers[90:].all() and found.inliers[:90].mean() < 0.1
