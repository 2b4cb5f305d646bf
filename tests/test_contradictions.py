"""Pairs that loops of three images contradict are found; right ones beside them are kept."""

from itertools import combinations

import cv2
import numpy as np
import pytest

from matcher.collection.contradictions import Edge, contradicted

POINTS = 60


@pytest.fixture
def keypoints(rng):
    return {name: rng.uniform((0, 0), (1000, 700), (POINTS, 2)) for name in "abcdef"}


def edges(rng, names="abcdef"):
    """All pairs of images that show the same points, their keypoint of the same number; a tenth is wrong."""
    found = {}
    for pair in combinations(names, 2):
        indices = np.repeat(np.arange(POINTS)[:, None], 2, axis=1)
        indices[:6, 1] = rng.permutation(indices[:6, 1])
        found[pair] = Edge(indices, None)
    return found


def shifted(edge, by):
    return edge._replace(indices=np.column_stack([edge.indices[:, 0], (edge.indices[:, 1] + by) % POINTS]))


def test_right_pairs_are_kept(rng, keypoints):
    assert contradicted(edges(rng), keypoints) == []


@pytest.mark.parametrize("wrong", [[("a", "d")], [("a", "d"), ("b", "e")], [("a", "b"), ("a", "c")]])
def test_wrong_pairs_among_right_ones(rng, keypoints, wrong):
    given = edges(rng)
    given |= {ends: shifted(given[ends], 7 + number) for number, ends in enumerate(wrong)}
    assert contradicted(given, keypoints) == sorted(wrong)


def test_one_loop_does_not_tell_which_pair_is_wrong(rng, keypoints):
    given = edges(rng, "abc")
    given["a", "b"] = shifted(given["a", "b"], 5)
    assert contradicted(given, keypoints) == []


def test_rotations_that_do_not_close(rng, keypoints):
    turns = {name: cv2.Rodrigues(rng.normal(0, 0.3, 3))[0] for name in keypoints}
    given = {(a, b): e._replace(rotation=turns[b] @ turns[a].T) for (a, b), e in edges(rng).items()}
    assert contradicted(given, keypoints) == []
    wrong = given["b", "d"]
    given["b", "d"] = wrong._replace(rotation=cv2.Rodrigues(np.array([0.0, 1.2, 0.0]))[0] @ wrong.rotation)
    assert contradicted(given, keypoints) == [("b", "d")]
