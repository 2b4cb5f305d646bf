"""Further passes over a pair whose first was not confident: other features, scales, and views of parts.

Each is chosen by the support that the pair has so far, until that is confident.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from time import perf_counter
from typing import Literal

import cv2
import numpy as np

from matcher.config import EstimationConfig, FurtherPassesConfig
from matcher.errors import counted
from matcher.images import gradient_image
from matcher.match.steering import turn_scores
from matcher.types import JOINED, Extractor, Features, Image, Matcher, Matches, TwoViewGeometry, to_numpy
from matcher.verify.adjustment import threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.overlay import without_overlay
from matcher.verify.repetition import SAME_POINT

FIRST = "first"
_LONG = 5.0  # seconds after which it is told what takes so long
# A pair is confident with so many inliers that are probable, or with this share of its keypoints, if inliers
# are most of the matches: fewer let a pair pass whose matches are wrong (measured on rooms).
CONFIDENT_INLIERS, CONFIDENT_KEYPOINT_SHARE, CONFIDENT_INLIER_RATIO = 400, 0.3, 0.6
PROBABLE = 0.25  # match probability from which an inlier counts as support
LOW_PROBABLE_INLIERS = 0.2  # per keypoint; wrong matches along like edges give .1 to .18
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
# `turn_scores` per keypoint above which a change of scale is accepted: on warps of photos the right one
# had .023 or more, all others and unrelated images less than .009, for a zoom by four the wrong one .016.
MIN_TURN_SCORE = 0.018


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
class Support:
    """Support of a pair after a pass."""

    matches: int
    inliers: int  # of the geometry
    probable_inliers: int  # of these, those of probable matches
    keypoints: int  # of the image with fewer

    @staticmethod
    def of(geometry: TwoViewGeometry, probable: np.ndarray, keypoints: int) -> Support:
        """The support of a geometry of K matches, of which some (K,) bool are probable."""
        inliers = geometry.inliers if geometry.verified else np.zeros_like(geometry.inliers)
        counts = (int(np.count_nonzero(each)) for each in (inliers, inliers & probable))
        return Support(len(geometry.inliers), *counts, keypoints)

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
        """Refined matches, those not refined now at their keypoints, though the first pass moved some."""
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

        The geometry, of any kind, and `seconds` are of the first pass, and the images as that matched them;
        `originals` read them at full resolution, called only if the common region is matched.
        """
        pair = _Pair(self, images, originals, features, matches, geometry, perf_counter() - seconds)
        reports, start = [PassReport(FIRST, len(matches), seconds)], perf_counter()
        for step in pair.steps():
            if pair.support.is_confident or (one := step()) is None:
                continue
            pair.add(one)
            reports.append(PassReport(one.name, len(one.scores), perf_counter() - start))
            start = perf_counter()
            level = logging.INFO if start - pair.begun > _LONG else logging.DEBUG
            said = f"pass {len(reports)}, {one.name}: {counted(len(one.scores), 'match', 'matches')}"
            said += f", after {start - pair.begun:.0f} s, since too few of those before agree"
            logging.getLogger("matcher.passes").log(level, "%s", said)  # the command line shows it
        return Joined(*pair.union, tuple(reports), pair.left_out)


