"""Explaining a pair: the same matches, weights that are the network's own, fates that add up."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_matcher import CONFIG, matcher_with, pair

from matcher.config import ContextConfig
from matcher.explain.explain import explain
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.types import MATCHED, UNMATCHED, Features


def other_matcher(**changes) -> AttentionMatcher:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return AttentionMatcher(MatchingNetwork(replace(CONFIG, **changes)), precision="float32")


GUIDED = {"guided": True, "assignment": replace(CONFIG.assignment, consensus=2)}
LINEAR = {
    "context": ContextConfig(
        dim=48, heads=2, depth=3, attention="linear", sequential_cross=True, shared_qk=False
    )
}
ADDITIVE = {"context": ContextConfig(dim=48, heads=2, depth=2, attention="additive")}


@pytest.mark.parametrize(
    ("changes", "counts"), [(None, (60, 50)), (GUIDED, (60, 50)), (LINEAR, (0, 9)), (ADDITIVE, (1, 1))]
)
def test_the_matches_are_those_of_the_normal_path(changes, counts):
    matcher = matcher_with() if changes is None else other_matcher(**changes)
    sides = pair(*counts, 1)
    batch = [Features.stack([f]) for f in sides]
    before = matcher(*batch)[0]
    record = explain(matcher, *sides, range(min(3, counts[0])), range(min(2, counts[1])))
    after = matcher(*batch)[0]
    for matches in (before, after):
        assert np.array_equal(record.matches, matches.indices)
        assert np.array_equal(record.scores, matches.scores)
    assert len(record.layers) == before.layers_run
    for fate, kept in zip(record.fates, (before.kept0, before.kept1), strict=True):
        assert (fate <= 0).sum() == kept and (fate == MATCHED).sum() == len(before)
        assert set(fate[fate > 0]) <= set(range(1, before.layers_run + 1)) and not (fate < UNMATCHED).any()
    for flow in record.rollout:
        np.testing.assert_allclose(flow.sum(1), 1, atol=1e-3)


def test_pruning_and_exit_are_reported_with_their_reasons():
    record = explain(matcher_with(), *pair(80, 70, 2))
    pruned = [report for report in record.layers if any(map(len, report.pruned))]
    assert pruned
    for report in pruned:
        for reasons in report.reasons:
            assert (reasons[:, 0] <= CONFIG.policy.prune_matchability).all()
    assert not any(report.exited for report in record.layers[:-1])
    assert record.layers[-1].exited == (len(record.layers) < CONFIG.context.depth)


@pytest.mark.parametrize("changes", [GUIDED, LINEAR])
def test_recorded_attention_makes_the_message_that_the_network_passes_on(changes):
    matcher, sides = other_matcher(**changes), pair(30, 20, 3)
    layer = matcher.model.layers[0]
    record = explain(matcher, *sides, [4], [7], strongest=30)
    model, seen, attention = matcher.model, [], layer.self_block.attention
    hook = layer.self_block.ffn.register_forward_hook(lambda _, given, __: seen.append(given[1][0]))
    with torch.inference_mode():
        tokens = model.tokens(*(Features.stack([f]) for f in sides))
        layer.self_block(tokens.x, (tokens.n, tokens.x.shape[1] - tokens.n), tokens.rotations, None)
        values = attention.project(tokens.x)[0, :, -1]
    hook.remove()
    (message,) = seen
    for side, (asked, start) in enumerate(((4, 0), (7, 30))):
        attention = record.layers[0].self_attention[side]
        points, weights = attention.points[0], attention.weights[0]
        for head in range(2):
            alive = points[head] >= 0
            chosen = torch.from_numpy(weights[head][alive]) @ values[points[head][alive] + start, head]
            torch.testing.assert_close(
                chosen, message[asked + start, head * 24 : head * 24 + 24], atol=1e-4, rtol=1e-3
            )
            p = weights[head][weights[head] > 0]
            assert attention.entropy[0, head] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-3)


@pytest.mark.parametrize("changes", [GUIDED, LINEAR])
def test_rollout_is_the_product_of_the_mean_weights(changes):
    matcher, sides = other_matcher(**changes), pair(12, 9, 3)
    record = explain(matcher, *sides, range(12), range(9), strongest=12, traced=([4], []))
    known = np.eye(21)
    for layer in record.layers:
        for attended, shift in ((layer.self_attention, (0, 12)), (layer.cross_attention, (12, 0))):
            step = np.eye(21) / 2
            for side, attention in enumerate(attended):
                for row in range(len(attention.points)):
                    for points, weights in zip(attention.points[row], attention.weights[row], strict=True):
                        heard = points >= 0
                        share = weights[heard] / 2 / len(attention.points[row])
                        np.add.at(step[row + 12 * side], points[heard] + shift[side], share)
            known = step @ known
    assert not any(len(points) for layer in record.layers for points in layer.pruned)
    assert record.traced[0].tolist() == [4] and len(record.traced[1]) == len(record.rollout[1]) == 0
    np.testing.assert_allclose(record.rollout[0][0], known[4], atol=1e-4)


def test_points_without_a_match_name_their_candidates_and_what_beat_them():
    """Of the last layer that a point lived through; that of the matched ones is their match."""
    matcher, sides = other_matcher(**GUIDED), pair(60, 50, 1)
    record = explain(matcher, *sides)
    for side, found in enumerate(record.candidates):
        live = found.points[:, 0] >= 0
        assert (np.diff(found.probabilities[live]) <= 0).all() and found.probabilities.max() <= 1 + 1e-5
        assert (found.rival_probabilities >= found.probabilities - 1e-6).all()
        assert ((found.unmatched >= 0) & (found.unmatched <= 1 + 1e-5)).all()
        for match, score in zip(record.matches.tolist(), record.scores.tolist(), strict=True):
            point, other = match[side], match[1 - side]
            assert found.points[point, 0] == other and found.rivals[point, 0] == point
            assert found.probabilities[point, 0] == pytest.approx(score, abs=1e-5)
        for point in np.flatnonzero(record.fates[side] == UNMATCHED):
            beaten = found.rivals[point, 0] != point
            assert beaten or found.probabilities[point, 0] <= CONFIG.policy.match_threshold + 1e-6
    pruned = explain(matcher_with(), *pair(80, 70, 2))
    for side, fates in enumerate(pruned.fates):
        for point in np.flatnonzero(fates > 0):
            assert fates[point] <= len(pruned.layers)
            assert pruned.candidates[side].points[point, 0] >= 0
