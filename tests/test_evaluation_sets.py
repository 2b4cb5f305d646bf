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
from matcher.cli import main
from matcher.config import EstimationConfig
from matcher.errors import ImageError, IntegrityError, UsageError
from matcher.evaluate.folders import drawn, overlap_of
from matcher.evaluate.measure import measure_pair, outcome, reprojection_errors
from matcher.evaluate.methods import Method
from matcher.evaluate.protocols import (
    CorrespondencePair,
    DepthCamera,
    DepthPair,
    HomographyPair,
    PosePair,
    UnrelatedPair,
    depth_at,
    reproject,
)
from matcher.evaluate.run import as_markdown, as_object, evaluate
from matcher.evaluate.sets import SetOptions, find_sets, made_set
from matcher.evaluate.synthetic import warp
from matcher.geometry import warp_points
from matcher.images import data_folder, find_images
from matcher.result import Result
from matcher.types import Features, Matches, TwoViewGeometry
from matcher.verify.estimation import RobustEstimator
from matcher.verify.verdict import Verdict

needs_bench = pytest.mark.skipif(not (data_folder() / "bench").is_dir(), reason="MATCHER_DATA has no bench/")
KINDS = {"homography": HomographyPair, "pose": PosePair, "correspondences": CorrespondencePair}
COUNTS = {
    "oxford_graf": [5],
    "iguazu": [5],
    "middlebury2003": [2],
    "kitti_mini": [48 + 43 + 36],
    "sceaux_castle": [45],
    "multimodal": [17],  # without the coarse ones
}
K = np.array([[300.0, 0, 160], [0, 310, 120], [0, 0, 1]])
T = np.array([[0.96, 0, 0.28, 1.0], [0, 1, 0, 0.5], [-0.28, 0, 0.96, 0], [0, 0, 0, 1]])
VIEW = {"image": "0.png", "world_from_camera": np.zeros((4, 4)).tolist()}
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
    folders = [write_photos(tmp_path / name, count) for name, count in (("a", 3), ("b", 2))]
    return [path for folder in folders for path in find_images(folder)]


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
        if name in ("oxford_graf", "middlebury2003", "kitti_mini"):
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
        ("H1to2p", "0 0 0\n0 0 0\n0 0 0\n"),
        ("poses.json", json.dumps([{"image": "img1.png", "K": 1, "R": 2, "C": 3}] * 2)),
        ("poses.txt", "1 0 0 0 0 1 0 0 0 0 0 0\n"),
        ("cameras.json", json.dumps({"K": K.tolist(), "frames": [VIEW]})),
        ("cameras.json", json.dumps({"K": K.tolist(), "frames": [{"image": "0.png"}]})),
        ("cameras.json", json.dumps({"K": K.tolist(), "frames": [VIEW], "depth_step": 0})),
        ("cameras.json", '{"views": []}'),
        ("cameras.json", '{"views": [{}, {}], "depth_step": 2}'),
        ("cameras.json", '{"views": [{"group": 0}, {"group": 0}], "depth_step": 2}'),
        ("poses.json", "[" * 100_000),
        ("poses.json", json.dumps([{"image": 5, "K": 1, "R": 2, "C": 3}])),
    ],
)
def test_damaged_truth_names_the_file(tmp_path, name, text):
    for view in ("img1.png", "img2.png"):
        (tmp_path / view).write_bytes(b"never opened")
    (tmp_path / name).write_text(text)
    if "frames" in text:
        (tmp_path / "pairs.json").write_text('[{"image0": "0.png", "image1": "0.png", "overlap": 1}]')
    with pytest.raises((UsageError, IntegrityError), match=name):
        find_sets(str(tmp_path), SetOptions())


