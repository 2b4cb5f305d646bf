"""Sets of pairs: the project's own folders, tiny ones in published layouts, and those made of photos."""

import json
import math
import pickle
import zipfile
from io import BytesIO
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from training_data import write_photos

import matcher
from matcher.errors import UsageError
from matcher.evaluate.measure import outcome, reprojection_errors
from matcher.evaluate.methods import Method
from matcher.evaluate.protocols import CorrespondencePair, HomographyPair, PosePair, UnrelatedPair
from matcher.evaluate.run import as_markdown, as_object, evaluate
from matcher.evaluate.sets import SetOptions, find_sets, made_set
from matcher.evaluate.synthetic import warp
from matcher.geometry import warp_points
from matcher.images import data_folder, find_images
from matcher.types import TwoViewGeometry
from matcher.verify.verdict import Verdict

needs_bench = pytest.mark.skipif(not (data_folder() / "bench").is_dir(), reason="MATCHER_DATA has no bench/")
KINDS = {"homography": HomographyPair, "pose": PosePair, "correspondences": CorrespondencePair}
COUNTS = {
    "oxford_graf": [5],
    "opencv_pairs": [1, 1],
    "iguazu": [5],
    "middlebury2003": [2],
    "kitti_mini": [48 + 43 + 36],
    "sceaux_castle": [45],
    "multimodal": [17],  # without the coarse ones
}
K = np.array([[300.0, 0, 160], [0, 310, 120], [0, 0, 1]])
T = np.array([[0.96, 0, 0.28, 1.0], [0, 1, 0, 0.5], [-0.28, 0, 0.96, 0], [0, 0, 0, 1]])
H = np.array([[1.02, 0.03, 9.0], [-0.02, 0.98, 4.0], [0, 0, 1]])


def nearest():
    return [Method("nearest", matcher.load("nearest", max_keypoints=800, match_threshold=0.35))]


@pytest.fixture
def picture(rng):
    noise = rng.integers(0, 256, (60, 80)).astype(np.uint8)
    return cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)


@pytest.fixture
def photos(tmp_path):
    """Five textured pictures in two folders."""
    return [
        path
        for name, count in (("a", 3), ("b", 2))
        for path in find_images(write_photos(tmp_path / name, count))
    ]


def words(*matrices):
    return " ".join(f"{value:.6f}" for matrix in matrices for value in np.ravel(matrix))


@needs_bench
@pytest.mark.parametrize("name", COUNTS)
def test_every_folder_is_read_whole_and_its_truth_agrees_with_what_descriptors_find(name):
    """A wrong convention, direction or scale of the truth would leave hardly any match correct."""
    sets = find_sets(name, SetOptions())
    assert [len(found) for found in sets] == COUNTS[name]
    for found in sets:
        for pair in found.pairs:
            assert type(pair) is KINDS[found.protocol]
            assert pair.image0.path.is_file() and pair.image1.path.is_file()
        if name in ("oxford_graf", "middlebury2003", "opencv_pairs", "kitti_mini"):
            values = evaluate(found.first(1), nearest()).values["nearest"]
            assert values["precision3"].mean() > 0.7
            assert found.protocol != "pose" or values["error"].mean() < 3


def test_absent_data_and_unknown_names(monkeypatch, tmp_path):
    monkeypatch.setenv("MATCHER_DATA", str(tmp_path))
    for where, named in (("oxford_graf", "MATCHER_DATA"), ("nosuch", "synthetic"), (str(tmp_path), "empty")):
        with pytest.raises(UsageError, match=named):
            find_sets(where, SetOptions())
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(UsageError, match="layout"):
        find_sets(str(tmp_path), SetOptions())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("H1to2p", "1 0 0\n0 1 0\n0 0 nan\n"),
        ("poses.json", json.dumps([{"image": "img1.png", "K": 1, "R": 2, "C": 3}] * 2)),
        ("cameras.json", '{"views": []}'),
    ],
)
def test_damaged_truth_names_the_file(tmp_path, name, text):
    for view in ("img1.png", "img2.png"):
        (tmp_path / view).write_bytes(b"never opened")
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        find_sets(str(tmp_path), SetOptions())


def test_hpatches(tmp_path, picture):
    large = cv2.resize(picture, (1280, 960), interpolation=cv2.INTER_CUBIC)
    for sequence in ("v_one", "i_two", "v_talent"):
        folder = tmp_path / "hpatches-sequences-release" / sequence
        folder.mkdir(parents=True)
        for number in range(1, 4):
            view = np.repeat((large if number == 1 else warp(large, H))[..., None], 3, axis=2)
            cv2.imwrite(str(folder / f"{number}.ppm"), view)
            if number > 1:
                (folder / f"H_1_{number}").write_text("\n".join(map(words, H)) + "\n")
    (found,) = find_sets(str(tmp_path), SetOptions())
    assert (found.name, len(found)) == ("hpatches", 4)  # the large sequence is left out
    assert sorted(pair.group for pair in found.pairs) == ["illumination"] * 2 + ["viewpoint"] * 2
    values = evaluate(found.first(1), nearest()).values["nearest"]
    assert values["error"][0, 0] < 1 and values["precision3"][0, 0] > 0.9
    image = found.pairs[0].image0.given(found.shorter_side)
    assert image.pixels.shape[:2] == (480, 640) and image.size == (1280, 960)


