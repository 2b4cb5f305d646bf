"""Two settings of one preset on the same pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from matcher.benchmark.report import Comparison, SettingResult, compare
from matcher.benchmark.timing import Stopwatch
from matcher.evaluate.synthetic import synthetic_set
from matcher.loading import load

WATCH = Stopwatch(torch.device("cpu"))


def test_a_pipeline_is_identical_to_itself(views, shipped_weights) -> None:
    pairs = synthetic_set(list(views), count=2, levels=(1,)).pairs
    off = {"early_exit": False, "pruning": False, "max_keypoints": 128, "geometry": "homography"}
    first, second = (load(precision="float32", **off) for _ in range(2))
    seen = []
    found = compare(first, second, pairs, WATCH, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert found.identical == 1.0 and found.either > 40
    assert found.first.errors == found.second.errors
    assert found.first.layers == [first.layers] * 2 and found.first.kept == [1.0] * 2
    for setting in (found.first, found.second):
        assert all(0 < part < whole for part, whole in zip(setting.context, setting.match, strict=True))
    assert "100.00% of" in found.lines()[-1]


def test_other_matches_are_seen(views, shipped_weights) -> None:
    pairs = synthetic_set(list(views), count=1, levels=(1,)).pairs
    strict, free = (load(max_keypoints=128, geometry="homography", match_threshold=t) for t in (0.9, 0.05))
    found = compare(strict, free, pairs, WATCH)
    assert found.identical < 1.0


def test_accuracy_and_ratios() -> None:
    first = SettingResult(None, errors=[1.0, np.inf], context=[1.0], match=[2.0], layers=[3], kept=[0.5])
    second = replace(first, context=[3.0], match=[8.0])
    assert first.accuracy()[1] == pytest.approx(0.45)
    text = Comparison(first, second, same=49, either=50).lines()[-1]
    assert "98.00% of 50" in text and "3.00× as fast in the attention layers, 4.00×" in text
