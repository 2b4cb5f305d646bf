"""Whether probabilities are what they say: reliability diagrams and the expected calibration error.

Guo et al., On Calibration of Modern Neural Networks, ICML 2017, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from matcher.data.matches import Matches
from matcher.errors import ImageError, UsageError
from matcher.lab.evaluate.measure import corresponding_points
from matcher.lab.evaluate.metrics import reprojection_errors
from matcher.lab.evaluate.run import Method
from matcher.lab.pairs.depth import reproject
from matcher.lab.pairs.protocols import CorrespondencePair, DepthPair, HomographyPair, Pair, PairSet
from matcher.result import Result

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
        total = self.count.sum()
        if not total:
            return float("nan")
        return float(np.nansum(np.abs(self.confidence - self.accuracy) * self.count) / total)


@dataclass(eq=False)
class Predictions:
    """What a method said on the pairs of a set, and what is true."""

    scores: list[np.ndarray] = field(default_factory=list)  # of matches that can be judged
    correct: list[np.ndarray] = field(default_factory=list)  # bool, of these matches
    verdicts: list[float] = field(default_factory=list)  # probabilities of the same place, one a pair

    def reliability(self) -> Reliability:
        """Of the match probabilities."""
        nothing = np.zeros(0)
        return reliability(
            np.concatenate([nothing, *self.scores]), np.concatenate([nothing, *self.correct]).astype(bool)
        )


def reliability(probabilities: np.ndarray, right: np.ndarray) -> Reliability:
    """How often predictions of each probability are right.

    Args:
        probabilities: (K,) in [0, 1].
        right: (K,) bool.
    """
    index = np.minimum((np.asarray(probabilities) * BINS).astype(int), BINS - 1)
    count = np.bincount(index, minlength=BINS)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(index, weights=probabilities, minlength=BINS) / count
        accuracy = np.bincount(index, weights=np.asarray(right, dtype=np.float64), minlength=BINS) / count
    return Reliability(confidence, accuracy, count)


def calibration_error(probabilities: np.ndarray, right: np.ndarray) -> float:
    """Expected calibration error of predictions (K,), of which those in `right` (K,) are true."""
    return reliability(probabilities, right).error


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
    failures = []
    for index in range(len(pair_set)):
        try:
            pair = pair_set.pairs[index]
            for method in methods:
                _add(found[method.name], pair, method.pipeline.match(*as_inputs(pair)))
        except ImageError as error:
            failures.append(error)
        if progress is not None:
            progress(index + 1, len(pair_set))
    if len(failures) == len(pair_set):
        raise failures[0]
    if skipped is not None:
        skipped += map(str, failures)
    return found


def _without_labels(pair_set: PairSet) -> bool:
    for index in range(len(pair_set)):
        with suppress(ImageError):  # of the first that can be read
            first = pair_set.pairs[index]
            return isinstance(first, CorrespondencePair) and not first.dense
    return False


def as_inputs(pair: Pair) -> list[Path | np.ndarray]:
    """Both images of a pair, as `Pipeline.match` takes them."""
    return [s.path if s.pixels is None else s.pixels for s in (pair.image0, pair.image1)]


def _add(found: Predictions, pair: Pair, result: Result) -> None:
    scales = (float(f.scale.prod().sqrt()) for f in (result.features0, result.features1))
    errors = match_errors(pair, result.matches, *scales)
    known = ~np.isnan(errors)
    found.scores.append(result.scores[known])
    found.correct.append(errors[known] < CORRECT)
    if result.verdict is not None:
        found.verdicts.append(result.verdict.probability)


def match_errors(pair: Pair, matches: Matches, scale0: float, scale1: float) -> np.ndarray:
    """(K,) errors of matches in pixels of the resized images, NaN where the ground truth cannot tell.

    Every match of unrelated images is infinitely wrong. `scale0` and `scale1` are resized / stored size.
    """
    points0, points1 = (p.astype(np.float64) for p in (matches.points0, matches.points1))
    if isinstance(pair, HomographyPair):
        return reprojection_errors(points0, points1, pair.H_1_from_0, scale0, scale1)
    if isinstance(pair, DepthPair):
        expected, _ = reproject(points0, pair.view0, pair.view1)
    elif isinstance(pair, CorrespondencePair):
        expected = corresponding_points(pair, points0)
    else:
        return np.full(len(points0), np.inf)
    return np.linalg.norm(expected - points1, axis=1) * scale1


def as_object(
    pair_set: PairSet, found: dict[str, Predictions], skipped: Sequence[str] = ()
) -> dict[str, Any]:
    """Reliability and verdicts as plain values for `json.dumps`; `skipped`: pairs that could not be read."""
    rows = []
    for name, said in found.items():
        measured = said.reliability()
        verdicts = np.array(said.verdicts)
        rows.append(
            {
                "name": name,
                "matches": int(measured.count.sum()),
                "expected_calibration_error": _plain(measured.error),
                "confidence": [_plain(value) for value in measured.confidence],
                "accuracy": [_plain(value) for value in measured.accuracy],
                "count": measured.count.tolist(),
                "verdicts": {
                    "same": int((verdicts >= 0.9).sum()),
                    "unsure": int(((verdicts > 0.1) & (verdicts < 0.9)).sum()),
                    "not": int((verdicts <= 0.1).sum()),
                },
            }
        )
    pairs = len(pair_set) - len(skipped)
    found = {"set": pair_set.name, "pairs": pairs, "correct_px": CORRECT, "rows": rows}
    return found | ({"skipped": list(skipped)} if skipped else {})


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
