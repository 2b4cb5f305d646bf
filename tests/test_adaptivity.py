"""Exit and pruning by heads that foresee who will be matched."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_matcher import WITH_MATCH_PROBABILITY, matcher_with, pair

from matcher.config import AssignmentConfig, MatchingPolicy
from matcher.match import consensus as assigning
from matcher.match.adaptivity import keep_unless_few, ready_by_match_probability
from matcher.match.blocks import Layout
from matcher.match.consensus import Consensus
from matcher.match.context import Tokens
from matcher.types import Features, Matches

COUNTS = [(40, 30), (25, 60), (1, 12), (0, 9), (0, 0), (1, 1), (33, 33), (50, 50), (20, 64)]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Features, Features]]:
    return [pair(*counts, seed=seed) for seed, counts in enumerate(COUNTS)]


def run(pairs: list[tuple[Features, Features]], early_exit: bool = True, pruning: bool = True):
    matcher = matcher_with(early_exit, pruning, config=WITH_MATCH_PROBABILITY)
    return matcher(*(Features.stack(side) for side in zip(*pairs, strict=True)))


def tokens(*counts: tuple[int, int]) -> Tokens:
    total = sum(n + m for n, m in counts)
    nothing = torch.zeros(total, 2)
    return Tokens(nothing, None, torch.arange(total), Layout(counts), tuple(range(len(counts))), nothing)


def ready(
    probabilities: list[float], confident: list[bool], share: float, *counts: tuple[int, int]
) -> list[int]:
    found = torch.tensor(probabilities), torch.tensor(confident, dtype=torch.bool)
    return ready_by_match_probability(tokens(*counts), found[1], found[0], MatchingPolicy(exit_share=share))


def test_a_pair_stops_when_enough_of_its_expected_matches_are_sure():
    probabilities = [1.0] * 20
    assert ready(probabilities, [True] * 15 + [False] * 5, 0.7, (10, 10)) == [0]
    assert ready(probabilities, [True] * 15 + [False] * 5, 0.8, (10, 10)) == []


def test_points_without_prospects_do_not_count():
    assert ready([1.0] * 4 + [0.0] * 96, [False] * 4 + [True] * 96, 0.9, (50, 50)) == []
    assert ready([1.0] * 4 + [0.0] * 96, [True] * 4 + [False] * 96, 0.9, (50, 50)) == [0]


def test_a_pair_that_expects_nothing_stops():
    assert ready([0.001] * 20, [False] * 20, 0.99, (10, 10)) == [0]
    assert ready([], [], 0.99, (0, 0)) == [0]


def test_every_pair_is_asked_for_itself():
    probabilities, confident = [1.0] * 8, [True, True, False, False, True, True, True, True]
    assert ready(probabilities, confident, 0.9, (2, 2), (1, 3)) == [1]


def test_exit_and_pruning_really_happen(pairs):
    depth = WITH_MATCH_PROBABILITY.context.depth
    exits = [m.layers_run for m in run(pairs, pruning=False)]
    assert len(set(exits)) >= 3
    assert max(exits) == depth
    pruned = run(pairs, early_exit=False)
    shares = [(m.kept0 + m.kept1) / (a + b) for m, (a, b) in zip(pruned, COUNTS, strict=True) if a + b > 20]
    assert min(shares) < 0.8
    assert {m.layers_run for m in pruned} == {depth}


def as_table(matches: Matches) -> dict[tuple[int, int], float]:
    return dict(zip(map(tuple, matches.indices.tolist()), matches.scores.tolist(), strict=True))


def test_a_batch_gives_what_single_pairs_give(pairs):
    for whole, single in zip(run(pairs), pairs, strict=True):
        alone = run([single])[0]
        assert as_table(whole) == pytest.approx(as_table(alone), abs=1e-5, rel=0)
        for name in ("layers_run", "kept0", "kept1"):
            assert getattr(whole, name) == getattr(alone, name)


def test_swapping_the_images_transposes_the_matches(pairs):
    for first, second in zip(run(pairs), run([(b, a) for a, b in pairs]), strict=True):
        mirrored = replace(second, indices=np.ascontiguousarray(second.indices[:, ::-1]))
        assert as_table(mirrored) == pytest.approx(as_table(first), abs=1e-4, rel=0)
        assert (second.kept1, second.kept0, second.layers_run) == (first.kept0, first.kept1, first.layers_run)


def test_few_points_are_not_worth_pruning() -> None:
    layout = Layout(((30, 10), (10, 10), (0, 0)))
    keep = torch.ones(60, dtype=torch.bool)
    keep[31] = False  # one of forty
    keep[[40, 45, 52]] = False  # three of twenty
    found = keep_unless_few(keep, layout, 0.05)
    assert found[:40].all()
    assert found[40:].equal(keep[40:])


@pytest.mark.parametrize(
    ("early_exit", "settled", "rounds"), [(True, 0.0, 1), (True, 1.0, 3), (False, 0.0, 3)]
)
def test_rounds_of_consensus_end_once_they_change_little(
    pairs, monkeypatch, early_exit: bool, settled: float, rounds: int
) -> None:
    asked: list[int] = []
    whole = Consensus.forward

    def counted(self: Consensus, scores: torch.Tensor, *rest: object) -> torch.Tensor:
        asked.append(scores.shape[1])
        return whole(self, scores, *rest)

    monkeypatch.setattr(Consensus, "forward", counted)
    monkeypatch.setattr(assigning, "SETTLED", settled)
    config = replace(WITH_MATCH_PROBABILITY, assignment=AssignmentConfig(consensus=3))
    matcher = matcher_with(early_exit, False, config=config)
    matcher(*(Features.stack([side]) for side in pairs[0]))
    assert len(asked) == rounds
