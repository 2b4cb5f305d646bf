"""A tracker makes a map of its keyframes; a second run is localised in it, also from the command line."""

import os
import signal
import threading
from dataclasses import replace
from time import perf_counter

import cv2
import numpy as np
import PIL.Image
import pytest
import torch
from sequence_walls import BASELINE, make_walls, picture, write_pairs
from sequence_walls import CAMERA as CAMERA_TEXT

import matcher
from matcher.cameras import Camera
from matcher.cli import main
from matcher.cli.track import _leave_a_core as leave_a_core
from matcher.errors import MatcherError, UsageError
from matcher.processes import thread_environment
from matcher.sequence.background import LatePoses, LocalizedFrame, start
from matcher.sequence.capture import read_poses
from matcher.sequence.frames import KEPT, FrameResult
from matcher.sequence.keyframe_map import FrameLookup, MapTracking

pytest.importorskip("pycolmap")
CAMERA = Camera(*map(float, CAMERA_TEXT.split(",")), size=(320, 240))
FAST = {"max_keypoints": 400}
STEP = 0.12  # between the frames of the first run, in metres


@pytest.fixture(scope="module")
def walls():
    return make_walls()


@pytest.fixture(scope="module")
def saved(walls, tmp_path_factory):
    """The folder of a map that a stereo tracker made along two walls, and its trajectory."""
    folder = tmp_path_factory.mktemp("saved") / "map"
    keyframes = matcher.KeyframeMap(folder, CAMERA, "nearest", **FAST)
    tracker = matcher.Tracker("nearest", CAMERA, baseline=BASELINE, keyframe_map=keyframes, **FAST)
    for number in range(12):
        x = STEP * number
        tracker.push_stereo(picture(walls, x), picture(walls, x + BASELINE))
    return folder, tracker.save_map()


def test_the_paths_before_and_after_are_recorded(saved, tmp_path):
    pytest.importorskip("rerun")
    file = saved[1].record(tmp_path / "paths.rrd")
    data = file.read_bytes()
    assert data.startswith(b"RRF") and list(tmp_path.iterdir()) == [file]
    for entity in (b"world/tracked", b"world/adjusted", b"moved_by"):
        assert entity in data


def test_the_camera_of_a_map_is_the_one_that_was_given(saved):
    with matcher.Map.open(saved[0]) as place:
        assert {(c.fx, c.fy, c.cx, c.cy) for c in place.model.cameras} == {
            (CAMERA.fx, CAMERA.fy, CAMERA.cx, CAMERA.cy)
        }


def test_a_second_run_is_in_the_map_of_the_first(saved, walls):
    folder, closed = saved
    assert closed.frames.tolist() == list(range(12))
    tracker = matcher.Tracker("nearest", CAMERA, baseline=BASELINE, **FAST)
    tracker.load_map(folder, timing="inline")
    for number in range(6):
        x = 0.5 + 0.1 * number
        result = tracker.push_stereo(picture(walls, x), picture(walls, x + BASELINE))
        assert result.map_from_cam is not None, number
        np.testing.assert_allclose(result.map_from_cam[:3, 3], [x, 0, 0], atol=0.03)
        np.testing.assert_allclose(result.world_from_cam[:3, 3], [x - 0.5, 0, 0], atol=0.03)
        assert result.milliseconds["total"] >= result.milliseconds["map"] > 0
    assert tracker.problem is None
    tracker.unload_map()
    assert tracker.push(picture(walls, 1.1)).map_from_cam is None


def test_one_camera_learns_the_unit_of_the_map(saved, walls):
    folder, _ = saved
    tracker = matcher.Tracker("nearest", CAMERA, **FAST)
    tracker.load_map(folder, timing="inline")
    found = {}
    for number in range(10):
        x = 0.2 + 0.1 * number
        result = tracker.push(picture(walls, x))
        if result.map_from_cam is not None:
            found[number] = abs(result.map_from_cam[0, 3] - x)
    assert len(found) >= 5 and max(found) == 9 and max(found.values()) < 0.05, found


