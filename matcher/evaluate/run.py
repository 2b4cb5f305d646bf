"""Methods measured on a set of pairs with ground truth, and the tables of `matcher evaluate`.

Features are extracted once per image and front end, and matched once per method.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from matcher.config import ExtractorConfig, GeometryKind, NearestConfig, depth
from matcher.errors import ImageError, IntegrityError, UsageError
from matcher.evaluate.measure import (
    Estimate,
    GroundTruth,
    ImageFeatures,
    Statistic,
    auc,
    difference,
    estimate,
    find_ground_truth,
    mean,
    measure_pair,
    median,
    oracle,
    resample,
)
from matcher.evaluate.protocols import Pair, PairImage, PairSet
from matcher.loading import load
from matcher.pipeline import FURTHER_PASSES, Pipeline
from matcher.presets import PRESETS, find_plugin, find_preset
from matcher.verify.estimation import RobustEstimator
from matcher.weights.files import read_header

ORACLE = "oracle"
BASELINE = "nearest"
SHIPPED = "shipped"
GEOMETRY: dict[str, GeometryKind] = {
    "homography": "homography",
    "pose": "essential",
    "depth": "essential",
    "correspondences": "fundamental",
    "unrelated": "fundamental",
}
_CACHED_IMAGES = 64  # whose features are kept for later pairs: some tens of megabytes

# What is measured: a method for each preset, weights file and front-end file


@dataclass(frozen=True, eq=False)
class Method:
    """A row of the table: a pipeline and its name."""

    name: str
    pipeline: Pipeline


@dataclass(frozen=True)
class MethodOptions:
    """What all methods of an evaluation have in common."""

    common: Mapping[str, Any] = field(default_factory=dict)  # options of `load` for every preset
    network: Mapping[str, Any] = field(default_factory=dict)  # and for presets with a network
    full_depth: bool = False  # also measure each network without early exit and pruning


def build_methods(
    presets: Sequence[str],
    weights: Sequence[Path] = (),
    front_ends: Sequence[str] = (),
    options: MethodOptions | None = None,
) -> list[Method]:
    """A method for every combination of preset, weights file and front-end file.

    `nearest`, and nearest neighbours on the same keypoints, come first and are always measured.

    Args:
        presets: names in `PRESETS`, or of presets that other packages add.
        weights: files of the matcher's weights; without any, those of the presets.
        front_ends: files of the learned front end's weights, "shipped" for the preset's own; without any,
            those of the presets.
        options: common to all methods.

    Raises:
        UsageError: an unknown preset, or options or files that a preset cannot use.
        IntegrityError: weights that are absent, damaged or of another network.
    """
    options = options or MethodOptions()
    kinds = {name: _front_end_kind(name) for name in (*presets, "nearest")}
    no_network = all(map(_is_nearest, presets))
    useless = {
        "weights": weights and no_network,
        "full_depth": options.full_depth and no_network,
        "match_threshold": options.network.get("match_threshold") is not None and no_network,
        "frontend_weights": front_ends and "learned" not in [kinds[name] for name in presets],
    }
    for name, given in useless.items():
        if given:
            raise UsageError(f"{', '.join(presets)}: {name} has no effect with these presets; leave it out")
    nearest = [n for n in PRESETS if _is_nearest(n) and PRESETS[n].extractor.kind in kinds.values()]
    chosen = [(name, None) for name in nearest]
    chosen += [(name, file) for name in presets if name not in nearest for file in (weights or [None])]
    methods = {}
    for name, file in chosen:
        files = front_ends if _front_end_kind(name) == "learned" and front_ends else [None]
        for front_end in files:
            title = name if file is None else f"{name} {_short(file, weights)}"
            if front_end == SHIPPED:
                title, front_end = f"{title} with the shipped front end", None
            elif front_end is not None:
                title += f" with {_short(Path(front_end), [Path(each) for each in files])}"
            for method in _variants(title, name, file, front_end, options):
                methods[method.name] = method
    return list(methods.values())


def compared_methods(
    compared: Sequence[str],
    preset: str,
    weights: Path | None = None,
    front_end: str | None = None,
    options: MethodOptions | None = None,
) -> list[Method]:
    """Exactly the methods that are to be compared; the first is the baseline of the others.

    Args:
        compared: presets, files of a matcher's weights, or files of a front end's weights; "shipped" is
            `preset` with its own files.
        preset: what the files are used with.
        weights: of the matcher, for every method that does not name its own.
        front_end: file of the front end's weights, for every method that does not name its own.
        options: common to all methods.

    Raises:
        UsageError: fewer than two different methods, or neither a preset nor a file.
        IntegrityError: weights that are absent, damaged or of another network.
    """
    options = options or MethodOptions()
    if len(set(compared)) < max(2, len(compared)):
        raise UsageError("--compare needs at least two different presets or weights files; repeat the option")
    paths, methods = [Path(text) for text in compared], []
    for text, path in zip(compared, paths, strict=True):
        name, given = preset, {"weights": weights, "frontend_weights": front_end}
        if text in PRESETS or find_plugin(text):
            name, title = text, text
        elif text == SHIPPED:
            title = f"{preset} shipped"
        else:
            given[_option_for(path)] = path
            title = f"{preset} {_short(path, paths)}"
        methods += _variants(title, name, given["weights"], given["frontend_weights"], options)
    return methods


def _variants(
    title: str, preset: str, weights: Path | None, front_end: str | Path | None, options: MethodOptions
) -> Iterator[Method]:
    """The method itself and, where asked for, the same at full depth."""
    given = {**options.common, "weights": weights, "frontend_weights": front_end}
    if not _is_nearest(preset):
        given |= options.network
    elif _front_end_kind(preset) == "learned":
        given["precision"] = options.network.get("precision")
    yield Method(title, load(preset, **given))
    if options.full_depth and not _is_nearest(preset):
        yield Method(f"{title}, full depth", load(preset, **given, early_exit=False, pruning=False))


def _is_nearest(preset: str) -> bool:
    return preset in PRESETS and isinstance(PRESETS[preset].matcher, NearestConfig)


def _front_end_kind(preset: str) -> str | None:
    """The kind of a preset's front end; None where another package adds it."""
    return None if preset not in PRESETS and find_plugin(preset) else find_preset(preset).extractor.kind


