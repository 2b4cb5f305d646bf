"""Run methods on a set of pairs: features once per image and front end, matches once per method."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from matcher.config import ExtractorConfig, GeometryKind
from matcher.data.images import ImageInput
from matcher.data.matches import Matches
from matcher.errors import ImageError
from matcher.lab.evaluate.measure import (
    GroundTruth,
    ImageFeatures,
    find_ground_truth,
    measure_pair,
    oracle,
)
from matcher.lab.pairs.protocols import Pair, PairImage, PairSet
from matcher.pipeline import FURTHER_PASSES, Pipeline
from matcher.presets import PRESETS
from matcher.result import Result
from matcher.verify.estimation import RobustEstimator

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
