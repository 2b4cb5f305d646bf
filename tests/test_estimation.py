"""Robust geometry against synthetic truth, weighed by how exact matches are; inputs that yield no model."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import warp_points
from matcher.pipeline import Pipeline
from matcher.types import Features, Matches, MatchRefinement, TwoViewGeometry
from matcher.verify.adjustment import (
    Hypothesis,
    MatchedPoints,
    degrees_apart,
    epipolar_distance,
    fundamental_from_pose,
    in_front,
    likeliest,
    mean_pose,
    sampson,
)
from matcher.verify.estimation import RobustEstimator
from matcher.verify.likelihood import epipolar_likelihood

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
    return cv2.Rodrigues(np.radians(degrees) * np.array(axis) / np.linalg.norm(axis))[0]


def pose(baseline=1.0, turn=12.0):
    cam1_from_cam0 = np.eye(4)
    cam1_from_cam0[:3, :3] = rotation((0.3, 1.0, 0.2), turn)
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


def degrees_off(found):
    """The errors of rotation and direction of a pose."""
    true = pose(1 / np.linalg.norm(pose()[:3, 3]))
    cosines = ((np.trace(found[:3, :3].T @ true[:3, :3]) - 1) / 2, found[:3, 3] @ true[:3, 3])
    return np.degrees(np.arccos(np.clip(cosines, -1, 1)))


# --- synthetic truth ---


@pytest.mark.parametrize(("outliers", "scale"), [(0.0, 4.0), (0.8, 1.0)])
def test_homography_is_recovered(rng, outliers, scale):
    points0, points1 = scene("homography", rng, 300)
    points1 = points1 + 0.5 * rng.normal(size=(300, 2))
    true = rng.random(300) >= outliers
    points1[~true] = rng.uniform(0, (1024, 768), ((~true).sum(), 2))
    found = estimate("homography", points0 * scale, points1 * scale, thresholds_scale=scale)
    assert found.status == "ok" and found.kind == "homography" and found.cam1_from_cam0 is None
    assert found.matrix.dtype == np.float64 and found.matrix[2, 2] == 1
    error = warp_points(CORNERS * scale, found.matrix) / scale - warp_points(CORNERS, H_TRUE)
    assert np.abs(error).max() < 1.0
    assert found.inliers[true].mean() > 0.99 and found.inliers[~true].sum() <= 6


@pytest.mark.parametrize(
    ("kind", "outliers", "scale"),
    [("fundamental", 0.0, 4.0), ("fundamental", 0.6, 1.0), ("essential", 0.0, 4.0), ("essential", 0.75, 1.0)],
)
def test_epipolar_geometry_is_recovered(rng, kind, outliers, scale):
    points0, points1, clean0, clean1, true = two_views(rng, outliers=outliers)
    cameras = [Camera(*(scale * v for v in (c.fx, c.fy, c.cx, c.cy))) for c in (CAMERA, OTHER)]
    found = estimate(kind, points0 * scale, points1 * scale, cameras=cameras, thresholds_scale=scale)
    assert found.status == "ok"
    assert found.inliers[true].mean() > 0.95 and found.inliers[~true].sum() <= 12
    fundamental, cam1_from_cam0 = found.matrix, found.cam1_from_cam0
    if kind == "essential":
        turned, off = degrees_off(cam1_from_cam0)
        assert turned < 0.3 and off < 1.5  # the sign is right, too
        assert np.linalg.norm(cam1_from_cam0[:3, 3]) == pytest.approx(1)
        assert np.array_equal(cam1_from_cam0[3], [0, 0, 0, 1])
        expected = np.cross(np.eye(3), cam1_from_cam0[:3, 3]) @ cam1_from_cam0[:3, :3]
        assert np.allclose(found.matrix, expected / np.linalg.norm(expected), atol=1e-12)
        fundamental = fundamental_from_pose(cameras[0].K, cameras[1].K, cam1_from_cam0)
    else:
        assert cam1_from_cam0 is None
        assert np.linalg.norm(fundamental) == pytest.approx(1) and abs(np.linalg.det(fundamental)) < 1e-9
    away = epipolar_distance(clean0 * scale, clean1 * scale, fundamental).mean() / scale
    assert away < (0.3 if kind == "essential" else 0.4)


def test_homography_whose_first_pixel_lies_beyond_the_horizon(rng):
    H = CAMERA.K @ rotation((1, 0, 0), 70) @ np.linalg.inv(CAMERA.K)  # tilted far down
    points0 = rng.uniform((0, 450), (1024, 768), (200, 2))
    points1 = warp_points(points0, H)
    found = estimate("homography", points0, points1 + 0.3 * rng.normal(size=(200, 2)))
    assert found.status == "ok" and found.inliers.all() and found.matrix[2, 2] == -1
    assert np.abs(warp_points(points0, found.matrix) - points1).max() < 1


# --- properties ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", [False, True])
def test_same_answer_twice_and_in_any_order(rng, kind, known):
    points0, points1, *_ = two_views(rng)
    order = rng.permutation(len(points0))
    covariances = spread(rng, len(points0), 0.1, 1.0, "by match") if known else None
    first, second = (estimate(kind, points0, points1, covariances=covariances) for _ in range(2))
    moved = covariances[order] if known else None
    third = estimate(kind, points0[order], points1[order], covariances=moved)
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
    for scale in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(UsageError, match="thresholds_scale"):
            estimate("fundamental", points0, points1, thresholds_scale=scale)
    for kind, given, named in (
        ("essential", (points0, points1), "cameras"),
        ("fundamental", (points0, points1[1:]), r"\(400, 2\) and \(399, 2\)"),
        ("fundamental", (points0.T, points1.T), r"\(K, 2\)"),
        ("fundamental", (points0.astype(complex), points1), "real numbers"),
    ):
        with pytest.raises(UsageError, match=named):
            estimate(kind, *given, cameras=None)


# --- Matches are weighed by how exactly their positions are known.


def scene(kind: str, rng: np.random.Generator, count: int = 200):
    """Exact matches of a plane or of a scene in depth."""
    if kind == "homography":
        points = rng.uniform(0, (1024, 768), (count, 2))
        return points, warp_points(points, H_TRUE)
    _, _, clean0, clean1, _ = two_views(rng, count, outliers=0.0)
    return clean0, clean1


def spread(rng: np.random.Generator, count: int, exact: float, coarse: float, kind: str) -> np.ndarray:
    """Covariances (N, 2, 2): of some matches small and of others large, or large along one direction."""
    if kind == "by match":
        deviations = np.where(rng.random((count, 1)) < 0.4, exact, coarse)
        return np.eye(2) * deviations[:, None] ** 2
    angle = rng.uniform(0, np.pi, count)
    along = np.stack([np.cos(angle), np.sin(angle)], 1)
    across = np.stack([-np.sin(angle), np.cos(angle)], 1)
    outer = [np.einsum("ni,nj->nij", side, side) for side in (along, across)]
    return coarse**2 * outer[0] + exact**2 * outer[1]


def error(kind: str, geometry) -> float:
    """Pixels at the corners, or from the true epipolar lines of other points, or degrees."""
    if kind == "homography":
        moved = [warp_points(CORNERS, matrix) for matrix in (geometry.matrix, H_TRUE)]
        return float(np.linalg.norm(moved[0] - moved[1], axis=1).max())
    if kind == "fundamental":
        _, _, clean0, clean1, _ = two_views(np.random.default_rng(5), 500)
        return float(np.mean(epipolar_distance(clean0, clean1, geometry.matrix)))
    return float(degrees_off(geometry.cam1_from_cam0).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("differ", ["by match", "by direction"])
def test_models_are_more_exact_where_covariances_are_known(kind, differ):
    with_them, without = [], []
    for seed in range(9):
        rng = np.random.default_rng(seed)
        points0, points1 = scene(kind, rng)
        covariances = spread(rng, len(points0), 0.05, 1.0, differ)
        noise = np.linalg.cholesky(covariances) @ rng.normal(size=(len(points0), 2, 1))
        given = points0, points1 + noise[..., 0]
        with_them.append(error(kind, estimate(kind, *given, covariances=covariances)))
        without.append(error(kind, estimate(kind, *given)))
    assert np.median(with_them) < 0.75 * np.median(without)


@pytest.mark.parametrize("kind", KINDS)
def test_probable_matches_count_for_more(kind):
    """Half of the matches are improbable, and lie off by as much, all in one direction."""
    with_scores, without = [], []
    for seed in range(9):
        rng = np.random.default_rng(seed)
        points0, points1 = scene(kind, rng)
        improbable = rng.random(len(points0)) < 0.5
        points1 = points1 + 0.1 * rng.normal(size=points1.shape) + 0.5 * improbable[:, None]
        covariances = np.tile(0.05**2 * np.eye(2), (len(points0), 1, 1))
        scores = np.where(improbable, 0.05, 0.9)
        for scores_, errors in ((scores, with_scores), (None, without)):
            found = estimate(kind, points0, points1, covariances=covariances, scores=scores_)
            errors.append(error(kind, found))
    assert np.median(with_scores) < 0.8 * np.median(without)


def test_the_scale_of_pixels_does_not_matter(rng):
    """Stored pixels that are half as large as those of the resized image."""
    points0, points1 = scene("homography", rng)
    covariances = spread(rng, len(points0), 0.1, 1.0, "by match")
    points1 = points1 + 0.3 * rng.normal(size=points1.shape)
    first = estimate("homography", points0, points1, covariances=covariances)
    options = {"covariances": 4 * covariances, "thresholds_scale": 2.0}
    halved, scale = estimate("homography", 2 * points0, 2 * points1, **options), np.diag([2.0, 2.0, 1.0])
    np.testing.assert_allclose(halved.matrix, scale @ first.matrix @ np.linalg.inv(scale), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_matches_that_repeat_or_are_not_finite_do_no_harm(kind, rng):
    points0, points1 = scene(kind, rng)
    points0, points1 = np.concatenate([points0, points0[:5]]), np.concatenate([points1, points1[:5]])
    points1[7] = np.nan
    covariances = np.tile(0.01 * np.eye(2), (len(points0), 1, 1))
    covariances[7], covariances[9], covariances[11] = np.nan, [[1, 5], [5, 1]], np.diag([np.inf, -1])
    found = estimate(kind, points0, points1, covariances=covariances)
    assert found.status == "ok" and found.inliers.sum() == len(points0) - 1
    assert error(kind, found) < 1e-3
    with pytest.raises(UsageError, match=r"covariances of 205 matches must be \(205, 2, 2\)"):
        estimate(kind, points0, points1, covariances=covariances[:-1])


def test_a_fundamental_matrix_is_refined_also_without_covariances():
    own, theirs = [], []
    for seed in range(9):
        points0, points1, _, _, true = two_views(np.random.default_rng(seed), 300, outliers=0.3)
        found = estimate("fundamental", points0, points1)
        matrix, _ = cv2.findFundamentalMat(points0, points1, cv2.USAC_MAGSAC, 1.0, 0.9999, 10000)
        own.append(error("fundamental", found))
        theirs.append(error("fundamental", replace(found, matrix=matrix)))
        assert np.linalg.svd(found.matrix)[1][2] < 1e-9 and found.inliers[true].mean() > 0.75
    assert np.median(own) < 0.8 * np.median(theirs)


def test_inliers_of_a_weighed_pose_are_its_own():
    config = EstimationConfig(kind="essential")
    for seed in range(5):
        rng = np.random.default_rng(seed)
        points0, points1, _, clean1, true = two_views(rng, 300, outliers=0.3, noise=0.8)
        covariances = np.where(np.arange(300) % 3 == 0, 0.02, 1.0)[:, None, None] * np.eye(2)
        points1[true & (np.arange(300) % 3 == 0)] = clean1[true & (np.arange(300) % 3 == 0)]
        found = estimate("essential", points0, points1, covariances=covariances)
        known = tuple(np.linalg.inv(camera.K) for camera in (CAMERA, OTHER))
        matrix = fundamental_from_pose(CAMERA.K, OTHER.K, found.cam1_from_cam0)
        near = sampson(points0, points1, matrix) <= config.max_epipolar_error
        front = in_front(points0, points1, known, found.cam1_from_cam0)
        np.testing.assert_array_equal(found.inliers, near & front)
        assert found.inliers[true].mean() > 0.6


class Asked(RobustEstimator):
    """Keeps what it was asked."""

    def __call__(self, points0, points1, **options):
        type(self).given = options
        return super().__call__(points0, points1, **options)


@pytest.mark.parametrize("takes", [True, False])
def test_a_pipeline_hands_covariances_to_estimators_that_take_them(takes, rng, monkeypatch):
    monkeypatch.setattr(Asked, "takes_covariances", takes)
    points0, points1 = (side.astype(np.float32) for side in scene("homography", rng, 40))
    features = [Features(abs(side), np.eye(40), size=(1200, 1000), kind="own") for side in (points0, points1)]
    covariances = np.tile(np.eye(2, dtype=np.float32), (40, 1, 1))
    known = MatchRefinement(np.zeros(40, np.uint8), covariances, np.ones(40, np.float32))
    matches = Matches(np.tile(np.arange(40)[:, None], 2), points0, points1, np.ones(40, np.float32))
    pipeline = Pipeline(estimator=Asked(EstimationConfig(kind="homography")))
    assert pipeline.verify(*features, matches).status == "ok" and "covariances" not in Asked.given
    assert pipeline.verify(*features, replace(matches, refinement=known)).status == "ok"
    assert ("covariances" in Asked.given) == takes


# --- Which of several hypotheses is kept, and what match probabilities do to it.


def likely_views(rng, true, wrong, noise):
    """Matches of a scene, the right ones first."""
    points0, points1 = scene("essential", rng, true + wrong)
    points1 = points1 + rng.normal(0, noise, points1.shape)
    points1[true:] = rng.uniform(0, (1024, 768), (wrong, 2))
    return points0, points1


def test_the_exact_one_of_two_models_is_likelier_though_fewer_matches_are_near_it(rng):
    """Numbers of inliers would choose the other one."""
    points0, points1 = likely_views(rng, 300, 100, 0.05)
    poses = pose(), pose(turn=12.12)
    exact, other = (fundamental_from_pose(CAMERA.K, OTHER.K, each) for each in poses)
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
    matched = MatchedPoints(points0, points1, np.full(400, 0.5), covariances)
    likely = [epipolar_likelihood(model, matched) for model in (exact, other)]
    assert likely[0] > likely[1] + 20


def test_a_match_counts_as_much_as_it_is_probable_exact_and_possible(rng):
    points0, points1 = likely_views(rng, 50, 0, 0.0)
    model = fundamental_from_pose(CAMERA.K, OTHER.K, pose())

    def likely(probability, covariances=None, possible=None, shift=0.0):
        probable = np.full(50, probability)
        matched = MatchedPoints(points0, points1 + np.array([0.0, shift]), probable, covariances)
        return epipolar_likelihood(model, matched, possible)

    assert likely(0.9) > likely(0.5) > likely(0.1) > 0
    assert likely(0.5, np.tile(0.01 * np.eye(2), (50, 1, 1))) > likely(0.5)
    assert likely(0.9, possible=np.zeros(50, bool)) == pytest.approx(50 * np.log(0.1))
    assert likely(0.9, shift=100.0) == pytest.approx(50 * np.log(0.1))  # all far from their lines


def test_a_homography_of_few_probable_matches_is_found(rng):
    """Two in a hundred are right; MAGSAC++, which draws matches at random, does not find them."""
    H = np.array([[0.9, 0.1, 30.0], [-0.1, 1.0, 20.0], [1e-4, 0.0, 1.0]])
    points0, points1 = rng.uniform(0, (1024, 768), (2, 2000, 2))
    points1[:40] = warp_points(points0[:40], H) + rng.normal(0, 0.3, (40, 2))
    assert estimate("homography", points0, points1).status != "ok"
    found = estimate("homography", points0, points1, scores=np.where(np.arange(2000) < 40, 0.9, 0.05))
    assert found.status == "ok" and found.inliers[:40].mean() > 0.95
    assert np.linalg.norm(warp_points(CORNERS, found.matrix) - warp_points(CORNERS, H), axis=1).max() < 3


def test_exact_matches_give_an_exact_pose_and_coarse_ones_a_pose(rng):
    points0, points1 = likely_views(rng, 60, 140, 0.03)
    covariances = np.tile(0.03**2 * np.eye(2), (200, 1, 1))
    assert error("essential", estimate("essential", points0, points1, covariances=covariances)) < 0.1
    points0, points1 = likely_views(rng, 150, 100, 1.5)
    assert error("essential", estimate("essential", points0, points1)) < 3


def test_probable_matches_are_enough_among_many_improbable_ones(rng):
    """One in seventeen is right: no sample of five of them is drawn by chance."""
    points0, points1 = likely_views(rng, 70, 1130, 0.2)
    scores = np.where(np.arange(1200) < 70, 0.9, 0.05)
    order = rng.permutation(1200)
    points0, points1, scores = points0[order], points1[order], scores[order]
    right = scores > 0.5
    without = estimate("essential", points0, points1)
    assert without.status != "ok" or without.inliers[right].mean() < 0.5
    found = estimate("essential", points0, points1, scores=scores)
    assert found.status == "ok" and found.inliers[right].mean() > 0.9
    assert error("essential", found) < 1


def turned(degrees, direction=(1.0, 0.0, 0.0)):
    """A pose rotated about y, translated along a direction."""
    found = np.eye(4)
    found[:3, :3] = rotation((0, 1, 0), degrees)
    found[:3, 3] = np.array(direction) / np.linalg.norm(direction)
    return found


def test_poses_that_are_about_equally_likely_have_their_mean():
    def hypotheses(*rows):
        inliers = np.ones(1, bool)
        models = [TwoViewGeometry("essential", "ok", inliers, cam1_from_cam0=each) for each, _ in rows]
        return [Hypothesis(one, likely, 0.5) for one, (_, likely) in zip(models, rows, strict=True)]

    found = hypotheses((turned(10, (1, 0.05, 0)), 40.0), (turned(14, (1, -0.05, 0)), 40.0))
    np.testing.assert_allclose(mean_pose(found, found[0]), turned(12), atol=1e-9)
    best, far = (turned(10), 400.0), (turned(40), 400.0)
    found = hypotheses(best, (turned(14), 200.0), (turned(10, (-1, 0, 0)), 400.0), far)
    assert degrees_apart(mean_pose(found, found[0]), best[0]) < 0.01
    assert mean_pose(found[:1] + found[2:], found[0]) is None  # no other is near
    found = hypotheses((turned(12), np.nan), (turned(10), 3.0), (turned(11), np.nan))
    assert likeliest(found) is found[1] and likeliest(found[:1]) is None
    assert mean_pose(found, found[1]) is None
