"""Descriptors that turn with their image: their algebra, and pairs of which one image is turned."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import matcher
from matcher.images import read_image
from matcher.match.position import normalise_positions
from matcher.match.steering import (
    PROBED,
    STEERABLE_KIND,
    TURNS,
    aligned,
    best_turn,
    quarter_turns,
    steered,
    try_other_turns,
)
from matcher.types import Features, Matches


@pytest.fixture
def features(rng) -> Features:
    """Of two images, the second with fewer points."""
    pictures = []
    for count in (90, 60):
        points, descriptors = rng.uniform(0, (320, 240), (count, 2)), unit(rng.normal(size=(count, 64)))
        pictures.append(Features(points, descriptors, size=(320, 240), kind=STEERABLE_KIND))
    return Features.stack(pictures)


def unit(descriptors: np.ndarray) -> np.ndarray:
    return (descriptors / np.linalg.norm(descriptors, axis=-1, keepdims=True)).astype(np.float32)


def turned(features: Features, *turns: int) -> Features:
    return replace(features, descriptors=steered(features.descriptors, torch.tensor(turns)))


def test_a_pair_is_turned_as_it_is_alone(rng):
    """60 of its points fit without a turn, which is enough to be certain; the others fit after one."""
    descriptors = unit(rng.normal(size=(4, 384, 64)))
    descriptors[1] = descriptors[0]
    groups = descriptors[0, 60:].reshape(-1, TURNS, 64 // TURNS)
    descriptors[1, 60:] = np.roll(groups, -1, axis=1).reshape(-1, 64)
    points, size, kind = rng.uniform(0, 240, (384, 2)), (320, 240), STEERABLE_KIND
    both, own, *others = (Features(points, each, size=size, kind=kind) for each in descriptors)
    alone = quarter_turns(Features.stack([both]), Features.stack([own]))
    in_a_batch = [Features.stack(side) for side in zip((both, own), others, strict=True)]
    assert quarter_turns(*in_a_batch)[:1] == alone == [best_turn(*descriptors[:2])] == [0]


@pytest.mark.parametrize("turn", range(TURNS))
def test_the_turn_between_images_is_found_for_each_pair_alone(features, turn):
    other = turned(features, -turn, 0)
    assert quarter_turns(features, other) == [turn, 0]
    found = aligned(features, other, STEERABLE_KIND)
    torch.testing.assert_close(found.descriptors, features.descriptors)
    assert found.matched_orientation.tolist() == [(1, 6, 3, 8)[turn], 1]
    torch.testing.assert_close(found.keypoints, features.keypoints)


@pytest.mark.parametrize("exif", range(1, 9))
def test_exif_says_the_turn(features, exif):
    upright = replace(features, exif_orientation=torch.full((2,), exif))
    found = aligned(upright, turned(upright, -1, -1), STEERABLE_KIND)
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]])  # clockwise, y points down
    before, after = (normalise_positions(f) for f in (upright, found))
    pixel = 1 / 320  # positions are of the pixels' corners
    torch.testing.assert_close(after, before @ quarter.T, atol=2.1 * pixel, rtol=0)


def test_what_cannot_be_steered_stays(features):
    other = turned(features, -1, -1)
    for kind in ("any", "sift"):
        assert aligned(features, other, kind) is other
    empty = Features.stack([f.select(torch.arange(0)) for f in features.unstack()])
    assert aligned(features, empty, STEERABLE_KIND) is empty
    assert aligned(empty, features, STEERABLE_KIND) is features


@pytest.mark.parametrize("preset", ["nearest-learned", "hybrid-learned"])
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_turned_image_is_matched_as_the_upright_one(preset, turn, views):
    pipeline = matcher.load(preset, device="cpu", max_keypoints=512)
    pictures = [read_image(path, resize=480).pixels for path in views]
    upright = pipeline.match(*pictures)
    found = pipeline.match(pictures[0], np.ascontiguousarray(np.rot90(pictures[1], turn)))
    back, sides = found.points1, pictures[1].shape[:2]
    for turns in range(turn, 0, -1):  # clockwise, until it is upright again
        back = np.stack([sides[turns % 2] - 1 - back[:, 1], back[:, 0]], axis=1)
    lines = np.column_stack([found.points0, np.ones(len(back))]) @ upright.geometry.matrix.T
    distance = np.abs((lines[:, :2] * back).sum(1) + lines[:, 2]) / np.linalg.norm(lines[:, :2], axis=1)
    assert (distance < 3).sum() > 0.7 * upright.geometry.inliers.sum()


# --- Which turns of pairs with few matches are tried, and on which keypoints.


def matches(count: int) -> Matches:
    indices = np.stack([np.arange(count)] * 2, axis=1)
    points = indices.astype(np.float32)
    return Matches(indices=indices, points0=points, points1=points, scores=np.ones(count, np.float32))


class Turned:
    """Pairs of which the number of matches at every turn is known, for few keypoints and for all."""

    def __init__(self, every: list[list[int]], probes: list[list[int]]) -> None:
        self.every, self.probes, self.calls = every, probes, []

    def __call__(self, few, turn, strongest):
        self.calls.append((list(few), turn, strongest))
        return [matches((self.every if strongest is None else self.probes)[b][turn]) for b in few]

    def tried(self, enough: list[float], *keypoints: int) -> tuple[list[int], list[int]]:
        found = [matches(row[0]) for row in self.every]
        turns = try_other_turns(found, enough, keypoints or [2048] * len(found), self)
        return turns, [len(each) for each in found]


def test_the_strongest_keypoints_show_which_turns_are_matched_whole_and_all_confirm_them():
    pairs = Turned([[3, 200, 400, 400]], [[2, 60, 2, 50]])  # upside down is skipped, and one is enough
    assert pairs.tried([80.0]) == ([1], [200])
    assert pairs.calls == [([0], 2, PROBED), ([0], 1, PROBED), ([0], 1, None)]
    pairs = Turned([[50, 0, 70, 0]], [[10, 0, 40, 0]])  # 1.5 times as many are asked
    assert pairs.tried([80.0]) == ([0], [50]) and ([0], 2, None) in pairs.calls
    pairs = Turned([[3, 0, 0, 39]], [[0, 0, 0, 9]])  # and half of what is enough
    assert pairs.tried([80.0]) == ([0], [3])


def test_pairs_of_a_batch_are_turned_each_by_itself():
    every = [[0, 90, 0, 0], [300, 0, 0, 0], [5, 0, 0, 99], [2, 0, 0, 0], [0, 88, 80, 0]]
    pairs = Turned(every, [[count // 3 for count in row] for row in every])
    assert pairs.tried([80.0] * 5) == ([1, 0, 3, 0, 2], [90, 300, 99, 2, 80])
    whole = [(few, turn) for few, turn, strongest in pairs.calls if strongest is None]
    assert whole == [([4], 2), ([0], 1), ([2], 3)]
