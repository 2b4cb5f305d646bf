"""A map whose making was interrupted: what was tracked is kept whole, and the map is finished later."""

import json
import os
import signal

import numpy as np
import PIL.Image
import pytest
from collection_runs import start, wait_for
from collection_scene import render_photos
from sequence_walls import CAMERA as WALLS_CAMERA
from sequence_walls import make_walls, picture
from test_keyframe_map import CAMERA, frame

import matcher
from matcher.cli import main
from matcher.errors import IntegrityError, UsageError
from matcher.sequence.capture import read_poses
from matcher.sequence.frames import KEPT, read_kept
from matcher.sequence.keyframe_map import TRAJECTORY, KeyframeMap
from matcher.sequence.loops import PoseGraph

pytest.importorskip("pycolmap")


@pytest.fixture
def tracked(tmp_path):
    """A map of six keyframes that is not finished, and their true poses."""
    world = [np.linalg.inv(pose) for pose in render_photos(tmp_path / "photos", count=6)]
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest", max_keypoints=300)
    for index, pose in enumerate(world):
        place.add(frame(2 * index, pose), tmp_path / "photos" / f"photo{index}.png")
        place.add(frame(2 * index + 1, pose, keyframe=False), tmp_path / "photos" / f"photo{index}.png")
    return place, world


