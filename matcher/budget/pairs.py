"""Settings that match one pair within a time budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from matcher.budget.choice import (
    BUDGETS,
    POINTS_REFINED,
    SIZES,
    Choice,
    Parts,
    at_pace,
    best_choice,
    enough,
    limited,
    line,
    matching_cost,
    milliseconds,
    refining_cost,
)
from matcher.budget.pace import Pace
from matcher.config import GRID_KIND
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.errors import UsageError, check_number
from matcher.match.depth import can_be_cut

_LEAST_POINTS = 256  # rather than fewer, smaller images are used
_MATCHES = (200, 1000)  # random ones, on which verification is measured: its worst case
# Cost of further passes in first passes: seven extract and match again, one of them from the files, and
# changes of scale are searched for. That with another front end is counted apart.
_MORE = 8.0


class ImageMatcher(Protocol):
    """A front end and the matcher for its features."""

    def match_images(self, name: str, images: Sequence[Image]) -> object:
        """The matches of two images, under the name of a pass."""


class Passes(Protocol):
    """What follows a first pass of which too few matches agree."""

    other: Callable[[], ImageMatcher] | None


class PairParts(Parts, Protocol):
    """The parts of a pipeline that are needed to plan a pair."""

    passes: Passes | None
    costs: dict[tuple, object]  # `PairCosts` by the parts that they were measured with


Q = TypeVar("Q", bound=PairParts)


@dataclass(frozen=True)
class PairCosts:
    """Milliseconds of each stage on this machine."""

    extract: Callable[[float], float]  # by number of pixels
    match: Callable[[int, int], float]  # by keypoints and layers, without early exit
    refine: Callable[[float], float]  # by matches
    verify: Callable[[float], float]  # by matches, all of them wrong
    other: float  # of the further pass with another front end and matcher


def measured_costs(pipeline: PairParts, images: Sequence[Image]) -> PairCosts:
    """The measured costs of a pipeline's parts; the first call takes a few seconds."""
    key = (pipeline.extractor, pipeline.matcher, pipeline.estimator)
    if key not in pipeline.costs:
        pipeline.costs[key] = _measure(pipeline, images)
    return pipeline.costs[key]


def pace_of(pipeline: PairParts) -> Pace:
    """How much longer than predicted the pairs took that the pipeline has matched."""
    return pipeline.costs.setdefault(("pace", pipeline.extractor, pipeline.matcher), Pace())


class Timed(Protocol):
    """What is needed of a result."""

    seconds: dict[str, float]
    first: Timed | None  # of its first pass, where there were more
    budget: Choice | None


R = TypeVar("R", bound=Timed)


def learned(pipeline: PairParts, result: R) -> R:
    """The result with the time that it took, from which the pipeline's next plans learn.

    Args:
        pipeline: that `plan` was asked with.
        result: its budget is what `plan` chose.
    """
    choice = result.budget
    first, total = ((each or result).seconds["total"] for each in (result.first, None))
    pace_of(pipeline).add(1000 * first, predicted=choice.predicted_ms / choice.pace)
    return replace(result, budget=replace(choice, took_ms=1000 * total))


def plan(
    pipeline: Q, images: Sequence[Image], budget_ms: float, reading_ms: float
) -> tuple[Q, list[Image], Choice]:
    """The pipeline that fits the budget, the images resized for it, and the choice.

    Images are made smaller only if less than 256 keypoints would be left. Further passes are kept
    only if all of them fit together with an unreduced first pass.

    Args:
        pipeline: its `max_keypoints`, depth, `passes` and image size are upper limits.
        images: as read by the pipeline.
        budget_ms: milliseconds for the pair, reading included.
        reading_ms: milliseconds spent on reading.

    Raises:
        UsageError: a budget that is not positive, or a pipeline without keypoints.
    """
    check_number(budget_ms, "budget_ms", *BUDGETS)
    if pipeline.config.extractor.kind == GRID_KIND:
        raise UsageError("budget_ms needs keypoints, and this preset has only the cells of a grid")
    costs, pace = measured_costs(pipeline, images), pace_of(pipeline).value
    refined = pipeline.config.refine is not None
    reading_ms /= pace  # which was as slow as the rest will be

    def chosen(within_ms: float) -> Choice:
        best = largest_that_fits(pipeline, images, costs, within_ms, reading_ms, refined=refined)
        if not refined or enough(pipeline, best, POINTS_REFINED):
            return best
        best = largest_that_fits(pipeline, images, costs, within_ms, reading_ms, refined=False)
        return replace(best, without=("refinement",))

    choice = at_pace(chosen, budget_ms, pace)
    smaller = [_at_most(image, choice.resize) for image in images]
    whole = (choice.max_keypoints, choice.layers) == (_most(pipeline), pipeline.layers)
    further = _MORE * (choice.predicted_ms + pace * reading_ms) + pace * costs.other
    if pipeline.passes is None:
        return without_other_turns(limited(pipeline, choice)), smaller, choice
    if whole and not choice.without and choice.predicted_ms + further <= budget_ms:
        return pipeline, smaller, choice
    choice = replace(choice, without=(*choice.without, "further passes"))
    return replace(without_other_turns(limited(pipeline, choice)), passes=None), smaller, choice


