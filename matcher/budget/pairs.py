"""Settings that match one pair within a time budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import cv2
import numpy as np

from matcher.budget.choice import (
    BUDGETS,
    OTHER_TURNS,
    POINTS_WHOLE,
    REFINEMENT,
    SIZES,
    SLACK,
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
from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.protocols import Extractor, Matcher
from matcher.errors import UsageError, check_number
from matcher.extract.enlarging import pixels_enlarged
from matcher.match.depth import can_be_cut
from matcher.match.turns import OTHER_TURNS as TURNS_TRIED
from matcher.match.turns import PROBED, STEERABLE
from matcher.verify.estimation import RobustEstimator

# Stages that are left out before only fewer keypoints than these are left.
_LEFT_OUT = (((), 1024), ((OTHER_TURNS,), POINTS_WHOLE), ((OTHER_TURNS, REFINEMENT), 0))
_LEAST_POINTS = 256  # rather than fewer, smaller images are used
_MATCHES = (200, 1000)  # random ones, on which verification is measured: its worst case
# For a pose: where most matches are wrong, they take most of the time; more hardly ever find a better one.
_POSE_SAMPLES = 2_000
_CAMERA = Camera(1000.0, 1000.0, 500.0, 500.0)  # of random matches
# Pixels that a further pass searches at most, of a square as large as its crops may be: both images at 4:3,
# or one of these turned by 45 degrees.
_SEARCHED = 1.55


class ImageMatcher(Protocol):
    """A front end and the matcher for its features."""

    def match_images(self, name: str, images: Sequence[Image]) -> object:
        """The matches of two images, under the name of a pass."""


class Passes(Protocol):
    """What follows a first pass of which too few matches agree."""

    other: Callable[[], ImageMatcher] | None
    longer_side: int  # of what is matched, pixels

    def within(self, total: float, own: float, other: float) -> Passes:
        """The passes that fit in so many seconds; one takes `own` at most, with another front end `other`."""

    def using(self, extractor: Extractor, matcher: Matcher) -> Passes:
        """The passes with this front end and matcher of their own."""


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

    def turns(self, points: int, layers: int) -> float:
        """Of trying the other turns: each with a few keypoints, and one that is promising with all."""
        return len(TURNS_TRIED) * self.match(min(points, PROBED), layers) + self.match(points, layers)


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
    reading_ms /= pace  # which was as slow as the rest will be
    has = {REFINEMENT: pipeline.config.refine is not None, OTHER_TURNS: _tries_turns(pipeline)}

    def chosen(within_ms: float) -> Choice:
        for stages, least in _LEFT_OUT:
            without = tuple(stage for stage in stages if has[stage])
            best = largest_that_fits(pipeline, images, costs, within_ms, reading_ms, without)
            if enough(pipeline, best, least):
                break
        return replace(best, without=without)

    choice = at_pace(chosen, budget_ms, pace)
    smaller = [_at_most(image, choice.resize) for image in images]
    fitted = limited(pipeline, choice)
    fitted = without_other_turns(fitted) if OTHER_TURNS in choice.without else fitted
    reduced = any(a is not b for a, b in zip(images, smaller, strict=True))
    if choice.without or reduced or not choice.fits:
        choice = choice if pipeline.passes is None else choice.leaving_out()
        return replace(fitted, passes=None), smaller, choice
    if (choice.max_keypoints, choice.layers) == (_most(pipeline), pipeline.layers):
        fitted, choice = _enlarging(pipeline, fitted, images, costs, choice)
    if fitted.passes is None:
        return fitted, images, choice
    passes = _in_time(fitted, costs, choice)
    return replace(fitted, passes=passes), images, replace(choice, passes=True)


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


def _in_time(fitted: PairParts, costs: PairCosts, choice: Choice) -> Passes:
    """The further passes of what was fitted, each only while there is time for the dearest of its kind."""
    most, passes = _most(fitted), fitted.passes
    searched = costs.extract(_SEARCHED * passes.longer_side**2)
    own = searched + costs.match(most, choice.layers) + costs.verify(most)
    total = choice.budget_ms / choice.pace - costs.refine(most) - costs.verify(most)
    passes = passes.using(fitted.extractor, without_other_turns(fitted).matcher)
    return passes.within(*(choice.pace * each / 1000 for each in (total, own, costs.other)))


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
        extract = sum(costs.extract(image.pixels.shape[0] * image.pixels.shape[1]) for image in smaller)
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


def without_other_turns(pipeline: Q) -> Q:
    """The pipeline without attempts at other turns, which can take several times as long."""
    if not can_be_cut(pipeline.matcher):
        return pipeline  # it tries none
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
    features = _features(pipeline, images[0])
    single = without_other_turns(pipeline)
    easy = hard = _nothing  # even in noise there is no keypoint in so small an image
    if len(features):
        hard, easy = (
            matching_cost(single, features, other) for other in (_with_random_descriptors(features), None)
        )
    counts = [min(count, max(_MATCHES)) for count in _MATCHES]
    cameras = (_CAMERA, _CAMERA) if pipeline.config.estimation.kind == "essential" else None
    estimate = partial(pipeline.estimator, cameras=cameras)
    verify = line(counts, [milliseconds(lambda n=n: estimate(*_random(n))) for n in counts])
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


def _features(pipeline: PairParts, image: Image) -> Features:
    """Features to match for a measurement: of an image or, if it shows next to nothing, of noise as large."""
    features = pipeline.extractor([image])[0]
    if len(features) >= _LEAST_POINTS:
        return features
    noise = np.random.default_rng(0).integers(0, 256, image.pixels.shape, dtype=np.uint8)
    noise = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 1.0), None, 0, 255, cv2.NORM_MINMAX)
    return max(features, pipeline.extractor([replace(image, pixels=noise, mask=None)])[0], key=len)


def _nothing(points: int, layers: int) -> float:
    """The cost of matching no keypoints."""
    return 0.0


def _with_random_descriptors(features: Features) -> Features:
    """The same keypoints with random descriptors."""
    noise = np.random.default_rng(0).normal(size=features.descriptors.shape).astype(np.float32)
    return replace(features, descriptors=noise / np.linalg.norm(noise, axis=-1, keepdims=True))


def _random(count: int) -> tuple[np.ndarray, np.ndarray]:
    points = np.random.default_rng(0).uniform(0, 1000, (2, count, 2))
    return points[0], points[1]
