"""Poses and depths of a made-up scene, found together; what all disparities are short of."""

import cv2
import numpy as np
import pytest
from street_scene import BASELINE
from street_scene import CAMERA as STREET
from street_scene import SIZE as STREET_SIZE

import matcher
from matcher.cameras import Camera
from matcher.sequence.frames import FrameLinks, KeptFrame, MeasuredDisparities
from matcher.sequence.pose_tracking import (
    DisparityOffset,
    LinkedPoints,
    PoseTracker,
    adjust,
    move,
    project,
    rays,
    solve_pose,
    triangulate,
)

CAMERA = Camera(500, 500, 320, 240)
COUNT, WRONG = 400, 30
PRODUCT = STREET.fx * BASELINE
AHEAD, ASIDE = (0.02, -0.01, 0.9), (0.9, 0.0, 0.0)


def motion(step, degrees, axis=(0.0, 1.0, 0.0)) -> np.ndarray:
    """(4, 4) cam1_from_cam0 of a camera that turns and whose points move by `step` (3,)."""
    T = np.eye(4)
    T[:3, :3] = cv2.Rodrigues(np.deg2rad(degrees) * np.array(axis) / np.linalg.norm(axis))[0]
    T[:3, 3] = step
    return T


@pytest.fixture
def scene(rng):
    """Rays of two frames' points, their inverse depths, where the second shows them, the pose between."""
    T = motion((0.4, 0.05, 0.2), 6, (0.2, 1, 0.1))
    rays0 = rays(rng.uniform([40, 40], [600, 440], (COUNT, 2)), CAMERA)
    inverse = 1 / rng.uniform(3, 20, COUNT)
    points1 = project(move(rays0 / inverse[:, None], T), CAMERA) + rng.normal(0, 0.25, (COUNT, 2))
    points1[:WRONG] += rng.choice([-1, 1], (WRONG, 2)) * rng.uniform(15, 40, (WRONG, 2))
    return rays0, inverse, points1, T


def test_pose_and_depth_of_a_made_up_scene(scene):
    rays0, inverse, points1, T = scene
    depths = 1 / inverse
    depths[100:120] = np.nan
    points = LinkedPoints(rays0, points1, CAMERA)
    found, inliers = solve_pose(points, depths)
    np.testing.assert_allclose(found, T, atol=0.02)
    assert inliers[:WRONG].sum() < 4 and inliers[WRONG:100].mean() > 0.7 and not inliers[100:120].any()
    assert solve_pose(points[:11], depths[:11])[0] is None
    exact = rays(project(move(rays0 / inverse[:, None], T), CAMERA), CAMERA)
    back, angles = triangulate(rays0, exact, T)
    np.testing.assert_allclose(back[angles > 0.6], 1 / inverse[angles > 0.6], rtol=1e-6)
    assert np.isnan(triangulate(rays0, rays0, np.eye(4))[0]).all()


def test_uncertain_depths_do_not_spoil_the_pose(scene, rng):
    rays0, inverse, points1, T = scene
    errors = 0.2 * inverse
    prior = inverse + rng.normal(0, 1, COUNT) * errors
    prior[200:], errors[200:] = np.nan, np.nan  # of half of them nothing is known
    points = LinkedPoints(rays0, points1, CAMERA)
    start, _ = solve_pose(points, 1 / prior)
    found = adjust(points, prior, errors, start)
    assert not found.agreeing[:WRONG].any() and found.agreeing[WRONG:].mean() > 0.95
    off = [np.linalg.norm(pose[:3, 3] - T[:3, 3]) for pose in (start, found.cam1_from_cam0)]
    assert off[1] < 0.015 < off[0] and 0.3 * off[1] < found.deviation < 0.1
    good = found.agreeing
    assert np.median(np.abs(found.inverse_depths / inverse - 1)[good]) < 0.03
    deviations = np.abs(found.inverse_depths - inverse)[good] / found.errors[good]
    assert 0.4 < np.median(deviations) < 1.0  # .67 where errors are what they say
    kept = np.isfinite(prior) & ~good
    np.testing.assert_allclose(found.errors[kept], 2 * errors[kept])  # contradicted: less sure than before
    wrong = LinkedPoints(rays0, rng.permutation(points1), CAMERA)
    assert adjust(wrong, inverse, 0.1 * inverse, T) is None


def test_a_point_without_parallax_stays_unknown_and_a_far_scene_leaves_the_step_open(scene, rng):
    rays0, inverse, _, T = scene
    turned = motion((0, 0, 0), 6)
    points1 = project(move(rays0 / inverse[:, None], turned), CAMERA)
    prior, errors = inverse.copy(), 0.05 * inverse
    prior[200:], errors[200:] = np.nan, np.nan
    found = adjust(LinkedPoints(rays0, points1, CAMERA), prior, errors, turned)
    np.testing.assert_allclose(found.cam1_from_cam0, turned, atol=1e-4)
    assert (found.errors[200:] > found.inverse_depths[200:]).all()
    deviations = []
    for nearer in (1.0, 30.0):  # the same scene, thirty times as far away
        far = inverse / nearer
        points1 = project(move(rays0 / far[:, None], T), CAMERA) + rng.normal(0, 0.3, (COUNT, 2))
        points = LinkedPoints(rays0, points1, CAMERA)
        deviations.append(adjust(points, far, 0.05 * far, T).deviation)
    assert deviations[1] > 10 * deviations[0]


