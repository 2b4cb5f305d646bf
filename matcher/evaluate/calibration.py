"""How often probabilities hold, of matches and of verdicts, and the fits that make them hold.

Guo et al., On Calibration of Modern Neural Networks, ICML 2017, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from matcher.config import NetworkConfig
from matcher.errors import ImageError, UsageError
from matcher.evaluate.measure import match_errors, scale_of
from matcher.evaluate.methods import Method
from matcher.evaluate.protocols import CorrespondencePair, Pair, PairSet
from matcher.evaluate.run import PairLoop
from matcher.loading import load
from matcher.match import calibration
from matcher.match.network import AttentionMatcher
from matcher.pipeline import Pipeline
from matcher.result import Result
from matcher.verify.verdict import NOT, SAME

BINS = 10
CORRECT = 3.0  # pixels of the resized images


@dataclass(frozen=True, eq=False)
class Reliability:
    """Predictions in bins of equal width; a bin without any is NaN."""

    confidence: np.ndarray  # (BINS,) mean probability
    accuracy: np.ndarray  # (BINS,) share that is right
    count: np.ndarray  # (BINS,) int64

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of both, weighted by the counts; NaN without any."""
        if not (total := self.count.sum()):
            return math.nan
        return float(np.nansum(np.abs(self.confidence - self.accuracy) * self.count) / total)


def reliability(probabilities: np.ndarray, right: np.ndarray) -> Reliability:
    """How often predictions (K,) in [0, 1] are right (K,), by bins of the probability."""
    index = np.minimum((np.asarray(probabilities) * BINS).astype(int), BINS - 1)
    count = np.bincount(index, minlength=BINS)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(index, weights=probabilities, minlength=BINS) / count
        accuracy = np.bincount(index, weights=np.asarray(right, dtype=np.float64), minlength=BINS) / count
    return Reliability(confidence, accuracy, count)


@dataclass(eq=False)
class Predictions:
    """What a method said on the pairs of a set, and what is true."""

    scores: list[np.ndarray] = field(default_factory=list)  # of matches that can be judged
    correct: list[np.ndarray] = field(default_factory=list)  # bool, of these matches
    verdicts: list[float] = field(default_factory=list)  # probabilities of the same place, one a pair

    def reliability(self) -> Reliability:
        """Of the match probabilities."""
        return reliability(np.concatenate([[], *self.scores]), np.concatenate([[], *self.correct]))

    def verdict_counts(self) -> dict[str, int]:
        """How many pairs are called the same place, unsure, and not."""
        said = np.array(self.verdicts)
        same, different = int((said >= SAME).sum()), int((said <= NOT).sum())
        return {"same": same, "unsure": len(said) - same - different, "not": different}


def predictions(
    pair_set: PairSet,
    methods: Sequence[Method],
    *,
    progress: Callable[[int, int], None] | None = None,
    skipped: list[str] | None = None,
) -> dict[str, Predictions]:
    """The match probabilities and verdicts of every method on a set.

    Args:
        pair_set: pairs whose matches can be judged one by one, or unrelated ones.
        methods: rows of the table.
        progress: called after every pair with the number of pairs done and their total.
        skipped: receives the reason for each pair that could not be read.

    Raises:
        UsageError: a set with poses or sparse labels only.
        ImageError: no pair could be read.
    """
    if pair_set.protocol == "pose" or _without_labels(pair_set):
        raise UsageError(
            f"{pair_set.name}: its ground truth does not tell of single matches whether they are right; "
            "calibration needs homographies, depth or dense labels"
        )
    found = {method.name: Predictions() for method in methods}
    for pair, results in PairLoop(pair_set, methods, progress, [] if skipped is None else skipped):
        for said, result in zip(found.values(), results, strict=True):
            errors = errors_of(pair, result)
            known = ~np.isnan(errors)
            said.scores.append(result.scores[known])
            said.correct.append(errors[known] < CORRECT)
            if result.verdict is not None:
                said.verdicts.append(result.verdict.probability)
    return found


