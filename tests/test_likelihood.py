"""Which of several hypotheses of a two-view geometry is kept, and what match probabilities do to it."""

import cv2
import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.geometry import warp_points
from matcher.verify.adjustment import (
    Hypothesis,
    MatchedPoints,
    Spread,
    TwoViewModel,
    degrees_apart,
    fundamental_from_pose,
    likeliest,
    mean_pose,
    sampson,
)
from matcher.verify.estimation import RobustEstimator
from matcher.verify.verdict import epipolar_likelihood

CAMERA = Camera(800.0, 800.0, 512.0, 384.0)
SIZE = (1024, 768)


def pose(turn=0.0):
    """A step to the right and ahead, with the second camera turned about its vertical axis."""
    cam1_from_cam0, angle = np.eye(4), np.radians(8 + turn)
    cam1_from_cam0[:3, :3] = [
        [np.cos(angle), 0, np.sin(angle)],
        [0, 1, 0],
        [-np.sin(angle), 0, np.cos(angle)],
    ]
    cam1_from_cam0[:3, 3] = np.array([0.9, 0.1, 0.4]) / np.linalg.norm([0.9, 0.1, 0.4])
    return cam1_from_cam0


def views(rng, true, wrong, noise, depth=(3.0, 8.0)):
    """Matches of a scene, the right ones first."""
    points0 = rng.uniform(0, SIZE, (true + wrong, 2))
    rays = np.column_stack([points0, np.ones(true + wrong)]) @ np.linalg.inv(CAMERA.K).T
    scene = rays * rng.uniform(*depth, (true + wrong, 1)) @ pose()[:3, :3].T + pose()[:3, 3]
    projected = scene @ CAMERA.K.T
    points1 = projected[:, :2] / projected[:, 2:] + rng.normal(0, noise, (true + wrong, 2))
    points1[true:] = rng.uniform(0, SIZE, (wrong, 2))
    return points0, points1


def estimate(kind, points0, points1, **options):
    cameras = (CAMERA, CAMERA) if kind == "essential" else None
    return RobustEstimator(EstimationConfig(kind=kind))(points0, points1, cameras=cameras, **options)


def degrees_off(found):
    """The larger of the errors of rotation and direction."""
    cosines = ((np.trace(found[:3, :3].T @ pose()[:3, :3]) - 1) / 2, found[:3, 3] @ pose()[:3, 3])
    return float(np.degrees(np.arccos(np.clip(cosines, -1, 1))).max())


def test_the_exact_one_of_two_models_is_likelier_though_fewer_matches_are_near_it(rng):
    """Numbers of inliers would choose the other one."""
    points0, points1 = views(rng, 300, 100, 0.05)
    exact, other = (fundamental_from_pose(CAMERA.K, CAMERA.K, pose(turn)) for turn in (0.0, 0.12))
    # Wrong matches lie 1.8 pixels from the lines of the other model, beyond those of the exact one.
    lines, beside = (np.column_stack([points0[300:], np.ones(100)]) @ model.T for model in (other, exact))
    lines /= np.linalg.norm(lines[:, :2], axis=1, keepdims=True)
    normals = lines[:, :2]
    offsets = np.sum(points1[300:] * normals, axis=1) + lines[:, 2]
    on_line = points1[300:] - offsets[:, None] * normals
    away = np.sign(np.sum(on_line * beside[:, :2], axis=1) + beside[:, 2])
    away *= np.sign(np.sum(normals * beside[:, :2], axis=1))
    points1[300:] = on_line + 1.8 * away[:, None] * normals
    near = [np.count_nonzero(sampson(points0, points1, model) < 1.5) for model in (exact, other)]
    assert near[1] > near[0]
    covariances = np.tile(0.05**2 * np.eye(2), (400, 1, 1))
    spread, probable = Spread.of(covariances, 400), np.full(400, 0.5)
    likely = [
        epipolar_likelihood(model, MatchedPoints(points0, points1, probable), spread)
        for model in (exact, other)
    ]
    assert likely[0] > likely[1] + 20