def test_pair_lists(tmp_path, picture):
    folder = tmp_path / "images" / "scene0707_00"
    folder.mkdir(parents=True)
    for name in ("15.png", "585.png"):
        cv2.imwrite(str(folder / name), picture)
    names = "scene0707_00/15.png scene0707_00/585.png"
    (tmp_path / "readme.txt").write_text("not a list\n")
    path = tmp_path / "test_pairs_with_gt.txt"
    # Of SuperGlue, and of glue-factory with a matrix and with R and t.
    for line in (f"0 0 {words(K, K, T)}", words(K, K, T), words(K, K, T[:3, :3], T[:3, 3])):
        path.write_text(f"{names} {line}\n\n{names} {line}\n")
        for where in (tmp_path, path):
            (found,) = find_sets(str(where), SetOptions())
            assert (found.protocol, found.name, len(found)) == ("pose", "test_pairs_with_gt", 2)
            pair = found.pairs[1]
            assert np.allclose(pair.K1, K) and np.allclose(pair.cam1_from_cam0, T)
            assert pair.image0.path == folder / "15.png"
    (moved,) = find_sets(str(tmp_path), SetOptions(images=tmp_path / "images"))
    assert moved.pairs[0].image1.path == folder / "585.png"
    with pytest.raises(UsageError, match="--images"):
        find_sets(str(tmp_path), SetOptions(images=folder))
    path.write_text(f"{names} {words(K, K, T)}\na.png a.png 1 2 3\n")
    with pytest.raises(UsageError, match="line 2"):
        find_sets(str(path), SetOptions())


class Attack:
    def __reduce__(self):
        return print, ("run by the pickle",)


