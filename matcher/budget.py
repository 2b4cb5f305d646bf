"""Keypoints and layers that fit a time budget, from costs measured on this machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import Protocol, TypeVar

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.config import GRID_KIND, PipelineConfig
from matcher.errors import UsageError, check_number
from matcher.extract.extractor import pixels_enlarged
from matcher.match.blocks import can_be_cut, with_layers
from matcher.match.steering import OTHER_TURNS as STEERED_TURNS
from matcher.match.steering import PROBED, STEERABLE
from matcher.types import Estimator, Extractor, Features, Image, Matcher, Matches, strongest
from matcher.verify.estimation import RobustEstimator

# --- choice: Keypoints and layers that fit a time budget, from costs measured on this machine.

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


# --- costs: What matching a pair costs on this machine, stage by stage, measured once for time budgets.

_MATCHES = (200, 1000)  # random ones, on which verification is measured: its worst case
_FEWER_SAMPLES = (500, 250)  # of a pose, by ever quicker estimators
_CAMERA = Camera(1000.0, 1000.0, 500.0, 500.0)  # of random matches
# Images of less are not measured but noise: of fewer keypoints, and of fewer pixels a side (height, width).
_LEAST_KEYPOINTS, _LEAST_SIDES = 256, (384, 512)


class ImageMatcher(Protocol):
    """A front end and the matcher for its features."""

    def match_images(self, name: str, images: Sequence[Image]) -> object:
        """The matches of two images, under the name of a pass."""


class Passes(Protocol):
    """What follows a first pass of which too few matches agree."""

    other: Callable[[], ImageMatcher] | None
    longer_side: int  # of what is matched, pixels

    def within(self, total: float, own: float, other: float, region: float) -> Passes:
        """The passes that fit in so many seconds.

        One takes `own` at most, with another front end `other`, of the common region `region`.
        """

    def using(self, extractor: Extractor, matcher: Matcher) -> Passes:
        """The passes with this front end and matcher of their own."""


class PairParts(Parts, Protocol):
    """The parts of a pipeline that are needed to plan a pair."""

    passes: Passes | None
    costs: dict[tuple, object]  # `PairCosts` by the parts that they were measured with


Q = TypeVar("Q", bound=Parts)


@dataclass(frozen=True)
class PairCosts:
    """Milliseconds of each stage on this machine."""

    extract: Callable[[float], float]  # by number of pixels
    match: Callable[[int, int], float]  # by keypoints and layers, without early exit
    refine: Callable[[float], float]  # by matches
    verify: Callable[[float], float]  # by matches, all of them wrong
    verify_pass: Callable[[float], float]  # after a further pass: a fundamental matrix of any pair
    other: Callable[[float], float]  # of the further pass with another front end and matcher, by pixels
    quicker: tuple[tuple[Estimator, Callable[[float], float]], ...] = ()  # others, and `verify` with each

    def turns(self, points: int, layers: int) -> float:
        """Of trying the other turns: each with a few keypoints, and one that is promising with all."""
        return len(STEERED_TURNS) * self.match(min(points, PROBED), layers) + self.match(points, layers)


def measured_costs(pipeline: PairParts, images: Sequence[Image]) -> PairCosts:
    """The measured costs of a pipeline's parts; the first call takes a few seconds."""
    key = (pipeline.extractor, pipeline.matcher, pipeline.estimator)
    if key not in pipeline.costs:
        pipeline.costs[key] = _measure(pipeline, images)
    return pipeline.costs[key]


def without_other_turns(pipeline: Q) -> Q:
    """The pipeline without attempts at other turns, which can take several times as long."""
    if not can_be_cut(pipeline.matcher):
        return pipeline  # it tries none
    policy = replace(pipeline.matcher.model.config.policy, other_turns_below=0.0)
    return replace(pipeline, matcher=pipeline.matcher.adjusted(policy=policy))


