"""Validation of matchers in training: the threshold with the highest F1 counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from matcher.match.network import MatchingNetwork
from matcher.match.sinkhorn import credible_matches
from matcher.train import matcher_training as validation
from matcher.train.matcher_training import validate
from matcher.train.recipe import PairRecipe
from tests.training_data import TINY


def network(doubles_at=0.0):
    policy = replace(TINY.network.policy, threshold_doubles_at=doubles_at)
    return MatchingNetwork(TINY.network).with_policy(policy)


def judged(probabilities, correct, possible):
    correct = np.array(correct)
    known = np.ones(len(correct), bool)
    return validation._Judged(np.array(probabilities), known, correct, correct, possible)


def test_the_threshold_with_the_highest_f1_counts(monkeypatch):
    # Above .5: 2 of 2 right, of 3 possible. Above .1: 3 of 5. Nothing is above .8.
    pair = judged([0.8, 0.75, 0.3, 0.2, 0.15], [True, True, False, True, False], 3)
    monkeypatch.setattr(validation, "_judge", lambda *arguments: pair)
    scores = validate(network(), [(None, None)], PairRecipe())
    assert scores["threshold"] == 0.3  # the lowest of those with the same matches
    assert scores["precision"] == 1 and scores["recall"] == pytest.approx(2 / 3)
    assert scores["f1"] == pytest.approx(0.8) and scores["matches"] == 2


def test_what_is_kept_is_what_the_matcher_would_keep():
    probabilities = torch.tensor([0.8, 0.75, 0.3, 0.2, 0.15])
    pair = judged(probabilities.numpy(), [True] * 5, 5)
    best = probabilities.log().numpy(), np.arange(5), np.ones(5, bool)
    for threshold in (0.1, 0.16, 0.4, 0.9):
        for doubles_at in (0.0, 0.5, 3.0):
            kept, _ = credible_matches(*best, threshold, doubles_at)
            assert pair.above(threshold, doubles_at).sum() == len(kept)


def test_pairs_without_matches_have_no_precision_and_unrelated_ones_no_recall(monkeypatch):
    found = iter([judged([0.9], [True], 2), judged([], np.zeros(0, bool), 1), judged([0.9], [False], 0)])
    monkeypatch.setattr(validation, "_judge", lambda *arguments: next(found))
    scores = validate(network(), [(None, None)] * 3, PairRecipe())
    assert scores["precision"] == 0.5 and scores["recall"] == 0.25


def test_nothing_found_scores_nothing(monkeypatch):
    monkeypatch.setattr(validation, "_judge", lambda *arguments: judged([], np.zeros(0, bool), 4))
    scores = validate(network(), [(None, None)], PairRecipe())
    assert scores["precision"] == scores["recall"] == scores["f1"] == scores["matches"] == 0
