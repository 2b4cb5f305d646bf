"""Wrong matches of several images are found by going round third images, and left out of tracks."""

from itertools import combinations

import numpy as np
import pytest

import matcher
from matcher.collection.tracks import consistent_matches
from matcher.types import Features, Matches

IMAGES, POINTS = 5, 60


def world(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keypoints of each image, in an order of its own, and where each point of the scene is among them."""
    rng = np.random.default_rng(seed)
    scene = np.stack(np.meshgrid(np.arange(10), np.arange(6)), -1).reshape(-1, 2) * 20.0 + 10
    orders = [rng.permutation(POINTS) for _ in range(IMAGES)]
    keypoints = [(scene + 3 * image)[np.argsort(order)] for image, order in enumerate(orders)]
    return keypoints, orders


def injected(orders: list[np.ndarray], wrong: int, seed: int) -> dict[tuple[int, int], np.ndarray]:
    """All true matches of every pair, of which `wrong` have their partners exchanged; those come first."""
    rng, found = np.random.default_rng(seed), {}
    for first, second in combinations(range(IMAGES), 2):
        indices = np.column_stack([orders[first], orders[second]])
        rows = rng.permutation(POINTS)
        indices = indices[rows]
        indices[:wrong, 1] = np.roll(indices[:wrong, 1], 1)
        found[first, second] = indices
    return found


def test_wrong_matches_are_contradicted_and_right_ones_stay():
    keypoints, orders = world(0)
    pairs = injected(orders, 6, 1)
    kept = consistent_matches(pairs, keypoints, [1.0] * IMAGES)
    wrong = np.concatenate([kept[pair][:6] for pair in pairs])
    right = np.concatenate([kept[pair][6:] for pair in pairs])
    assert wrong.mean() < 0.1 and right.mean() > 0.97
    clean = consistent_matches(injected(orders, 0, 1), keypoints, [1.0] * IMAGES)
    assert all(each.all() for each in clean.values())


def test_a_point_found_twice_is_one_point():
    keypoints, orders = world(0)
    pairs = injected(orders, 0, 1)
    doubled = [np.concatenate([points, points + 0.5]) for points in keypoints]
    rng = np.random.default_rng(2)
    for indices in pairs.values():
        indices += POINTS * rng.integers(0, 2, indices.shape)
    assert all(each.all() for each in consistent_matches(pairs, doubled, [1.0] * IMAGES).values())


def test_three_images_do_not_tell_which_match_is_wrong():
    keypoints, orders = world(0)
    pairs = {pair: rows for pair, rows in injected(orders, 6, 1).items() if max(pair) < 3}
    kept = consistent_matches(pairs, keypoints[:3], [1.0] * 3)
    assert all(each.all() for each in kept.values())


def test_an_image_without_keypoints_says_nothing():
    keypoints, orders = world(0)
    pairs = {pair: rows for pair, rows in injected(orders, 0, 1).items() if max(pair) < 3}
    nothing = np.zeros((0, 2), np.int64)
    kept = consistent_matches(
        {pair: nothing if 1 in pair else rows for pair, rows in pairs.items()},
        [keypoints[0], np.zeros((0, 2)), keypoints[2]],
        [1.0] * 3,
    )
    assert all(each.all() for each in kept.values()) and len(kept[0, 2]) > 0


class Given:
    """Finds the keypoints of an image by its number, and matches as they were injected, wrong ones first."""

    def __init__(self, wrong: int) -> None:
        self.keypoints, orders = world(3)
        self.pairs = injected(orders, wrong, 4)
        self.orders, self.wrong = orders, wrong

    def extractor(self, images) -> list[Features]:
        numbers = [int(image.pixels[0, 0]) for image in images]
        marks = np.eye(IMAGES, dtype=np.float32)
        return [
            Features.from_image(
                image, self.keypoints[n], np.repeat(marks[n : n + 1], POINTS, axis=0), kind="given"
            )
            for n, image in zip(numbers, images, strict=True)
        ]

    def matcher(self, features0: Features, features1: Features) -> list[Matches]:
        ends = [f.unstack()[0] for f in (features0, features1)]
        pair = tuple(int(f.descriptors[0].argmax()) for f in ends)
        scores = np.where(np.arange(POINTS) < self.wrong, 0.95, 0.6)
        return [Matches.from_indices(self.pairs[pair], *(f.keypoints for f in ends), scores)]


@pytest.mark.parametrize("wrong", [0, 5])
def test_tracks_of_a_set_survive_confident_wrong_matches(wrong):
    given = Given(wrong)
    config = matcher.load("nearest", geometry="none").config
    pipeline = matcher.Pipeline(extractor=given.extractor, matcher=given.matcher, config=config)
    images = [np.full((140, 240), number, np.uint8) for number in range(IMAGES)]
    tracks = matcher.match_set(images, pipeline).tracks
    point_of = [np.argsort(order) for order in given.orders]
    pure = [
        len({int(point_of[image][keypoint]) for image, keypoint in zip(part[:, 1], part[:, 2], strict=True)})
        == 1
        for part in (tracks.table()[tracks.table()[:, 0] == track] for track in range(len(tracks)))
    ]
    assert np.mean(pure) > 0.95 and (tracks.lengths == IMAGES).sum() > 0.9 * POINTS
    assert (tracks.conflicts > 20) == (wrong > 0)