def test_hpatches(tmp_path, picture, capsys):
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
    assert (found.name, len(found)) == (tmp_path.name, 4)  # the large sequence is left out
    assert "i_two has 2 of 5 homographies" in found.note and "1 sequence" in found.note
    assert sorted(pair.group for pair in found.pairs) == ["illumination"] * 2 + ["viewpoint"] * 2
    values = evaluate(found.first(1), nearest()).values["nearest"]
    assert values["error"][0, 0] < 1 and values["precision3"][0, 0] > 0.9
    image = found.pairs[0].image0.given(found.shorter_side)
    assert image.pixels.shape[:2] == (480, 640) and image.size == (1280, 960)
    asked = [str(tmp_path), "--preset", "nearest", "--pairs", "1", "--resize", "320"]
    assert main(["evaluate", *asked]) == 0 and "longer side at most 320 px" in capsys.readouterr().out
    for path in tmp_path.glob("*/*/H_1_*"):
        path.write_text(words(np.linalg.inv(H)))
    assert "inverse" in evaluate(find_sets(str(tmp_path), SetOptions())[0], nearest()).hints[0]


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
        path.write_text(f"\ufeff# a comment\n{names} {line}\n\n{names} {line}\n", "utf-8")
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
    row = f"{names} {words(K, K, T)}\n"
    for line, said in (("a.png a.png 1 2 3", "5 words;"), (row[:-5] + "7oo", "36 words, '.*7oo' among them")):
        path.write_text(f"{row}{line}\n")
        with pytest.raises(UsageError, match=f"line 2: {said}"):
            find_sets(str(path), SetOptions())
    still, affine = np.hstack([T[:, :3], np.eye(4)[:, 3:]]), np.vstack([T[:3], [0, 0, 0.1, 1]])
    again = words(still).replace("0.000000", "1e-17")  # what inv(T) @ T leaves
    wrong = [np.diag([2.0, 2, 2, 1]) @ T, np.diag([-1.0, 1, 1, 1]) @ T, affine, still]
    for line in (*(words(K, K, each) for each in wrong), f"{words(K, K)} {again}", words(K, 0 * K, T)):
        path.write_text(f"{names} {words(K, K, T)}\n{names} {line}\n")
        with pytest.raises(UsageError, match=r"line 2: .*(pose|K must)"):
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
    poses[1:], intrinsics[1:] = [np.linalg.inv(T), np.eye(4)], [K, K1 := np.diag([2, 2, 1]) @ K]
    arrays = {"image_paths": np.array(paths, object), "depth_paths": np.array(paths, object)}
    arrays |= {"intrinsics": intrinsics, "poses": poses, "pair_infos": pairs}
    (tmp_path / "megadepth_test_1500_scene_info").mkdir()
    place = tmp_path / "megadepth_test_1500_scene_info" / "0015_0.1_0.3.npz"
    np.savez(place, **arrays)
    (found,) = find_sets(str(tmp_path), SetOptions())
    assert (found.name, len(found), found.pairs[0].group) == (tmp_path.name, 1, "0015_0.1_0.3")
    pair = found.pairs[0]
    assert np.allclose(pair.cam1_from_cam0, T)  # world to camera 1, after camera 0 to world
    assert np.allclose(pair.K0, K) and np.allclose(pair.K1, K1) and pair.image1.path == folder / "b.jpg"
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


