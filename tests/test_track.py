import json
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from command import run
from sequence_walls import BASELINE, CAMERA, STEP, make_walls, picture, write_pairs

from matcher.errors import ImageError, UsageError
from matcher.sequence.capture import open_frames
from matcher.sequence.trajectory import read_poses


@pytest.fixture(scope="module")
def walls() -> list[np.ndarray]:
    return make_walls()


@pytest.fixture
def folders(walls, tmp_path) -> tuple[Path, Path, Path]:
    """Six rectified pairs and their true poses in KITTI's form."""
    return write_pairs(tmp_path, walls)


def stereo(right: Path) -> list[object]:
    return ["--right", right, "--baseline", BASELINE, "--camera", CAMERA]


def track(*arguments: object) -> int:
    return run("track", *arguments, "--preset", "nearest", "--max-keypoints", 250)


def test_pairs_are_followed_measured_drawn_and_saved(folders, tmp_path, capfd):
    left, right, truth = folders
    tracks, path, plot = tmp_path / "t.npz", tmp_path / "t.tum", tmp_path / "t.png"
    code = track(
        left, *stereo(right), "--ground-truth", truth,
        "--output", tracks, "--output", path, "--plot", plot, "--fps", 20,
    )  # fmt: skip
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert "6 frames (1 first, 5 tracked, " in out and "degrees per metre" in out and f"wrote {plot}" in out
    times, poses = read_poses(path)
    np.testing.assert_allclose(times, np.arange(6) / 20, atol=1e-6)
    np.testing.assert_allclose(poses[:, :3, 3], [[STEP * i, 0, 0] for i in range(6)], atol=0.01)
    with np.load(tracks) as data:
        assert data["world_from_cam"].shape == (6, 4, 4)
        assert data["status"].tolist() == ["first", *["tracked"] * 5]
        assert len(data["observation_track"]) == len(data["observation_xy"]) == len(data["observation_depth"])
        _, count = np.unique(data["observation_track"], return_counts=True)
        assert count.max() == 6
    assert cv2.imread(str(plot)).shape[1] > 800


@pytest.mark.parametrize("name", ["t.tum", "t.npz", "t.png"])
def test_only_files_of_our_own_are_replaced(folders, tmp_path, capfd, name):
    left, right, _ = folders
    file = tmp_path / name
    option = "--plot" if name.endswith(".png") else "--output"
    pairs = [*stereo(right), "--frames", 2, option, file]
    file.write_bytes(b"my own notes")
    assert track(left, *pairs) == 2
    assert "--overwrite" in capfd.readouterr().err and file.read_bytes() == b"my own notes"
    assert track(left, *pairs, "--overwrite") == 0
    assert track(left, *pairs) == 0 and file.read_bytes() != b"my own notes"


@pytest.mark.parametrize("line", ["0 0 0 0 0 0 0 1", "1 0 0 1e-300 0 1 0 0 0 0 1 0"])
def test_true_poses_that_stand_still_have_no_errors_per_length(folders, tmp_path, capfd, line):
    """They were divided by a length of 0, and what came of it cannot be written as JSON."""
    left, right, _ = folders
    lines = [line.replace("0", str(0.05 * frame), 1) if line[0] == "0" else line for frame in range(6)]
    (tmp_path / "truth.txt").write_text("\n".join(lines))
    pairs = [*stereo(right), "--frames", 3, "--fps", 20]
    assert track(left, *pairs, "--ground-truth", tmp_path / "truth.txt", "--json") == 0
    assert json.loads(capfd.readouterr().out)["segments"] == []