def _measure(pipeline: PairParts, images: Sequence[Image]) -> PairCosts:
    """Measure costs on the given pair; matching also without any correspondence, which takes longer."""
    images = [_to_measure(pipeline, image, seed) for seed, image in enumerate(images)]
    sizes, times = [], []
    for factor in (1.0, SIZES[-1]):
        image = images[0] if factor == 1.0 else images[0].resized(factor)
        sizes.append(number_of_pixels([image]))
        times.append(milliseconds(lambda image=image: pipeline.extractor([image])))
    features = pipeline.extractor([images[0]])[0]
    single = without_other_turns(pipeline)
    easy = hard = _nothing_costs  # a front end that finds no keypoint even in noise
    if len(features):
        hard, easy = (
            matching_cost(single, features, other) for other in (_with_random_descriptors(features), None)
        )
    estimation = pipeline.config.estimation
    cameras = (_CAMERA, _CAMERA) if estimation.kind == "essential" else None
    verify = verify_pass = _verifying(pipeline.estimator, cameras)
    if pipeline.passes is not None and estimation.kind != "fundamental":
        verify_pass = _verifying(RobustEstimator(replace(estimation, kind="fundamental")))
    return PairCosts(
        extract=line(sizes, times),
        match=lambda points, layers: max(easy(points, layers), hard(points, layers)),
        refine=refining_cost(pipeline, images[0]),
        verify=verify,
        verify_pass=verify_pass,
        other=_other(pipeline, images),
        quicker=tuple((each, _verifying(each, cameras)) for each in _quicker(pipeline.estimator)),
    )


def _quicker(estimator: Estimator) -> list[Estimator]:
    """Less thorough ones: with fewer samples of a pose, or one hypothesis of a fundamental matrix."""
    kind = estimator.config.kind if isinstance(estimator, RobustEstimator) else None
    if kind == "essential":
        return [replace(estimator, pose_samples=samples) for samples in _FEWER_SAMPLES]
    return [replace(estimator, adjusted=False)] if kind == "fundamental" else []


def _verifying(
    estimator: Estimator, cameras: tuple[Camera, Camera] | None = None
) -> Callable[[float], float]:
    """Milliseconds by matches, which are random."""
    estimate = partial(estimator, cameras=cameras)
    return line(_MATCHES, [milliseconds(lambda n=n: estimate(*_random(n))) for n in _MATCHES])


def _to_measure(pipeline: PairParts, image: Image, seed: int) -> Image:
    """The image or, if it is tiny or shows next to nothing, noise at least as large."""
    shape = image.pixels.shape
    small = shape[0] < _LEAST_SIDES[0] and shape[1] < _LEAST_SIDES[1]
    if not small and len(pipeline.extractor([image])[0]) >= _LEAST_KEYPOINTS:
        return image
    height, width = (max(side, least) for side, least in zip(shape, _LEAST_SIDES, strict=False))
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, *shape[2:]), dtype=np.uint8)
    noise = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 1.0), None, 0, 255, cv2.NORM_MINMAX)
    return Image(noise, size=(width, height))


def _other(pipeline: PairParts, images: Sequence[Image]) -> Callable[[float], float]:
    """Milliseconds of the pass with another front end, by the pixels of both images: no less for fewer."""
    if pipeline.passes is None or pipeline.passes.other is None:
        return lambda pixels: 0.0
    second, known = pipeline.passes.other(), number_of_pixels(images)
    measured = milliseconds(lambda: second.match_images("", images))
    return lambda pixels: measured * max(1.0, pixels / known)


def number_of_pixels(images: Sequence[Image]) -> int:
    """Of all images together."""
    return sum(image.pixels.shape[0] * image.pixels.shape[1] for image in images)


def _nothing_costs(points: int, layers: int) -> float:
    """The cost of matching no keypoints."""
    return 0.0


def _with_random_descriptors(features: Features) -> Features:
    """The same keypoints with random descriptors."""
    noise = np.random.default_rng(0).normal(size=features.descriptors.shape).astype(np.float32)
    return replace(features, descriptors=noise / np.linalg.norm(noise, axis=-1, keepdims=True))


def _random(count: int) -> tuple[np.ndarray, np.ndarray]:
    points = np.random.default_rng(0).uniform(0, 1000, (2, count, 2))
    return points[0], points[1]


