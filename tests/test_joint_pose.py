"""Pose and depths of one camera, found together."""

import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.sequence.pose_tracking import adjust, carry, errors_seen
from matcher.sequence.stereo import move, project, rays, solve_pose
from tests.test_sequence_parts import rotation

CAMERA = Camera(500, 500, 320, 240)
COUNT, WRONG = 400, 30


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