def _option_for(path: Path) -> str:
    """The option of `load` that a weights file is for, by its header."""
    if not path.is_file():
        raise UsageError(f"--compare {path}: neither a preset nor a file; see `matcher presets`")
    try:
        return "frontend_weights" if "frontend" in read_header(path.read_bytes()) else "weights"
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}: give a weights file written by `matcher train`") from error


def _short(file: Path, files: Sequence[Path]) -> str:
    """The file's stem, or its whole path if another file has the same stem."""
    return file.stem if sum(other.stem == file.stem for other in files) == 1 else str(file)


# Measuring


@dataclass(frozen=True)
class FrontEndKey:
    """Everything that an image's features depend on: pipelines with equal keys share features."""

    config: ExtractorConfig
    weights: str | None  # a file; None for shipped or fetched weights, or a front end without any
    precision: str
    preset: str | None  # of another package, or "custom": its configuration does not say what it finds

    @staticmethod
    def of(pipeline: Pipeline) -> FrontEndKey:
        """The key of a pipeline's front end."""
        weights = getattr(pipeline.extractor, "weights", None)
        return FrontEndKey(
            pipeline.config.extractor,
            None if weights is None else str(weights),
            str(getattr(pipeline.extractor, "dtype", "")),
            None if pipeline.preset in PRESETS else pipeline.preset,
        )

    def name_among(self, keys: Iterable[FrontEndKey]) -> str:
        """The kind, and among several of one kind also the weights file and precision if they differ."""
        alike, words = [key for key in keys if key.config.kind == self.config.kind], [self.config.kind]
        if len({key.weights for key in alike}) > 1:
            words.append(self.weights or SHIPPED)
        if len({key.precision for key in alike}) > 1:
            words.append(self.precision.removeprefix("torch."))
        return " ".join(words)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics of every method on every pair, before they are averaged."""

    set: PairSet
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]  # of the robust estimator
    names: tuple[str, ...]  # of the n pairs that were measured
    groups: tuple[tuple[str, ...], ...]  # of each of these pairs
    values: dict[str, dict[str, np.ndarray]]  # method (or oracle) → metric → (S, n)
    skipped: tuple[str, ...]  # the reason for each pair that could not be read


def evaluate(
    pair_set: PairSet,
    methods: Sequence[Method],
    *,
    seeds: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure every method on the same pairs, on the same features where the front ends agree.

    Args:
        pair_set: the benchmark.
        methods: rows of the table; where the ground truth allows it, an oracle row is added per front end.
        seeds: number of seeds of the robust estimator; only the essential estimator is random.
        progress: called after every pair with the number of pairs done and their total.

    Returns:
        The metrics; pairs with an image that cannot be read are skipped and listed with the reason.

    Raises:
        ImageError: no pair could be read; the message is that of the first pair.
        UsageError: intrinsics that belong to images of another size.
    """
    used = tuple(range(seeds)) if GEOMETRY[pair_set.protocol] == "essential" else (0,)
    extract, skipped = _FeatureCache(pair_set.shorter_side), []
    pairs: list[tuple[str, tuple[str, ...]]] = []
    rows: dict[str, list[dict[str, float | np.ndarray]]] = {}
    for index in range(len(pair_set)):
        try:
            pair = pair_set.pairs[index]
            sides = [(extract(pair.image0, m.pipeline), extract(pair.image1, m.pipeline)) for m in methods]
        except ImageError as error:
            skipped.append(str(error))
        else:
            if not pairs:  # the first call of a process is slower than later ones
                for method, (side0, side1) in zip(methods, sides, strict=True):
                    method.pipeline.match_features(side0.features, side1.features)
            for name, metrics in _measure(pair, pair_set, methods, sides, used):
                rows.setdefault(name, []).append(metrics)
            pairs.append((pair.name, pair.groups))
        if progress is not None:
            progress(index + 1, len(pair_set))
    if not pairs:
        raise ImageError(f"{pair_set.name}: no pair could be read; the first: {skipped[0]}")
    names, groups = zip(*pairs, strict=True)
    values = {}
    for name, metrics in rows.items():
        columns = {key: [np.asarray(row[key], dtype=np.float64) for row in metrics] for key in metrics[0]}
        values[name] = {
            key: np.stack([np.broadcast_to(value, (len(used),)) for value in column], 1)
            for key, column in columns.items()
        }
    return Evaluation(pair_set, tuple(methods), used, names, groups, values, tuple(skipped))


