from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from sequence_world import CAMERA

from matcher.config import ExtractorConfig
from matcher.errors import UsageError
from matcher.extract.sift import SiftExtractor
from matcher.geometry import as_quaternion, as_rotation
from matcher.images import image_from_array, read_image
from matcher.match.steering import STEERABLE, rotated_descriptors
from matcher.sequence.capture import align, nearest_rows, path_length, read_poses, segment_errors, write_tum
from matcher.sequence.frames import (
    AdaptiveContrast,
    Clock,
    FrameLinks,
    Guide,
    Latency,
    TrackIds,
    search_guided,
    typical_limit,
)
from matcher.sequence.keyframe_map import KeyframeIndex
from matcher.sequence.keyframes import KeyframeRule
from matcher.sequence.plot import track_colours
from matcher.sequence.stereo import depths_of, move, partners, project, rays, solve_pose, triangulate, within


def rotation(axis: tuple[float, float, float], degrees: float) -> np.ndarray:
    vector = np.array(axis) / np.linalg.norm(axis)
    return cv2.Rodrigues(np.deg2rad(degrees) * vector)[0]


def test_ids_go_to_one_point_each_and_the_first_offer_counts():
    tracks = TrackIds()
    first, lengths = tracks.extend(4, [])
    assert first.tolist() == [0, 1, 2, 3] and lengths.tolist() == [1, 1, 1, 1]
    offers = [
        (first, np.array([[0, 2], [1, 0]])),
        (np.array([0, 9, 3]), np.array([[0, 1], [1, 0], [2, 1], [2, 3]])),  # 0 is taken, so is point 0
    ]
    second, lengths = tracks.extend(4, offers)
    assert second.tolist() == [1, 3, 0, 4]
    assert lengths.tolist() == [2, 2, 2, 1]
    tracks.forget(np.array([3, 4]))
    assert len(tracks) == 2
    third, lengths = tracks.extend(2, [(second, np.array([[1, 0], [2, 1]]))])
    assert third.tolist() == [3, 0] and lengths.tolist() == [3, 1]
    assert tracks.extend(1, [])[0].tolist() == [5]