def observed(step, short, frames=12, wrong_pose=False):
    """An estimate after frames of points at 4 to 60 m, whose measured disparities are all `short`."""
    rng, offset = np.random.default_rng(1), DisparityOffset()
    for _ in range(frames):
        rays0 = rays(rng.uniform((0, 0), STREET_SIZE, (400, 2)), STREET)
        disparities = PRODUCT / np.exp(rng.uniform(np.log(4), np.log(60), 400))
        T = motion(-np.array(step), 1.15)
        world = rays0 * (PRODUCT / disparities)[:, None]
        points1 = project(move(world, T), STREET) + rng.normal(0, 0.2, (400, 2))
        used = motion(-1.01 * np.array(step), 1.17) if wrong_pose else T
        measured = disparities - short + rng.normal(0, 0.2, 400)
        measured = MeasuredDisparities(measured, np.full(400, 0.2), offset.value, PRODUCT)
        offset.observe(LinkedPoints(rays0, points1, STREET), measured, used)
    return offset


@pytest.mark.parametrize(("short", "wrong_pose"), [(-0.2, False), (0.0, True), (0.3, True)])
def test_motion_ahead_shows_the_offset(short, wrong_pose):
    found = observed(AHEAD, short, wrong_pose=wrong_pose)
    assert abs(found.value - short) < 0.07 and found.deviation < 0.1


def test_a_turn_does_not_show_it_and_a_step_aside_hardly():
    still, aside, ahead = (observed(step, 0.3, frames=3) for step in ((0, 0, 0), ASIDE, AHEAD))
    assert abs(still.value) < 0.01 and still.deviation > 0.299
    assert 0 < aside.value < ahead.value < 0.32 and aside.deviation > 1.2 * ahead.deviation


# --- What moves.


def steps(rng, moving: tuple[np.ndarray, np.ndarray], frames: int = 3, baseline: float | None = BASELINE):
    """Status and error of each step of 2.6 m; `moving` are points and their way in a frame.

    Without a baseline one camera begins with every frame anew, and its unit is the step.
    """
    standing = rng.uniform((-45, -9, 12), (45, 1.5, 90), (220, 3))
    ahead, tracker, before, found = np.array([0, 0, 2.6]), PoseTracker(STREET, baseline), None, []
    for index in range(frames):
        world = np.concatenate([standing, moving[0] + index * moving[1]]) - index * ahead
        points = np.nan_to_num(project(world, STREET), nan=-99.0) + rng.normal(0, 0.1, (len(world), 2))
        features = matcher.Features(points.astype(np.float32), np.zeros((len(world), 4), np.float32),
                                    size=STREET_SIZE, kind="sift")  # fmt: skip
        frame = KeptFrame(index, features)
        disparities = PRODUCT / world[:, 2] + rng.normal(0, 0.1, len(world))
        right = points - np.column_stack([disparities, 0 * disparities])
        tracker.measure(frame, right.astype(np.float32), np.full(len(world), 0.15))
        if before is None:
            tracker.begin(frame)
        else:
            rows = np.flatnonzero((world[:, 2] > 1) & (points >= 0).all(1) & (points < STREET_SIZE).all(1))
            links = FrameLinks(
                index - 1, np.tile(rows[:, None], 2), np.ones(len(rows)), np.ones(len(rows), bool)
            )
            status, T = tracker.locate(before, frame, links)
            way = None if T is None else np.linalg.inv(T)[:3, 3] * (1.0 if baseline else 2.6)
            found.append((status, np.inf if way is None else np.linalg.norm(way - ahead) / 2.6))
        before = frame
    return found


def test_a_car_with_more_points_than_the_scene_does_not_move_the_camera(rng):
    car = rng.uniform((-4.5, -0.2, 6), (-2.6, 1.4, 10), (400, 3))
    for way in (2.6, 3.4, -1.0):  # it keeps its distance, overtakes, or comes towards the camera
        found = steps(rng, (car, np.array([0, 0, way])))
        assert all(off < 0.02 for _, off in found), (way, found)


def test_a_step_that_something_large_may_have_made_is_uncertain(rng):
    """A lorry before the camera that covers most of the image, as deep as what stands still."""
    lorry = rng.uniform((-9, -4, 9), (9, 1.4, 70), (300, 3))
    assert all(
        status == "uncertain" or off < 0.1 for status, off in steps(rng, (lorry, np.array([0, 0, 2.6])))
    )


def test_one_camera_begins_where_little_moves(rng):
    """Many points are of a car that changes its lane, or a few of one that comes towards the camera."""
    car = rng.uniform((-2.5, -0.2, 6), (2.5, 1.4, 10), (100, 3))
    changing = steps(rng, (car, np.array([0.3, 0, 2.6])), frames=2, baseline=None)
    assert [status for status, _ in changing] == ["starting"]
    oncoming = steps(rng, (car[:8], np.array([0, 0, -2.6])), frames=2, baseline=None)
    assert [status for status, _ in oncoming] == ["uncertain"] and oncoming[0][1] < 0.05
