"""Both images stretched vertically, as if seen from higher above.

Tables, floors and streets are seen obliquely, and so foreshortened along the vertical of an upright image.
Two views from different sides foreshorten such a surface along different directions of it, which no rotation
undoes. Stretched, both come near the view from above, and those differ by a rotation. ASIFT (Morel and Yu
2009) simulates many such tilts; this is the one that most photos of people have. Rotations by quarter turns
are found by the descriptors; for those between, image 1 is turned by 45°.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

from matcher.data.features import Features
from matcher.data.image import Image
from matcher.passes.crops import Crop, LocalMatcher, PassMatches, crop

STRETCH = 1.6  # of the height relative to the width; chosen on rooms among 1.6 and 2.5
_ASPECT = 0.75  # of an image of the largest size


def from_above(image: Image, longer_side: int) -> Crop:
    """The whole image, stretched vertically.

    Its width stays where the result has no more pixels than an image of 4:3 with this longer side; otherwise
    the result has as many.
    """
    height, width = image.pixels.shape[:2]
    enlarged = min(sqrt(STRETCH), longer_side * sqrt(_ASPECT / (width * height)))
    return crop(image, (0, 0, width, height), enlarged / sqrt(STRETCH), enlarged * sqrt(STRETCH))


@dataclass(frozen=True, eq=False)
class Above:
    """Both images of a pair stretched; keypoints of image 0 are found once for all turns of image 1."""

    own: LocalMatcher
    images: Sequence[Image]
    longer_side: int

    def match(self, name: str, degrees: float, *, negative: bool) -> PassMatches:
        """Matches with image 1 turned by an angle, and inverted if `negative`."""
        crop0, features0 = self._first
        crop1 = from_above(self.images[1], self.longer_side)
        crop1 = crop1.turned(degrees) if degrees else crop1
        crop1 = crop1.inverted() if negative else crop1
        features1 = self.own.extractor([crop1.as_image()])[0]
        return self.own.match_crops(name, (crop0, crop1), (features0, features1))

    @cached_property
    def _first(self) -> tuple[Crop, Features]:
        crop0 = from_above(self.images[0], self.longer_side)
        return crop0, self.own.extractor([crop0.as_image()])[0]
