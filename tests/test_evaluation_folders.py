"""The project's own benchmark folders, where they are."""

import os
from pathlib import Path

import numpy as np
import pytest

import matcher
from matcher.errors import UsageError
from matcher.evaluate.measure import ImageFeatures, find_ground_truth, measure_pair
from matcher.evaluate.protocols import CorrespondencePair, HomographyPair, PosePair
from matcher.evaluate.run import Method, evaluate
from matcher.evaluate.sets import SetOptions, find_sets
from matcher.images import data_folder
from matcher.types import Features, Image, Matches

needs_bench = pytest.mark.skipif(not (data_folder() / "bench").is_dir(), reason="MATCHER_DATA has no bench/")
KINDS = {"homography": HomographyPair, "pose": PosePair, "correspondences": CorrespondencePair}
COUNTS = {
    "oxford_graf": [5],
    "opencv_pairs": [1, 1],
    "iguazu": [5],
    "middlebury2003": [2],
    "kitti_mini": [48 + 43 + 36],
    "sceaux_castle": [45],
}


@needs_bench
@pytest.mark.parametrize("name", COUNTS)
def test_every_folder_is_read_whole(name):
    sets = find_sets(name, SetOptions())
    assert [len(found) for found in sets] == COUNTS[name]
    for found in sets:
        for pair in found.pairs:
            assert type(pair) is KINDS[found.protocol]
            assert pair.image0.path.is_file() and pair.image1.path.is_file()


@needs_bench
def test_coarse_truths_are_left_out():
    (found,) = find_sets("multimodal", SetOptions())
    names = {pair.name.rsplit("/", 1)[-1] for pair in found.pairs}
    assert len(names) == 17
    assert "CS3" in names and not names & {"CS1", "CS4", "CS5"}


@needs_bench
@pytest.mark.parametrize(
    ("name", "key", "least"),
    [
        ("oxford_graf", "precision3", 0.9),
        ("iguazu", "precision1", 0.8),
        ("middlebury2003", "precision3", 0.9),
        ("opencv_pairs", "precision3", 0.7),
        ("kitti_mini", "precision3", 0.8),
    ],
)
def test_truth_agrees_with_what_descriptors_find(name, key, least):
    """A wrong convention, direction or scale of the truth would leave hardly any match correct."""
    method = Method("nearest", matcher.load("nearest", max_keypoints=800, match_threshold=0.35))
    for pair_set in find_sets(name, SetOptions(pairs=2)):
        found = evaluate(pair_set.first(1), [method])
        assert found.values["nearest"][key].mean() > least
        if pair_set.protocol == "pose":
            assert found.values["nearest"]["error"].mean() < 3


@needs_bench
def test_poses_of_the_castle_fit_its_photos():
    method = Method("nearest", matcher.load("nearest", max_keypoints=1000))
    (pair_set,) = find_sets("sceaux_castle", SetOptions(pairs=1))
    found = evaluate(pair_set, [method], seeds=2)
    assert found.values["nearest"]["error"].shape == (2, 1)
    assert found.values["nearest"]["error"].max() < 3
    assert found.values["nearest"]["precision3"].mean() > 0.7


@needs_bench
def test_pairs_are_spread_over_the_set():
    (found,) = find_sets("kitti_mini", SetOptions(pairs=9))
    assert len(found) == 9
    assert {pair.group for pair in found.pairs} == {"gap 3", "gap 8", "gap 15"}


@needs_bench
def test_bench_is_all_folders():
    names = [found.name for found in find_sets("bench", SetOptions(pairs=1))]
    assert len(names) == len(set(names)) == 8


def test_disparity_labels_judge_matches_and_the_oracle():
    """Twenty points, all shifted by 4 px to the left; the labels know the left half of the picture."""
    from matcher.evaluate.protocols import CorrespondencePair, PairImage

    rng = np.random.default_rng(0)
    points0 = np.stack([np.repeat(np.arange(5), 4) * 20 + 10.0, np.tile(np.arange(4), 5) * 15 + 10.0], axis=1)
    points0 += rng.uniform(-0.4, 0.4, points0.shape)
    points1 = points0 - [4, 0]
    y, x = np.mgrid[0:80, 0:50]
    labels = np.stack([x.ravel(), y.ravel()], axis=1).astype(float)
    side = PairImage(Path("x.png"))
    pair = CorrespondencePair("x", "", side, side, labels, labels - [4, 0])
    image = Image(np.zeros((0, 0), np.uint8), (100, 80))
    sides = [
        ImageFeatures(Features(p, np.zeros((20, 4), np.float32), size=(100, 80)), image)
        for p in (points0, points1)
    ]
    truth = find_ground_truth(pair, *sides)
    known = points0[:, 0] < 49.5
    assert truth.matches[1].tolist() == [[i, i] for i in np.flatnonzero(known)]
    indices = np.stack([np.arange(20), np.arange(20)], axis=1)
    indices[0, 1], indices[1, 1] = 1, 0
    matches = Matches(
        indices,
        points0.astype(np.float32),
        points1[indices[:, 1]].astype(np.float32),
        np.ones(20, np.float32),
    )
    found = measure_pair(pair, *sides, matches, truth, [])
    assert found["precision3"] == pytest.approx((known.sum() - 2) / known.sum())
    assert found["recall3"] == pytest.approx((known.sum() - 2) / known.sum())


def test_absent_data_and_unknown_names(monkeypatch, tmp_path):
    monkeypatch.setenv("MATCHER_DATA", str(tmp_path))
    with pytest.raises(UsageError, match="MATCHER_DATA"):
        find_sets("oxford_graf", SetOptions())
    with pytest.raises(UsageError, match="the sets are synthetic"):
        find_sets("no_such_set", SetOptions())
    with pytest.raises(UsageError, match="is empty"):
        find_sets(str(tmp_path), SetOptions())
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(UsageError, match="no known layout"):
        find_sets(str(tmp_path), SetOptions())
    assert os.environ["MATCHER_DATA"] == str(data_folder())


def test_damaged_truth_names_the_file(tmp_path):
    for name in ("img1.png", "img2.png"):
        (tmp_path / name).write_bytes(b"never opened")
    (tmp_path / "H1to2p").write_text("1 0 0\n0 1\n")
    with pytest.raises(UsageError, match="H1to2p"):
        find_sets(str(tmp_path), SetOptions())
    (tmp_path / "H1to2p").write_text("1 0 0\n0 1 0\n0 0 nan\n")
    with pytest.raises(UsageError, match="not finite"):
        find_sets(str(tmp_path), SetOptions())
    (tmp_path / "img2.png").unlink()
    (tmp_path / "H1to2p").write_text("1 0 0\n0 1 0\n0 0 1\n")
    with pytest.raises(UsageError, match="img2"):
        find_sets(str(tmp_path), SetOptions())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pairs.json", "[{}]"),
        ("pairs.json", "not json"),
        ("poses.json", "[1, 2]"),
        (
            "poses.json",
            '[{"image": "a.png", "K": 1, "R": 2, "C": 3}, {"image": "a.png", "K": 1, "R": 2, "C": 3}]',
        ),
    ],
)
def test_foreign_json_is_a_message(tmp_path, name, text):
    (tmp_path / "a.png").write_bytes(b"never opened")
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        find_sets(str(tmp_path), SetOptions())