def _measure(
    pair: Pair,
    pair_set: PairSet,
    methods: Sequence[Method],
    sides: Sequence[tuple[ImageFeatures, ImageFeatures]],
    seeds: Sequence[int],
) -> Iterator[tuple[str, dict[str, float | np.ndarray]]]:
    """Name and metrics of every method, then of the oracle of every front end."""
    keys = [FrontEndKey.of(method.pipeline) for method in methods]
    ground_truths: dict[FrontEndKey, GroundTruth | None] = {}
    for key, both in zip(keys, sides, strict=True):
        if key not in ground_truths:
            ground_truths[key] = find_ground_truth(pair, *both)
    images = [_input(side, pair_set.shorter_side) for side in (pair.image0, pair.image1)]
    oracles = {}
    for method, key, (side0, side1) in zip(methods, keys, sides, strict=True):
        pipeline, ground_truth, passes = method.pipeline, ground_truths[key], 1
        config = replace(pipeline.config.estimation, kind=GEOMETRY[pair_set.protocol])
        estimators = [RobustEstimator(replace(config, seed=seed)) for seed in seeds]
        if pair_set.oracle:  # with the robust estimator of the last method of a front end
            name = f"{ORACLE} ({key.name_among(ground_truths)})" if len(ground_truths) > 1 else ORACLE
            found = measure_pair(
                pair, side0, side1, oracle(ground_truth, side0, side1), ground_truth, estimators
            )
            oracles[name] = found | dict.fromkeys(("layers", "kept", "milliseconds", "passes"), np.nan)
        if pipeline.passes is None:
            start = perf_counter()
            matches = pipeline.match_features_batch([(side0.features, side1.features)])[0]
            seconds = perf_counter() - start
            if pipeline.config.refine is not None:
                matches = pipeline.refine(*(image() for image in images), matches)
        else:  # from the images, as further passes extract again
            result = pipeline.match(*(image() for image in images))
            seconds = result.seconds["match"] + result.seconds.get(FURTHER_PASSES, 0.0)
            matches, passes = result.matches, max(1, len(result.passes))
            side0 = replace(side0, features=result.features0)
            side1 = replace(side1, features=result.features1)
            if passes > 1:
                ground_truth = find_ground_truth(pair, side0, side1)
        found = measure_pair(pair, side0, side1, matches, ground_truth, estimators, several_passes=passes > 1)
        yield method.name, found | {"milliseconds": 1e3 * seconds, "passes": float(passes)}
    yield from oracles.items()