def test_json_is_one_object(folders, capfd):
    left, right, truth = folders
    pairs = stereo(right)
    assert track(left, *pairs, "--ground-truth", truth, "--frames", 5, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["frames"] == found["poses"] == 5
    assert found["segments"][0]["translation"] < 0.1
    stages = {"read", "extract", "match", "verify", "pose", "total"}
    assert set(found["milliseconds"]) == stages | {"refine"}
    assert track(left, *pairs, "--frames", 2, "--no-refine", "--json") == 0
    assert set(json.loads(capfd.readouterr().out)["milliseconds"]) == stages


def test_a_damaged_image_is_a_dropped_frame_and_exit_code_4(folders, capfd):
    left, _, _ = folders
    data = (left / "2.png").read_bytes()
    (left / "2.png").write_bytes(data[: len(data) // 2])
    assert track(left, "--json") == 4
    out, err = capfd.readouterr()
    statuses = json.loads(out)["statuses"]
    assert (statuses["first"], statuses["dropped"], statuses["tracked"]) == (1, 1, 4)
    assert "2.png" in err and "skipped" in err and "Traceback" not in err


def test_a_pair_of_unequal_sizes_is_a_dropped_frame_and_one_of_another_size_is_tracked(folders, capfd):
    left, right, _ = folders
    cv2.imwrite(str(right / "3.png"), cv2.imread(str(right / "3.png"))[:200])
    for side in (left, right):
        cv2.imwrite(str(side / "4.png"), cv2.resize(cv2.imread(str(side / "4.png")), (160, 120)))
    pairs = stereo(right)
    assert track(left, *pairs, "--json") == 4
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert "3.png" in err and "one size" in err
    assert (found["statuses"]["dropped"], found["statuses"]["tracked"], found["poses"]) == (1, 4, 5)


def test_black_frames_alone_have_no_trajectory_and_identical_ones_stand_still(folders, tmp_path, capfd):
    left, right, _ = folders
    pairs = stereo(right)
    first = [(side / "0.png").read_bytes() for side in (left, right)]
    for i in range(6):
        for side, data in zip((left, right), first, strict=True):
            (side / f"{i}.png").write_bytes(data)
    both = ("--output", tmp_path / "still.tum", "--output", tmp_path / "still.kitti")
    assert track(left, *pairs, *both) == 0
    rows = np.loadtxt(tmp_path / "still.kitti")
    np.testing.assert_allclose(rows, read_poses(tmp_path / "still.tum")[1][:, :3].reshape(-1, 12), atol=1e-7)
    np.testing.assert_allclose(
        read_poses(tmp_path / "still.tum")[1], np.tile(np.eye(4), (6, 1, 1)), atol=1e-3
    )
    for i in range(6):
        cv2.imwrite(str(left / f"{i}.png"), np.zeros((240, 320), np.uint8))
    capfd.readouterr()
    assert track(left, "--camera", CAMERA, "--json") == 0
    assert json.loads(capfd.readouterr().out)["statuses"] == {"blank": 6, "keyframes": 0}
    for option, name in (("--output", "none.tum"), ("--plot", "none.png")):
        assert track(left, "--camera", CAMERA, option, tmp_path / name) == 3
        assert "no frame has a pose" in capfd.readouterr().err
        assert not (tmp_path / name).exists()


def write_video(path: Path, walls: list[np.ndarray], frames: int) -> bytes:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (320, 240))
    assert writer.isOpened()
    for i in range(frames):
        writer.write(cv2.cvtColor(picture(walls, STEP * i), cv2.COLOR_GRAY2BGR))
    writer.release()
    return path.read_bytes()


def test_a_video_is_read_to_its_end(walls, tmp_path, capfd):
    write_video(tmp_path / "v.avi", walls, 6)
    assert track(tmp_path / "v.avi", "--output", tmp_path / "t.npz") == 0
    with np.load(tmp_path / "t.npz") as data:
        np.testing.assert_allclose(data["timestamp"], np.arange(6) / 10, atol=1e-3)
        assert data["status"].tolist() == ["first", *["tracked"] * 5]


def test_a_video_that_ends_in_mid_frame_loses_that_frame(walls, tmp_path, capfd):
    data = write_video(tmp_path / "v.avi", walls, 8)
    (tmp_path / "cut.avi").write_bytes(data[: int(len(data) * 0.6)])
    assert track(tmp_path / "cut.avi", "--json") == 4
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert 3 <= found["frames"] <= 6
    assert found["statuses"]["dropped"] == 1
    assert f"ends after {found['frames']} of 8 frames" in err and "Traceback" not in err


def test_what_is_no_video_and_a_camera_that_is_not_there(tmp_path, capfd):
    (tmp_path / "v.mp4").write_bytes(b"\0\1\2 no video at all")
    (tmp_path / "poses.txt").write_text("1 0 0 0 0 1 0 0 0 0 1 0\n" * 50)
    assert track(tmp_path / "poses.txt") == 2
    assert "text file" in capfd.readouterr().err
    for source, words in (
        (tmp_path / "v.mp4", "cannot be read"),
        (tmp_path / "no.mp4", "no such"),
        (61, "61"),
    ):
        assert track(source) == 3
        _, err = capfd.readouterr()
        assert words in err and "Traceback" not in err and "WARN" not in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--right", "."], "--baseline"),
        (["--baseline", "0.5"], "--right"),
        (["--epipolar-window", "2"], "rectified pairs"),
        (["--ground-truth", "poses.txt"], "--camera"),
        (["--plot", "t.png"], "--camera"),
        (["--output", "t.tum"], "--camera"),
        (["--output", "t.csv"], ".npz or .tum or .kitti or .rrd"),
        (["--camera", "1,2,3"], "--camera must be"),
        (["--fps", "0"], "the frame rate must be"),
        (["--budget-ms", "-3"], "--budget-ms"),
    ],
)
def test_options_that_do_not_fit_are_refused(folders, monkeypatch, tmp_path, capfd, options, words):
    monkeypatch.chdir(tmp_path)
    assert track(folders[0], *options) == 2
    assert words in capfd.readouterr().err


