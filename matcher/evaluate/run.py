"""The loop over the pairs of a set, and the tables of `matcher evaluate`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, process_time
from typing import Any

import numpy as np

from matcher.config import GeometryKind, depth
from matcher.errors import ImageError
from matcher.evaluate.measure import auc, estimate, mean, measure_pair
from matcher.evaluate.methods import BASELINE, Method
from matcher.evaluate.protocols import Pair, PairSet
from matcher.pipeline import Pipeline
from matcher.result import Result
from matcher.verify.estimation import RobustEstimator

GEOMETRY: dict[str, GeometryKind] = {
    "homography": "homography",
    "pose": "essential",
    "depth": "essential",
    "correspondences": "fundamental",
    "unrelated": "fundamental",
}


@dataclass(eq=False)
class PairLoop:
    """Every method on every pair of a set: what accuracy and calibration are measured of.

    Iterating gives each pair that can be read, with the results of all methods on it.
    """

    pair_set: PairSet
    methods: Sequence[Method]
    progress: Callable[[int, int], None] | None = None  # called with the number of pairs done and their total
    skipped: list[str] = field(default_factory=list)  # the reason for each pair that could not be read

    def __iter__(self) -> Iterator[tuple[Pair, list[Result]]]:
        """Pairs and results, whose `seconds` also have the processor time of the call as "cpu".

        Raises:
            ImageError: no pair could be read; the message is that of the first pair.
        """
        methods, self.skipped[:] = [self._prescribed(method.pipeline) for method in self.methods], []
        for index in range(len(self.pair_set)):
            try:
                pair = self.pair_set.pairs[index]
                images = [side.given(self.pair_set.shorter_side) for side in (pair.image0, pair.image1)]
                if index == len(self.skipped):  # the first call of a process is slower than later ones
                    for pipeline in methods:
                        pipeline.match(*images)
                found = (pair, [_timed(pipeline, images) for pipeline in methods])
            except ImageError as error:
                self.skipped.append(str(error))
            else:
                yield found
            if self.progress is not None:
                self.progress(index + 1, len(self.pair_set))
        if len(self.skipped) == len(self.pair_set):
            raise ImageError(f"{self.pair_set.name}: no pair could be read; the first: {self.skipped[0]}")

    def _prescribed(self, pipeline: Pipeline) -> Pipeline:
        """A size that a benchmark prescribes is kept: no image is looked at larger or smaller."""
        if self.pair_set.shorter_side is None:
            return pipeline
        extractor = pipeline.config.extractor.of_size(pipeline.config.extractor.resize)
        return replace(pipeline, config=replace(pipeline.config, extractor=extractor))


def _timed(pipeline: Pipeline, images: Sequence[Any]) -> Result:
    start, cpu = perf_counter(), process_time()
    result = pipeline.match(*images)
    seconds = {"call": perf_counter() - start, "cpu": process_time() - cpu}
    return replace(result, seconds=result.seconds | seconds)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics of every method on every pair, before they are averaged."""

    set: PairSet
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]  # of the robust estimator
    names: tuple[str, ...]  # of the n pairs that were measured
    groups: tuple[tuple[str, ...], ...]  # of each of these pairs
    values: dict[str, dict[str, np.ndarray]]  # method → metric → (S, n)
    skipped: tuple[str, ...]  # the reason for each pair that could not be read


