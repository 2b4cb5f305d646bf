"""Keyframes become a map: loops undo the drift of tracking, and later photos are localised in it."""

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from itertools import pairwise
from time import perf_counter, sleep

import numpy as np
import PIL.Image
import pytest
from collection_scene import render_photos
from sequence_walls import CAMERA as WALLS_CAMERA
from sequence_walls import make_walls, picture

import matcher
from matcher.cameras import Camera
from matcher.cli import main
from matcher.cli.track import _closing as closing_of
from matcher.errors import UsageError
from matcher.sequence import frames as kept_frames
from matcher.sequence.background import OrderedWork
from matcher.sequence.capture import read_poses
from matcher.sequence.frames import FrameResult
from matcher.sequence.keyframe_map import KeyframeMap
from matcher.sequence.loops import PoseGraph, carried
from matcher.sfm.reconstruct import ReconstructionError

pytest.importorskip("pycolmap")
CAMERA = Camera(528.0, 528.0, 239.5, 179.5)
OUT_AND_BACK = (0, 2, 4, 6, 8, 9, 7, 5, 3, 1)  # photos of an arc, in the order of the frames
NONE = {"keypoints": np.zeros((0, 2)), "track_ids": np.zeros(0), "track_lengths": np.zeros(0)}


def frame(index, pose, *, keyframe=True, status="ok"):
    return FrameResult(
        index=index,
        timestamp=10.0 + index / 10,
        status="tracked",
        size=(480, 360),
        is_keyframe=keyframe,
        pose_status=status,
        world_from_cam=pose,
        **NONE,
    )


