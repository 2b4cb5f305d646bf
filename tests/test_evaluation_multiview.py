"""Sets of several calibrated views with depth, on a made-up room of one slanted wall."""

import json

import cv2
import numpy as np
import pytest

import matcher
from matcher.config import EstimationConfig
from matcher.errors import ImageError, IntegrityError, UsageError
from matcher.evaluate.folders import drawn, overlap_of
from matcher.evaluate.measure import measure_pair
from matcher.evaluate.methods import Method
from matcher.evaluate.protocols import DepthCamera, DepthPair, depth_at, reproject
from matcher.evaluate.run import evaluate
from matcher.evaluate.sets import SetOptions, data_folder, find_sets
from matcher.result import Result
from matcher.types import Features, Matches, TwoViewGeometry
from matcher.verify.estimation import RobustEstimator

SIZE = (320, 240)
K = np.array([[280.0, 0, 159.5], [0, 280, 119.5], [0, 0, 1]])
PLANE = np.array([0.2, 0.0, 1.0, -2.5])  # n · X + d = 0 in the world, metres
needs_rooms = pytest.mark.skipif(
    not (data_folder() / "multiview").is_dir(), reason="MATCHER_DATA has no multiview/"
)


def pose(turn, centre):
    R = cv2.Rodrigues(np.array([0.0, turn, 0.0]))[0]
    return np.vstack([np.column_stack([R, -R @ np.array(centre)]), [0, 0, 0, 1]])


POSES = [pose(0, [0, 0, 0]), pose(-0.08, [0.25, 0, 0]), pose(-0.08, [0.25, 0, 0])]


def plane_in(camera):
    return np.linalg.inv(camera).T @ PLANE


def depth_map(camera, step):
    xs, ys = np.meshgrid(*(np.arange(0, side, step) for side in SIZE))
    rays = np.stack([xs, ys, np.ones_like(xs)], -1) @ np.linalg.inv(K).T
    n = plane_in(camera)
    return -n[3] / (rays @ n[:3])


def picture_of(camera, texture):
    """The wall seen by a camera: a homography from the first one, whose picture is the texture."""
    first, pose = plane_in(POSES[0]), camera @ np.linalg.inv(POSES[0])
    H = K @ (pose[:3, :3] - np.outer(pose[:3, 3], first[:3]) / first[3]) @ np.linalg.inv(K)
    return cv2.warpPerspective(texture, H, SIZE, flags=cv2.INTER_LINEAR), H


@pytest.fixture
def texture(rng):
    noise = rng.integers(0, 256, (60, 80)).astype(np.uint8)
    return cv2.resize(noise, SIZE, interpolation=cv2.INTER_CUBIC)


@pytest.fixture
def rendered(tmp_path, texture):
    folder, views = tmp_path / "shop", []
    folder.mkdir()
    for number, camera in enumerate(POSES):
        cv2.imwrite(str(folder / f"{number}.png"), picture_of(camera, texture)[0])
        depth = np.rint(depth_map(camera, 2) * 1000).astype(np.uint16)
        cv2.imwrite(str(folder / f"{number}_depth.png"), depth)
        row = {"image": f"{number}.png", "depth": f"{number}_depth.png", "group": 0, "pose": min(number, 1)}
        views.append({**row, "light": int(number > 1), "K": K.tolist(), "E": camera.tolist()})
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
    (folder / "cameras.json").write_text(json.dumps({"K": K.tolist(), "frames": frames}))
    pairs = [{"image0": "0.png", "image1": "1.png", "overlap": 0.8, "angle_deg": 3, "baseline_m": 0.25}]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    return folder


def cameras(folder):
    return [DepthCamera(folder / f"{n}_depth.png", 2, K, POSES[n]) for n in (0, 1)]


def test_reprojection_follows_the_wall_and_knows_what_is_hidden(rendered, rng):
    view0, view1 = cameras(rendered)
    points = np.array([[10.3, 20.7], [200.5, 99.25], [-3, 5], [5, 239.4], [np.nan, 1]])
    n = plane_in(POSES[0])
    rays = np.column_stack([points, np.ones(5)]) @ np.linalg.inv(K).T
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
    boxed = DepthCamera(rendered / "box_depth.png", 2, K, POSES[1])
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
    path.write_text(json.dumps({"views": views, "depth_step": 2}))
    (rendered / "pairs.json").write_text(json.dumps([[0, 2, 0.5, 4.6]]))
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
    (recorded / "cameras.json").write_text(json.dumps({"K": K.tolist(), "frames": frames}))
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


@needs_rooms
def test_both_rooms_are_read_whole():
    kitchen, bookstore, light = find_sets("multiview", SetOptions())
    assert (kitchen.name, len(kitchen), len(light)) == ("kitchen", 73, 4)
    assert len(bookstore) > 60
    assert find_sets("kitchen", SetOptions(pairs=3))[0].name == "kitchen"
