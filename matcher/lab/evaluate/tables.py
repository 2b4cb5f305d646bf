"""An `Evaluation` as tables: Markdown for people, JSON for programs; both state how they were measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from matcher.config import depth
from matcher.lab.evaluate.bootstrap import COVERAGE, Estimate, difference, estimate, resample
from matcher.lab.evaluate.columns import COLUMNS, MEANING, Column
from matcher.lab.evaluate.run import GEOMETRY, Evaluation, FrontEndKey

BASELINE = "nearest"
_ESTIMATORS = {
    "homography": "OpenCV USAC_MAGSAC, refined (weighed by covariances of refined matches)",
    "essential": "PoseLib LO-RANSAC, refined (weighed by covariances of refined matches)",
    "fundamental": "OpenCV USAC_MAGSAC, refined (weighed by covariances of refined matches)",
}


def as_object(evaluation: Evaluation, *, baseline: str = BASELINE, seed: int = 0) -> dict[str, Any]:
    """The evaluation as plain values for `json.dumps`; NaN becomes None.

    Args:
        evaluation: what was measured.
        baseline: the method from which paired differences are taken; without a method of that name, none are.
        seed: of the bootstrap.
    """
    named = sorted({group for groups in evaluation.groups for group in groups}, key=_group_order)
    everything = np.arange(len(evaluation.groups))
    by_group = {g: np.flatnonzero([g in groups for groups in evaluation.groups]) for g in named}
    by_group = by_group if len(named) > 1 else {}
    rows = []
    for name in evaluation.values:
        row = {"name": name, **_source(evaluation, name), "all": _metrics(evaluation, name, everything, seed)}
        row["groups"] = {group: _metrics(evaluation, name, at, seed) for group, at in by_group.items()}
        if baseline in evaluation.values and name != baseline:
            row["minus_baseline"] = _differences(evaluation, name, baseline, seed)
        rows.append(row)
    return {
        **_header(evaluation, seed),
        "baseline": baseline if baseline in evaluation.values else None,
        "pairs_by_group": {g: len(at) for g, at in by_group.items()},
        "rows": rows,
    }


def _group_order(group: str) -> tuple[str | int, ...]:
    """Sort numbers inside names by their value."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", group))


def as_markdown(found: dict[str, Any]) -> str:
    """Markdown of what `as_object` returned: all pairs, paired differences from the baseline, groups."""
    columns = COLUMNS[found["protocol"]]
    used = {
        "layers": any(row["depth"] for row in found["rows"]),
        "passes": any((row["all"]["passes"]["value"] or 1) > 1 for row in found["rows"]),
    }
    visible = [c for c in columns if used.get(c.title, True)]
    lines = [f"## {found['set']}", "", *_preamble(found), "", *_head(["", *(c.title for c in visible)])]
    for row in found["rows"]:
        lines.append(_line([row["name"], *(_cell(row["all"][c.title], c) for c in visible)]))
    headline = [c for c in columns if c.headline]
    compared = [row for row in found["rows"] if "minus_baseline" in row]
    if compared:
        lines += ["", f"Difference from `{found['baseline']}` on the same pairs:", ""]
        lines += _head(["", *(c.title for c in headline)])
        for row in compared:
            cells = (_cell(row["minus_baseline"][c.title], c, "+") for c in headline)
            lines.append(_line([row["name"], *cells]))
    if found["pairs_by_group"]:
        lines += ["", "By group:", "", *_head(["group", "pairs", "", *(c.title for c in headline)])]
        for group, count in found["pairs_by_group"].items():
            for row in found["rows"]:
                cells = (_number(row["groups"][group][c.title]["value"], c) for c in headline)
                lines.append(_line([group, str(count), row["name"], *cells]))
    return "\n".join(lines) + "\n"


