"""Depth and odometry from rendered pairs whose truth is known; roads of all kinds."""

import os
from pathlib import Path

import numpy as np
import pytest
from street_scene import BASELINE, CAMERA, OPEN_ROAD, ROADS, SIZE, STREET, pair, pose, true_disparities

import matcher
from matcher.refine import ImagePyramid
from matcher.sequence.frames import FrameLinks, KeptFrame
from matcher.sequence.linking import complete_partners
from matcher.sequence.pose_tracking import PoseTracker, project
from matcher.sequence.trajectory import read_poses, segment_errors

pytestmark = pytest.mark.usefixtures("compiled")

ROOT = Path(__file__).resolve().parent.parent
KITTI = Path(os.environ.get("MATCHER_DATA", ROOT.parent / "shared")) / "bench/kitti_mini/KITTI_sequence_1"


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
    assert error[sure].mean() < 0.7 * error[~sure].mean()
    assert (error[sure] < 3 * said[sure] + 0.15).mean() > 0.9
    few = np.where((np.arange(len(points)) < 4)[:, None], there, np.float32(np.nan))
    assert complete_partners(images, points, few)[0] is few


# --- Odometry.


def step_errors(truth: np.ndarray, found: np.ndarray, lengths: tuple[float, ...]) -> list[float]:
    """Share of the length by which segments are off."""
    return [error.translation for error in segment_errors(truth, found, lengths)]


# Mean errors of plain OpenCV on the images of the two tests that name it: SIFT with a ratio of 0.8 in both
# images of a pair and from frame to frame, solvePnPRansac within a pixel, solvePnPRefineLM.
PLAIN_ON_ROAD, PLAIN_ON_KITTI = 0.0018, 0.0157


def test_odometry_on_an_open_road_is_as_good_as_plain_opencv():
    """Nothing near but the ground, which slants: with its points dropped the error was 10 %."""
    truth = np.array([pose(frame, step=1.0) for frame in range(5)])
    tracker = matcher.Tracker(load("nearest"), CAMERA, baseline=BASELINE)
    results = [tracker.push_stereo(*pair(OPEN_ROAD, T, frame)) for frame, T in enumerate(truth)]
    assert ((results[0].keypoints - results[0].right)[:, 0] > 10).sum() > 150
    errors = step_errors(truth, np.array([result.world_from_cam for result in results]), (1, 2, 4))
    assert max(errors) < 0.01 and np.mean(errors) < PLAIN_ON_ROAD + 0.001


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
    errors = step_errors(truth[:25], found, (5, 10))
    assert max(errors) < 0.03 and np.mean(errors) < 1.2 * PLAIN_ON_KITTI


# --- What moves.

PRODUCT = CAMERA.fx * BASELINE


def steps(rng, moving: tuple[np.ndarray, np.ndarray], frames=3, baseline=BASELINE, near=12, short=0.0):
    """Status and error of each step of 2.6 m; `moving` are points and their way in a frame.

    Others are `near` metres away or more, and disparities are `short` of the true ones by so many pixels.
    Without a baseline one camera begins with every frame anew, and its unit is the step.
    """
    standing = rng.uniform((-45, -9, near), (45, 1.5, 90), (220, 3))
    ahead, tracker, before, found = np.array([0, 0, 2.6]), PoseTracker(CAMERA, baseline), None, []
    for index in range(frames):
        world = np.concatenate([standing, moving[0] + index * moving[1]]) - index * ahead
        points = np.nan_to_num(project(world, CAMERA), nan=-99.0) + rng.normal(0, 0.1, (len(world), 2))
        features = matcher.Features(np.clip(points, 0, SIZE), np.zeros((len(world), 4), np.float32),
                                    size=SIZE, kind="sift")  # fmt: skip
        frame = KeptFrame(index, features)
        disparities = PRODUCT / world[:, 2] - short + rng.normal(0, 0.1, len(world))
        right = points - np.column_stack([disparities, 0 * disparities])
        tracker.measure(frame, right.astype(np.float32), np.full(len(world), 0.15))
        if before is None:
            tracker.begin(frame)
        else:
            rows = np.flatnonzero((world[:, 2] > 1) & (points >= 0).all(1) & (points < SIZE).all(1))
            sure = np.ones(len(rows))
            links = FrameLinks(index - 1, np.tile(rows[:, None], 2), sure, sure.astype(bool))
            status, T = tracker.locate(before, frame, links)
            way = None if T is None else np.linalg.inv(T)[:3, 3] * (1.0 if baseline else 2.6)
            found.append((status, np.inf if way is None else np.linalg.norm(way - ahead) / 2.6))
        before = frame
    return found


def test_a_step_that_something_large_may_have_made_is_uncertain(rng):
    """A lorry before the camera covers most of the image; or all is far and pairs are not quite rectified."""
    lorry = rng.uniform((-9, -4, 9), (9, 1.4, 70), (300, 3))
    found = steps(rng, (lorry, np.array([0, 0, 2.6]))) + steps(rng, (lorry[:0], lorry[0]), near=45, short=0.5)
    assert all(status == "uncertain" or off < 0.1 for status, off in found)


def test_one_camera_begins_where_little_moves(rng):
    """Many points are of a car that changes its lane, or a few of one that comes towards the camera."""
    car = rng.uniform((-2.5, -0.2, 6), (2.5, 1.4, 10), (100, 3))
    changing = steps(rng, (car, np.array([0.3, 0, 2.6])), frames=2, baseline=None)
    assert [status for status, _ in changing] == ["starting"]
    oncoming = steps(rng, (car[:8], np.array([0, 0, -2.6])), frames=2, baseline=None)
    assert [status for status, _ in oncoming] == ["uncertain"] and oncoming[0][1] < 0.05