def test_no_frame_waits_for_the_map_in_the_background(saved, walls):
    folder, _ = saved
    tracker = matcher.Tracker("nearest", CAMERA, baseline=BASELINE, **FAST)
    tracker.load_map(folder)
    try:
        first = tracker.push_stereo(picture(walls, 0.5), picture(walls, 0.5 + BASELINE))
        assert first.map_from_cam is None and first.milliseconds["map"] < 50
        for answer in tracker._in_map._lookup.answers(wait=True):
            tracker._in_map._take(answer)
        result = tracker.push_stereo(picture(walls, 0.55), picture(walls, 0.55 + BASELINE))
        np.testing.assert_allclose(result.map_from_cam[:3, 3], [0.55, 0, 0], atol=0.03)
    finally:
        tracker.unload_map()


def test_beside_another_process_a_core_is_left_free(saved, walls, monkeypatch, tmp_path):
    """Threads are fewer while a frame is tracked, and only then; a number that the user gave is kept."""
    monkeypatch.setattr("matcher.processes.usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    counts, before = [], (torch.get_num_threads(), cv2.getNumThreads())
    tracker = matcher.Tracker("nearest", CAMERA, **FAST)
    extract = tracker._frames.extract

    def counted(images):
        counts.append((torch.get_num_threads(), cv2.getNumThreads()))
        return extract(images)

    monkeypatch.setattr(tracker._frames, "extract", counted)

    def push():
        counts.clear()
        tracker.push(picture(walls, 0.5))
        return set(counts)

    torch.set_num_threads(4)
    cv2.setNumThreads(4)
    try:
        assert push() == {(4, 4)}  # no map
        tracker.load_map(saved[0], timing="inline")
        assert push() == {(4, 4)}
        tracker.load_map(saved[0])
        assert push() == {(3, 3)} and (torch.get_num_threads(), cv2.getNumThreads()) == (4, 4)
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert push() == {(4, 4)}
        monkeypatch.delenv("OMP_NUM_THREADS")
        tracker.unload_map()
        tracker.keyframe_map = matcher.KeyframeMap(
            tmp_path / "map", CAMERA, "nearest", loops="background", **FAST
        )
        assert push() == {(3, 3)}
        tracker.keyframe_map.close()
        assert push() == {(4, 4)}
    finally:
        tracker.unload_map()
        torch.set_num_threads(before[0])
        cv2.setNumThreads(before[1])


def test_all_cores_for_tracking_are_the_users_choice(monkeypatch, caplog, walls, tmp_path):
    monkeypatch.setattr("matcher.processes.usable_cores", lambda: 2)
    monkeypatch.setattr("matcher.processes.compute_threads", lambda: 2)
    arguments = (tmp_path, None, None, "background")

    def said(engine=None):
        caplog.clear()
        with caplog.at_level("INFO", "matcher"):
            leave_a_core(*arguments, budget_ms=200.0, engine=engine)
        return caplog.text

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "--threads 1 leaves it one" in said()
    arguments = (tmp_path, "end", None, "background")
    assert not said()  # nothing works beside it
    arguments = (None, None, tmp_path, "background")
    assert "--threads 1" in said()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert not said() and "OMP_NUM_THREADS" not in os.environ
    for name in thread_environment(1):
        monkeypatch.setenv(name, "")
    assert not said("onnx") and os.environ["OMP_NUM_THREADS"] == "1"


def test_nobody_waits_for_a_process_that_does_not_take_a_large_request():
    """A frame is more than a socket holds, and the process may have no core for a while."""
    beside = start(len, "background")
    try:
        assert beside.answers(wait=True) == [] and not beside.busy  # it is ready
        beside._process.send_signal(signal.SIGSTOP)
        rescue = threading.Timer(5, beside._process.send_signal, [signal.SIGCONT])
        rescue.start()
        begun = perf_counter()
        beside.offer(bytes(10_000_000))
        assert beside.answers() == [] and beside.busy
        assert perf_counter() - begun < 2
        rescue.cancel()
        beside._process.send_signal(signal.SIGCONT)
        assert beside.answers(wait=True) == [10_000_000] and beside.problem is None
        beside._process.send_signal(signal.SIGSTOP)
        beside.offer(bytes(10_000_000))  # and it ends while that is on the way
    finally:
        beside.close()


def test_the_process_beside_tracking_opens_the_map_before_the_first_frame(tmp_path):
    beside = start(FrameLookup(tmp_path / "gone", {}), "background")
    try:
        with pytest.raises(MatcherError, match="is not a folder"):
            beside.answers(wait=True)  # nothing was offered yet
    finally:
        beside.close()


def tracked(index, status="tracked", pose_status="ok", x=0.0):
    """A frame `x` to the right."""
    pose = np.eye(4)
    pose[0, 3] = x
    nothing = {"keypoints": np.zeros((0, 2)), "track_ids": np.zeros(0), "track_lengths": np.zeros(0)}
    known = {"world_from_cam": pose, "camera": CAMERA, "pose_status": pose_status}
    return FrameResult(index, None, status, (320, 240), **known, **nothing)


def test_the_image_of_a_frame_may_be_changed_once_it_was_handed_over(saved, monkeypatch):
    """It is sent by a thread, perhaps later."""
    followed, offered = MapTracking(saved[0], measured=True, timing="inline"), []
    monkeypatch.setattr(followed._lookup, "offer", offered.append)
    buffer = np.full((240, 320), 7, np.uint8)
    followed.follow(tracked(0, "first"), buffer)
    buffer[:] = 0
    assert (offered[0][1] == 7).all()


def test_frames_are_localised_by_what_their_masks_keep(saved, walls):
    followed = MapTracking(saved[0], measured=True, timing="inline")
    here, keep = picture(walls, 0.5), np.ones((240, 320), bool)
    assert followed.follow(tracked(0), here, mask=keep) is not None
    followed = MapTracking(saved[0], measured=True, timing="inline")
    assert followed.follow(tracked(0), here, mask=np.zeros_like(keep)) is None


def test_after_a_loss_the_map_is_found_anew(saved, walls):
    """Where tracking bridges a loss by a guess, frames have no pose in the map until one is localised."""
    folder, _ = saved
    followed = MapTracking(folder, measured=True, timing="inline")

    def follow(index, status, pose_status, image, x):
        return followed.follow(tracked(index, status, pose_status, x), image)

    here = picture(walls, 0.5)
    assert follow(0, "first", "ok", here, 0.0)[0, 3] == pytest.approx(0.5, abs=0.03)
    elsewhere = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
    assert follow(1, "tracked", "ok", elsewhere, 0.1)[0, 3] == pytest.approx(0.6, abs=0.03)  # by tracking
    assert follow(2, "lost", "bridged", elsewhere, 0.2) is None
    assert follow(3, "tracked", "ok", elsewhere, 7.0) is None
    assert follow(4, "tracked", "ok", here, 9.0)[0, 3] == pytest.approx(0.5, abs=0.03)
    assert followed.found == 2
    late = LocalizedFrame(1, np.eye(4), np.eye(4), 0.01)  # of a frame before the loss
    followed._take(late)
    assert followed.found == 2


def test_mistakes_name_their_remedy(tmp_path, walls, capfd):
    tracker = matcher.Tracker("nearest", CAMERA)
    with pytest.raises(UsageError, match="keyframe_map="):
        tracker.save_map()
    with pytest.raises(UsageError, match="is not a folder"):
        tracker.load_map(tmp_path / "none")
    with pytest.raises(UsageError, match="poses need a camera"):
        matcher.Tracker("nearest").load_map(tmp_path)
    with pytest.raises(UsageError, match="background or inline"):
        start(print, "later")


def test_the_command_saves_and_loads_a_map(tmp_path, walls, capfd):
    left, right, _ = write_pairs(tmp_path, walls, count=22)
    camera = ("--camera", CAMERA_TEXT)
    stereo = (*camera, "--right", right, "--baseline", BASELINE)
    fast = ("--preset", "nearest", "--max-keypoints", 400)
    inline = ("--load-map", tmp_path / "map", "--lookup", "inline")

    def track(*arguments):
        return main([str(value) for value in ("track", *arguments, *fast)])

    assert track(left, *stereo, "--map", tmp_path / "map", "--loops", "end") == 0
    assert track(left, *stereo, *inline, "--output", tmp_path / "in_map.tum") == 0
    assert "22 of 22 frames have a pose in the map" in capfd.readouterr().out
    _, poses = read_poses(tmp_path / "in_map.tum")
    np.testing.assert_allclose(poses[:, 0, 3], 0.05 * np.arange(22), atol=0.02)
    assert track(left, "--load-map", tmp_path / "map") == 2
    assert "--load-map needs poses" in capfd.readouterr().err
    assert track(left, *camera, "--loops", "inline") == 2
    assert "--loops needs --map" in capfd.readouterr().err
    assert track(left, *camera, "--lookup", "inline") == 2
    assert "--lookup needs --load-map" in capfd.readouterr().err
    assert track(tmp_path / "map", "--map", tmp_path / "map") == 2
    assert "is finished" in capfd.readouterr().err
    (tmp_path / "begun").mkdir()
    assert track(tmp_path / "begun", "--map", tmp_path / "begun") == 2
    assert "holds no unfinished map" in capfd.readouterr().err
    (tmp_path / "begun" / KEPT).touch()
    assert track(tmp_path / "begun", "--map", tmp_path / "begun", "--fps", 2, "--budget-ms", 50) == 2
    assert "leave out --budget-ms, --fps, --max-keypoints, --preset" in capfd.readouterr().err
    (tmp_path / "noise").mkdir()
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 255, (240, 320), dtype=np.uint8)
        PIL.Image.fromarray(noise).save(tmp_path / "noise" / f"{number}.png")
    assert track(tmp_path / "noise", *camera, *inline, "--output", tmp_path / "none.tum") != 0
    assert "no frame has a pose in the map" in capfd.readouterr().err


