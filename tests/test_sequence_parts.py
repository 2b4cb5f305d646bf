"""Parts of sequences: track ids, guided search, clocks, latency; files of poses, and their errors."""

import cv2
import numpy as np
import pytest

import matcher
from matcher.errors import UsageError
from matcher.match.steering import STEERABLE, rotated_descriptors
from matcher.sequence.frames import Clock, KeptFrame, percentiles
from matcher.sequence.linking import Guide, KeyframeRule, TrackIds, most_similar, search_guided
from matcher.sequence.plot import track_colours
from matcher.sequence.trajectory import (
    align,
    nearest_rows,
    path_length,
    read_poses,
    segment_errors,
    write_trajectory,
    write_tum,
)


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
    return Guide(points, moved, 0.15 * descriptors.shape[1] ** 0.5, radius, fundamental)


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


def test_a_clock_drops_one_late_frame_and_follows_a_reset():
    clock = Clock()
    assert [clock.accepts(t) for t in (1.0, None, 2.0, 2.0, 1.5, 3.0, 0.0, 0.1, 0.2)] == [
        True, True, True, True, False, True, False, True, True,
    ]  # fmt: skip
    with pytest.raises(UsageError):
        clock.accepts(float("nan"))


def test_keyframes_follow_lost_tracks_and_parallax():
    rule = KeyframeRule(kept=0.5, parallax=0.1)
    assert not rule.wants(0.6, 10, (300, 400))
    assert rule.wants(0.4, 10, (300, 400))
    assert rule.wants(0.9, 51, (300, 400))


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


def test_neighbouring_tracks_have_different_colours():
    colours = track_colours(np.arange(1000)).astype(int)
    assert colours.shape == (1000, 3) and colours.max() == 255
    assert np.abs(np.diff(colours, axis=0)).sum(axis=1).min() > 60
    np.testing.assert_array_equal(colours, track_colours(np.arange(1000)))


def test_latency_is_told_by_percentiles():
    assert percentiles([]) == {}
    table = percentiles([{"total": float(value)} for value in range(100, 200)])["total"]
    assert (table["p50"], table["max"]) == (149.5, 199.0) and table["p95"] == pytest.approx(194.05)


@pytest.mark.parametrize("kind", ["sift", STEERABLE])
def test_the_likeliest_keyframe_has_the_same_points(rng, kind):
    def kept(index, descriptors):
        points = np.zeros((len(descriptors), 2), np.float32)
        features = matcher.Features(points, descriptors.astype(np.float32), size=(640, 480), kind=kind)
        return KeptFrame.of(index, features, None)

    scenes = [rng.normal(size=(150, 32)) for _ in range(8)]
    keyframes = [kept(10 * i, scene) for i, scene in enumerate(scenes)]
    for i in (2, 5, 7):
        seen = (scenes[i] + 0.1 * rng.normal(size=(150, 32))).astype(np.float32)
        query = kept(99, rotated_descriptors(seen, kind)[-1])  # turned, where descriptors turn
        likely = most_similar(query, keyframes, 3)
        assert likely[0].index == 10 * i and len(likely) == 3
    assert most_similar(kept(0, scenes[1][:0]), keyframes, 3) == []
    assert most_similar(kept(0, scenes[1]), [], 3) == []


def test_a_file_without_times_needs_a_pose_of_every_frame_and_guesses_are_marked(tmp_path):
    poses = [np.eye(4)] * 3
    with pytest.raises(UsageError, match="1 of 4 frames"):
        write_trajectory(tmp_path / "a.kitti", [0.0, 1.0, 2.0], poses, frames=4)
    assert list(tmp_path.iterdir()) == []
    for name, mark in (("a.kitti", " 1"), ("a.tum", " 1.500000")):
        guesses = [False, True, False]
        write_trajectory(tmp_path / name, [0.0, 1.5, 2.0], poses, frames=3, bridged=guesses)
        np.testing.assert_allclose(read_poses(tmp_path / name)[1], poses)
        marked = [line for line in (tmp_path / name).read_text().splitlines() if "not measured" in line]
        assert len(marked) == 1 and marked[0].startswith("#") and marked[0].endswith(f":{mark}")
        write_trajectory(tmp_path / name, [0.0, 1.5, 2.0], poses, frames=3)
        assert "not measured" not in (tmp_path / name).read_text()
