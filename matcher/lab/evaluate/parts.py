"""A preset with one of its parts switched off, and what its decisions cost on pairs that need no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import Any

import numpy as np

from matcher.config import NetworkConfig, PipelineConfig
from matcher.errors import UsageError
from matcher.lab.evaluate.calibration import as_inputs
from matcher.lab.evaluate.run import Method
from matcher.lab.pairs.protocols import Pair
from matcher.loading import build_pipeline
from matcher.pipeline import Pipeline
from matcher.presets import find_preset

ALL = "all parts"
_REPEATS = 5  # of each timing, of which the median counts


_PASSES: dict[str, dict[str, Any]] = {  # fields of the further passes, as they are without a part
    "scale search and negatives": {"scale_search": False, "negative": False},
    "gradient images": {"gradients": False},
    "second front end": {"preset": None},
    "view from above": {"from_above": False},
    "view from the front": {"from_front": False},
    "common region": {"region": False},
}
PARTS = ("working size", "further passes", *_PASSES, "calibration")


def _without(config: PipelineConfig, part: str) -> PipelineConfig:
    if part == "working size":
        return replace(config, extractor=config.extractor.of_size(config.extractor.resize))
    if part == "further passes":
        return replace(config, second_pass=None)
    if part == "calibration":
        policy = replace(config.matcher.policy, calibration=None)
        return replace(config, matcher=replace(config.matcher, policy=policy))
    return replace(config, second_pass=replace(config.second_pass, **_PASSES[part]))


def without_each(preset: str, options: Mapping[str, Any]) -> list[Method]:
    """The preset whole, and without each of `PARTS`.

    Args:
        preset: with a network and further passes.
        options: of `load` that no configuration holds (device, precision).

    Raises:
        UsageError: a preset that lacks these parts.
        IntegrityError: weights that are absent or damaged.
    """
    config = find_preset(preset)
    if config.second_pass is None or not isinstance(config.matcher, NetworkConfig):
        raise UsageError(f"{preset} has no further passes to be switched off; use hybrid-learned")
    changed = {ALL: config, **{f"without {part}": _without(config, part) for part in PARTS}}
    return [Method(name, build_pipeline(preset, each, options)) for name, each in changed.items()]


@dataclass(frozen=True)
class DecisionTime:
    """CPU milliseconds a pair, medians over the pairs for which one pass was enough."""

    pairs: int
    whole: float  # read, extract, match, refine and verify, decisions included
    size: float  # choosing the working size of both images
    further: float  # deciding that no further pass is needed

    @property
    def share(self) -> float:
        """Of the time without decisions that the decisions add."""
        decisions = self.size + self.further
        return decisions / (self.whole - decisions)


def decision_time(pipeline: Pipeline, pairs: Sequence[Pair]) -> DecisionTime:
    """What the decisions cost where the first pass is confident.

    Raises:
        UsageError: no such pair.
    """
    rows = [row for pair in pairs if (row := _decision_of(pipeline, as_inputs(pair))) is not None]
    if not rows:
        raise UsageError("one pass is enough for none of these pairs")
    return DecisionTime(len(rows), *np.median(rows, axis=0).tolist())


def _decision_of(pipeline: Pipeline, inputs: Sequence[Any]) -> tuple[float, float, float] | None:
    result = pipeline.match(*inputs)
    if len(result.passes) > 1:
        return None
    extractor = replace(pipeline.config.extractor, soft_resize=None)
    fixed = replace(pipeline, config=replace(pipeline.config, extractor=extractor))
    images, features = [pipeline.read(each) for each in inputs], (result.features0, result.features1)

    def further() -> None:
        pipeline.passes(images, (), features, result.matches, result.geometry)

    chosen = _milliseconds(lambda: [pipeline.read(each) for each in inputs])
    size = max(0.0, chosen - _milliseconds(lambda: [fixed.read(each) for each in inputs]))
    return _milliseconds(lambda: pipeline.match(*inputs)), size, _milliseconds(further)


def _milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = process_time()
        work()
        times.append(1e3 * (process_time() - start))
    return float(np.median(times))
