"""Further passes after the first: each is chosen by the evidence so far, until that is confident."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Literal

import numpy as np

from matcher.arrays import JOINED, to_numpy
from matcher.config import EstimationConfig, SecondPassConfig
from matcher.images import gradient_image
from matcher.match.steering import evidence_of_turns
from matcher.passes.views import (
    Above,
    CommonRegion,
    Crop,
    Front,
    LocalMatcher,
    PassMatches,
    common_region,
    crops_of,
)
from matcher.types import Extractor, Features, Image, Matcher, Matches, TwoViewGeometry
from matcher.verify.adjustment import threshold_scale
from matcher.verify.estimation import RobustEstimator

# --- search: Search for a change of scale or an inversion of grey values, for pairs with few inliers in one
# pass.

# Changes of scale that are tried: a matcher tolerates changes of up to about two either way.
_CHANGES = (3.5, 1 / 3.5)
_COMPARED_SIDE = 512  # pixels of the crops that are compared
# Evidence per keypoint above which a change is accepted. On warps of training photos the right change had
# .023 or more, all others and unrelated images less than .009; for a zoom by four the wrong one had .016.
_MIN_EVIDENCE = 0.018


@dataclass(frozen=True)
class Change:
    """A transformation of whole images before they are matched."""

    name: str
    scale: float = 1.0  # of image 1 relative to image 0, which is compensated
    negative: bool = False  # image 1 is inverted

    def applied(self, images: Sequence[Image], longer_side: int) -> tuple[Crop, Crop]:
        """Both images with the change applied, ready to be matched."""
        boxes = [(0, 0, image.pixels.shape[1], image.pixels.shape[0]) for image in images]
        crop0, crop1 = crops_of(CommonRegion(*boxes, self.scale), *images, longer_side)
        return crop0, crop1.inverted() if self.negative else crop1


def best_change(
    extractor: Extractor, images: Sequence[Image], *, scales: bool = True, negative: bool = True
) -> Change | None:
    """The change with the most descriptor evidence; None if none has enough.

    Only descriptors are compared (`evidence_of_turns`); no matching network runs.

    Args:
        extractor: the front end.
        images: the two images.
        scales, negative: which changes are tried.
    """
    best, most = None, _MIN_EVIDENCE
    for change in _changes(scales=scales, negative=negative):
        crops = change.applied(images, _COMPARED_SIDE)
        found = evidence(*extractor([crop.as_image() for crop in crops]))
        if found > most:
            best, most = change, found
    return best


def evidence(features0: Features, features1: Features) -> float:
    """The evidence of `evidence_of_turns` for the best quarter turn, per keypoint."""
    fewer = min(len(features0), len(features1))
    if not fewer:
        return 0.0
    descriptors = (to_numpy(features.descriptors) for features in (features0, features1))
    return float(evidence_of_turns(*descriptors, features1.kind).max()) / fewer


def _changes(*, scales: bool, negative: bool) -> Iterator[Change]:
    for scale in _CHANGES if scales else ():
        yield Change(f"scale {scale:.2g}", scale)
    if negative:
        yield Change("negative", negative=True)


# --- evidence: Whether the matches of a pair so far are confident, by the inliers of their geometry.


@dataclass(frozen=True)
class Evidence:
    """Support of a pair after a pass."""

    matches: int
    inliers: int  # of the geometry
    probable_inliers: int  # of these, those of probable matches
    keypoints: int  # of the image with fewer

    @staticmethod
    def of(geometry: TwoViewGeometry, probable: np.ndarray, keypoints: int) -> Evidence:
        """The evidence of a geometry.

        Args:
            geometry: estimated from K matches.
            probable: (K,) bool, matches that are probable enough to count as support.
            keypoints: their number in the image with fewer.
        """
        inliers = geometry.inliers if geometry.status == "ok" else np.zeros_like(geometry.inliers)
        counts = (int(np.count_nonzero(each)) for each in (inliers, inliers & probable))
        return Evidence(len(geometry.inliers), *counts, keypoints)

    def is_confident(self, config: SecondPassConfig) -> bool:
        """Whether no further pass is needed: enough inliers, which are most of the matches."""
        enough = min(config.confident_inliers, config.confident_keypoint_share * self.keypoints)
        return (
            self.probable_inliers >= enough
            and self.inliers >= config.confident_inlier_ratio * self.matches > 0
        )


# --- union: The union of the matches of several passes, and of their keypoints.


def joined_matches(passes: Sequence[PassMatches], radius: tuple[float, float]) -> list[np.ndarray]:
    """Which matches of each pass (K,) bool are kept after duplicates across passes are removed.

    Points of different passes are the same if they are less than `radius` apart, stored pixels in image 0 and
    1. Of two matches that share a point in either image, the one of higher probability is kept; among
    equals, that of the earlier pass.
    """
    kept = [np.ones(len(one.scores), dtype=bool) for one in passes]
    for later in range(1, len(passes)):
        for earlier in range(later):
            same = _shared(passes[earlier], passes[later], radius)
            same &= kept[earlier][:, None] & kept[later]
            better = passes[later].scores > passes[earlier].scores[:, None]
            kept[later] &= ~(same & ~better).any(axis=0)
        for earlier in range(later):
            same = _shared(passes[earlier], passes[later], radius) & kept[later]
            kept[earlier] &= ~same.any(axis=1)
    return kept


def _shared(first: PassMatches, second: PassMatches, radius: tuple[float, float]) -> np.ndarray:
    """(K, L) bool: matches of two passes that share a point in either image."""
    near = np.zeros((len(first.scores), len(second.scores)), dtype=bool)
    sides = ((first.points0, second.points0), (first.points1, second.points1))
    for (own, other), reach in zip(sides, radius, strict=True):
        own, other = own / reach, other / reach
        x, y = (own[:, None, axis] - other[None, :, axis] for axis in (0, 1))
        near |= x * x + y * y < 1
    return near


def with_points(features: Features, points: np.ndarray) -> Features:
    """The keypoints of an image followed by `points` (K, 2), stored pixels, which have no descriptors.

    As nothing can be matched to them, the result has descriptors of size 0 and the kind `JOINED`, which
    matchers refuse.
    """
    values, count = features.numpy(), len(points)
    keypoints = np.concatenate([values["keypoints"], np.asarray(points, dtype=np.float32)])
    return replace(
        features,
        keypoints=keypoints,
        descriptors=np.zeros((len(keypoints), 0), np.float32),
        scores=np.concatenate([values["scores"], np.zeros(count, np.float32)]),
        mask=np.concatenate([values["mask"], np.ones(count, bool)]),
        **dict.fromkeys(("scales", "orientations", "affine_frames", "cells", "grid", "maps")),
        kind=JOINED,
    )


def joined(
    features0: Features, features1: Features, first: Matches, further: Sequence[PassMatches], radius: float
) -> tuple[Features, Features, Matches]:
    """Join the first pass and further ones.

    Args:
        features0, features1: of the first pass.
        first: matches of the first pass.
        further: matches of the other passes.
        radius: pixels of the resized images within which points are the same.

    Returns:
        The keypoints of the first pass and, after them, those matched by further ones; and the matches
        kept, best first, each with the probability that its pass gave it.
    """
    passes = [PassMatches("first", first.points0, first.points1, first.scores), *further]
    reach = tuple(radius / float(np.sqrt(np.prod(to_numpy(f.scale)))) for f in (features0, features1))
    kept = joined_matches(passes, reach)
    new = [one.points0[keep] for one, keep in zip(further, kept[1:], strict=True)]
    new1 = [one.points1[keep] for one, keep in zip(further, kept[1:], strict=True)]
    scores = [one.scores[keep] for one, keep in zip(further, kept[1:], strict=True)]
    count = sum(map(len, new))
    added = np.arange(count)[:, None] + [len(features0), len(features1)]
    indices = np.concatenate([first.indices[kept[0]], added])
    points = (np.concatenate([first.points0[kept[0]], *new]), np.concatenate([first.points1[kept[0]], *new1]))
    score = np.concatenate([first.scores[kept[0]], *scores])
    order = np.argsort(-score, kind="stable")
    found = replace(
        first,
        indices=indices[order],
        points0=points[0][order],
        points1=points[1][order],
        scores=score[order],
        refinement=None,
        prior=None,
    )
    return (
        with_points(features0, points[0][len(indices) - count :]),
        with_points(features1, points[1][len(indices) - count :]),
        found,
    )


# --- further: Further passes after the first: each is chosen by the evidence so far, until that is
# confident.

FIRST = "first"
_RELIABLE_REGION = 60  # inliers with which the common region comes before other features
# Least inliers for a common region: a crop around a few wrong matches would only add to them.
_MIN_REGION_INLIERS = 20
_LOW_INLIERS = 0.2  # inliers per keypoint; wrong matches along edges, as of a negative, give .1 to .18

_SMOOTHING = 2.0  # pixels, of images of gradient magnitude; among 1.2 and 3


@dataclass(frozen=True)
class PassReport:
    """One pass of a pair: its name, how many matches it found, and how long it took."""

    name: str
    matches: int
    seconds: float


@dataclass(frozen=True)
class TimeLimit:
    """How long the passes of a pair may take, in seconds."""

    total: float  # of all passes, the first one included
    own: float  # that a pass, or a search for a change of scale, takes at most
    other: float  # the same of that with another front end
    region: float  # and of the common region, for which images may be read again


@dataclass(frozen=True, eq=False)
class Joined:
    """A pair after all its passes."""

    features0: Features
    features1: Features
    matches: Matches
    passes: tuple[PassReport, ...]  # the first one included
    left_out: int = 0  # further passes that the pair might have needed and there was no time for

    def with_keypoints(self, matches: Matches) -> Matches:
        """These matches after refinement, unrefined ones at their keypoints.

        The first pass had refined its own, with other matches around them.
        """
        if matches.refinement is None:
            return matches
        places = self.features1.numpy()["keypoints"][matches.indices[:, 1]]
        accepted = matches.refinement.accepted[:, None]
        return replace(matches, points1=np.where(accepted, matches.points1, places))


@dataclass(frozen=True, eq=False)
class FurtherPasses:
    """Further passes over a pair whose first pass was not confident."""

    config: SecondPassConfig
    own: LocalMatcher  # front end and matcher of the first pass
    other: Callable[[], LocalMatcher] | None = None  # another front end and matcher, loaded on first use
    estimation: EstimationConfig = field(default_factory=EstimationConfig)
    longer_side: int = 1024  # of a crop, pixels
    limit: TimeLimit | None = None

    def within(self, total: float, own: float, other: float, region: float) -> FurtherPasses:
        """The passes that fit a time limit, of these seconds (`TimeLimit`)."""
        return replace(self, limit=TimeLimit(total, own, other, region))

    def using(self, extractor: Extractor, matcher: Matcher) -> FurtherPasses:
        """The same passes with this front end and matcher."""
        return replace(self, own=LocalMatcher(extractor, matcher))

    def __call__(
        self,
        images: Sequence[Image],
        originals: Sequence[Callable[[], Image]],
        features: tuple[Features, Features],
        matches: Matches,
        geometry: TwoViewGeometry,
        seconds: float = 0.0,
    ) -> Joined:
        """Run as many further passes as the pair needs, and join all matches.

        Args:
            images: both, as matched in the first pass.
            originals: each reads an image at full resolution; called only if the common region is matched.
            features: of the first pass.
            matches: of the first pass.
            geometry: estimated from these matches, of any kind.
            seconds: duration of the first pass.
        """
        pair = _Pair(self, images, originals, features, matches, perf_counter() - seconds)
        reports = [PassReport(FIRST, len(matches), seconds)]
        if geometry.kind != "fundamental":
            geometry = pair.geometry()
        start = perf_counter()
        for one in pair.passes(geometry):
            reports.append(PassReport(one.name, len(one.scores), perf_counter() - start))
            start = perf_counter()
        return Joined(*pair.joined, tuple(reports), pair.left_out)


@dataclass(eq=False)
class _Pair:
    """A pair and what its passes have found so far."""

    further: FurtherPasses
    images: Sequence[Image]
    originals: Sequence[Callable[[], Image]]
    features: tuple[Features, Features]
    first: Matches
    begun: float  # by `perf_counter`
    left_out: int = 0
    found: list[PassMatches] = field(default_factory=list)
    negative: bool = False  # image 1 is matched inverted from here on

    @cached_property
    def above(self) -> Above:
        """Both images as if seen from above."""
        return Above(self.further.own, self.images, self.further.longer_side)

    def passes(self, geometry: TwoViewGeometry) -> Iterator[PassMatches]:
        """Run passes until the evidence is confident."""
        if self.is_confident(geometry):
            return
        if self.has_few_inliers(geometry) and (change := self.change()) is not None and self.has_time():
            one = self.further.own.match(change.name, *change.applied(self.images, self.further.longer_side))
            if self.verified(one).status == "ok":
                self.add(one)
                self.negative = change.negative
                geometry = self.geometry()
            yield one
        steps = [self.gradients, self.other_features, self.from_above, self.turned_from_above]
        steps += [self.image_0_from_front, self.image_1_from_front]
        reliable = self.evidence(geometry).probable_inliers >= _RELIABLE_REGION
        steps.insert(0 if reliable else len(steps), self.region)
        for step in steps:
            if self.is_confident(geometry) or (one := step(geometry)) is None:
                continue
            self.add(one)
            yield one
            geometry = self.geometry()

    def has_time(self, kind: Literal["own", "other", "region"] = "own") -> bool:
        """Whether a pass of a kind (`TimeLimit`) still fits; one that does not is counted."""
        limit = self.further.limit
        fits = limit is None or perf_counter() - self.begun + getattr(limit, kind) <= limit.total
        self.left_out += not fits
        return fits

    def gradients(self, geometry: TwoViewGeometry) -> PassMatches | None:
        """Match images of gradient magnitude, if grey values may be what differs.

        Edges of unrelated images look more alike than their grey values, so without a geometry of their own
        none of these matches is kept.
        """
        wanted = self.further.config.gradients and self.has_few_inliers(geometry)
        if not wanted or not self.has_time():
            return None
        images = [gradient_image(image, _SMOOTHING) for image in self.images]
        one = self.further.own.match_images("gradients", images)
        return one if self.verified(one).status == "ok" else one.first(0)

    def other_features(self, _: TwoViewGeometry) -> PassMatches | None:
        """Match the same images by the other front end."""
        if self.further.other is None or not self.has_time("other"):
            return None
        return self.further.other().match_images(self.further.config.preset, self.images)

    def from_above(self, _: TwoViewGeometry) -> PassMatches | None:
        """Match both images stretched vertically, if both have keypoints."""
        return self._above("from above", 0.0)

    def turned_from_above(self, _: TwoViewGeometry) -> PassMatches | None:
        """The same with image 1 turned by half a quarter turn."""
        return self._above("from above, turned", 45.0)

    def _above(self, name: str, degrees: float) -> PassMatches | None:
        wanted = self.further.config.from_above and min(map(len, self.features)) > 0
        if not wanted or not self.has_time():
            return None
        return self.above.match(name, degrees, negative=self.negative)

    def image_0_from_front(self, _: TwoViewGeometry) -> PassMatches | None:
        """Match with image 0 stretched horizontally."""
        return self._from_front(0)

    def image_1_from_front(self, _: TwoViewGeometry) -> PassMatches | None:
        """The same with image 1."""
        return self._from_front(1)

    def _from_front(self, side: int) -> PassMatches | None:
        further = self.further
        wanted = further.config.from_front and min(map(len, self.features)) > 0
        if not wanted or not self.has_time():
            return None
        front = Front(further.own, self.images, self.features, further.longer_side)
        return front.match(f"image {side} from the front", side, negative=self.negative)

    def add(self, one: PassMatches) -> None:
        """Join the matches of another pass."""
        self.found.append(one)
        vars(self).pop("joined", None)

    @cached_property
    def joined(self) -> tuple[Features, Features, Matches]:
        """The features and matches of all passes; those of the first if there is no other."""
        if not self.found:
            return *self.features, self.first
        return joined(*self.features, self.first, self.found, self.further.config.same_point)

    def geometry(self) -> TwoViewGeometry:
        """The fundamental matrix estimated from all matches so far."""
        matches = self.joined[2]
        return self.verified(PassMatches("", matches.points0, matches.points1, matches.scores))

    def verified(self, one: PassMatches) -> TwoViewGeometry:
        """The fundamental matrix estimated from the matches of one pass."""
        estimate = RobustEstimator(replace(self.further.estimation, kind="fundamental"))
        scale = threshold_scale(*(f.scale.tolist() for f in self.features), "fundamental")
        return estimate(one.points0, one.points1, scores=one.scores, thresholds_scale=scale)

    def evidence(self, geometry: TwoViewGeometry) -> Evidence:
        """Support of `geometry`, estimated from all matches so far."""
        probable = self.joined[2].scores >= self.further.config.confident_probability
        return Evidence.of(geometry, probable, min(map(len, self.features)))

    def is_confident(self, geometry: TwoViewGeometry) -> bool:
        """Whether the matches that `geometry` was estimated from need no further pass."""
        return self.evidence(geometry).is_confident(self.further.config)

    def has_few_inliers(self, geometry: TwoViewGeometry) -> bool:
        """Whether there are so few inliers that the images may differ by more than the viewpoint."""
        evidence = self.evidence(geometry)
        return evidence.probable_inliers < _LOW_INLIERS * evidence.keypoints

    def change(self) -> Change | None:
        """The change of scale or inversion that the descriptors suggest, if any."""
        config, extractor = self.further.config, self.further.own.extractor
        if not (config.scale_search or config.negative) or not self.has_time():
            return None
        return best_change(extractor, self.images, scales=config.scale_search, negative=config.negative)

    def region(self, geometry: TwoViewGeometry) -> PassMatches | None:
        """Match the common region at equal scale, if there are enough inliers to locate it."""
        located = self.evidence(geometry).probable_inliers >= _MIN_REGION_INLIERS
        if not self.further.config.region or not located or not self.has_time("region"):
            return None
        matches = self.joined[2]
        inliers = np.flatnonzero(geometry.inliers)
        originals = [original() for original in self.originals]
        region = common_region(*originals, matches.points0[inliers], matches.points1[inliers])
        crop0, crop1 = crops_of(region, *originals, self.further.longer_side)
        return self.further.own.match("common region", crop0, crop1.inverted() if self.negative else crop1)
