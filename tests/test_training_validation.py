"""Validation of matchers in training: the threshold with the highest F1 counts."""

import numpy as np
import pytest

from matcher.lab.train import validation
from matcher.lab.train.recipe import PairRecipe
from matcher.lab.train.validation import validate
from matcher.match.network.model import MatchingNetwork
from tests.training_data import TINY


def judged(probabilities, correct, possible):
    correct = np.array(correct)
    known = np.ones(len(correct), bool)
    return validation._Judged(np.array(probabilities), known, correct, correct, possible)


def test_the_threshold_with_the_highest_f1_counts(monkeypatch):
    # Above .5: 2 of 2 right, of 3 possible. Above .1: 3 of 5. Nothing is above .8.
    pair = judged([0.8, 0.75, 0.3, 0.2, 0.15], [True, True, False, True, False], 3)
    monkeypatch.setattr(validation, "_judge", lambda *arguments: pair)
    scores = validate(MatchingNetwork(TINY.network), [(None, None)], PairRecipe())
    assert scores["threshold"] == 0.3  # the lowest of those with the same matches
    assert scores["precision"] == 1 and scores["recall"] == pytest.approx(2 / 3)
    assert scores["f1"] == pytest.approx(0.8) and scores["matches"] == 2


def test_pairs_without_matches_have_no_precision_and_unrelated_ones_no_recall(monkeypatch):
    found = iter([judged([0.9], [True], 2), judged([], np.zeros(0, bool), 1), judged([0.9], [False], 0)])
    monkeypatch.setattr(validation, "_judge", lambda *arguments: next(found))
    scores = validate(MatchingNetwork(TINY.network), [(None, None)] * 3, PairRecipe())
    assert scores["precision"] == 0.5 and scores["recall"] == 0.25


def test_nothing_found_scores_nothing(monkeypatch):
    monkeypatch.setattr(validation, "_judge", lambda *arguments: judged([], np.zeros(0, bool), 4))
    scores = validate(MatchingNetwork(TINY.network), [(None, None)], PairRecipe())
    assert scores["precision"] == scores["recall"] == scores["f1"] == scores["matches"] == 0
