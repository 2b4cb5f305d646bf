"""What results accept, by the least verdict: the geometry before its rejection, and the table of accuracy."""

from pathlib import Path

import cv2
import numpy as np
import pytest

import matcher
from matcher.errors import UsageError
from matcher.evaluate.calibration import (
    LEAST,
    UNRELATED,
    JudgedGeometry,
    TrialPair,
    accuracy,
    as_markdown_accepted,
    before_rejection,
    judge_set,
    most_probable,
)
from matcher.evaluate.protocols import HomographyPair, PairImage, PairSet, UnrelatedPair
from matcher.verify.verdict import ACCEPTED


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three different textures as files."""
    root = tmp_path_factory.mktemp("photos")
    paths = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        texture = cv2.resize(rng.integers(0, 255, (60, 80), dtype=np.uint8), (320, 240))
        paths.append(root / f"{seed}.png")
        cv2.imwrite(str(paths[-1]), texture)
    return paths


VIEW = Path(__file__).parents[1] / "assets" / "view0.jpg"


def same(path):
    return HomographyPair("same", "", PairImage(path), PairImage(path), np.eye(3))


def test_an_improbable_geometry_counts_only_below_its_probability():
    judged = [JudgedGeometry(1.0, 0.35), JudgedGeometry(2.0, 1.0), JudgedGeometry(float("inf"), 0.0)]
    assert judged[0].error_at(0.32) == 1.0 and judged[0].error_at(0.4) == float("inf")
    at = {least: accuracy(judged, least, [10])[0] for least in LEAST}
    assert at[0.5] == at[0.4] < at[0.32] == at[0.0]
    rows = as_markdown_accepted("three", judged, [10]).splitlines()
    assert rows[0] == "| three (3) | accepted | AUC@10 |"
    assert rows[2].startswith("| 0.5 | 0.33 |") and rows[-1].startswith("| 0 | 0.67 |")


def test_one_pass_accepts_any_verdict_and_finds_the_homography(photos):
    pipeline = matcher.load("hybrid-learned", geometry="homography", max_keypoints=256)
    found = judge_set(PairSet("one", "homography", [same(VIEW)]), pipeline)
    assert all(each.error < 1 and each.probability == 1.0 for each in found)


def test_what_several_passes_found_is_what_was_rejected(photos):
    pipeline = matcher.load("hybrid-learned", geometry="homography", max_keypoints=256)
    result = pipeline.match(photos[0], photos[1])
    geometry, probability = before_rejection(result, pipeline, {})
    assert len(result.passes) > 1
    accepted = geometry.status == "ok" and probability >= ACCEPTED["homography"]
    assert (result.geometry.status == "ok") == accepted
    pair = UnrelatedPair("other", "", PairImage(photos[0]), PairImage(photos[1]))
    assert most_probable([TrialPair(UNRELATED, pair)], pipeline) == {UNRELATED: [probability]}


def test_sets_without_poses_or_homographies_are_refused(photos):
    pair = UnrelatedPair("other", "", PairImage(photos[0]), PairImage(photos[1]))
    with pytest.raises(UsageError, match="neither poses nor homographies"):
        judge_set(PairSet("others", "unrelated", [pair]), matcher.load("nearest"))
