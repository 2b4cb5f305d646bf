import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from sequence_world import BASELINE, BLACK, CAMERA, RIGHT, World, truth_of

import matcher
from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.errors import ImageError, UsageError
from matcher.sequence.frames import FrameResult
from matcher.verify.estimation import RobustEstimator


def make_tracker(world: World, **options) -> matcher.Tracker:
    return matcher.Tracker(world.pipeline(), **options)


def drive(tracker: matcher.Tracker, world: World, frames, *, stereo: bool = False) -> list[FrameResult]:
    results = []
    for frame in frames:
        if stereo:
            results.append(tracker.push_stereo(world.picture(frame), world.picture(frame + RIGHT), frame))
        else:
            results.append(tracker.push(world.picture(frame), frame))
    return results


def names(world: World, results: list[FrameResult], frames) -> dict[int, set[int]]:
    """Track id → the true points that carried it."""
    carried: dict[int, set[int]] = {}
    for result, frame in zip(results, frames, strict=True):
        if not result.passed_over:
            for track, point in zip(result.track_ids.tolist(), world.seen[frame].tolist(), strict=True):
                carried.setdefault(track, set()).add(point)
    return carried


def test_a_track_is_one_point_and_a_point_seen_on_and_on_is_one_track():
    world = World()
    results = drive(make_tracker(world), world, range(25))
    carried = names(world, results, range(25))
    assert np.mean([len(points) == 1 for points in carried.values()]) > 0.995
    last, before = results[-1], results[-2]
    both = np.intersect1d(world.seen[24], world.seen[23], return_indices=True)
    same = last.track_ids[both[1]] == before.track_ids[both[2]]
    assert same.mean() > 0.97
    assert len(np.unique(last.track_ids)) == len(last.track_ids)
    # A tenth of the points is missing from each frame; those that return have their old id.
    per_point = {}
    for track, points in carried.items():
        for point in points:
            per_point.setdefault(point, []).append(track)
    assert np.mean([len(tracks) for tracks in per_point.values()]) < 1.15


def test_links_are_true_and_point_at_the_frames_they_name():
    world = World()
    results = drive(make_tracker(world), world, range(12))
    for frame, result in enumerate(results[1:], start=1):
        for links in (result.to_previous, result.to_keyframe):
            assert links.indices.shape == (len(links), 2)
            good = links.indices[links.consistent]
            assert len(good) > 50
            right = world.seen[links.frame][good[:, 0]] == world.seen[frame][good[:, 1]]
            assert right.mean() > 0.99
        assert result.to_previous.frame == frame - 1
        assert result.to_keyframe.frame == result.keyframe


def test_everything_at_the_boundary_is_contiguous_numpy():
    world = World()
    result = drive(make_tracker(world, camera=CAMERA, baseline=BASELINE), world, range(3), stereo=True)[-1]
    wanted = {
        "keypoints": np.float32, "track_ids": np.int64, "track_lengths": np.int64, "depths": np.float64,
        "world_from_cam": np.float64, "cam_from_keyframe": np.float64,
    }  # fmt: skip
    for name, dtype in wanted.items():
        value = getattr(result, name)
        assert type(value) is np.ndarray and value.dtype == dtype and value.flags.c_contiguous, name
    for links in (result.to_previous, result.to_keyframe):
        for value in (links.indices, links.scores, links.consistent):
            assert type(value) is np.ndarray and value.flags.c_contiguous
    assert list(result.milliseconds) == ["read", "extract", "match", "verify", "pose", "total"]
    parts = list(result.milliseconds.values())
    assert sum(parts[:-1]) == pytest.approx(parts[-1])