class Starved:
    """A process beside tracking that gets no core: it answers nothing, and keeps the last that it is sent."""

    beside, busy, problem = True, True, None

    def __init__(self):
        self.held, self.closed = [], False

    def offer(self, request):
        replaced = self.held.pop() if len(self.held) == 2 else None
        self.held.append(request)
        return replaced

    def unanswered(self):
        return list(self.held)

    def answers(self, *, wait=False):
        assert wait is not True  # nobody may wait for it without an end
        return []

    def close(self):
        self.closed = True


@pytest.fixture
def starved(monkeypatch):
    """The process of maps that are loaded, which gets no core."""
    process = Starved()
    monkeypatch.setattr("matcher.sequence.background.start", lambda task, timing: process)
    monkeypatch.setattr("matcher.sequence.keyframe_map._PATIENCE", 0.01)
    return process


def test_on_a_busy_machine_poses_in_the_map_come_at_the_end(saved, walls, starved, tmp_path, capfd):
    left, right, _ = write_pairs(tmp_path, walls, count=8)
    stereo = ("--right", right, "--baseline", BASELINE)
    fast = ("--camera", CAMERA_TEXT, "--preset", "nearest", "--max-keypoints", 400, "--load-map", saved[0])

    def track(*arguments):
        starved.held.clear()
        return main([str(value) for value in ("track", left, *fast, *arguments)])

    assert track(*stereo, "--output", tmp_path / "a.tum") == 0 and starved.closed
    said = capfd.readouterr()
    assert "waiting until up to" in said.err and "8 of 8 frames have a pose in the map" in said.out
    np.testing.assert_allclose(read_poses(tmp_path / "a.tum")[1][:, 0, 3], 0.05 * np.arange(8), atol=0.03)
    # One camera has no unit of its own, and the last frame alone does not say what it is in the map.
    assert track("--output", tmp_path / "b.tum") == 0
    assert len(read_poses(tmp_path / "b.tum")[1]) >= 5