def _input(source: PairImage, shorter_side: int | None) -> Callable[[], Any]:
    """What opens an image for a pipeline: with all its pixels unless the set prescribes a size."""
    if shorter_side is not None:
        return partial(source.open, None, shorter_side)
    return lambda: source.path if source.pixels is None else source.pixels


class _FeatureCache:
    """Opens images and extracts their features, keeping those of the most recent images."""

    def __init__(self, shorter_side: int | None) -> None:
        self.shorter_side = shorter_side
        self.kept: OrderedDict[tuple[FrontEndKey, str], ImageFeatures] = OrderedDict()

    def __call__(self, source: PairImage, pipeline: Pipeline) -> ImageFeatures:
        key = (FrontEndKey.of(pipeline), str(source.path))
        if source.pixels is None and key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        config = pipeline.config.extractor
        image = source.open(config.resize, self.shorter_side, config.soft_resize)
        # The size that a benchmark prescribes is kept.
        find = pipeline.features_of if self.shorter_side is None else pipeline.extractor
        extracted = ImageFeatures(
            find([image])[0], replace(image, pixels=np.zeros((0, 0), np.uint8), mask=None)
        )
        if source.pixels is None:
            self.kept[key] = extracted
            while len(self.kept) > _CACHED_IMAGES:
                self.kept.popitem(last=False)
        return extracted


# The columns of the tables: which metrics a protocol reports, and how they are averaged


@dataclass(frozen=True)
class Column:
    """A metric and the statistic over pairs that summarises it."""

    title: str
    key: str  # of the metric in `measure_pair`
    statistic: Statistic = mean
    digits: int = 3
    headline: bool = False  # reported with its interval, in the comparison with the baseline, and by group


@dataclass(frozen=True)
class _AucUpTo:
    """`auc` as a statistic."""

    threshold: float

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return auc(values, self.threshold)


_COST = (
    Column("matches", "matches", digits=0),
    Column("layers", "layers", digits=2),
    Column("keypoints kept", "kept", digits=2),
    Column("passes", "passes", digits=2),
    Column("ms", "milliseconds", median, digits=1),
)
_STATUS = "`accepted` is the share of pairs whose geometry has status ok in a result; AUC counts all"
_MATCHES = (
    Column("precision@1 px", "precision1"),
    Column("precision@3 px", "precision3", headline=True),
    Column("recall@1 px", "recall1"),
    Column("recall@3 px", "recall3", headline=True),
)
_ACCEPTED = Column("accepted", "accepted")
_POSE = (
    Column("AUC@5°", "error", _AucUpTo(5), headline=True),
    Column("AUC@10°", "error", _AucUpTo(10), headline=True),
    Column("AUC@20°", "error", _AucUpTo(20), headline=True),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "homography": (
        Column("AUC@1 px", "error", _AucUpTo(1), headline=True),
        Column("AUC@3 px", "error", _AucUpTo(3), headline=True),
        Column("AUC@5 px", "error", _AucUpTo(5), headline=True),
        Column("AUC@10 px", "error", _AucUpTo(10), headline=True),
        *_MATCHES,
        Column("correct@3 px", "correct", digits=0),
        Column("error of correct matches, px", "residual", digits=2),
        Column("repeatability@3 px", "repeatability"),
        _ACCEPTED,
        *_COST,
    ),
    "pose": (
        *_POSE,
        Column("epipolar precision@1 px", "precision1"),
        Column("epipolar precision@3 px", "precision3", headline=True),
        _ACCEPTED,
        *_COST,
    ),
    "depth": (
        *_POSE,
        Column("precision@3 px", "precision3", headline=True),
        Column("recall@3 px", "recall3", headline=True),
        Column("correct@3 px", "correct", digits=0),
        Column("precision@10 px", "precision10"),
        Column("correct@10 px", "correct10", digits=0),
        _ACCEPTED,
        *_COST,
    ),
    "correspondences": (
        *_MATCHES,
        Column("labels@3 px", "labels3", headline=True),
        Column("mAA@10 px", "labels10", headline=True),
        *_COST,
    ),
    "unrelated": (
        Column("matches, median", "matches", median, digits=1, headline=True),
        Column("accepted", "accepted", headline=True),
        *_COST,
    ),
}
MEANING = {
    "homography": "AUC is that of the mean corner error in image 1. Precision and recall use the mean "
    "reprojection error of both directions. Ground-truth matches are mutual nearest keypoints under the "
    "ground truth; one counts as found if either of its keypoints has a correct match, as detectors may put "
    "several keypoints at one position. Repeatability is the share of covisible keypoints that are "
    "detected in the other image within 3 px. The oracle returns all ground-truth matches within 3 px; a "
    "method that keeps only the most accurate matches can exceed its AUC on easy views. " + _STATUS,
    "pose": "AUC is that of max(rotation error, translation direction error), the sign of the translation "
    "ignored. Precision uses the symmetric epipolar distance. " + _STATUS,
    "depth": "AUC is that of max(rotation error, translation direction error), the sign of the translation "
    "ignored. Precision and recall use the reprojection error in image 1: matches of points that are "
    "occluded in image 1 are wrong; matches of points with unknown depth or at depth edges are not counted. "
    "`correct` is the number of correct matches. " + _STATUS,
    "correspondences": "Matches of unlabelled pixels are not counted; with sparse labels, precision and "
    "recall are undefined. `labels` is the share of labelled points within 3 px of the epipolar lines of the "
    "estimated fundamental matrix; mAA@10 px is its mean over 1, 2, … 10 px, as WxBS reports it",
    "unrelated": "The images show different things, so every match is wrong. `accepted` is the share of "
    "pairs whose estimated geometry has status ok",
}


