"""Keyframes become a map: loops undo drift, poses survive a kill, photos are localised in it."""

import json
import os
import signal
from itertools import pairwise

import numpy as np
import PIL.Image
import pytest
from collection_runs import start, wait_for
from collection_scene import render_photos
from sequence_walls import CAMERA as WALLS_CAMERA
from sequence_walls import make_walls, picture

import matcher
from matcher.cameras import Camera
from matcher.cli import main
from matcher.errors import IntegrityError, UsageError
from matcher.sequence.frames import FrameResult
from matcher.sequence.keyframe_map import KEPT, TRAJECTORY, KeyframeMap, read_kept
from matcher.sequence.trajectory import read_poses

pytest.importorskip("pycolmap")
CAMERA = Camera(528.0, 528.0, 239.5, 179.5)
OUT_AND_BACK = (0, 2, 4, 6, 8, 9, 7, 5, 3, 1)  # photos of an arc, in the order of the frames


def frame(index, pose, *, keyframe=True, status="ok"):
    known = {"is_keyframe": keyframe, "pose_status": status, "world_from_cam": pose}
    nothing = {"keypoints": np.zeros((0, 2)), "track_ids": np.zeros(0), "track_lengths": np.zeros(0)}
    return FrameResult(index, 10.0 + index / 10, "tracked", (480, 360), **known, **nothing)


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
    assert closed.frames.tolist() == list(range(20)) and closed.problem is None
    assert closed.loops and all(later - earlier > 8 for earlier, later, _ in closed.loops)
    size = np.linalg.norm(truth[0][:3, 3] - truth[4][:3, 3])
    before = [np.linalg.norm(pose[:3, 3] - true[:3, 3]) for pose, true in zip(tracked, truth, strict=True)]
    # The scale of the tracked steps, 3 % too short, is not seen by one camera.
    local, expected = (np.linalg.inv(truth[0]) @ np.array(poses) for poses in (closed.after[::2], truth))
    found, wanted = local[:, :3, 3], expected[:, :3, 3]
    after = np.linalg.norm(found * np.sum(found * wanted) / np.sum(found * found) - wanted, axis=1)
    assert max(before) > 0.07 * size and after.max() < 0.01 * size, (max(before), after.max())
    np.testing.assert_allclose(closed.moved()[0], 0, atol=1e-6)
    between = np.linalg.inv(closed.after[10]) @ closed.after[11]
    wanted = np.linalg.inv(closed.before[10]) @ closed.before[11]
    np.testing.assert_allclose(between, wanted, atol=1e-9)  # ordinary frames move with their keyframe
    times, poses = read_poses(folder / "map" / TRAJECTORY)
    np.testing.assert_allclose(poses, closed.after, atol=1e-6)
    assert times[1] == pytest.approx(10.1)
    rows = json.loads((folder / "map" / "loops.json").read_text())
    assert [tuple(row["frames"]) for row in rows] == [loop[:2] for loop in closed.loops]
    with PIL.Image.open(folder / "map" / "trajectory.png") as drawing:
        pixels = np.asarray(drawing.convert("RGB"))
    for colour in ((0, 114, 178), (153, 153, 153)):
        assert (pixels == colour).all(axis=2).sum() > 300
    assert len(repr(closed)) < 250 and "\n" not in repr(closed) and "20 frames" in repr(closed)


def test_photos_are_localised_in_it(made):
    folder, _, _, closed = made
    with matcher.Map.open(folder / "map") as place:  # the model in it
        assert len(place.names) == 10
        pose = place.localize(folder / "photos" / "photo5.png", CAMERA)
    assert pose.ok
    np.testing.assert_allclose(pose.world_from_cam, closed.after[14], atol=0.02)


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
        place = KeyframeMap(tmp_path / str(number), CAMERA, "nearest", **options)
        place.add(frame(0, truth[0]), image, mask=mask)
        found = matcher.read_image(tmp_path / str(number) / "frames" / "000000.png")
        assert (found.mask is not None) == masked
        assert not masked or not found.mask[:, 210:].any()


