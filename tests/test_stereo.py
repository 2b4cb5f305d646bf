"""Depth and odometry from rendered pairs whose truth is known, beside plain OpenCV; roads of all kinds."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from opencv_odometry import opencv_odometry
from street_scene import BASELINE, CAMERA, OPEN_ROAD, ROADS, STREET, pair, pose, true_disparities

import matcher
from matcher.refine import ImagePyramid
from matcher.sequence.frames import FrameLinks
from matcher.sequence.stereo import complete_partners, depths_of, partners, within
from matcher.sequence.trajectory import read_poses, segment_errors

ROOT = Path(__file__).resolve().parent.parent
KITTI = Path(os.environ.get("MATCHER_DATA", ROOT.parent / "shared")) / "bench/kitti_mini/KITTI_sequence_1"


def load(preset: str, points: int = 800, **options) -> matcher.Pipeline:
    return matcher.load(preset, max_keypoints=points, device="cpu", **options)


def test_depth_comes_from_disparity_and_rows_must_agree():
    points = np.array([[100, 50], [100, 60], [100, 70], [100, 80], [100, 90]], np.float32)
    others = np.array([[90, 50.5], [90, 65], [110, 70], [99.9, 80]], np.float32)
    indices = np.column_stack([np.arange(4), np.arange(4)])
    links = FrameLinks(0, indices, np.ones(4, np.float32), np.ones(4, bool))
    right = partners(points, others, links)
    np.testing.assert_array_equal(right[:4], others)
    depths = depths_of(points, right, focal=500.0, baseline=0.5)
    assert depths[0] == pytest.approx(25.0) and np.isnan(depths[1:]).all() and np.isnan(right[4]).all()
    assert np.isfinite(within(points, right, 2.0)[:, 0]).tolist() == [True, False, False, True, False]


def test_near_points_are_kept_as_often_as_far_ones_and_depths_are_unbiased():
    tracker = matcher.Tracker(load("nearest"), CAMERA, baseline=BASELINE)
    true, found = [], []
    for frame in (0, 3):
        result = tracker.push_stereo(*pair(STREET, pose(frame), frame))
        true.append(true_disparities(STREET, result.keypoints, pose(frame)))
        found.append(CAMERA.fx * BASELINE / result.depths)
    true, found = np.concatenate(true), np.concatenate(found)
    shares = []
    for low, high in ((2, 4), (4, 8), (8, 16), (16, 32), (32, 80)):
        there = (true >= low) & (true < high)
        error = (found - true)[there & np.isfinite(found)]
        shares.append(len(error) / there.sum())
        assert there.sum() > 30 and abs(np.median(error)) < 0.05 and np.median(np.abs(error)) < 0.1
        assert (np.abs(error) < 1).mean() > 0.97
    assert min(shares) > 0.65 and min(shares) > 0.75 * max(shares)


@pytest.fixture(scope="module")
def known() -> tuple[tuple[ImagePyramid, ImagePyramid], np.ndarray, np.ndarray]:
    """A pair, points of its left image, and where the right one shows them."""
    images = [matcher.Image(view, view.shape[::-1]) for view in pair(STREET, pose(0), 0)]
    points = load("nearest", 500).extract(images[0].pixels).keypoints.numpy()
    disparities = true_disparities(STREET, points, pose(0))
    points, disparities = (each[np.isfinite(disparities)] for each in (points, disparities))
    there = points - np.column_stack([disparities, np.zeros(len(points))])
    return tuple(map(ImagePyramid.of, images)), points, there.astype(np.float32)


def test_links_are_placed_exactly_and_the_rest_is_found(known, rng):
    images, points, there = known
    linked = rng.random(len(points)) < 0.5
    given = np.where(linked[:, None], there, np.float32(np.nan))
    given[:, 0] += rng.uniform(-1, 1, len(points)).astype(np.float32)
    given[::5, 1] += np.where(np.arange(len(given[::5])) % 2, 1.6, -1.6)  # on another row than those around
    found, deviations = complete_partners(images, points, given)
    seen = np.isfinite(found[:, 0])
    assert seen[linked].mean() > 0.8 and seen[~linked].mean() > 0.6 and seen[::5].mean() > 0.6
    error = np.linalg.norm(found - there, axis=1)[seen]
    assert np.median(error) < 0.1 and (error < 1).mean() > 0.97
    said = deviations[seen]
    sure = said <= np.nanmedian(said)
    assert (
        error[sure].mean() < 0.7 * error[~sure].mean() and (error[sure] < 3 * said[sure] + 0.15).mean() > 0.9
    )
    few = np.where((np.arange(len(points)) < 4)[:, None], there, np.float32(np.nan))
    assert complete_partners(images, points, few)[0] is few


def test_a_wrong_link_is_left_out_and_one_without_texture_stays(known):
    images, points, there = known
    given = there.copy()
    given[::7, 0] -= 30
    found, _ = complete_partners(images, points, given)
    assert (np.abs(found - there)[::7, 0] > 2).mean() < 0.1
    flat = ImagePyramid.of(matcher.Image(np.full((200, 480), 90, np.uint8), (480, 200)))
    found, _ = complete_partners((flat, flat), points, there)
    inside = ((points > 20) & (points < (460, 180)) & (there > 20)).all(axis=1)
    np.testing.assert_allclose(found[inside], there[inside], atol=1e-4)


# --- Odometry.


def step_errors(truth: np.ndarray, found: np.ndarray, lengths: tuple[float, ...]) -> list[float]:
    """Share of the length by which segments are off."""
    return [error.translation for error in segment_errors(truth, found, lengths)]


@pytest.fixture(scope="module")
def road() -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]], list[float]]:
    """True poses, pairs, and the errors of plain OpenCV on them."""
    truth = np.array([pose(frame, step=1.0) for frame in range(5)])
    pairs = [pair(OPEN_ROAD, T, frame) for frame, T in enumerate(truth)]
    return truth, pairs, step_errors(truth, opencv_odometry(pairs, CAMERA.K, BASELINE, 800), (1, 2, 4))


def test_odometry_on_an_open_road_is_as_good_as_plain_opencv(road):
    """Nothing near but the ground, which slants: with its points dropped the error was 10 %."""
    truth, pairs, plain = road
    tracker = matcher.Tracker(load("nearest"), CAMERA, baseline=BASELINE)
    results = [tracker.push_stereo(*each) for each in pairs]
    assert ((results[0].keypoints - results[0].right)[:, 0] > 10).sum() > 150
    errors = step_errors(truth, np.array([result.world_from_cam for result in results]), (1, 2, 4))
    assert max(errors) < 0.01 and np.mean(errors) < np.mean(plain) + 0.001


def test_cars_that_move_do_not_carry_the_path_away():
    """On a fast curve, with plain asphalt, a car ahead that keeps its distance, and others."""
    tracker = matcher.Tracker(load("nearest", 512), CAMERA, baseline=BASELINE)
    truth = np.array([ROADS["traffic"].pose(frame) for frame in range(3)])
    results = [tracker.push_stereo(*ROADS["traffic"].pair(frame)) for frame in range(3)]
    assert {result.status for result in results[1:]} == {"tracked"}
    found = np.array([result.world_from_cam for result in results])
    assert max(step_errors(truth, found, (2.6, 5))) < 0.01


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
    assert max(errors) < 0.03 and np.mean(errors) < 1.2 * np.mean(theirs)
