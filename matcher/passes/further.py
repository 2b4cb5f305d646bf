"""Further passes after the first: each is chosen by the evidence so far, until that is confident."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Literal

import numpy as np

from matcher.config import EstimationConfig, SecondPassConfig
from matcher.data.features import Features
from matcher.data.gradients import gradient_image
from matcher.data.image import Image
from matcher.data.matches import Matches, TwoViewGeometry
from matcher.data.protocols import Extractor, Matcher
from matcher.passes.crops import LocalMatcher, PassMatches
from matcher.passes.evidence import Evidence
from matcher.passes.regions import common_region, crops_of
from matcher.passes.search import Change, best_change
from matcher.passes.stretching import Above, Front
from matcher.passes.union import joined
from matcher.verify.estimation import RobustEstimator
from matcher.verify.thresholds import threshold_scale

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