def test_sources_are_ordered_named_and_timed(tmp_path):
    for name in ("frame10.png", "frame9.png", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    shots = list(open_frames(str(tmp_path), rate=4))
    assert [(shot.name, shot.timestamp) for shot in shots] == [("frame9.png", 0.0), ("frame10.png", 0.25)]
    stamped = tmp_path / "stamped"
    stamped.mkdir()
    for name in ("1305031102.175304.png", "1305031102.211214.png"):
        (stamped / name).write_bytes(b"x")
    assert [shot.timestamp for shot in open_frames(str(stamped))] == [1305031102.175304, 1305031102.211214]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="no images"):
        open_frames(str(empty))
    with pytest.raises(UsageError, match="share a name"):
        open_frames(str(tmp_path), stamped)
    with pytest.raises(UsageError, match="two folders"):
        open_frames("0", tmp_path)
    with pytest.raises(ImageError, match="no such"):
        open_frames(str(tmp_path / "absent.mp4"))
    with pytest.raises(UsageError, match="single image"):
        open_frames(str(tmp_path / "frame9.png"))


def test_a_recording_is_written_whole(folders, tmp_path, capfd):
    pytest.importorskip("rerun")
    left, right, _ = folders
    file = tmp_path / "r.rrd"
    assert track(left, *stereo(right), "--frames", 3, "--output", file) == 0
    assert file.read_bytes()[:4].startswith(b"RRF") and file.stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_without_rerun_or_a_display_the_remedy_is_named(folders, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rerun", None)
        assert track(folders[0], "--output", tmp_path / "r.rrd") == 2
        assert "pip install 'rerun-sdk" in capfd.readouterr().err
    pytest.importorskip("rerun")
    if sys.platform.startswith("linux"):
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            monkeypatch.delenv(name, raising=False)
        assert track(folders[0], "--show") == 2
        assert "(FILE.rrd) instead" in capfd.readouterr().err
    assert not any(path.name.startswith(".r.rrd") for path in tmp_path.iterdir())


TIME = 1403636579763555584  # of EuRoC's first frame, in nanoseconds


def touch(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def times(folder: Path) -> list[float]:
    return [shot.timestamp for shot in open_frames(str(folder))]


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_names_are_times_in_any_unit(tmp_path, unit):
    start = TIME // 10**9 * unit
    names = [f"{start + each * unit // 20 if unit > 1 else start + each}.png" for each in range(4)]
    step = 0.05 if unit > 1 else 1.0
    found = times(touch(tmp_path / "data", names))
    np.testing.assert_allclose(found, TIME // 10**9 + step * np.arange(4), atol=1e-5)
    # Numbers that are no times count frames.
    assert times(touch(tmp_path / "kitti", ["0000000000.png", "0000000001.png"])) == [0.0, 0.1]


LISTS = {
    "times.txt": ("0.0\n0.5\n1.25\n", [0.0, 0.5, 1.25]),  # KITTI
    "times.txt with names and exposures": ("00000 5.5 .1\n00001 6 .1\n00002 7 .1\n", [5.5, 6.0, 7.0]),
    "timestamps.txt": (
        "2011-09-26 13:02:25.594360375\n2011-09-26 13:02:25.694360375\n2011-09-26 13:02:25.8\n",
        None,
    ),  # KITTI's raw data
    "data.csv": (
        "#timestamp [ns],filename\n"
        f"{TIME},00000.png\n{TIME + 5 * 10**7},00001.png\n{TIME + 10**8},00002.png\n",
        [TIME / 1e9, TIME / 1e9 + 0.05, TIME / 1e9 + 0.1],
    ),  # EuRoC
    "rgb.txt": (
        "# color\n7.5 rgb/00000.png\n7.6 rgb/00001.png\n7.75 rgb/00002.png\n",
        [7.5, 7.6, 7.75],
    ),  # TUM
}


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("name", LISTS)
def test_files_beside_the_images_say_their_times(tmp_path, name, beside):
    folder = touch(tmp_path / "rgb", ["00000.png", "00001.png", "00002.png"])
    text, wanted = LISTS[name]
    file = (tmp_path if beside else folder) / name.split()[0]
    file.write_text(text)
    found = np.array(times(folder))
    if wanted is None:
        found, wanted = found - found[0], [0.0, 0.1, 0.20564]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    for other in ("0.0\n", "a\n\n", "\0"):
        file.write_text(other)
        np.testing.assert_allclose(times(folder), [0.0, 0.1, 0.2])  # it says nothing of these images
    assert [shot.timestamp for shot in open_frames(str(folder), rate=2)] == [0.0, 0.5, 1.0]


def test_times_that_do_not_meet_are_named_with_their_likely_unit(folders, tmp_path, capfd):
    left, right, _ = folders
    pairs = [*stereo(right), "--ground-truth", tmp_path / "t.tum"]
    for scale, words in ((1e9, "nanoseconds"), (1e3, "milliseconds")):
        for index, path in enumerate(sorted(left.iterdir())):
            for side in (left, right):
                (side / path.name).rename(side / f"{1500000000 + index / 10:.6f}.png")
        rows = [f"{(1500000000 + i / 10) * scale:.0f} {i} 0 0 0 0 0 1\n" for i in range(6)]
        (tmp_path / "t.tum").write_text("".join(rows))
        assert track(left, *pairs) == 2
        said = " ".join(capfd.readouterr().err.split())
        assert words in said and "1500000000" in said and f"{1500000000 * scale:.10g}" in said
    (tmp_path / "t.tum").write_text("".join(f"{1500000000 + i / 10:.2f} {i} 0 0 0 0 0 1\n" for i in range(6)))
    assert track(left, *pairs, "--fps", 10) == 2
    assert "frame rate" in " ".join(capfd.readouterr().err.split())


def test_poses_that_nobody_measured_are_written_on_request_only(folders, tmp_path, capfd):
    left, right, _ = folders
    for number in range(6, 8):
        noise = np.random.default_rng(number).integers(0, 255, (240, 320), dtype=np.uint8)
        for side in (left, right):
            cv2.imwrite(str(side / f"{number}.png"), noise)
    pairs = [left, *stereo(right)]
    assert track(*pairs, "--output", tmp_path / "a.tum", "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["poses"], facts["bridged"], facts["statuses"]["lost"]) == (6, 2, 2)
    assert len(read_poses(tmp_path / "a.tum")[1]) == 6
    assert track(*pairs, "--output", tmp_path / "a.kitti") == 2
    assert track(*pairs, "--output", tmp_path / "a.tum", "--output", tmp_path / "a.kitti", "--bridged") == 0
    for name in ("a.tum", "a.kitti"):
        assert len(read_poses(tmp_path / name)[1]) == 8
        assert "not measured" in (tmp_path / name).read_text()
    assert track(*pairs, "--output", tmp_path / "a.npz") == 0
    with np.load(tmp_path / "a.npz") as data:
        assert data["pose_status"].tolist() == ["ok"] * 6 + ["bridged"] * 2