# Tables: Markdown for people, JSON for programs; both state how they were measured

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
    columns, pair_set = COLUMNS[evaluation.set.protocol], evaluation.set
    groups = {group for groups in evaluation.groups for group in groups}
    by_group = {
        group: np.flatnonzero([group in groups for groups in evaluation.groups])
        for group in sorted(groups, key=_group_order)
        if len(groups) > 1
    }
    sources = {method.name: method.pipeline for method in evaluation.methods}
    other = evaluation.values.get(baseline)
    rows = []
    for name, values in evaluation.values.items():

        def averages(at: np.ndarray, values: dict[str, np.ndarray] = values) -> dict[str, Any]:
            draws = resample(len(at), seed)
            return {c.title: _plain(estimate(values[c.key][:, at], c.statistic, draws)) for c in columns}

        row = {"name": name, **_source(sources.get(name)), "all": averages(np.arange(len(evaluation.names)))}
        row["groups"] = {group: averages(at) for group, at in by_group.items()}
        if other is not None and name != baseline:
            draws = resample(len(evaluation.names), seed)
            row["minus_baseline"] = {
                c.title: _plain(difference(values[c.key], other[c.key], c.statistic, draws))
                for c in columns
                if c.headline
            }
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
        "mean_keypoints": float(np.mean(next(iter(evaluation.values.values()))["keypoints"])),
        "resize": None if prescribed else extractor.resize,
        "soft_resize": None if prescribed else extractor.soft_resize,
        "shorter_side": pair_set.shorter_side,
        "estimator": {
            "geometry": kind,
            "method": _ESTIMATORS[kind],
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


def _source(pipeline: Pipeline | None) -> dict[str, Any]:
    """What a row was measured with; the oracle's is nothing."""
    weights = None if pipeline is None else pipeline.weights
    return {
        "preset": None if pipeline is None else pipeline.preset,
        "frontend_weights": None if pipeline is None else FrontEndKey.of(pipeline).weights,
        "weights": None if weights is None else {"name": weights.name, "sha256": weights.sha256},
        "depth": 0 if pipeline is None else depth(pipeline.config),
    }


def _plain(estimated: Estimate) -> dict[str, float | None]:
    return {key: round(value, 6) if np.isfinite(value) else None for key, value in asdict(estimated).items()}


def as_markdown(found: dict[str, Any]) -> str:
    """Markdown of what `as_object` returned: all pairs, paired differences from the baseline, groups."""
    columns, rows = COLUMNS[found["protocol"]], found["rows"]
    used = {
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
        f"image (mean {found['mean_keypoints']:.0f}), {size}; {estimator['geometry']} geometry by "
        f"{estimator['method']} at {estimator['threshold_px']:g} px{seeds}; 95 % intervals by bootstrap over "
        "pairs.",
        f"{found['meaning']}. All pixels are those of the resized images.",
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
