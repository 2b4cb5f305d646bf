"""Keypoints, layers, image size and stages that fit a time budget, from costs measured on this machine."""

from __future__ import annotations

import math
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
# What is chosen from: keypoints, scale factors of the images, and stages left out, each with the fewest
# keypoints with which more of them, or of the image, is kept.
POINTS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
SIZES = (1.0, 0.75, 0.5)
REFINEMENT, OTHER_TURNS, THOROUGH_VERIFICATION = "refinement", "other turns", "thorough verification"
_LEFT_OUT = (((), 1024), ((OTHER_TURNS,), 512), ((OTHER_TURNS, REFINEMENT), 256))
PACE = "pace"  # among the costs of a pipeline: times as long as measured that its pairs take
SLACK = 0.85  # share of the budget that is planned; the rest is a margin for slower frames
Cost = Callable[..., float]  # milliseconds


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
        exceeded = self.took_ms is not None and self.took_ms > self.budget_ms
        verdict += f"; it took {self.took_ms:.0f} ms, over the budget" if exceeded else ""
        return (
            f"{self.max_keypoints} points{layers}{left_out}, images of at most {self.resize} pixels: about "
            f"{self.predicted_ms:.0f} ms{first} of {self.budget_ms:.0f} ms{verdict}"
        )


def updated_pace(pace: float, measured: float, predicted: float) -> float:
    """How many times longer than predicted the slow ones of the last works took; at least 1.

    Slower works count six times as much as quicker ones: fewer points do not shorten a wait for a core.

    Args:
        pace: before this work.
        measured: what it took.
        predicted: what its plan said of a machine left alone.
    """
    ratio = measured / max(predicted, 1e-6)
    return min(max(pace + (0.3 if ratio > pace else 0.05) * (ratio - pace), 1.0), 20.0)


# What each stage costs here.


@dataclass(frozen=True)
class StageCosts:
    """Milliseconds of each stage on this machine."""

    extract: Cost  # by number of pixels
    match: Cost  # by keypoints and layers, without early exit
    refine: Cost  # by matches
    verify: Cost  # by matches, all of them wrong
    other: float  # of the further pass with another front end and matcher
    quicker: tuple[Estimator, Cost] | None = None  # a less thorough estimator, and `verify` with it


def measure_costs(pipeline: Pipeline, images: Sequence[Image], *, pairs: bool) -> StageCosts:
    """The costs on these images, or on noise where they show nothing; a few seconds.

    Args:
        pipeline: its parts are measured.
        images: one, or both of a pair.
        pairs: pairs of any images are matched, not neighbouring frames: also verification and further passes,
            and matching where nothing corresponds, which takes longer.
    """
    image, nothing = images[0], lambda *_: 0.0
    shape, least = image.pixels.shape, (384, 512)  # pixels, below which a picture tells too little
    small = shape[0] < least[0] and shape[1] < least[1]
    if small or len(pipeline.extractor([image])[0]) < 256:
        height, width = np.maximum(shape[:2], least).tolist()
        noise = np.random.default_rng(0).integers(0, 256, (height, width, *shape[2:]), dtype=np.uint8)
        noise = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 1.0), None, 0, 255, cv2.NORM_MINMAX)
        image = Image(noise, size=(width, height))
    sizes = [image, image.resized(SIZES[-1])]
    extract = [_milliseconds(lambda each=each: pipeline.extractor([each])) for each in sizes]
    refine, verify, other, quicker = nothing, nothing, 0.0, None
    if pipeline.config.refine is not None:
        refine = _by_matches(lambda matches: pipeline.refine(image, image, matches), image.size)
    if pairs:
        camera = Camera(1000.0, 1000.0, 500.0, 500.0)
        cameras = (camera, camera) if pipeline.config.estimation.kind == "essential" else None

        def verifying(estimator: Estimator) -> Cost:
            return _by_matches(lambda m: estimator(m.points0, m.points1, cameras=cameras), (1000, 1000))

        verify = verifying(pipeline.estimator)
        if isinstance(pipeline.estimator, RobustEstimator):
            changes = {"essential": {"pose_samples": 250}, "fundamental": {"adjusted": False}}
            if changed := changes.get(pipeline.estimator.config.kind):
                quick = replace(pipeline.estimator, **changed)
                quicker = quick, verifying(quick)
        if pipeline.passes is not None and pipeline.passes.other is not None:
            second = pipeline.passes.other()
            other = _milliseconds(lambda: second.match_images("", images))
    match = _matching_cost(pipeline, pipeline.extractor([image])[0], unrelated=pairs)
    return StageCosts(_line([_pixels([i]) for i in sizes], extract), match, refine, verify, other, quicker)


def _milliseconds(run: Callable[[], object]) -> float:
    """The median time of three runs, after one that allocates memory and selects kernels."""
    times = []
    for _ in range(4):
        start = perf_counter()
        run()
        times.append(1000 * (perf_counter() - start))
    return float(np.median(times[1:]))


