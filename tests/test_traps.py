"""Pairs that are easily wrong: their truth holds, and outcomes are counted by it."""

from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from matcher.evaluate.protocols import HomographyPair, PosePair, UnrelatedPair
from matcher.evaluate.traps import Outcome, measured, outcome, overlays_set, planes_set, repeats_set
from matcher.types import TwoViewGeometry
from matcher.verify.adjustment import fundamental_from_pose, sampson
from matcher.verify.verdict import Verdict


@pytest.fixture
def photos(tmp_path, rng):
    paths = []
    for number in range(3):
        noise = cv2.resize(rng.integers(0, 255, (60, 80, 3), dtype=np.uint8), (640, 480))
        cv2.imwrite(str(path := tmp_path / f"{number}.png"), noise)
        paths.append(path)
    return paths


def test_walls_have_the_pose_that_they_say(photos):
    pair = planes_set(photos, count=5).pairs[3]
    sides = [cv2.cvtColor(side.pixels, cv2.COLOR_RGB2GRAY) for side in (pair.image0, pair.image1)]
    sift = cv2.SIFT_create(800)
    (points0, first), (points1, second) = (sift.detectAndCompute(side, None) for side in sides)
    good = [a for a, b in cv2.BFMatcher().knnMatch(first, second, k=2) if a.distance < 0.7 * b.distance]
    ends = np.array([points0[m.queryIdx].pt for m in good]), np.array([points1[m.trainIdx].pt for m in good])
    assert len(good) > 50
    assert np.median(sampson(*ends, fundamental_from_pose(pair.K0, pair.K1, pair.cam1_from_cam0))) < 0.5


def test_the_sets_are_what_they_say(photos):
    repeats, overlays = repeats_set(photos, count=10), overlays_set(photos, count=8)
    kinds = [type(repeats.pairs[number]) for number in range(10)]
    assert kinds == [PosePair, UnrelatedPair] * 5
    moved, still, unrelated = overlays.pairs[5], overlays.pairs[7], overlays.pairs[4]
    assert isinstance(moved, HomographyPair) and np.abs(moved.H_1_from_0[:2, 2]).max() > 50
    assert np.array_equal(still.H_1_from_0, np.eye(3)) and isinstance(unrelated, UnrelatedPair)
    again = overlays_set(photos, count=8).pairs[5]
    assert np.array_equal(again.image1.pixels, moved.image1.pixels)


def test_a_pose_is_right_among_the_alternatives():
    pose = np.eye(4)
    pose[0, 3] = 1.0
    twin = pose.copy()
    twin[:3, :3] = cv2.Rodrigues(np.array([0.0, 1.2, 0.0]))[0]
    pair = PosePair("", "one plane", None, None, np.eye(3), np.eye(3), pose)
    inliers = np.ones(9, bool)

    def said(geometry):
        return outcome(pair, SimpleNamespace(geometry=geometry, verdict=Verdict(0.99), inliers=inliers))

    ambiguous = TwoViewGeometry("essential", "ambiguous", inliers, alternatives=(twin, pose))
    assert said(ambiguous).word == "ambiguous"
    assert said(TwoViewGeometry("essential", "ok", inliers, np.eye(3), twin)).word == "wrong"
    assert said(TwoViewGeometry("essential", "ok", inliers, np.eye(3), pose)).word == "right"


def test_outcomes_are_counted():
    found = measured(
        [
            Outcome("a", True, 0.99, "ok", True),
            Outcome("a", True, 0.2, "low_inliers", False),
            Outcome("b", False, 0.97, "ok", False),
            Outcome("b", False, 0.05, "low_inliers", False),
        ]
    )
    assert [row["group"] for row in found["rows"]] == ["a", "b", "all"]
    assert found["rows"][1]["wrong and sure"] == 1 and found["rows"][2]["refused"] == 2
    assert found["wrong of the 80 % surest"] == pytest.approx(0.5)
