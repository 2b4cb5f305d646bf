"""An `Evaluation` as tables: Markdown for people, JSON for programs; both say how the figures were made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from matcher.lab.evaluate.bootstrap import (
    COVERAGE,
    Estimate,
    Statistic,
    difference,
    estimate,
    mean,
    median,
    resample,
)
from matcher.lab.evaluate.metrics import auc
from matcher.lab.evaluate.run import GEOMETRY, Evaluation
from matcher.presets import depth

NEAREST = "nearest"


@dataclass(frozen=True)
class Measure:
    """A column: which values, and what is made of them."""

    title: str
    key: str  # of the values
    statistic: Statistic = mean
    digits: int = 3
    headline: bool = False  # compared with `nearest`, and reported by group


@dataclass(frozen=True)
class _Below:
    """The area under the curve of errors up to a threshold."""

    threshold: float

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return auc(values, self.threshold)


_COST = (
    Measure("matches", "matches", digits=0),
    Measure("layers", "layers", digits=2),
    Measure("kept", "kept", digits=2),
    Measure("ms", "milliseconds", median, digits=1),
)
_MATCHES = (
    Measure("precision@1 px", "precision1"),
    Measure("precision@3 px", "precision3", headline=True),
    Measure("recall@1 px", "recall1"),
    Measure("recall@3 px", "recall3", headline=True),
)
MEASURES: dict[str, tuple[Measure, ...]] = {
    "homography": (
        Measure("AUC@1 px", "error", _Below(1), headline=True),
        Measure("AUC@3 px", "error", _Below(3), headline=True),
        Measure("AUC@5 px", "error", _Below(5), headline=True),
        Measure("AUC@10 px", "error", _Below(10), headline=True),
        *_MATCHES,
        Measure("right@3 px", "right", digits=0),
        Measure("error of right ones, px", "residual", digits=2),
        Measure("repeatability@3 px", "repeatability"),
        *_COST,
    ),
    "pose": (
        Measure("AUC@5°", "error", _Below(5), headline=True),
        Measure("AUC@10°", "error", _Below(10), headline=True),
        Measure("AUC@20°", "error", _Below(20), headline=True),
        Measure("epipolar precision@1 px", "precision1"),
        Measure("epipolar precision@3 px", "precision3", headline=True),
        *_COST,
    ),
    "depth": (
        Measure("AUC@5°", "error", _Below(5), headline=True),
        Measure("AUC@10°", "error", _Below(10), headline=True),
        Measure("AUC@20°", "error", _Below(20), headline=True),
        Measure("precision@3 px", "precision3", headline=True),
        Measure("recall@3 px", "recall3", headline=True),
        Measure("right@3 px", "right", digits=0),
        Measure("precision@10 px", "precision10"),
        Measure("right@10 px", "right10", digits=0),
        *_COST,
    ),
    "correspondences": (
        *_MATCHES,
        Measure("labels@3 px", "labels3", headline=True),
        Measure("labels@1…10 px", "labels10", headline=True),
        *_COST,
    ),
    "unrelated": (
        Measure("matches, median", "matches", median, digits=1, headline=True),
        Measure("accepted", "accepted", headline=True),
        *_COST,
    ),
}
_MEANING = {
    "homography": "AUC of the mean corner error in image 1; precision and recall by the mean reprojection "
    "error of both directions, possible matches being mutual nearest keypoints under the truth, found if "
    "either keypoint has a right match (a place often has several keypoints); repeatability: share of the "
    "keypoints whose place the other view shows that have one there within 3 px; the oracle returns all of "
    "them within 3 px, so a matcher that keeps only the exact ones may pass it where views are easy",
    "pose": "AUC of max(rotation, translation angle), the translation's sign free; precision by the "
    "symmetric epipolar distance",
    "depth": "AUC of max(rotation, translation angle), the translation's sign free; precision and recall by "
    "the reprojection error in image 1, matches of unknown depth and at the edges of surfaces not judged, "
    "matches of what image 1 does not show being wrong; right: such matches",
    "correspondences": "matches of unlabelled pixels are not judged, and none is where labels are few; "
    "labels: share of the labelled points within 3 px of the epipolar lines of the estimated fundamental "
    "matrix, and the mean of that share over 1, 2, … 10 px (mAA@10 of WxBS)",
    "unrelated": "every match is wrong; accepted: share of pairs whose estimated geometry has status ok",
}
_ESTIMATORS = {
    "homography": "OpenCV USAC_MAGSAC, refined by PoseLib",
    "essential": "PoseLib LO-RANSAC",
    "fundamental": "OpenCV USAC_MAGSAC",
}


def as_object(evaluation: Evaluation, *, seed: int = 0) -> dict[str, Any]:
    """The evaluation as plain values for `json.dumps`; NaN becomes None.

    Args:
        evaluation: what was measured.
        seed: of the bootstrap.
    """
    named = sorted({group for groups in evaluation.groups for group in groups}, key=_group_order)
    everything = np.arange(len(evaluation.groups))
    by_group = {g: np.flatnonzero([g in groups for groups in evaluation.groups]) for g in named}
    by_group = by_group if len(named) > 1 else {}
    rows = []
    for name in evaluation.values:
        row = {"name": name, **_source(evaluation, name), "all": _figures(evaluation, name, everything, seed)}
        row["groups"] = {group: _figures(evaluation, name, at, seed) for group, at in by_group.items()}
        if NEAREST in evaluation.values and name != NEAREST:
            row["minus_nearest"] = _differences(evaluation, name, seed)
        rows.append(row)
    return {
        **_header(evaluation, seed),
        "pairs_by_group": {g: len(at) for g, at in by_group.items()},
        "rows": rows,
    }


def _group_order(group: str) -> tuple[str | int, ...]:
    """Numbers in a name count as numbers."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", group))


