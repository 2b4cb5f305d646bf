"""Depth and odometry from rendered pairs with near points, beside plain OpenCV."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from opencv_odometry import opencv_odometry
from street_scene import BASELINE, CAMERA, OPEN_ROAD, STREET, pair, pose, true_disparities

import matcher
from matcher.sequence.stereo import complete_partners
from matcher.sequence.trajectory import read_poses, segment_errors

ROOT = Path(__file__).resolve().parent.parent
KITTI = Path(os.environ.get("MATCHER_DATA", ROOT.parent / "shared")) / "bench/kitti_mini/KITTI_sequence_1"
DISPARITIES = ((2, 4), (4, 8), (8, 16), (16, 32), (32, 80))


def load(preset: str, points: int = 800, **options) -> matcher.Pipeline:
    return matcher.load(preset, max_keypoints=points, device="cpu", **options)


def test_near_points_are_kept_as_often_as_far_ones_and_depths_are_unbiased():
    tracker = matcher.Tracker(load("nearest"), CAMERA, baseline=BASELINE)
    true, found = [], []
    for frame in (0, 3):
        result = tracker.push_stereo(*pair(STREET, pose(frame), frame))
        true.append(true_disparities(STREET, result.keypoints, pose(frame)))
        found.append(CAMERA.fx * BASELINE / result.depths)
    true, found = np.concatenate(true), np.concatenate(found)
    shares = []
    for low, high in DISPARITIES:
        there = (true >= low) & (true < high)
        assert there.sum() > 30
        error = (found - true)[there & np.isfinite(found)]
        shares.append(len(error) / there.sum())
        assert abs(np.median(error)) < 0.05 and np.median(np.abs(error)) < 0.1
        assert (np.abs(error) < 1).mean() > 0.97
    assert min(shares) > 0.65 and min(shares) > 0.75 * max(shares)


def test_a_link_on_another_row_than_those_around_is_put_on_theirs():
    left, right = (matcher.Image(view, view.shape[::-1]) for view in pair(STREET, pose(0), 0))
    points = load("nearest", 300).extract(left.pixels).keypoints.numpy()
    disparities = true_disparities(STREET, points, pose(0))
    points, disparities = (each[np.isfinite(disparities)] for each in (points, disparities))
    linked = points - np.column_stack([disparities, np.zeros(len(points))])
    linked[::5, 1] += np.where(np.arange(len(linked[::5])) % 2, 1.6, -1.6)
    found = complete_partners((left, right), points, linked.astype(np.float32))
    kept = np.isfinite(found[:, 0])
    assert kept[::5].mean() > 0.6
    assert np.abs((found - points)[kept, 1]).max() < 0.2
    assert np.median(np.abs((points - found)[kept, 0] - disparities[kept])) < 0.1


def step_errors(truth: np.ndarray, found: np.ndarray, lengths: tuple[float, ...]) -> list[float]:
    """Share of the length by which segments are off."""
    return [error.translation for error in segment_errors(truth, found, lengths)]


@pytest.fixture(scope="module")
def road() -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]], list[float]]:
    """True poses, pairs, and the errors of plain OpenCV on them."""
    truth = np.array([pose(frame, step=1.0) for frame in range(5)])
    pairs = [pair(OPEN_ROAD, T, frame) for frame, T in enumerate(truth)]
    return truth, pairs, step_errors(truth, opencv_odometry(pairs, CAMERA.K, BASELINE, 800), (1, 2, 4))


@pytest.mark.parametrize("preset", ["nearest", "hybrid"])
def test_odometry_on_an_open_road_is_as_good_as_plain_opencv(road, preset):
    """Nothing near but the ground, which slants: with its points dropped the error was 10 %."""
    truth, pairs, plain = road
    tracker = matcher.Tracker(load(preset), CAMERA, baseline=BASELINE)
    results = [tracker.push_stereo(*each) for each in pairs]
    disparity = (results[0].keypoints - results[0].right)[:, 0]
    assert (disparity > 10).sum() > 150
    found = np.array([result.world_from_cam for result in results])
    errors = step_errors(truth, found, (1, 2, 4))
    assert max(errors) < 0.01
    assert np.mean(errors) < np.mean(plain) + 0.001


@pytest.mark.slow
@pytest.mark.skipif(not KITTI.is_dir(), reason="needs kitti_mini in the folder MATCHER_DATA names")
def test_odometry_on_driving_images_is_as_good_as_plain_opencv():
    left, right = np.loadtxt(KITTI / "calib.txt").reshape(2, 3, 4)
    camera, baseline = matcher.Camera.from_K(left[:, :3]), float(-right[0, 3] / right[0, 0])
    _, truth = read_poses(KITTI / "poses.txt")
    names = [(path, KITTI / "image_r" / path.name) for path in sorted((KITTI / "image_l").glob("*.png"))[:25]]
    tracker = matcher.Tracker(load("nearest", 1024, resize=1280), camera, baseline=baseline)
    found = np.array([tracker.push_stereo(*each).world_from_cam for each in names])
    pairs = ([cv2.imread(str(name), cv2.IMREAD_GRAYSCALE) for name in each] for each in names)
    plain = opencv_odometry(pairs, camera.K, baseline)
    errors, theirs = (step_errors(truth[:25], poses, (5, 10)) for poses in (found, plain))
    assert max(errors) < 0.03
    assert np.mean(errors) < 1.2 * np.mean(theirs)
