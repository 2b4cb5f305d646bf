"""Robust geometry against synthetic truth, and every input that must not yield a model."""

import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import warp_points
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose
from matcher.verify.estimation import RobustEstimator

CAMERA = Camera(800.0, 820.0, 510.0, 390.0)
OTHER = Camera(700.0, 690.0, 500.0, 370.0)
KINDS = ("homography", "fundamental", "essential")
H_TRUE = np.array([[0.9, 0.12, 30.0], [-0.1, 1.05, -20.0], [1e-4, -5e-5, 1.0]])
CORNERS = np.array([[0.0, 0.0], [1023.0, 0.0], [0.0, 767.0], [1023.0, 767.0]])


def estimate(kind, points0, points1, **options):
    settings = {key: options.pop(key) for key in ("min_inliers",) if key in options}
    if kind == "essential":
        options.setdefault("cameras", (CAMERA, OTHER))
    return RobustEstimator(EstimationConfig(kind=kind, **settings))(points0, points1, **options)


def rotation(axis, degrees):
    axis = np.asarray(axis, dtype=float) / np.linalg.norm(axis)
    cross = np.cross(np.eye(3), axis)
    angle = np.radians(degrees)
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def pose(baseline=1.0):
    cam1_from_cam0 = np.eye(4)
    cam1_from_cam0[:3, :3] = rotation((0.3, 1.0, 0.2), 12)
    cam1_from_cam0[:3, 3] = baseline * np.array([0.8, -0.1, 0.3])
    return cam1_from_cam0


def two_views(rng, count=400, outliers=0.4, noise=0.5, cam1_from_cam0=None):
    """Points of a scene 3 to 8 deep in both images, some replaced; the clean ones; which are true."""
    cam1_from_cam0 = pose() if cam1_from_cam0 is None else cam1_from_cam0
    clean0 = rng.uniform(0, (1024, 768), (count, 2))
    rays = np.column_stack([clean0, np.ones(count)]) @ np.linalg.inv(CAMERA.K).T
    scene = rays * rng.uniform(3, 8, (count, 1)) @ cam1_from_cam0[:3, :3].T + cam1_from_cam0[:3, 3]
    projected = scene @ OTHER.K.T
    clean1 = projected[:, :2] / projected[:, 2:]
    points0, points1 = (clean + noise * rng.normal(size=clean.shape) for clean in (clean0, clean1))
    true = rng.random(count) >= outliers
    points1[~true] = rng.uniform(0, (1024, 768), ((~true).sum(), 2))
    return points0, points1, clean0, clean1, true


def plane_views(rng, count=300, outliers=0.5, noise=0.5):
    clean0 = rng.uniform(0, (1024, 768), (count, 2))
    points0, points1 = clean0.copy(), warp_points(clean0, H_TRUE) + noise * rng.normal(size=(count, 2))
    true = rng.random(count) >= outliers
    points1[~true] = rng.uniform(0, (1024, 768), ((~true).sum(), 2))
    return points0, points1, true


def degrees_between(R, S):
    return np.degrees(np.arccos(np.clip((np.trace(R.T @ S) - 1) / 2, -1, 1)))


# --- synthetic truth ---


@pytest.mark.parametrize(("outliers", "scale"), [(0.0, 4.0), (0.8, 1.0)])
def test_homography_is_recovered(rng, outliers, scale):
    points0, points1, true = plane_views(rng, outliers=outliers)
    found = estimate("homography", points0 * scale, points1 * scale, thresholds_scale=scale)
    assert found.status == "ok" and found.kind == "homography" and found.cam1_from_cam0 is None
    assert found.matrix.dtype == np.float64 and found.matrix[2, 2] == 1
    error = warp_points(CORNERS * scale, found.matrix) / scale - warp_points(CORNERS, H_TRUE)
    assert np.abs(error).max() < 1.0
    assert found.inliers[true].mean() > 0.99 and found.inliers[~true].sum() <= 6


