"""Benchmark folders: the project's own, where they are, and tiny ones in the layouts of published sets."""

import pickle
import zipfile
from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
import pytest

import matcher
from matcher.errors import UsageError
from matcher.evaluate.measure import ImageFeatures, find_ground_truth, measure_pair
from matcher.evaluate.protocols import CorrespondencePair, HomographyPair, PairImage, PosePair
from matcher.evaluate.run import Method, evaluate
from matcher.evaluate.sets import SetOptions, find_sets
from matcher.evaluate.synthetic import warp
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


def test_disparity_labels_judge_matches_and_the_oracle():
    """Twenty points, all shifted by 4 px to the left; the labels know the left half of the picture."""
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


# --- Published sets.

K = np.array([[300.0, 0, 160], [0, 310, 120], [0, 0, 1]])
T = np.array([[0.96, 0, 0.28, 1.0], [0, 1, 0, 0.5], [-0.28, 0, 0.96, 0], [0, 0, 0, 1]])


@pytest.fixture
def methods():
    return [Method("nearest", matcher.load("nearest", max_keypoints=300))]


@pytest.fixture
def picture(rng):
    noise = rng.integers(0, 256, (60, 80)).astype(np.uint8)
    return cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)


def words(*matrices):
    return " ".join(f"{value:.6f}" for matrix in matrices for value in np.ravel(matrix))


def test_hpatches(tmp_path, picture, methods):
    H = np.array([[1.02, 0.03, 9.0], [-0.02, 0.98, 4.0], [0, 0, 1]])
    large = cv2.resize(picture, (1280, 960), interpolation=cv2.INTER_CUBIC)
    large = np.repeat(large[..., None], 3, axis=2)
    for sequence in ("v_one", "i_two", "v_talent"):
        folder = tmp_path / "hpatches-sequences-release" / sequence
        folder.mkdir(parents=True)
        for number in range(1, 4):
            cv2.imwrite(str(folder / f"{number}.ppm"), large if number == 1 else warp(large, H))
            if number > 1:
                (folder / f"H_1_{number}").write_text("\n".join(" ".join(map(str, row)) for row in H) + "\n")
    (found,) = find_sets(str(tmp_path), SetOptions())
    assert (len(found), found.shorter_side) == (4, 480)  # the large sequence is left out
    assert sorted(pair.group for pair in found.pairs) == ["illumination"] * 2 + ["viewpoint"] * 2
    measured = evaluate(found.first(1), methods)
    assert measured.values["nearest"]["error"][0, 0] < 1
    assert measured.values["nearest"]["precision3"][0, 0] > 0.9
    image = found.pairs[0].image0.open(1024, found.shorter_side)
    assert image.pixels.shape[:2] == (480, 640) and image.size == (1280, 960)


@pytest.mark.parametrize("kind", ["superglue", "glue-factory", "R and t"])
def test_pair_lists(tmp_path, picture, kind):
    folder = tmp_path / "images" / "scene0707_00"
    folder.mkdir(parents=True)
    for name in ("15.png", "585.png"):
        cv2.imwrite(str(folder / name), picture)
    names = "scene0707_00/15.png scene0707_00/585.png"
    line = {
        "superglue": f"{names} 0 0 {words(K, K, T)}",
        "glue-factory": f"{names} {words(K, K, T)}",
        "R and t": f"{names} {words(K, K, T[:3, :3], T[:3, 3])}",
    }[kind]
    (tmp_path / "readme.txt").write_text("not a list\n")
    (tmp_path / "test_pairs_with_gt.txt").write_text(f"{line}\n\n{line}\n")
    for where in (tmp_path, tmp_path / "test_pairs_with_gt.txt"):
        (found,) = find_sets(str(where), SetOptions())
        assert (found.protocol, found.name, len(found)) == ("pose", "test_pairs_with_gt", 2)
        pair = found.pairs[1]
        assert np.allclose(pair.K1, K) and np.allclose(pair.cam1_from_cam0, T)
        assert pair.image0.path == folder / "15.png"
    (moved,) = find_sets(str(tmp_path), SetOptions(images=tmp_path / "images"))
    assert moved.pairs[0].image1.path == folder / "585.png"
    with pytest.raises(UsageError, match="--images"):
        find_sets(str(tmp_path), SetOptions(images=folder))