def test_a_recording_has_late_poses_at_the_time_of_their_frames(saved, walls, starved, tmp_path):
    pytest.importorskip("rerun")
    reader = pytest.importorskip("rerun.chunk")
    left, right, _ = write_pairs(tmp_path, walls, count=8)
    stereo = ("--right", right, "--baseline", BASELINE, "--camera", CAMERA_TEXT, "--fps", 20)
    fast = ("--preset", "nearest", "--max-keypoints", 400, "--load-map", saved[0])
    arguments = (
        "track",
        left,
        *stereo,
        *fast,
        "--output",
        tmp_path / "a.rrd",
        "--output",
        tmp_path / "a.tum",
    )
    assert main([str(value) for value in arguments]) == 0
    times, poses = read_poses(tmp_path / "a.tum")
    assert len(poses) == 8  # none of which was known when its frame was tracked
    found, entities = {}, set()
    for chunk in reader.RrdReader(tmp_path / "a.rrd").stream():
        entities.add(chunk.entity_path)
        for row in chunk.to_record_batch().to_pylist():
            row = {key.split(":")[-1]: value for key, value in row.items()}
            if chunk.entity_path == "/in_map/frame":
                found[row["frame"]] = row["time"].total_seconds(), row["translation"][0]
            if chunk.entity_path == "/in_map/route":
                np.testing.assert_allclose(row["strips"][0], poses[:, :3, 3], atol=1e-5)
    assert {"/in_map/points", "/in_map/route", "/in_map/frame/image"} <= entities
    assert sum(entity.startswith("/in_map/map/") for entity in entities) > 3
    assert sorted(found) == list(range(8))
    for frame, (time, place) in found.items():
        assert time == pytest.approx(times[frame])
        np.testing.assert_allclose(place, poses[frame, :3, 3], atol=1e-5)