@pytest.mark.parametrize(("outliers", "scale"), [(0.0, 4.0), (0.6, 1.0)])
def test_fundamental_is_recovered(rng, outliers, scale):
    points0, points1, clean0, clean1, true = two_views(rng, outliers=outliers)
    found = estimate("fundamental", points0 * scale, points1 * scale, thresholds_scale=scale)
    assert found.status == "ok" and found.cam1_from_cam0 is None
    assert np.linalg.norm(found.matrix) == pytest.approx(1)
    assert abs(np.linalg.det(found.matrix)) < 1e-9
    assert epipolar_distance(clean0 * scale, clean1 * scale, found.matrix).mean() / scale < 0.4
    assert found.inliers[true].mean() > 0.95 and found.inliers[~true].sum() <= 12


@pytest.mark.parametrize(("outliers", "scale"), [(0.0, 4.0), (0.75, 1.0)])
def test_essential_and_pose_are_recovered(rng, outliers, scale):
    points0, points1, clean0, clean1, true = two_views(rng, outliers=outliers)
    cameras = [Camera(*(scale * v for v in (c.fx, c.fy, c.cx, c.cy))) for c in (CAMERA, OTHER)]
    found = estimate("essential", points0 * scale, points1 * scale, cameras=cameras, thresholds_scale=scale)
    assert found.status == "ok"
    cam1_from_cam0, truth = found.cam1_from_cam0, pose()
    assert degrees_between(cam1_from_cam0[:3, :3], truth[:3, :3]) < 0.3
    direction = truth[:3, 3] / np.linalg.norm(truth[:3, 3])
    assert np.linalg.norm(cam1_from_cam0[:3, 3]) == pytest.approx(1)
    assert (
        np.degrees(np.arccos(np.clip(cam1_from_cam0[:3, 3] @ direction, -1, 1))) < 1.5
    )  # the sign is right, too
    assert np.array_equal(cam1_from_cam0[3], [0, 0, 0, 1])
    expected = np.cross(np.eye(3), cam1_from_cam0[:3, 3]) @ cam1_from_cam0[:3, :3]
    assert np.allclose(found.matrix, expected / np.linalg.norm(expected), atol=1e-12)
    K0, K1 = cameras[0].K, cameras[1].K
    fundamental = fundamental_from_pose(K0, K1, cam1_from_cam0)
    assert epipolar_distance(clean0 * scale, clean1 * scale, fundamental).mean() / scale < 0.3
    assert found.inliers[true].mean() > 0.95 and found.inliers[~true].sum() <= 12


def test_homography_whose_first_pixel_lies_beyond_the_horizon(rng):
    H = CAMERA.K @ rotation((1, 0, 0), 70) @ np.linalg.inv(CAMERA.K)  # tilted far down
    points0 = rng.uniform((0, 450), (1024, 768), (200, 2))
    points1 = warp_points(points0, H)
    found = estimate("homography", points0, points1 + 0.3 * rng.normal(size=(200, 2)))
    assert found.status == "ok" and found.inliers.all() and found.matrix[2, 2] == -1
    assert np.abs(warp_points(points0, found.matrix) - points1).max() < 1


# --- properties ---