def test_damaged_lists(tmp_path, picture):
    cv2.imwrite(str(tmp_path / "a.png"), picture)
    path = tmp_path / "pairs.txt"
    path.write_text(f"a.png a.png {words(K, K, T)}\na.png a.png 1 2 3\n")
    with pytest.raises(UsageError, match="line 2"):
        find_sets(str(path), SetOptions())
    path.write_text("a.png b.png\n")
    with pytest.raises(UsageError, match="not a list of pairs"):
        find_sets(str(path), SetOptions())


def scene(tmp_path, picture):
    folder = tmp_path / "Undistorted_SfM" / "0015" / "images"
    folder.mkdir(parents=True)
    paths = [None, "Undistorted_SfM/0015/images/a.jpg", "Undistorted_SfM/0015/images/b.jpg"]
    for path in paths[1:]:
        cv2.imwrite(str(tmp_path / path), picture)
    pairs = np.empty(1, dtype=object)
    pairs[0] = (np.array([1, 2]), 0.25, np.zeros((1, 4)))
    poses = np.empty(3, dtype=object)
    poses[1:] = [np.linalg.inv(T), np.eye(4)]
    intrinsics = np.empty(3, dtype=object)
    intrinsics[1:] = [K, 2 * K]
    return {
        "image_paths": np.array(paths, dtype=object),
        "intrinsics": intrinsics,
        "poses": poses,
        "pair_infos": pairs,
        "depth_paths": np.array(paths, dtype=object),
    }


def test_scene_files(tmp_path, picture):
    index = tmp_path / "megadepth_test_1500_scene_info"
    index.mkdir()
    np.savez(index / "0015_0.1_0.3.npz", **scene(tmp_path, picture))
    (found,) = find_sets(str(tmp_path), SetOptions())
    assert (found.name, len(found), found.pairs[0].group) == ("megadepth1500", 1, "0015_0.1_0.3")
    pair = found.pairs[0]
    assert np.allclose(pair.cam1_from_cam0, T)  # world to camera 1, after camera 0 to world
    assert np.allclose(pair.K0, K) and np.allclose(pair.K1, 2 * K)
    assert pair.image1.path == tmp_path / "Undistorted_SfM" / "0015" / "images" / "b.jpg"


class Attack:
    def __reduce__(self):
        return print, ("run by the pickle",)


def test_scene_files_run_no_code(tmp_path, picture, capsys):
    np.savez(tmp_path / "0015.npz", **scene(tmp_path, picture))
    with zipfile.ZipFile(tmp_path / "0015.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": ()})
    members["poses.npy"] = header.getvalue() + pickle.dumps(Attack())
    with zipfile.ZipFile(tmp_path / "0015.npz", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(UsageError, match="print"):
        find_sets(str(tmp_path), SetOptions())
    assert "run by" not in capsys.readouterr().out


def test_wxbs(tmp_path, picture, methods):
    folder = tmp_path / "v1.1" / "WGBS" / "wall"
    folder.mkdir(parents=True)
    H = np.array([[1.02, 0.03, 9.0], [-0.02, 0.98, 4.0], [0, 0, 1]])
    cv2.imwrite(str(folder / "01.png"), picture)
    cv2.imwrite(str(folder / "02.png"), warp(picture, H))
    labels = np.random.default_rng(0).uniform(40, 200, (12, 2))
    moved = np.column_stack([labels, np.ones(12)]) @ H.T
    rows = np.column_stack([labels, moved[:, :2] / moved[:, 2:]])
    (folder / "corrs.txt").write_text("\n".join(words(row) for row in rows) + "\n")
    (found,) = find_sets(str(tmp_path), SetOptions())
    assert (found.name, found.protocol, len(found)) == ("wxbs", "correspondences", 1)
    assert found.pairs[0].group == "WGBS" and found.pairs[0].name == "WGBS/wall"
    values = evaluate(found, methods).values
    assert list(values) == ["nearest"]
    assert values["nearest"]["labels10"][0, 0] > 0.8 and np.isnan(values["nearest"]["precision3"]).all()
    (folder / "corrs.txt").write_text("1 2 3\n")
    with pytest.raises(UsageError, match="corrs"):
        find_sets(str(tmp_path), SetOptions())