@dataclass(eq=False)
class _Pair:
    """A pair and what its passes have found so far."""

    further: FurtherPasses
    images: Sequence[Image]
    originals: Sequence[Callable[[], Image]]
    features: tuple[Features, Features]
    first: Matches
    first_geometry: TwoViewGeometry  # of these
    begun: float  # by `perf_counter`
    left_out: int = 0
    found: list[PassMatches] = field(default_factory=list)
    views: dict[tuple, tuple[Crop, Features]] = field(default_factory=dict)  # by axis, side and turn

    def add(self, one: PassMatches) -> None:
        """What a pass has found; what follows from all of them is computed anew when it is asked for."""
        self.found.append(one)
        for cached in ("union", "geometry", "support"):
            vars(self).pop(cached, None)

    def steps(self) -> Iterator[Callable[[], PassMatches | None]]:
        """The passes that are wanted, each chosen when those before it have run."""
        wanted = self.further.config.passes
        if "scale" in wanted:
            yield self.other_scale
        reliable = self.support.probable_inliers >= RELIABLE_REGION
        if "region" in wanted and reliable:
            yield self.region
        for name, step in (
            ("gradients", self.gradients),
            ("features", self.other_features),
            ("tilt_y", lambda: self.tilted("tilt_y", "y")),
            ("tilt_y_turned", lambda: self.tilted("tilt_y turned by 45 degrees", "y", degrees=45.0)),
            ("tilt_x", lambda: self.tilted("tilt_x of image 0", "x", [0])),
            ("tilt_x", lambda: self.tilted("tilt_x of image 1", "x", [1])),
        ):
            if name in wanted:
                yield step
                hopeless = not self.support.inliers and self.support.matches < HOPELESS_MATCHES
                if hopeless and name.startswith("tilt"):
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
        """Match at the change of scale that the descriptors suggest, if there are few inliers."""
        if not self.has_few_probable_inliers() or not self.has_time():
            return None
        change = best_scale_change(self.further.own.extractor, self.images)
        if change is None or not self.has_time():
            return None
        crops = crops_of(self.images, None, change, self.further.longer_side)
        return self.if_verified(self.further.own.match_crops(f"scale {change:.2g}", crops))

    def gradients(self) -> PassMatches | None:
        """Match images of gradient magnitude, if grey values may be what differs, as in a negative."""
        if not self.has_few_probable_inliers() or not self.has_time():
            return None
        images = [gradient_image(image, GRADIENT_SMOOTHING) for image in self.images]
        return self.if_verified(self.further.own.match_images("gradients", images))

    def other_features(self) -> PassMatches | None:
        """Match the same images by the other front end."""
        if self.further.other is None or not self.has_time("other"):
            return None
        return self.further.other().match_images(self.further.config.preset, self.images)

    def tilted(
        self, name: str, axis: Literal["x", "y"], sides: Sequence[int] = (0, 1), degrees: float = 0.0
    ) -> PassMatches | None:
        """Match with these images stretched along an axis, image 1 turned by an angle besides."""
        if not min(map(len, self.features)) or not self.has_time():
            return None
        own, crops, features = self.further.own, [None, None], list(self.features)
        for side in sides:
            if (view := (axis, side, degrees * side)) not in self.views:
                crop = tilted(self.images[side], self.further.longer_side, axis=axis)
                crop = crop.turned(degrees) if degrees * side else crop
                self.views[view] = crop, own.extractor([crop.as_image()])[0]
            crops[side], features[side] = self.views[view]
        return own.match_crops(name, crops, features)

    def region(self) -> PassMatches | None:
        """Match the common region at equal scale, if there are enough inliers to locate it."""
        located = self.support.probable_inliers >= MIN_REGION_INLIERS
        if not located or not self.has_time("region"):
            return None
        matches, inliers = self.union[2], np.flatnonzero(self.geometry.inliers)
        originals = [original() for original in self.originals]
        sides = zip(originals, (matches.points0[inliers], matches.points1[inliers]), strict=True)
        points = [image.from_stored(stored) for image, stored in sides]
        boxes = [_box(each, image) for each, image in zip(points, originals, strict=True)]
        crops = crops_of(originals, boxes, change_of_scale(*points), self.further.longer_side)
        return self.further.own.match_crops("common region", crops)

    @cached_property
    def union(self) -> tuple[Features, Features, Matches]:
        """The features and matches of all passes; those of the first if there is no other."""
        if not self.found:
            return *self.features, self.first
        *sides, matches = union_of_passes(*self.features, self.first, self.found, SAME_POINT)
        return *sides, without_overlay(*self.features, matches) if len(self.first.overlay) else matches

    @cached_property
    def geometry(self) -> TwoViewGeometry:
        """The fundamental matrix of all matches so far."""
        known = not self.found and self.first_geometry.kind == "fundamental"
        return self.first_geometry if known else self.geometry_of(self.union[2])

    @cached_property
    def support(self) -> Support:
        """Support of the geometry so far."""
        probable = self.union[2].scores >= PROBABLE
        return Support.of(self.geometry, probable, min(map(len, self.features)))

    def geometry_of(self, one: PassMatches | Matches) -> TwoViewGeometry:
        """The fundamental matrix estimated from matches."""
        estimate = RobustEstimator(replace(self.further.estimation, kind="fundamental"))
        scale = threshold_scale(*(f.scale.tolist() for f in self.features), "fundamental")
        return estimate(one.points0, one.points1, scores=one.scores, thresholds_scale=scale)

    def if_verified(self, one: PassMatches) -> PassMatches:
        """The matches of a pass if they have a geometry of their own; else none: like edges match."""
        none = (each[:0] for each in (one.points0, one.points1, one.scores))
        return one if self.geometry_of(one).verified else PassMatches(one.name, *none)

    def has_few_probable_inliers(self) -> bool:
        """Whether so few inliers are probable that the images may differ by more than the viewpoint."""
        return self.support.probable_inliers < LOW_PROBABLE_INLIERS * self.support.keypoints


def best_scale_change(extractor: Extractor, images: Sequence[Image]) -> float | None:
    """The change of scale at which descriptors alone fit best; None if they fit too little at each."""
    best, most = None, MIN_TURN_SCORE
    for change in SCALE_CHANGES:
        crops = crops_of(images, None, change, COMPARED_SIDE)
        features0, features1 = extractor([crop.as_image() for crop in crops])
        if fewer := min(len(features0), len(features1)):
            descriptors = (to_numpy(features.descriptors) for features in (features0, features1))
            score = float(turn_scores(*descriptors, features1.kind).max()) / fewer
            if score > most:
                best, most = change, score
    return best


