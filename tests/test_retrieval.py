"""Images that look alike: on made-up descriptors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from matcher.errors import UsageError
from matcher.match.retrieval import learn_vocabulary, neighbour_pairs, similar_pairs
from matcher.match.steering import STEERABLE, steered
from matcher.types import Features


def made_up(rng, scenes, views, points=120, shown=0.6, noise=0.25):
    """Views of scenes: each shows some of the scene's descriptors, disturbed, and as many of its own."""
    table = {}
    for scene in range(scenes):
        local = rng.normal(size=(points, 32))
        for view in range(views):
            seen = local[rng.random(points) < shown]
            seen = seen + noise * rng.normal(size=seen.shape)
            own = rng.normal(size=(points // 2, 32))
            descriptors = np.concatenate([seen, own]).astype(np.float32)
            table[f"{scene}-{view}"] = Features(
                keypoints=np.zeros((len(descriptors), 2), np.float32), descriptors=descriptors, size=(9, 9)
            )
    return table


def recall(pairs, names):
    found = {frozenset(pair) for pair in pairs}
    truth = {frozenset((a, b)) for a in names for b in names if a < b and a.split("-")[0] == b.split("-")[0]}
    return len(found & truth) / len(truth)


def test_views_of_a_scene_find_each_other(rng):
    table = made_up(rng, scenes=40, views=4)
    pairs = list(similar_pairs(list(table), table.__getitem__, 3))
    assert recall(pairs, list(table)) > 0.95
    assert len(set(map(frozenset, pairs))) == len(pairs) <= 160 * 3
    order = {name: index for index, name in enumerate(table)}
    assert all(order[a] < order[b] for a, b in pairs)
    assert pairs == list(similar_pairs(list(table), table.__getitem__, 3))


def test_global_descriptors_have_unit_length_and_ignore_the_order_of_points(rng):
    local = rng.normal(size=(300, 16)).astype(np.float32)
    vocabulary = learn_vocabulary(local, words=16, length=128)
    one = vocabulary.describe(local[:100])
    assert one.shape == (128,) and np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(one, vocabulary.describe(local[:100][::-1]), atol=1e-5)
    assert (vocabulary.describe(np.zeros((0, 16))) == 0).all()
    assert learn_vocabulary(local[:50], words=32).length == 3 * 16  # fewer words than asked, nothing folded
    with pytest.raises(UsageError, match="size 16"):
        vocabulary.describe(local[:, :8])
    with pytest.raises(UsageError, match="learned from"):
        learn_vocabulary(np.zeros((0, 16)))


@pytest.mark.parametrize("rows", [4096, 7])
def test_neighbours_against_a_sorted_table(rng, rows):
    table = rng.normal(size=(30, 8)).astype(np.float32)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    table[11] = 0
    similarity = table @ table.T
    np.fill_diagonal(similarity, -np.inf)
    similarity[:, 11] = -np.inf
    expected = {
        (min(i, j), max(i, j)) for i in range(30) if i != 11 for j in np.argsort(-similarity[i])[:4].tolist()
    }
    found = neighbour_pairs(table, 4, block=rows)
    assert set(map(tuple, found.tolist())) == expected and len(found) == len(expected)
    assert not (found == 11).any()


def test_turned_images_are_found_by_descriptors_that_turn(rng):
    upright = made_up(rng, scenes=12, views=2)
    table = {}
    for number, (name, features) in enumerate(upright.items()):
        turn = torch.tensor([number % 4 if number % 2 else 0])
        descriptors = steered(features.descriptors[None], turn)[0]
        table[name] = replace(features, descriptors=descriptors, kind=STEERABLE)
    assert recall(similar_pairs(list(table), table.__getitem__, 1), list(table)) > 0.95
    rigid = {name: replace(features, kind="any") for name, features in table.items()}
    assert recall(similar_pairs(list(rigid), rigid.__getitem__, 1), list(rigid)) < 0.5
