"""Disparities that are all short of the same fraction of a pixel, which motion shows."""

import cv2
import numpy as np
import pytest
from street_scene import BASELINE, CAMERA, SIZE, STREET, pair, pose

import matcher
from matcher.sequence.stereo import DisparityOffset, move, project, rays

PRODUCT = CAMERA.fx * BASELINE
AHEAD, ASIDE = (0.02, -0.01, 0.9), (0.9, 0.0, 0.0)


def motion(step, angle=0.02):
    """(4, 4) cam1_from_cam0 of a camera that moves by `step` (3,) and turns about its vertical axis."""
    T = np.eye(4)
    T[:3, :3] = cv2.Rodrigues(np.array([0.0, angle, 0.0]))[0]
    T[:3, 3] = -T[:3, :3] @ np.array(step)
    return T


def seen(step, short, frames=12, noise=0.2, wrong_pose=False):
    """An estimate after frames of points at 4 to 60 m, whose measured disparities are all `short`."""
    rng, offset = np.random.default_rng(1), DisparityOffset()
    for _ in range(frames):
        points0 = rng.uniform((0, 0), SIZE, (400, 2))
        disparities = PRODUCT / np.exp(rng.uniform(np.log(4), np.log(60), 400))
        T = motion(step)
        world = rays(points0, CAMERA) * (PRODUCT / disparities)[:, None]
        points1 = project(move(world, T), CAMERA) + rng.normal(0, noise, (400, 2))
        if wrong_pose:
            T = motion(np.array(step) * 1.01, 0.0205)
        measured = disparities - short + rng.normal(0, noise, 400)
        offset.observe(points0, measured, offset.value, points1, T, CAMERA, PRODUCT)
    return offset


@pytest.mark.parametrize("short", [-0.2, 0.0, 0.3])
@pytest.mark.parametrize("wrong_pose", [False, True])
def test_motion_ahead_shows_the_offset(short, wrong_pose):
    found = seen(AHEAD, short, wrong_pose=wrong_pose)
    assert abs(found.value - short) < 0.07
    assert found.deviation < 0.1


def test_a_turn_does_not_show_it_and_a_step_aside_hardly():
    still, aside, ahead = (seen(step, 0.3, frames=3) for step in ((0, 0, 0), ASIDE, AHEAD))
    assert abs(still.value) < 0.01 and still.deviation > 0.299
    assert 0 < aside.value < ahead.value < 0.32
    assert aside.deviation > 1.2 * ahead.deviation


def test_few_points_and_points_behind_say_nothing():
    offset = DisparityOffset()
    points = np.tile([[200.0, 80.0]], (8, 1))
    offset.observe(points, np.full(8, 20.0), 0.0, points, motion((0, 0, 50.0)), CAMERA, PRODUCT)
    offset.observe(points[:3], np.full(3, 20.0), 0.0, points[:3], motion(AHEAD), CAMERA, PRODUCT)
    assert offset.value == 0 and offset.deviation == pytest.approx(0.3)


@pytest.mark.slow
def test_a_pair_that_is_not_rectified_exactly_gives_the_right_lengths(monkeypatch):
    """The right image of a rendered street is shifted by .4 of a pixel."""
    shift = np.array([[1, 0, 0.4], [0, 1, 0]])
    truth = np.array([pose(frame, step=0.7) for frame in range(8)])
    pairs = []
    for frame, T in enumerate(truth):
        left, right = pair(STREET, T, frame)
        pairs.append((left, cv2.warpAffine(right, shift, SIZE, flags=cv2.INTER_CUBIC, borderMode=1)))
    length = np.linalg.norm(truth[-1, :3, 3])
    errors, offsets = {}, []
    for prior in (0.3, 1e-4):  # pixels; the second: not estimated
        monkeypatch.setattr("matcher.sequence.stereo._PRIOR", prior)
        tracker = matcher.Tracker("nearest", CAMERA, baseline=BASELINE, max_keypoints=600)
        results = [tracker.push_stereo(*each) for each in pairs]
        found = results[-1].world_from_cam
        errors[prior] = abs(np.linalg.norm(found[:3, 3]) / length - 1)
        offsets.append(tracker.disparity_offset)
    assert 0.1 < offsets[0] < 0.5 and abs(offsets[1]) < 0.001
    assert errors[0.3] < 0.75 * errors[1e-4]  # the first steps are made before the offset is known
