"""Every pair of a set through every pipeline: features once a picture, matches once a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from matcher.config import ExtractorConfig, GeometryKind
from matcher.data.matches import Matches
from matcher.errors import ImageError
from matcher.lab.evaluate.judge import Observation, Truth, judge, oracle, true_matches
from matcher.lab.pairs.protocols import Pair, PairSet, Picture
from matcher.pipeline import Pipeline
from matcher.verify.estimation import RobustEstimator

ORACLE = "oracle"
_KEPT = 64  # pictures whose features are kept for the pairs to come
GEOMETRY: dict[str, GeometryKind] = {
    "homography": "homography",
    "pose": "essential",
    "depth": "essential",
    "correspondences": "fundamental",
    "unrelated": "fundamental",
}
Progress = Callable[[int, int], None]  # pairs done, of how many


@dataclass(frozen=True, eq=False)
class Entrant:
    """A row of the table: a pipeline under a name."""

    name: str
    pipeline: Pipeline


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The measures of every row on every pair, before they are summarised."""

    set: PairSet
    rows: tuple[Entrant, ...]
    seeds: tuple[int, ...]  # of the estimator
    names: tuple[str, ...]  # of the pairs that were measured
    groups: tuple[tuple[str, ...], ...]  # of the same pairs, each all that it is in
    values: dict[str, dict[str, np.ndarray]]  # row → measure → (S, n)
    skipped: tuple[str, ...]  # why, a message a pair


