"""How often probabilities hold (Guo et al., ICML 2017, section 2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from matcher.errors import UsageError
from matcher.evaluate.measure import Record
from matcher.evaluate.protocols import PairSet
from matcher.evaluate.run import Evaluation, plain, table
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
    labelled = pair_set.protocol == "correspondences"
    if pair_set.protocol == "pose" or (labelled and not pair_set.pairs[0].dense):
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
