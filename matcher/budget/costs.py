"""What matching a pair costs on this machine, stage by stage, measured once for time budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import cv2
import numpy as np

from matcher.budget.choice import SIZES, Parts, line, matching_cost, milliseconds, refining_cost
from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.protocols import Estimator, Extractor, Matcher
from matcher.match.depth import can_be_cut
from matcher.match.turns import OTHER_TURNS, PROBED
from matcher.verify.estimation import RobustEstimator

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
        return len(OTHER_TURNS) * self.match(min(points, PROBED), layers) + self.match(points, layers)


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
    easy = hard = _nothing  # a front end that finds no keypoint even in noise
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