def test_truth_that_what_is_found_speaks_against_is_named(rendered, tmp_path, capsys):
    def measure(K, pose, large=K_ROOM):
        """Four times the same pair, and one with intrinsics of a far larger image."""
        rows = [f"0.png 1.png {words(K, K, pose)}"] * 4 + [f"0.png 1.png {words(large, large, pose)}"]
        (rendered / "list.txt").write_text("\n".join(rows))
        # Files of its own are replaced.
        given = ["--preset", "nearest", "--max-keypoints", "600", "--output", str(tmp_path / "out")]
        code = main(["evaluate", str(rendered / "list.txt"), *given])
        found = json.loads((tmp_path / "out" / "list.json").read_text())
        return code, found["pairs"], " ".join(found["hints"]), capsys.readouterr().out

    truth = POSES[1] @ np.linalg.inv(POSES[0])
    assert measure(K_ROOM, truth)[:3] == (0, 5, "")
    lines = (tmp_path / "out" / "list-pairs.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert len(rows) == 5 * 3 and all(row["pair"] == "0.png 1.png" for row in rows)  # of three seeds
    assert 0 <= np.median([float(row["error"]) for row in rows]) < 10
    scaled, beyond = (np.diag([factor, factor, 1]) @ K_ROOM for factor in (1.9, 9))
    code, pairs, hint, printed = measure(scaled, truth, beyond)
    assert (code, pairs) == (4, 4) and "1.9 times" in hint and hint in printed
    assert "the intrinsics are of another size" in printed


def test_wxbs(tmp_path, picture):
    folder = tmp_path / "v1.1" / "WGBS" / "wall"
    folder.mkdir(parents=True)
    cv2.imwrite(str(folder / "01.png"), picture)
    cv2.imwrite(str(folder / "02.png"), warp(picture, H))
    labels = np.random.default_rng(0).uniform(40, 200, (12, 2))
    rows = np.column_stack([labels, warp_points(labels, H)])
    (folder / "corrs.txt").write_text("\n".join(map(words, rows)) + "\n")
    (found,) = find_sets(str(tmp_path), SetOptions())
    assert (found.protocol, found.pairs[0].name) == ("correspondences", "WGBS/wall")
    values = evaluate(found, nearest()).values["nearest"]
    assert values["labels10"][0, 0] > 0.8 and np.isnan(values["precision3"]).all()


# Pairs made of photos.


def test_pairs_follow_from_seed_and_number_alone(photos):
    few, many = (made_set("synthetic", photos, SetOptions(count, seed=3)).pairs for count in (8, 40))
    other = made_set("synthetic", photos, SetOptions(8, seed=4)).pairs
    for i in range(5):
        assert np.array_equal(few[i].H_1_from_0, many[i].H_1_from_0)
        assert np.array_equal(few[i].image1.pixels, many[i].image1.pixels)
        assert not np.array_equal(few[i].H_1_from_0, other[i].H_1_from_0)
    assert [few[i].group for i in range(5)] == ["level 1", "level 2", "level 3", "level 4", "level 1"]
    assert len({many[4 * i].image0.path for i in range(5)}) == 5  # every photo once before any again


def test_truth_is_exact_in_the_pixel_convention(photos):
    """Matches of the warped view agree with the homography to a fraction of a pixel, without a bias."""
    pair = made_set("synthetic", photos, SetOptions(1, levels=(1,))).pairs[0]
    found = matcher.load("nearest").match(pair.image0.pixels, pair.image1.pixels)
    errors = reprojection_errors(found.points0, found.points1, pair.H_1_from_0)
    near = errors < 3
    bias = (warp_points(found.points0, pair.H_1_from_0) - found.points1)[near].mean(axis=0)
    assert near.sum() > 100 and np.median(errors[near]) < 0.5 and np.abs(bias).max() < 0.1


def test_hard_pairs_are_seen_from_the_side_in_every_weather(photos):
    pairs = made_set("hard", photos, SetOptions(10)).pairs
    for pair in (pairs[number] for number in range(10)):
        centre, homography = (np.array(pair.image0.pixels.shape[1::-1]) - 1) / 2, pair.H_1_from_0
        assert np.allclose(warp_points(centre[None], homography), centre)  # the camera goes around it
        around = warp_points(centre + 1e-3 * np.eye(2), homography) - centre
        zoom, foreshortened = np.linalg.svd(around / 1e-3, compute_uv=False)
        assert 0.49 < zoom < 2.01 and 44 < np.degrees(np.arccos(foreshortened / zoom)) < 76
    assert len({pairs[number].group for number in range(10)}) == 5


# Pairs that are easily wrong.


def test_the_sets_are_what_they_say(photos):
    repeats, overlays = (made_set(name, photos, SetOptions(110)) for name in ("repeats", "overlays"))
    groups = [repeats.pairs[number].groups[-1] for number in (0, 1, 100, 102, 105, 106, 109)]
    others = [
        "shelf, the same",
        "keyboard, the same",
        "brick, another",
        "rooms, the same",
        "symmetry, another",
    ]
    assert groups == ["wallpaper, the same", "wallpaper, another", *others]
    kinds = [type(repeats.pairs[number]) for number in (0, 1, 6, 7)]
    assert kinds == [DepthPair, UnrelatedPair] * 2
    pair = made_set("planes", photos, SetOptions(4)).pairs[3]  # two boards before the wall hide some of it
    points = np.stack(np.meshgrid(np.arange(20, 620, 3), np.arange(20, 460, 3)), -1).reshape(-1, 2)
    there, seen = reproject(points.astype(float), pair.view0, pair.view1)
    ends = (pair.image0, points[seen]), (pair.image1, np.rint(there[seen]).astype(int))
    shades = [image.pixels[at[:, 1], at[:, 0]].mean(axis=1) for image, at in ends]
    assert 0.3 < seen.mean() < 0.98 and np.isinf(there).any() and np.corrcoef(*shades)[0, 1] > 0.9
    unrelated, moved, still = overlays.pairs[4], overlays.pairs[5], overlays.pairs[7]
    assert isinstance(moved, HomographyPair) and np.abs(moved.H_1_from_0[:2, 2]).max() > 50
    assert np.array_equal(still.H_1_from_0, np.eye(3)) and isinstance(unrelated, UnrelatedPair)
    facades = [made_set("facades", photos, SetOptions(10, seed=3)).pairs[number] for number in range(10)]
    named = {frozenset((pair.image0.path, pair.image1.path)) for pair in facades}
    assert all(len(pair) == 2 for pair in named) and len(named) == min(10, math.comb(len(photos), 2))
    again = made_set("overlays", photos, SetOptions(6)).pairs[5]
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
    table = as_object(evaluate(made_set("repeats", photos, SetOptions(2)), [method]))
    shares = [table["rows"][0]["all"][word]["value"] for word in ("right", "ambiguous", "refused", "wrong")]
    assert sum(shares) == 1 and table["pairs_by_group"] == {"wallpaper, another": 1, "wallpaper, the same": 1}
    assert "| wrong and sure |" in as_markdown(table)


# --- Several calibrated views with depth, on a made-up room of one slanted wall.


SIZE = (320, 240)
K_ROOM = np.array([[280.0, 0, 159.5], [0, 280, 119.5], [0, 0, 1]])
PLANE = np.array([0.2, 0.0, 1.0, -2.5])  # n · X + d = 0 in the world, metres


def pose(turn, centre):
    R = cv2.Rodrigues(np.array([0.0, turn, 0.0]))[0]
    return np.vstack([np.column_stack([R, -R @ np.array(centre)]), [0, 0, 0, 1]])


POSES = [pose(0, [0, 0, 0]), pose(-0.08, [0.25, 0, 0]), pose(-0.08, [0.25, 0, 0])]


def plane_in(camera):
    return np.linalg.inv(camera).T @ PLANE


def depth_map(camera, step):
    xs, ys = np.meshgrid(*(np.arange(0, side, step) for side in SIZE))
    rays = np.stack([xs, ys, np.ones_like(xs)], -1) @ np.linalg.inv(K_ROOM).T
    n = plane_in(camera)
    return -n[3] / (rays @ n[:3])


def picture_of(camera, texture):
    """The wall seen by a camera: a homography from the first one, whose picture is the texture."""
    first, pose = plane_in(POSES[0]), camera @ np.linalg.inv(POSES[0])
    H = K_ROOM @ (pose[:3, :3] - np.outer(pose[:3, 3], first[:3]) / first[3]) @ np.linalg.inv(K_ROOM)
    return cv2.warpPerspective(texture, H, SIZE, flags=cv2.INTER_LINEAR), H


@pytest.fixture
def rendered(tmp_path, picture):
    folder, views = tmp_path / "shop", []
    folder.mkdir()
    for number, camera in enumerate(POSES):
        cv2.imwrite(str(folder / f"{number}.png"), picture_of(camera, picture)[0])
        depth = np.rint(depth_map(camera, 2) * 1000).astype(np.uint16)
        cv2.imwrite(str(folder / f"{number}_depth.png"), depth)
        row = {"image": f"{number}.png", "depth": f"{number}_depth.png", "group": 0, "pose": min(number, 1)}
        views.append({**row, "light": int(number > 1), "K": K_ROOM.tolist(), "E": camera.tolist()})
    scene = {"views": views, "lights": [{"kind": "day"}, {"kind": "night"}], "depth_step": 2}
    (folder / "cameras.json").write_text(json.dumps(scene))
    return folder


@pytest.fixture
def recorded(rendered, tmp_path):
    folder = tmp_path / "room"
    (folder / "images").mkdir(parents=True)
    (folder / "depth").mkdir()
    frames = []
    for number, camera in enumerate(POSES[:2]):
        (rendered / f"{number}.png").rename(folder / "images" / f"{number}.png")
        (rendered / f"{number}_depth.png").rename(folder / "depth" / f"{number}.png")
        frames.append({"image": f"{number}.png", "world_from_camera": np.linalg.inv(camera).tolist()})
    (folder / "cameras.json").write_text(json.dumps({"K": K_ROOM.tolist(), "frames": frames}))
    pairs = [{"image0": "0.png", "image1": "1.png", "overlap": 0.8, "angle_deg": 3, "baseline_m": 0.25}]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    return folder


def cameras(folder):
    return [DepthCamera(folder / f"{n}_depth.png", 2, K_ROOM, POSES[n]) for n in (0, 1)]


def test_reprojection_follows_the_wall_and_knows_what_is_hidden(rendered, rng):
    view0, view1 = cameras(rendered)
    points = np.array([[10.3, 20.7], [200.5, 99.25], [-3, 5], [5, 239.4], [np.nan, 1]])
    n = plane_in(POSES[0])
    rays = np.column_stack([points, np.ones(5)]) @ np.linalg.inv(K_ROOM).T
    expected = -n[3] / (rays @ n[:3])
    found = depth_at(points, view0)
    assert found[:2] == pytest.approx(expected[:2], abs=1e-3) and np.isnan(found[2:]).all()
    points = np.column_stack([rng.uniform(2, side - 4, 200) for side in SIZE])
    _, H = picture_of(POSES[1], np.zeros(SIZE[::-1], np.uint8))
    lifted = np.column_stack([points, np.ones(200)]) @ H.T
    expected = lifted[:, :2] / lifted[:, 2:]
    moved, seen = reproject(points, view0, view1)
    assert 0.6 < seen.mean() < 1
    assert np.abs(moved - expected)[seen].max() < 0.3
    beside = ~((expected >= 0) & (expected <= np.array(SIZE) - 1)).all(1)
    assert beside.any() and not seen[beside].any()
    assert 0.6 < overlap_of(view0, view1) < 1
    depth = cv2.imread(str(view1.path), cv2.IMREAD_UNCHANGED)
    depth[40:80, 60:100] //= 2  # what stands before the wall hides it
    cv2.imwrite(str(rendered / "box_depth.png"), depth)
    boxed = DepthCamera(rendered / "box_depth.png", 2, K_ROOM, POSES[1])
    moved, seen = reproject(np.array([[180.0, 120.0], [60.0, 40.0]]), view0, boxed)
    assert seen.tolist() == [False, True] and np.isinf(moved[0]).all()


def test_rendered_views_are_two_sets(rendered):
    moved, relit = find_sets(str(rendered), SetOptions())
    assert (moved.protocol, len(moved), relit.protocol, len(relit)) == ("depth", 2, "homography", 1)
    assert all(type(pair) is DepthPair for pair in moved.pairs)
    assert moved.pairs[0].groups == ("overlap 50–100 %", "angle 0–15°", "same light")
    assert moved.pairs[1].groups[2] == "different lights" and relit.pairs[0].group == "day and night"
    found = evaluate(moved, [Method("nearest", matcher.load("nearest", max_keypoints=400))], seeds=2)
    values = found.values["nearest"]
    assert values["error"].shape == (2, 2) and values["precision3"].mean() > 0.9
    assert values["recall3"].mean() > 0.3 and (values["correct3"] <= values["correct10"]).all()
    path = rendered / "cameras.json"
    scene = json.loads(path.read_text())
    views = [{key: row[key] for key in row if key != "light"} for row in scene["views"]]
    path.write_text("\ufeff" + json.dumps({"views": views, "depth_step": 2}))
    (rendered / "pairs.json").write_text(json.dumps([[0, 2, 0.5, 4.6]]), "utf-16")
    (found,) = find_sets(str(rendered), SetOptions())
    assert [pair.name for pair in found.pairs] == ["0-2"] and found.pairs[0].groups[2] == "same light"
    (rendered / "pairs.json").write_text(json.dumps([[0, 9]]))
    with pytest.raises(IntegrityError, match=r"pairs\.json"):
        find_sets(str(rendered), SetOptions())
    (rendered / "pairs.json").unlink()
    (rendered / "0_depth.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match="no depth"):
        find_sets(str(rendered), SetOptions())


def test_recorded_views_have_their_pairs(recorded):
    (found,) = find_sets(str(recorded), SetOptions())
    (pair,) = found.pairs
    assert pair.groups == ("overlap 50–100 %", "angle 0–15°") and pair.name == "0-1"
    assert pair.cam1_from_cam0 == pytest.approx(POSES[1] @ np.linalg.inv(POSES[0]))
    measured = evaluate(found, [Method("nearest", matcher.load("nearest", max_keypoints=400))])
    assert measured.values["nearest"]["precision3"][0, 0] > 0.9
    (recorded / "pairs.json").write_text('[{"image0": "7.png", "image1": "1.png", "overlap": 0.5}]')
    with pytest.raises(UsageError, match="both among"):
        find_sets(str(recorded), SetOptions())


def test_matches_are_judged_by_what_depth_tells(rendered):
    pair = find_sets(str(rendered), SetOptions())[0].pairs[0]
    points0 = np.array([[160.0, 120.0], [100.0, 60.0], [2.0, 100.0], [319.0, 239.0]])
    moved, seen = reproject(points0, pair.view0, pair.view1)
    points1 = np.where(seen[:, None], moved, 50.0) + np.array([[0.5, 0], [6, 0], [0, 0], [0, 0]])
    indices = np.repeat(np.arange(4)[:, None], 2, axis=1)
    features = [Features(points, np.zeros((4, 4)), size=SIZE) for points in (points0, points1)]
    matches = Matches.from_indices(indices, points0, points1, np.ones(4, np.float32))
    result = Result(*features, matches, TwoViewGeometry("none", "not_estimated", np.zeros(4, bool)))
    found = measure_pair(pair, result, [RobustEstimator(EstimationConfig(kind="essential"))]).metrics
    # One within 3 px, one within 10, one that the other picture does not show; the last has no depth.
    assert (found["precision3"], found["precision10"]) == pytest.approx((1 / 3, 2 / 3))
    assert (found["correct3"], found["correct10"]) == (1, 2)


def test_pairs_are_drawn_by_the_angle_between_their_views(recorded):
    frames = []
    for turn in (-20, -10, 0, 10, 20):
        camera = pose(np.radians(turn), [0, 0, 0])
        depth = (1000 * depth_map(camera, 2)).astype(np.uint16)
        cv2.imwrite(str(recorded / "depth" / f"{turn}.png"), depth)
        frames.append({"image": f"{turn}.png", "world_from_camera": np.linalg.inv(camera).tolist()})
    (recorded / "cameras.json").write_text(json.dumps({"K": K_ROOM.tolist(), "frames": frames}))
    listed = [{"image0": "-10.png", "image1": "10.png", "overlap": 0.6}]
    (recorded / "pairs.json").write_text(json.dumps(listed))
    found = drawn(recorded, 8, seed=3)
    kinds = [pair.groups[1] for pair in found]
    assert kinds == ["angle 8–30°"] * 2 + ["angle 30–60°"] * 2
    for pair in found:
        first, second = (int(image.path.stem) for image in (pair.image0, pair.image1))
        assert {first, second} != {-10, 10}
        turned = abs(first - second)
        assert (8 <= turned < 30) == (pair.groups[1] == "angle 8–30°")
        assert 0.2 < min(overlap_of(pair.view0, pair.view1), overlap_of(pair.view1, pair.view0)) < 0.75
    assert [pair.name for pair in drawn(recorded, 8, seed=3)] == [pair.name for pair in found]
