"""Explaining a pair: the same matches, weights that are the network's own, fates that add up."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_matcher import CONFIG, matcher_with, pair

from matcher.config import ContextConfig
from matcher.explain.explain import MATCHED, explain, nearest_keypoint
from matcher.network.inference import AttentionMatcher
from matcher.network.model import Model
from matcher.types import Features, UsageError


def other_matcher(**changes) -> AttentionMatcher:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return AttentionMatcher(Model(replace(CONFIG, **changes)), precision="float32")


GUIDED = {"guided": True, "assignment": replace(CONFIG.assignment, consensus=2)}
LINEAR = {
    "context": ContextConfig(dim=48, heads=2, depth=3, attention="linear", in_turn=True, shared_qk=False)
}
ADDITIVE = {"context": ContextConfig(dim=48, heads=2, depth=2, attention="additive")}


@pytest.mark.parametrize("changes", [None, GUIDED, LINEAR, ADDITIVE])
@pytest.mark.parametrize("counts", [(60, 50), (0, 9), (1, 1)])
def test_the_matches_are_those_of_the_normal_path(changes, counts):
    matcher = matcher_with() if changes is None else other_matcher(**changes)
    sides = pair(*counts, 1)
    batch = [Features.stack([f]) for f in sides]
    before = matcher(*batch)[0]
    told = explain(matcher, *sides, range(min(3, counts[0])), range(min(2, counts[1])))
    after = matcher(*batch)[0]
    for matches in (before, after):
        assert np.array_equal(told.matches, matches.indices)
        assert np.array_equal(told.scores, matches.scores)
    assert len(told.layers) == before.layers_run
    for fate, kept in zip(told.fates, (before.kept0, before.kept1), strict=True):
        assert (fate <= 0).sum() == kept and (fate == MATCHED).sum() == len(before)
        assert set(fate[fate > 0]) <= set(range(1, before.layers_run + 1)) and not (fate < MATCHED).any()
    for flow in told.rollout:
        np.testing.assert_allclose(flow.sum(1), 1, atol=1e-3)


def test_pruning_and_exit_are_told_with_their_reasons():
    told = explain(matcher_with(), *pair(80, 70, 2))
    pruned = [report for report in told.layers if any(map(len, report.pruned))]
    assert pruned
    for report in pruned:
        for reasons in report.reasons:
            assert (reasons[:, 0] <= CONFIG.adaptivity.prune_matchability).all()
    assert not any(report.exited for report in told.layers[:-1])
    assert told.layers[-1].exited == (len(told.layers) < CONFIG.context.depth)


@pytest.mark.parametrize("changes", [{}, GUIDED, LINEAR])
def test_recorded_attention_makes_the_message_that_the_network_hears(changes):
    matcher, sides = other_matcher(**changes), pair(30, 20, 3)
    layer, seen = matcher.model.layers[0], {}
    told = explain(matcher, *sides, [4], [7], strongest=30)
    model = matcher.model
    with torch.inference_mode():
        tokens = model.tokens(*(Features.stack([f]) for f in sides))
        layer.within.out.register_forward_pre_hook(lambda _, given: seen.update(message=given[0]))
        layer.within(tokens.x, tokens.turns, tokens.layout)
        values = layer.within.qkv(tokens.x).unflatten(-1, (3, 2, 24))[:, 2]
    for side, (asked, start) in enumerate(((4, 0), (7, 30))):
        attention = told.layers[0].within[side]
        points, weights = attention.points[0], attention.weights[0]
        for head in range(2):
            alive = points[head] >= 0
            chosen = torch.from_numpy(weights[head][alive]) @ values[points[head][alive] + start, head]
            torch.testing.assert_close(
                chosen, seen["message"][asked + start, head * 24 : head * 24 + 24], atol=1e-4, rtol=1e-3
            )
            p = weights[head][weights[head] > 0]
            assert attention.entropy[0, head] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-3)


def test_the_marginal_error_falls_below_the_tolerance_in_as_many_iterations():
    matcher, sides = matcher_with(early_exit=False, pruning=False), pair(60, 50, 5)
    errors = explain(matcher, *sides).layers[-1].marginal_errors
    with torch.inference_mode():
        prediction = matcher.model(*(Features.stack([f]) for f in sides)).pairs[0].assignment
    assert len(errors) == prediction.iterations
    assert (errors[-1] <= CONFIG.assignment.tolerance) == prediction.converged
    assert errors[0] > errors[-1]


def test_what_cannot_be_asked_is_named():
    first, second = pair(5, 4, 6)
    with pytest.raises(UsageError, match="image 1 has the keypoints 0 to 3"):
        explain(matcher_with(), first, second, [], [4])
    with pytest.raises(UsageError, match="outside"):
        nearest_keypoint(first, (640, 10))
    place = tuple(first.keypoints[2].tolist())
    assert nearest_keypoint(first, place) == 2
