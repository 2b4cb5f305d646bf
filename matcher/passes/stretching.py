"""Images stretched along one direction, because surfaces that are seen obliquely are foreshortened along it.

Tables, floors and streets are foreshortened along the vertical of an upright image. Two views from different
sides foreshorten such a surface along different directions of it, which no rotation undoes. With both images
stretched vertically, both come near the view from above, and those differ by a rotation. Rotations by quarter
turns are found by the descriptors; for those between, image 1 is turned by 45°.

Walls that one image shows more obliquely than the other are foreshortened along the horizontal in that one.
So either image alone is stretched horizontally; which of the two it must be, nothing tells before.

ASIFT (Morel and Yu 2009) simulates many such tilts; these are those that most photos of people have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

from matcher.data.features import Features
from matcher.data.image import Image
from matcher.passes.crops import Crop, LocalMatcher, PassMatches, crop, whole

# Of one side relative to the other; chosen on rooms among 1.6 and 2.5 vertically, 1.6 and 2.2 horizontally.
STRETCH = 1.6
_ASPECT = 0.75  # of an image of the largest size


def stretched(image: Image, longer_side: int, *, vertically: bool) -> Crop:
    """The whole image, stretched.

    Its other side stays where the result has no more pixels than an image of 4:3 with this longer side;
    otherwise the result has as many.
    """
    height, width = image.pixels.shape[:2]
    enlarged = min(sqrt(STRETCH), longer_side * sqrt(_ASPECT / (width * height)))
    factors = (enlarged * sqrt(STRETCH), enlarged / sqrt(STRETCH))
    return crop(image, (0, 0, width, height), *(factors[::-1] if vertically else factors))


@dataclass(frozen=True, eq=False)
class Front:
    """Either image of a pair stretched horizontally; of the other one the keypoints are known."""

    own: LocalMatcher
    images: Sequence[Image]
    features: Sequence[Features]  # of both images as they are
    longer_side: int

    def match(self, name: str, side: int, *, negative: bool) -> PassMatches:
        """Matches with image `side`, 0 or 1, stretched, and image 1 inverted if `negative`."""
        crops: list[Crop | None] = [None, None]
        crops[side] = stretched(self.images[side], self.longer_side, vertically=False)
        if negative:
            crops[1] = (crops[1] or whole(self.images[1], 1.0)).inverted()
        features = [
            known if crop is None else self.own.extractor([crop.as_image()])[0]
            for crop, known in zip(crops, self.features, strict=True)
        ]
        return self.own.match_crops(name, crops, features)


@dataclass(frozen=True, eq=False)
class Above:
    """Both images stretched vertically; keypoints of image 0 are found once for all turns of image 1."""

    own: LocalMatcher
    images: Sequence[Image]
    longer_side: int

    def match(self, name: str, degrees: float, *, negative: bool) -> PassMatches:
        """Matches with image 1 turned by an angle, and inverted if `negative`."""
        crop0, features0 = self._first
        crop1 = stretched(self.images[1], self.longer_side, vertically=True)
        crop1 = crop1.turned(degrees) if degrees else crop1
        crop1 = crop1.inverted() if negative else crop1
        features1 = self.own.extractor([crop1.as_image()])[0]
        return self.own.match_crops(name, (crop0, crop1), (features0, features1))

    @cached_property
    def _first(self) -> tuple[Crop, Features]:
        crop0 = stretched(self.images[0], self.longer_side, vertically=True)
        return crop0, self.own.extractor([crop0.as_image()])[0]