@pytest.mark.parametrize("size", [(320, 240), (960, 720)])
def test_depths_stay_metric_after_the_frame_size_changes(size):
    world = World(noise=0.05)
    tracker = make_tracker(world, camera=CAMERA, baseline=BASELINE)
    drive(tracker, world, range(2), stereo=True)
    result = tracker.push_stereo(world.picture(2, size), world.picture(2 + RIGHT, size))
    T = world.pose(2)
    local = (world.places[world.seen[2]] - T[:3, 3]) @ T[:3, :3]
    known = np.isfinite(result.depths) & np.isfinite(result.right[:, 0])
    assert known.sum() > 50
    assert abs(np.median(result.depths[known] / local[known, 2]) - 1) < 0.01
    scale = size[0] / 640
    assert result.camera.size == size
    assert result.camera.K[:2, 2] == pytest.approx(((319.5 + 0.5) * scale - 0.5, (239.5 + 0.5) * scale - 0.5))
    assert result.camera.fx == pytest.approx(500 * scale)


def test_a_camera_is_taken_in_every_form():
    numbers = (500.0, 500.0, 319.5, 239.5)
    for camera in (numbers, Camera(*numbers).K):
        assert matcher.Tracker("nearest", camera).camera == Camera(*numbers)
    with pytest.raises(matcher.UsageError, match="camera"):
        matcher.Tracker("nearest", (500.0, 500.0))


def test_thresholds_of_a_pipeline_are_used():
    world = World(noise=1.0)
    counts = []
    for pixels in (0.2, 4.0):
        pipeline = world.pipeline()
        config = replace(pipeline.config, estimation=EstimationConfig(max_epipolar_error=pixels))
        estimator = RobustEstimator(config.estimation)
        tracker = matcher.Tracker(replace(pipeline, config=config, estimator=estimator), guided=False)
        counts.append(drive(tracker, world, range(2))[-1].to_previous.consistent.sum())
    assert counts[0] < 0.7 * counts[1]


@pytest.mark.parametrize("kind", ["essential", "homography", "none"])
def test_another_geometry_is_refused(kind):
    with pytest.raises(UsageError, match="fundamental"):
        matcher.Tracker("nearest", geometry=kind)
    pipeline = World().pipeline()
    config = replace(pipeline.config, estimation=EstimationConfig(kind=kind))
    with pytest.raises(UsageError, match="fundamental"):
        matcher.Tracker(replace(pipeline, config=config))


def test_changing_a_result_does_not_change_what_follows():
    world = World()
    tracker = make_tracker(world)
    first = drive(tracker, world, [0])[0]
    for array in (first.keypoints, first.track_ids):
        array[:] = 0
    second = drive(tracker, world, [1])[0]
    assert (second.pose_status, second.world_from_cam, second.depths) == ("no_camera", None, None)
    assert second.to_previous.consistent.sum() > 80
    assert len(np.unique(second.track_ids)) == len(second.track_ids)


def test_pairs_give_metric_poses_and_depths():
    world = World()
    results = drive(make_tracker(world, camera=CAMERA, baseline=BASELINE), world, range(30), stereo=True)
    found, truth = np.array([r.world_from_cam for r in results]), truth_of(world, range(30))
    assert {r.pose_status for r in results} == {"ok"}
    assert np.linalg.norm(found[-1, :3, 3] - truth[-1, :3, 3]) < 0.02 * 0.12 * 29
    turns = np.trace(found[:, :3, :3].transpose(0, 2, 1) @ truth[:, :3, :3], axis1=1, axis2=2)
    assert np.rad2deg(np.arccos(np.clip((turns - 1) / 2, -1, 1))).max() < 0.6
    result, T = results[5], world.pose(5)
    local = (world.places[world.seen[5]] - T[:3, 3]) @ T[:3, :3]
    known = np.isfinite(result.depths)
    assert known.mean() > 0.6
    assert np.median(np.abs(result.depths[known] / local[known, 2] - 1)) < 0.02
    assert 2 < sum(r.is_keyframe for r in results) < 15


def test_one_camera_gives_the_path_up_to_scale():
    world = World()
    results = drive(make_tracker(world, camera=CAMERA), world, range(40))
    known = [i for i, r in enumerate(results) if r.world_from_cam is not None]
    assert known[-30:] == list(range(10, 40))
    found = np.array([results[i].world_from_cam for i in known])[:, :3, 3]
    truth = truth_of(world, range(40))[known, :3, 3]
    scale = np.sum(found * truth) / np.sum(found * found)
    assert np.linalg.norm(scale * found - truth, axis=1).max() < 0.05 * np.linalg.norm(truth[-1])


