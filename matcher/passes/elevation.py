"""Both images stretched vertically, as if seen from higher above.

Tables, floors and streets are seen obliquely, and so foreshortened along the vertical of an upright image.
Two views from different sides foreshorten such a surface along different directions of it, which no rotation
undoes. Stretched, both come near the view from above, and those differ by a rotation. ASIFT (Morel and Yu
2009) simulates many such tilts; this is the one that most photos of people have.
"""

from __future__ import annotations

from math import sqrt

from matcher.data.image import Image
from matcher.passes.crops import Crop, crop

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