def _header(evaluation: Evaluation, seed: int) -> dict[str, Any]:
    pipeline = evaluation.methods[0].pipeline
    extractor, config = pipeline.config.extractor, pipeline.config.estimation
    kind = GEOMETRY[evaluation.set.protocol]
    threshold = config.max_reprojection_error if kind == "homography" else config.max_epipolar_error
    counts = [row["keypoints"] for row in evaluation.values.values()]
    return {
        "set": evaluation.set.name,
        "note": evaluation.set.note,
        "protocol": evaluation.set.protocol,
        "meaning": MEANING[evaluation.set.protocol],
        "pairs": len(evaluation.names),
        "skipped": list(evaluation.skipped),
        "max_keypoints": extractor.max_keypoints,
        "mean_keypoints": float(np.mean(counts[0])),
        "resize": extractor.resize if evaluation.set.shorter_side is None else None,
        "soft_resize": extractor.soft_resize if evaluation.set.shorter_side is None else None,
        "shorter_side": evaluation.set.shorter_side,
        "estimator": {
            "geometry": kind,
            "method": _ESTIMATORS[kind],
            "threshold_px": threshold,
            "seeds": list(evaluation.seeds),
        },
        "interval": {"coverage": COVERAGE, "method": "percentile bootstrap over pairs", "seed": seed},
    }


def _source(evaluation: Evaluation, name: str) -> dict[str, Any]:
    for method in evaluation.methods:
        if method.name == name:
            weights = method.pipeline.weights
            return {
                "preset": method.pipeline.preset,
                "frontend_weights": FrontEndKey.of(method.pipeline).weights,
                "weights": None if weights is None else {"name": weights.name, "sha256": weights.sha256},
                "depth": depth(method.pipeline.config),
            }
    return {"preset": None, "frontend_weights": None, "weights": None, "depth": 0}


def _metrics(evaluation: Evaluation, name: str, at: np.ndarray, seed: int) -> dict[str, Any]:
    draws = resample(len(at), seed)
    return {
        c.title: _plain(estimate(evaluation.values[name][c.key][:, at], c.statistic, draws))
        for c in COLUMNS[evaluation.set.protocol]
    }


def _differences(evaluation: Evaluation, name: str, baseline: str, seed: int) -> dict[str, Any]:
    draws = resample(len(evaluation.names), seed)
    values, others = evaluation.values[name], evaluation.values[baseline]
    return {
        c.title: _plain(difference(values[c.key], others[c.key], c.statistic, draws))
        for c in COLUMNS[evaluation.set.protocol]
        if c.headline
    }


def _plain(estimated: Estimate) -> dict[str, float | None]:
    return {key: round(value, 6) if np.isfinite(value) else None for key, value in asdict(estimated).items()}


def _preamble(found: dict[str, Any]) -> list[str]:
    estimator, skipped = found["estimator"], found["skipped"]
    seeds = len(estimator["seeds"])
    size = (
        f"longer side at most {found['resize']} px"
        if found["shorter_side"] is None
        else f"shorter side {found['shorter_side']} px"
    )
    if found["soft_resize"] is not None:
        size += f" (of soft images less, {found['soft_resize']} px at least)"
    lines = [
        f"{found['pairs']} pairs, {len(skipped)} skipped; at most {found['max_keypoints']} keypoints per "
        f"image (mean {found['mean_keypoints']:.0f}), {size}; {estimator['geometry']} geometry by "
        f"{estimator['method']} at {estimator['threshold_px']:g} px"
        f"{f', mean of {seeds} seeds' if seeds > 1 else ''}; 95 % intervals by bootstrap over pairs.",
        f"{found['meaning']}. All pixels are those of the resized images.",
    ]
    if found["note"]:
        lines.append(f"{found['note']}.")
    return [*lines, *(f"- skipped, {count} times: {reason}" for reason, count in Counter(skipped).items())]


def _head(titles: Sequence[str]) -> list[str]:
    return [_line(titles), _line(["---"] * len(titles))]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(estimated: dict[str, float | None], column: Column, sign: str = "") -> str:
    value = _number(estimated["value"], column, sign)
    if estimated["low"] is None or not column.headline:
        return value
    return f"{value} ({_number(estimated['low'], column, sign)} – {_number(estimated['high'], column, sign)})"


def _number(value: float | None, column: Column, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.{column.digits}f}"
