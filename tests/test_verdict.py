"""Verdicts on pairs, how well match probabilities hold, and the fit and the diagrams of both."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

import matcher
from matcher.evaluate.calibration import fit_verdict, reliability
from matcher.types import Matches, TwoViewGeometry
from matcher.verify.verdict import reject_improbable, verdict_of

SIZE = (640, 480)


def pair_of(inliers: int, outliers: int, width: float = 600) -> tuple:
    """Matches and geometry; the inliers span `width` pixels."""
    rng = np.random.default_rng(0)
    count = inliers + outliers
    points = rng.uniform([0, 0], [width, width * 0.75], (count, 2))
    indices = np.repeat(np.arange(count)[:, None], 2, axis=1)
    matches = Matches.from_indices(indices, points, points, np.full(count, 0.7))
    return matches, TwoViewGeometry("fundamental", "ok", np.arange(count) < inliers), SIZE, SIZE


def test_the_verdict_follows_the_evidence():
    assert verdict_of(*pair_of(400, 50)).word == "same"
    assert verdict_of(*pair_of(0, 3)).word == "not"
    assert verdict_of(*pair_of(12, 20, width=100)).word == "not"
    probabilities = [verdict_of(*pair_of(count, 40)).probability for count in (10, 40, 160)]
    assert probabilities == sorted(probabilities) and probabilities[0] < probabilities[2] - 0.5
    spread = [verdict_of(*pair_of(40, 20, width=width)).probability for width in (60, 600)]
    assert spread[0] < spread[1] - 0.1


def test_inliers_that_are_improbable_count_little():
    matches, *rest = pair_of(110, 60)
    doubtful = replace(matches, scores=np.full(len(matches), 0.05, np.float32))
    assert verdict_of(matches, *rest).probability > 0.9
    assert verdict_of(doubtful, *rest).probability < 0.5
    assert verdict_of(replace(matches, scores=np.full(len(matches), np.nan)), *rest).word == "not"


@pytest.mark.parametrize(
    ("inliers", "probability", "accepted"),
    [
        (60, 0.43, {"essential", "homography", "homographies"}),
        (35, 0.25, {"homography", "homographies"}),
        (20, 0.12, set()),
    ],
)
def test_what_is_accepted_depends_on_how_much_a_match_can_contradict(inliers, probability, accepted):
    matches, geometry, *sizes = pair_of(inliers, 2 * inliers, width=300)
    assert verdict_of(matches, geometry, *sizes).probability == pytest.approx(probability, abs=0.04)
    kinds = ("fundamental", "essential", "homography", "homographies")
    found = {kind: reject_improbable(replace(geometry, kind=kind), matches, *sizes) for kind in kinds}
    assert {kind for kind in kinds if found[kind].status == "ok"} == accepted


def test_results_have_a_verdict(views):
    pipeline = matcher.load(max_keypoints=512, resize=480, device="cpu", further_passes=False)
    same = pipeline.match(*views)
    assert same.verdict.word == "same" and "the images show the same place" in same.summary()
    assert same.to_dict()["verdict"]["word"] == "same"
    noise = np.random.default_rng(0).integers(0, 256, (240, 320), dtype=np.uint8)
    other = pipeline.match(views[0], cv2.GaussianBlur(noise, (0, 0), 2))
    assert other.verdict.word == "not"
    assert matcher.load("nearest", geometry="none", max_keypoints=50).match(noise, noise).verdict is None


def test_calibrated_predictions_have_no_error():
    rng = np.random.default_rng(1)
    said = rng.uniform(size=20_000)
    right = rng.uniform(size=20_000) < said
    assert reliability(said, right).error < 0.02
    assert reliability(said, right & (said < 0)).error == pytest.approx(0.5, abs=0.01)
    found = reliability(np.array([0.05, 0.95, 1.0]), np.array([False, True, False]))
    assert found.count.tolist() == [1, *[0] * 8, 2] and found.accuracy[-1] == 0.5
    assert np.isnan(reliability(np.zeros(0), np.zeros(0, bool)).error)


def test_the_fit_finds_what_made_the_classes():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(2000, 3)) * [1, 2, 3]
    logit = 1.5 * values[:, 0] - values[:, 1]
    same = rng.uniform(size=2000) < 1 / (1 + np.exp(-logit))
    np.testing.assert_allclose(fit_verdict(values, same), [0, 1.5, -1, 0], atol=0.25)
