"""Matches on what lies over both pictures are left out; those of a camera that stands still are not."""

import numpy as np
import pytest

from matcher.types import Features, Matches
from matcher.verify.overlays import on_overlay, without_overlay

SIZE = (640, 480)


def features(points):
    count = len(points)
    return Features(
        keypoints=np.asarray(points, np.float32),
        descriptors=np.zeros((count, 4), np.float32),
        scores=np.ones(count, np.float32),
        mask=np.ones(count, bool),
        size=np.array(SIZE, np.float32),
        scale=np.ones(2, np.float32),
        kind="corners",
    )


def pair(rng, overlay, shift, matched=300):
    """Keypoints of a stamp, then of a scene that moves by `shift`, half of which are matched."""
    stamp = rng.uniform((20, 430), (250, 460), (overlay, 2))
    scene = rng.uniform((0, 0), (620, 420), (600, 2))
    points0, points1 = np.concatenate([stamp, scene]), np.concatenate([stamp, scene + shift])
    points1 += rng.normal(0, 0.2, points1.shape)
    indices = np.repeat(np.arange(overlay + matched)[:, None], 2, axis=1)
    return (
        features(points0),
        features(points1),
        Matches.from_indices(indices, points0, points1, np.ones(len(indices))),
    )


def test_a_stamp_on_a_scene_that_moves(rng):
    found = on_overlay(*(given := pair(rng, 60, (90.0, 15.0))))
    assert found[:60].all() and not found[60:].any()
    kept = without_overlay(*given)
    assert len(kept) == 300 and kept.overlay == 60


def test_a_stamp_on_unrelated_pictures(rng):
    features0, _, matches = pair(rng, 60, 0.0, matched=0)
    points1 = np.concatenate([matches.points1, rng.uniform((0, 0), (620, 420), (600, 2))])
    assert not len(without_overlay(features0, features(points1), matches))


@pytest.mark.parametrize("matched", [20, 300, 600])
def test_a_camera_that_stands_still(rng, matched):
    assert not on_overlay(*pair(rng, 60, 0.0, matched=matched)).any()


def test_a_camera_that_moves_a_little_sees_far_points_at_rest(rng):
    features0, _, matches = pair(rng, 0, 0.0)
    moved = matches.points1 + rng.uniform(0, 6, (300, 1)) * np.array([1.0, 0.0])
    given = Matches(matches.indices, matches.points0, moved.astype(np.float32), matches.scores)
    assert not on_overlay(features0, features(moved), given).any()