def evaluate(
    pair_set: PairSet,
    methods: Sequence[Method],
    *,
    seeds: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure every method on the same pairs.

    Args:
        pair_set: the benchmark.
        methods: rows of the table.
        seeds: number of seeds of the robust estimator; only the essential estimator is random.
        progress: called after every pair with the number of pairs done and their total.

    Returns:
        The metrics; pairs with an image that cannot be read are skipped and listed with the reason.

    Raises:
        ImageError: no pair could be read; the message is that of the first pair.
        UsageError: intrinsics that belong to images of another size.
    """
    kind = GEOMETRY[pair_set.protocol]
    used = tuple(range(seeds)) if kind == "essential" else (0,)
    names: list[str] = []
    groups: list[tuple[str, ...]] = []
    rows: dict[str, list[dict[str, np.ndarray]]] = {method.name: [] for method in methods}
    loop = PairLoop(pair_set, methods, progress)
    for pair, results in loop:
        names.append(pair.name)
        groups.append(pair.groups)
        for method, result in zip(methods, results, strict=True):
            estimation = replace(method.pipeline.config.estimation, kind=kind)
            estimators = [RobustEstimator(replace(estimation, seed=seed)) for seed in used]
            metrics = measure_pair(pair, result, estimators)
            metrics |= {"wall": 1e3 * result.seconds["call"], "cpu": 1e3 * result.seconds["cpu"]}
            rows[method.name].append(
                {key: np.broadcast_to(np.float64(value), len(used)) for key, value in metrics.items()}
            )
    values = {
        name: {key: np.stack([row[key] for row in measured], axis=1) for key in measured[0]}
        for name, measured in rows.items()
    }
    return Evaluation(
        pair_set, tuple(methods), used, tuple(names), tuple(groups), values, tuple(loop.skipped)
    )


# The columns of the tables: which metrics a protocol reports, and how they are averaged


@dataclass(frozen=True)
class Column:
    """A metric, and how it is summarised over pairs."""

    title: str
    key: str  # of the metric in `measure_pair`
    digits: int = 3
    headline: bool = False  # reported with its interval, in the comparison with the baseline, and by group
    median: bool = False  # instead of the mean
    auc: float = 0.0  # threshold of the area under the curve that is reported instead of the mean

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The statistic of values (…, n) over pairs (…,)."""
        if self.auc:
            return auc(values, self.auc)
        return np.median(values, axis=-1) if self.median else mean(values)


_COST = (
    Column("accepted", "accepted"),
    Column("ambiguous", "ambiguous"),
    Column("matches", "matches", 0),
    Column("layers", "layers", 2),
    Column("keypoints kept", "kept", 2),
    Column("passes", "passes", 2),
    Column("keypoints", "keypoints", 0),
    Column("ms", "wall", 0, median=True),
    Column("CPU ms", "cpu", 0, median=True),
)
_MATCHES = (
    Column("precision@1 px", "precision1"),
    Column("precision@3 px", "precision3", headline=True),
    Column("recall@1 px", "recall1"),
    Column("recall@3 px", "recall3", headline=True),
)
_POSE = (
    Column("AUC@5°", "error", headline=True, auc=5),
    Column("AUC@10°", "error", headline=True, auc=10),
    Column("AUC@20°", "error", headline=True, auc=20),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "homography": (
        Column("AUC@1 px", "error", headline=True, auc=1),
        Column("AUC@3 px", "error", headline=True, auc=3),
        Column("AUC@5 px", "error", headline=True, auc=5),
        Column("AUC@10 px", "error", headline=True, auc=10),
        *_MATCHES,
        Column("correct@3 px", "correct3", 0),
        Column("repeatability@3 px", "repeatability"),
        *_COST,
    ),
    "pose": (
        *_POSE,
        Column("epipolar precision@1 px", "precision1"),
        Column("epipolar precision@3 px", "precision3", headline=True),
        *_COST,
    ),
    "depth": (
        *_POSE,
        Column("precision@3 px", "precision3", headline=True),
        Column("recall@3 px", "recall3", headline=True),
        Column("correct@3 px", "correct3", 0),
        Column("precision@10 px", "precision10"),
        Column("correct@10 px", "correct10", 0),
        *_COST,
    ),
    "correspondences": (
        *_MATCHES,
        Column("labels@3 px", "labels3", headline=True),
        Column("mAA@10 px", "labels10", headline=True),
        *_COST,
    ),
    "unrelated": (Column("matches, median", "matches", 1, headline=True, median=True), *_COST),
}
MEANING = {
    "homography": "AUC is that of the mean corner error in image 1. Precision and recall use the mean "
    "reprojection error of both directions; a mutual nearest pair of keypoints under the ground truth counts "
    "as found if either has a correct match. Repeatability is the share of covisible keypoints that are "
    "detected in the other image within 3 px",
    "pose": "AUC is that of max(rotation error, translation direction error), the sign of the translation "
    "ignored. Precision uses the symmetric epipolar distance",
    "depth": "AUC is that of max(rotation error, translation direction error), the sign of the translation "
    "ignored. Precision and recall use the reprojection error in image 1: matches of points that are "
    "occluded in image 1 are wrong; matches of points with unknown depth or at depth edges are not counted",
    "correspondences": "Matches of unlabelled pixels are not counted; with sparse labels, precision and "
    "recall are undefined. `labels` is the share of labelled points within 3 px of the epipolar lines of the "
    "estimated fundamental matrix; mAA@10 px is its mean over 1, 2, … 10 px, as WxBS reports it",
    "unrelated": "The images show different things, so every match is wrong",
}


# Tables: Markdown for people, JSON for programs; both state how they were measured

_ESTIMATORS = {"homography": "OpenCV USAC_MAGSAC", "essential": "PoseLib LO-RANSAC"}
_ESTIMATORS["fundamental"] = _ESTIMATORS["homography"]


def as_object(evaluation: Evaluation, *, baseline: str = BASELINE, seed: int = 0) -> dict[str, Any]:
    """The evaluation as plain values for `json.dumps`; NaN becomes None.

    Args:
        evaluation: what was measured.
        baseline: the method from which paired differences are taken; without a method of that name, none are.
        seed: of the bootstrap.
    """
    pair_set, columns = evaluation.set, COLUMNS[evaluation.set.protocol]
    headline = [column for column in columns if column.headline]
    groups = sorted({group for groups in evaluation.groups for group in groups}, key=_group_order)
    by_group = {
        group: np.flatnonzero([group in groups for groups in evaluation.groups])
        for group in groups
        if len(groups) > 1
    }
    every, other = np.arange(len(evaluation.names)), evaluation.values.get(baseline)

    def averages(name: str, columns: Sequence[Column], at: np.ndarray, minus: Any = None) -> dict[str, Any]:
        found = {}
        for column in columns:
            values, other = (m and m[column.key][:, at] for m in (evaluation.values[name], minus))
            estimated = estimate(values, column, minus=other, seed=seed)
            found[column.title] = {key: _plain(value) for key, value in asdict(estimated).items()}
        return found

    rows = []
    for method in evaluation.methods:
        row = {"name": method.name, **_source(method.pipeline), "all": averages(method.name, columns, every)}
        row["groups"] = {group: averages(method.name, headline, at) for group, at in by_group.items()}
        if other is not None and method.name != baseline:
            row["minus_baseline"] = averages(method.name, headline, every, other)
        rows.append(row)
    config, kind = evaluation.methods[0].pipeline.config, GEOMETRY[pair_set.protocol]
    estimation, extractor, prescribed = config.estimation, config.extractor, pair_set.shorter_side is not None
    threshold = estimation.max_reprojection_error if kind == "homography" else estimation.max_epipolar_error
    return {
        "set": pair_set.name,
        "note": pair_set.note,
        "protocol": pair_set.protocol,
        "meaning": MEANING[pair_set.protocol],
        "pairs": len(evaluation.names),
        "skipped": list(evaluation.skipped),
        "max_keypoints": extractor.max_keypoints,
        "resize": None if prescribed else extractor.resize,
        "soft_resize": None if prescribed else extractor.soft_resize,
        "shorter_side": pair_set.shorter_side,
        "estimator": {
            "geometry": kind,
            "method": f"{_ESTIMATORS[kind]}, refined (weighed by covariances of refined matches)",
            "threshold_px": threshold,
            "seeds": list(evaluation.seeds),
        },
        "interval": {"coverage": 0.95, "method": "percentile bootstrap over pairs", "seed": seed},
        "baseline": baseline if other is not None else None,
        "pairs_by_group": {group: len(at) for group, at in by_group.items()},
        "rows": rows,
    }


def _group_order(group: str) -> tuple[str | int, ...]:
    """Sort numbers inside names by their value."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", group))


def _source(pipeline: Pipeline) -> dict[str, Any]:
    """What a row was measured with."""
    weights, front_end = pipeline.weights, getattr(pipeline.extractor, "weights", None)
    return {
        "preset": pipeline.preset,
        "several_passes": pipeline.passes is not None,
        "frontend_weights": None if front_end is None else str(front_end),
        "weights": None if weights is None else {"name": weights.name, "sha256": weights.sha256},
        "depth": depth(pipeline.config),
    }


def _plain(value: float) -> float | None:
    return round(value, 6) if np.isfinite(value) else None


def as_markdown(found: dict[str, Any]) -> str:
    """Markdown of what `as_object` returned: all pairs, paired differences from the baseline, groups."""
    columns, rows = COLUMNS[found["protocol"]], found["rows"]
    used = {
        "ambiguous": any(row["all"]["ambiguous"]["value"] for row in rows),
        "layers": any(row["depth"] for row in rows),
        "passes": any((row["all"]["passes"]["value"] or 1) > 1 for row in rows),
    }
    visible, headline = [c for c in columns if used.get(c.title, True)], [c for c in columns if c.headline]
    lines = [f"## {found['set']}", "", *_preamble(found), ""]
    lines += _table(
        ["", *(c.title for c in visible)],
        [[row["name"], *(_cell(row["all"][c.title], c) for c in visible)] for row in rows],
    )
    if compared := [row for row in rows if "minus_baseline" in row]:
        lines += ["", f"Difference from `{found['baseline']}` on the same pairs:", ""]
        lines += _table(
            ["", *(c.title for c in headline)],
            [
                [row["name"], *(_cell(row["minus_baseline"][c.title], c, "+") for c in headline)]
                for row in compared
            ],
        )
    if found["pairs_by_group"]:
        lines += ["", "By group:", ""]
        lines += _table(
            ["group", "pairs", "", *(c.title for c in headline)],
            [
                [group, str(count), row["name"]]
                + [_number(row["groups"][group][c.title]["value"], c) for c in headline]
                for group, count in found["pairs_by_group"].items()
                for row in rows
            ],
        )
    return "\n".join(lines) + "\n"


def _preamble(found: dict[str, Any]) -> list[str]:
    estimator, skipped = found["estimator"], found["skipped"]
    size = f"longer side at most {found['resize']} px"
    if found["shorter_side"] is not None:
        size = f"shorter side {found['shorter_side']} px"
    if found["soft_resize"] is not None:
        size += f" (of soft images less, {found['soft_resize']} px at least)"
    seeds = f", mean of {len(estimator['seeds'])} seeds" if len(estimator["seeds"]) > 1 else ""
    lines = [
        f"{found['pairs']} pairs, {len(skipped)} skipped; at most {found['max_keypoints']} keypoints per "
        f"image, {size}; {estimator['geometry']} geometry by {estimator['method']} at "
        f"{estimator['threshold_px']:g} px{seeds}; 95 % intervals by bootstrap over pairs; ms: median of the "
        "whole call, and its processor time.",
        f"{found['meaning']}. All pixels are those of the resized images. `accepted` is the share of pairs "
        "whose geometry a result keeps, `ambiguous` that of several answers; AUC counts the first of each.",
        *([f"{found['note']}."] if found["note"] else []),
    ]
    return [*lines, *(f"- skipped, {count} times: {reason}" for reason, count in Counter(skipped).items())]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows]]


def _cell(estimated: dict[str, float | None], column: Column, sign: str = "") -> str:
    value = _number(estimated["value"], column, sign)
    if estimated["low"] is None or not column.headline:
        return value
    return f"{value} ({_number(estimated['low'], column, sign)} – {_number(estimated['high'], column, sign)})"


def _number(value: float | None, column: Column, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.{column.digits}f}"