# --- frames: Settings with which the frames of a sequence keep a time budget.

_LEAST_POINTS_FRAMES = 256  # rather than fewer, a smaller image is used


class FrameCosts:
    """What frames of a sequence cost, by keypoints, layers and size of the image."""

    def __init__(self, pipeline: Parts, image: Image, *, stereo: bool = False) -> None:
        """Set up.

        Args:
            pipeline: its `max_keypoints`, depth and `resize` are upper limits.
            image: a frame as it comes, on which the costs are measured (a second or two).
            stereo: a frame is two images, and two pairs are matched.
        """
        self.pipeline, self._times = pipeline, 2 if stereo else 1
        self._refine = refining_cost(pipeline, image)
        self._image: Image | None = image
        self._side = max(image.pixels.shape[:2])
        self._sizes: dict[float, float] = {}  # milliseconds of extraction by scale factor
        self._match: Callable[[int, int], float] | None = None  # of matching, by points and layers
        self._measured = 0  # points that it was measured with, at most

    def choose(self, budget_ms: float) -> Choice:
        """The best combination that fits a budget in milliseconds per frame, extraction included.

        Among those that fit, the one with the largest layers · √keypoints is chosen: halving the keypoints
        loses fewer tracks than halving the layers. Smaller images are used only if fewer than 256 keypoints
        would be left, and refinement is left out only if fewer than 512 would be.
        """
        return self._refined_or_not(self.pipeline, lambda refine: self._first_that_fits(budget_ms, refine))

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
        known = self._times * self._at(self._factor(choice))[0] * choice.pace
        slower = extract_ms / max(known, 1e-6)
        if slower <= 1 or spent_ms + slower * (choice.predicted_ms - known) <= choice.budget_ms:
            return choice
        pace, pipeline = slower * choice.pace, limited(self.pipeline, choice)
        match = self._at(self._factor(choice))[1]

        def within(budget_ms: float, refine: Callable[[float], float]) -> Choice:
            before = spent_ms / (pace * self._times)
            cost = self._with_refinement(match, refine)
            return best_choice(pipeline, cost, self._times, before, budget_ms, choice.resize)

        def fitting(refine: Callable[[float], float]) -> Choice:
            return at_pace(lambda budget_ms: within(budget_ms, refine), choice.budget_ms, pace)

        found = self._refined_or_not(pipeline, fitting)
        return replace(found, without=found.without or choice.without)

    def settle(self) -> None:
        """Measure all that is still to be known, since later frames cannot wait."""
        for factor in SIZES:
            self._at(factor)
        self._image = None

    def _refined_or_not(
        self, pipeline: Parts, fitting: Callable[[Callable[[float], float]], Choice]
    ) -> Choice:
        """What fits with the cost of refinement, or, where that leaves too few points, without refinement."""
        if pipeline.config.refine is None:
            return fitting(_nothing_frames)
        best = fitting(self._refine)
        if enough(pipeline, best, POINTS_WHOLE):
            return best
        return replace(fitting(_nothing_frames), without=(REFINEMENT,))

    def _with_refinement(
        self, match: Callable[[int, int], float], refine: Callable[[float], float]
    ) -> Callable[[int, int], float]:
        """Milliseconds of one of a frame's pairs; a frame is refined once."""
        return lambda count, layers: match(count, layers) + refine(count) / self._times

    def _factor(self, choice: Choice) -> float:
        """Which of the sizes a choice is for."""
        return min(SIZES, key=lambda factor: abs(factor * self._side - choice.resize))

    def _first_that_fits(self, budget_ms: float, refine: Callable[[float], float]) -> Choice:
        """The choice for the largest images that leave enough keypoints."""
        best: Choice | None = None
        for factor in SIZES:
            extract_ms, match = self._at(factor)
            cost = self._with_refinement(match, refine)
            resize = max(1, round(self._side * factor))
            found = best_choice(self.pipeline, cost, self._times, extract_ms, budget_ms, resize)
            if best is None or found.fits or found.predicted_ms < best.predicted_ms:
                best = found
            if enough(self.pipeline, found, _LEAST_POINTS_FRAMES):
                break
        return best

    def _at(self, factor: float) -> tuple[float, Callable[[int, int], float]]:
        """Milliseconds of extraction, and of matching, for images of a size."""
        if factor not in self._sizes:
            smaller = self._image if factor == 1.0 else self._image.resized(factor)
            extract_ms, features = _extraction(self.pipeline, smaller)
            if self._match is None or len(features) > self._measured:
                self._match, self._measured = matching_cost(self.pipeline, features), len(features)
            self._sizes[factor] = extract_ms
        return self._sizes[factor], self._match


