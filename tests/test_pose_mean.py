"""The mean of poses that explain the matches about equally well."""

import cv2
import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.verify.adjustment import (
    Hypothesis,
    MatchedPoints,
    TwoViewModel,
    degrees_apart,
    fundamental_from_pose,
    likeliest,
    mean_pose,
    sampson,
)
from matcher.verify.estimation import estimated_essential


def pose(degrees, direction=(1.0, 0, 0)):
    """Rotated about y by degrees, translated along `direction`."""
    found = np.eye(4)
    found[:3, :3] = cv2.Rodrigues(np.array([0, np.deg2rad(degrees), 0]))[0]
    found[:3, 3] = np.array(direction) / np.linalg.norm(direction)
    return found


def hypotheses(*rows):
    return [
        Hypothesis(TwoViewModel(np.eye(3), np.ones(1, bool), p), likelihood, 0.5) for p, likelihood in rows
    ]


def test_equally_likely_poses_have_their_mean():
    found = hypotheses((pose(10, (1, 0.05, 0)), 40.0), (pose(14, (1, -0.05, 0)), 40.0))
    mean = mean_pose(found, found[0])
    np.testing.assert_allclose(mean, pose(12), atol=1e-9)
    assert np.linalg.det(mean[:3, :3]) == pytest.approx(1)


def test_unlikely_poses_hardly_count_and_those_far_away_do_not():
    best, worse = pose(10), pose(14)
    found = hypotheses((best, 400.0), (worse, 200.0), (pose(10, (-1, 0, 0)), 400.0), (pose(40), 400.0))
    assert degrees_apart(mean_pose(found, found[0]), best) < 0.01
    assert mean_pose(found[:1] + found[2:], found[0]) is None  # no other is near


def test_hypotheses_without_a_likelihood_are_left_out():
    found = hypotheses((pose(12), np.nan), (pose(10), 3.0), (pose(11), np.nan))
    assert likeliest(found) is found[1] and likeliest(found[:1]) is None
    assert mean_pose(found, found[1]) is None


def test_the_pose_of_matches_is_the_mean_and_its_inliers_are_counted_anew(rng, monkeypatch):
    camera, found = Camera(500.0, 500.0, 320.0, 240.0), []
    matched = _seen(camera, pose(8, (1, 0.1, 0.2)), rng)

    def shifted(hypotheses, best):
        found.append(mean_pose(hypotheses, best))
        return pose(8.5, (1, 0.1, 0.2))

    model = estimated_essential(matched, (camera, camera), 1.5, 0)
    monkeypatch.setattr("matcher.verify.estimation.mean_pose", shifted)
    other = estimated_essential(matched, (camera, camera), 1.5, 0)
    np.testing.assert_array_equal(model.cam1_from_cam0, found[0])
    np.testing.assert_array_equal(other.cam1_from_cam0, pose(8.5, (1, 0.1, 0.2)))
    for each in (model, other):
        fundamental = fundamental_from_pose(camera.K, camera.K, each.cam1_from_cam0)
        within = sampson(*matched.sides, fundamental) <= 1.5
        assert (each.inliers <= within).all() and each.inliers.sum() > 0.9 * within.sum()
    assert not np.array_equal(model.inliers, other.inliers)


def _seen(camera, truth, rng):
    """120 matches of points between depths 4 and 6, two thirds of them right within a pixel."""
    points = np.column_stack([rng.uniform(-1.5, 1.5, (120, 2)), rng.uniform(4, 6, 120)])
    sides = []
    for cam in (np.eye(4), truth):
        seen = (points @ cam[:3, :3].T + cam[:3, 3]) @ camera.K.T
        sides.append(seen[:, :2] / seen[:, 2:] + rng.normal(0, 0.5, (120, 2)))
    sides[1][80:] = rng.uniform(0, 480, (40, 2))
    return MatchedPoints(*sides, np.where(np.arange(120) < 80, 0.8, 0.3))
