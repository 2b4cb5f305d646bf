"""Crops of an image, at another scale and turned, matched as images of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import cv2
import numpy as np

from matcher.geometry import resize_points, stored_to_upright
from matcher.types import Extractor, Features, Image, Matcher, Matches
from matcher.verify.repetition import without_overlay

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
        height, width = self.pixels.shape[:2]
        return Image(self.pixels, size=(width, height), mask=self.mask)

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

    def first(self, count: int) -> PassMatches:
        """At most so many of the matches."""
        return PassMatches(self.name, self.points0[:count], self.points1[:count], self.scores[:count])


@dataclass(frozen=True, eq=False)
class LocalMatcher:
    """A front end and the matcher for its features."""

    extractor: Extractor
    matcher: Matcher

    def match(self, name: str, crop0: Crop, crop1: Crop) -> PassMatches:
        """Matches of two crops, in stored pixels of their images."""
        return self.match_crops(name, (crop0, crop1), self.extractor([crop0.as_image(), crop1.as_image()]))

    def match_crops(
        self, name: str, crops: Sequence[Crop | None], features: Sequence[Features]
    ) -> PassMatches:
        """Matches of two crops with these features, in stored pixels of their images.

        Without a crop, the features are of the whole image and in its stored pixels.
        """
        found = self.match_features(*features)
        points0, points1 = (
            points if crop is None else crop.to_stored(points)
            for crop, points in zip(crops, (found.points0, found.points1), strict=True)
        )
        return PassMatches(name, points0.astype(np.float32), points1.astype(np.float32), found.scores)

    def match_images(self, name: str, images: Sequence[Image]) -> PassMatches:
        """Matches of two whole images as they are."""
        features = self.extractor(images)
        found = without_overlay(*features, self.match_features(*features))
        return PassMatches(name, found.points0, found.points1, found.scores)

    def match_features(self, features0: Features, features1: Features) -> Matches:
        """Matches of the features of two images."""
        return self.matcher(Features.stack([features0]), Features.stack([features1]))[0]


def crop(image: Image, box: tuple[int, int, int, int], factor: float, factor_y: float | None = None) -> Crop:
    """The pixels (x0, y0) up to, but not including, (x1, y1) of an image, `factor` times as large.

    Args:
        image: upright and resized; its mask goes with it.
        box: x0, y0, x1, y1 within `image.pixels`.
        factor: above 0.
        factor_y: another one for the height.
    """
    factors = (factor, factor if factor_y is None else factor_y)
    x0, y0, x1, y1 = box
    pixels = image.pixels[y0:y1, x0:x1]
    mask = None if image.mask is None else image.mask[y0:y1, x0:x1]
    sides = zip((x1 - x0, y1 - y0), factors, strict=True)
    size = tuple(max(_LEAST_SIDE, round(side * each)) for side, each in sides)
    scale = (size[0] / (x1 - x0), size[1] / (y1 - y0))
    if scale != (1.0, 1.0):
        pixels = cv2.resize(
            pixels, size, interpolation=cv2.INTER_AREA if max(factors) < 1 else cv2.INTER_CUBIC
        )
        if mask is not None:
            mask = cv2.resize(mask * np.uint8(255), size, interpolation=cv2.INTER_AREA) > 127
    back = np.diag(1 / np.array(scale))
    to_image = np.c_[back, back @ [0.5, 0.5] - 0.5 + [x0, y0]]
    return Crop(np.ascontiguousarray(pixels), image, to_image, mask)


def image_points(image: Image, stored: np.ndarray) -> np.ndarray:
    """Stored pixels (…, 2) → pixels of `image.pixels`; the inverse of `Image.to_stored`."""
    return resize_points(stored_to_upright(stored, image.size, image.orientation), image.scale)


# Stretch of one side relative to the other; chosen on rooms among 1.6 and 2.5 vertically, 1.6 and 2.2
# horizontally.
STRETCH = 1.6


def tilted(image: Image, longer_side: int, *, axis: Literal["x", "y"]) -> Crop:
    """The whole image stretched along an axis, as if its surfaces were seen less obliquely (ASIFT's tilt).

    Its other side stays where the result has no more pixels than an image of 4:3 with this longer side;
    otherwise the result has as many.
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


@dataclass(frozen=True, eq=False)
class CommonRegion:
    """The part of the scene that both images show, in pixels of `Image.pixels`."""

    box0: tuple[int, int, int, int]  # x0, y0, x1, y1
    box1: tuple[int, int, int, int]
    scale_change: float  # a distance in image 1 / the same in image 0


def change_of_scale(points0: np.ndarray, points1: np.ndarray) -> float:
    """The median ratio of distances between matched points (K, 2), image 1 to image 0; 1 without evidence.

    Pairs of matches are drawn at random, with a fixed seed; the median is robust to a few wrong matches.
    """
    if len(points0) < 2:
        return 1.0
    first, second = np.random.default_rng(0).integers(0, len(points0), (2, _DRAWN))
    distance0, distance1 = (np.linalg.norm(p[first] - p[second], axis=1) for p in (points0, points1))
    far = (distance0 > _LEAST_DISTANCE) & (distance1 > _LEAST_DISTANCE)
    if not far.any():
        return 1.0
    return float(np.exp(np.median(np.log(distance1[far] / distance0[far]))))


def common_region(image0: Image, image1: Image, points0: np.ndarray, points1: np.ndarray) -> CommonRegion:
    """The boxes around matched points (K, 2), stored pixels, with a margin, and the change of scale."""
    inner0, inner1 = image_points(image0, points0), image_points(image1, points1)
    return CommonRegion(_box(inner0, image0), _box(inner1, image1), change_of_scale(inner0, inner1))


def crops_of(region: CommonRegion, image0: Image, image1: Image, longer_side: int) -> tuple[Crop, Crop]:
    """Both crops of the region at equal scale: as large as `longer_side` allows, enlarged twice at most.

    The crop of higher resolution is reduced where the other would have to be enlarged by more.
    """
    side0, side1 = (max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in (region.box0, region.box1))
    change = region.scale_change
    # factor0 = change · factor1 gives both the same scale.
    fitting = min(longer_side / side1, longer_side / (side0 * change))
    factor1 = min(fitting, _LARGEST_ENLARGEMENT, _LARGEST_ENLARGEMENT / change)
    return crop(image0, region.box0, factor1 * change), crop(image1, region.box1, factor1)


def _box(points: np.ndarray, image: Image) -> tuple[int, int, int, int]:
    height, width = image.pixels.shape[:2]
    low, high = np.quantile(points, [_TAIL, 1 - _TAIL], axis=0)
    margin = MARGIN * (high - low).max() + _MARGIN_PIXELS
    x0, y0 = np.floor(np.clip(low - margin, 0, [width - 1, height - 1])).astype(int).tolist()
    x1, y1 = np.ceil(np.clip(high + margin, [x0 + 1, y0 + 1], [width, height])).astype(int).tolist()
    return x0, y0, x1, y1
