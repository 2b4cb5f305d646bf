"""What is no evidence for one place: what repeats, and what lies over both pictures."""

from dataclasses import replace

import numpy as np
import pytest

from matcher.types import Features, Matches, Repetition, TwoViewGeometry
from matcher.verify.repetition import on_overlay, repeated_groups, repetition, without_overlay
from matcher.verify.verdict import verdict_of

SIZE = (640, 480)


def features(points, descriptors):
    return Features(
        keypoints=np.asarray(points, np.float32),
        descriptors=(descriptors / np.linalg.norm(descriptors, axis=1, keepdims=True)).astype(np.float32),
        size=np.array(SIZE, np.float32),
        kind="learned",
    )


def walls(rng, things, the_same):
    """Two images of walls papered with a motif of 20 keypoints, and `things` keypoints that do not repeat.

    Those of one wall are matched, as are all of the paper, if both images show it.
    """
    motif, offsets = rng.normal(size=(20, 64)), rng.uniform(0, 60, (20, 2))
    corners = np.stack(np.meshgrid(np.arange(0, 600, 80), np.arange(0, 440, 80)), -1).reshape(-1, 2)
    paper = (corners[:, None] + offsets).reshape(-1, 2)
    beside = rng.uniform(0, (600, 440), (things, 2))
    own = [rng.normal(size=(things, 64))] * 2 if the_same else rng.normal(size=(2, things, 64))
    sides = []
    for unique in own:
        descriptors = np.concatenate([np.tile(motif, (len(corners), 1)), unique])
        noise = rng.normal(0, 0.1, descriptors.shape)
        sides.append(features(np.concatenate([paper, beside]), descriptors + noise))
    count = len(paper) + (things if the_same else 0)
    indices = np.repeat(np.arange(count)[:, None], 2, axis=1)
    matches = Matches.from_indices(indices, *(side.keypoints for side in sides), np.full(count, 0.9))
    return *sides, matches


def verdict(rng, things, the_same):
    *sides, matches = walls(rng, things, the_same)
    inliers = np.ones(len(matches), bool)
    found = repetition(*sides, matches, inliers)
    geometry = TwoViewGeometry("fundamental", "ok", inliers, np.eye(3), repetition=found)
    return found, verdict_of(matches, geometry, SIZE, SIZE)


def test_groups_of_keypoints_that_look_alike(rng):
    first, *_ = walls(rng, 30, True)
    groups = repeated_groups(first)
    paper = groups[:-30].reshape(-1, 20)
    assert (groups[-30:] == -1).all() and len(set(paper[0].tolist())) == 20
    assert (paper == paper[0]).mean() > 0.9
    assert (repeated_groups(replace(first, kind="sift")) == -1).all()


def test_another_wall_with_the_same_paper(rng):
    found, said = verdict(rng, 150, the_same=False)
    assert found.repetitive and found.found < 0.5
    assert said.repetitive and said.probability < 0.2 and "repetitive" in str(said)


def test_the_same_wall(rng):
    found, said = verdict(rng, 150, the_same=True)
    assert found.repetitive and found.found > 0.9
    assert said.word == "same"


def test_paper_alone_cannot_be_told_apart(rng):
    found, said = verdict(rng, 0, the_same=True)
    assert found.unrepeated < 0.1 and said.word != "same"


def test_what_does_not_repeat(rng):
    points, descriptors = rng.uniform(0, (640, 480), (300, 2)), rng.normal(size=(300, 64))
    side = features(points, descriptors)
    indices = np.repeat(np.arange(300)[:, None], 2, axis=1)
    matches = Matches.from_indices(indices, points, points, np.ones(300))
    every = np.ones(300, bool)
    assert repetition(side, side, matches, every) == Repetition(1.0, 1.0)
    assert repetition(side, side, matches, ~every) is None
    absent = replace(side, descriptors=np.zeros((300, 0), np.float32))
    assert repetition(absent, side, matches, every) is None


def corners(points):
    return features(points, np.ones((len(points), 4)))


def pair(rng, overlay, shift, matched=300):
    """Keypoints of a stamp, then of a scene that moves by `shift`, half of which are matched."""
    stamp = rng.uniform((20, 430), (250, 460), (overlay, 2))
    scene = rng.uniform((0, 0), (620, 420), (600, 2))
    points0, points1 = np.concatenate([stamp, scene]), np.concatenate([stamp, scene + shift])
    points1 += rng.normal(0, 0.2, points1.shape)
    indices = np.repeat(np.arange(overlay + matched)[:, None], 2, axis=1)
    return (
        corners(points0),
        corners(points1),
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
    assert not len(without_overlay(features0, corners(points1), matches))


@pytest.mark.parametrize("matched", [20, 300, 600])
def test_a_camera_that_stands_still(rng, matched):
    assert not on_overlay(*pair(rng, 60, 0.0, matched=matched)).any()


def test_a_camera_that_moves_a_little_sees_far_points_at_rest(rng):
    features0, _, matches = pair(rng, 0, 0.0)
    moved = matches.points1 + rng.uniform(0, 6, (300, 1)) * np.array([1.0, 0.0])
    given = Matches(matches.indices, matches.points0, moved.astype(np.float32), matches.scores)
    assert not on_overlay(features0, corners(moved), given).any()
