"""Keypoints and layers that fit a time budget, from costs measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter
from typing import Protocol, TypeVar

import numpy as np

from matcher.config import PipelineConfig
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.matches import Matches
from matcher.data.protocols import Estimator, Extractor, Matcher
from matcher.data.strongest import strongest
from matcher.match.depth import can_be_cut, with_layers

POINTS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
SIZES = (1.0, 0.75, 0.5)  # scale factors of the image that features are extracted from, tried in turn
BUDGETS = (1e-3, 1e9)  # milliseconds that may be asked for
_LEAST_LAYERS = 2
POINTS_WHOLE = 512  # rather than fewer, stages are left out
# What can be left out.
REFINEMENT, OTHER_TURNS, THOROUGH_VERIFICATION = "refinement", "other turns", "thorough verification"
_MATCHES_REFINED = (200, 1000)  # on which its cost is measured
_REST = 6.0  # milliseconds for geometry, tracks and pose
SLACK = 0.85  # share of the budget that is planned; the rest is a margin for slower frames
_BUSY = 1.2  # a pace that is worth a word
_REPEATS = 3  # runs of each measurement; the median counts


class Parts(Protocol):
    """The parts of a pipeline that are needed here."""

    extractor: Extractor
    matcher: Matcher
    estimator: Estimator
    config: PipelineConfig
    layers: int
    refine: Callable[..., Matches]


P = TypeVar("P", bound=Parts)


@dataclass(frozen=True)
class Choice:
    """The settings chosen for a budget."""

    budget_ms: float
    max_keypoints: int
    layers: int  # 0: a matcher without layers
    resize: int  # longer side of the image that features are extracted from, pixels
    predicted_ms: float  # per frame
    fits: bool  # False: even the cheapest settings, which were chosen, exceed the budget
    # Left out: "thorough verification", "other turns", "refinement", "further passes", or some of these.
    without: tuple[str, ...] = ()
    pace: float = 1.0  # of the predicted time: times as long as on a machine left alone, as works before took
    took_ms: float | None = None  # of the pair that was matched with it
    passes: bool = False  # further ones follow if a pair needs them, while there is time

    @property
    def exceeded(self) -> bool:
        """Whether the pair took longer than its budget."""
        return self.took_ms is not None and self.took_ms > self.budget_ms

    def leaving_out(self, passes: Sequence[object] = ()) -> Choice:
        """The same where there was no time for more than these passes."""
        name = "some further passes" if len(passes) > 1 else "further passes"
        return replace(self, without=(*self.without, name))

    def __str__(self) -> str:
        """One line for a person."""
        layers = f", {self.layers} layers" if self.layers else ""
        layers += f", without {_in_words(self.without)}" if self.without else ""
        verdict = "" if self.fits else "; nothing smaller is offered, so this takes longer"
        verdict += f"; the machine is busy, {self.pace:.1f} times as slow" if self.pace > _BUSY else ""
        verdict += f"; it took {self.took_ms:.0f} ms, over the budget" if self.exceeded else ""
        follow = self.passes and "further passes" not in self.without
        time = "about {:.0f} ms{} of {:.0f} ms".format(
            self.predicted_ms, " for the first pass" if follow else "", self.budget_ms
        )
        return f"{self.max_keypoints} points{layers}, images of at most {self.resize} pixels: {time}{verdict}"


def _in_words(stages: Sequence[str]) -> str:
    *others, last = stages
    return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True, eq=False)
class Strongest:
    """An extractor limited to its keypoints of highest score."""

    extractor: Extractor
    max_keypoints: int

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image."""
        return [strongest(found, self.max_keypoints) for found in self.extractor(images)]


def at_pace(choose: Callable[[float], Choice], budget_ms: float, pace: float) -> Choice:
    """What a function chooses for the budget where everything takes `pace` times as long as it knows."""
    found = choose(budget_ms / pace)
    return replace(found, budget_ms=budget_ms, predicted_ms=pace * found.predicted_ms, pace=pace)


def enough(pipeline: Parts, choice: Choice, points: int) -> bool:
    """Whether a choice fits and leaves so many keypoints, or all that the pipeline has."""
    return choice.fits and choice.max_keypoints >= min(points, pipeline.config.extractor.max_keypoints)


def limited(pipeline: P, choice: Choice) -> P:
    """The pipeline with the chosen keypoints, layers, image size, and refinement or not."""
    config = pipeline.config
    if REFINEMENT in choice.without:
        config = replace(config, refine=None)
    # The choice is for images of this size, soft or not, and searched once.
    extractor_config = replace(config.extractor.of_size(choice.resize), max_keypoints=choice.max_keypoints)
    extractor = pipeline.extractor
    if hasattr(extractor, "limited"):  # ours, whichever library runs them
        extractor = extractor.limited(choice.max_keypoints)
    else:
        extractor = Strongest(extractor, choice.max_keypoints)
    matcher = with_layers(pipeline.matcher, choice.layers)
    return replace(
        pipeline, extractor=extractor, matcher=matcher, config=replace(config, extractor=extractor_config)
    )


