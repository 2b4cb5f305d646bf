"""The loop over the pairs of a set, and the tables of `matcher evaluate`: of accuracy, and of reliability."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np

from matcher.cameras import Camera
from matcher.errors import ImageError, UsageError
from matcher.evaluate.measure import OUTCOMES, Record, check_intrinsics, measure_pair
from matcher.evaluate.methods import BASELINE, Method
from matcher.evaluate.protocols import Pair, PairSet, PosePair
from matcher.loading import with_estimation
from matcher.pipeline import Pipeline
from matcher.result import Result
from matcher.verify.estimation import RobustEstimator
from matcher.verify.verdict import NOT, SAME

Progress = Callable[[int, int], None]  # called with the number of pairs done and their total
Statistic = Callable[[np.ndarray], np.ndarray]  # of values (…, n) over n pairs


def matched(
    pair_set: PairSet, methods: Sequence[Method], progress: Progress | None, skipped: list[str]
) -> Iterator[tuple[Pair, list[Result]]]:
    """Each pair that can be measured with the results of all methods, whose `seconds` also have the wall time
    of the call as "call" and its processor time as "cpu"; `skipped` receives why others cannot."""

    def timed(pipeline: Pipeline, pair: Pair, images: Sequence[Any]) -> Result:
        cameras = {}
        if pair_set.protocol == "trap" and isinstance(pair, PosePair):
            pipeline = with_estimation(pipeline, replace(pipeline.config.estimation, kind="essential"))
            cameras = {"camera0": Camera.from_K(pair.K0), "camera1": Camera.from_K(pair.K1)}
        start, cpu = perf_counter(), process_time()
        result = pipeline.match(*images, **cameras)
        seconds = {"call": perf_counter() - start, "cpu": process_time() - cpu}
        return replace(result, seconds=result.seconds | seconds)

    pipelines = [method.pipeline for method in methods]
    if pair_set.shorter_side is not None:
        # A prescribed size is kept: no image is looked at larger or smaller.
        extractors = [p.config.extractor.of_size(p.config.extractor.resize) for p in pipelines]
        configs = [replace(p.config, extractor=e) for p, e in zip(pipelines, extractors, strict=True)]
        pipelines = [replace(p, config=config) for p, config in zip(pipelines, configs, strict=True)]
    for index in range(len(pair_set)):
        try:
            pair = pair_set.pairs[index]
            images = [side.given(pair_set.shorter_side) for side in (pair.image0, pair.image1)]
            if index == len(skipped):  # the first call of a process is slower than later ones
                for pipeline in pipelines:
                    pipeline.match(*images)
            found = [timed(pipeline, pair, images) for pipeline in pipelines]
            if isinstance(pair, PosePair):
                check_intrinsics(pair, found[0])
        except ImageError as error:
            skipped.append(str(error))
        else:
            yield pair, found
        if progress is not None:
            progress(index + 1, len(pair_set))
    if len(skipped) == len(pair_set):
        raise ImageError(f"{pair_set.name}: no pair could be measured; the first: {skipped[0]}")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What every method did on every pair, before it is averaged."""

    set: PairSet
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]  # of the robust estimator
    records: dict[str, list[Record]]  # by method, in the same order of pairs
    skipped: tuple[str, ...]  # the reason for each pair that could not be read

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Of each pair that was measured."""
        return tuple(record.groups for record in next(iter(self.records.values())))

    @cached_property
    def values(self) -> dict[str, dict[str, np.ndarray]]:
        """Method → metric that all pairs have → (S, n) of n pairs under S seeds."""
        found = {}
        for name, records in self.records.items():
            common = set.intersection(*({*record.metrics} for record in records))
            found[name] = {key: np.stack([r.metrics[key] for r in records], axis=1) for key in common}
        return found

    @cached_property
    def hints(self) -> tuple[str, ...]:
        """What the results say against the truth of most pairs."""
        found = []
        for name, values in self.values.items():
            scale = values.get("K_scale", np.ones((1, 1)))[0]
            if (np.abs(scale - 1) > 0.2).mean() > 0.8:
                found.append(
                    f"The principal points are those of images of about {np.nanmedian(scale):.2g} times the "
                    "size: are the intrinsics those of the stored images?"
                )
            sure = values["accepted"].all(axis=0)
            if "inverse" not in values or sure.sum() < 3:
                continue
            error, inverse = (np.median(values[key][:, sure]) for key in ("error", "inverse"))
            if error > max(10, 3 * inverse):
                found.append(
                    f"What {name} finds agrees with the inverse of the truth (median error {inverse:.2g}, "
                    f"not {error:.2g}): is it that from image 0 to image 1?"
                )
        return tuple(dict.fromkeys(found))


def evaluate(
    pair_set: PairSet, methods: Sequence[Method], *, seeds: int = 1, progress: Progress | None = None
) -> Evaluation:
    """Measure every method on the same pairs, under so many seeds of the robust estimator of poses."""
    kind, skipped = PROTOCOLS[pair_set.protocol].geometry, []
    used = tuple(range(seeds)) if kind == "essential" else (0,)
    records: dict[str, list[Record]] = {method.name: [] for method in methods}
    for pair, results in matched(pair_set, methods, progress, skipped):
        for method, result in zip(methods, results, strict=True):
            own = replace(method.pipeline.config.estimation, kind=kind or "none")
            estimators = [RobustEstimator(replace(own, seed=seed)) for seed in used if kind]
            records[method.name].append(measure_pair(pair, result, estimators))
    return Evaluation(pair_set, tuple(methods), used, records, tuple(skipped))


# Averages over pairs, with intervals of 95 % by a seeded bootstrap over the pairs (Efron 1979)


def auc(errors: np.ndarray, threshold: float) -> np.ndarray:
    """(…,) area under the cumulative curve of errors (…, n) up to a threshold, as a share (SuperGlue, section
    5.2): by the trapezoidal rule from (0, 0) through (k-th smallest error, k/n), constant after the last
    below the threshold; NaN for n = 0."""
    errors = np.asarray(errors, dtype=np.float64)
    count = errors.shape[-1]
    if count == 0:
        return np.full(errors.shape[:-1], np.nan)
    ordered = np.sort(errors, axis=-1)
    below = ordered < threshold
    steps = np.diff(np.minimum(ordered, threshold), axis=-1, prepend=0.0)
    heights = np.where(below, np.arange(1, count + 1) - 0.5, below.sum(axis=-1, keepdims=True))
    last = threshold - np.minimum(ordered[..., -1], threshold)
    return ((steps * heights).sum(axis=-1) + last * count) / (count * threshold)


def mean(values: np.ndarray) -> np.ndarray:
    """Mean of the finite values along the last axis; NaN without any."""
    known = np.isfinite(values)
    count = known.sum(axis=-1)
    total = np.where(known, values, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


class Estimate(NamedTuple):
    """A statistic and its confidence interval; NaN for that of a single pair."""

    value: float
    low: float
    high: float
    spread: float  # standard deviation over the estimator's seeds


def estimate(
    values: np.ndarray, statistic: Statistic, *, minus: np.ndarray | None = None, seed: int = 0
) -> Estimate:
    """A statistic (…, n) → (…,) of values (S, n) of n pairs, averaged over S seeds, and its percentile
    bootstrap interval; with the values of another method on these pairs, `minus`, those of the difference."""
    count = values.shape[1]
    draws = np.random.default_rng([seed, count]).integers(0, count, (1000, count))
    by_seed, resampled = statistic(values), statistic(values[:, draws]).mean(axis=0)
    if minus is not None:
        by_seed, resampled = by_seed - statistic(minus), resampled - statistic(minus[:, draws]).mean(axis=0)
    known = resampled[np.isfinite(resampled)]
    interval = np.percentile(known, [2.5, 97.5]) if len(known) and count > 1 else (math.nan, math.nan)
    return Estimate(*map(float, (by_seed.mean(), *interval, by_seed.std())))


# Protocols: which metrics are reported, how they are averaged, and what they mean


class Column(NamedTuple):
    """A metric of `measure_pair`, and its statistic over pairs (…, n) → (…,)."""

    title: str
    key: str
    digits: int = 3
    headline: bool = False  # reported with its interval, in the comparison with the baseline, and by group
    statistic: Statistic = mean


class Protocol(NamedTuple):
    """What is measured where pairs have one kind of ground truth."""

    geometry: str | None  # that is estimated; None: that of the results
    columns: tuple[Column, ...]
    meaning: str


def _median(values: np.ndarray) -> np.ndarray:
    return np.median(values, axis=-1)


_COST = (
    Column("accepted", "accepted"),
    Column("ambiguous", "ambiguous"),
    Column("matches", "matches", 0),
    Column("layers", "layers", 2),
    Column("keypoints kept", "kept", 2),
    Column("passes", "passes", 2),
    Column("keypoints", "keypoints", 0),
    Column("ms", "wall", 0, statistic=_median),
    Column("CPU ms", "cpu", 0, statistic=_median),
)
_PRECISION = Column("precision@3 px", "precision3", headline=True)
_RECALL = Column("recall@3 px", "recall3", headline=True)
_CORRECT = Column("correct@3 px", "correct3", 0)
_MATCHES = (Column("precision@1 px", "precision1"), _PRECISION, Column("recall@1 px", "recall1"), _RECALL)
_POSE = tuple(Column(f"AUC@{n}°", "error", 3, True, lambda errors, n=n: auc(errors, n)) for n in (5, 10, 20))
_POSE_AUC = "AUC is that of max(rotation error, translation direction error), this without its sign. "
PROTOCOLS = {
    "homography": Protocol(
        "homography",
        (
            *(Column(f"AUC@{n} px", "error", 3, True, lambda x, n=n: auc(x, n)) for n in (1, 3, 5, 10)),
            *(*_MATCHES, _CORRECT, Column("repeatability@3 px", "repeatability"), *_COST),
        ),
        "AUC is that of the mean corner error in image 1. Precision and recall use the mean reprojection "
        "error of both directions; a mutual nearest pair of keypoints under the ground truth counts as found "
        "if either has a correct match. Repeatability is the share of covisible keypoints that are detected "
        "in the other image within 3 px",
    ),
    "pose": Protocol(
        "essential",
        (
            *(*_POSE, Column("epipolar precision@1 px", "precision1")),
            Column("epipolar precision@3 px", "precision3", headline=True),
            *_COST,
        ),
        f"{_POSE_AUC}Precision uses the symmetric epipolar distance",
    ),
    "depth": Protocol(
        "essential",
        (
            *(*_POSE, _PRECISION, _RECALL, _CORRECT),
            Column("precision@10 px", "precision10"),
            Column("correct@10 px", "correct10", 0),
            *_COST,
        ),
        f"{_POSE_AUC}Precision and recall use the reprojection error in image 1: matches of points that are "
        "occluded in image 1 are wrong; matches of points with unknown depth or at depth edges are not "
        "counted",
    ),
    "correspondences": Protocol(
        "fundamental",
        (
            *_MATCHES,
            Column("labels@3 px", "labels3", headline=True),
            Column("mAA@10 px", "labels10", headline=True),
            *_COST,
        ),
        "Matches of unlabelled pixels are not counted; with sparse labels, precision and recall are "
        "undefined. `labels` is the share of labelled points within 3 px of the epipolar lines of the "
        "estimated fundamental matrix; mAA@10 px is its mean over 1, 2, … 10 px, as WxBS reports it",
    ),
    "unrelated": Protocol(
        "fundamental",
        (Column("matches, median", "matches", 1, True, _median), *_COST),
        "The images show different things, so every match is wrong",
    ),
    "trap": Protocol(
        None,
        (
            *(Column(word, word, headline=True) for word in OUTCOMES),
            Column("wrong and sure", "sure", headline=True),
            Column("called the same", "same", headline=True),
            Column("probability", "verdict"),
            Column("Brier score", "brier"),
            *(column for column in _COST if column.title not in OUTCOMES),
        ),
        "Shares of the pairs: the geometry is right, ambiguous with the right one among its alternatives, "
        "refused, or wrong; wrong and sure, or called the same, with a probability of the same place of .9 "
        "or more. Pairs with a known pose are matched with their cameras",
    ),
}


# Tables: Markdown for people, JSON for programs; both state how they were measured


def as_object(evaluation: Evaluation, *, baseline: str = BASELINE, seed: int = 0) -> dict[str, Any]:
    """The evaluation as plain values for `json.dumps`, NaN as None, with paired differences from the method
    `baseline`, if there is one; `seed` is of the bootstrap."""
    pair_set, protocol = evaluation.set, PROTOCOLS[evaluation.set.protocol]
    headline = [column for column in protocol.columns if column.headline]
    # Numbers inside names are sorted by their value.
    groups = sorted(
        {group for groups in evaluation.groups for group in groups},
        key=lambda group: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", group)],
    )
    at = {group: np.flatnonzero([group in own for own in evaluation.groups]) for group in groups}
    by_group = at if len(at) > 1 else {}
    every, other = np.arange(len(evaluation.groups)), evaluation.values.get(baseline)

    def averages(name: str, columns: Sequence[Column], at: np.ndarray, minus: Any = None) -> dict[str, Any]:
        found = {}
        for column in columns:
            values, other = (m and m[column.key][:, at] for m in (evaluation.values[name], minus))
            estimated = estimate(values, column.statistic, minus=other, seed=seed)
            found[column.title] = {key: plain(value) for key, value in estimated._asdict().items()}
        return found

    rows = []
    for method in evaluation.methods:
        pipeline, weights = method.pipeline, method.pipeline.weights
        front_end = getattr(pipeline.extractor, "weights", None)
        row = {
            "name": method.name,
            "preset": pipeline.preset,
            "several_passes": pipeline.passes is not None,
            "frontend_weights": None if front_end is None else str(front_end),
            "weights": None if weights is None else {"name": weights.name, "sha256": weights.sha256},
            "depth": pipeline.layers,
            "all": averages(method.name, protocol.columns, every),
            "groups": {group: averages(method.name, headline, at) for group, at in by_group.items()},
        }
        if other is not None and method.name != baseline:
            row["minus_baseline"] = averages(method.name, headline, every, other)
        rows.append(row)
    config, prescribed = evaluation.methods[0].pipeline.config, pair_set.shorter_side is not None
    estimation, extractor = config.estimation, config.extractor
    kind = protocol.geometry or estimation.kind
    estimator = "PoseLib LO-RANSAC" if kind == "essential" else "OpenCV USAC_MAGSAC"
    threshold = estimation.max_reprojection_error if kind == "homography" else estimation.max_epipolar_error
    return {
        "set": pair_set.name,
        "note": pair_set.note,
        "protocol": pair_set.protocol,
        "meaning": protocol.meaning,
        "pairs": len(evaluation.groups),
        "skipped": list(evaluation.skipped),
        "hints": list(evaluation.hints),
        "max_keypoints": extractor.max_keypoints,
        "resize": None if prescribed else extractor.resize,
        "soft_resize": None if prescribed else extractor.soft_resize,
        "shorter_side": pair_set.shorter_side,
        "estimator": {
            "geometry": kind,
            "method": f"{estimator}, refined (weighed by covariances of refined matches)",
            "threshold_px": threshold,
            "seeds": list(evaluation.seeds),
        },
        "interval": {"coverage": 0.95, "method": "percentile bootstrap over pairs", "seed": seed},
        "baseline": baseline if other is not None else None,
        "pairs_by_group": {group: len(at) for group, at in by_group.items()},
        "rows": rows,
    }


def as_csv(evaluation: Evaluation) -> str:
    """A line for each pair, method and seed of the estimator, with all that was measured."""
    keys = sorted(set.intersection(*({*values} for values in evaluation.values.values())))
    writer = csv.writer(file := io.StringIO(), lineterminator="\n")
    writer.writerow(["method", "pair", "groups", "seed", *keys])
    for name, records in evaluation.records.items():
        for record in records:
            for row, seed in enumerate(evaluation.seeds):
                numbers = (f"{record.metrics[key][row]:.6g}" for key in keys)
                writer.writerow([name, record.pair, "; ".join(record.groups), seed, *numbers])
    return file.getvalue()


def plain(value: float) -> float | None:
    """A value for JSON, None where it is not finite."""
    return round(float(value), 6) if np.isfinite(value) else None


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows]]


def as_markdown(found: dict[str, Any]) -> str:
    """Markdown of what `as_object` returned: all pairs, paired differences from the baseline, groups."""
    columns, rows, skipped = PROTOCOLS[found["protocol"]].columns, found["rows"], found["skipped"]
    used = {
        "ambiguous": any(row["all"]["ambiguous"]["value"] for row in rows),
        "layers": any(row["depth"] for row in rows),
        "passes": any((row["all"]["passes"]["value"] or 1) > 1 for row in rows),
    }
    visible, headline = [c for c in columns if used.get(c.title, True)], [c for c in columns if c.headline]

    def cells(
        values: dict[str, Any], columns: Sequence[Column], sign: str = "", low: bool = True
    ) -> list[str]:
        made = []
        for column in columns:
            found = (values[column.title][key] for key in ("value", "low", "high"))
            value, *ends = ("–" if x is None else f"{x:{sign}.{column.digits}f}" for x in found)
            known = low and column.headline and values[column.title]["low"] is not None
            made.append(f"{value} ({' – '.join(ends)})" if known else value)
        return made

    size = f"longer side at most {found['resize']} px"
    if found["shorter_side"] is not None:
        size = f"shorter side {found['shorter_side']} px"
    if found["soft_resize"] is not None:
        size += f" (of soft images less, {found['soft_resize']} px at least)"
    estimator, titles = found["estimator"], [column.title for column in headline]
    seeds = f", mean of {len(estimator['seeds'])} seeds" if len(estimator["seeds"]) > 1 else ""
    every = [[row["name"], *cells(row["all"], visible)] for row in rows]
    lines = [
        f"## {found['set']}",
        "",
        f"{found['pairs']} pairs, {len(skipped)} skipped; at most {found['max_keypoints']} keypoints per "
        f"image, {size}; {estimator['geometry']} geometry by {estimator['method']} at "
        f"{estimator['threshold_px']:g} px{seeds}; 95 % intervals by bootstrap over pairs; ms: median of the "
        "whole call, and its processor time.",
        f"{found['meaning']}. All pixels are those of the resized images. `accepted` is the share of pairs "
        "whose geometry a result keeps, `ambiguous` that of several answers; AUC counts the first of each.",
        *([f"{found['note']}."] if found["note"] else []),
        *(f"- **{hint}**" for hint in found["hints"]),
        *(f"- skipped, {count} times: {reason}" for reason, count in Counter(skipped).items()),
        "",
        *table(["", *(c.title for c in visible)], every),
    ]
    compared = [row for row in rows if "minus_baseline" in row]
    if differences := [[row["name"], *cells(row["minus_baseline"], headline, "+")] for row in compared]:
        lines += ["", f"Difference from `{found['baseline']}` on the same pairs:", ""]
        lines += table(["", *titles], differences)
    if found["pairs_by_group"]:
        by_group = [
            [group, str(count), row["name"], *cells(row["groups"][group], headline, low=False)]
            for group, count in found["pairs_by_group"].items()
            for row in rows
        ]
        lines += ["", "By group:", "", *table(["group", "pairs", "", *titles], by_group)]
    return "\n".join(lines) + "\n"


# How often probabilities hold (Guo et al., ICML 2017, section 2).

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


def reliability_object(evaluation: Evaluation) -> dict[str, Any]:
    """Reliability of match probabilities, and verdicts, as plain values for `json.dumps`."""
    rows = []
    for name, records in evaluation.records.items():
        scores, errors = (np.concatenate([getattr(r, key) for r in records]) for key in ("scores", "errors"))
        measured = reliability(scores, errors < CORRECT)
        row = {"name": name, "matches": len(scores), "expected_calibration_error": plain(measured.error)}
        row |= {key: list(map(plain, getattr(measured, key))) for key in ("confidence", "accuracy")}
        told = [(r.metrics["verdict"][0], r.metrics["truth"][0]) for r in records if "truth" in r.metrics]
        row["verdict_error"] = plain(reliability(*np.array(told).T).error) if told else None
        rows.append(row | {"count": measured.count.tolist(), "verdicts": verdict_counts(records)})
    pairs, skipped = len(evaluation.groups), list(evaluation.skipped)
    found = {"set": evaluation.set.name, "pairs": pairs, "correct_px": CORRECT, "rows": rows}
    return found | ({"skipped": skipped} if skipped else {})


def reliability_markdown(found: dict[str, Any]) -> str:
    """Markdown of what `reliability_object` returned."""
    rows = []
    for row in found["rows"]:
        shares = ["–" if value is None else f"{value:.2f}" for value in row["accuracy"]]
        error, wrong = (
            "–" if row[key] is None else f"{row[key]:.3f}"
            for key in ("expected_calibration_error", "verdict_error")
        )
        cells = [row["name"], str(row["matches"]), error, *shares]
        rows.append([*cells, *map(str, row["verdicts"].values()), wrong])
    text = (
        f"{found['pairs']} pairs, and the share of matches within {found['correct_px']:g} px for each bin of "
        "probability; the expected calibration error is the mean distance of both. Verdicts count pairs; "
        "their error is that of the probability of the same place, of sets that tell."
    )
    edges = [f"{i / BINS:.1f}-{(i + 1) / BINS:.1f}" for i in range(BINS)]
    titles = ["", "matches", "expected calibration error", *edges, "same", "unsure", "not", "verdict error"]
    skipped = [f"- skipped, {n} times: {why}" for why, n in Counter(found.get("skipped", ())).items()]
    return "\n".join([f"## {found['set']}: calibration", "", text, *skipped, "", *table(titles, rows)]) + "\n"
