"""Keypoints, layers, image size and stages that fit a time budget, from costs measured on this machine."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.config import GRID_KIND
from matcher.errors import UsageError, check_number
from matcher.match.adaptivity import can_be_cut, with_layers
from matcher.match.steering import OTHER_TURNS as QUARTER_TURNS
from matcher.match.steering import PROBED, STEERABLE_KIND
from matcher.passes import LocalMatcher, TimeLimit
from matcher.types import Features, Image, Matches, strongest, to_numpy
from matcher.verify.estimation import RobustEstimator

if TYPE_CHECKING:
    from matcher.pipeline import Pipeline
    from matcher.result import Result

BUDGETS = (1e-3, 1e9)  # milliseconds that may be asked for
REFINEMENT, OTHER_TURNS, THOROUGH_VERIFICATION = "refinement", "other turns", "thorough verification"
PACE = "pace"  # among the costs of a pipeline: times as long as measured that its pairs take
# Milliseconds of each stage here: "extract" by pixels, "match" by keypoints and layers, without early exit,
# "refine", "verify" and "verify quickly" by matches, "other" of the pass with another front end and matcher.
Costs = Mapping[str, Callable[..., float]]


@dataclass(frozen=True)
class Choice:
    """The settings chosen for a budget."""

    budget_ms: float
    max_keypoints: int
    layers: int  # 0: a matcher without layers
    resize: int  # longer side of the image that features are extracted from, pixels
    predicted_ms: float  # per frame, or of a pair's first pass
    fits: bool  # with time to spare; False: even the cheapest settings, which were chosen, leave too little
    # Left out: "thorough verification", "other turns", "refinement", "further passes", or some of these.
    without: tuple[str, ...] = ()
    pace: float = 1.0  # of the predicted time: times as long as on a machine left alone, as works before took
    took_ms: float | None = None  # of the pair that was matched with it
    passes: bool = False  # further ones follow if a pair needs them, while there is time

    def leaving_out(self, passes: Sequence[object] = ()) -> Choice:
        """The same where there was no time for more than these passes."""
        return replace(self, without=(*self.without, "some " * (len(passes) > 1) + "further passes"))

    def __str__(self) -> str:
        layers = f", {self.layers} layers" if self.layers else ""
        left_out = f", without {', '.join(self.without)}" if self.without else ""
        first = " for the first pass" if self.passes and "further passes" not in self.without else ""
        verdict = "" if self.fits else ", with little to spare"
        if self.predicted_ms > self.budget_ms:
            verdict = "; nothing smaller is offered, so this takes longer"
        verdict += f"; the machine is busy, {self.pace:.1f} times as slow" if self.pace > 1.2 else ""
        if self.took_ms is not None and self.took_ms > self.budget_ms:
            verdict += f"; it took {self.took_ms:.0f} ms, over the budget"
        return (
            f"{self.max_keypoints} points{layers}{left_out}, images of at most {self.resize} pixels: about "
            f"{self.predicted_ms:.0f} ms{first} of {self.budget_ms:.9g} ms{verdict}"
        )


def updated_pace(pace: float, measured: float, predicted: float) -> float:
    """How many times longer than predicted the slow ones of the last works took; at least 1."""
    ratio = measured / max(predicted, 1e-6)  # larger ones count more: fewer points end no wait for a core
    return min(max(pace + (0.3 if ratio > pace else 0.05) * (ratio - pace), 1.0), 20.0)


def measure_costs(pipeline: Pipeline, images: Sequence[Image], *, pairs: bool) -> Costs:
    """The costs on the first image, or on noise where it shows nothing; with `pairs` of images that share
    nothing, without of neighbouring frames, which are not verified. It takes some seconds."""
    image, rng = images[0], np.random.default_rng(0)
    if len(pipeline.extractor([image])[0]) < 256:
        shape = (*np.maximum(image.pixels.shape[:2], (384, 512)).tolist(), *image.pixels.shape[2:])
        noise = cv2.GaussianBlur(rng.integers(0, 256, shape, dtype=np.uint8), (0, 0), 1.0)
        image = Image(cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX), size=shape[1::-1])
    most, depths = max(1, len(pipeline.extractor([image])[0])), _depths(pipeline)
    cameras = (Camera(1000, 1000, 500, 500),) * 2 if pipeline.config.estimation.kind == "essential" else None

    def measured(points: int, layers: int, factor: float, *without: str) -> dict[str, float]:
        view = image.resized(factor)
        cut = limited(pipeline, Choice(0, points, layers, 1, 0, True, (OTHER_TURNS, *without)))
        matcher = adjusted(cut.matcher, early_exit=False, pruning=False)
        features = other = cut.extractor([view])[0]
        if pairs:
            noise = rng.normal(size=features.descriptors.shape).astype(np.float32)
            other = replace(other, descriptors=noise / np.linalg.norm(noise, axis=-1, keepdims=True))
        sides, points = [Features.stack([each]) for each in (features, other)], to_numpy(features.keypoints)
        wrong = np.stack([index := np.arange(len(points)), rng.permutation(index)], axis=1)
        matches = Matches.from_indices(wrong, points, points, np.ones(len(points)))
        works = {"extract": lambda: cut.extractor([view]), "match": lambda: matcher(*sides)}
        works["refine"] = lambda: cut.config.refine and cut.refine(view, view, matches)
        works["verify"] = lambda: pairs and cut.estimator(matches.points0, points, cameras=cameras)
        return {stage: _milliseconds(work) for stage, work in works.items()}

    whole, few = measured(most, depths[-1], 1.0), measured(max(1, most // 4), depths[-1], 0.5)
    quick = measured(most, depths[0], 1.0, THOROUGH_VERIFICATION)

    def cost(stage: str, size: int) -> Callable[[int], float]:
        """A power of the size of the work, by the time of a quarter of it."""
        power = max(0.0, math.log(whole[stage] / few[stage], 4))
        return lambda of: whole[stage] * (of / size) ** power

    costs = {stage: cost(stage, most) for stage in whole}
    costs["extract"] = cost("extract", math.prod(image.pixels.shape[:2]))
    by_points, share = costs["match"], min(1.0, quick["match"] / whole["match"])
    by_depth = dict(zip(depths[::-1], np.linspace(1.0, share, len(depths)).tolist(), strict=True))
    costs["match"] = lambda points, layers: by_depth[layers] * by_points(points)
    costs["verify quickly"] = lambda n: costs["verify"](n) * quick["verify"] / whole["verify"]
    other = pairs and pipeline.passes and pipeline.passes.other
    beside = _milliseconds(lambda: other().match_images("", images)) if other else 0.0
    return costs | {"other": lambda: beside} if pairs else costs


def _milliseconds(work: Callable[[], object]) -> float:
    return max(1000 * min(timeit.repeat(work, number=1, repeat=3)), 1e-6)


def _quick(estimator: Any) -> Any:
    kind = estimator.config.kind if isinstance(estimator, RobustEstimator) else ""
    changes = {"essential": {"pose_samples": 250}, "fundamental": {"adjusted": False}}
    return replace(estimator, **changes[kind]) if kind in changes else estimator


def adjusted(matcher: Any, **policy: Any) -> Any:
    """A matcher with a network, used otherwise; any other as it is."""
    if can_be_cut(matcher):
        matcher = matcher.with_policy(replace(matcher.model.config.policy, **policy))
    return matcher


def _depths(pipeline: Pipeline) -> Sequence[int]:
    least = 2 if can_be_cut(pipeline.matcher) else pipeline.layers
    return range(min(least, pipeline.layers), pipeline.layers + 1)


def choose(
    costs: Costs, pipeline: Pipeline, images: Sequence[Image], budget_ms: float, spent_ms: float, pace: float
) -> Choice:
    """The best settings that fit, .15 of the budget being a margin for slower frames, else the cheapest.

    Images keep their size if enough keypoints fit with it, and as many stages as leave enough; then the most
    layers · √keypoints: halving the keypoints loses fewer tracks than halving the layers.
    """
    config, frame, found = pipeline.config, "other" not in costs, []
    most, longest = config.extractor.max_keypoints, max(max(image.pixels.shape[:2]) for image in images)
    areas = [math.prod(image.pixels.shape[:2]) for image in images]
    turned = not frame and can_be_cut(pipeline.matcher) and config.extractor.kind == STEERABLE_KIND
    quick = not frame and _quick(pipeline.estimator) is not pipeline.estimator
    has = {OTHER_TURNS: turned, THOROUGH_VERIFICATION: quick, REFINEMENT: config.refine is not None}
    # Stages left out, each with the fewest keypoints with which more of them, or of the image, is kept.
    stages = [(tuple(has)[:number], least) for number, least in enumerate((1024, 512, 512, 256))]
    counts = {*range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256)}
    counts = {most, *(n for n in counts if n < most)}
    for (left, least), factor, points, layers in product(stages, (1.0, 0.75, 0.5), counts, _depths(pipeline)):
        matching = costs["match"](points, layers)
        ms = 6.0 + sum(costs["extract"](factor**2 * area) for area in areas)  # and tracks, pose
        ms += matching * (len(images) if frame else 1)  # a stereo frame is matched twice
        ms += costs["refine"](points) if REFINEMENT not in left else 0.0
        ms += costs["verify quickly" if THOROUGH_VERIFICATION in left else "verify"](points)
        if turned and OTHER_TURNS not in left:
            ms += matching + len(QUARTER_TURNS) * costs["match"](min(points, PROBED), layers)
        predicted, enough = spent_ms + pace * ms, points >= min(least, most)
        fits, work = predicted <= 0.85 * budget_ms, max(1, layers) * points**0.5
        key = (fits, fits and (enough, enough and factor == 1, -len(left), factor, work), -predicted)
        resize, without = max(1, round(factor * longest)), tuple(stage for stage in left if has[stage])
        found.append((key, Choice(budget_ms, points, layers, resize, predicted, fits, without, pace)))
    return max(found, key=lambda each: each[0])[1]


def limited(pipeline: Pipeline, choice: Choice) -> Pipeline:
    """The pipeline with the chosen keypoints, layers, image size, and without what is left out."""
    config, extractor = pipeline.config, pipeline.extractor
    # For images of this size, soft or not, which are searched once.
    found = replace(config.extractor.of_size(choice.resize), max_keypoints=choice.max_keypoints)
    own = getattr(extractor, "limited", None)  # whichever library runs it
    cut = own or (lambda most: lambda images: [strongest(each, most) for each in extractor(images)])
    matcher, estimator = with_layers(pipeline.matcher, choice.layers), pipeline.estimator
    if OTHER_TURNS in choice.without:
        matcher = adjusted(matcher, other_turns_below=0.0)
    if THOROUGH_VERIFICATION in choice.without:
        estimator = _quick(estimator)
    config = replace(config, extractor=found, refine=None if REFINEMENT in choice.without else config.refine)
    extractor = cut(found.max_keypoints)
    return replace(pipeline, extractor=extractor, matcher=matcher, estimator=estimator, config=config)


def plan(
    pipeline: Pipeline, images: Sequence[Image], budget_ms: float, reading_ms: float
) -> tuple[Pipeline, list[Image], Choice]:
    """The pipeline for a pair within a budget, reading included, its images resized, and the choice; further
    passes follow while there is time, if nothing has to be reduced. `UsageError`: no keypoints or budget."""
    check_number(budget_ms, "budget_ms", *BUDGETS)
    if pipeline.config.extractor.kind == GRID_KIND:
        raise UsageError("budget_ms needs keypoints, and this preset has only the cells of a grid")
    if isinstance(pipeline.estimator, RobustEstimator):  # more samples hardly ever find a better pose
        pipeline = replace(pipeline, estimator=replace(pipeline.estimator, pose_samples=2000))
    key = (pipeline.extractor, pipeline.matcher, pipeline.estimator)
    if key not in pipeline.costs:
        pipeline.costs[key] = measure_costs(pipeline, images, pairs=True)
    costs, pace = pipeline.costs[key], pipeline.costs.get(PACE, 1.0)
    choice = choose(costs, pipeline, images, budget_ms, reading_ms, pace)
    fitted, config = limited(pipeline, choice), pipeline.config.extractor
    factors = [choice.resize / max(image.pixels.shape[:2]) for image in images]
    smaller = [image if f >= 1 else image.resized(f) for image, f in zip(images, factors, strict=True)]
    reduced = min(factors) < 1 or not choice.fits or REFINEMENT in choice.without
    if not reduced:  # images of few keypoints are searched enlarged: what this takes, matching them saves
        enlarging = replace(fitted.config.extractor, sparse_resize=config.sparse_resize)
        fitted = replace(fitted, config=replace(fitted.config, extractor=enlarging))
    if pipeline.passes is None:
        return fitted, smaller, choice
    if reduced:
        return replace(fitted, passes=None), smaller, choice.leaving_out()
    # Each while there is time for the dearest of its kind, of two crops of up to 4:3, and for what follows.
    most = choice.max_keypoints
    verify, own = costs["verify"](most), costs["extract"](1.54 * fitted.passes.longer_side**2)
    own = pace * (own + costs["match"](most, choice.layers) + verify)
    total = budget_ms - pace * (costs["refine"](most) + verify)
    limits = (total, own, pace * costs["other"](), own + 4.0 * reading_ms)
    own = LocalMatcher(fitted.extractor, adjusted(fitted.matcher, other_turns_below=0.0))
    limit = TimeLimit(*(each / 1000 for each in limits))
    fitted = replace(fitted, passes=replace(fitted.passes, own=own, limit=limit))
    return fitted, smaller, replace(choice, passes=True)


def learned(pipeline: Pipeline, result: Result) -> Result:
    """The result with the time that it took, from which the next plans of `pipeline`, as loaded, learn."""
    choice, before = result.budget, pipeline.costs.get(PACE, 1.0)
    first = 1000 * (result.first or result).seconds["total"]
    pipeline.costs[PACE] = updated_pace(before, first, choice.predicted_ms / choice.pace)
    return replace(result, budget=replace(choice, took_ms=1000 * result.seconds["total"]))