def as_markdown(found: dict[str, Any]) -> str:
    """Tables of the object that `as_object` made: everything, differences from `nearest`, groups."""
    measures = MEASURES[found["protocol"]]
    shown = [m for m in measures if m.title != "layers" or any(row["depth"] for row in found["rows"])]
    lines = [f"## {found['set']}", "", *_preamble(found), "", *_head(["", *(m.title for m in shown)])]
    for row in found["rows"]:
        lines.append(_line([row["name"], *(_cell(row["all"][m.title], m) for m in shown)]))
    head = [m for m in measures if m.headline]
    compared = [row for row in found["rows"] if "minus_nearest" in row]
    if compared:
        lines += ["", "Difference from `nearest` on the same pairs:", ""]
        lines += _head(["", *(m.title for m in head)])
        lines += [
            _line([r["name"], *(_cell(r["minus_nearest"][m.title], m, "+") for m in head)]) for r in compared
        ]
    if found["pairs_by_group"]:
        lines += ["", "By group:", "", *_head(["group", "pairs", "", *(m.title for m in head)])]
        for group, count in found["pairs_by_group"].items():
            for row in found["rows"]:
                cells = (_number(row["groups"][group][m.title]["value"], m) for m in head)
                lines.append(_line([group, str(count), row["name"], *cells]))
    return "\n".join(lines) + "\n"


def _header(evaluation: Evaluation, seed: int) -> dict[str, Any]:
    pipeline = evaluation.rows[0].pipeline
    extractor, config = pipeline.config.extractor, pipeline.config.estimation
    kind = GEOMETRY[evaluation.set.protocol]
    threshold = config.max_reprojection_error if kind == "homography" else config.max_epipolar_error
    counts = [row["keypoints"] for row in evaluation.values.values()]
    return {
        "set": evaluation.set.name,
        "note": evaluation.set.note,
        "protocol": evaluation.set.protocol,
        "meaning": _MEANING[evaluation.set.protocol],
        "pairs": len(evaluation.names),
        "skipped": list(evaluation.skipped),
        "max_keypoints": extractor.max_keypoints,
        "mean_keypoints": float(np.mean(counts[0])),
        "resize": extractor.resize if evaluation.set.shorter_side is None else None,
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
    for entrant in evaluation.rows:
        if entrant.name == name:
            weights = entrant.pipeline.weights
            return {
                "preset": entrant.pipeline.preset,
                "weights": None if weights is None else {"name": weights.name, "sha256": weights.sha256},
                "depth": depth(entrant.pipeline.config),
            }
    return {"preset": None, "weights": None, "depth": 0}


def _figures(evaluation: Evaluation, name: str, at: np.ndarray, seed: int) -> dict[str, Any]:
    draws = resample(len(at), seed)
    return {
        m.title: _plain(estimate(evaluation.values[name][m.key][:, at], m.statistic, draws))
        for m in MEASURES[evaluation.set.protocol]
    }


def _differences(evaluation: Evaluation, name: str, seed: int) -> dict[str, Any]:
    draws = resample(len(evaluation.names), seed)
    ours, theirs = evaluation.values[name], evaluation.values[NEAREST]
    return {
        m.title: _plain(difference(ours[m.key], theirs[m.key], m.statistic, draws))
        for m in MEASURES[evaluation.set.protocol]
        if m.headline
    }


def _plain(figure: Estimate) -> dict[str, float | None]:
    return {key: round(value, 6) if np.isfinite(value) else None for key, value in asdict(figure).items()}


def _preamble(found: dict[str, Any]) -> list[str]:
    estimator, skipped = found["estimator"], found["skipped"]
    seeds = len(estimator["seeds"])
    size = (
        f"longer side at most {found['resize']} px"
        if found["shorter_side"] is None
        else f"shorter side {found['shorter_side']} px"
    )
    lines = [
        f"{found['pairs']} pairs, {len(skipped)} skipped; at most {found['max_keypoints']} keypoints "
        f"(mean {found['mean_keypoints']:.0f}), {size}; {estimator['geometry']} by {estimator['method']} at "
        f"{estimator['threshold_px']:g} px{f', mean of {seeds} seeds' if seeds > 1 else ''}; 95 % intervals "
        "by bootstrap over pairs.",
        f"{found['meaning'][0].upper()}{found['meaning'][1:]}. Pixels are those of the pictures as matched.",
    ]
    if found["note"]:
        lines.append(f"{found['note'][0].upper()}{found['note'][1:]}.")
    return [*lines, *(f"- skipped, {count} times: {reason}" for reason, count in Counter(skipped).items())]


def _head(titles: Sequence[str]) -> list[str]:
    return [_line(titles), _line(["---"] * len(titles))]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(figure: dict[str, float | None], measure: Measure, sign: str = "") -> str:
    value = _number(figure["value"], measure, sign)
    if figure["low"] is None or not measure.headline:
        return value
    return f"{value} ({_number(figure['low'], measure, sign)} – {_number(figure['high'], measure, sign)})"


def _number(value: float | None, measure: Measure, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.{measure.digits}f}"