def _pixels(images: Sequence[Image]) -> int:
    return sum(image.pixels.shape[0] * image.pixels.shape[1] for image in images)


def _line(where: Sequence[float], values: Sequence[float]) -> Cost:
    """The line through two measurements, constant if it would fall."""
    slope = max(0.0, (values[0] - values[1]) / (where[0] - where[1]))
    return lambda x: max(0.0, values[0] + slope * (x - where[0]))


def _by_matches(run: Callable[[Matches], object], size: tuple[int, int]) -> Cost:
    """Milliseconds by number of matches, which are random points of both images."""
    times, counts = [], (200, 1000)
    for count in counts:
        points = np.random.default_rng(0).uniform(0, size, (2, count, 2)).astype(np.float32)
        indices = np.repeat(np.arange(count)[:, None], 2, axis=1)
        matches = Matches.from_indices(indices, *points, np.ones(count))
        times.append(_milliseconds(lambda matches=matches: run(matches)))
    return _line(counts, times)


def _matching_cost(pipeline: Pipeline, features: Features, *, unrelated: bool) -> Cost:
    """By keypoints and layers: a power of the first, linear in the second."""
    if not len(features):
        return lambda points, layers: 0.0
    other, most = features, min(len(features), POINTS[-1])
    if unrelated:
        noise = np.random.default_rng(0).normal(size=features.descriptors.shape).astype(np.float32)
        other = replace(features, descriptors=noise / np.linalg.norm(noise, axis=-1, keepdims=True))
    matcher = _adjusted(pipeline.matcher, early_exit=False, pruning=False, other_turns_below=0.0)
    few, least, deepest = max(1, most // 4), _depths(pipeline)[0], _depths(pipeline)[-1]
    times = []
    for count, layers in ((most, deepest), (few, deepest), (most, least)):
        cut, some = with_layers(matcher, layers), np.arange(count)
        sides = [Features.stack([side.select(some)]) for side in (features, other)]
        times.append(max(_milliseconds(lambda cut=cut, sides=sides: cut(*sides)), 1e-6))
    all_, of_few, of_least = times
    power = max(0.0, math.log(all_ / of_few) / math.log(max(2, most) / few))
    of_layers = _line((deepest, least), (all_, of_least)) if deepest > least else lambda layers: all_
    return lambda points, layers: of_layers(layers) * (points / most) ** power


def _adjusted(matcher: Any, **policy: Any) -> Any:
    """A matcher with a network, used otherwise; any other as it is."""
    if not can_be_cut(matcher):
        return matcher
    return matcher.adjusted(policy=replace(matcher.model.config.policy, **policy))


def _depths(pipeline: Pipeline) -> range:
    if not can_be_cut(pipeline.matcher):
        return range(pipeline.layers, pipeline.layers + 1)
    depth = len(pipeline.matcher.model.layers)
    return range(min(2, depth), depth + 1)


# What fits.


def _choose(
    pipeline: Pipeline,
    costs: StageCosts,
    images: Sequence[Image],
    spent_ms: float,
    budget_ms: float,
    pace: float,
    pairs: int | None = None,
) -> Choice:
    """The best settings that fit, else the cheapest.

    Images keep their size if enough keypoints fit with it, and as many stages as leave enough; then the most
    layers · √keypoints: halving the keypoints loses fewer tracks than halving the layers.

    Args:
        pipeline, costs: what is limited, and what it costs.
        images: whose features are extracted; none where they are known.
        spent_ms: whatever is chosen.
        budget_ms: for everything.
        pace: everything takes so many times as long as was measured.
        pairs: how many pairs of a frame are matched; None: one of any images, whose other turns are tried.
    """
    most = pipeline.config.extractor.max_keypoints
    longest = max((max(image.pixels.shape[:2]) for image in images), default=0)
    turned = pairs is None and can_be_cut(pipeline.matcher) and pipeline.config.extractor.kind == STEERABLE
    counts = [*(n for n in POINTS if n < most), most]
    # Of each pair of images, by keypoints and layers; then what trying its other turns takes besides.
    matching = {each: costs.match(*each) for each in product(counts, _depths(pipeline))}
    turning = {
        (n, k): len(QUARTER_TURNS) * costs.match(min(n, PROBED), k) + ms for (n, k), ms in matching.items()
    }
    by_points = {n: (costs.refine(n), costs.verify(n)) for n in counts}
    best, best_key = None, None
    for (stages, least), factor in product(_LEFT_OUT, SIZES if images else SIZES[:1]):
        extracting = sum(costs.extract(factor**2 * _pixels([image])) for image in images)
        without = (OTHER_TURNS,) * (turned and OTHER_TURNS in stages)
        without += (REFINEMENT,) * (pipeline.config.refine is not None and REFINEMENT in stages)
        for (points, layers), ms in matching.items():
            refining, verifying = by_points[points]
            ms = (pairs or 1) * ms + verifying + (0.0 if REFINEMENT in stages else refining)
            ms += turning[points, layers] if turned and OTHER_TURNS not in stages else 0.0
            predicted = spent_ms + pace * (extracting + ms + 6.0)  # for geometry, tracks and pose
            fits, enough = predicted <= SLACK * budget_ms, points >= min(least, most)
            work = max(1, layers) * points**0.5
            key = (fits, fits and (enough, enough and factor == 1, -len(stages), factor, work), -predicted)
            if best_key is None or key > best_key:
                resize, best_key = max(1, round(factor * longest)), key
                best = Choice(budget_ms, points, layers, resize, predicted, fits, without, pace)
    return best


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

    def choose(self, budget_ms: float, pace: float = 1.0) -> Choice:
        """The best that fits a budget in milliseconds per frame where all takes `pace` times as long."""
        images = [self._image] * self._pairs
        return _choose(self.pipeline, self._costs, images, 0.0, budget_ms, pace, self._pairs)

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
        pixels = _pixels([self._image]) * (choice.resize / max(self._image.pixels.shape[:2])) ** 2
        known = self._pairs * self._costs.extract(pixels) * choice.pace
        slower = extract_ms / max(known, 1e-6)
        if slower <= 1 or spent_ms + slower * (choice.predicted_ms - known) <= choice.budget_ms:
            return choice
        pace, pipeline = slower * choice.pace, limited(self.pipeline, choice)
        found = _choose(pipeline, self._costs, (), spent_ms, choice.budget_ms, pace, self._pairs)
        return replace(found, resize=choice.resize, without=found.without or choice.without)


def plan(
    pipeline: Pipeline, images: Sequence[Image], budget_ms: float, reading_ms: float
) -> tuple[Pipeline, list[Image], Choice]:
    """The pipeline that fits the budget, the images resized for it, and the choice.

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
    costs, pace, without = pipeline.costs[key], pipeline.costs.get(PACE, 1.0), ()
    # Verification of 256 wrong matches may take .15 of the budget (measurements/speed.md).
    if costs.quicker is not None and pace * costs.verify(256) > 0.15 * budget_ms:
        estimator, verify = costs.quicker
        pipeline, costs = replace(pipeline, estimator=estimator), replace(costs, verify=verify)
        without = (THOROUGH_VERIFICATION,)
    choice = _choose(pipeline, costs, images, reading_ms, budget_ms, pace)
    choice = replace(choice, without=(*without, *choice.without))
    fitted, config = limited(pipeline, choice), pipeline.config.extractor
    factors = [choice.resize / max(image.pixels.shape[:2]) for image in images]
    smaller = [i if f >= 1 else i.resized(f) for i, f in zip(images, factors, strict=True)]
    reduced = min(factors) < 1 or not choice.fits or REFINEMENT in choice.without
    if not reduced and (choice.max_keypoints, choice.layers) == (config.max_keypoints, pipeline.layers):
        searched = pixels_enlarged(images, config)
        predicted = choice.predicted_ms + pace * sum(map(costs.extract, searched))
        if searched and predicted <= SLACK * budget_ms:
            enlarging = replace(fitted.config.extractor, sparse_resize=config.sparse_resize)
            fitted = replace(fitted, config=replace(fitted.config, extractor=enlarging))
            choice = replace(choice, predicted_ms=predicted)
    if pipeline.passes is None:
        return fitted, smaller, choice
    if reduced:
        return replace(fitted, passes=None), smaller, choice.leaving_out()
    # Each pass while there is time for the dearest of its kind, and for what follows all of them.
    most, passes = fitted.config.extractor.max_keypoints, fitted.passes
    # Stretched images have at least as many pixels as 4:3, one turned by 45 degrees as many as two.
    shares = (min(image.pixels.shape[:2]) / max(image.pixels.shape[:2]) for image in images)
    searched = sum(max(share, 0.77) for share in shares) * passes.longer_side**2
    own = costs.extract(searched) + costs.match(most, choice.layers) + costs.verify(most)
    # Images may be read again for the common region; refinement has read all pixels already.
    again = 1.5 if fitted.config.refine is not None else 4.0
    region = pace * own + again * reading_ms * any(image.scale != (1.0, 1.0) for image in images)
    total = budget_ms - pace * (costs.refine(most) + costs.verify(most))
    limits = (total, pace * own, pace * costs.other, region)
    passes = passes.using(fitted.extractor, _adjusted(fitted.matcher, other_turns_below=0.0))
    fitted = replace(fitted, passes=passes.within(*(each / 1000 for each in limits)))
    return fitted, smaller, replace(choice, passes=True)


def learned(pipeline: Pipeline, result: Result) -> Result:
    """The result with the time that it took, from which the pipeline's next plans learn.

    `pipeline` is the one that `plan` was asked with, whose choice is the result's budget.
    """
    choice = result.budget
    first, total = ((each or result).seconds["total"] for each in (result.first, None))
    pace = updated_pace(pipeline.costs.get(PACE, 1.0), 1000 * first, choice.predicted_ms / choice.pace)
    pipeline.costs[PACE] = pace
    return replace(result, budget=replace(choice, took_ms=1000 * total))