def largest_that_fits(
    pipeline: PairParts,
    images: Sequence[Image],
    costs: PairCosts,
    budget_ms: float,
    reading_ms: float,
    *,
    refined: bool,
) -> Choice:
    """The choice for the largest images at which enough keypoints fit."""
    best = None

    def matched(points: int, layers: int) -> float:
        refining = costs.refine(points) if refined else 0.0
        return costs.match(points, layers) + refining + costs.verify(points)

    for factor in SIZES:
        resize = max(1, round(factor * max(max(image.pixels.shape[:2]) for image in images)))
        smaller = [_at_most(image, resize) for image in images]
        extract = sum(costs.extract(image.pixels.shape[0] * image.pixels.shape[1]) for image in smaller)
        found = best_choice(pipeline, matched, 1, reading_ms + extract, budget_ms, resize)
        if best is None or found.fits or found.predicted_ms < best.predicted_ms:
            best = found
        if enough(pipeline, found, _LEAST_POINTS):
            break
    return best


def _most(pipeline: Parts) -> int:
    return pipeline.config.extractor.max_keypoints


def _at_most(image: Image, longer_side: int) -> Image:
    factor = longer_side / max(image.pixels.shape[:2])
    return image if factor >= 1 else image.resized(factor)


def without_other_turns(pipeline: Q) -> Q:
    """The pipeline without attempts at other turns, which can take several times as long."""
    if not can_be_cut(pipeline.matcher):
        return pipeline
    policy = replace(pipeline.matcher.model.config.policy, other_turns_below=0.0)
    return replace(pipeline, matcher=pipeline.matcher.adjusted(policy=policy))


def _measure(pipeline: PairParts, images: Sequence[Image]) -> PairCosts:
    """Measure costs on the given pair; matching also without any correspondence, which takes longer."""
    sizes, times = [], []
    for factor in (1.0, SIZES[-1]):
        image = images[0] if factor == 1.0 else images[0].resized(factor)
        sizes.append(image.pixels.shape[0] * image.pixels.shape[1])
        times.append(milliseconds(lambda image=image: pipeline.extractor([image])))
    extract = line(sizes, times)
    features = pipeline.extractor([images[0]])[0]
    single = without_other_turns(pipeline)
    easy, hard = (
        matching_cost(single, features, other) for other in (None, _with_random_descriptors(features))
    )
    counts = [min(count, max(_MATCHES)) for count in _MATCHES]
    verify = line(counts, [milliseconds(lambda n=n: pipeline.estimator(*_random(n))) for n in counts])
    refine = refining_cost(pipeline, images[0])
    other = 0.0
    if pipeline.passes is not None and pipeline.passes.other is not None:
        second = pipeline.passes.other()
        other = milliseconds(lambda: second.match_images("", images))
    return PairCosts(
        extract,
        lambda points, layers: max(easy(points, layers), hard(points, layers)),
        refine,
        verify,
        other,
    )


def _with_random_descriptors(features: Features) -> Features:
    """The same keypoints with random descriptors."""
    noise = np.random.default_rng(0).normal(size=features.descriptors.shape).astype(np.float32)
    return replace(features, descriptors=noise / np.linalg.norm(noise, axis=-1, keepdims=True))


def _random(count: int) -> tuple[np.ndarray, np.ndarray]:
    points = np.random.default_rng(0).uniform(0, 1000, (2, count, 2))
    return points[0], points[1]