def test_scene_files_are_read_and_run_no_code(tmp_path, picture, capsys):
    folder = tmp_path / "Undistorted_SfM" / "0015" / "images"
    folder.mkdir(parents=True)
    paths = [None, "Undistorted_SfM/0015/images/a.jpg", "Undistorted_SfM/0015/images/b.jpg"]
    for path in paths[1:]:
        cv2.imwrite(str(tmp_path / path), picture)
    pairs, poses, intrinsics = np.empty(1, object), np.empty(3, object), np.empty(3, object)
    pairs[0] = (np.array([1, 2]), 0.25, np.zeros((1, 4)))
    poses[1:], intrinsics[1:] = [np.linalg.inv(T), np.eye(4)], [K, 2 * K]
    arrays = {"image_paths": np.array(paths, object), "depth_paths": np.array(paths, object)}
    arrays |= {"intrinsics": intrinsics, "poses": poses, "pair_infos": pairs}
    (tmp_path / "megadepth_test_1500_scene_info").mkdir()
    place = tmp_path / "megadepth_test_1500_scene_info" / "0015_0.1_0.3.npz"
    np.savez(place, **arrays)
    (found,) = find_sets(str(tmp_path), SetOptions())
    assert (found.name, len(found), found.pairs[0].group) == ("megadepth1500", 1, "0015_0.1_0.3")
    pair = found.pairs[0]
    assert np.allclose(pair.cam1_from_cam0, T)  # world to camera 1, after camera 0 to world
    assert np.allclose(pair.K0, K) and np.allclose(pair.K1, 2 * K) and pair.image1.path == folder / "b.jpg"
    with zipfile.ZipFile(place) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": ()})
    members["poses.npy"] = header.getvalue() + pickle.dumps(Attack())
    with zipfile.ZipFile(place, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(UsageError, match=r"0015_0\.1_0\.3\.npz"):
        find_sets(str(tmp_path), SetOptions())
    assert "run by" not in capsys.readouterr().out


def test_wxbs(tmp_path, picture):
    folder = tmp_path / "v1.1" / "WGBS" / "wall"
    folder.mkdir(parents=True)
    cv2.imwrite(str(folder / "01.png"), picture)
    cv2.imwrite(str(folder / "02.png"), warp(picture, H))
    labels = np.random.default_rng(0).uniform(40, 200, (12, 2))
    rows = np.column_stack([labels, warp_points(labels, H)])
    (folder / "corrs.txt").write_text("\n".join(map(words, rows)) + "\n")
    (found,) = find_sets(str(tmp_path), SetOptions())
    assert (found.name, found.protocol, found.pairs[0].name) == ("wxbs", "correspondences", "WGBS/wall")
    values = evaluate(found, nearest()).values["nearest"]
    assert values["labels10"][0, 0] > 0.8 and np.isnan(values["precision3"]).all()


# Pairs made of photos.


def test_pairs_follow_from_seed_and_number_alone(photos):
    few, many = (made_set("synthetic", photos, count=count, seed=3).pairs for count in (8, 40))
    other = made_set("synthetic", photos, count=8, seed=4).pairs
    for i in range(5):
        assert np.array_equal(few[i].H_1_from_0, many[i].H_1_from_0)
        assert np.array_equal(few[i].image1.pixels, many[i].image1.pixels)
        assert not np.array_equal(few[i].H_1_from_0, other[i].H_1_from_0)
    assert [few[i].group for i in range(5)] == ["level 1", "level 2", "level 3", "level 4", "level 1"]
    assert len({many[4 * i].image0.path for i in range(5)}) == 5  # every photo once before any again


def test_truth_is_exact_in_the_pixel_convention(photos):
    """Matches of the warped view agree with the homography to a fraction of a pixel, without a bias."""
    pair = made_set("synthetic", photos, count=1, levels=(1,)).pairs[0]
    found = matcher.load("nearest").match(pair.image0.pixels, pair.image1.pixels)
    errors = reprojection_errors(found.points0, found.points1, pair.H_1_from_0)
    near = errors < 3
    bias = (warp_points(found.points0, pair.H_1_from_0) - found.points1)[near].mean(axis=0)
    assert near.sum() > 100 and np.median(errors[near]) < 0.5 and np.abs(bias).max() < 0.1


def test_hard_pairs_are_seen_from_the_side_in_every_weather(photos):
    pairs = made_set("hard", photos, count=10).pairs
    for pair in (pairs[number] for number in range(10)):
        centre, homography = (np.array(pair.image0.pixels.shape[1::-1]) - 1) / 2, pair.H_1_from_0
        assert np.allclose(warp_points(centre[None], homography), centre)  # the camera goes around it
        around = warp_points(centre + 1e-3 * np.eye(2), homography) - centre
        zoom, foreshortened = np.linalg.svd(around / 1e-3, compute_uv=False)
        assert 0.49 < zoom < 2.01 and 44 < np.degrees(np.arccos(foreshortened / zoom)) < 76
    assert len({pairs[number].group for number in range(10)}) == 5


# Pairs that are easily wrong.


def test_the_sets_are_what_they_say(photos):
    repeats, overlays = made_set("repeats", photos, count=10), made_set("overlays", photos, count=8)
    kinds = [type(repeats.pairs[number]) for number in (0, 1, 6, 7)]
    assert kinds == [PosePair, UnrelatedPair] * 2
    unrelated, moved, still = overlays.pairs[4], overlays.pairs[5], overlays.pairs[7]
    assert isinstance(moved, HomographyPair) and np.abs(moved.H_1_from_0[:2, 2]).max() > 50
    assert np.array_equal(still.H_1_from_0, np.eye(3)) and isinstance(unrelated, UnrelatedPair)
    facades = [made_set("facades", photos, count=10, seed=3).pairs[number] for number in range(10)]
    named = {frozenset((pair.image0.path, pair.image1.path)) for pair in facades}
    assert all(len(pair) == 2 for pair in named) and len(named) == min(10, math.comb(len(photos), 2))
    again = made_set("overlays", photos, count=8).pairs[5]
    assert np.array_equal(again.image1.pixels, moved.image1.pixels)


def test_a_pose_is_right_among_the_alternatives_and_shares_are_counted(photos):
    pose, inliers = np.eye(4), np.ones(9, bool)
    pose[0, 3] = 1.0
    twin = pose.copy()
    twin[:3, :3] = cv2.Rodrigues(np.array([0.0, 1.2, 0.0]))[0]
    known = PosePair("", "one plane", None, None, np.eye(3), np.eye(3), pose)
    ambiguous = TwoViewGeometry("essential", "ambiguous", inliers, alternatives=(twin, pose))
    wrong, right = (TwoViewGeometry("essential", "ok", inliers, np.eye(3), each) for each in (twin, pose))
    for pair, geometry, word in (
        (known, ambiguous, "ambiguous"),
        (known, wrong, "wrong"),
        (known, right, "right"),
        (UnrelatedPair("", "", None, None), ambiguous, "refused"),
    ):
        result = SimpleNamespace(geometry=geometry, verdict=Verdict(0.99), inliers=inliers)
        found = outcome(pair, result)
        assert found[word] == 1 and found["sure"] == (word == "wrong") and found["same"] == 1
    method = Method("nearest", matcher.load("nearest", max_keypoints=400))
    table = as_object(evaluate(made_set("repeats", photos, count=2), [method]))
    shares = [table["rows"][0]["all"][word]["value"] for word in ("right", "ambiguous", "refused", "wrong")]
    assert sum(shares) == 1 and table["pairs_by_group"] == {"wallpaper, another": 1, "wallpaper, the same": 1}
    assert "| wrong and sure |" in as_markdown(table)
