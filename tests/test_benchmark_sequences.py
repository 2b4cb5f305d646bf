import os
from pathlib import Path

import cv2
import numpy as np
import pytest

import matcher
from matcher.benchmark.rows import (
    measure_bare,
    measure_disparity,
    measure_driving,
    measure_latency,
    read_calibration,
)
from matcher.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
BENCH = Path(os.environ.get("MATCHER_DATA", ROOT.parent / "shared")) / "bench"


@pytest.fixture
def nearest() -> matcher.Pipeline:
    return matcher.load("nearest", max_keypoints=250)


def test_a_made_up_drive_is_measured_without_error(nearest, tmp_path):
    """Before one textured wall, 3 m away: everything is known."""
    noise = np.random.default_rng(3).standard_normal((500, 900))
    wall = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 2), None, 0, 255, cv2.NORM_MINMAX)
    for name in ("image_l", "image_r"):
        (tmp_path / name).mkdir()
    rows = []
    for i in range(5):
        for name, x in (("image_l", 40 + 10 * i), ("image_r", 60 + 10 * i)):
            cv2.imwrite(str(tmp_path / name / f"{i:02d}.png"), wall[100:340, x : x + 320].astype(np.uint8))
        rows.append([1, 0, 0, 0.1 * i, 0, 1, 0, 0, 0, 0, 1, 0])
    np.savetxt(tmp_path / "poses.txt", rows)
    left = [300, 0, 159.5, 0, 0, 300, 119.5, 0, 0, 0, 1, 0]
    np.savetxt(tmp_path / "calib.txt", [left, [*left[:3], -60.0, *left[4:]]])
    camera, baseline = read_calibration(tmp_path / "calib.txt")
    assert (camera.fx, camera.cy, baseline) == (300, 119.5, 0.2)
    found = measure_driving(tmp_path, nearest)
    assert found["stereo"]["poses"] == 5
    assert found["stereo"]["segments"][0]["translation"] < 0.05
    assert found["link_precision"] > 0.97 and found["row_precision"] > 0.97
    assert found["depth_difference"] < 0.03
    assert 3.5 < found["mean_track_length"] <= 5
    bare = measure_bare(tmp_path, nearest)
    assert 2 <= bare["mean_track_length"] <= 5 and bare["row_precision"] > 0.9
    (tmp_path / "image_r" / "04.png").unlink()
    with pytest.raises(UsageError, match="same number"):
        measure_driving(tmp_path, nearest)


def test_a_made_up_disparity_is_measured(nearest, tmp_path):
    noise = np.random.default_rng(4).standard_normal((240, 400))
    wall = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 2), None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    cv2.imwrite(str(tmp_path / "im2.png"), wall[:, :320])
    cv2.imwrite(str(tmp_path / "im6.png"), wall[:, 12:332])
    disparity = np.full((240, 320), 48, np.uint8)
    disparity[:120] = 88  # wrong there on purpose
    cv2.imwrite(str(tmp_path / "disp2.pgm"), disparity)
    found = measure_disparity(tmp_path, nearest)
    assert found["matcher_matches"] > 60 and found["tracker_points"] >= 60
    assert 0.3 < found["matcher_precision"] < 0.7
    assert 0.3 < found["tracker_precision"] < 0.7
    # Only at the border of both disparities has a pixel nearby the other one; nothing lies behind anything.
    wrong = (1 - found["tracker_precision"]) * found["tracker_points"]
    assert 0 <= found["tracker_contours"] < 0.2 * wrong
    assert found["inner_points"] == found["tracker_points"]
    assert found["inner_precision"] == found["tracker_precision"]
    with pytest.raises(UsageError, match="disp2"):
        measure_disparity(tmp_path / "none", nearest)


def test_latency_is_measured_by_stage(nearest, views, monkeypatch):
    seconds = iter(np.arange(0, 100, 0.01))  # a clock that gains 10 ms whenever it is read
    monkeypatch.setattr("matcher.sequence.frames.perf_counter", lambda: next(seconds))
    picture = matcher.read_image(views[0]).pixels
    found = measure_latency(picture, nearest, frames=3, size=(320, 240))
    assert set(found) == {"read", "extract", "match", "verify", "refine", "pose", "total", "choice"}
    assert found["extract"]["p50"] == pytest.approx(10) and found["total"]["max"] == pytest.approx(70)
    assert found["choice"] is None
    with pytest.raises(UsageError, match="larger"):
        measure_latency(picture[:100], nearest)


def test_latency_beside_a_map_has_what_the_map_takes(nearest, views, tmp_path):
    picture = matcher.read_image(views[0]).pixels
    found = measure_latency(picture, nearest, frames=3, size=(320, 240), map_folder=tmp_path / "map")
    assert found["total"]["max"] >= found["map"]["max"] > 0 and found["loops"] >= 0
    assert any((tmp_path / "map").rglob("*.png")) or any((tmp_path / "map").rglob("*.jpg"))


def test_files_that_are_no_calibration_are_refused(tmp_path):
    with pytest.raises(UsageError, match="calib"):
        read_calibration(tmp_path / "calib.txt")
    (tmp_path / "calib.txt").write_text("1 2 3\n")
    with pytest.raises(UsageError, match="12 numbers"):
        read_calibration(tmp_path / "calib.txt")


@pytest.mark.slow
def test_the_driving_pictures_are_followed():
    folder = BENCH / "kitti_mini" / "KITTI_sequence_1"
    if not folder.is_dir():
        pytest.skip("kitti_mini is not here")
    pipeline = matcher.load("nearest", max_keypoints=800, resize=1280)
    found = measure_driving(folder, pipeline, frames=15)
    assert found["stereo"]["poses"] == 15
    assert found["stereo"]["segments"][0]["translation"] < 0.03
    assert found["link_precision"] > 0.9 and found["row_precision"] > 0.96
    assert found["depth_difference"] < 0.03