@dataclass(eq=False)
class _Tally:
    names: list[str] = field(default_factory=list)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    found: dict[str, list[dict[str, float | np.ndarray]]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FrontEndKey:
    """What decides a picture's features: features of two pipelines are the same where these are."""

    config: ExtractorConfig
    weights: str | None  # file; None: the shipped or fetched ones, or none
    precision: str

    @staticmethod
    def of(pipeline: Pipeline) -> FrontEndKey:
        """Of a pipeline's front end."""
        extractor = pipeline.extractor
        weights = getattr(extractor, "weights", None)
        return FrontEndKey(
            pipeline.config.extractor,
            None if weights is None else str(weights),
            str(getattr(extractor, "dtype", "")),
        )


class _Observer:
    """Opens pictures and extracts their features, keeping those of the last pictures."""

    def __init__(self, shorter_side: int | None) -> None:
        self.shorter_side = shorter_side
        self.kept: OrderedDict[tuple[FrontEndKey, str], Observation] = OrderedDict()

    def __call__(self, picture: Picture, pipeline: Pipeline) -> Observation:
        key = (FrontEndKey.of(pipeline), str(picture.path))
        if picture.pixels is None and key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        image = picture.open(pipeline.config.extractor.resize, self.shorter_side)
        features = pipeline.extractor([image])[0]
        seen = Observation(features, replace(image, pixels=np.zeros((0, 0), np.uint8), mask=None))
        if picture.pixels is None:
            self.kept[key] = seen
            while len(self.kept) > _KEPT:
                self.kept.popitem(last=False)
        return seen


def evaluate(
    pair_set: PairSet, entrants: Sequence[Entrant], *, seeds: int = 1, progress: Progress | None = None
) -> Evaluation:
    """Measure every entrant on the same pairs, with the same features where the front end is the same.

    Args:
        pair_set: the benchmark.
        entrants: rows of the table; where the truth allows it, an oracle row is added for each front end.
        seeds: how many seeds of the estimator; only the essential one has any.
        progress: called after every pair.

    Returns:
        What was measured; pairs with a picture that cannot be read are skipped and said.

    Raises:
        ImageError: no pair could be read; the message is the first pair's.
    """
    used = tuple(range(seeds)) if GEOMETRY[pair_set.protocol] == "essential" else (0,)
    tally, observe = _Tally(), _Observer(pair_set.shorter_side)
    for position in range(len(pair_set)):
        try:
            pair = pair_set.pairs[position]
            sides = [(observe(pair.image0, e.pipeline), observe(pair.image1, e.pipeline)) for e in entrants]
        except ImageError as error:
            tally.skipped.append(str(error))
        else:
            first = not tally.names
            for name, found in _measure(pair, pair_set, entrants, sides, used, warm_up=first).items():
                tally.found.setdefault(name, []).append(found)
            tally.names.append(pair.name)
            tally.groups.append(pair.groups)
        if progress is not None:
            progress(position + 1, len(pair_set))
    if not tally.names:
        raise ImageError(f"{pair_set.name}: no pair could be read; the first: {tally.skipped[0]}")
    values = {name: _columns(rows, len(used)) for name, rows in tally.found.items()}
    return Evaluation(
        pair_set,
        tuple(entrants),
        used,
        tuple(tally.names),
        tuple(tally.groups),
        values,
        tuple(tally.skipped),
    )


def _measure(
    pair: Pair,
    pair_set: PairSet,
    entrants: Sequence[Entrant],
    sides: Sequence[tuple[Observation, Observation]],
    seeds: Sequence[int],
    *,
    warm_up: bool,
) -> dict[str, dict[str, float | np.ndarray]]:
    found, truths = {}, _truths(pair, entrants, sides)
    for entrant, (side0, side1) in zip(entrants, sides, strict=True):
        front_end = FrontEndKey.of(entrant.pipeline)
        estimators = _estimators(entrant.pipeline, pair_set, seeds)
        if warm_up:  # the first call of a process pays for things that the others do not
            entrant.pipeline.match_features(side0.features, side1.features)
        matches, milliseconds = _timed(entrant.pipeline, side0, side1)
        found[entrant.name] = judge(pair, side0, side1, matches, truths[front_end], estimators)
        found[entrant.name]["milliseconds"] = milliseconds
    if pair_set.oracle:
        found |= _oracles(pair, pair_set, entrants, sides, truths, seeds)
    return found


def _truths(
    pair: Pair, entrants: Sequence[Entrant], sides: Sequence[tuple[Observation, Observation]]
) -> dict[FrontEndKey, Truth | None]:
    truths: dict[FrontEndKey, Truth | None] = {}
    for entrant, (side0, side1) in zip(entrants, sides, strict=True):
        front_end = FrontEndKey.of(entrant.pipeline)
        if front_end not in truths:
            truths[front_end] = true_matches(pair, side0, side1)
    return truths


def _oracles(
    pair: Pair,
    pair_set: PairSet,
    entrants: Sequence[Entrant],
    sides: Sequence[tuple[Observation, Observation]],
    truths: dict[FrontEndKey, Truth | None],
    seeds: Sequence[int],
) -> dict[str, dict[str, float | np.ndarray]]:
    """A row for every front end; the estimator is the one of the last entrant that has it."""
    found = {}
    for entrant, (side0, side1) in zip(entrants, sides, strict=True):
        front_end = FrontEndKey.of(entrant.pipeline)
        name = ORACLE if len(truths) == 1 else f"{ORACLE} ({_title(front_end, truths)})"
        truth = truths[front_end]
        matches = oracle(truth, side0, side1)
        estimators = _estimators(entrant.pipeline, pair_set, seeds)
        found[name] = judge(pair, side0, side1, matches, truth, estimators)
        found[name] |= {"layers": np.nan, "kept": np.nan, "milliseconds": np.nan}
    return found


def _title(front_end: FrontEndKey, all_of_them: Iterable[FrontEndKey]) -> str:
    """What tells a front end from the others: its kind, and of several of one kind their files, precision."""
    alike = [other for other in all_of_them if other.config.kind == front_end.config.kind]
    words = [front_end.config.kind]
    if len({other.weights for other in alike}) > 1:
        words.append("shipped" if front_end.weights is None else front_end.weights)
    if len({other.precision for other in alike}) > 1:
        words.append(front_end.precision.removeprefix("torch."))
    return " ".join(words)


def _estimators(pipeline: Pipeline, pair_set: PairSet, seeds: Sequence[int]) -> list[RobustEstimator]:
    config = replace(pipeline.config.estimation, kind=GEOMETRY[pair_set.protocol])
    return [RobustEstimator(replace(config, seed=seed)) for seed in seeds]


def _timed(pipeline: Pipeline, side0: Observation, side1: Observation) -> tuple[Matches, float]:
    """Matches of one pair, and the milliseconds that the match stage took."""
    start = perf_counter()
    matches = pipeline.match_features_batch([(side0.features, side1.features)])[0]
    return matches, 1e3 * (perf_counter() - start)


def _columns(rows: Sequence[dict[str, float | np.ndarray]], seeds: int) -> dict[str, np.ndarray]:
    """Measure → (S, n)."""
    return {
        key: np.stack([np.broadcast_to(np.asarray(row[key], dtype=np.float64), (seeds,)) for row in rows], 1)
        for key in rows[0]
    }
