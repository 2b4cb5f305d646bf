"""Settings that match one pair within a time budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from matcher.budget.choice import (
    BUDGETS,
    OTHER_TURNS,
    POINTS_WHOLE,
    REFINEMENT,
    SIZES,
    SLACK,
    THOROUGH_VERIFICATION,
    Choice,
    Parts,
    at_pace,
    best_choice,
    enough,
    limited,
)
from matcher.budget.costs import (
    PairCosts,
    PairParts,
    Passes,
    measured_costs,
    number_of_pixels,
    without_other_turns,
)
from matcher.budget.pace import Pace
from matcher.config import GRID_KIND
from matcher.data.image import Image
from matcher.errors import UsageError, check_number
from matcher.extract.enlarging import pixels_enlarged
from matcher.match.depth import can_be_cut
from matcher.match.turns import STEERABLE
from matcher.verify.estimation import RobustEstimator

_POINTS_WITH_TURNS = 1024  # rather than fewer, other turns are left out
# Stages that are left out before only fewer keypoints than these are left.
_LEFT_OUT = (((), _POINTS_WITH_TURNS), ((OTHER_TURNS,), POINTS_WHOLE), ((OTHER_TURNS, REFINEMENT), 0))
_LEAST_POINTS = 256  # rather than fewer, smaller images are used
# For a pose: where most matches are wrong, they take most of the time; more hardly ever find a better one.
_POSE_SAMPLES = 2_000
# Sides of 4:3: stretched images have no more pixels, and one turned by 45 degrees as many as two.
_ASPECT = 0.77
# Share of the budget that the verification of so many wrong matches takes at most, where it can be quicker.
_VERIFY_SHARE, _WRONG_MATCHES = 0.15, 256
# Of the time of reading, what reading again for the common region takes at most; refinement reads all pixels.
_READ_AGAIN = {True: 1.5, False: 4.0}  # with refinement, without


Q = TypeVar("Q", bound=PairParts)


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

    Images are made smaller only if less than 256 keypoints would be left. Where nothing has to be reduced,
    images of few keypoints are enlarged if that fits too; further passes follow while there is time.

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
    if isinstance(pipeline.estimator, RobustEstimator):
        pipeline = replace(pipeline, estimator=replace(pipeline.estimator, pose_samples=_POSE_SAMPLES))
    costs, pace = measured_costs(pipeline, images), pace_of(pipeline).value
    thorough = pipeline.estimator
    pipeline, costs = _verifying_in(_VERIFY_SHARE * budget_ms / pace, pipeline, costs)
    reading_ms /= pace  # which was as slow as the rest will be
    choice = at_pace(partial(_chosen, pipeline, images, costs, reading_ms), budget_ms, pace)
    if pipeline.estimator is not thorough:
        choice = replace(choice, without=(THOROUGH_VERIFICATION, *choice.without))
    smaller = [_at_most(image, choice.resize) for image in images]
    fitted = limited(pipeline, choice)
    fitted = without_other_turns(fitted) if OTHER_TURNS in choice.without else fitted
    reduced = any(a is not b for a, b in zip(images, smaller, strict=True))
    if REFINEMENT in choice.without or reduced or not choice.fits:
        choice = choice if pipeline.passes is None else choice.leaving_out()
        return replace(fitted, passes=None), smaller, choice
    if (choice.max_keypoints, choice.layers) == (_most(pipeline), pipeline.layers):
        fitted, choice = _enlarging(pipeline, fitted, images, costs, choice)
    if fitted.passes is None:
        return fitted, images, choice
    passes = _in_time(fitted, images, costs, choice, reading_ms)
    return replace(fitted, passes=passes), images, replace(choice, passes=True)


def _verifying_in(milliseconds: float, pipeline: Q, costs: PairCosts) -> tuple[Q, PairCosts]:
    """The pipeline with the first estimator that verifies in this time, else the quickest, and its costs."""
    known = ((pipeline.estimator, costs.verify), *costs.quicker)
    estimator, verify = next((each for each in known if each[1](_WRONG_MATCHES) <= milliseconds), known[-1])
    return replace(pipeline, estimator=estimator), replace(costs, verify=verify)


def _chosen(
    pipeline: PairParts, images: Sequence[Image], costs: PairCosts, reading_ms: float, budget_ms: float
) -> Choice:
    """The choice with as many stages as leave enough keypoints, with images of full size if possible."""
    has = {REFINEMENT: pipeline.config.refine is not None, OTHER_TURNS: _tries_turns(pipeline)}
    longest, good = max(max(image.pixels.shape[:2]) for image in images), []
    for stages, least in _LEFT_OUT:
        without = tuple(stage for stage in stages if has[stage])
        best = largest_that_fits(pipeline, images, costs, budget_ms, reading_ms, without)
        best = replace(best, without=without)
        if enough(pipeline, best, least):
            good.append(best)
    return next((one for one in good if one.resize == longest), (*good, best)[0])


def _enlarging(
    pipeline: PairParts, fitted: Q, images: Sequence[Image], costs: PairCosts, choice: Choice
) -> tuple[Q, Choice]:
    """What was fitted, with images of few keypoints enlarged, if there is time for that."""
    config = pipeline.config.extractor
    searched = pixels_enlarged(images, config)
    predicted = choice.predicted_ms + choice.pace * sum(costs.extract(pixels) for pixels in searched)
    if not searched or predicted > SLACK * choice.budget_ms:
        return fitted, choice
    enlarging = replace(fitted.config.extractor, sparse_resize=config.sparse_resize)
    config = replace(fitted.config, extractor=enlarging)
    return replace(fitted, config=config), replace(choice, predicted_ms=predicted)


def _in_time(
    fitted: PairParts, images: Sequence[Image], costs: PairCosts, choice: Choice, reading_ms: float
) -> Passes:
    """The further passes of what was fitted, each only while there is time for the dearest of its kind."""
    most, passes = _most(fitted), fitted.passes
    shares = [min(image.pixels.shape[:2]) / max(image.pixels.shape[:2]) for image in images]
    searched = sum(max(share, _ASPECT) for share in shares) * passes.longer_side**2
    own = costs.extract(searched) + costs.match(most, choice.layers) + costs.verify_pass(most)
    reread = any(image.scale != (1.0, 1.0) for image in images)
    region = own + (_READ_AGAIN[fitted.config.refine is not None] * reading_ms if reread else 0.0)
    total = choice.budget_ms / choice.pace - costs.refine(most) - costs.verify(most)
    passes = passes.using(fitted.extractor, without_other_turns(fitted).matcher)
    limits = (total, own, costs.other(number_of_pixels(images)), region)
    return passes.within(*(choice.pace * each / 1000 for each in limits))


def largest_that_fits(
    pipeline: PairParts,
    images: Sequence[Image],
    costs: PairCosts,
    budget_ms: float,
    reading_ms: float,
    without: Sequence[str],
) -> Choice:
    """The choice for the largest images at which enough keypoints fit, without some of the stages."""
    best, turns = None, _tries_turns(pipeline) and OTHER_TURNS not in without

    def matched(points: int, layers: int) -> float:
        refining = 0.0 if REFINEMENT in without else costs.refine(points)
        turning = costs.turns(points, layers) if turns else 0.0
        return costs.match(points, layers) + turning + refining + costs.verify(points)

    for factor in SIZES:
        resize = max(1, round(factor * max(max(image.pixels.shape[:2]) for image in images)))
        smaller = [_at_most(image, resize) for image in images]
        extract = sum(costs.extract(number_of_pixels([image])) for image in smaller)
        found = best_choice(pipeline, matched, 1, reading_ms + extract, budget_ms, resize)
        if best is None or found.fits or found.predicted_ms < best.predicted_ms:
            best = found
        if enough(pipeline, found, _LEAST_POINTS):
            break
    return best


def _tries_turns(pipeline: Parts) -> bool:
    """Whether its matcher tries turns other than the one that the descriptors suggest."""
    return can_be_cut(pipeline.matcher) and pipeline.config.extractor.kind == STEERABLE


def _most(pipeline: Parts) -> int:
    return pipeline.config.extractor.max_keypoints


def _at_most(image: Image, longer_side: int) -> Image:
    factor = longer_side / max(image.pixels.shape[:2])
    return image if factor >= 1 else image.resized(factor)
