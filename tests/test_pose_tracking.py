"""Poses from depths and depths from poses; with one camera both together; what disparities are short of."""

import cv2
import numpy as np
import pytest
from street_scene import BASELINE
from street_scene import CAMERA as STREET_CAMERA
from street_scene import SIZE as STREET_SIZE

from matcher.cameras import Camera
from matcher.sequence.frames import FrameLinks, MeasuredDisparities
from matcher.sequence.pose_tracking import (
    DisparityOffset,
    adjust,
    carry,
    errors_seen,
    move,
    project,
    rays,
    solve_pose,
    triangulate,
)
from matcher.sequence.stereo import depths_of, partners, within

CAMERA = Camera(500, 500, 320, 240)
COUNT, WRONG = 400, 30
PRODUCT = STREET_CAMERA.fx * BASELINE
AHEAD, ASIDE = (0.02, -0.01, 0.9), (0.9, 0.0, 0.0)


def rotation(axis: tuple[float, float, float], degrees: float) -> np.ndarray:
    vector = np.array(axis) / np.linalg.norm(axis)
    return cv2.Rodrigues(np.deg2rad(degrees) * vector)[0]


def test_depth_comes_from_disparity_and_rows_must_agree():
    points = np.array([[100, 50], [100, 60], [100, 70], [100, 80], [100, 90]], np.float32)
    others = np.array([[90, 50.5], [90, 65], [110, 70], [99.9, 80]], np.float32)
    indices = np.column_stack([np.arange(4), np.arange(4)])
    links = FrameLinks(0, indices, np.ones(4, np.float32), np.ones(4, bool))
    right = partners(points, others, links)
    np.testing.assert_array_equal(right[:4], others)
    assert np.isnan(right[4]).all()
    depths = depths_of(points, right, focal=500.0, baseline=0.5)
    assert depths[0] == pytest.approx(25.0)
    assert np.isnan(depths[1:]).all()
    windowed = within(points, right, 2.0)
    assert np.isfinite(windowed[:, 0]).tolist() == [True, False, False, True, False]
    doubtful = FrameLinks(0, indices, links.scores, np.array([False, True, True, True]))
    assert np.isnan(partners(points, others, doubtful)[0]).all()


def test_pose_and_depth_of_a_made_up_scene(rng):
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = rotation((0.2, 1, 0.1), 4), (0.4, -0.1, 0.3)
    points = rng.uniform([0, 0], [640, 480], (200, 2))
    depths = rng.uniform(3, 10, 200)
    world = rays(points, CAMERA) * depths[:, None]
    seen = project(move(world, T), CAMERA)
    noisy = seen + rng.normal(0, 0.3, seen.shape)
    noisy[:40] = rng.uniform([0, 0], [640, 480], (40, 2))
    unknown = depths.copy()
    unknown[100:120] = np.nan
    found, inliers = solve_pose(points, unknown, noisy, CAMERA)
    np.testing.assert_allclose(found, T, atol=0.02)
    assert not inliers[:40].sum() > 4 and inliers[40:100].mean() > 0.9 and not inliers[100:120].any()
    back, angles = triangulate(points, seen, T, CAMERA)
    np.testing.assert_allclose(back[np.isfinite(back)], depths[np.isfinite(back)], rtol=1e-6)
    assert np.isfinite(back).mean() > 0.9 and angles.min() >= 0
    assert solve_pose(points[:11], depths[:11], seen[:11], CAMERA)[0] is None
    assert np.isnan(triangulate(points, points, np.eye(4), CAMERA)[0]).all()


@pytest.fixture
def scene(rng):
    """Points of two frames, their inverse depths, the pose between them."""
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = rotation((0.2, 1, 0.1), 6), (0.4, 0.05, 0.2)
    points0 = rng.uniform([40, 40], [600, 440], (COUNT, 2))
    inverse = 1 / rng.uniform(3, 20, COUNT)
    seen = project(move(rays(points0, CAMERA) / inverse[:, None], T), CAMERA)
    points1 = seen + rng.normal(0, 0.4, seen.shape)
    points1[:WRONG] += rng.choice([-1, 1], (WRONG, 2)) * rng.uniform(15, 40, (WRONG, 2))
    return points0, inverse, points1, T


def test_uncertain_depths_do_not_spoil_the_pose(scene, rng):
    points0, inverse, points1, T = scene
    errors = 0.2 * inverse
    prior = inverse + rng.normal(0, 1, COUNT) * errors
    prior[200:], errors[200:] = np.nan, np.nan  # of half of them nothing is known
    start, _ = solve_pose(points0, 1 / prior, points1, CAMERA)
    found = adjust(points0, prior, errors, points1, start, CAMERA)
    assert not found.agreeing[:WRONG].any() and found.agreeing[WRONG:].mean() > 0.98
    off = [np.linalg.norm(pose[:3, 3] - T[:3, 3]) for pose in (start, found.cam1_from_cam0)]
    assert off[1] < 0.015 < off[0]
    good = found.agreeing
    better = np.abs(found.inverse_depths - inverse)[good] / inverse[good]
    assert np.median(better) < 0.03
    deviations = np.abs(found.inverse_depths - inverse)[good] / found.errors[good]
    assert 0.4 < np.median(deviations) < 1.0  # .67 where errors are what they say
    assert np.isfinite(found.inverse_depths[200:]).mean() > 0.9
    kept = np.isfinite(prior) & ~good
    np.testing.assert_allclose(found.errors[kept], 2 * errors[kept])  # contradicted: less sure than before


