"""Further passes over a pair: each is chosen by the evidence so far, until that is confident."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Literal

import numpy as np

from matcher.config import EstimationConfig, FurtherPassesConfig
from matcher.errors import counted
from matcher.images import gradient_image
from matcher.match.steering import evidence_of_turns
from matcher.passes.views import (
    CommonRegion,
    Crop,
    LocalMatcher,
    PassMatches,
    common_region,
    crops_of,
    tilted,
)
from matcher.types import JOINED, Extractor, Features, Image, Matcher, Matches, TwoViewGeometry, to_numpy
from matcher.verify.adjustment import threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.repetition import without_overlay

FIRST = "first"
_LONG = 5.0  # seconds after which it is told what takes so long
# A pair is confident with so many inliers that are probable, or with this share of its keypoints, if inliers
# are most of the matches: fewer let a pair pass whose matches are wrong (measured on rooms).
CONFIDENT_INLIERS, CONFIDENT_KEYPOINT_SHARE, CONFIDENT_INLIER_RATIO = 400, 0.3, 0.6
PROBABLE = 0.25  # match probability from which an inlier counts as support
SAME_POINT = 1.5  # pixels of the resized images within which points of two passes are one
LOW_INLIERS = 0.2  # inliers per keypoint; wrong matches along like edges give .1 to .18
# Matches of a pair without inliers, below which no other view helps: after gradients, other features and a
# tilted view 44 of 79 unrelated pairs had fewer, and two of 35 pairs of one place, of which no pass found
# anything.
HOPELESS_MATCHES = 10
RELIABLE_REGION = 60  # inliers with which the common region comes before other features
MIN_REGION_INLIERS = 20  # a crop around a few wrong matches would only add to them
GRADIENT_SMOOTHING = 2.0  # pixels, of images of gradient magnitude
# Changes of scale that are tried: a matcher tolerates changes of up to about two either way.
SCALE_CHANGES = (3.5, 1 / 3.5)
COMPARED_SIDE = 512  # pixels of the images whose descriptors are compared at another scale
# Evidence per keypoint above which a change of scale is accepted: on warps of training photos the right one
# had .023 or more, all others and unrelated images less than .009, for a zoom by four the wrong one .016.
MIN_EVIDENCE = 0.018


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


@dataclass(frozen=True)
class Evidence:
    """Support of a pair after a pass."""

    matches: int
    inliers: int  # of the geometry
    probable_inliers: int  # of these, those of probable matches
    keypoints: int  # of the image with fewer

    @staticmethod
    def of(geometry: TwoViewGeometry, probable: np.ndarray, keypoints: int) -> Evidence:
        """The evidence of a geometry of K matches, of which some (K,) bool are probable."""
        inliers = geometry.inliers if geometry.verified else np.zeros_like(geometry.inliers)
        counts = (int(np.count_nonzero(each)) for each in (inliers, inliers & probable))
        return Evidence(len(geometry.inliers), *counts, keypoints)

    @property
    def is_confident(self) -> bool:
        """Whether no further pass is needed: enough inliers, which are most of the matches."""
        enough = min(CONFIDENT_INLIERS, CONFIDENT_KEYPOINT_SHARE * self.keypoints)
        return self.probable_inliers >= enough and self.inliers >= CONFIDENT_INLIER_RATIO * self.matches > 0


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

    config: FurtherPassesConfig
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
        if geometry.kind == "fundamental":
            pair.geometry = geometry
        reports, start = [PassReport(FIRST, len(matches), seconds)], perf_counter()
        for one in pair.passes():
            reports.append(PassReport(one.name, len(one.scores), perf_counter() - start))
            start = perf_counter()
            level = logging.INFO if start - pair.begun > _LONG else logging.DEBUG
            said = f"pass {len(reports)}, {one.name}: {counted(len(one.scores), 'match', 'matches')}"
            said += f", after {start - pair.begun:.0f} s, since too few of those before agree"
            logging.getLogger("matcher.passes").log(level, "%s", said)  # the command line shows it
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

    def passes(self) -> Iterator[PassMatches]:
        """Run passes until the evidence is confident."""
        for step in self._steps():
            if self.evidence.is_confident or (one := step()) is None:
                continue
            self.found.append(one)
            for known in ("joined", "geometry", "evidence"):
                vars(self).pop(known, None)
            yield one

    def _steps(self) -> Iterator[Callable[[], PassMatches | None]]:
        """The passes that are wanted, each chosen when those before it have run."""
        wanted = self.further.config.passes
        if "scale" in wanted:
            yield self.other_scale
        reliable = self.evidence.probable_inliers >= RELIABLE_REGION
        if "region" in wanted and reliable:
            yield self.region
        for name, step in (
            ("gradients", self.gradients),
            ("features", self.other_features),
            ("tilt_y", lambda: self.tilted("tilt_y", 0.0)),
            ("tilt_y_turned", lambda: self.tilted("tilt_y turned by 45 degrees", 45.0)),
            ("tilt_x", lambda: self.tilted_side(0)),
            ("tilt_x", lambda: self.tilted_side(1)),
        ):
            if name in wanted:
                yield step
                if name.startswith("tilt") and self.is_hopeless():
                    return
        if "region" in wanted and not reliable:
            yield self.region

    def has_time(self, kind: Literal["own", "other", "region"] = "own") -> bool:
        """Whether a pass of a kind (`TimeLimit`) still fits; one that does not is counted."""
        limit = self.further.limit
        fits = limit is None or perf_counter() - self.begun + getattr(limit, kind) <= limit.total
        self.left_out += not fits
        return fits

    def other_scale(self) -> PassMatches | None:
        """Match at the change of scale that the descriptors suggest, if there are few inliers.

        Without a geometry of their own none of these matches is kept.
        """
        if not self.has_few_inliers() or not self.has_time():
            return None
        change = best_scale_change(self.further.own.extractor, self.images)
        if change is None or not self.has_time():
            return None
        crops = at_scale_change(self.images, change, self.further.longer_side)
        return self.if_verified(self.further.own.match(f"scale {change:.2g}", *crops))

    def gradients(self) -> PassMatches | None:
        """Match images of gradient magnitude, if grey values may be what differs, as in a negative.

        Edges of unrelated images look more alike than their grey values, so without a geometry of their own
        none of these matches is kept.
        """
        if not self.has_few_inliers() or not self.has_time():
            return None
        images = [gradient_image(image, GRADIENT_SMOOTHING) for image in self.images]
        return self.if_verified(self.further.own.match_images("gradients", images))

    def other_features(self) -> PassMatches | None:
        """Match the same images by the other front end."""
        if self.further.other is None or not self.has_time("other"):
            return None
        return self.further.other().match_images(self.further.config.preset, self.images)

    def tilted(self, name: str, degrees: float) -> PassMatches | None:
        """Match both images stretched vertically, image 1 turned by an angle besides."""
        if not min(map(len, self.features)) or not self.has_time():
            return None
        crop1 = tilted(self.images[1], self.further.longer_side, axis="y")
        crop1 = crop1.turned(degrees) if degrees else crop1
        crop0, features0 = self._tilted0
        features1 = self.further.own.extractor([crop1.as_image()])[0]
        return self.further.own.match_crops(name, (crop0, crop1), (features0, features1))

    @cached_property
    def _tilted0(self) -> tuple[Crop, Features]:
        crop = tilted(self.images[0], self.further.longer_side, axis="y")
        return crop, self.further.own.extractor([crop.as_image()])[0]

    def tilted_side(self, side: int) -> PassMatches | None:
        """Match one image stretched horizontally with the other as it is."""
        if not min(map(len, self.features)) or not self.has_time():
            return None
        crops: list[Crop | None] = [None, None]
        crops[side] = tilted(self.images[side], self.further.longer_side, axis="x")
        features = list(self.features)
        features[side] = self.further.own.extractor([crops[side].as_image()])[0]
        return self.further.own.match_crops(f"tilt_x of image {side}", crops, features)

    def region(self) -> PassMatches | None:
        """Match the common region at equal scale, if there are enough inliers to locate it."""
        located = self.evidence.probable_inliers >= MIN_REGION_INLIERS
        if not located or not self.has_time("region"):
            return None
        matches, inliers = self.joined[2], np.flatnonzero(self.geometry.inliers)
        originals = [original() for original in self.originals]
        region = common_region(*originals, matches.points0[inliers], matches.points1[inliers])
        return self.further.own.match(
            "common region", *crops_of(region, *originals, self.further.longer_side)
        )

    @cached_property
    def joined(self) -> tuple[Features, Features, Matches]:
        """The features and matches of all passes; those of the first if there is no other."""
        if not self.found:
            return *self.features, self.first
        *sides, matches = joined(*self.features, self.first, self.found, SAME_POINT)
        return *sides, without_overlay(*self.features, matches) if self.first.overlay else matches

    @cached_property
    def geometry(self) -> TwoViewGeometry:
        """The fundamental matrix estimated from all matches so far."""
        matches = self.joined[2]
        return self.verified(PassMatches("", matches.points0, matches.points1, matches.scores))

    @cached_property
    def evidence(self) -> Evidence:
        """Support of the geometry so far."""
        probable = self.joined[2].scores >= PROBABLE
        return Evidence.of(self.geometry, probable, min(map(len, self.features)))

    def verified(self, one: PassMatches) -> TwoViewGeometry:
        """The fundamental matrix estimated from the matches of one pass."""
        estimate = RobustEstimator(replace(self.further.estimation, kind="fundamental"))
        scale = threshold_scale(*(f.scale.tolist() for f in self.features), "fundamental")
        return estimate(one.points0, one.points1, scores=one.scores, thresholds_scale=scale)

    def if_verified(self, one: PassMatches) -> PassMatches:
        """The matches of a pass that have a geometry of their own; else none of them."""
        return one if self.verified(one).verified else one.first(0)

    def is_hopeless(self) -> bool:
        """Whether the passes so far have found next to nothing."""
        return not self.evidence.inliers and self.evidence.matches < HOPELESS_MATCHES

    def has_few_inliers(self) -> bool:
        """Whether there are so few inliers that the images may differ by more than the viewpoint."""
        return self.evidence.probable_inliers < LOW_INLIERS * self.evidence.keypoints


def at_scale_change(images: Sequence[Image], change: float, longer_side: int) -> tuple[Crop, Crop]:
    """Both whole images, a change of scale of image 1 relative to image 0 compensated."""
    boxes = [(0, 0, image.pixels.shape[1], image.pixels.shape[0]) for image in images]
    return crops_of(CommonRegion(*boxes, change), *images, longer_side)


def best_scale_change(extractor: Extractor, images: Sequence[Image]) -> float | None:
    """The change of scale with the most descriptor evidence; None if none has enough.

    Only descriptors are compared (`evidence_of_turns`); no matching network runs.
    """
    best, most = None, MIN_EVIDENCE
    for change in SCALE_CHANGES:
        crops = at_scale_change(images, change, COMPARED_SIDE)
        features0, features1 = extractor([crop.as_image() for crop in crops])
        if fewer := min(len(features0), len(features1)):
            descriptors = (to_numpy(features.descriptors) for features in (features0, features1))
            found = float(evidence_of_turns(*descriptors, features1.kind).max()) / fewer
            if found > most:
                best, most = change, found
    return best


# The union of the matches of several passes, and of their keypoints.


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
    passes = [PassMatches(FIRST, first.points0, first.points1, first.scores), *further]
    reach = tuple(radius / float(np.sqrt(np.prod(to_numpy(f.scale)))) for f in (features0, features1))
    kept = without_duplicates(passes, reach)
    points0, points1, scores = (
        np.concatenate([getattr(one, name)[keep] for one, keep in zip(passes, kept, strict=True)])
        for name in ("points0", "points1", "scores")
    )
    before = int(kept[0].sum())
    added = np.arange(len(scores) - before)[:, None] + [len(features0), len(features1)]
    indices = np.concatenate([first.indices[kept[0]], added])
    order = np.argsort(-scores, kind="stable")
    found = replace(
        first,
        indices=indices[order],
        points0=points0[order],
        points1=points1[order],
        scores=scores[order],
        refinement=None,
        prior=None,
    )
    return with_points(features0, points0[before:]), with_points(features1, points1[before:]), found


def without_duplicates(passes: Sequence[PassMatches], radius: tuple[float, float]) -> list[np.ndarray]:
    """Which matches of each pass (K,) bool are kept.

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