# The union of the matches of several passes, and of their keypoints.


def union_of_passes(
    features0: Features, features1: Features, first: Matches, further: Sequence[PassMatches], radius: float
) -> tuple[Features, Features, Matches]:
    """The keypoints of the first pass, then those matched by further ones; all matches, best first.

    Each has the probability that its pass gave it. Points within `radius`, pixels of the resized images, are
    the same.
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
    union = {"indices": indices, "points0": points0, "points1": points1, "scores": scores}
    found = replace(first, **union, refinement=None, prior=None).select(np.argsort(-scores, kind="stable"))
    return with_points(features0, points0[before:]), with_points(features1, points1[before:]), found


def without_duplicates(passes: Sequence[PassMatches], radius: tuple[float, float]) -> list[np.ndarray]:
    """Which matches of each pass (K,) bool are kept; the radii are stored pixels in image 0 and 1.

    Of two that share a point in either image, the one of higher probability; of equals, the earlier one.
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
    """The keypoints and then points (K, 2), stored pixels; no matcher takes features of kind `JOINED`."""
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


# Crops of an image, at another scale, stretched and turned, matched as images of their own.

_LEAST_SIDE = 16  # pixels, of a crop
_FROM_BORDER = 4  # pixels that keypoints of a turned crop keep from its borders, which are edges there


@dataclass(frozen=True, eq=False)
class Crop:
    """A rectangular part of an image, resized, and turned in its plane."""

    pixels: np.ndarray  # (h, w) or (h, w, 3) uint8
    image: Image  # that it was cut from
    to_image: np.ndarray  # (2, 3) from (x, y, 1) in pixels of the crop to pixels of the image
    mask: np.ndarray | None = None  # (h, w) bool, True where keypoints may lie

    def as_image(self) -> Image:
        """The crop as an independent image."""
        return Image(self.pixels, size=self.pixels.shape[1::-1], mask=self.mask)

    def to_stored(self, points: np.ndarray) -> np.ndarray:
        """Points (…, 2) of the crop → stored pixels of its image, float64."""
        return self.image.to_stored(points @ self.to_image[:, :2].T + self.to_image[:, 2])

    def turned(self, degrees: float) -> Crop:
        """The whole crop turned clockwise, in a frame that holds it, where no keypoints lie outside it."""
        height, width = self.pixels.shape[:2]
        cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        turn = np.array([[cos, -sin], [sin, cos]])
        size = np.ceil(np.abs(turn) @ [width, height]).astype(int).tolist()
        centre, new_centre = (np.subtract(each, 1) / 2 for each in ([width, height], size))
        forward = np.c_[turn, new_centre - turn @ centre]
        mask = np.full((height, width), 255, np.uint8) if self.mask is None else self.mask * np.uint8(255)
        mask = cv2.erode(cv2.warpAffine(mask, forward, size), np.ones((2 * _FROM_BORDER + 1,) * 2))
        back = np.c_[turn.T, centre - turn.T @ new_centre]
        to_image = self.to_image @ np.vstack([back, [0, 0, 1]])
        pixels = cv2.warpAffine(self.pixels, forward, size, flags=cv2.INTER_CUBIC)
        return Crop(pixels, self.image, to_image, mask > 127)


@dataclass(frozen=True, eq=False)
class PassMatches:
    """The K matches of one pass, in stored pixels."""

    name: str
    points0: np.ndarray  # (K, 2) float32
    points1: np.ndarray
    scores: np.ndarray  # (K,) float32 match probabilities


@dataclass(frozen=True, eq=False)
class LocalMatcher:
    """A front end and the matcher for its features."""

    extractor: Extractor
    matcher: Matcher

    def match_crops(
        self, name: str, crops: Sequence[Crop | None], features: Sequence[Features] = ()
    ) -> PassMatches:
        """Matches of two crops; without a crop, the features are of the whole image and in stored pixels."""
        found = self._matches(*(features or self.extractor([crop.as_image() for crop in crops])))
        points0, points1 = (
            points if crop is None else crop.to_stored(points)
            for crop, points in zip(crops, (found.points0, found.points1), strict=True)
        )
        return PassMatches(name, points0.astype(np.float32), points1.astype(np.float32), found.scores)

    def match_images(self, name: str, images: Sequence[Image]) -> PassMatches:
        """Matches of two whole images as they are."""
        features = self.extractor(images)
        found = without_overlay(*features, self._matches(*features))
        return PassMatches(name, found.points0, found.points1, found.scores)

    def _matches(self, features0: Features, features1: Features) -> Matches:
        return self.matcher(Features.stack([features0]), Features.stack([features1]))[0]


