"""Match probabilities are calibrated alike in both engines, and again when a geometry is known."""

from dataclasses import astuple, replace

import numpy as np
import pytest

import matcher
from matcher.config import CalibrationConfig, RefinedCalibrationConfig, VerifiedCalibrationConfig
from matcher.evaluate.calibration import JudgedPair, error_under, fit_calibration, uncalibrated
from matcher.match.calibration import (
    calibrated,
    calibrated_by_geometry,
    evidence,
    geometry_evidence,
    refinement_evidence,
    weighed_by_refinement,
)
from matcher.types import Matches, MatchRefinement, TwoViewGeometry

CONFIG = CalibrationConfig(offset=0.9, slope=0.75, share_slope=0.8)


def test_without_a_calibration_scores_stay():
    scores = np.array([0.9, 0.2], np.float32)
    assert calibrated(scores, (5, 5), None) is scores
    assert calibrated(scores[:0], (5, 5), CONFIG).shape == (0,)


def test_the_order_stays_and_fewer_partners_make_matches_less_probable():
    scores = np.linspace(1, 0, 50, dtype=np.float32)
    many, few = (calibrated(scores, (count, 4000), CONFIG) for count in (60, 600))
    assert many.dtype == np.float32 and (many >= few).all() and (many[1:-1] > few[1:-1] + 1e-4).any()
    for found in (many, few):
        assert (np.diff(found) <= 0).all() and found[0] <= 1 and found[-1] >= 0


def judged_pairs(truth: CalibrationConfig, seed: int) -> list[JudgedPair]:
    """Pairs of random scores, right as often as a calibration says."""
    rng = np.random.default_rng(seed)
    found = []
    for count in rng.integers(300, 2000, 40).tolist():
        scores = np.sort(rng.uniform(0.05, 0.99, 250))[::-1]
        right = rng.uniform(size=250) < calibrated(scores, (count, count), truth)
        known = rng.uniform(size=250) < 0.8
        found.append(JudgedPair(scores, evidence(scores, (count, count)), known, right))
    return found


def test_the_fit_finds_the_calibration_that_made_the_matches():
    fitted = fit_calibration([(judged_pairs(CONFIG, 0), 1.0), (judged_pairs(CONFIG, 1), 3.0)])
    assert fitted[1] == pytest.approx(CONFIG.slope, abs=0.08)
    assert fitted[2] == pytest.approx(CONFIG.share_slope, abs=0.15)
    others = judged_pairs(CONFIG, 2)
    assert error_under(others, fitted) < 0.03 < error_under(others, None) - 0.03


@pytest.fixture(scope="module")
def pipeline() -> matcher.Pipeline:
    return matcher.load(max_keypoints=256, resize=400, device="cpu", further_passes=False, refine=False)


def test_other_weights_are_not_calibrated(shipped_weights):
    other = matcher.load("hybrid", weights=shipped_weights, device="cpu")
    assert other.config.matcher.policy.calibration is None
    policy = matcher.load("hybrid", device="cpu").config.matcher.policy
    assert policy.calibration is not None
    assert replace(policy, calibration=None) == other.config.matcher.policy


def test_both_engines_calibrate(pipeline, views):
    pytest.importorskip("onnxruntime")
    features = [pipeline.extract(view) for view in views]
    float32 = matcher.load(max_keypoints=256, precision="float32", device="cpu", further_passes=False)
    torch_found, onnx_found = (
        engine.match_features(*features)
        for engine in (float32, matcher.load(max_keypoints=256, engine="onnx", further_passes=False))
    )
    scores = [
        dict(zip(map(tuple, f.indices.tolist()), f.scores, strict=True)) for f in (torch_found, onnx_found)
    ]
    common = scores[0].keys() & scores[1].keys()
    assert len(common) > 0.98 * len(scores[0])
    assert np.median([abs(scores[0][pair] - scores[1][pair]) for pair in common]) < 1e-3
    policy = replace(float32.config.matcher.policy, calibration=None)
    raw = replace(float32, matcher=float32.matcher.adjusted(policy=policy)).match_features(*features)
    assert abs(raw.scores - torch_found.scores).max() > 0.01


REFINED = RefinedCalibrationConfig(
    offset=0.5, slope=0.8, refined=1.5, variance_slope=-0.5, further_passes=-0.7
)


CALIBRATION = replace(CONFIG, refined=REFINED)


def refined_matches(rng: np.random.Generator, count: int = 300) -> Matches:
    """Matches with random scores, two thirds of them refined, with variances from .001 to 1."""
    points = rng.uniform(0, 500, (2, count, 2)).astype(np.float32)
    variance = 10 ** rng.uniform(-3, 0, count)
    covariances = (variance[:, None, None] * np.diag([1.0, 0.5])).astype(np.float32)
    status = np.where(rng.uniform(size=count) < 2 / 3, 0, 5).astype(np.uint8)
    scores = rng.uniform(0.05, 0.99, count).astype(np.float32)
    refinement = MatchRefinement(status, covariances, np.ones(count, np.float32))
    return Matches(np.tile(np.arange(count), (2, 1)).T, *points, scores, refinement=refinement)


