"""Attention logits grow with the logarithm of the number of keys, however the tokens lie."""

import math
from dataclasses import replace

import pytest
import torch
from random_matcher import CONFIG

from matcher.config import ContextConfig
from matcher.errors import UsageError
from matcher.match.blocks import Layout, scaled_queries, scaled_queries_to
from matcher.match.network import MatchingNetwork

ABOVE = 10


def expected_gain(keys: int) -> float:
    return math.log(keys) / math.log(ABOVE) if keys > ABOVE else 1.0


def queries(count: int) -> torch.Tensor:
    return torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("counts", [((30, 30),), ((8, 8),), ((33, 70), (0, 5), (12, 1)), ((0, 0),)])
def test_the_gain_is_that_of_the_keys_of_each_query(counts, cross) -> None:
    q = queries(sum(map(sum, counts)))
    found = scaled_queries(q, Layout(counts), ABOVE, cross=cross)
    rows = iter(q)
    wanted = []
    for pair in counts:
        for side in (0, 1):
            gain = expected_gain(pair[1 - side] if cross else pair[side])
            wanted += [next(rows) * gain for _ in range(pair[side])]
    torch.testing.assert_close(found, torch.stack(wanted) if wanted else q)


@pytest.mark.parametrize("cross", [False, True])
def test_keys_that_are_masked_out_do_not_count(cross) -> None:
    live = torch.arange(30) < torch.tensor([[25], [12], [30], [4]])
    q = queries(4 * 30)
    found = scaled_queries(q, Layout(((30, 30), (30, 30)), live), ABOVE, cross=cross)
    keys = [12, 25, 4, 30] if cross else [25, 12, 30, 4]
    for image, rows in enumerate(found.split(30)):
        torch.testing.assert_close(rows, q[30 * image : 30 * image + 30] * expected_gain(keys[image]))


def test_one_side_is_scaled_by_the_keys_of_the_other() -> None:
    q = queries(9)
    found = scaled_queries_to(q, [(4, 100), (5, 3)], ABOVE)
    torch.testing.assert_close(found, torch.cat([q[:4] * 2.0, q[4:]]))


def test_without_it_queries_stay_as_they_are() -> None:
    q = queries(60)
    assert scaled_queries(q, Layout(((30, 30),)), None, cross=False) is q


def test_many_keypoints_see_another_softmax_and_few_the_same() -> None:
    plain = MatchingNetwork(replace(CONFIG, context=ContextConfig(dim=48, depth=1))).eval()
    scaled = MatchingNetwork(
        replace(CONFIG, context=ContextConfig(dim=48, depth=1, scale_logits_above=ABOVE))
    ).eval()
    for layer in plain.layers:  # an untrained block adds nothing
        for block in (layer.self_block, layer.cross_block):
            torch.nn.init.normal_(block.ffn.narrow.weight, std=0.1)
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(24, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for counts, same in ((((9, 10),), True), (((12, 12),), False)):
            tokens = x[: sum(counts[0])]
            states = [model.layers[0](tokens, None, Layout(counts)) for model in (plain, scaled)]
            assert torch.equal(*states) == same


@pytest.mark.parametrize(("wrong", "rule"), [({"attention": "linear"}, "softmax"), ({}, "at least 2")])
def test_settings_that_mean_nothing_are_refused(wrong, rule) -> None:
    context = ContextConfig(dim=48, scale_logits_above=1, **wrong)
    with pytest.raises(UsageError, match=rule):
        MatchingNetwork(replace(CONFIG, context=context))
