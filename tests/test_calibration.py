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

REFINED = RefinedCalibrationConfig(
    offset=0.5, slope=0.8, refined=1.5, variance_slope=-0.5, further_passes=-0.7
)
VERIFIED = VerifiedCalibrationConfig(offset=-1.5, slope=0.5, inlier=2.0, share_slope=0.4)
CONFIG = CalibrationConfig(offset=0.9, slope=0.75, share_slope=0.8, refined=REFINED)
WITH_GEOMETRY = replace(CONFIG, refined=None, verified=VERIFIED)


def test_the_order_stays_and_fewer_partners_make_matches_less_probable():
    scores = np.linspace(1, 0, 50, dtype=np.float32)
    assert calibrated(scores, (5, 5), None) is scores and calibrated(scores[:0], (5, 5), CONFIG).shape == (0,)
    many, few = (calibrated(scores, (count, 4000), CONFIG) for count in (60, 600))
    assert many.dtype == np.float32 and (many >= few).all() and (many[1:-1] > few[1:-1] + 1e-4).any()
    for found in (many, few):
        assert (np.diff(found) <= 0).all() and found[0] <= 1 and found[-1] >= 0


def refined_matches(rng: np.random.Generator, count: int = 300) -> Matches:
    """Matches with random scores, two thirds of them refined, with variances from .001 to 1."""
    points = rng.uniform(0, 500, (2, count, 2)).astype(np.float32)
    variance = 10 ** rng.uniform(-3, 0, count)
    covariances = (variance[:, None, None] * np.diag([1.0, 0.5])).astype(np.float32)
    status = np.where(rng.uniform(size=count) < 2 / 3, 0, 5).astype(np.uint8)
    scores = rng.uniform(0.05, 0.99, count).astype(np.float32)
    refinement = MatchRefinement(status, covariances, np.ones(count, np.float32))
    return Matches(np.tile(np.arange(count), (2, 1)).T, *points, scores, refinement=refinement)


def verified_matches(rng: np.random.Generator, share: float) -> tuple[Matches, TwoViewGeometry]:
    """Matches with random scores of which a share are inliers."""
    matches = refined_matches(rng)
    inliers = rng.uniform(size=len(matches)) < share
    return matches, TwoViewGeometry("fundamental", "ok", inliers, np.eye(3))


def judged(stage: str, rng: np.random.Generator) -> JudgedPair:
    """A pair whose matches are right as often as the calibration of a stage says."""
    if stage == "network":
        scores, counts = np.sort(rng.uniform(0.05, 0.99, 300))[::-1], (int(rng.integers(300, 2000)),) * 2
        true, values = calibrated(scores, counts, CONFIG), evidence(scores, counts)
    elif stage == "refinement":
        matches, further = refined_matches(rng), bool(rng.integers(2))
        scores = matches.scores
        true = weighed_by_refinement(matches, (1.0, 1.0), CONFIG, further).prior_scores
        values = refinement_evidence(matches, (1.0, 1.0), further)
    else:
        matches, geometry = verified_matches(rng, rng.uniform(0.05, 0.95))
        scores, values = matches.scores, geometry_evidence(matches, geometry)
        true = calibrated_by_geometry(matches, geometry, WITH_GEOMETRY).scores
    known = rng.uniform(size=len(scores)) < 0.9
    return JudgedPair(scores, values, known, rng.uniform(size=len(scores)) < true)


@pytest.mark.parametrize(
    ("stage", "numbers", "within"),
    [
        ("network", astuple(CONFIG)[:3], 0.15),
        ("refinement", astuple(REFINED), 0.12),
        ("geometry", astuple(VERIFIED), 0.12),
    ],
)
def test_the_fit_finds_the_calibration_that_made_the_matches(stage, numbers, within):
    rng = np.random.default_rng(3)
    pairs, others = ([judged(stage, rng) for _ in range(80)] for _ in range(2))
    fitted = fit_calibration([(pairs[:40], 1.0), (pairs[40:], 3.0)])
    np.testing.assert_allclose(fitted, numbers, atol=within)
    assert error_under(others, fitted) < 0.03 < error_under(others, None)


def test_both_engines_calibrate(views):
    pytest.importorskip("onnxruntime")
    options = {"max_keypoints": 256, "resize": 400, "further_passes": False}
    engine = matcher.load(**options, precision="float32", device="cpu")
    features = [engine.extract(view) for view in views]
    tables = [
        {tuple(indices): score for indices, score in zip(found.indices.tolist(), found.scores, strict=True)}
        for found in (
            each.match_features(*features) for each in (engine, matcher.load(**options, engine="onnx"))
        )
    ]
    common = tables[0].keys() & tables[1].keys()
    assert len(common) > 0.98 * len(tables[0])
    assert np.median([abs(tables[0][pair] - tables[1][pair]) for pair in common]) < 1e-3
    policy = replace(engine.config.matcher.policy, calibration=None)
    raw = replace(engine, matcher=engine.matcher.adjusted(policy=policy)).match_features(*features)
    assert abs(raw.scores - engine.match_features(*features).scores).max() > 0.01


def test_a_more_exact_place_makes_a_refined_match_weigh_more():
    matches = refined_matches(np.random.default_rng(0))
    level = replace(matches, scores=np.full(len(matches), 0.5, np.float32))
    weighed = weighed_by_refinement(level, (1.0, 1.0), CONFIG)
    found = weighed.prior_scores
    np.testing.assert_array_equal(weighed.scores, level.scores)
    accepted, variance = matches.refinement.accepted, matches.covariances[:, 0, 0]
    order = np.argsort(variance[accepted])
    assert (np.diff(found[accepted][order]) <= 0).all() and np.ptp(found[accepted]) > 0.3
    assert np.ptp(found[~accepted]) == 0 and found[~accepted][0] < np.median(found[accepted])
    assert (weighed_by_refinement(level, (1.0, 1.0), CONFIG, True).prior_scores < found).all()


def test_inliers_and_matches_among_many_of_them_are_more_probable():
    matches, geometry = verified_matches(np.random.default_rng(4), 0.8)
    level = replace(matches, scores=np.full(len(matches), 0.5, np.float32))
    found = calibrated_by_geometry(level, geometry, WITH_GEOMETRY)
    assert found.scores[geometry.inliers].min() > found.scores[~geometry.inliers].max() + 0.3
    np.testing.assert_array_equal(found.prior_scores, level.scores)
    few = replace(geometry, inliers=geometry.inliers & (np.arange(len(matches)) < 40))
    fewer = calibrated_by_geometry(level, few, WITH_GEOMETRY)
    assert (fewer.scores[few.inliers] < found.scores[few.inliers]).all()
    refused = calibrated_by_geometry(level, replace(geometry, status="low_inliers"), WITH_GEOMETRY)
    assert (refused.scores < fewer.scores).all()


def test_a_pair_is_calibrated_again_after_verification_and_best_first(views):
    whole = matcher.load(max_keypoints=256, resize=400, device="cpu", further_passes=False)
    before = replace(whole, matcher=uncalibrated("hybrid-learned", "geometry").matcher)
    found, plain = whole.match(*views), before.match(*views)
    assert (np.diff(found.scores) <= 0).all() and found.geometry.inliers.sum() > 50
    again = calibrated_by_geometry(plain.matches, plain.geometry, whole.matcher.calibration)
    order = np.argsort(-again.scores, kind="stable")
    np.testing.assert_allclose(again.scores[order], found.scores, atol=1e-6)
    np.testing.assert_array_equal(found.points0, plain.points0[order])
    assert abs(np.sort(found.scores) - np.sort(plain.scores)).max() > 0.02