def test_what_cannot_become_a_map(tmp_path):
    place = KeyframeMap(tmp_path / "map", CAMERA, "nearest")
    place.add(frame(0, None), np.zeros((360, 480), np.uint8))
    with pytest.raises(UsageError, match="three keyframes"):
        place.finish()
    (tmp_path / "map" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an empty folder"):
        KeyframeMap(tmp_path / "map", CAMERA, "nearest")
    with pytest.raises(UsageError, match="alpha_mask"):
        KeyframeMap(tmp_path / "other", CAMERA, "nearest", alpha_mask="no")


# --- Interrupted.


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
    closed = KeyframeMap.resume(tmp_path / "map").finish()
    assert closed.frames.tolist() == [0, 1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(closed.before[-1], world[3])
    with matcher.Map.open(closed.folder) as made:
        assert len(made.names) == 4
    with pytest.raises(UsageError, match="no unfinished map"):
        KeyframeMap.resume(tmp_path / "map")


def test_an_interrupted_map_is_finished_by_the_command(tracked, tmp_path, capfd):
    place, world = tracked
    assert place.keep() == (12, 6)
    stamps, poses = read_poses(tmp_path / "map" / TRAJECTORY)
    assert len(poses) == 12 and stamps[0] == 10.0
    np.testing.assert_allclose(poses[10], world[5], atol=1e-5)
    folder = str(tmp_path / "map")
    assert main(["track", str(tmp_path / "photos"), "--camera", "9,9,9,9", "--map", folder]) == 2
    assert f"`matcher track {folder} --map {folder}`" in " ".join(capfd.readouterr().err.split())
    assert main(["track", folder, "--map", folder, "--camera", "9,9,9,9"]) == 2
    assert "leave out --camera" in " ".join(capfd.readouterr().err.split())
    assert main(["track", folder, "--map", folder]) == 0
    with matcher.Map.open(tmp_path / "map" / "model") as made:
        assert len(made.names) == 6
    assert not (tmp_path / "map" / KEPT).exists()
    assert main(["track", folder, "--map", folder]) == 2
    assert "is finished" in capfd.readouterr().err


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGKILL, signal.SIGINT))],
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
        assert code == 0 and not (out / KEPT).exists()
        assert len(read_poses(tmp_path / "poses.tum")[1]) >= 4
        return
    assert code == (143 if number == signal.SIGTERM else -9)
    if number == signal.SIGTERM:
        kept = read_kept(out)
        assert f"{len(kept.frames)} poses" in said
        for path in (tmp_path / "poses.tum", out / TRAJECTORY):
            assert len(read_poses(path)[1]) == len(kept.frames)
    assert main(["track", str(out), "--map", str(out)]) == 0


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a folder that cannot be written")
def test_frames_whose_keyframe_cannot_be_written_are_left_out(tmp_path):
    place, pixels = KeyframeMap(tmp_path / "map", CAMERA, "nearest"), np.zeros((36, 48), np.uint8)
    place.add(frame(0, np.eye(4)), pixels)
    (tmp_path / "map" / "frames").chmod(0o500)
    with pytest.raises(OSError):
        place.add(frame(1, np.eye(4)), pixels)
    (tmp_path / "map" / "frames").chmod(0o700)
    place.add(frame(2, np.eye(4), keyframe=False), pixels)  # takes the place of the keyframe
    place.keep()
    found = [(each.index, each.keyframe) for each in read_kept(tmp_path / "map").frames]
    assert found == [(0, 0), (2, 2)]


LENS = {"fx": 9, "fy": 9, "cx": 4, "cy": 4, "distortion": []}
FACTS = json.dumps({"camera": LENS, "preset": "nearest", "options": {}})
STRANGE = {
    "nested": {"facts": np.array("[" * 100_000)},
    "a camera of any size": {"facts": np.array(FACTS.replace("9", "9" * 400, 1))},
    "no camera": {"facts": np.array('{"camera": 1}')},
    "distortion of nothing": {"facts": np.array(FACTS.replace("[]", "null"))},
    "no number": {"world_from_cam": np.full((2, 4, 4), np.nan)},
    "a hundred megabytes of zeros": {"index": np.zeros(10**8, np.int8)},
}


@pytest.mark.parametrize("name", STRANGE)
def test_poses_that_a_stranger_wrote(tmp_path, name):
    rows = {"index": np.arange(2), "time": np.zeros(2), "keyframe": np.zeros(2, int)}
    rows |= {"facts": np.array(FACTS), "world_from_cam": np.tile(np.eye(4), (2, 1, 1))}
    np.savez(tmp_path / KEPT, **rows)
    assert len(read_kept(tmp_path).frames) == 2
    save = np.savez_compressed if "megabytes" in name else np.savez
    save(tmp_path / KEPT, **{**rows, **STRANGE[name]})
    with pytest.raises(IntegrityError, match=KEPT):
        read_kept(tmp_path)


def test_poses_with_bytes_changed(tmp_path, rng):
    np.savez(tmp_path / KEPT, index=np.arange(2), time=np.zeros(2), keyframe=np.zeros(2, int),
             facts=np.array(FACTS), world_from_cam=np.tile(np.eye(4), (2, 1, 1)))  # fmt: skip
    data = (tmp_path / KEPT).read_bytes()
    for number in range(200):
        changed = bytearray(data[: -number or None])
        for place in rng.integers(0, len(changed), 2):
            changed[place] = rng.integers(256)
        (tmp_path / KEPT).write_bytes(changed)
        try:
            assert len(read_kept(tmp_path).frames) == 2
        except IntegrityError as error:
            assert KEPT in str(error)