def test_an_interrupt_ends_the_wait_for_the_map(saved, walls, starved, tmp_path, capfd, monkeypatch):
    left, right, _ = write_pairs(tmp_path, walls, count=3)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(MapTracking, "finish", interrupted)
    arguments = ("--right", right, "--baseline", BASELINE, "--camera", CAMERA_TEXT, "--preset", "nearest")
    outputs = ("--output", tmp_path / "a.npz", "--load-map", saved[0])
    assert main([str(value) for value in ("track", left, *arguments, *outputs)]) == 0
    said = capfd.readouterr()
    assert "stopped waiting" in said.err and (tmp_path / "a.npz").is_file()
    assert "0 of 3 frames have a pose in the map" in said.out


def test_a_map_that_does_not_know_the_place_is_not_blamed_on_the_lookup(saved, starved, tmp_path, capfd):
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 255, (240, 320), dtype=np.uint8)
        PIL.Image.fromarray(noise).save(tmp_path / f"{number}.png")
    arguments = ("track", tmp_path, "--camera", CAMERA_TEXT, "--preset", "nearest", "--load-map", saved[0])
    assert main([str(value) for value in (*arguments, "--output", tmp_path / "a.tum")]) == 3
    said = capfd.readouterr().err
    assert "no frame has a pose in the map: is it of another place" in said and "--lookup" not in said


def at(index, x, there):
    """A frame at `x` of tracking that was localised at `there` of the map."""
    here, known = np.eye(4), np.eye(4)
    here[0, 3], known[0, 3] = x, there
    return LocalizedFrame(index, here, known, 0.001)


def test_late_poses_are_of_their_own_stretch_and_unit():
    late = LatePoses(None)
    for index in range(40):
        pose = np.eye(4)
        pose[0, 3] = index
        if index == 30:
            late.lose(index)
        late.lack(index, pose)
        late.miss((index, None, None, pose, None))
    assert late.wanted == 16 and late.poses() == {}
    late.take(at(0, 0.0, 5.0))
    assert [*late.poses()] == [0]  # others need the unit
    late.take(at(20, 20.0, 15.0))
    found = late.poses()
    assert [*found] == list(range(30)) and found[10][0, 3] == pytest.approx(10.0)
    waiting = late.wanted
    left = [request[0] for request in late.open_requests()]
    assert len(left) == waiting >= 13 and left[0] == 39 and not {0, 20} & set(left) and late.wanted == 0