def test_a_point_without_parallax_stays_unknown(scene):
    points0, inverse, _, T = scene
    turned = T.copy()
    turned[:3, 3] = 0
    points1 = project(move(rays(points0, CAMERA) / inverse[:, None], turned), CAMERA)
    prior, errors = inverse.copy(), 0.05 * inverse
    prior[200:], errors[200:] = np.nan, np.nan
    found = adjust(points0, prior, errors, points1, turned, CAMERA)
    np.testing.assert_allclose(found.cam1_from_cam0, turned, atol=1e-4)
    assert (found.errors[200:] > found.inverse_depths[200:]).all()
    np.testing.assert_allclose(found.errors[:200], errors[:200], rtol=0.01)


def test_nonsense_has_no_pose(scene, rng):
    points0, inverse, points1, T = scene
    points1 = rng.permutation(points1)
    assert adjust(points0, inverse, 0.1 * inverse, points1, T, CAMERA) is None


def test_inverse_depths_are_carried_to_the_next_frame(scene, rng):
    points0, inverse, _, T = scene
    errors = 0.01 * inverse
    found, spread = carry(points0, inverse, errors, T, CAMERA)
    depths = move(rays(points0, CAMERA) / inverse[:, None], T)[:, 2]
    np.testing.assert_allclose(1 / found, depths)
    moved, _ = carry(points0, inverse + errors, errors, T, CAMERA)
    np.testing.assert_allclose(np.abs(moved - found), spread, rtol=0.02)
    behind = np.diag([-1.0, 1, -1, 1])
    assert np.isnan(carry(points0, inverse, errors, behind, CAMERA)[0]).all()


def test_errors_of_triangulated_depths_are_what_they_say(scene):
    points0, inverse, _, T = scene
    exact = project(move(rays(points0, CAMERA) / inverse[:, None], T), CAMERA)
    spread = errors_seen(points0, inverse, exact, T, CAMERA)
    further = project(move(rays(points0, CAMERA) / (inverse + spread)[:, None], T), CAMERA)
    np.testing.assert_allclose(np.linalg.norm(further - exact, axis=1), 0.5, rtol=0.05)  # the assumed noise


def motion(step, angle=0.02):
    """(4, 4) cam1_from_cam0 of a camera that moves by `step` (3,) and turns about its vertical axis."""
    T = np.eye(4)
    T[:3, :3] = cv2.Rodrigues(np.array([0.0, angle, 0.0]))[0]
    T[:3, 3] = -T[:3, :3] @ np.array(step)
    return T


def seen(step, short, frames=12, noise=0.2, wrong_pose=False):
    """An estimate after frames of points at 4 to 60 m, whose measured disparities are all `short`."""
    rng, offset = np.random.default_rng(1), DisparityOffset()
    for _ in range(frames):
        points0 = rng.uniform((0, 0), STREET_SIZE, (400, 2))
        disparities = PRODUCT / np.exp(rng.uniform(np.log(4), np.log(60), 400))
        T = motion(step)
        world = rays(points0, STREET_CAMERA) * (PRODUCT / disparities)[:, None]
        points1 = project(move(world, T), STREET_CAMERA) + rng.normal(0, noise, (400, 2))
        if wrong_pose:
            T = motion(np.array(step) * 1.01, 0.0205)
        measured = disparities - short + rng.normal(0, noise, 400)
        offset.observe(
            points0, MeasuredDisparities(measured, offset.value, PRODUCT), points1, T, STREET_CAMERA
        )
    return offset


@pytest.mark.parametrize("short", [-0.2, 0.0, 0.3])
@pytest.mark.parametrize("wrong_pose", [False, True])
def test_motion_ahead_shows_the_offset(short, wrong_pose):
    found = seen(AHEAD, short, wrong_pose=wrong_pose)
    assert abs(found.value - short) < 0.07
    assert found.deviation < 0.1


def test_a_turn_does_not_show_it_and_a_step_aside_hardly():
    still, aside, ahead = (seen(step, 0.3, frames=3) for step in ((0, 0, 0), ASIDE, AHEAD))
    assert abs(still.value) < 0.01 and still.deviation > 0.299
    assert 0 < aside.value < ahead.value < 0.32
    assert aside.deviation > 1.2 * ahead.deviation


def test_few_points_and_points_behind_say_nothing():
    offset = DisparityOffset()
    points = np.tile([[200.0, 80.0]], (8, 1))
    for count, way in ((8, (0, 0, 50.0)), (3, AHEAD)):
        measured = MeasuredDisparities(np.full(count, 20.0), 0.0, PRODUCT)
        offset.observe(points[:count], measured, points[:count], motion(way), STREET_CAMERA)
    assert offset.value == 0 and offset.deviation == pytest.approx(0.3)