def matching_cost(
    pipeline: Parts, features: Features, other: Features | None = None
) -> Callable[[int, int], float]:
    """Milliseconds of matching an image with itself, or with another, by keypoints n and layers L.

    A non-negative least-squares fit of c₀ + c₁n + c₂n² (embedding and assignment) + L·(c₃n + c₄n²)
    (attention) to measurements without early exit.
    """
    depths = _depths(pipeline)
    most = min(len(features), max(POINTS), *([] if other is None else [len(other)]))
    counts = sorted({max(1, most // 4), max(1, most // 2), max(1, most)})
    rows, values = [], []
    for layers in {depths[0], depths[-1]}:
        matcher = _never_early(with_layers(pipeline.matcher, layers))
        for count in counts:
            rows.append(_terms(count, layers))
            batch = Features.stack([features.select(np.arange(count))])
            if other is None:
                values.append(milliseconds(lambda m=matcher, b=batch: m(b, b)))
            else:
                second = Features.stack([other.select(np.arange(count))])
                values.append(milliseconds(lambda m=matcher, b=batch, o=second: m(b, o)))
    weights = 1 / np.maximum(values, 1e-3)
    solution = _non_negative(np.array(rows) * weights[:, None], np.array(values) * weights)
    return lambda count, layers: float(_terms(count, layers) @ solution)


def _terms(count: int, layers: int) -> np.ndarray:
    n = count / 1000
    return np.array([1.0, n, n * n, layers * n, layers * n * n])


def _non_negative(a: np.ndarray, b: np.ndarray, rounds: int = 300) -> np.ndarray:
    """Non-negative least squares by coordinate descent: no cost may fall with more keypoints."""
    x, gram, target = np.zeros(a.shape[1]), a.T @ a, a.T @ b
    for _ in range(rounds):
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + (target[i] - gram[i] @ x) / max(gram[i, i], 1e-12))
    return x


def best_choice(
    pipeline: Parts,
    cost: Callable[[int, int], float],
    times: int,
    extract_ms: float,
    budget_ms: float,
    resize: int,
) -> Choice:
    """The keypoints and layers that fit with the largest layers · √keypoints, else the cheapest.

    Args:
        pipeline: its `max_keypoints` and depth are upper limits.
        cost: milliseconds of matching by keypoints and layers.
        times: how often extraction and matching run.
        extract_ms: milliseconds before matching.
        budget_ms: for everything.
        resize: longer side of the images, for the result.
    """
    most = pipeline.config.extractor.max_keypoints
    counts = [n for n in POINTS if n < most] + [most]
    rows = []
    for count, layers in product(counts, _depths(pipeline)):
        predicted = times * (extract_ms + cost(count, layers)) + _REST
        rows.append(Choice(budget_ms, count, layers, resize, predicted, predicted <= SLACK * budget_ms))
    fitting = [row for row in rows if row.fits]
    if fitting:
        return max(fitting, key=lambda row: (max(1, row.layers) * row.max_keypoints**0.5, -row.predicted_ms))
    return min(rows, key=lambda row: row.predicted_ms)


def _depths(pipeline: Parts) -> list[int]:
    if not can_be_cut(pipeline.matcher):
        return [pipeline.layers]
    depth = len(pipeline.matcher.model.layers)
    return list(range(min(_LEAST_LAYERS, depth), depth + 1))


def _never_early(matcher: object) -> object:
    if not can_be_cut(matcher):
        return matcher
    policy = replace(matcher.model.config.policy, early_exit=False, pruning=False)
    return matcher.adjusted(policy=policy)


def refining_cost(pipeline: Parts, image: Image) -> Callable[[float], float]:
    """Milliseconds of refinement by number of matches of an image with itself; 0 where nothing is refined."""
    if pipeline.config.refine is None:
        return lambda count: 0.0
    times = []
    for count in _MATCHES_REFINED:
        points = np.random.default_rng(0).uniform(0, image.size, (count, 2)).astype(np.float32)
        indices = np.repeat(np.arange(count)[:, None], 2, axis=1)
        matches = Matches.from_indices(indices, points, points, np.ones(count))
        times.append(milliseconds(lambda matches=matches: pipeline.refine(image, image, matches)))
    return line(_MATCHES_REFINED, times)


def line(where: Sequence[float], values: Sequence[float]) -> Callable[[float], float]:
    """The line through two measurements, constant if it would fall."""
    slope = max(0.0, (values[0] - values[1]) / (where[0] - where[1]))
    return lambda x: max(0.0, values[0] + slope * (x - where[0]))


def milliseconds(run: Callable[[], object]) -> float:
    """The median time of a few runs, after a warm-up."""
    run()  # warm-up: the first run allocates memory and selects kernels
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        run()
        times.append(1000 * (perf_counter() - start))
    return float(np.median(times))
