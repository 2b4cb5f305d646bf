"""How often probabilities hold, and the fits that make them hold (Guo et al., ICML 2017, section 2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from matcher.config import NetworkConfig
from matcher.errors import ImageError, UsageError
from matcher.evaluate.measure import Record, errors_of, scales_of
from matcher.evaluate.methods import Method
from matcher.evaluate.protocols import PairSet
from matcher.evaluate.run import Evaluation, matched, plain, table
from matcher.loading import load
from matcher.match import calibration
from matcher.match.network import AttentionMatcher
from matcher.pipeline import Pipeline
from matcher.verify.verdict import NOT, SAME

BINS = 10
CORRECT = 3.0  # pixels of the resized images


class Reliability(NamedTuple):
    """Predictions in bins of equal width; a bin without any is NaN."""

    confidence: np.ndarray  # (BINS,) mean probability
    accuracy: np.ndarray  # (BINS,) share that is right
    count: np.ndarray  # (BINS,) int64
    error: float  # expected calibration error: the mean distance of both, weighted by the counts


def reliability(probabilities: np.ndarray, right: np.ndarray) -> Reliability:
    """How often predictions (K,) in [0, 1] are right (K,), by bins of the probability."""
    index = np.minimum((np.asarray(probabilities) * BINS).astype(int), BINS - 1)
    count = np.bincount(index, minlength=BINS)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(index, weights=probabilities, minlength=BINS) / count
        accuracy = np.bincount(index, weights=np.asarray(right, dtype=np.float64), minlength=BINS) / count
    total = np.nansum(np.abs(confidence - accuracy) * count)
    return Reliability(confidence, accuracy, count, float(total / len(index)) if len(index) else math.nan)


def verdict_counts(records: Sequence[Record]) -> dict[str, int]:
    """How many pairs are called the same place, unsure, and not."""
    said = np.array([record.verdict for record in records if record.verdict is not None])
    same, different = int((said >= SAME).sum()), int((said <= NOT).sum())
    return {"same": same, "unsure": len(said) - same - different, "not": different}


def check_labels(pair_set: PairSet) -> None:
    """Refuse a set whose truth does not tell of single matches whether they are right (`UsageError`)."""
    sparse = pair_set.protocol == "pose"
    for index in range(len(pair_set) if pair_set.protocol == "correspondences" else 0):
        with suppress(ImageError):  # of the first that can be read
            sparse = not pair_set.pairs[index].dense
            break
    if sparse:
        raise UsageError(f"{pair_set.name}: calibration needs homographies, depth or dense labels")


def as_object(evaluation: Evaluation) -> dict[str, Any]:
    """Reliability of match probabilities, and verdicts, as plain values for `json.dumps`."""
    rows = []
    for name, records in evaluation.records.items():
        scores, errors = (np.concatenate([getattr(r, key) for r in records]) for key in ("scores", "errors"))
        measured = reliability(scores, errors < CORRECT)
        row = {"name": name, "matches": len(scores), "expected_calibration_error": plain(measured.error)}
        row |= {key: list(map(plain, getattr(measured, key))) for key in ("confidence", "accuracy")}
        rows.append(row | {"count": measured.count.tolist(), "verdicts": verdict_counts(records)})
    pairs, skipped = len(evaluation.groups), list(evaluation.skipped)
    found = {"set": evaluation.set.name, "pairs": pairs, "correct_px": CORRECT, "rows": rows}
    return found | ({"skipped": skipped} if skipped else {})


def as_markdown(found: dict[str, Any]) -> str:
    """Markdown of what `as_object` returned."""
    rows = []
    for row in found["rows"]:
        shares = ["–" if value is None else f"{value:.2f}" for value in row["accuracy"]]
        error = row["expected_calibration_error"]
        cells = [row["name"], str(row["matches"]), "–" if error is None else f"{error:.3f}"]
        rows.append([*cells, *shares, *map(str, row["verdicts"].values())])
    text = (
        f"{found['pairs']} pairs, and the share of matches within {found['correct_px']:g} px for each bin of "
        "probability; the expected calibration error is the mean distance of both. Verdicts count pairs."
    )
    edges = [f"{i / BINS:.1f}-{(i + 1) / BINS:.1f}" for i in range(BINS)]
    titles = ["", "matches", "expected calibration error", *edges, "same", "unsure", "not"]
    skipped = [f"- skipped, {n} times: {why}" for why, n in Counter(found.get("skipped", ())).items()]
    return "\n".join([f"## {found['set']}: calibration", "", text, *skipped, "", *table(titles, rows)]) + "\n"


# Of fits: what a network gives, the prior scores of refined matches, the probabilities given a geometry.
CalibrationStage = Literal["network", "refinement", "geometry"]


def logistic_regression(values: np.ndarray, right: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Bias and coefficients (E + 1,) of the regression of `right` (P,) on `values` (P, E), of a mean `weight`
    of 1, by Newton's method; coefficients of standardised values are drawn to zero a little."""
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


