"""`matcher track`: sources and times, outputs, statuses, mistakes; files of poses; tracks do not drift."""

import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from command import run
from rendered_texture import SIZE, Texture
from sequence_walls import BASELINE, CAMERA, STEP, picture, write_pairs

import matcher
from matcher.config import ExtractorConfig, NearestConfig, PipelineConfig
from matcher.errors import ImageError, UsageError
from matcher.extract.extractor import SiftExtractor
from matcher.sequence.capture import open_frames
from matcher.sequence.trajectory import align, nearest_rows, read_poses, segment_errors, write_trajectory

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path, Path]:
    """Six rectified pairs and their true poses in KITTI's form."""
    return write_pairs(tmp_path)


def stereo(right: Path) -> list[object]:
    return ["--right", right, "--baseline", BASELINE, "--camera", CAMERA]


def track(*arguments: object) -> int:
    return run("track", *arguments, "--preset", "nearest", "--max-keypoints", 250)


def test_pairs_are_followed_measured_drawn_and_saved(folders, tmp_path, capfd):
    left, right, truth = folders
    tracks, path, plot = tmp_path / "t.npz", tmp_path / "t.tum", tmp_path / "t.png"
    outputs = ["--output", tracks, "--output", path, "--output", tmp_path / "t.kitti", "--plot", plot]
    assert track(left, *stereo(right), "--ground-truth", truth, *outputs, "--fps", 20) == 0
    out, err = capfd.readouterr()
    assert "6 frames (1 first, 5 tracked, " in out and "degrees per metre" in out and err == ""
    times, poses = read_poses(path)
    np.testing.assert_allclose(times, np.arange(6) / 20, atol=1e-6)
    np.testing.assert_allclose(poses[:, :3, 3], [[STEP * i, 0, 0] for i in range(6)], atol=0.01)
    np.testing.assert_allclose(read_poses(tmp_path / "t.kitti")[1], poses, atol=1e-6)
    with np.load(tracks) as data:
        assert data["world_from_cam"].shape == (6, 4, 4) and data["pose_status"].tolist() == ["ok"] * 6
        assert data["status"].tolist() == ["first", *["tracked"] * 5]
        assert len(data["observation_track"]) == len(data["observation_xy"]) == len(data["observation_depth"])
        assert np.unique(data["observation_track"], return_counts=True)[1].max() == 6
    assert cv2.imread(str(plot)).shape[1] > 800
    # Only files of our own are replaced.
    path.write_bytes(b"my own notes")
    assert track(left, *stereo(right), "--output", path) == 2 and path.read_bytes() == b"my own notes"
    assert track(left, *stereo(right), "--output", path, "--overwrite", "--frames", 2) == 0
    assert len(read_poses(path)[1]) == 2