def test_a_more_exact_place_makes_a_refined_match_weigh_more():
    matches = refined_matches(np.random.default_rng(0))
    level = replace(matches, scores=np.full(len(matches), 0.5, np.float32))
    weighed = weighed_by_refinement(level, (1.0, 1.0), CALIBRATION)
    found = weighed.prior_scores
    np.testing.assert_array_equal(weighed.scores, level.scores)
    accepted, variance = matches.refinement.accepted, matches.covariances[:, 0, 0]
    order = np.argsort(variance[accepted])
    assert (np.diff(found[accepted][order]) <= 0).all() and np.ptp(found[accepted]) > 0.3
    assert np.ptp(found[~accepted]) == 0
    assert found[~accepted][0] < np.median(found[accepted])
    later = weighed_by_refinement(level, (1.0, 1.0), CALIBRATION, True)
    assert (later.prior_scores < found).all()


def test_the_fit_finds_the_calibration_of_refined_matches():
    rng, pairs = np.random.default_rng(3), []
    for further in (False, True) * 40:
        matches = refined_matches(rng)
        true = weighed_by_refinement(matches, (1.0, 1.0), CALIBRATION, further).prior_scores
        values = refinement_evidence(matches, (1.0, 1.0), further)
        known = np.ones(len(matches), bool)
        pairs.append(JudgedPair(matches.scores, values, known, rng.uniform(size=len(matches)) < true))
    np.testing.assert_allclose(fit_calibration([(pairs, 1.0)]), astuple(REFINED), atol=0.1)


VERIFIED = VerifiedCalibrationConfig(offset=-1.5, slope=0.5, inlier=2.0, share_slope=0.4)
WITH_GEOMETRY = replace(CONFIG, verified=VERIFIED)


def verified_matches(rng: np.random.Generator, share: float) -> tuple[Matches, TwoViewGeometry]:
    """Matches with random scores of which a share are inliers."""
    matches = refined_matches(rng)
    inliers = rng.uniform(size=len(matches)) < share
    return matches, TwoViewGeometry("fundamental", "ok", inliers, np.eye(3))


def test_inliers_and_matches_among_many_of_them_are_more_probable():
    matches, geometry = verified_matches(np.random.default_rng(4), 0.8)
    level = replace(matches, scores=np.full(len(matches), 0.5, np.float32))
    found = calibrated_by_geometry(level, geometry, WITH_GEOMETRY)
    assert found.scores[geometry.inliers].min() > found.scores[~geometry.inliers].max() + 0.3
    np.testing.assert_array_equal(found.prior_scores, level.scores)
    few = replace(geometry, inliers=geometry.inliers & (np.arange(len(matches)) < 40))
    fewer = calibrated_by_geometry(level, few, WITH_GEOMETRY)
    assert (fewer.scores[few.inliers] < found.scores[few.inliers]).all()
    for status in ("low_inliers", "too_few", "no_model"):
        refused = calibrated_by_geometry(level, replace(geometry, status=status), WITH_GEOMETRY)
        assert (refused.scores < fewer.scores).all()


def test_a_geometry_that_does_not_tell_leaves_the_probabilities():
    matches, geometry = verified_matches(np.random.default_rng(5), 0.5)
    for kind, status in (("homography", "ok"), ("homographies", "ok"), ("essential", "degenerate")):
        other = replace(geometry, kind=kind, status=status)
        assert calibrated_by_geometry(matches, other, WITH_GEOMETRY) is matches
    none = TwoViewGeometry("none", "not_estimated", np.zeros(len(matches), bool))
    assert calibrated_by_geometry(matches, none, WITH_GEOMETRY) is matches
    assert calibrated_by_geometry(matches, geometry, CALIBRATION) is matches
    assert calibrated_by_geometry(matches, geometry, None) is matches


def test_the_fit_finds_the_calibration_of_verified_matches():
    rng, pairs = np.random.default_rng(6), []
    for share in rng.uniform(0.05, 0.95, 80):
        matches, geometry = verified_matches(rng, share)
        true = calibrated_by_geometry(matches, geometry, WITH_GEOMETRY).scores
        known, right = np.ones(len(matches), bool), rng.uniform(size=len(matches)) < true
        pairs.append(JudgedPair(matches.scores, geometry_evidence(matches, geometry), known, right))
    np.testing.assert_allclose(fit_calibration([(pairs, 1.0)]), astuple(VERIFIED), atol=0.1)


def test_a_pair_is_calibrated_again_after_verification_and_best_first(views):
    whole = matcher.load(max_keypoints=256, resize=400, device="cpu", further_passes=False)
    without = uncalibrated("hybrid-learned", "geometry").matcher
    before = replace(whole, matcher=without)
    found, plain = whole.match(*views), before.match(*views)
    assert (np.diff(found.scores) <= 0).all()
    same = (np.sort(each.matches.indices, axis=0) for each in (found, plain))
    np.testing.assert_array_equal(*same)
    again = calibrated_by_geometry(plain.matches, plain.geometry, whole.matcher.calibration)
    np.testing.assert_allclose(np.sort(again.scores)[::-1], found.scores, atol=1e-6)
    assert abs(np.sort(found.scores) - np.sort(plain.scores)).max() > 0.02
    error = np.linalg.norm(found.points0 - plain.points0[np.argsort(-again.scores, kind="stable")], axis=1)
    assert error.max() == 0
    assert found.geometry.inliers.sum() > 50


def test_a_calibration_is_fitted_to_what_the_network_gives(views):
    pipeline = uncalibrated("hybrid-learned")
    result = pipeline.match(*views)
    raw = pipeline.match_features(result.features0, result.features1)
    np.testing.assert_array_equal(result.scores, np.sort(raw.scores)[::-1])
