"""The fit of `matcher.match.calibration` on sets whose matches can be judged one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from matcher.config import NetworkConfig
from matcher.errors import UsageError
from matcher.lab.evaluate.calibration import CORRECT, as_inputs, calibration_error, match_errors
from matcher.lab.evaluate.verdicts import logistic_regression
from matcher.lab.pairs.protocols import PairSet
from matcher.loading import load
from matcher.match.calibration import (
    evidence,
    geometry_evidence,
    judges_matches,
    probabilities,
    refinement_evidence,
)
from matcher.match.network.inference import AttentionMatcher
from matcher.pipeline import Pipeline
from matcher.result import Result

# What a network gives, the prior scores of refined matches, and the probabilities given a geometry.
Stage = Literal["network", "refinement", "geometry"]
_FEW = 50  # judged matches; a pair with fewer weighs less


@dataclass(frozen=True, eq=False)
class JudgedPair:
    """What is known of the matches of a pair before calibration, and which of them are right."""

    scores: np.ndarray  # (K,) of all matches, before this calibration
    evidence: np.ndarray  # (K, E) what the calibration goes by
    known: np.ndarray  # (K,) bool: the ground truth can tell
    right: np.ndarray  # (K,) bool

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Evidence (J, E), right (J,) and weights (J,) of the J judged matches; a pair weighs 1 at most."""
        judged = int(self.known.sum())
        weight = min(1.0, judged / _FEW) / max(1, judged)
        return self.evidence[self.known], self.right[self.known], np.full(judged, weight)


def uncalibrated(preset: str, stage: Stage = "network") -> Pipeline:
    """A preset without the calibration of a stage and of those after it.

    At the first stage it is one pass, whose scores are what the network gives; else the whole preset.
    Geometry needs the numbers of refinement before it.

    Raises:
        UsageError: a preset without a network, or without the calibration that a later stage adds to.
    """
    pipeline = load(preset, second_pass=False) if stage == "network" else load(preset)
    config = pipeline.config.matcher
    if not isinstance(config, NetworkConfig) or not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"the preset {preset!r} has no network whose probabilities could be calibrated")
    calibration = config.policy.calibration
    if stage != "network" and calibration is None:
        raise UsageError(f"the scores of {preset!r} are not calibrated before {stage}: calibrate these first")
    kept = None
    if stage != "network":
        refined = calibration.refined if stage == "geometry" else None
        kept = replace(calibration, refined=refined, verified=None)
    policy = replace(config.policy, calibration=kept)
    return replace(pipeline, matcher=pipeline.matcher.adjusted(policy=policy))


def judge(pipeline: Pipeline, pair_set: PairSet, stage: Stage = "network") -> list[JudgedPair]:
    """The matches of every pair of a set that has any; `pipeline` is that of `uncalibrated` at this stage.

    For geometry without the pairs whose geometry says nothing about single matches.
    """
    found = []
    for index in range(len(pair_set)):
        pair = pair_set.pairs[index]
        result = pipeline.match(*as_inputs(pair))
        sides = (result.features0, result.features1)
        errors = match_errors(pair, result.matches, *(float(f.scale.prod().sqrt()) for f in sides))
        if not len(errors) or (stage == "geometry" and not judges_matches(result.geometry)):
            continue
        known = ~np.isnan(errors)
        right = known & (errors < CORRECT)
        found.append(JudgedPair(result.scores, _evidence(result, stage), known, right))
    return found


def _evidence(result: Result, stage: Stage) -> np.ndarray:
    """(K, E) what the calibration of a stage goes by."""
    if stage == "refinement":
        scale, several = result.features1.scale.tolist(), len(result.passes) > 1
        return refinement_evidence(result.matches, scale, several)
    if stage == "geometry":
        return geometry_evidence(result.matches, result.geometry)
    return evidence(result.scores, (len(result.features0), len(result.features1)))


def fit_calibration(sets: Sequence[tuple[Sequence[JudgedPair], float]]) -> np.ndarray:
    """The calibration under which the matches of all sets are most likely, each set with its weight.

    Returns:
        (1 + E,) the offset and the coefficients of the pairs' evidence, in two decimals: the numbers of the
        configuration of a stage, as `CalibrationConfig`.
    """
    values, right, weights = [], [], []
    for pairs, share in sets:
        columns = [np.concatenate(column) for column in zip(*(pair.rows() for pair in pairs), strict=True)]
        values.append(columns[0])
        right.append(columns[1])
        weights.append(share * columns[2] / columns[2].sum())
    weight = np.concatenate(weights)
    found = logistic_regression(np.concatenate(values), np.concatenate(right), weight / weight.mean())
    return np.round(np.asarray(found, dtype=np.float64), 2)


def errors_of(pairs: Sequence[JudgedPair], numbers: np.ndarray | None) -> float:
    """Expected calibration error of a set under a calibration of `fit_calibration`, or without one."""

    def scores(pair: JudgedPair) -> np.ndarray:
        return pair.scores if numbers is None else probabilities(numbers[0] + pair.evidence @ numbers[1:])

    found = [scores(pair)[pair.known] for pair in pairs]
    return calibration_error(np.concatenate(found), np.concatenate([p.right[p.known] for p in pairs]))
