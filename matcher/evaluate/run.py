"""Run methods on a set of pairs: features once per image and front end, matches once per method."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from matcher.config import ExtractorConfig, GeometryKind, NearestConfig, depth
from matcher.errors import ImageError, IntegrityError, UsageError
from matcher.evaluate.measure import (
    COVERAGE,
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
from matcher.images import ImageInput
from matcher.loading import load
from matcher.pipeline import FURTHER_PASSES, Pipeline
from matcher.presets import PRESETS, find_plugin, find_preset
from matcher.result import Result
from matcher.types import Matches
from matcher.verify.estimation import RobustEstimator
from matcher.weights.files import read_header

# --- run: Run methods on a set of pairs: features once per image and front end, matches once per method.

ORACLE = "oracle"
_CACHED_IMAGES = 64  # whose features are kept for later pairs
GEOMETRY: dict[str, GeometryKind] = {
    "homography": "homography",
    "pose": "essential",
    "depth": "essential",
    "correspondences": "fundamental",
    "unrelated": "fundamental",
}


@dataclass(frozen=True, eq=False)
class Method:
    """A row of the table: a pipeline and its name."""

    name: str
    pipeline: Pipeline


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


@dataclass(eq=False)
class _Results:
    """What has been measured so far."""

    names: list[str] = field(default_factory=list)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    metrics: dict[str, list[dict[str, float | np.ndarray]]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


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
        extractor = pipeline.extractor
        weights = getattr(extractor, "weights", None)
        return FrontEndKey(
            pipeline.config.extractor,
            None if weights is None else str(weights),
            str(getattr(extractor, "dtype", "")),
            None if pipeline.preset in PRESETS else pipeline.preset,
        )


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
        features = find([image])[0]
        extracted = ImageFeatures(features, replace(image, pixels=np.zeros((0, 0), np.uint8), mask=None))
        if source.pixels is None:
            self.kept[key] = extracted
            while len(self.kept) > _CACHED_IMAGES:
                self.kept.popitem(last=False)
        return extracted


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
    results, extract = _Results(), _FeatureCache(pair_set.shorter_side)
    for index in range(len(pair_set)):
        try:
            pair = pair_set.pairs[index]
            sides = [(extract(pair.image0, m.pipeline), extract(pair.image1, m.pipeline)) for m in methods]
        except ImageError as error:
            results.skipped.append(str(error))
        else:
            warm_up = not results.names
            for name, metrics in _measure(pair, pair_set, methods, sides, used, warm_up=warm_up).items():
                results.metrics.setdefault(name, []).append(metrics)
            results.names.append(pair.name)
            results.groups.append(pair.groups)
        if progress is not None:
            progress(index + 1, len(pair_set))
    if not results.names:
        raise ImageError(f"{pair_set.name}: no pair could be read; the first: {results.skipped[0]}")
    return Evaluation(
        set=pair_set,
        methods=tuple(methods),
        seeds=used,
        names=tuple(results.names),
        groups=tuple(results.groups),
        values={name: _stack(rows, len(used)) for name, rows in results.metrics.items()},
        skipped=tuple(results.skipped),
    )


def _measure(
    pair: Pair,
    pair_set: PairSet,
    methods: Sequence[Method],
    sides: Sequence[tuple[ImageFeatures, ImageFeatures]],
    seeds: Sequence[int],
    *,
    warm_up: bool,
) -> dict[str, dict[str, float | np.ndarray]]:
    found, ground_truths = {}, _ground_truths(pair, methods, sides)
    for method, (side0, side1) in zip(methods, sides, strict=True):
        front_end = FrontEndKey.of(method.pipeline)
        estimators = _estimators(method.pipeline, pair_set, seeds)
        if warm_up:  # the first call of a process is slower than later ones
            method.pipeline.match_features(side0.features, side1.features)
        ground_truth, passes = ground_truths[front_end], 1
        if method.pipeline.passes is None:
            matches, milliseconds = _timed(method.pipeline, side0, side1)
            if method.pipeline.config.refine is not None:
                matches = method.pipeline.refine(*_sources(pair, pair_set.shorter_side), matches)
        else:
            result, milliseconds = _matched(method.pipeline, pair, pair_set.shorter_side)
            matches, passes = result.matches, max(1, len(result.passes))
            side0, side1 = (
                replace(side0, features=result.features0),
                replace(side1, features=result.features1),
            )
            if passes > 1:
                ground_truth = find_ground_truth(pair, side0, side1)
        measured = measure_pair(
            pair, side0, side1, matches, ground_truth, estimators, several_passes=passes > 1
        )
        found[method.name] = measured | {"milliseconds": milliseconds, "passes": float(passes)}
    if pair_set.oracle:
        found |= _oracles(pair, pair_set, methods, sides, ground_truths, seeds)
    return found


def _matched(pipeline: Pipeline, pair: Pair, shorter_side: int | None) -> tuple[Result, float]:
    """The pair from its images by as many passes as it needs, and the milliseconds after extraction."""
    result = pipeline.match(*_sources(pair, shorter_side))
    return result, 1e3 * (result.seconds["match"] + result.seconds.get(FURTHER_PASSES, 0.0))


def _sources(pair: Pair, shorter_side: int | None) -> list[ImageInput]:
    """Both images, with all their pixels unless a set prescribes a size."""
    sources = (pair.image0, pair.image1)
    if shorter_side is not None:
        return [source.open(None, shorter_side) for source in sources]
    return [source.path if source.pixels is None else source.pixels for source in sources]


def _ground_truths(
    pair: Pair, methods: Sequence[Method], sides: Sequence[tuple[ImageFeatures, ImageFeatures]]
) -> dict[FrontEndKey, GroundTruth | None]:
    ground_truths: dict[FrontEndKey, GroundTruth | None] = {}
    for method, (side0, side1) in zip(methods, sides, strict=True):
        front_end = FrontEndKey.of(method.pipeline)
        if front_end not in ground_truths:
            ground_truths[front_end] = find_ground_truth(pair, side0, side1)
    return ground_truths


def _oracles(
    pair: Pair,
    pair_set: PairSet,
    methods: Sequence[Method],
    sides: Sequence[tuple[ImageFeatures, ImageFeatures]],
    ground_truths: dict[FrontEndKey, GroundTruth | None],
    seeds: Sequence[int],
) -> dict[str, dict[str, float | np.ndarray]]:
    """A row for each front end, with the robust estimator of the last method that uses it."""
    found = {}
    for method, (side0, side1) in zip(methods, sides, strict=True):
        front_end = FrontEndKey.of(method.pipeline)
        several, ground_truth = len(ground_truths) > 1, ground_truths[front_end]
        name = f"{ORACLE} ({_front_end_name(front_end, ground_truths)})" if several else ORACLE
        matches = oracle(ground_truth, side0, side1)
        estimators = _estimators(method.pipeline, pair_set, seeds)
        found[name] = measure_pair(pair, side0, side1, matches, ground_truth, estimators)
        found[name] |= dict.fromkeys(("layers", "kept", "milliseconds", "passes"), np.nan)
    return found


def _front_end_name(front_end: FrontEndKey, others: Iterable[FrontEndKey]) -> str:
    """The kind, and among several of one kind also the weights file and precision if they differ."""
    same_kind = [other for other in others if other.config.kind == front_end.config.kind]
    words = [front_end.config.kind]
    if len({other.weights for other in same_kind}) > 1:
        words.append("shipped" if front_end.weights is None else front_end.weights)
    if len({other.precision for other in same_kind}) > 1:
        words.append(front_end.precision.removeprefix("torch."))
    return " ".join(words)


def _estimators(pipeline: Pipeline, pair_set: PairSet, seeds: Sequence[int]) -> list[RobustEstimator]:
    config = replace(pipeline.config.estimation, kind=GEOMETRY[pair_set.protocol])
    return [RobustEstimator(replace(config, seed=seed)) for seed in seeds]


def _timed(pipeline: Pipeline, side0: ImageFeatures, side1: ImageFeatures) -> tuple[Matches, float]:
    """The matches of one pair, and the milliseconds that matching took."""
    start = perf_counter()
    matches = pipeline.match_features_batch([(side0.features, side1.features)])[0]
    return matches, 1e3 * (perf_counter() - start)


def _stack(rows: Sequence[dict[str, float | np.ndarray]], seeds: int) -> dict[str, np.ndarray]:
    """Metric → (S, n), from one dictionary per pair."""
    return {
        key: np.stack([np.broadcast_to(np.asarray(row[key], dtype=np.float64), (seeds,)) for row in rows], 1)
        for key in rows[0]
    }


# --- methods: Which methods an evaluation measures, from presets, weights files and front-end files.

SHIPPED = "shipped"
_FULL_DEPTH = {"early_exit": False, "pruning": False}


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
    _refuse_useless(presets, weights, front_ends, options)
    kinds = {_front_end_of(name) for name in (*presets, "nearest")}
    nearest = [name for name in PRESETS if _is_nearest(name) and PRESETS[name].extractor.kind in kinds]
    chosen = [(name, None) for name in nearest]
    chosen += [(name, file) for name in presets if name not in nearest for file in (weights or [None])]
    methods = {}
    for name, file in chosen:
        for front_end, title in _front_ends(_front_end_of(name), front_ends):
            words = (name, "" if file is None else _short(file, weights), title)
            for method in _variants(" ".join(filter(None, words)), name, file, front_end, options):
                methods[method.name] = method
    return list(methods.values())


def _refuse_useless(
    presets: Sequence[str], weights: Sequence[Path], front_ends: Sequence[str], options: MethodOptions
) -> None:
    """`UsageError` for what no preset that was chosen has a use for."""
    networks = [name for name in presets if not _is_nearest(name)]
    threshold = options.network.get("match_threshold") is not None
    without = {"weights": weights, "full_depth": options.full_depth, "match_threshold": threshold}
    useless = [name for name, given in without.items() if given and not networks]
    if front_ends and "learned" not in map(_front_end_of, presets):
        useless.append("frontend_weights")
    if useless:
        raise UsageError(f"{', '.join(presets)}: {useless[0]} has no effect with these presets; leave it out")


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
    paths = [Path(text) for text in compared]
    methods = []
    for text, path in zip(compared, paths, strict=True):
        name, given = preset, {"weights": weights, "frontend_weights": front_end}
        if text in PRESETS or find_plugin(text):
            name, title = text, text
        elif text == SHIPPED:
            title = f"{preset} shipped"
        else:
            given[_kind_of_file(text)] = path
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
    elif _front_end_of(preset) == "learned":
        given["precision"] = options.network.get("precision")
    yield Method(title, load(preset, **given))
    if options.full_depth and not _is_nearest(preset):
        yield Method(f"{title}, full depth", load(preset, **given, **_FULL_DEPTH))


def _is_nearest(preset: str) -> bool:
    return preset in PRESETS and isinstance(PRESETS[preset].matcher, NearestConfig)


def _front_end_of(preset: str) -> str | None:
    """The kind of a preset's front end; None where another package adds it."""
    return None if preset not in PRESETS and find_plugin(preset) else find_preset(preset).extractor.kind


def _front_ends(kind: str | None, files: Sequence[str]) -> list[tuple[str | None, str]]:
    """The weights files of a preset's front end, each with what it adds to the method's name."""
    if kind != "learned" or not files:
        return [(None, "")]
    paths = [Path(file) for file in files]
    return [
        (None, "with the shipped front end") if file == SHIPPED else (file, f"with {_short(path, paths)}")
        for file, path in zip(files, paths, strict=True)
    ]


def _kind_of_file(text: str) -> str:
    """The option of `load` that a weights file is for, by its header."""
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--compare {text}: neither a preset nor a file; see `matcher presets`")
    try:
        return "frontend_weights" if "frontend" in read_header(path.read_bytes()) else "weights"
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}: give a weights file written by `matcher train`") from error


def _short(file: Path, files: Sequence[Path]) -> str:
    """The file's stem, or its whole path if another file has the same stem."""
    return file.stem if sum(other.stem == file.stem for other in files) == 1 else str(file)


# --- columns: The columns of the tables: for each protocol, which metrics are reported and how they are
# averaged.


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
    """The area under the cumulative curve of errors up to a threshold."""

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


# --- tables: An `Evaluation` as tables: Markdown for people, JSON for programs; both state how they were
# measured.

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