def crop(image: Image, box: tuple[int, int, int, int], factor: float, factor_y: float | None = None) -> Crop:
    """The pixels (x0, y0) up to, but without, (x1, y1) of an image and its mask, resized by a factor."""
    factors = (factor, factor if factor_y is None else factor_y)
    x0, y0, x1, y1 = box
    pixels = image.pixels[y0:y1, x0:x1]
    mask = None if image.mask is None else image.mask[y0:y1, x0:x1]
    sides = zip((x1 - x0, y1 - y0), factors, strict=True)
    size = tuple(max(_LEAST_SIDE, round(side * each)) for side, each in sides)
    scale = (size[0] / (x1 - x0), size[1] / (y1 - y0))
    if scale != (1.0, 1.0):
        how = cv2.INTER_AREA if max(factors) < 1 else cv2.INTER_CUBIC
        pixels = cv2.resize(pixels, size, interpolation=how)
        if mask is not None:
            mask = cv2.resize(mask * np.uint8(255), size, interpolation=cv2.INTER_AREA) > 127
    back = np.diag(1 / np.array(scale))
    to_image = np.c_[back, back @ [0.5, 0.5] - 0.5 + [x0, y0]]
    return Crop(np.ascontiguousarray(pixels), image, to_image, mask)


# Stretch of one side relative to the other; chosen on rooms among 1.6 and 2.5 vertically, 1.6 and 2.2
# horizontally.
STRETCH = 1.6


def tilted(image: Image, longer_side: int, *, axis: Literal["x", "y"]) -> Crop:
    """The whole image stretched along an axis, as if its surfaces were seen less obliquely (ASIFT's tilt).

    Its other side stays unless there were more pixels than in an image of 4:3 with this longer side.
    """
    height, width = image.pixels.shape[:2]
    enlarged = min(sqrt(STRETCH), longer_side * sqrt(0.75 / (width * height)))
    factors = (enlarged * sqrt(STRETCH), enlarged / sqrt(STRETCH))
    return crop(image, (0, 0, width, height), *(factors[::-1] if axis == "y" else factors))


MARGIN = 0.15  # added on every side, as a share of the longer side of the matched points' bounding box
_MARGIN_PIXELS = 8  # added too, because matches are rare near image borders
_TAIL = 0.02  # share of the points left outside the box on each side: some are outliers
_DRAWN = 2000  # random pairs of matches whose distances are compared
_LEAST_DISTANCE = 8.0  # pixels; shorter ones are too noisy
_LARGEST_ENLARGEMENT = 2.0  # beyond it there is no more detail


def change_of_scale(points0: np.ndarray, points1: np.ndarray) -> float:
    """The median ratio of distances between matched points (K, 2), image 1 to image 0; 1 if none is known."""
    if len(points0) < 2:
        return 1.0
    first, second = np.random.default_rng(0).integers(0, len(points0), (2, _DRAWN))
    distance0, distance1 = (np.linalg.norm(p[first] - p[second], axis=1) for p in (points0, points1))
    far = (distance0 > _LEAST_DISTANCE) & (distance1 > _LEAST_DISTANCE)
    if not far.any():
        return 1.0
    return float(np.exp(np.median(np.log(distance1[far] / distance0[far]))))


def crops_of(
    images: Sequence[Image], boxes: Sequence[tuple[int, ...]] | None, change: float, longer_side: int
) -> tuple[Crop, Crop]:
    """Crops at equal scale, of boxes, or whole images, whose scale changes (image 1 relative to image 0): as
    large as `longer_side` allows, twice at most.

    The crop of higher resolution is reduced where the other would have to be enlarged by more.
    """
    boxes = boxes or [(0, 0, *image.pixels.shape[1::-1]) for image in images]
    side0, side1 = (max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes)
    # factor0 = change · factor1 gives both the same scale.
    fitting = min(longer_side / side1, longer_side / (side0 * change))
    factor1 = min(fitting, _LARGEST_ENLARGEMENT, _LARGEST_ENLARGEMENT / change)
    return crop(images[0], boxes[0], factor1 * change), crop(images[1], boxes[1], factor1)


def _box(points: np.ndarray, image: Image) -> tuple[int, int, int, int]:
    height, width = image.pixels.shape[:2]
    low, high = np.quantile(points, [_TAIL, 1 - _TAIL], axis=0)
    margin = MARGIN * (high - low).max() + _MARGIN_PIXELS
    x0, y0 = np.floor(np.clip(low - margin, 0, [width - 1, height - 1])).astype(int).tolist()
    x1, y1 = np.ceil(np.clip(high + margin, [x0 + 1, y0 + 1], [width, height])).astype(int).tolist()
    return x0, y0, x1, y1