class JudgedPair(NamedTuple):
    """What is known of the matches of a pair before calibration, and which of them are right."""

    scores: np.ndarray  # (K,) of all matches, before this calibration
    evidence: np.ndarray  # (K, E) what the calibration goes by
    known: np.ndarray  # (K,) bool: the ground truth can tell
    right: np.ndarray  # (K,) bool


def uncalibrated(preset: str, stage: CalibrationStage = "network") -> Pipeline:
    """A preset, for the first stage one pass of it, without the calibration of a stage and of later ones."""
    pipeline = load(preset, further_passes=False) if stage == "network" else load(preset)
    config, kept = pipeline.config.matcher, None
    if not isinstance(config, NetworkConfig) or not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"the preset {preset!r} has no network whose probabilities could be calibrated")
    if stage != "network":
        kept = config.policy.calibration
        if kept is None:
            raise UsageError(f"{preset!r} is not calibrated before {stage}: calibrate its scores first")
        kept = replace(kept, refined=kept.refined if stage == "geometry" else None, verified=None)
    policy = replace(config.policy, calibration=kept)
    return replace(pipeline, matcher=pipeline.matcher.adjusted(policy=policy))


def judge(pipeline: Pipeline, pair_set: PairSet, stage: CalibrationStage = "network") -> list[JudgedPair]:
    """The matches of every pair by the pipeline of `uncalibrated`; geometries have to tell of single
    matches."""
    found = []
    for pair, (result,) in matched(pair_set, [Method(pipeline.preset, pipeline)], None, []):
        matches = result.matches
        if not len(matches) or (stage == "geometry" and not calibration.judges_matches(result.geometry)):
            continue
        if stage == "refinement":
            scale = result.features1.scale.tolist()
            evidence = calibration.refinement_evidence(matches, scale, len(result.passes) > 1)
        elif stage == "geometry":
            evidence = calibration.geometry_evidence(matches, result.geometry)
        else:
            counts = len(result.features0), len(result.features1)
            evidence = calibration.evidence(result.scores, counts)
        errors = errors_of(pair, matches.points0, matches.points1, *scales_of(result))
        known = ~np.isnan(errors)
        found.append(JudgedPair(result.scores, evidence, known, known & (errors < CORRECT)))
    return found


def fit_calibration(sets: Sequence[tuple[Sequence[JudgedPair], float]]) -> np.ndarray:
    """(1 + E,) offset and coefficients of the evidence, as in the stage's configuration, under which the
    matches of all sets, each with its weight, are most likely."""
    weights = []
    for pairs, share in sets:
        # A pair weighs 1 at most, one of few judged matches less.
        counts = np.array([pair.known.sum() for pair in pairs])
        weight = np.repeat(np.minimum(1.0, counts / 50) / np.maximum(1, counts), counts)
        weights.append(share * weight / weight.sum())
    weight, every = np.concatenate(weights), [pair for pairs, _ in sets for pair in pairs]
    _, values, known, right = map(np.concatenate, zip(*every, strict=True))
    weight /= weight.mean()
    return np.round(logistic_regression(values[known], right[known], weight), 2)


def error_under(pairs: Sequence[JudgedPair], numbers: np.ndarray | None) -> float:
    """Expected calibration error of a set under a calibration of `fit_calibration`, or without one."""
    scores, evidence, known, right = map(np.concatenate, zip(*pairs, strict=True))
    if numbers is not None:
        scores = calibration.probabilities(numbers[0] + evidence @ numbers[1:])
    return reliability(scores[known], right[known]).error


def fit_verdict(values: np.ndarray, same: np.ndarray) -> np.ndarray:
    """`logistic_regression` of `same` (P,) on evidence (P, E), in which both classes weigh the same."""
    weight = np.where(same, 0.5 / same.mean(), 0.5 / (1 - same.mean()))
    return logistic_regression(values, same, weight)