def _extraction(pipeline: Parts, image: Image) -> tuple[float, Features]:
    features = pipeline.extractor([image])[0]
    return milliseconds(lambda: pipeline.extractor([image])), features


def _nothing_frames(count: float) -> float:
    """The cost of what is left out."""
    return 0.0


# --- pace: How much longer work takes than its plan said, because other programs use the machine.

_LAST = 20  # works that are looked at
# Of every so many, one slower work is passed over: less work does not shorten waits for a core, and plans for
# the slowest left half of a sequence's points for nothing.
_EACH = 7
_CHANGE = 0.1  # of the pace, above which it is worth another plan
_FASTEST, _SLOWEST = 1.0, 20.0


class Pace:
    """A running ratio of measured to predicted time, of the slow ones of the last works.

    It is at least 1: that easy pairs take less than predicted says nothing of the next one.

    >>> pace = Pace()
    >>> for milliseconds in (30, 62, 58):
    ...     pace.add(milliseconds, predicted=31)
    >>> pace.value
    2.0
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_LAST)

    def add(self, measured: float, *, predicted: float) -> None:
        """Take in a work that took so many milliseconds, and what its plan said on a machine left alone."""
        self._ratios.append(measured / max(predicted, 1e-6))

    @property
    def value(self) -> float:
        """Times as long as predicted that the next work may take."""
        if not self._ratios:
            return _FASTEST
        slow = sorted(self._ratios)[-1 - len(self._ratios) // _EACH]
        return min(max(slow, _FASTEST), _SLOWEST)

    def differs_from(self, value: float) -> bool:
        """Whether a plan for another pace is out of date."""
        return abs(self.value - value) > _CHANGE * value


# --- pairs: Settings that match one pair within a time budget.

_POINTS_WITH_TURNS = 1024  # rather than fewer, other turns are left out
# Stages that are left out before only fewer keypoints than these are left.
_LEFT_OUT = (((), _POINTS_WITH_TURNS), ((OTHER_TURNS,), POINTS_WHOLE), ((OTHER_TURNS, REFINEMENT), 0))
_LEAST_POINTS_PAIRS = 256  # rather than fewer, smaller images are used
# For a pose: where most matches are wrong, they take most of the time; more hardly ever find a better one.
_POSE_SAMPLES = 2_000
# Sides of 4:3: stretched images have no more pixels, and one turned by 45 degrees as many as two.
_ASPECT = 0.77
# Share of the budget that the verification of so many wrong matches takes at most, where it can be quicker.
_VERIFY_SHARE, _WRONG_MATCHES = 0.15, 256
# Of the time of reading, what reading again for the common region takes at most; refinement reads all pixels.
_READ_AGAIN = {True: 1.5, False: 4.0}  # with refinement, without


Q_PAIRS = TypeVar("Q", bound=PairParts)


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
    pipeline: Q_PAIRS, images: Sequence[Image], budget_ms: float, reading_ms: float
) -> tuple[Q_PAIRS, list[Image], Choice]:
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


def _verifying_in(milliseconds: float, pipeline: Q_PAIRS, costs: PairCosts) -> tuple[Q_PAIRS, PairCosts]:
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
    pipeline: PairParts, fitted: Q_PAIRS, images: Sequence[Image], costs: PairCosts, choice: Choice
) -> tuple[Q_PAIRS, Choice]:
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
        if enough(pipeline, found, _LEAST_POINTS_PAIRS):
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
