"""Keypoints, layers, image size and stages that fit a time budget, from costs measured on this machine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.config import GRID_KIND
from matcher.errors import UsageError, check_number
from matcher.extract.extractor import pixels_enlarged
from matcher.match.network import can_be_cut, with_layers
from matcher.match.steering import OTHER_TURNS as QUARTER_TURNS
from matcher.match.steering import PROBED, STEERABLE
from matcher.types import Estimator, Extractor, Features, Image, Matches, strongest
from matcher.verify.estimation import RobustEstimator

if TYPE_CHECKING:
    from matcher.pipeline import Pipeline
    from matcher.result import Result

BUDGETS = (1e-3, 1e9)  # milliseconds that may be asked for
POINTS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
SIZES = (1.0, 0.75, 0.5)  # scale factors of the image that features are extracted from, tried in turn
SLACK = 0.85  # share of the budget that is planned; the rest is a margin for slower frames
REFINEMENT, OTHER_TURNS, THOROUGH_VERIFICATION = "refinement", "other turns", "thorough verification"
# Stages that are left out before only fewer keypoints than these are left; then images are made smaller.
_LEFT_OUT = (((), 1024), ((OTHER_TURNS,), 512), ((OTHER_TURNS, REFINEMENT), 256))
_REST = 6.0  # milliseconds for geometry, tracks and pose
_VERIFY_SHARE = 0.15  # of the budget, which the verification of wrong matches takes at most, where it can
_MEASURED_MATCHES = (200, 1000)  # on which refinement and verification are measured
_CAMERA = Camera(1000.0, 1000.0, 500.0, 500.0)  # of random matches
# An image of fewer keypoints, or of fewer pixels (height, width), is not measured but noise.
_LEAST_KEYPOINTS, _LEAST_SIDES = 256, (384, 512)
Cost = Callable[..., float]


@dataclass(frozen=True)
class Choice:
    """The settings chosen for a budget."""

    budget_ms: float
    max_keypoints: int
    layers: int  # 0: a matcher without layers
    resize: int  # longer side of the image that features are extracted from, pixels
    predicted_ms: float  # per frame, or of a pair's first pass
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
        *others, last = self.without or ("",)
        words = f"{', '.join(others)} and {last}" if others else last
        left_out = f", without {words}" if words else ""
        layers = f", {self.layers} layers" if self.layers else ""
        first = " for the first pass" if self.passes and "further passes" not in self.without else ""
        verdict = "" if self.fits else "; nothing smaller is offered, so this takes longer"
        verdict += f"; the machine is busy, {self.pace:.1f} times as slow" if self.pace > 1.2 else ""
        verdict += f"; it took {self.took_ms:.0f} ms, over the budget" if self.exceeded else ""
        return (
            f"{self.max_keypoints} points{layers}{left_out}, images of at most {self.resize} pixels: about "
            f"{self.predicted_ms:.0f} ms{first} of {self.budget_ms:.0f} ms{verdict}"
        )


class Pace:
    """How many times longer than predicted the slow ones of the last works took; at least 1.

    >>> pace = Pace()
    >>> for milliseconds in (30, 62, 58):
    ...     pace.add(milliseconds, predicted=31)
    >>> pace.value
    2.0
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=20)

    def add(self, measured: float, *, predicted: float) -> None:
        """Take in a work that took so many milliseconds, and what its plan said on a machine left alone."""
        self._ratios.append(measured / max(predicted, 1e-6))

    @property
    def value(self) -> float:
        """That of the slowest but one in seven: fewer points do not shorten a single wait for a core."""
        if not self._ratios:
            return 1.0
        return min(max(sorted(self._ratios)[-1 - len(self._ratios) // 7], 1.0), 20.0)

    def differs_from(self, value: float) -> bool:
        """Whether a plan for another pace is out of date."""
        return abs(self.value - value) > 0.1 * value


def at_pace(choose: Callable[[float], Choice], budget_ms: float, pace: float) -> Choice:
    """What a function chooses for the budget where everything takes `pace` times as long as it knows."""
    found = choose(budget_ms / pace)
    return replace(found, budget_ms=budget_ms, predicted_ms=pace * found.predicted_ms, pace=pace)


@dataclass(frozen=True, eq=False)
class Strongest:
    """An extractor limited to its keypoints of highest score."""

    extractor: Extractor
    max_keypoints: int

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image."""
        return [strongest(found, self.max_keypoints) for found in self.extractor(images)]


def limited(pipeline: Pipeline, choice: Choice) -> Pipeline:
    """The pipeline with the chosen keypoints, layers, image size, and without what is left out."""
    config, extractor, matcher = pipeline.config, pipeline.extractor, pipeline.matcher
    # The choice is for images of this size, soft or not, and searched once.
    found = replace(config.extractor.of_size(choice.resize), max_keypoints=choice.max_keypoints)
    own = hasattr(extractor, "limited")  # whichever library runs it
    extractor = extractor.limited(found.max_keypoints) if own else Strongest(extractor, found.max_keypoints)
    matcher = with_layers(matcher, choice.layers)
    if OTHER_TURNS in choice.without:
        matcher = _adjusted(matcher, other_turns_below=0.0)
    refine = None if REFINEMENT in choice.without else config.refine
    config = replace(config, extractor=found, refine=refine)
    return replace(pipeline, extractor=extractor, matcher=matcher, config=config)


def _adjusted(matcher: Any, **policy: Any) -> Any:
    """A matcher with a network, used otherwise; any other as it is."""
    if not can_be_cut(matcher):
        return matcher
    return matcher.adjusted(policy=replace(matcher.model.config.policy, **policy))


# What each stage costs here.


@dataclass(frozen=True)
class StageCosts:
    """Milliseconds of each stage on this machine."""

    extract: Cost  # by number of pixels
    match: Cost  # by keypoints and layers, without early exit
    refine: Cost  # by matches
    verify: Cost  # by matches, all of them wrong
    other: Cost  # of the further pass with another front end and matcher, by the pixels of both images
    quicker: tuple[tuple[Estimator, Cost], ...] = ()  # less thorough estimators, and `verify` with each

    def turns(self, points: int, layers: int) -> float:
        """Of trying the other turns: each with a few keypoints, and one that is promising with all."""
        return len(QUARTER_TURNS) * self.match(min(points, PROBED), layers) + self.match(points, layers)


def measure_costs(pipeline: Pipeline, images: Sequence[Image], *, pairs: bool) -> StageCosts:
    """The costs on these images, or on noise where they show nothing; a few seconds.

    Args:
        pipeline: its parts are measured.
        images: one, or both of a pair.
        pairs: pairs of any images are matched, not neighbouring frames: also verification, and matching where
            nothing corresponds, which takes longer.
    """
    image = _to_measure(pipeline, images[0])
    smaller = image.resized(SIZES[-1])
    extract = [milliseconds(lambda each=each: pipeline.extractor([each])) for each in (image, smaller)]
    features = pipeline.extractor([image])[0]
    refine = verify = other = lambda *_: 0.0
    quicker = []
    if pipeline.config.refine is not None:
        refine = _by_matches(lambda matches: pipeline.refine(image, image, matches), image.size)
    if pairs:
        cameras = (_CAMERA, _CAMERA) if pipeline.config.estimation.kind == "essential" else None

        def verifying(estimator: Estimator) -> Cost:
            return _by_matches(lambda m: estimator(m.points0, m.points1, cameras=cameras), (1000, 1000))

        verify = verifying(pipeline.estimator)
        quicker = [(each, verifying(each)) for each in _quicker(pipeline.estimator)]
        if pipeline.passes is not None and pipeline.passes.other is not None:
            second, known = pipeline.passes.other(), number_of_pixels(images)
            measured = milliseconds(lambda: second.match_images("", images))
            other = lambda pixels: measured * max(1.0, pixels / known)  # noqa: E731
    return StageCosts(
        extract=_line([number_of_pixels([each]) for each in (image, smaller)], extract),
        match=_matching_cost(pipeline, features, unrelated=pairs),
        refine=refine,
        verify=verify,
        other=other,
        quicker=tuple(quicker),
    )


def milliseconds(run: Callable[[], object]) -> float:
    """The median time of three runs, after one that allocates memory and selects kernels."""
    times = []
    for _ in range(4):
        start = perf_counter()
        run()
        times.append(1000 * (perf_counter() - start))
    return float(np.median(times[1:]))


def number_of_pixels(images: Sequence[Image]) -> int:
    """Of all images together."""
    return sum(image.pixels.shape[0] * image.pixels.shape[1] for image in images)


def _line(where: Sequence[float], values: Sequence[float]) -> Cost:
    """The line through two measurements, constant if it would fall."""
    slope = max(0.0, (values[0] - values[1]) / (where[0] - where[1]))
    return lambda x: max(0.0, values[0] + slope * (x - where[0]))


def _by_matches(run: Callable[[Matches], object], size: tuple[int, int]) -> Cost:
    """Milliseconds by number of matches, which are random points of both images."""
    times = []
    for count in _MEASURED_MATCHES:
        points = np.random.default_rng(0).uniform(0, size, (2, count, 2)).astype(np.float32)
        indices = np.repeat(np.arange(count)[:, None], 2, axis=1)
        matches = Matches.from_indices(indices, *points, np.ones(count))
        times.append(milliseconds(lambda matches=matches: run(matches)))
    return _line(_MEASURED_MATCHES, times)


def _matching_cost(pipeline: Pipeline, features: Features, *, unrelated: bool) -> Cost:
    """Milliseconds of matching by keypoints and layers.

    Measured at a quarter of the keypoints and all of them, with the fewest layers and all: a power of the
    keypoints, linear in the layers.
    """
    if not len(features):
        return lambda points, layers: 0.0
    depths, most = _depths(pipeline), min(len(features), POINTS[-1])
    counts, ends = (max(1, most // 4), most), (depths[0], depths[-1])
    noise = np.random.default_rng(0).normal(size=features.descriptors.shape).astype(np.float32)
    noise /= np.linalg.norm(noise, axis=-1, keepdims=True)
    others = [features, replace(features, descriptors=noise)] if unrelated else [features]
    matcher = _adjusted(pipeline.matcher, early_exit=False, pruning=False, other_turns_below=0.0)
    table = np.zeros((2, 2))
    for (i, layers), (j, count) in product(enumerate(ends), enumerate(counts)):
        cut, some = with_layers(matcher, layers), np.arange(count)
        first = Features.stack([features.select(some)])
        seconds = [Features.stack([other.select(some)]) for other in others]
        table[i, j] = max(milliseconds(lambda m=cut, a=first, b=b: m(a, b)) for b in seconds)

    def cost(points: int, layers: int) -> float:
        share = (layers - ends[0]) / max(1, ends[1] - ends[0])
        few, all_ = np.maximum(table[0] + share * (table[1] - table[0]), 1e-6)
        power = max(0.0, math.log(all_ / few) / math.log(max(2, counts[1]) / counts[0]))
        return float(all_ * (points / counts[1]) ** power)

    return cost


def _quicker(estimator: Estimator) -> list[Estimator]:
    """Less thorough ones: with fewer samples of a pose, or one hypothesis of a fundamental matrix."""
    kind = estimator.config.kind if isinstance(estimator, RobustEstimator) else None
    if kind == "essential":
        return [replace(estimator, pose_samples=samples) for samples in (500, 250)]
    return [replace(estimator, adjusted=False)] if kind == "fundamental" else []


def _to_measure(pipeline: Pipeline, image: Image) -> Image:
    """The image or, if it is tiny or shows next to nothing, noise at least as large."""
    shape = image.pixels.shape
    small = shape[0] < _LEAST_SIDES[0] and shape[1] < _LEAST_SIDES[1]
    if not small and len(pipeline.extractor([image])[0]) >= _LEAST_KEYPOINTS:
        return image
    height, width = (max(side, least) for side, least in zip(shape, _LEAST_SIDES, strict=False))
    noise = np.random.default_rng(0).integers(0, 256, (height, width, *shape[2:]), dtype=np.uint8)
    noise = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 1.0), None, 0, 255, cv2.NORM_MINMAX)
    return Image(noise, size=(width, height))


def _depths(pipeline: Pipeline) -> list[int]:
    if not can_be_cut(pipeline.matcher):
        return [pipeline.layers]
    depth = len(pipeline.matcher.model.layers)
    return list(range(min(2, depth), depth + 1))


# What fits.


def _best(pipeline: Pipeline, cost: Cost, fixed_ms: float, budget_ms: float, resize: int) -> Choice:
    """The keypoints and layers that fit with the largest layers · √keypoints, else the cheapest.

    Halving the keypoints loses fewer tracks than halving the layers. `fixed_ms` does not depend on them.
    """
    most = pipeline.config.extractor.max_keypoints
    rows = []
    for points, layers in product([*(n for n in POINTS if n < most), most], _depths(pipeline)):
        predicted = fixed_ms + cost(points, layers) + _REST
        rows.append(Choice(budget_ms, points, layers, resize, predicted, predicted <= SLACK * budget_ms))
    fitting = [row for row in rows if row.fits]
    if fitting:
        return max(fitting, key=lambda row: (max(1, row.layers) * row.max_keypoints**0.5, -row.predicted_ms))
    return min(rows, key=lambda row: row.predicted_ms)


def _choose(
    pipeline: Pipeline,
    costs: StageCosts,
    images: Sequence[Image],
    fixed_ms: float,
    budget_ms: float,
    pairs: int | None = None,
    sizes: Sequence[float] = SIZES,
) -> Choice:
    """The choice with as many stages as leave enough keypoints, with images of full size if possible.

    Args:
        pipeline, costs: what is limited, and what it costs.
        images: whose features are extracted; none where they are known.
        fixed_ms: spent whatever is chosen.
        budget_ms: for everything.
        pairs: how many pairs of a frame are matched; None: one of any images, whose other turns are tried.
        sizes: scale factors of the images.
    """
    longest = max((max(image.pixels.shape[:2]) for image in images), default=0)
    turned = can_be_cut(pipeline.matcher) and pipeline.config.extractor.kind == STEERABLE
    has = {REFINEMENT: pipeline.config.refine is not None, OTHER_TURNS: turned and pairs is None}
    most, good, best = pipeline.config.extractor.max_keypoints, [], None
    for stages, least in _LEFT_OUT:
        without = tuple(stage for stage in stages if has[stage])

        def matched(points: int, layers: int, without: tuple[str, ...] = without) -> float:
            turning = costs.turns(points, layers) if has[OTHER_TURNS] and OTHER_TURNS not in without else 0.0
            refining = 0.0 if REFINEMENT in without else costs.refine(points)
            return (pairs or 1) * costs.match(points, layers) + turning + refining + costs.verify(points)

        for factor in sizes:
            extract = sum(costs.extract(factor**2 * number_of_pixels([image])) for image in images)
            resize = max(1, round(factor * longest))
            found = replace(_best(pipeline, matched, fixed_ms + extract, budget_ms, resize), without=without)
            if best is None or found.fits > best.fits or (found.predicted_ms < best.predicted_ms > budget_ms):
                best = found
            if found.fits and found.max_keypoints >= min(least, most):
                good.append(found)
                break
    return next((one for one in good if one.resize == longest), (*good, best)[0])


class FrameCosts:
    """What frames of a sequence cost, by keypoints, layers and size of the image."""

    def __init__(self, pipeline: Pipeline, image: Image, *, stereo: bool = False) -> None:
        """Measure, on a frame as it comes.

        Args:
            pipeline: its `max_keypoints`, depth and `resize` are upper limits.
            image: a frame (a second or two).
            stereo: a frame is two images, and two pairs are matched.
        """
        self.pipeline, self._pairs, self._image = pipeline, 2 if stereo else 1, image
        self._costs = measure_costs(pipeline, [image], pairs=False)

    def choose(self, budget_ms: float) -> Choice:
        """The best combination that fits a budget in milliseconds per frame, extraction included."""
        return _choose(self.pipeline, self._costs, [self._image] * self._pairs, 0.0, budget_ms, self._pairs)

    def rest(self, choice: Choice, spent_ms: float, extract_ms: float) -> Choice:
        """What the rest of a frame is done with, once its features are extracted.

        Extraction shows how busy the machine is at this moment. Where the rest, slower by as much, would
        exceed the budget, there are fewer points and layers.

        Args:
            choice: of the frame's plan.
            spent_ms: on the frame so far.
            extract_ms: of it, on extraction.

        Returns:
            `choice` itself, or one for images of the same size.
        """
        pixels = number_of_pixels([self._image]) * (choice.resize / max(self._image.pixels.shape[:2])) ** 2
        known = self._pairs * self._costs.extract(pixels) * choice.pace
        slower = extract_ms / max(known, 1e-6)
        if slower <= 1 or spent_ms + slower * (choice.predicted_ms - known) <= choice.budget_ms:
            return choice
        pace, pipeline = slower * choice.pace, limited(self.pipeline, choice)

        def choose(budget_ms: float) -> Choice:
            return _choose(pipeline, self._costs, (), spent_ms / pace, budget_ms, self._pairs, SIZES[:1])

        found = at_pace(choose, choice.budget_ms, pace)
        return replace(found, resize=choice.resize, without=found.without or choice.without)


def plan(
    pipeline: Pipeline, images: Sequence[Image], budget_ms: float, reading_ms: float
) -> tuple[Pipeline, list[Image], Choice]:
    """The pipeline that fits the budget, the images resized for it, and the choice.

    Stages are left out before keypoints are few, and images made smaller only if less than 256 would be left.
    Where nothing has to be reduced, images of few keypoints are enlarged if that fits too; further passes
    follow while there is time.

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
    if isinstance(pipeline.estimator, RobustEstimator):  # more samples hardly ever find a better pose
        pipeline = replace(pipeline, estimator=replace(pipeline.estimator, pose_samples=2000))
    key = (pipeline.extractor, pipeline.matcher, pipeline.estimator)
    if key not in pipeline.costs:
        pipeline.costs[key] = measure_costs(pipeline, images, pairs=True)
    costs, pace = pipeline.costs[key], _pace_of(pipeline).value
    estimators = ((pipeline.estimator, costs.verify), *costs.quicker)
    allowed = _VERIFY_SHARE * budget_ms / pace
    thorough, wrong = pipeline.estimator, 256  # matches, all wrong
    estimator, verify = next((each for each in estimators if each[1](wrong) <= allowed), estimators[-1])
    pipeline, costs = replace(pipeline, estimator=estimator), replace(costs, verify=verify)
    reading_ms /= pace  # which was as slow as the rest will be
    choice = at_pace(lambda ms: _choose(pipeline, costs, images, reading_ms, ms), budget_ms, pace)
    if estimator is not thorough:
        choice = replace(choice, without=(THOROUGH_VERIFICATION, *choice.without))
    fitted = limited(pipeline, choice)
    factors = [choice.resize / max(image.pixels.shape[:2]) for image in images]
    smaller = [i if f >= 1 else i.resized(f) for i, f in zip(images, factors, strict=True)]
    reduced = any(factor < 1 for factor in factors) or not choice.fits or REFINEMENT in choice.without
    config = pipeline.config.extractor
    if not reduced and (choice.max_keypoints, choice.layers) == (config.max_keypoints, pipeline.layers):
        searched = pixels_enlarged(images, config)
        predicted = choice.predicted_ms + choice.pace * sum(costs.extract(pixels) for pixels in searched)
        if searched and predicted <= SLACK * budget_ms:
            enlarging = replace(fitted.config.extractor, sparse_resize=config.sparse_resize)
            fitted = replace(fitted, config=replace(fitted.config, extractor=enlarging))
            choice = replace(choice, predicted_ms=predicted)
    if pipeline.passes is None:
        return fitted, smaller, choice
    if reduced:
        return replace(fitted, passes=None), smaller, choice.leaving_out()
    return _with_passes(fitted, images, costs, choice, reading_ms), smaller, replace(choice, passes=True)


def _with_passes(
    fitted: Pipeline, images: Sequence[Image], costs: StageCosts, choice: Choice, reading_ms: float
) -> Pipeline:
    """The pipeline with further passes, each only while there is time for the dearest of its kind."""
    most, passes = fitted.config.extractor.max_keypoints, fitted.passes
    shares = [min(image.pixels.shape[:2]) / max(image.pixels.shape[:2]) for image in images]
    # stretched images have as many pixels as 4:3, one turned by 45 degrees as many as two
    searched = sum(max(share, 0.77) for share in shares) * passes.longer_side**2
    own = costs.extract(searched) + costs.match(most, choice.layers) + costs.verify(most)
    # images may be read again for the common region; refinement has read all pixels already
    again = 1.5 if fitted.config.refine is not None else 4.0
    region = own + again * reading_ms * any(image.scale != (1.0, 1.0) for image in images)
    total = choice.budget_ms / choice.pace - costs.refine(most) - costs.verify(most)
    limits = (total, own, costs.other(number_of_pixels(images)), region)
    passes = passes.using(fitted.extractor, _adjusted(fitted.matcher, other_turns_below=0.0))
    return replace(fitted, passes=passes.within(*(choice.pace * each / 1000 for each in limits)))


def _pace_of(pipeline: Pipeline) -> Pace:
    """How much longer than predicted the pairs took that the pipeline has matched."""
    return pipeline.costs.setdefault(("pace", pipeline.extractor, pipeline.matcher), Pace())


def learned(pipeline: Pipeline, result: Result) -> Result:
    """The result with the time that it took, from which the pipeline's next plans learn.

    `pipeline` is the one that `plan` was asked with, whose choice is the result's budget.
    """
    choice = result.budget
    first, total = ((each or result).seconds["total"] for each in (result.first, None))
    _pace_of(pipeline).add(1000 * first, predicted=choice.predicted_ms / choice.pace)
    return replace(result, budget=replace(choice, took_ms=1000 * total))