def test_late_poses_spread_the_drift_of_unit_and_direction():
    late = LatePoses(None)
    for index in range(41):
        pose = np.eye(4)
        pose[0, 3] = index if index < 20 else 20 + (index - 20) / 4  # the unit grows fourfold
        late.lack(index, pose)
        late.miss((index, None, None, pose, None))
        if index % 10 == 0:
            known = np.eye(4)
            turn = np.radians(index)  # tracking loses one degree a frame
            known[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
            known[0, 3] = index
            late.take(LocalizedFrame(index, pose, known, 0.001))
    found = late.poses()
    for index, pose in found.items():
        assert abs(pose[0, 3] - index) < 0.5, index
        assert np.degrees(np.arctan2(pose[1, 0], pose[0, 0])) == pytest.approx(index, abs=0.1)
        np.testing.assert_allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-9)
    assert len(found) == 41 and not {0, 10, 20, 30, 40} & {request[0] for request in late.open_requests()}


def test_a_pose_that_follows_from_long_before_becomes_better_at_the_end(saved, walls, monkeypatch):
    """The process takes one frame and then none; tracking drifts, and a frame that was missed tells."""
    followed = MapTracking(saved[0], measured=True, timing="inline")
    here, last = picture(walls, 0.5), []

    def busy(request):  # one request waits, as beside tracking
        last.append(request)
        return last[-2] if len(last) > 1 else None

    assert followed.follow(tracked(0, "first"), here)[0, 3] == pytest.approx(0.5, abs=0.03)
    monkeypatch.setattr(followed._lookup, "offer", busy)
    keyframe = replace(tracked(1, x=0.2), is_keyframe=True)
    assert followed.follow(keyframe, here)[0, 3] == pytest.approx(0.7, abs=0.03)  # it has not moved
    assert not followed.late_poses()
    later = [followed.follow(replace(tracked(i, x=0.4), is_keyframe=True), here) for i in (2, 3, 4)]
    assert all(pose[0, 3] == pytest.approx(0.9, abs=0.03) for pose in later)
    followed.finish()
    assert {*followed.late_poses()} == {2, 3, 4}
    assert all(pose[0, 3] == pytest.approx(0.5, abs=0.03) for pose in followed.late_poses().values())


def test_frames_that_had_their_pose_in_time_need_no_more_lookups():
    late = LatePoses(1.0)
    for index in range(12):
        pose = np.eye(4)
        pose[0, 3] = index
        late.miss((index, None, None, pose, None))
        if index < 4:
            late.lack(index, pose)
    late.take(at(4, 4.0, 4.0))
    assert [request[0] for request in late.open_requests()] == [3, 2, 1, 0]


def test_what_takes_the_place_of_a_request_gives_it_back():
    beside = start(len, "background")
    try:
        assert beside.answers(wait=True) == []
        beside._process.send_signal(signal.SIGSTOP)
        assert beside.offer("a") is None and beside.offer("ab") is None and beside.offer("abc") == "ab"
        assert beside.unanswered() == ["a", "abc"]
        begun = perf_counter()
        assert beside.answers(wait=0.05) == [] and perf_counter() - begun < 2
        beside._process.send_signal(signal.SIGCONT)
        assert beside.answers(wait=True) == [1, 3] and beside.unanswered() == []
    finally:
        beside.close()


def test_a_disk_that_is_full_while_tracking_leaves_the_poses(tmp_path, walls, monkeypatch, capfd):
    """They are written where there is room, and the keyframes before are finished later."""
    from matcher.sequence import keyframe_map

    left, right, _ = write_pairs(tmp_path, walls, count=40)
    written, place = [], tmp_path / "map"

    def full(path, *arguments):
        if len(written) >= 3:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        write(path, *arguments)

    write = keyframe_map.write_image
    monkeypatch.setattr(keyframe_map, "write_image", full)
    stereo = ("--camera", CAMERA_TEXT, "--right", right, "--baseline", BASELINE)
    fast = ("--preset", "nearest", "--max-keypoints", 400, "--output", tmp_path / "a.tum", "--loops", "end")
    command = [str(value) for value in ("track", left, *stereo, *fast, "--map", place)]
    assert main(command) == 6
    said = capfd.readouterr().err
    assert "No space left" in said and f"kept in {place}" in said
    assert len(read_poses(tmp_path / "a.tum")[1]) > 3 and (place / KEPT).is_file()
    monkeypatch.undo()
    assert main(["track", str(place), "--map", str(place)]) == 0