def drifting(poses):
    """World_from_cam of frames whose every step turns by a degree too much and is too short."""
    angle = np.deg2rad(1.0)
    turn = np.eye(4)
    turn[0, 0] = turn[2, 2] = np.cos(angle)
    turn[0, 2], turn[2, 0] = np.sin(angle), -np.sin(angle)
    found = [poses[0]]
    for before, after in pairwise(poses):
        step = np.linalg.inv(before) @ after
        step[:3, 3] *= 0.97
        found.append(found[-1] @ turn @ step)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A map of ten keyframes with drift, out along an arc and back; and one photo that is not in it."""
    folder = tmp_path_factory.mktemp("keyframes")
    world = [np.linalg.inv(pose) for pose in render_photos(folder / "photos", count=10)]
    truth = [world[photo] for photo in OUT_AND_BACK]
    tracked = drifting(truth)
    place = KeyframeMap(folder / "map", CAMERA, "nearest", max_keypoints=500)
    for index, photo in enumerate(OUT_AND_BACK):
        path = folder / "photos" / f"photo{photo}.png"
        place.add(frame(2 * index, tracked[index]), path)
        between = tracked[index].copy()
        between[:3, 3] += 0.01  # an ordinary frame right after it
        place.add(frame(2 * index + 1, between, keyframe=False), path)
    place.add(frame(99, np.eye(4), status="bridged"), path)  # a guess, which is left out
    return folder, truth, tracked, place.finish()


def test_loops_undo_drift(made):
    folder, truth, tracked, closed = made
    assert closed.frames.tolist() == list(range(20))
    assert closed.loops and all(later - earlier > 8 for earlier, later, _ in closed.loops)
    size = np.linalg.norm(truth[0][:3, 3] - truth[4][:3, 3])
    before = [np.linalg.norm(pose[:3, 3] - true[:3, 3]) for pose, true in zip(tracked, truth, strict=True)]
    keyframes = closed.after[::2]
    # The scale of the tracked steps, 3 % too short, stays: it is not seen by one camera.
    local = np.linalg.inv(truth[0]) @ keyframes
    expected = np.linalg.inv(truth[0]) @ np.array(truth)
    after = np.linalg.norm(local[:, :3, 3] / 0.97 - expected[:, :3, 3], axis=1)
    assert max(before) > 0.07 * size and after.max() < 0.01 * size, (max(before), after.max())
    np.testing.assert_allclose(closed.moved()[0], 0, atol=1e-6)
    assert closed.moved().max() > 0.06 * size
    between = np.linalg.inv(closed.after[10]) @ closed.after[11]
    wanted = np.linalg.inv(closed.before[10]) @ closed.before[11]
    np.testing.assert_allclose(between, wanted, atol=1e-9)  # ordinary frames move with their keyframe
    times, poses = read_poses(folder / "map" / "trajectory.tum")
    np.testing.assert_allclose(poses, closed.after, atol=1e-6)
    assert times[1] == pytest.approx(10.1)
    rows = json.loads((folder / "map" / "loops.json").read_text())
    with PIL.Image.open(folder / "map" / "trajectory.png") as drawing:
        pixels = np.asarray(drawing.convert("RGB")).reshape(-1, 3)
    assert (pixels == (0, 114, 178)).all(axis=1).sum() > 300  # both panels are drawn
    assert [tuple(row["frames"]) for row in rows] == [loop[:2] for loop in closed.loops]


def test_masks_of_frames_are_those_of_keyframes(made, tmp_path):
    """A mask that is given, or one by alpha unless that is ignored."""
    folder, truth, *_ = made
    photo = folder / "photos" / "photo0.png"
    keep = np.zeros((360, 480), np.uint8)
    keep[:, :200] = 255
    clear = tmp_path / "clear.png"
    PIL.Image.fromarray(np.dstack([np.asarray(PIL.Image.open(photo).convert("RGB")), keep])).save(clear)
    for number, (image, mask, options, masked) in enumerate((
        (photo, keep, {}, True),
        (clear, None, {}, True),
        (clear, None, {"alpha_mask": False}, False),
        (clear, keep, {"alpha_mask": False}, True),
        (photo, None, {}, False),
    )):  # fmt: skip
        place = KeyframeMap(tmp_path / str(number), CAMERA, "nearest", max_keypoints=200, **options)
        for index in range(2):
            place.add(frame(index, truth[index]), image, mask=mask)
        collection = place._graph.match([0, 1])
        with collection.store as store:
            found = store.features("000000.png").keypoints
        assert (found[:, 0].max() < 200) == masked and len(found) > 50


def test_a_second_run_is_localised_in_the_map_of_the_first(made):
    folder, _, _, closed = made
    with matcher.Map.open(folder / "map") as place:  # the model in it
        assert len(place.names) == 10
    with matcher.Map.open(closed.folder) as place:
        assert len(place.names) == 10
        pose = place.localize(folder / "photos" / "photo5.png", CAMERA)
    assert pose.ok
    np.testing.assert_allclose(pose.world_from_cam, closed.after[14], atol=0.02)


def test_a_graph_that_cannot_be_optimised_costs_no_map(made, tmp_path, monkeypatch):
    """The keyframes are adjusted from the tracked poses, in which loops share points, and that is said."""
    folder, truth, tracked, closed = made
    shutil.copytree(folder / "map", tmp_path / "map")
    graph = PoseGraph(tmp_path / "map", CAMERA, "nearest", {"max_keypoints": 500})
    indices = list(range(0, 20, 2))
    collection = graph.match(indices)

    def fails(*_):
        raise ReconstructionError("no pair to begin with")

    monkeypatch.setattr(graph, "optimised", fails)
    found = graph.model(collection, dict(zip(indices, tracked, strict=True)), closed.loops)
    assert sorted(found) == indices and "no pair to begin with" in graph.unclosed
    before = [np.linalg.norm(pose[:3, 3] - true[:3, 3]) for pose, true in zip(tracked, truth, strict=True)]
    local = np.linalg.inv(truth[0]) @ np.array([found[index] for index in indices])
    after = local[:, :3, 3] / 0.97 - (np.linalg.inv(truth[0]) @ np.array(truth))[:, :3, 3]
    assert np.linalg.norm(after, axis=1).max() < max(before)
    with matcher.Map.open(tmp_path / "map" / "model") as place:
        assert len(place.names) == 10
    assert closed.problem is None and "loops only" not in closing_of(closed)
    assert f"({graph.unclosed})" in closing_of(replace(closed, problem=graph.unclosed))


def test_what_cannot_become_a_map(tmp_path):
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest")
    place.add(frame(0, None), np.zeros((360, 480), np.uint8))
    with pytest.raises(UsageError, match="at least three keyframes with a pose, not 0"):
        place.finish()
    (tmp_path / "map" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
        KeyframeMap(tmp_path / "map", CAMERA, "nearest")


def test_the_command_makes_a_map(tmp_path, capfd):
    folder, walls = tmp_path / "frames", make_walls()
    folder.mkdir()
    for number in range(16):
        PIL.Image.fromarray(picture(walls, 0.12 * number)).save(folder / f"{number:03d}.png")
    fast = ("--preset", "nearest", "--max-keypoints", "400")
    arguments = ("track", folder, "--camera", WALLS_CAMERA, *fast, "--map", tmp_path / "map")
    assert main([str(argument) for argument in arguments]) == 0
    printed = capfd.readouterr()
    assert "map of the keyframes" in printed.out + printed.err
    with matcher.Map.open(tmp_path / "map" / "model") as place:
        assert len(place.names) >= 3
    assert main(["track", str(folder), "--map", str(tmp_path / "other")]) == 2
    assert "--map needs poses" in capfd.readouterr().err
    for wrong in (("--load-map", tmp_path), ("--ground-truth", tmp_path / "none.tum")):
        again = (*arguments[:-1], tmp_path / "other", *wrong)
        assert main([str(argument) for argument in again]) == 2
        assert not (tmp_path / "other").exists()  # nothing is in the way of the corrected command
    absent = ("track", tmp_path / "none", *arguments[2:-1], tmp_path / "other")
    assert main([str(argument) for argument in absent]) == 3 and not (tmp_path / "other").exists()


@pytest.mark.parametrize("timing", ["inline", "background"])
def test_loops_are_closed_while_the_sequence_goes_on(tmp_path, timing):
    world = [np.linalg.inv(pose) for pose in render_photos(tmp_path / "photos", count=10)]
    truth = [world[photo] for photo in OUT_AND_BACK]
    tracked = drifting(truth)
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest", loops=timing, max_keypoints=400)
    assert place.closed is None
    for index, photo in enumerate(OUT_AND_BACK):
        place.add(frame(index, tracked[index]), tmp_path / "photos" / f"photo{photo}.png")
    if timing == "background":
        end = perf_counter() + 300  # on busy cores a process of low priority waits
        while place.closed is None and perf_counter() < end:
            sleep(0.02)
    closed = place.closed
    assert place.problem is None and closed.loops
    before = [np.linalg.norm(pose[:3, 3] - true[:3, 3]) for pose, true in zip(tracked, truth, strict=True)]
    local = np.linalg.inv(truth[0]) @ closed.after
    after = local[:, :3, 3] / 0.97 - (np.linalg.inv(truth[0]) @ np.array(truth))[:, :3, 3]
    assert np.linalg.norm(after, axis=1).max() < 0.2 * max(before)
    assert closed.moved().max() > 0.05 and closed.moved()[0] < 1e-6  # it says which poses moved
    place.close()
    assert place.closed is not None  # what was found stays


def test_no_frame_waits_for_a_search_that_does_not_end(tmp_path):
    render_photos(tmp_path / "photos", count=5)
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest", loops="background", max_keypoints=100)
    child = place._search._process
    child.send_signal(signal.SIGSTOP)
    rescue = threading.Timer(
        8, child.send_signal, [signal.SIGCONT]
    )  # so that waiting fails and does not hang
    rescue.start()
    begun, seconds = perf_counter(), []
    try:
        for index in range(12):
            start = perf_counter()
            place.add(frame(index, np.eye(4)), tmp_path / "photos" / f"photo{index % 5}.png")
            assert place.closed is None
            seconds.append(perf_counter() - start)
        assert perf_counter() - begun < 7 and np.median(seconds) < 0.25
        place.keep()  # all images are on the disk
        assert place.closed is None
        assert place._search.busy and place._search._next is not None  # a search was asked for
    finally:
        rescue.cancel()
        child.send_signal(signal.SIGCONT)
        place.close()


def test_a_search_that_fails_leaves_the_loops_to_the_end(tmp_path, monkeypatch):
    render_photos(tmp_path / "photos", count=5)
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest", loops="inline", max_keypoints=100)

    def failing(*_):
        raise OSError(28, "the disk is full")

    monkeypatch.setattr("matcher.sequence.loops.PoseGraph.match", failing)
    for index in range(5):
        place.add(frame(index, np.eye(4)), tmp_path / "photos" / f"photo{index}.png")
    assert "disk is full" in place.problem and place.closed is None
    with pytest.raises(UsageError, match="loops must be end, background, inline"):
        KeyframeMap(tmp_path / "other", CAMERA, "nearest", loops="never")
    with pytest.raises(UsageError, match="alpha_mask must be True or False, not 'no'"):
        KeyframeMap(tmp_path / "other", CAMERA, "nearest", alpha_mask="no")


def moved(step):
    pose = np.eye(4)
    pose[0, 3] = step
    return pose


def test_frames_between_keyframes_follow_a_unit_that_has_drifted():
    """Where a loop makes the path between two keyframes a fifth as long, the steps between them are too."""
    tracked = {index: moved(index) for index in (0, 2, 4, 6)}
    adjusted = {0: moved(0), 2: moved(2.1), 4: moved(2.5), 6: moved(2.9)}
    frames = [(index - index % 2, moved(index)) for index in range(8)]
    found = carried(frames, tracked, adjusted)[:, 0, 3]
    np.testing.assert_allclose(found, [0, 1, 2.1, 2.3, 2.5, 2.7, 2.9, 3.1])
    again = carried(frames, tracked, {**adjusted, 6: moved(4.6)})[:, 0, 3]
    np.testing.assert_allclose(again, [0, 1, 2.1, 2.3, 2.5, 3.5, 4.6, 5.6])  # the unit is as it was again
    alone = carried(frames, tracked, {})[:, 0, 3]
    np.testing.assert_allclose(alone, range(8))


def test_images_are_written_beside_tracking_as_they_were(tmp_path, monkeypatch):
    """No frame waits for a slow disk, a buffer that is used again changes nothing, and the order stays."""
    written, release, write = [], threading.Event(), kept_frames.write_whole

    def slow(path, data):
        assert release.wait(10)
        written.append(path.name)
        write(path, data)

    monkeypatch.setattr(kept_frames, "write_whole", slow)
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest", loops="background")
    buffer = np.zeros((36, 48), np.uint8)
    try:
        for index in range(5):
            buffer[:] = 10 * index
            place.add(frame(index, moved(index)), buffer)
        assert not written and not (tmp_path / "map" / kept_frames.KEPT).exists()
        release.set()
        assert place.keep() == (5, 5)
    finally:
        release.set()
        place.close()
    images = [f"{index:06d}.png" for index in range(5)]
    assert [name for name in written if name != kept_frames.KEPT] == images
    assert written.index(kept_frames.KEPT) > 3 and written[-1] == kept_frames.KEPT
    for index, name in enumerate(images):
        with PIL.Image.open(tmp_path / "map" / "frames" / name) as image:
            assert np.asarray(image).max() == np.asarray(image).min() == 10 * index


@pytest.mark.parametrize("timing", ["background", "inline"])
def test_frames_whose_keyframe_is_not_on_a_full_disk_are_left_out(tmp_path, monkeypatch, timing):
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest", loops=timing)
    full, write, picture = [False], kept_frames.write_whole, np.zeros((36, 48), np.uint8)

    def failing(path, data):
        if full[0]:
            raise OSError(28, "the disk is full")
        write(path, data)

    monkeypatch.setattr(kept_frames, "write_whole", failing)
    try:
        place.add(frame(0, moved(0)), picture)
        place.add(frame(1, moved(1), keyframe=False), picture)
        assert place.keep() == (2, 1)
        full[0] = True
        with pytest.raises(OSError, match="disk is full"):
            place.add(frame(2, moved(2)), picture)
            place.keep()  # in the background it is said later
        full[0] = False
        place.add(frame(3, moved(3), keyframe=False), picture)  # the first after it takes the place
        place.add(frame(4, moved(4), keyframe=False), picture)
        assert place.keep() == (4, 2)
    finally:
        place.close()
    kept = kept_frames.read_kept(tmp_path / "map").frames
    assert [(each.index, each.keyframe) for each in kept] == [(0, 0), (1, 0), (3, 3), (4, 3)]
    assert sorted(path.name for path in (tmp_path / "map" / "frames").iterdir()) == [
        "000000.png",
        "000003.png",
    ]


def test_poses_that_were_not_written_are_written_with_the_next_keyframe(tmp_path, monkeypatch):
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest", loops="background")
    write, picture = kept_frames.write_whole, np.zeros((36, 48), np.uint8)

    def failing(path, data):
        if path.name == kept_frames.KEPT:
            raise OSError(28, "the disk is full")
        write(path, data)

    try:
        monkeypatch.setattr(kept_frames, "write_whole", failing)
        with pytest.raises(OSError, match="disk is full"):
            for index in range(4):  # with the fourth keyframe poses are kept
                place.add(frame(index, moved(index)), picture)
            end = perf_counter() + 10
            while perf_counter() < end:
                assert place.closed is None
        monkeypatch.setattr(kept_frames, "write_whole", write)
        place.add(frame(4, moved(4)), picture)
        place._work.wait()
        assert [each.index for each in kept_frames.read_kept(tmp_path / "map").frames] == [0, 1, 2, 3, 4]
    finally:
        place.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_the_thread_of_its_parent(tmp_path):
    work, held = OrderedWork(beside=True), threading.Event()
    work.add(held.wait)
    if (child := os.fork()) == 0:
        signal.alarm(20)  # ends the child if it waits
        try:
            work.add(lambda: (tmp_path / "done").touch())
            work.wait()
        finally:
            os._exit(0)
    try:
        assert os.waitpid(child, 0)[1] == 0 and (tmp_path / "done").exists()
    finally:
        held.set()
    work.wait()


def test_nothing_follows_work_that_failed_until_that_was_said():
    """Poses that name a keyframe would otherwise be written after its image was not."""
    work, done, release = OrderedWork(beside=True), [], threading.Event()

    def fail():
        assert release.wait(10)
        raise OSError(28, "the disk is full")

    for each in (lambda: done.append("before"), fail, lambda: done.append("after")):
        work.add(each)
    release.set()
    with pytest.raises(OSError, match="disk is full"):
        work.wait()
    work.add(lambda: done.append("later"))
    work.wait()
    assert done == ["before", "later"]