@pytest.fixture
def scattered(rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points, the same moved by a smooth motion, and their descriptors."""
    points = rng.uniform(0, [640, 480], (300, 2)).astype(np.float32)
    moved = (points * 1.02 + [5, -3]).astype(np.float32)
    return points, moved, rng.normal(size=(300, 16)).astype(np.float32)


def guide_of(points, moved, descriptors, radius: float = 10.0, fundamental=None) -> Guide:
    noise = np.random.default_rng(0).normal(0, 0.1, descriptors.shape).astype(np.float32)
    limit = typical_limit(descriptors, descriptors + noise)
    return Guide(points, moved, limit, radius, fundamental)


def test_what_matching_missed_is_found_and_what_looks_different_is_not(scattered, rng):
    points, moved, descriptors = scattered
    guide = guide_of(points[:200], moved[:200], descriptors[:200])
    order = rng.permutation(100)
    later = descriptors[200:] + rng.normal(0, 0.08, (100, 16)).astype(np.float32)
    later[:20] = rng.normal(size=(20, 16))
    pairs, scores = search_guided(points[200:], descriptors[200:], moved[200:][order], later[order], guide)
    assert (order[pairs[:, 1]] == pairs[:, 0]).all()
    assert set(pairs[:, 0].tolist()) == set(range(20, 100))
    assert ((scores >= 0) & (scores <= 1)).all()


def test_the_search_stays_near_the_prediction_and_the_epipolar_line(scattered):
    points, moved, descriptors = scattered
    far = moved.copy()
    far[200:] += [0, 14]
    guide = guide_of(points[:200], moved[:200], descriptors[:200])
    assert len(search_guided(points[200:], descriptors[200:], far[200:], descriptors[200:], guide)[0]) == 0
    off = moved.copy()
    off[200:] += [0, 4]
    sideways = np.array([[0, 0, 0], [0, 0, -1], [0, 1, 0.0]])  # rows stay, as in a rectified pair
    right, down = np.array([5, 0], np.float32), np.array([0, 4], np.float32)
    level = guide_of(points[:200], points[:200] + right, descriptors[:200], fundamental=sideways)
    rows, shifted = points[200:] + right, points[200:] + right + down
    assert len(search_guided(points[200:], descriptors[200:], rows, descriptors[200:], level)[0]) == 100
    assert len(search_guided(points[200:], descriptors[200:], shifted, descriptors[200:], level)[0]) == 0


def test_the_search_is_as_strict_as_the_links_are_exact(scattered, rng):
    points, _, descriptors = scattered
    sideways = np.array([[0, 0, 0], [0, 0, -1], [0, 1, 0.0]])
    for noise, tolerance in ((0.1, 0.12), (1.0, 1.0)):
        moved = (points + np.float32([5, 0]) + rng.normal(0, noise, points.shape)).astype(np.float32)
        guide = guide_of(points, moved, descriptors, radius=10.0, fundamental=sideways).narrowed(2.0)
        assert 0.3 * tolerance < guide.tolerance < tolerance
        assert guide.radius == 2.0
    jumpy = (points + np.float32([5, 0]) + rng.normal(0, 30, points.shape)).astype(np.float32)
    wide = guide_of(points, jumpy, descriptors, radius=10.0, fundamental=sideways).narrowed(2.0)
    assert (wide.radius, wide.tolerance) == (10.0, 1.5)
    few = guide_of(points[:3], points[:3], descriptors[:3])
    assert few.narrowed(2.0) is few


def test_without_links_nothing_is_predicted(scattered):
    points, moved, descriptors = scattered
    empty = Guide(points[:3], moved[:3], 1.0, 10.0)
    assert not empty.usable
    assert search_guided(points, descriptors, moved, descriptors, empty)[0].shape == (0, 2)
    full = guide_of(points, moved, descriptors)
    assert search_guided(points[:0], descriptors[:0], moved, descriptors, full)[0].shape == (0, 2)
    assert full.motion(points[:0]).shape == (0, 2)
    assert typical_limit(descriptors[:0], descriptors[:0]) == 0.0


def test_a_clock_drops_one_late_frame_and_follows_a_reset():
    clock = Clock()
    assert [clock.accepts(t) for t in (1.0, None, 2.0, 2.0, 1.5, 3.0, 0.0, 0.1, 0.2)] == [
        True, True, True, True, False, True, False, True, True,
    ]  # fmt: skip
    with pytest.raises(UsageError):
        clock.accepts(float("nan"))


def points_of(features) -> set[tuple[float, ...]]:
    """Place, size and angle of each."""
    columns = (features.keypoints, features.scales[:, None], features.orientations[:, None])
    return {tuple(row) for row in np.concatenate([column.numpy() for column in columns], axis=1).tolist()}


def test_a_threshold_carried_on_finds_the_same_points_and_falls_where_they_are_few(views, monkeypatch):
    extractor, contrast, thresholds = (
        SiftExtractor(ExtractorConfig(max_keypoints=300)),
        AdaptiveContrast(),
        [],
    )
    make = cv2.SIFT_create
    monkeypatch.setattr(
        cv2, "SIFT_create", lambda **given: thresholds.append(given["contrastThreshold"]) or make(**given)
    )
    frame = read_image(views[0]).pixels
    dull = image_from_array((frame // 12 + 100).astype(np.uint8))
    for image in (image_from_array(frame), read_image(views[1]), dull, dull):
        (found,), (alone,) = contrast.extract(extractor, [image]), extractor([image])
        assert len(points_of(found) ^ points_of(alone)) <= 2  # one of several as weak as the last
    low = extractor.config.contrast_threshold
    used = [threshold for threshold in thresholds if threshold != low]
    assert len(used) >= 2 and min(used) > 2 * low  # raised for the second frame and the first dull one
    assert len(thresholds) == 9  # the first dull frame was searched twice


def test_keyframes_follow_lost_tracks_and_parallax():
    rule = KeyframeRule(kept=0.5, parallax=0.1)
    assert not rule.wants(0.6, 10, (300, 400))
    assert rule.wants(0.4, 10, (300, 400))
    assert rule.wants(0.9, 51, (300, 400))


def test_latency_keeps_a_window():
    latency = Latency(window=100)
    assert latency.percentiles() == {}
    for value in range(200):
        latency.add({"total": float(value)})
    table = latency.percentiles()["total"]
    assert len(latency) == 100
    assert (table["p50"], table["max"]) == (149.5, 199.0)
    assert table["p95"] == pytest.approx(194.05)


def test_depth_comes_from_disparity_and_rows_must_agree():
    points = np.array([[100, 50], [100, 60], [100, 70], [100, 80], [100, 90]], np.float32)
    others = np.array([[90, 50.5], [90, 65], [110, 70], [99.9, 80]], np.float32)
    indices = np.column_stack([np.arange(4), np.arange(4)])
    links = FrameLinks(0, indices, np.ones(4, np.float32), np.ones(4, bool))
    right = partners(points, others, links)
    np.testing.assert_array_equal(right[:4], others)
    assert np.isnan(right[4]).all()
    depths = depths_of(points, right, focal=500.0, baseline=0.5)
    assert depths[0] == pytest.approx(25.0)
    assert np.isnan(depths[1:]).all()
    windowed = within(points, right, 2.0)
    assert np.isfinite(windowed[:, 0]).tolist() == [True, False, False, True, False]
    doubtful = FrameLinks(0, indices, links.scores, np.array([False, True, True, True]))
    assert np.isnan(partners(points, others, doubtful)[0]).all()


def test_pose_and_depth_of_a_made_up_scene(rng):
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = rotation((0.2, 1, 0.1), 4), (0.4, -0.1, 0.3)
    points = rng.uniform([0, 0], [640, 480], (200, 2))
    depths = rng.uniform(3, 10, 200)
    world = rays(points, CAMERA) * depths[:, None]
    seen = project(move(world, T), CAMERA)
    noisy = seen + rng.normal(0, 0.3, seen.shape)
    noisy[:40] = rng.uniform([0, 0], [640, 480], (40, 2))
    unknown = depths.copy()
    unknown[100:120] = np.nan
    found, inliers = solve_pose(points, unknown, noisy, CAMERA)
    np.testing.assert_allclose(found, T, atol=0.02)
    assert not inliers[:40].sum() > 4 and inliers[40:100].mean() > 0.9 and not inliers[100:120].any()
    back, angles = triangulate(points, seen, T, CAMERA)
    np.testing.assert_allclose(back[np.isfinite(back)], depths[np.isfinite(back)], rtol=1e-6)
    assert np.isfinite(back).mean() > 0.9 and angles.min() >= 0
    assert solve_pose(points[:11], depths[:11], seen[:11], CAMERA)[0] is None
    assert np.isnan(triangulate(points, points, np.eye(4), CAMERA)[0]).all()


@pytest.mark.parametrize("degrees", [0.0, 1e-6, 10.0, 179.9, 180.0])
def test_quaternions_go_there_and_back(degrees):
    turn = rotation((1, -2, 0.5), degrees)
    quaternion = as_quaternion(turn)
    assert np.linalg.norm(quaternion) == pytest.approx(1.0)
    assert quaternion[3] >= -1e-9
    np.testing.assert_allclose(as_rotation(quaternion), turn, atol=1e-9)


def test_a_known_quaternion():
    np.testing.assert_allclose(as_quaternion(rotation((0, 0, 1), 90)), [0, 0, 0.5**0.5, 0.5**0.5], atol=1e-12)


@pytest.fixture
def curve() -> np.ndarray:
    """61 poses, a metre apart, in a slow turn."""
    poses = [np.eye(4)]
    step = np.eye(4)
    step[:3, :3], step[:3, 3] = rotation((0, 1, 0), 1.0), (0, 0, 1)
    for _ in range(60):
        poses.append(poses[-1] @ step)
    return np.array(poses)


def test_files_of_poses_go_there_and_back(curve, tmp_path):
    write_tum(tmp_path / "p.tum", np.arange(61) / 10, curve)
    times, poses = read_poses(tmp_path / "p.tum")
    np.testing.assert_allclose(times, np.arange(61) / 10)
    np.testing.assert_allclose(poses, curve, atol=1e-6)
    np.savetxt(tmp_path / "k.txt", curve[:, :3].reshape(61, 12))
    times, poses = read_poses(tmp_path / "k.txt")
    assert times is None
    np.testing.assert_allclose(poses, curve)
    for text in ("", "1 2 3\n", "0 0 0 0 0 0 0 0\n", "a b\n"):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(UsageError, match="bad"):
            read_poses(tmp_path / "bad.txt")


def test_segment_errors_are_nothing_for_the_truth_in_another_frame(curve):
    other = np.eye(4)
    other[:3, :3], other[:3, 3] = rotation((1, 1, 0), 50), (3, -2, 9)
    errors = segment_errors(curve, other @ curve)
    assert [error.length for error in errors] == [10, 20, 40]
    assert [error.count for error in errors] == [51, 41, 21]
    assert max(max(error.translation, error.rotation) for error in errors) < 1e-4


def test_segment_errors_of_a_wrong_scale_and_a_wrong_turn(curve):
    longer = curve.copy()
    longer[:, :3, 3] *= 1.02
    for error in segment_errors(curve, longer):
        assert 0.018 < error.translation < 0.0201 and error.rotation < 1e-4
    step = np.eye(4)
    step[:3, :3] = rotation((1, 0, 0), 0.01)
    drifting, total = [np.eye(4)], np.linalg.inv(curve[:-1]) @ curve[1:]
    for motion in total:
        drifting.append(drifting[-1] @ motion @ step)
    for error in segment_errors(curve, np.array(drifting)):
        assert error.rotation == pytest.approx(0.01, rel=0.05)


def test_the_scale_of_one_camera_is_fitted(curve):
    smaller = curve.copy()
    smaller[:, :3, 3] *= 0.2
    np.testing.assert_allclose(align(curve, smaller, with_scale=True), curve, atol=1e-9)
    assert not np.allclose(align(curve, smaller, with_scale=False), curve, atol=0.1)
    np.testing.assert_allclose(path_length(curve), np.arange(61), atol=1e-9)


def test_true_poses_are_found_by_time():
    times = np.array([0.0, 0.3, 0.1, 0.2])
    rows = nearest_rows(np.array([0.001, 0.199, 0.31, 0.35, 9.0]), times)
    assert rows.tolist() == [0, 3, 1, -1, -1]
    assert nearest_rows(np.array([1.0, 2.0]), np.array([2.0])).tolist() == [-1, 0]


@pytest.mark.parametrize("kind", ["sift", STEERABLE])
def test_the_likeliest_keyframe_has_the_same_points(rng, kind):
    class Kept:
        def __init__(self, index: int, descriptors: np.ndarray) -> None:
            self.index, self.descriptors, self.features = index, descriptors, SimpleNamespace(kind=kind)

    scenes = [rng.normal(size=(150, 32)).astype(np.float32) for _ in range(8)]
    keyframes = [Kept(10 * i, scene) for i, scene in enumerate(scenes)]
    index = KeyframeIndex()
    for i in (2, 5, 7):
        seen = scenes[i] + 0.1 * rng.normal(size=(150, 32)).astype(np.float32)
        query = Kept(99, rotated_descriptors(seen, kind)[-1])  # turned, where descriptors turn
        likely = index.candidates(query, keyframes, 3)
        assert likely[0].index == 10 * i and len(likely) == 3
    moved_on = [Kept(100 + i, scene) for i, scene in enumerate(scenes[:3])]
    assert index.candidates(Kept(0, scenes[1]), moved_on, 1)[0].index == 101
    assert index.candidates(Kept(0, scenes[1][:0]), keyframes, 3) == []
    assert index.candidates(Kept(0, scenes[1]), [], 3) == []


def test_neighbouring_tracks_have_different_colours():
    colours = track_colours(np.arange(1000)).astype(int)
    assert colours.shape == (1000, 3) and colours.max() == 255
    assert np.abs(np.diff(colours, axis=0)).sum(axis=1).min() > 60
    np.testing.assert_array_equal(colours, track_colours(np.arange(1000)))