def _without_labels(pair_set: PairSet) -> bool:
    for index in range(len(pair_set)):
        with suppress(ImageError):  # of the first that can be read
            first = pair_set.pairs[index]
            return isinstance(first, CorrespondencePair) and not first.dense
    return False


def errors_of(pair: Pair, result: Result) -> np.ndarray:
    """(K,) errors of the matches in pixels of the resized images, NaN where the truth is not known."""
    return match_errors(pair, result.matches, scale_of(result.features0), scale_of(result.features1))


def as_object(
    pair_set: PairSet, found: dict[str, Predictions], skipped: Sequence[str] = ()
) -> dict[str, Any]:
    """Reliability and verdicts as plain values for `json.dumps`; `skipped`: pairs that could not be read."""
    rows = []
    for name, said in found.items():
        measured = said.reliability()
        rows.append(
            {
                "name": name,
                "matches": int(measured.count.sum()),
                "expected_calibration_error": _plain(measured.error),
                "confidence": [_plain(value) for value in measured.confidence],
                "accuracy": [_plain(value) for value in measured.accuracy],
                "count": measured.count.tolist(),
                "verdicts": said.verdict_counts(),
            }
        )
    table = {"set": pair_set.name, "pairs": len(pair_set) - len(skipped), "correct_px": CORRECT, "rows": rows}
    return table | ({"skipped": list(skipped)} if skipped else {})


def as_markdown(found: dict[str, Any]) -> str:
    """Markdown of what `as_object` returned."""
    edges = [f"{i / BINS:.1f}-{(i + 1) / BINS:.1f}" for i in range(BINS)]
    lines = [
        f"## {found['set']}: calibration",
        "",
        f"{found['pairs']} pairs. For each bin of probability, the share of matches within "
        f"{found['correct_px']:g} px; the expected calibration error is the mean distance of both. "
        "Verdicts are numbers of pairs.",
        "",
        f"| | matches | expected calibration error | {' | '.join(edges)} | same | unsure | not |",
        f"|{' --- |' * (BINS + 6)}",
    ]
    for row in found["rows"]:
        shares = ["–" if value is None else f"{value:.2f}" for value in row["accuracy"]]
        error = row["expected_calibration_error"]
        cells = [row["name"], str(row["matches"]), "–" if error is None else f"{error:.3f}", *shares]
        lines.append(f"| {' | '.join([*cells, *map(str, row['verdicts'].values())])} |")
    return "\n".join(lines) + "\n"


