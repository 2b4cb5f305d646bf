"""A tracker makes a map of its keyframes; a second run is localised in it, also from the command line."""

import numpy as np
import PIL.Image
import pytest
from sequence_walls import BASELINE, make_walls, picture, write_pairs
from sequence_walls import CAMERA as CAMERA_TEXT

import matcher
from matcher.cameras import Camera
from matcher.cli import main
from matcher.errors import UsageError
from matcher.sequence.frames import FrameResult
from matcher.sequence.keyframe_map import MapTracking
from matcher.sequence.trajectory import read_poses

pytest.importorskip("pycolmap")
CAMERA = Camera(*map(float, CAMERA_TEXT.split(",")), size=(320, 240))
FAST = {"max_keypoints": 400}


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
        x = 0.12 * number
        tracker.push_stereo(picture(walls, x), picture(walls, x + BASELINE))
    return folder, tracker.save_map()


def test_a_second_run_is_in_the_map_of_the_first(saved, walls):
    folder, closed = saved
    assert closed.frames.tolist() == list(range(12))
    with matcher.Map.open(folder) as place:
        assert {(c.fx, c.fy, c.cx, c.cy) for c in place.model.cameras} == {(300, 300, 159.5, 119.5)}
    tracker = matcher.Tracker("nearest", CAMERA, baseline=BASELINE, **FAST)
    tracker.load_map(folder)
    for number in range(6):
        x = 0.5 + 0.1 * number
        result = tracker.push_stereo(picture(walls, x), picture(walls, x + BASELINE))
        assert result.map_from_cam is not None, number
        np.testing.assert_allclose(result.map_from_cam[:3, 3], [x, 0, 0], atol=0.03)
        np.testing.assert_allclose(result.world_from_cam[:3, 3], [x - 0.5, 0, 0], atol=0.03)
        assert result.milliseconds["total"] >= result.milliseconds["map"] > 0
    assert tracker.problem is None and tracker.localized_in_map >= 1
    tracker.unload_map()
    assert tracker.push(picture(walls, 1.1)).map_from_cam is None


def test_one_camera_learns_the_unit_of_the_map_and_earlier_frames_are_placed_late(saved, walls):
    tracker = matcher.Tracker("nearest", CAMERA, **FAST)
    tracker.load_map(saved[0])
    found = {}
    for number in range(10):
        result = tracker.push(picture(walls, 0.2 + 0.1 * number))
        if result.map_from_cam is not None:
            found[number] = result.map_from_cam
    assert 5 <= len(found) < 10
    late = tracker.late_poses_in_map()
    assert late and not late.keys() & found.keys()
    for number, pose in (found | late).items():
        assert abs(pose[0, 3] - (0.2 + 0.1 * number)) < 0.05, number


def tracked(index, status="tracked", pose_status="ok", x=0.0):
    """A frame `x` to the right."""
    pose = np.eye(4)
    pose[0, 3] = x
    nothing = {"keypoints": np.zeros((0, 2)), "track_ids": np.zeros(0), "track_lengths": np.zeros(0)}
    known = {"world_from_cam": pose, "camera": CAMERA, "pose_status": pose_status}
    return FrameResult(index, None, status, (320, 240), **known, **nothing)


def test_frames_are_localised_by_what_their_masks_keep(saved, walls):
    here, keep = picture(walls, 0.5), np.ones((240, 320), bool)
    for mask, known in ((keep, True), (~keep, False)):
        followed = MapTracking(saved[0], measured=True)
        assert (followed.follow(tracked(0), here, mask=mask) is not None) == known
        followed.close()


def test_after_a_loss_the_map_is_found_anew(saved, walls):
    """Where tracking bridges a loss by a guess, frames have no pose in the map until one is localised."""
    followed = MapTracking(saved[0], measured=True)
    here = picture(walls, 0.5)
    elsewhere = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)

    def follow(index, status, pose_status, image, x):
        return followed.follow(tracked(index, status, pose_status, x), image)

    assert follow(0, "first", "ok", here, 0.0)[0, 3] == pytest.approx(0.5, abs=0.03)
    assert follow(1, "tracked", "ok", elsewhere, 0.1)[0, 3] == pytest.approx(0.6, abs=0.03)  # by tracking
    assert follow(2, "lost", "bridged", elsewhere, 0.2) is None
    assert follow(3, "tracked", "ok", elsewhere, 7.0) is None
    assert not followed.late_poses()
    assert follow(4, "tracked", "ok", here, 9.0)[0, 3] == pytest.approx(0.5, abs=0.03)
    assert followed.localized == 2
    assert followed.late_poses()[3][0, 3] == pytest.approx(-1.5, abs=0.03)  # two before the fourth
    followed.close()


def test_mistakes_name_their_remedy(tmp_path):
    tracker = matcher.Tracker("nearest", CAMERA)
    with pytest.raises(UsageError, match="keyframe_map="):
        tracker.save_map()
    with pytest.raises(UsageError, match="is not a folder"):
        tracker.load_map(tmp_path / "none")
    with pytest.raises(UsageError, match="camera"):
        matcher.Tracker("nearest").load_map(tmp_path)


def test_the_paths_before_and_after_are_recorded(saved, tmp_path):
    pytest.importorskip("rerun")
    file = saved[1].record(tmp_path / "paths.rrd")
    data = file.read_bytes()
    assert data.startswith(b"RRF") and list(tmp_path.iterdir()) == [file]
    for entity in (b"world/tracked", b"world/adjusted", b"moved_by"):
        assert entity in data


def test_the_command_saves_and_loads_a_map(tmp_path, walls, capfd):
    left, right, _ = write_pairs(tmp_path, walls, count=22)
    camera, place = ("--camera", CAMERA_TEXT), tmp_path / "map"
    stereo = (*camera, "--right", right, "--baseline", BASELINE)

    def track(*arguments):
        words = ("track", *arguments, "--preset", "nearest", "--max-keypoints", 400)
        code = main([str(word) for word in words])
        said = capfd.readouterr()
        return code, " ".join((said.out + said.err).split())

    code, said = track(left, *stereo, "--map", place)
    assert code == 0 and "map of the keyframes" in said
    code, said = track(left, *stereo, "--load-map", place, "--output", tmp_path / "in_map.tum")
    assert code == 0 and "22 of 22 frames have a pose in the map" in said
    _, poses = read_poses(tmp_path / "in_map.tum")
    np.testing.assert_allclose(poses[:, 0, 3], 0.05 * np.arange(22), atol=0.02)
    assert track(left, "--load-map", place)[0] == 2
    assert track(left, "--map", tmp_path / "other")[0] == 2
    for wrong in (("--load-map", tmp_path), ("--ground-truth", tmp_path / "none.tum")):
        assert track(left, *camera, "--map", tmp_path / "other", *wrong)[0] == 2
    assert track(tmp_path / "none", *camera, "--map", tmp_path / "other")[0] == 3
    assert not (tmp_path / "other").exists()  # nothing is in the way of the corrected command
    (tmp_path / "noise").mkdir()
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 255, (240, 320), dtype=np.uint8)
        PIL.Image.fromarray(noise).save(tmp_path / "noise" / f"{number}.png")
    code, said = track(tmp_path / "noise", *camera, "--load-map", place, "--output", tmp_path / "none.tum")
    assert code == 3 and "no frame has a pose in the map" in said
