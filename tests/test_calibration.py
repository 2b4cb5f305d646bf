"""Match probabilities are calibrated alike in both engines; matches and their order stay as they were."""

from dataclasses import replace

import numpy as np
import pytest

import matcher
from matcher.config import CalibrationConfig
from matcher.data.features import Features
from matcher.errors import UsageError
from matcher.lab.evaluate.recalibration import JudgedPair, errors_of, fit_calibration, uncalibrated
from matcher.match.calibration import calibrated

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
        found.append(JudgedPair(scores, (count, count), rng.uniform(size=250) < 0.8, right))
    return found


def test_the_fit_finds_the_calibration_that_made_the_matches():
    fitted = fit_calibration([(judged_pairs(CONFIG, 0), 1.0), (judged_pairs(CONFIG, 1), 3.0)])
    assert fitted.slope == pytest.approx(CONFIG.slope, abs=0.08)
    assert fitted.share_slope == pytest.approx(CONFIG.share_slope, abs=0.15)
    others = judged_pairs(CONFIG, 2)
    assert errors_of(others, fitted) < 0.03 < errors_of(others, None) - 0.03


def test_only_networks_are_calibrated():
    with pytest.raises(UsageError, match="'nearest' has no network"):
        uncalibrated("nearest")


@pytest.fixture(scope="module")
def pipeline() -> matcher.Pipeline:
    return matcher.load(max_keypoints=256, resize=400, device="cpu", second_pass=False, refine=False)


def test_other_weights_are_not_calibrated(shipped_weights):
    other = matcher.load("hybrid", weights=shipped_weights, device="cpu")
    assert other.config.matcher.policy.calibration is None
    policy = matcher.load("hybrid", device="cpu").config.matcher.policy
    assert policy.calibration is not None
    assert replace(policy, calibration=None) == other.config.matcher.policy


def test_matches_are_those_of_the_network_with_other_probabilities(pipeline, views):
    config = pipeline.config.matcher.policy.calibration
    plain = uncalibrated("hybrid-learned").matcher
    features = [pipeline.extract(view) for view in views]
    found = pipeline.match_features(*features)
    raw = plain(*(Features.stack([f]) for f in features))[0]
    np.testing.assert_array_equal(found.indices, raw.indices)
    assert abs(found.scores - raw.scores).max() > 0.01
    np.testing.assert_allclose(found.scores, calibrated(raw.scores, tuple(map(len, features)), config))
    assert raw.scores.min() > pipeline.config.matcher.policy.match_threshold


def test_probabilities_do_not_depend_on_the_other_pairs_of_a_batch(pipeline, views):
    features = [pipeline.extract(view) for view in views]
    short = features[0].select(np.arange(100))
    alone = pipeline.match_features(short, features[1])
    together = pipeline.match_features_batch([tuple(features), (short, features[1])])[1]
    np.testing.assert_array_equal(alone.indices, together.indices)
    np.testing.assert_allclose(alone.scores, together.scores, atol=2e-3)


def test_both_engines_calibrate(pipeline, views):
    pytest.importorskip("onnxruntime")
    features = [pipeline.extract(view) for view in views]
    float32 = matcher.load(max_keypoints=256, precision="float32", device="cpu", second_pass=False)
    torch_found, onnx_found = (
        engine.match_features(*features)
        for engine in (float32, matcher.load(max_keypoints=256, engine="onnx", second_pass=False))
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
