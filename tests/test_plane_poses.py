"""The two poses that a plane allows: both are found, and what lies off the plane decides."""

import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.verify import estimation as epipolar
from matcher.verify.adjustment import MatchedPoints
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


def views(rng, on_plane, beside, cam1_from_cam0, noise=0.0):
    """Matches of a slanted wall and of points before it."""
    points0 = rng.uniform((50, 50), (974, 718), (on_plane + beside, 2))
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


def test_a_plane_beyond_whose_horizon_the_first_pixel_lies(rng):
    """With H[2, 2] = 1 all matches would be behind."""
    true = pose(20.0)
    true[:3, 3] = (1.0, 0.5, 15.0)
    plane = np.outer(true[:3, 3], np.array([1.2, 1.0, 1.0]) / 3)
    H = CAMERAS[1].K @ (true[:3, :3] + plane) @ np.linalg.inv(CAMERAS[0].K)
    assert H[2, 2] < 0
    points0 = rng.uniform((500, 400), (1000, 750), (200, 2))
    moved = np.column_stack([points0, np.ones(200)]) @ H.T
    assert (moved[:, 2] > 0).all()
    matched = MatchedPoints(points0, moved[:, :2] / moved[:, 2:], np.full(200, 0.5))
    assert min(degrees_off(each, true) for each in poses_of_plane(matched, CAMERAS, 3.0)) < 0.1


def test_no_pose_of_a_rotation_or_of_no_plane(rng):
    points = views(rng, 200, 0, pose(step=0.0))
    matched = MatchedPoints(*points, np.full(200, 0.5))
    assert not list(poses_of_plane(matched, CAMERAS, 3.0))
    matched = MatchedPoints(np.zeros((8, 2)), np.ones((8, 2)), np.full(8, 0.5))
    assert not list(poses_of_plane(matched, CAMERAS, 3.0))


def test_what_lies_off_the_plane_decides(rng, monkeypatch):
    """Samples lead to the twin here; twelve matches beside the plane are likely with the right pose only."""
    points0, points1 = views(rng, 300, 12, pose(), noise=0.1)
    points1[100:300] = rng.uniform((0, 0), (800, 600), (200, 2))  # wrong, so that the first is not enough
    plane = MatchedPoints(points0[:100], points1[:100], np.full(100, 0.5))
    twin = max(poses_of_plane(plane, CAMERAS, 3.0), key=lambda each: degrees_off(each, pose()))

    def to_the_twin(matched, *_, **__):
        return twin, np.zeros(len(matched), dtype=bool)

    estimate = RobustEstimator(EstimationConfig(kind="essential"))
    monkeypatch.setattr(epipolar, "_sampled_pose", to_the_twin)
    covariances = np.tile(0.1**2 * np.eye(2), (312, 1, 1))
    found = estimate(points0, points1, cameras=CAMERAS, covariances=covariances)
    assert degrees_off(found.cam1_from_cam0, pose()) < 1
    monkeypatch.setattr(epipolar, "poses_of_plane", lambda *_: iter(()))
    found = estimate(points0, points1, cameras=CAMERAS, covariances=covariances)
    assert degrees_off(found.cam1_from_cam0, pose()) > 10