def _plain(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


# Fits: of `matcher.match.calibration` and of `matcher.verify.verdict`.

# What a network gives, the prior scores of refined matches, and the probabilities given a geometry.
Stage = Literal["network", "refinement", "geometry"]


def logistic_regression(values: np.ndarray, right: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the regression of `right` (P,) on `values` (P, E).

    By Newton's method. Coefficients of the standardised evidence are drawn to zero a little; `weight` (P,)
    has a mean of about 1.
    """
    mean, deviation = values.mean(axis=0), values.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(values)), (values - mean) / deviation])
    ridge = np.diag([0.0, *np.full(values.shape[1], 1e-3 * len(values))])  # for classes told apart perfectly
    found = np.zeros(design.shape[1])
    for _ in range(50):
        probability = 1 / (1 + np.exp(-np.clip(design @ found, -30, 30)))
        gradient = design.T @ (weight * (probability - right)) + ridge @ found
        curvature = design.T @ (design * (weight * probability * (1 - probability))[:, None]) + ridge
        found -= np.linalg.solve(curvature + 1e-9 * np.eye(len(found)), gradient)
    coefficients = found[1:] / deviation
    return np.array([found[0] - coefficients @ mean, *coefficients])


@dataclass(frozen=True, eq=False)
class JudgedPair:
    """What is known of the matches of a pair before calibration, and which of them are right."""

    scores: np.ndarray  # (K,) of all matches, before this calibration
    evidence: np.ndarray  # (K, E) what the calibration goes by
    known: np.ndarray  # (K,) bool: the ground truth can tell
    right: np.ndarray  # (K,) bool


def uncalibrated(preset: str, stage: Stage = "network") -> Pipeline:
    """A preset without the calibration of a stage and of those after it.

    At the first stage it is one pass, whose scores are what the network gives; else the whole preset.
    Geometry needs the numbers of refinement before it.

    Raises:
        UsageError: a preset without a network, or without the calibration that a later stage adds to.
    """
    pipeline = load(preset, further_passes=False) if stage == "network" else load(preset)
    config = pipeline.config.matcher
    if not isinstance(config, NetworkConfig) or not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"the preset {preset!r} has no network whose probabilities could be calibrated")
    kept = config.policy.calibration
    if stage == "network":
        kept = None
    elif kept is None:
        raise UsageError(f"the scores of {preset!r} are not calibrated before {stage}: calibrate these first")
    else:
        kept = replace(kept, refined=kept.refined if stage == "geometry" else None, verified=None)
    policy = replace(config.policy, calibration=kept)
    return replace(pipeline, matcher=pipeline.matcher.adjusted(policy=policy))


def judge(pipeline: Pipeline, pair_set: PairSet, stage: Stage = "network") -> list[JudgedPair]:
    """The matches of every pair of a set that has any; `pipeline` is that of `uncalibrated` at this stage.

    For geometry without the pairs whose geometry says nothing about single matches.
    """
    found = []
    for pair, (result,) in PairLoop(pair_set, [Method(pipeline.preset, pipeline)]):
        matches, errors = result.matches, errors_of(pair, result)
        if not len(errors) or (stage == "geometry" and not calibration.judges_matches(result.geometry)):
            continue
        if stage == "refinement":
            scale = result.features1.scale.tolist()
            evidence = calibration.refinement_evidence(matches, scale, len(result.passes) > 1)
        elif stage == "geometry":
            evidence = calibration.geometry_evidence(matches, result.geometry)
        else:
            counts = len(result.features0), len(result.features1)
            evidence = calibration.evidence(result.scores, counts)
        known = ~np.isnan(errors)
        found.append(JudgedPair(result.scores, evidence, known, known & (errors < CORRECT)))
    return found


def fit_calibration(sets: Sequence[tuple[Sequence[JudgedPair], float]]) -> np.ndarray:
    """The calibration under which the matches of all sets are most likely, each set with its weight.

    Returns:
        (1 + E,) the offset and the coefficients of the pairs' evidence, in two decimals: the numbers of the
        configuration of a stage, as `CalibrationConfig`.
    """
    values, right, weights = [], [], []
    for pairs, share in sets:
        weight = []
        for pair in pairs:
            judged = int(pair.known.sum())
            whole = min(1.0, judged / 50)  # a pair weighs 1 at most, one of few judged matches less
            weight.append(np.full(judged, whole / max(1, judged)))
            values.append(pair.evidence[pair.known])
            right.append(pair.right[pair.known])
        weights.append(share * np.concatenate(weight) / np.concatenate(weight).sum())
    weight = np.concatenate(weights)
    found = logistic_regression(np.concatenate(values), np.concatenate(right), weight / weight.mean())
    return np.round(np.asarray(found, dtype=np.float64), 2)


def error_under(pairs: Sequence[JudgedPair], numbers: np.ndarray | None) -> float:
    """Expected calibration error of a set under a calibration of `fit_calibration`, or without one."""
    said = [
        pair.scores
        if numbers is None
        else calibration.probabilities(numbers[0] + pair.evidence @ numbers[1:])
        for pair in pairs
    ]
    known = [each[pair.known] for each, pair in zip(said, pairs, strict=True)]
    return reliability(np.concatenate(known), np.concatenate([p.right[p.known] for p in pairs])).error


def fit_verdict(values: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the regression of `same` (P,) on evidence (P, E).

    Both classes weigh the same.
    """
    weight = np.where(same, 0.5 / same.mean(), 0.5 / (1 - same.mean()))
    return logistic_regression(values, same, weight)
