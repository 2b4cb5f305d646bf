"""How often probabilities hold, of matches and of verdicts.

Guo et al., On Calibration of Modern Neural Networks, ICML 2017, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matcher.errors import ImageError, UsageError
from matcher.evaluate.measure import match_errors, scale_of
from matcher.evaluate.methods import Method
from matcher.evaluate.protocols import CorrespondencePair, Pair, PairSet
from matcher.evaluate.run import PairLoop
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