@pytest.mark.parametrize("kind", KINDS)
def test_same_answer_twice_and_in_any_order(rng, kind):
    points0, points1, *_ = two_views(rng)
    first, second = estimate(kind, points0, points1), estimate(kind, points0, points1)
    order = rng.permutation(len(points0))
    third = estimate(kind, points0[order], points1[order])
    for other, inliers in ((second, first.inliers), (third, first.inliers[order])):
        assert other.status == first.status and np.array_equal(other.inliers, inliers)
        assert np.array_equal(other.matrix, first.matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_rows_change_nothing_and_are_no_inliers(rng, kind):
    points0, points1, *_ = two_views(rng)
    expected = estimate(kind, points0, points1)
    rows = np.array([3, 50, 200, 201])
    bad0, bad1 = np.insert(points0, rows, 5.0, axis=0), np.insert(points1, rows, 5.0, axis=0)
    where = rows + np.arange(4)
    bad0[where[0], 1], bad0[where[1], 0], bad1[where[2]], bad1[where[3], 0] = np.nan, np.inf, -np.inf, 1e300
    found = estimate(kind, bad0, bad1)
    assert found.inliers.shape == (len(points0) + 4,) and found.inliers.dtype == bool
    assert not found.inliers[where].any()
    assert np.array_equal(np.delete(found.inliers, where), expected.inliers)
    assert np.array_equal(found.matrix, expected.matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_share_their_fate(rng, kind):
    points0, points1, *_ = two_views(rng)
    expected = estimate(kind, points0, points1)
    rows = rng.integers(0, len(points0), 900)
    found = estimate(kind, np.concatenate([points0, points0[rows]]), np.concatenate([points1, points1[rows]]))
    assert np.array_equal(found.inliers, np.concatenate([expected.inliers, expected.inliers[rows]]))
    assert np.array_equal(found.matrix, expected.matrix)


# --- no model, and why ---


def no_model(found, status, count):
    assert found.status == status
    assert found.matrix is None and found.cam1_from_cam0 is None
    assert found.inliers.shape == (count,) and found.inliers.dtype == bool and not found.inliers.any()


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_distinct_points(rng, kind):
    minimum = {"homography": 4, "fundamental": 7, "essential": 5}[kind]
    points0, points1, *_ = two_views(rng, count=minimum, outliers=0)
    for count in range(minimum + 1):
        no_model(estimate(kind, points0[:count], points1[:count]), "too_few", count)
    no_model(estimate(kind, np.tile(points0, (9, 1)), np.tile(points1, (9, 1))), "too_few", 9 * minimum)
    no_model(estimate(kind, np.full((50, 2), np.nan), np.zeros((50, 2))), "too_few", 50)


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_inliers_among_outliers(rng, kind):
    along = rng.uniform(0, 900, 150)
    line = np.column_stack([along, 0.4 * along + 100])
    points0 = np.concatenate([line, rng.uniform(0, 700, (60, 2))])
    points1 = np.concatenate([line * 1.1 + 11, rng.uniform(0, 700, (60, 2))])
    no_model(estimate(kind, points0, points1), "degenerate", 210)


@pytest.mark.parametrize(("noise", "outliers", "turn"), [(0.0, 0.0, 15.0), (0.5, 0.3, 0.0), (0.5, 0.3, 15.0)])
def test_rotation_alone_has_no_pose(rng, noise, outliers, turn):
    cam1_from_cam0 = np.eye(4)
    cam1_from_cam0[:3, :3] = rotation((0.2, 1.0, 0.1), turn)
    points0, points1, *_ = two_views(rng, noise=noise, outliers=outliers, cam1_from_cam0=cam1_from_cam0)
    for kind in ("essential", "fundamental"):
        found = estimate(kind, points0, points1)
        assert found.status == "degenerate" and found.matrix is None and found.cam1_from_cam0 is None
        assert found.verified and found.planar
    expected = estimate("homography", points0, points1)
    assert expected.status == "ok" and np.mean(expected.inliers == found.inliers) > 0.95


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [12, 60, 1000])
def test_chance_is_never_ok(rng, kind, count):
    for _ in range(2):
        points0, points1 = rng.uniform(0, (1024, 768), (2, count, 2))
        assert estimate(kind, points0, points1).status in ("low_inliers", "no_model", "degenerate")


@pytest.mark.parametrize("kind", KINDS)
def test_low_inliers_still_gives_the_model(rng, kind):
    points0, points1, *_ = two_views(rng, count=30, outliers=0)
    if kind == "homography":
        points1 = warp_points(points0, H_TRUE)
    assert estimate(kind, points0, points1, min_inliers=20).status == "ok"
    found = estimate(kind, points0, points1, min_inliers=31)
    assert found.status == "low_inliers" and found.inliers.sum() > 20
    assert np.isfinite(found.matrix).all() and (found.cam1_from_cam0 is not None) == (kind == "essential")
    twice = estimate(kind, np.tile(points0, (2, 1)), np.tile(points1, (2, 1)), min_inliers=31)
    assert twice.status == "low_inliers"  # copies are no evidence


def test_wrong_arguments(rng):
    points0, points1, *_ = two_views(rng)
    with pytest.raises(UsageError, match="cameras"):
        estimate("essential", points0, points1, cameras=None)
    for scale in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(UsageError, match="thresholds_scale"):
            estimate("fundamental", points0, points1, thresholds_scale=scale)
    with pytest.raises(UsageError, match=r"\(400, 2\) and \(399, 2\)"):
        estimate("fundamental", points0, points1[1:])
    with pytest.raises(UsageError, match=r"\(K, 2\)"):
        estimate("fundamental", points0.T, points1.T)
    with pytest.raises(UsageError, match="real numbers"):
        estimate("fundamental", points0.astype(complex), points1)