def test_identical_frames_are_one_place_and_one_keyframe():
    world = World(flicker=0.0, noise=0.0)
    results = drive(make_tracker(world, camera=CAMERA, baseline=BASELINE), world, [3] * 6, stereo=True)
    assert [r.is_keyframe for r in results] == [True] + [False] * 5
    for result in results[1:]:
        np.testing.assert_array_equal(result.track_ids, results[0].track_ids)
        np.testing.assert_allclose(result.world_from_cam, np.eye(4), atol=1e-3)
        assert result.parallax == 0.0 and result.kept == 1.0
    mono = drive(make_tracker(world, camera=CAMERA), world, [3] * 4)
    assert [r.pose_status for r in mono] == ["ok", "starting", "starting", "starting"]


def test_a_black_and_a_dropped_frame_are_passed_over():
    world = World()
    tracker = make_tracker(world, camera=CAMERA, baseline=BASELINE)
    drive(tracker, world, range(5), stereo=True)
    black = tracker.push_stereo(world.picture(BLACK), world.picture(BLACK), 5)
    dropped = [tracker.push(None, 6), tracker.push_stereo(None, world.picture(RIGHT), 7)]
    assert [r.status for r in (black, *dropped)] == ["blank", "dropped", "dropped"]
    assert all(
        r.passed_over and len(r.keypoints) == 0 and r.world_from_cam is None for r in (black, *dropped)
    )
    after = drive(tracker, world, [8], stereo=True)[0]
    assert (after.index, after.status, after.pose_status, after.to_previous.frame) == (8, "tracked", "ok", 4)
    assert np.linalg.norm(after.world_from_cam[:3, 3] - truth_of(world, range(9))[-1, :3, 3]) < 0.05
    assert (after.track_lengths > 3).sum() > 50


def test_frames_of_another_size_are_tracked_and_have_a_pose_if_only_resized():
    world = World()
    tracker = make_tracker(world, camera=CAMERA, baseline=BASELINE)
    drive(tracker, world, range(3), stereo=True)
    smaller = tracker.push(world.picture(3, (320, 240)), 3)
    assert (smaller.size, smaller.status, smaller.pose_status) == ((320, 240), "tracked", "ok")
    truth = truth_of(world, range(6))
    assert np.linalg.norm(smaller.world_from_cam[:3, 3] - truth[3, :3, 3]) < 0.05
    other = tracker.push(world.picture(4, (640, 240)), 4)
    assert (other.status, other.pose_status, other.world_from_cam) == ("tracked", "other_size", None)
    back = drive(tracker, world, [5], stereo=True)[0]
    assert back.pose_status == "ok"
    assert np.linalg.norm(back.world_from_cam[:3, 3] - truth[5, :3, 3]) < 0.05


def test_late_frames_are_passed_over_and_a_clock_set_back_is_followed():
    world = World()
    tracker = make_tracker(world)
    drive(tracker, world, range(4))
    late = tracker.push(world.picture(2), 1.5)
    assert late.status == "out_of_order" and len(late.keypoints) == 0
    assert tracker.push(world.picture(4), 4.0).to_previous.frame == 3
    statuses = [tracker.push(world.picture(5 + i), 0.1 * i).status for i in range(3)]
    assert statuses == ["out_of_order", "tracked", "tracked"]
    for bad in (float("nan"), float("inf"), "noon"):
        with pytest.raises(UsageError, match="timestamp"):
            tracker.push(world.picture(8), bad)
    assert tracker.push(world.picture(8), 0.9).status == "tracked"


def test_after_a_jump_tracks_begin_anew_and_the_path_goes_on():
    world = World(jump={10: 15.0})
    tracker = make_tracker(world, camera=CAMERA, baseline=BASELINE)
    results = drive(tracker, world, range(20), stereo=True)
    assert [r.status for r in results[9:12]] == ["tracked", "lost", "tracked"]
    assert (results[10].pose_status, results[10].is_keyframe) == ("bridged", True)
    assert not np.isin(results[10].track_ids, np.concatenate([r.track_ids for r in results[:10]])).any()
    step = np.linalg.inv(results[10].world_from_cam) @ results[15].world_from_cam
    wanted = np.linalg.inv(world.pose(10)) @ world.pose(15)
    np.testing.assert_allclose(step, wanted, atol=0.03)


