"""The fit of `matcher.match.calibration` on sets whose matches can be judged one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from matcher.config import CalibrationConfig, NetworkConfig
from matcher.errors import UsageError
from matcher.lab.evaluate.calibration import CORRECT, as_inputs, calibration_error, match_errors
from matcher.lab.evaluate.verdicts import logistic_regression
from matcher.lab.pairs.protocols import PairSet
from matcher.loading import load
from matcher.match.calibration import calibrated, evidence
from matcher.match.network.inference import AttentionMatcher
from matcher.pipeline import Pipeline

_FEW = 50  # judged matches; a pair with fewer weighs less


@dataclass(frozen=True, eq=False)
class JudgedPair:
    """What a network says about the matches of a pair that can be judged, and what is true."""

    scores: np.ndarray  # (K,) of all matches, not calibrated
    counts: tuple[int, int]  # keypoints
    known: np.ndarray  # (K,) bool: the ground truth can tell
    right: np.ndarray  # (K,) bool

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Evidence (J, 2), right (J,) and weights (J,) of the J judged matches; a pair weighs 1 at most."""
        judged = int(self.known.sum())
        weight = min(1.0, judged / _FEW) / max(1, judged)
        values = evidence(self.scores, self.counts)[self.known]
        return values, self.right[self.known], np.full(judged, weight)


def uncalibrated(preset: str) -> Pipeline:
    """A preset in one pass, whose scores are what its network gives.

    Raises:
        UsageError: a preset without a network.
    """
    pipeline = load(preset, second_pass=False)
    config = pipeline.config.matcher
    if not isinstance(config, NetworkConfig) or not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"the preset {preset!r} has no network whose probabilities could be calibrated")
    policy = replace(config.policy, calibration=None)
    return replace(pipeline, matcher=pipeline.matcher.adjusted(policy=policy))


def judge(pipeline: Pipeline, pair_set: PairSet) -> list[JudgedPair]:
    """The matches of every pair of a set that has any."""
    found = []
    for index in range(len(pair_set)):
        pair = pair_set.pairs[index]
        result = pipeline.match(*as_inputs(pair))
        sides = (result.features0, result.features1)
        errors = match_errors(pair, result.matches, *(float(f.scale.prod().sqrt()) for f in sides))
        if len(errors):
            known = ~np.isnan(errors)
            counts = tuple(map(len, sides))
            found.append(JudgedPair(result.scores, counts, known, known & (errors < CORRECT)))
    return found


def fit_calibration(sets: Sequence[tuple[Sequence[JudgedPair], float]]) -> CalibrationConfig:
    """The calibration under which the matches of all sets are most likely, each set with its weight."""
    values, right, weights = [], [], []
    for pairs, share in sets:
        columns = [np.concatenate(column) for column in zip(*(pair.rows() for pair in pairs), strict=True)]
        values.append(columns[0])
        right.append(columns[1])
        weights.append(share * columns[2] / columns[2].sum())
    weight = np.concatenate(weights)
    found = logistic_regression(np.concatenate(values), np.concatenate(right), weight / weight.mean())
    return CalibrationConfig(*(round(float(value), 2) for value in found))


def errors_of(pairs: Sequence[JudgedPair], config: CalibrationConfig | None) -> float:
    """Expected calibration error of a set under a calibration."""
    scores = [calibrated(pair.scores, pair.counts, config)[pair.known] for pair in pairs]
    return calibration_error(np.concatenate(scores), np.concatenate([p.right[p.known] for p in pairs]))