def test_poses_are_on_the_disk_while_tracking_goes_on(tracked, tmp_path):
    place, world = tracked
    kept = read_kept(tmp_path / "map")  # nothing was asked for
    assert [each.index for each in kept.frames] == [0, 1, 2, 3, 4, 5, 6]
    assert (kept.camera, kept.preset, kept.options) == (CAMERA, "nearest", {"max_keypoints": 300})
    del place  # the program was killed
    again = KeyframeMap.resume(tmp_path / "map")
    closed = again.finish()
    assert closed.frames.tolist() == [0, 1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(closed.before[-1], world[3])
    assert len(matcher.Map.open(closed.folder).names) == 4
    assert not (tmp_path / "map" / KEPT).exists()
    with pytest.raises(UsageError, match="no unfinished map"):
        KeyframeMap.resume(tmp_path / "map")


def test_an_interrupted_mapping_is_finished_by_the_command(tracked, tmp_path, monkeypatch, capfd):
    place, world = tracked

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PoseGraph, "model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            place.finish()
    stamps, poses = read_poses(tmp_path / "map" / TRAJECTORY)
    assert len(poses) == 12 and stamps[0] == 10.0
    np.testing.assert_allclose(poses[10], world[5], atol=1e-5)
    folder = str(tmp_path / "map")
    assert main(["track", str(tmp_path / "photos"), "--camera", "9,9,9,9", "--map", folder]) == 2
    error = " ".join(capfd.readouterr().err.split())
    assert f"`matcher track {folder} --map {folder}`" in error and "--overwrite starts anew" in error
    assert main(["track", folder, "--map", folder, "--camera", "9,9,9,9"]) == 2
    assert "leave out --camera" in " ".join(capfd.readouterr().err.split())
    with monkeypatch.context() as patch:
        patch.setattr(PoseGraph, "model", interrupted)
        assert main(["track", folder, "--map", folder]) == 130
    assert "12 poses and 6 keyframes" in " ".join(capfd.readouterr().err.split())
    assert main(["track", folder, "--map", folder]) == 0
    assert len(matcher.Map.open(tmp_path / "map" / "model").names) == 6
    assert not (tmp_path / "map" / KEPT).exists()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", "cut", "nan"])
def test_a_damaged_file_of_poses_is_said(tracked, tmp_path, damage):
    path = tmp_path / "map" / KEPT
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "nan":
        with np.load(path) as rows:
            arrays = dict(rows)
        arrays["world_from_cam"][2, 0, 3] = np.nan
        np.savez(path, **arrays)
    else:
        path.write_bytes(damage)
    with pytest.raises(IntegrityError, match=r"tracked.npz: the poses of the unfinished map are damaged"):
        KeyframeMap.resume(tmp_path / "map")


def test_a_full_disk_leaves_the_poses_before(tracked, tmp_path, monkeypatch):
    place, _ = tracked
    before = (tmp_path / "map" / KEPT).read_bytes()

    def full(*_):
        raise OSError(28, "the disk is full")

    monkeypatch.setattr("matcher.files.os.fsync", full)
    with pytest.raises(OSError, match="disk is full"):
        place.keep()
    assert (tmp_path / "map" / KEPT).read_bytes() == before
    assert not [path for path in (tmp_path / "map").iterdir() if path.name.endswith(".part")]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_ended_keeps_its_poses(tmp_path, capfd, number):
    folder, walls = tmp_path / "frames", make_walls()
    folder.mkdir()
    for index in range(300):  # to and fro
        place = 0.12 * (15 - abs(15 - index % 30))
        PIL.Image.fromarray(picture(walls, place)).save(folder / f"{index:03d}.png", compress_level=1)
    out = tmp_path / "map"
    fast = ("--preset", "nearest", "--max-keypoints", 200, "--output", tmp_path / "poses.tum")
    process = start("track", folder, "--camera", WALLS_CAMERA, *fast, "--map", out)
    wait_for((out / KEPT).is_file, process)
    process.send_signal(number)
    code = process.wait(120)
    said = " ".join(process.stderr.read().split())
    if number == signal.SIGINT:  # it is the end of the sequence
        assert code == 0 and "stopped" in said and not (out / KEPT).exists()
        assert len(matcher.Map.open(out / "model").names) >= 3
        assert len(read_poses(tmp_path / "poses.tum")[1]) >= 4
        return
    assert code == (143 if number == signal.SIGTERM else -9)
    if number == signal.SIGTERM:
        kept = read_kept(out)
        assert f"{len(kept.frames)} poses" in said and "without a map" in said
        for path in (tmp_path / "poses.tum", out / TRAJECTORY):
            assert len(read_poses(path)[1]) == len(kept.frames)
    capfd.readouterr()
    assert main(["track", str(out), "--map", str(out)]) == 0
    assert "map of the keyframes" in " ".join(capfd.readouterr().err.split())


def test_a_signal_within_a_frame_leaves_it_in_all_files(tmp_path, monkeypatch, capfd):
    folder, out, walls = tmp_path / "frames", tmp_path / "map", make_walls()
    folder.mkdir()
    for index in range(8):
        PIL.Image.fromarray(picture(walls, 0.12 * index)).save(folder / f"{index:03d}.png", compress_level=1)
    add = KeyframeMap.add

    def ended(self, result, *given, **options):
        add(self, result, *given, **options)
        if result.index == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(KeyframeMap, "add", ended)
    fast = ("--preset", "nearest", "--max-keypoints", "200", "--output", str(tmp_path / "poses.tum"))
    assert main(["track", str(folder), "--camera", WALLS_CAMERA, *fast, "--map", str(out)]) == 143
    assert "terminated" in capfd.readouterr().err
    frames = read_kept(out).frames
    assert frames[-1].index == 5
    for path in (tmp_path / "poses.tum", out / TRAJECTORY):
        assert len(read_poses(path)[1]) == len(frames)


LENS = {"fx": 9, "fy": 9, "cx": 4, "cy": 4, "distortion": []}
FACTS = json.dumps({"camera": LENS, "preset": "nearest", "options": {}})
STRANGE = {
    "nested": {"facts": np.array("[" * 100_000)},
    "a camera of any size": {"facts": np.array(FACTS.replace("9", "9" * 400, 1))},
    "no camera": {"facts": np.array('{"camera": 1}')},
    "distortion of nothing": {"facts": np.array(FACTS.replace("[]", "null"))},
    "a hundred megabytes of zeros": {"index": np.zeros(10**8, np.int8)},
}


@pytest.mark.parametrize("name", STRANGE)
def test_poses_that_a_stranger_wrote(tmp_path, name):
    """Some of it was an internal error, and what unpacks to more than the file filled the memory."""
    rows = {
        "index": np.arange(2),
        "time": np.zeros(2),
        "keyframe": np.zeros(2, int),
        "facts": np.array(FACTS),
    }
    rows["world_from_cam"] = np.tile(np.eye(4), (2, 1, 1))
    np.savez(tmp_path / KEPT, **rows)
    assert len(read_kept(tmp_path).frames) == 2
    save = np.savez_compressed if "megabytes" in name else np.savez
    save(tmp_path / KEPT, **{**rows, **STRANGE[name]})
    message = "unpacks to more" if "megabytes" in name else "are damaged"
    with pytest.raises(IntegrityError, match=message):
        read_kept(tmp_path)


def test_poses_with_bytes_changed(tracked, tmp_path):
    path, rng = tmp_path / "map" / KEPT, np.random.default_rng(4)
    data = path.read_bytes()
    for _ in range(400):
        changed = bytearray(data)
        for place in rng.integers(0, len(data), 2):
            changed[place] = rng.integers(256)
        path.write_bytes(changed)
        try:
            assert len(read_kept(tmp_path / "map").frames) == 7
        except IntegrityError as error:
            assert "tracked.npz" in str(error)
