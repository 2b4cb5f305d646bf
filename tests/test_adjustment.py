"""Two-view geometry weighs matches by how exactly their positions are known."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
from test_estimation import CAMERA, CORNERS, H_TRUE, OTHER, pose, two_views

from matcher.config import EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import warp_points
from matcher.pipeline import Pipeline
from matcher.types import Features, Matches, MatchRefinement
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose, in_front, sampson
from matcher.verify.estimation import RobustEstimator

KINDS = ("homography", "fundamental", "essential")


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
    found, true = geometry.cam1_from_cam0, pose()
    cosine = (np.trace(found[:3, :3].T @ true[:3, :3]) - 1) / 2
    across = found[:3, 3] @ true[:3, 3] / np.linalg.norm(true[:3, 3])
    return float(np.degrees(np.arccos(np.clip([cosine, across], -1, 1))).max())


def estimate(kind: str, points0: np.ndarray, points1: np.ndarray, **options):
    cameras = {"cameras": (CAMERA, OTHER)} if kind == "essential" else {}
    return RobustEstimator(EstimationConfig(kind=kind))(points0, points1, **cameras, **options)


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


@pytest.mark.parametrize("kind", KINDS)
def test_neither_the_order_nor_the_scale_of_pixels_matters(kind, rng):
    points0, points1 = scene(kind, rng)
    covariances = spread(rng, len(points0), 0.1, 1.0, "by match")
    points1 = points1 + 0.3 * rng.normal(size=points1.shape)
    first = estimate(kind, points0, points1, covariances=covariances)
    order = rng.permutation(len(points0))
    other = estimate(kind, points0[order], points1[order], covariances=covariances[order])
    np.testing.assert_array_equal(first.matrix, other.matrix)
    if kind == "homography":  # stored pixels that are half as large as those of the resized image
        halved = estimate(kind, 2 * points0, 2 * points1, covariances=4 * covariances, thresholds_scale=2.0)
        scale = np.diag([2.0, 2.0, 1.0])
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


def test_rays_meet_in_front_of_both_cameras_or_not(rng):
    cam1_from_cam0, known = pose(), tuple(np.linalg.inv(camera.K) for camera in (CAMERA, OTHER))
    depths = np.concatenate([rng.uniform(3, 8, 50), rng.uniform(-8, -3, 50)])
    rays = rng.uniform((-0.5, -0.4, 1), (0.5, 0.4, 1), (100, 3))
    other = rays * depths[:, None] @ cam1_from_cam0[:3, :3].T + cam1_from_cam0[:3, 3]
    points = [(p @ K.T)[:, :2] / p[:, 2:] for p, K in ((rays, CAMERA.K), (other, OTHER.K))]
    np.testing.assert_array_equal(in_front(*points, known, cam1_from_cam0), depths > 0)
    assert not in_front(points[0][:50], points[1][:50], known, _reversed(cam1_from_cam0)).any()


def _reversed(cam1_from_cam0: np.ndarray) -> np.ndarray:
    """The pose with the camera on the other side: every scene lies behind."""
    changed = cam1_from_cam0.copy()
    changed[:3, 3] *= -1
    return changed


class Asked(RobustEstimator):
    """Keeps what it was asked."""

    given: dict = {}  # noqa: RUF012

    def __call__(self, points0, points1, **options):
        self.given.update(options)
        return super().__call__(points0, points1, **options)


class Plain(Asked):
    """An estimator of a user, who knows nothing of covariances."""

    takes_covariances = False


@pytest.mark.parametrize("kind", [Asked, Plain])
def test_a_pipeline_hands_covariances_to_estimators_that_take_them(kind, rng):
    points0, points1 = (side.astype(np.float32) for side in scene("homography", rng, 40))
    features = [Features(side, np.eye(40), size=(1200, 1000), kind="own") for side in (points0, points1)]
    covariances = np.tile(np.eye(2, dtype=np.float32), (40, 1, 1))
    known = MatchRefinement(np.zeros(40, np.uint8), covariances, np.ones(40, np.float32))
    matches = Matches(np.tile(np.arange(40)[:, None], 2), points0, points1, np.ones(40, np.float32))
    kind.given = {}
    pipeline = Pipeline(estimator=kind(EstimationConfig(kind="homography")))
    assert pipeline.verify(*features, matches).status == "ok" and "covariances" not in kind.given
    assert pipeline.verify(*features, replace(matches, refinement=known)).status == "ok"
    assert ("covariances" in kind.given) == kind.takes_covariances