def test_json_is_one_object_for_which_nothing_is_drawn(folders, tmp_path, monkeypatch, capfd):
    left, right, truth = folders
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "matcher.sequence.plot", raising=False)
    assert track(left, *stereo(right), "--plot", tmp_path / "plot.png") == 2
    assert "pip install 'matplotlib" in capfd.readouterr().err
    assert track(left, *stereo(right), "--ground-truth", truth, "--frames", 5, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["frames"] == found["poses"] == 5 and found["segments"][0]["translation"] < 0.1
    assert set(found["milliseconds"]) == {"read", "extract", "match", "verify", "refine", "pose", "total"}
    # True poses that stand still have no errors per length.
    (tmp_path / "still.txt").write_text("".join(f"{i / 20} 0 0 0 0 0 0 1\n" for i in range(6)))
    still = ["--ground-truth", tmp_path / "still.txt", "--fps", 20, "--frames", 3]
    assert track(left, *stereo(right), *still, "--no-refine", "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["segments"] == [] and "refine" not in facts["milliseconds"]


def test_true_poses_without_times_belong_to_the_numbers_of_frames(folders, capfd):
    left, right, truth = folders
    for side in (left, right):
        (side / "2.png").unlink()
    for named in (True, False):
        assert track(left, *stereo(right), "--ground-truth", truth, "--json") == 0
        out, err = capfd.readouterr()
        assert (json.loads(out)["segments"][0]["translation"] < 0.1) == named
        assert ("6 poses" in err and "5 frames" in err) != named
        for path in [*left.iterdir(), *right.iterdir()]:
            path.rename(path.with_name(f"frame{path.name}"))


def test_frames_that_cannot_be_used_are_dropped_and_told_of(folders, capfd):
    left, right, _ = folders
    data = (left / "2.png").read_bytes()
    (left / "2.png").write_bytes(data[: len(data) // 2])
    cv2.imwrite(str(right / "3.png"), cv2.imread(str(right / "3.png"))[:200])
    for side in (left, right):  # of another size, which is tracked
        cv2.imwrite(str(side / "4.png"), cv2.resize(cv2.imread(str(side / "4.png")), (160, 120)))
    assert track(left, *stereo(right), "--json") == 4
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert (found["statuses"]["dropped"], found["statuses"]["tracked"], found["poses"]) == (2, 3, 4)
    assert "2.png" in err and "3.png" in err and "one size" in err and "Traceback" not in err
    (masks := left.parent / "masks").mkdir()
    cv2.imwrite(str(masks / "1.png"), np.ones((9, 9), np.uint8))
    assert track(left, "--masks", masks, "--json") == 4
    out, err = capfd.readouterr()
    assert json.loads(out)["statuses"]["dropped"] == 2 and str(masks / "1.png") in err
    assert f"{masks}: 5 of 6 frames have no mask, such as 0.png" in err
    for i in range(6):
        cv2.imwrite(str(left / f"{i}.png"), np.zeros((240, 320), np.uint8))
    assert track(left, "--camera", CAMERA, "--output", left / "none.tum") == 3
    assert "no frame has a pose" in capfd.readouterr().err and not (left / "none.tum").exists()


def test_pairs_and_cameras_that_give_no_poses_are_told_of(folders, capfd):
    left, right, _ = folders
    (rolled := left.parent / "rolled").mkdir()
    for path in sorted(right.iterdir())[:4]:
        cv2.imwrite(str(rolled / path.name), np.roll(cv2.imread(str(path)), 5, axis=0))
    for first, second, words in (
        (right, left, "exchanged"),
        (left, left, "same"),
        (left, rolled, "rectified"),
    ):
        assert track(first, *stereo(second), "--frames", 4) == 4
        out, err = capfd.readouterr()
        assert words in err and "3 too few), 1 with" in out
    assert track(left, *stereo(rolled)) == 4 and "5.png: no image" in capfd.readouterr().err
    assert track(left, "--camera", "PINHOLE,640,360,300,300,160,120", "--json") == 4
    out, err = capfd.readouterr()
    assert json.loads(out)["statuses"]["other_size"] == 6 and "(640, 360)" in err


def test_poses_that_nobody_measured_are_written_on_request_only(folders, tmp_path, capfd):
    left, right, _ = folders
    for number in range(6, 8):
        noise = np.random.default_rng(number).integers(0, 255, (240, 320), dtype=np.uint8)
        for side in (left, right):
            cv2.imwrite(str(side / f"{number}.png"), noise)
    pairs, files = [left, *stereo(right)], [tmp_path / "a.tum", tmp_path / "a.kitti"]
    assert track(*pairs, "--output", files[0], "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["poses"], facts["bridged"], facts["statuses"]["lost"]) == (6, 2, 2)
    assert len(read_poses(files[0])[1]) == 6
    assert track(*pairs, "--output", files[1], "--output", files[0], "--overwrite") == 4
    assert not files[1].exists() and f"wrote {files[0]}" in capfd.readouterr().out
    assert track(*pairs, "--output", files[0], "--output", files[1], "--bridged") == 0
    for file in files:
        assert len(read_poses(file)[1]) == 8 and "not measured" in file.read_text()


def write_video(path: Path, frames: int, code: str = "MJPG") -> bytes:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*code), 10, (320, 240))
    for i in range(frames):
        writer.write(cv2.cvtColor(picture(STEP * i), cv2.COLOR_GRAY2BGR))
    writer.release()
    return path.read_bytes()


def test_a_video_is_read_to_its_end_and_loses_a_frame_that_is_cut_off(tmp_path, capfd):
    data = write_video(tmp_path / "v.avi", 8)
    assert track(tmp_path / "v.avi", "--output", tmp_path / "t.npz") == 0
    with np.load(tmp_path / "t.npz") as found:
        np.testing.assert_allclose(found["timestamp"], np.arange(8) / 10, atol=1e-3)
        assert found["status"].tolist() == ["first", *["tracked"] * 7]
    stream = (cv2.imencode(".jpg", picture(STEP * i))[1].tobytes() for i in range(3))
    (tmp_path / "v.mjpeg").write_bytes(b"".join(stream))  # which nothing can go back in
    assert len(times(tmp_path / "v.mjpeg")) == 3
    capfd.readouterr()
    (tmp_path / "cut.avi").write_bytes(data[: int(len(data) * 0.6)])
    assert track(tmp_path / "cut.avi", "--json") == 4
    out, err = capfd.readouterr()
    facts = json.loads(out)
    assert 3 <= facts["frames"] <= 6 and facts["statuses"]["dropped"] == 1
    assert f"ends after {facts['frames']} of 8 frames" in err and "Traceback" not in err
    data = write_video(file := tmp_path / "v.mp4", 2, "mp4v")
    matrices = [np.array([1, 0, 0, 0, 1, 0, 0, 0, 1 << 14]), np.array([0, 1, 0, -1, 0, 0, 0, 0, 1 << 14])]
    stored, turned = ((each << 16).astype(">i4").tobytes() for each in matrices)
    file.write_bytes(turned.join(data.rsplit(stored, 1)))
    shown = matcher.read_image(next(iter(source := open_frames(str(file)))).image)
    np.testing.assert_array_equal(shown.pixels, cv2.VideoCapture(str(file)).read()[1][..., ::-1])
    assert shown.size == (320, 240) and "320 x 240 stored" in source.notes[0]


def test_options_that_do_not_fit_are_refused(folders, capfd):
    for options, words in (
        (["--right", "."], "--baseline"),
        (["--baseline", "0.5"], "--right"),
        (["--epipolar-window", "2"], "rectified pairs"),
        (["--bridged"], "trajectory"),
        (["--ground-truth", "poses.txt"], "--camera"),
        (["--output", "t.tum"], "--camera"),
        (["--output", "t.csv"], ".npz"),
        (["--camera", "1,2,3"], "--camera"),
        (["--fps", "0"], "frame rate"),
    ):
        assert track(folders[0], *options) == 2
        assert words in capfd.readouterr().err


def test_a_recording_is_written_whole_and_without_rerun_the_remedy_is_named(
    folders, tmp_path, monkeypatch, capfd
):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rerun", None)
        assert track(folders[0], "--output", tmp_path / "r.rrd") == 2
        assert "pip install 'rerun-sdk" in capfd.readouterr().err
    pytest.importorskip("rerun")
    left, right, _ = folders
    file = tmp_path / "r.rrd"
    assert track(left, *stereo(right), "--frames", 3, "--output", file) == 0
    assert file.read_bytes()[:4].startswith(b"RRF") and file.stat().st_size > 10_000
    if sys.platform.startswith("linux"):
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            monkeypatch.delenv(name, raising=False)
        assert track(left, "--show") == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# --- Sources and their times.

TIME = 1403636579763555584  # of EuRoC's first frame, in nanoseconds


def touch(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def times(folder: Path, **how) -> list[float]:
    return [shot.timestamp for shot in open_frames(str(folder), **how)]


def test_sources_are_ordered_and_named(tmp_path):
    folder = touch(tmp_path / "f", ["frame10.png", "frame9.png", "notes.txt"])
    shots = list(open_frames(str(folder), rate=4))
    assert [(shot.name, shot.timestamp) for shot in shots] == [("frame9.png", 0.0), ("frame10.png", 0.25)]
    empty, others = touch(tmp_path / "empty", []), touch(tmp_path / "others", ["a.png"])
    for source, more, error, word in (
        (empty, {}, UsageError, "no images"),
        (folder, {"right": others}, UsageError, "share a name"),
        ("0", {"right": folder}, UsageError, "two folders"),
        (tmp_path / "absent.mp4", {}, ImageError, "no such"),
        (folder / "frame9.png", {}, UsageError, "single image"),
        (folder / "frame%02d.png", {}, UsageError, "name the folder"),
    ):
        with pytest.raises(error, match=word):
            open_frames(str(source), **more)


def test_names_are_times_in_any_unit(tmp_path):
    for unit in (1, 10**6, 10**9):
        start, step = TIME // 10**9 * unit, 1 if unit == 1 else unit // 20
        found = times(touch(tmp_path / f"{unit}", [f"{start + each * step}.png" for each in range(4)]))
        np.testing.assert_allclose(found, TIME // 10**9 + step / unit * np.arange(4), atol=1e-5)
    found = times(touch(tmp_path / "stamped", [f"1305031102.{part}.png" for part in ("5", "55", "6", "65")]))
    assert found == sorted(found) and found[0] == 1305031102.5
    shots = touch(tmp_path / "kitti", [f"shot.{number}.png" for number in (998, 1000, 1006)])
    source = open_frames(str(shots))
    assert [shot.timestamp for shot in source] == [0.0, 0.1, 0.4] and "2 frames missing" in source.notes[0]
    clock = [f"20240101_{time}.png" for time in (115958, 115959, 120000)]
    assert times(touch(tmp_path / "clock", clock)) == [0.0, 0.1, 0.2]


LISTS = {
    "times.txt": ("\ufeff0.0\n0.5\n1.25\n", [0.0, 0.5, 1.25]),  # KITTI
    "times.txt with names": ("00000 5.5 .1\n00001 6 .1\n00002 7 .1\n", [0, 0.5, 1.5]),
    "timestamps.txt": (
        "".join(f"2011-09-26 13:02:25.{t}\n" for t in (594360375, 694360375, 8)),
        [0, 0.1, 0.20564],
    ),
    "data.csv": (  # EuRoC
        "#timestamp [ns],filename\n" + "".join(f"{TIME + i * 5 * 10**7},0000{i}.png\n" for i in range(3)),
        [0, 0.05, 0.1],
    ),
    "rgb.txt": ("# color\n7.5 rgb/00000.png\n7.6 rgb/00001.png\n7.75 rgb/00002.png\n", [0, 0.1, 0.25]),  # TUM
}


@pytest.mark.parametrize("name", LISTS)
def test_files_beside_the_images_say_their_times(tmp_path, name):
    folder = touch(tmp_path / "rgb", ["00000.png", "00001.png", "00002.png"])
    text, wanted = LISTS[name]
    for place in (tmp_path, folder):
        file = place / name.split()[0]
        file.write_text(text, "utf-16" if name == "rgb.txt" else "utf-8")
        found = np.array(times(folder))
        np.testing.assert_allclose(found - found[0], wanted, atol=1e-6)
        if file == tmp_path / "rgb.txt":  # the data set's own folder
            assert times(tmp_path) == times(folder)
        for other in ("0.0\n", "a\n\n", "\0"):
            file.write_text(other)
            np.testing.assert_allclose(times(folder), [0.0, 0.1, 0.2])  # it says nothing of these images
    assert times(folder, rate=2) == [0.0, 0.5, 1.0]


def test_times_of_more_images_go_by_number_and_those_that_do_not_fit_are_told_of(folders, capfd):
    left, *_ = folders
    (left.parent / "times.txt").write_text("".join(f"{i / 2}\n" for i in range(50)))
    (left / "1.png").unlink()
    assert times(left) == [0.0, 1.0, 1.5, 2.0, 2.5]
    (left / "data.csv").write_text("time,file\n" + "".join(f"{i},{i}.png\n" for i in range(9)))
    assert times(left) == [0.0, 2.0, 3.0, 4.0, 5.0]  # and not by times.txt
    for name in ("data.csv", "../times.txt"):
        (left / name).write_text("0.5\n")
    for more, said in (((), True), (("--fps", 9), False)):
        assert track(left, "--frames", 2, *more) == 0
        assert ("data.csv is not used" in capfd.readouterr().err) == said


def test_times_that_do_not_meet_are_named_with_their_likely_unit(folders, tmp_path, capfd):
    left, right, _ = folders
    pairs = [*stereo(right), "--ground-truth", tmp_path / "t.tum"]
    for index, path in enumerate(sorted(left.iterdir())):
        for side in (left, right):
            (side / path.name).rename(side / f"{1500000000 + index / 10:.6f}.png")
    for scale, words, more in ((1e9, "nanoseconds", ()), (1, "frame rate", ("--fps", 10))):
        rows = [f"{(1500000000 + i / 10) * scale:.2f} {i} 0 0 0 0 0 1\n" for i in range(6)]
        (tmp_path / "t.tum").write_text("".join(rows))
        assert track(left, *pairs, *more, "--output", tmp_path / "o.tum", "--overwrite") == 4
        assert len(read_poses(tmp_path / "o.tum")[1]) == 6  # which need no true poses
        said = " ".join(capfd.readouterr().err.split())
        assert words in said and f"{1500000000 * scale:.10g}" in said


# --- Files of poses and their errors; points are refined against their keyframe.


def turn(axis: tuple[float, float, float], degrees: float) -> np.ndarray:
    return cv2.Rodrigues(np.deg2rad(degrees) * np.array(axis) / np.linalg.norm(axis))[0]


@pytest.fixture
def curve() -> np.ndarray:
    """61 poses, a metre apart, in a slow turn."""
    poses, step = [np.eye(4)], np.eye(4)
    step[:3, :3], step[:3, 3] = turn((0, 1, 0), 1.0), (0, 0, 1)
    for _ in range(60):
        poses.append(poses[-1] @ step)
    return np.array(poses)


def test_files_of_poses_go_there_and_back(curve, tmp_path):
    for name, times in (("p.tum", np.arange(61) / 10), ("p.kitti", None)):
        write_trajectory(tmp_path / name, np.arange(61) / 10, curve, bridged=[False] * 60 + [True])
        found, poses = read_poses(tmp_path / name)
        np.testing.assert_allclose(poses, curve, atol=1e-6)
        assert (found is None) == (times is None) and (times is None or np.allclose(found, times))
        marked = [line for line in (tmp_path / name).read_text().splitlines() if "not measured" in line]
        assert len(marked) == 1 and marked[0].startswith("#") and marked[0].endswith(("6.000000", " 60"))
    for text in ("", "1 2 3\n", "0 0 0 0 0 0 0 0\n", "#\n\na,b\n", "nan 0 0 0 0 0 0 1\n"):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(UsageError, match="bad.*line 3" if "," in text else "bad"):
            read_poses(tmp_path / "bad.txt")
    with pytest.raises(UsageError, match="1 of 62 frames"):  # whose lines have no times
        write_trajectory(tmp_path / "a.kitti", [0.0] * 61, curve, frames=62)


def test_segment_errors(curve):
    other = np.eye(4)
    other[:3, :3], other[:3, 3] = turn((1, 1, 0), 50), (3, -2, 9)
    errors = segment_errors(curve, other @ curve)
    assert [(error.length, error.count) for error in errors] == [(10, 51), (20, 41), (40, 21)]
    assert max(max(error.translation, error.rotation) for error in errors) < 1e-4
    longer = curve.copy()
    longer[:, :3, 3] *= 1.02
    for error in segment_errors(curve, longer):
        assert 0.018 < error.translation < 0.0201 and error.rotation < 1e-4
    tilt, drifting = np.eye(4), [np.eye(4)]
    tilt[:3, :3] = turn((1, 0, 0), 0.01)
    for motion in np.linalg.inv(curve[:-1]) @ curve[1:]:
        drifting.append(drifting[-1] @ motion @ tilt)
    for error in segment_errors(curve, np.array(drifting)):
        assert error.rotation == pytest.approx(0.01, rel=0.05)
    np.testing.assert_allclose(align(curve, longer, with_scale=True), curve, atol=1e-9)
    assert not np.allclose(align(curve, longer, with_scale=False), curve, atol=0.1)
    rows = nearest_rows(np.array([0.001, 0.199, 0.31, 0.35, 9.0]), np.array([0.0, 0.3, 0.1, 0.2]))
    assert rows.tolist() == [0, 3, 1, -1, -1]


# --- Points are refined against their keyframe: errors do not add up from frame to frame.

FRAMES = 9


def view_of(frame: int) -> np.ndarray:
    """(2, 3) from the texture to a frame: a camera that moves, turns and comes nearer."""
    angle, zoom = 0.012 * frame, 1.012**frame
    spin = zoom * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre = np.array([(SIZE - 1) / 2] * 2)
    return np.column_stack([spin, centre - spin @ centre + np.array([1.7, -0.9]) * frame])


@pytest.fixture(scope="module")
def frames() -> list[np.ndarray]:
    texture = Texture()
    views = [texture.image(view_of(frame)) for frame in range(FRAMES)]
    return [np.rint(np.clip(view, 0, 255)).astype(np.uint8) for view in views]


def tracked(frames, **config) -> list[matcher.FrameResult]:
    """By SIFT whose keypoints are off by 0.6 pixels along each axis, in each frame anew."""
    sift, rng, returned = SiftExtractor(ExtractorConfig(max_keypoints=200)), np.random.default_rng(3), []

    def extract(images):
        shifted = []
        for each in sift(images):
            shift = torch.from_numpy(rng.normal(0, 0.6, each.keypoints.shape))
            shifted.append(replace(each, keypoints=(each.keypoints + shift).float()))
        returned.extend((each, each.keypoints.clone()) for each in shifted)
        return shifted

    pipeline = matcher.Pipeline(extract, config=PipelineConfig(matcher=NearestConfig(), **config))
    tracker = matcher.Tracker(pipeline)
    found = [tracker.push(frame) for frame in frames]
    # A front end may hand out the same features again.
    assert all(torch.equal(features.keypoints, before) for features, before in returned)
    return found


def drift(results, first: int, last: int) -> float:
    """Median distance in pixels of where tracks are in one frame and where they were in an earlier one."""
    places = defaultdict(dict)
    for result in results:
        affine = view_of(result.index)
        at = (result.keypoints.astype(float) - affine[:, 2]) @ np.linalg.inv(affine[:, :2]).T
        for track, place in zip(result.track_ids.tolist(), at, strict=True):
            places[track][result.index] = place
    both = [seen for seen in places.values() if {first, last} <= seen.keys()]
    assert len(both) > 20
    return float(np.median([np.linalg.norm(seen[first] - seen[last]) for seen in both]))


def test_tracks_do_not_drift(frames):
    found, plain = tracked(frames), tracked(frames, refine=None)
    assert all("refine" in result.milliseconds for result in found[1:])
    assert not any("refine" in result.milliseconds for result in plain)
    assert drift(found, 0, 2) < 0.5 * drift(plain, 0, 2)
    assert drift(found, 0, FRAMES - 1) < min(0.1, 0.4 * drift(plain, 0, FRAMES - 1))
    assert sum(result.is_keyframe for result in found) < FRAMES / 2
    assert np.array_equal(found[0].keypoints, plain[0].keypoints)
    links, moved = found[1].to_keyframe, (found[1].keypoints != plain[1].keypoints).any(axis=1)
    linked = np.isin(np.arange(len(moved)), links.inliers[:, 1])
    assert not moved[~linked].any() and moved[linked].mean() > 0.9
