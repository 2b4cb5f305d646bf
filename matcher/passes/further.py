"""Which passes follow the first one: each is chosen by the evidence so far, until one is sure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from matcher.config import EstimationConfig, SecondPassConfig
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.matches import Matches, TwoViewGeometry
from matcher.passes.crops import LocalMatcher, PassMatches
from matcher.passes.evidence import Evidence
from matcher.passes.regions import common_region, crops_of
from matcher.passes.search import Change, best_change
from matcher.passes.union import joined
from matcher.verify.estimation import RobustEstimator
from matcher.verify.thresholds import threshold_scale

FIRST = "first"
_PLENTY = 60  # inliers that say where the common region is; with fewer, other features come first
# Inliers from which a common region is believed at all: a crop around a few wrong matches makes them more.
_BELIEVED = 20
_LITTLE = 0.15  # inliers a keypoint; wrong matches along edges, as of a negative, give .1


@dataclass(frozen=True)
class PassReport:
    """One pass of a pair: its name, how many matches it found, and how long it took."""

    name: str
    matches: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Joined:
    """A pair after all its passes."""

    features0: Features
    features1: Features
    matches: Matches
    passes: tuple[PassReport, ...]  # the first one included


@dataclass(frozen=True, eq=False)
class FurtherPasses:
    """What is done about a pair that one pass left unsure."""

    config: SecondPassConfig
    own: LocalMatcher  # of the first pass
    other: Callable[[], LocalMatcher] | None = None  # another front end and matcher, made at first use
    estimation: EstimationConfig = field(default_factory=EstimationConfig)
    longer_side: int = 1024  # of a crop, pixels

    def __call__(
        self,
        images: Sequence[Image],
        originals: Sequence[Callable[[], Image]],
        features: tuple[Features, Features],
        matches: Matches,
        geometry: TwoViewGeometry,
        seconds: float = 0.0,
    ) -> Joined:
        """All matches of a pair, by as many passes as it needs.

        Args:
            images: both, as the first pass saw them.
            originals: both, with as many pixels as there are; called only where a part of them is looked at.
            features: of the first pass.
            matches: of the first pass.
            geometry: that these agree with, of whatever kind.
            seconds: that the first pass took.
        """
        pair = _Pair(self, images, originals, features, matches)
        reports = [PassReport(FIRST, len(matches), seconds)]
        if geometry.kind != "fundamental":
            geometry = pair.geometry()
        start = perf_counter()
        for one in pair.passes(geometry):
            reports.append(PassReport(one.name, len(one.scores), perf_counter() - start))
            start = perf_counter()
        return Joined(*pair.joined(), tuple(reports))


@dataclass(eq=False)
class _Pair:
    """A pair and what its passes have found so far."""

    further: FurtherPasses
    images: Sequence[Image]
    originals: Sequence[Callable[[], Image]]
    features: tuple[Features, Features]
    first: Matches
    found: list[PassMatches] = field(default_factory=list)
    negative: bool = False  # image 1 is matched inverted from here on

    def passes(self, geometry: TwoViewGeometry) -> Iterator[PassMatches]:
        """Passes until one is sure."""
        if self.is_sure(geometry):
            return
        if self.found_little(geometry) and (change := self.change()) is not None:
            one = self.further.own.match(change.name, *change.applied(self.images, self.further.longer_side))
            if self.verified(one).status == "ok":
                self.found.append(one)
                self.negative = change.negative
                geometry = self.geometry()
            yield one
        steps = [self.other_features, self.region]
        if Evidence.of(geometry, 0).inliers >= _PLENTY:
            steps.reverse()
        for step in steps:
            if self.is_sure(geometry) or (one := step(geometry)) is None:
                continue
            self.found.append(one)
            yield one
            geometry = self.geometry()

    def other_features(self, _: TwoViewGeometry) -> PassMatches | None:
        """The same images by the other front end."""
        if self.further.other is None:
            return None
        return self.further.other().match_images(self.further.config.preset, self.images)

    def joined(self) -> tuple[Features, Features, Matches]:
        """The features and matches of all passes; those of the first where there is no other."""
        if not self.found:
            return *self.features, self.first
        return joined(*self.features, self.first, self.found, self.further.config.same_point)

    def geometry(self) -> TwoViewGeometry:
        """The fundamental matrix that the matches so far agree with."""
        matches = self.joined()[2]
        return self.verified(PassMatches("", matches.points0, matches.points1, matches.scores))

    def verified(self, one: PassMatches) -> TwoViewGeometry:
        """The fundamental matrix that the matches of one pass agree with."""
        estimate = RobustEstimator(replace(self.further.estimation, kind="fundamental"))
        scale = threshold_scale(*(f.scale.tolist() for f in self.features), "fundamental")
        return estimate(one.points0, one.points1, thresholds_scale=scale)

    def is_sure(self, geometry: TwoViewGeometry) -> bool:
        """Whether the matches that `geometry` was estimated from need no other pass."""
        keypoints = min(map(len, self.features))
        return Evidence.of(geometry, keypoints).is_sure(self.further.config)

    def found_little(self, geometry: TwoViewGeometry) -> bool:
        """Whether so few matches agree that the images may differ in more than the viewpoint."""
        inliers = np.count_nonzero(geometry.inliers) if geometry.status == "ok" else 0
        return inliers < _LITTLE * min(map(len, self.features))

    def change(self) -> Change | None:
        """What might bring the images closer."""
        config, extractor = self.further.config, self.further.own.extractor
        return best_change(extractor, self.images, scales=config.scale_search, negative=config.negative)

    def region(self, geometry: TwoViewGeometry) -> PassMatches | None:
        """The common region at one scale, where matches say where it is."""
        if not self.further.config.region or Evidence.of(geometry, 0).inliers < _BELIEVED:
            return None
        matches = self.joined()[2]
        inliers = np.flatnonzero(geometry.inliers)
        originals = [original() for original in self.originals]
        region = common_region(*originals, matches.points0[inliers], matches.points1[inliers])
        crop0, crop1 = crops_of(region, *originals, self.further.longer_side)
        return self.further.own.match("common region", crop0, crop1.inverted() if self.negative else crop1)