def test_a_match_counts_as_much_as_it_is_probable_exact_and_possible(rng):
    points0, points1 = views(rng, 50, 0, 0.0)
    model, spread = fundamental_from_pose(CAMERA.K, CAMERA.K, pose()), Spread.of(None, 50)

    def likely(probability, spread=spread, possible=None, shift=0.0):
        probable = np.full(50, probability)
        matched = MatchedPoints(points0, points1 + np.array([0.0, shift]), probable)
        return epipolar_likelihood(model, matched, spread, possible)

    assert likely(0.9) > likely(0.5) > likely(0.1) > 0
    assert likely(0.5, Spread.of(np.tile(0.01 * np.eye(2), (50, 1, 1)), 50)) > likely(0.5)
    assert likely(0.9, possible=np.zeros(50, bool)) == pytest.approx(50 * np.log(0.1))
    assert likely(0.9, shift=100.0) == pytest.approx(50 * np.log(0.1))  # all far from their lines


def test_a_homography_of_few_probable_matches_is_found(rng):
    """Two in a hundred are right; MAGSAC++, which draws matches at random, does not find them."""
    H = np.array([[0.9, 0.1, 30.0], [-0.1, 1.0, 20.0], [1e-4, 0.0, 1.0]])
    points0, points1 = rng.uniform(0, SIZE, (2, 2000, 2))
    points1[:40] = warp_points(points0[:40], H) + rng.normal(0, 0.3, (40, 2))
    assert estimate("homography", points0, points1).status != "ok"
    found = estimate("homography", points0, points1, scores=np.where(np.arange(2000) < 40, 0.9, 0.05))
    assert found.status == "ok" and found.inliers[:40].mean() > 0.95
    corners = np.array([[0.0, 0.0], [1023.0, 0.0], [0.0, 767.0], [1023.0, 767.0]])
    assert np.linalg.norm(warp_points(corners, found.matrix) - warp_points(corners, H), axis=1).max() < 3


def test_exact_matches_give_an_exact_pose_and_coarse_ones_a_pose(rng):
    points0, points1 = views(rng, 60, 140, 0.03)
    covariances = np.tile(0.03**2 * np.eye(2), (200, 1, 1))
    found = estimate("essential", points0, points1, covariances=covariances)
    assert degrees_off(found.cam1_from_cam0) < 0.1
    points0, points1 = views(rng, 150, 100, 1.5)
    assert degrees_off(estimate("essential", points0, points1).cam1_from_cam0) < 3


def test_probable_matches_are_enough_among_many_improbable_ones(rng):
    """One in seventeen is right: no sample of five of them is drawn by chance."""
    points0, points1 = views(rng, 70, 1130, 0.2)
    scores = np.where(np.arange(1200) < 70, 0.9, 0.05)
    order = rng.permutation(1200)
    points0, points1, scores = points0[order], points1[order], scores[order]
    right = scores > 0.5
    without = estimate("essential", points0, points1)
    assert without.status != "ok" or without.inliers[right].mean() < 0.5
    found = estimate("essential", points0, points1, scores=scores)
    assert found.status == "ok" and found.inliers[right].mean() > 0.9
    assert degrees_off(found.cam1_from_cam0) < 1


def turned(degrees, direction=(1.0, 0.0, 0.0)):
    """A pose rotated about y, translated along a direction."""
    found = np.eye(4)
    found[:3, :3] = cv2.Rodrigues(np.array([0, np.deg2rad(degrees), 0]))[0]
    found[:3, 3] = np.array(direction) / np.linalg.norm(direction)
    return found


def test_poses_that_are_about_equally_likely_have_their_mean():
    def hypotheses(*rows):
        inliers = np.ones(1, bool)
        return [Hypothesis(TwoViewModel(np.eye(3), inliers, each), likely, 0.5) for each, likely in rows]

    found = hypotheses((turned(10, (1, 0.05, 0)), 40.0), (turned(14, (1, -0.05, 0)), 40.0))
    np.testing.assert_allclose(mean_pose(found, found[0]), turned(12), atol=1e-9)
    best, far = (turned(10), 400.0), (turned(40), 400.0)
    found = hypotheses(best, (turned(14), 200.0), (turned(10, (-1, 0, 0)), 400.0), far)
    assert degrees_apart(mean_pose(found, found[0]), best[0]) < 0.01
    assert mean_pose(found[:1] + found[2:], found[0]) is None  # no other is near
    found = hypotheses((turned(12), np.nan), (turned(10), 3.0), (turned(11), np.nan))
    assert likeliest(found) is found[1] and likeliest(found[:1]) is None
    assert mean_pose(found, found[1]) is None