def test_a_place_seen_before_is_found_again_after_a_loss():
    world = World()
    tracker = make_tracker(world, camera=CAMERA, baseline=BASELINE)
    before = drive(tracker, world, range(12), stereo=True)
    drive(tracker, world, range(200, 203), stereo=True)
    again = tracker.push_stereo(world.picture(4), world.picture(4 + RIGHT))
    assert again.status == "tracked" and again.keyframe <= 11
    np.testing.assert_allclose(again.world_from_cam, before[4].world_from_cam, atol=0.05)
    assert np.isin(again.track_ids, before[4].track_ids).mean() > 0.5


def test_relocalise_names_the_keyframe_and_the_pose_and_changes_nothing():
    world = World()
    tracker = make_tracker(world, camera=CAMERA, baseline=BASELINE)
    results = drive(tracker, world, range(40), stereo=True)
    kept = tracker.keyframes
    found = tracker.relocalise(world.picture(20))
    assert found.keyframe in kept and abs(found.keyframe - 20) < 10
    assert found.candidates[0] in kept and len(found.candidates) == 3
    assert found.links.frame == found.keyframe and found.links.consistent.sum() > 50
    np.testing.assert_allclose(found.world_from_cam, results[20].world_from_cam, atol=0.08)
    assert tracker.keyframes == kept
    assert drive(tracker, world, [40], stereo=True)[0].index == 40
    nowhere = World(seed=9)
    elsewhere = matcher.Tracker(nowhere.pipeline(), camera=CAMERA)
    drive(elsewhere, nowhere, range(3))
    assert elsewhere.relocalise(nowhere.picture(150)).keyframe is None
    assert elsewhere.relocalise(nowhere.picture(BLACK)).keyframe is None


def test_an_image_that_cannot_be_read_leaves_the_sequence_as_it_was(tmp_path):
    world = World()
    tracker = make_tracker(world)
    drive(tracker, world, range(2))
    with pytest.raises(ImageError, match="absent"):
        tracker.push(tmp_path / "absent.png", 2)
    assert tracker.push(None, 2).index == 2
    assert tracker.push(world.picture(3), 3).to_previous.frame == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"window": 1}, "window"),
        ({"max_keypoints": 5}, "max_keypoints"),
        ({"camera": Camera(500, 500, 319.5, 239.5, model="SIMPLE_RADIAL", distortion=(0.1,))}, "undistort"),
    ],
)
def test_values_that_cannot_be_used_are_refused(options, word):
    with pytest.raises(UsageError, match=word):
        make_tracker(World(), **options)


def test_cells_of_a_grid_and_unequal_pairs_are_refused():
    world = World()
    pipeline = world.pipeline()
    grid = replace(pipeline.config, extractor=replace(pipeline.config.extractor, kind="loftr"))
    with pytest.raises(UsageError, match="grid"):
        matcher.Tracker(replace(pipeline, config=grid))
    tracker = make_tracker(world)
    with pytest.raises(ImageError, match="one size"):
        tracker.push_stereo(world.picture(0), world.picture(RIGHT, (320, 240)))
    assert drive(tracker, world, range(2), stereo=True)[-1].status == "tracked"


def test_memory_is_bounded_and_latency_is_kept():
    world = World(points_a_metre=8, step=0.25)
    tracker = make_tracker(world, window=3)
    sizes = []
    tracemalloc.start()
    for start in range(0, 80, 20):
        drive(tracker, world, range(start, start + 20))
        world.seen.clear()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert abs(sizes[-1] - sizes[1]) < 200_000
    assert len(tracker.keyframes) == 3
    table = tracker.latency()
    assert list(table) == ["read", "extract", "match", "verify", "pose", "total"]
    assert table["total"]["p50"] <= table["total"]["p95"] <= table["total"]["p99"] <= table["total"]["max"]
