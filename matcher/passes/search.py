"""What brings two images closer where one pass found little: another change of scale, or a negative."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.protocols import Extractor
from matcher.match.steering import turn_evidence
from matcher.passes.crops import Crop
from matcher.passes.regions import CommonRegion, crops_of

# Changes of scale that are tried: a network finds matches up to a change of about two either way.
_CHANGES = (3.5, 1 / 3.5)
_COMPARED_SIDE = 512  # pixels of the crops that are compared
# Evidence a keypoint from which a change is believed. On warps of training photos the right change had .023
# or more, every other one and unrelated images less than .009; a zoom in by four had .016 for the wrong side.
_CONVINCING = 0.018


@dataclass(frozen=True)
class Change:
    """What is done to whole images before they are matched."""

    name: str
    scale: float = 1.0  # image 1 / image 0, which is undone
    negative: bool = False  # image 1 is inverted

    def applied(self, images: Sequence[Image], longer_side: int) -> tuple[Crop, Crop]:
        """Both images as they are matched then."""
        boxes = [(0, 0, image.pixels.shape[1], image.pixels.shape[0]) for image in images]
        crop0, crop1 = crops_of(CommonRegion(*boxes, self.scale), *images, longer_side)
        return crop0, crop1.inverted() if self.negative else crop1


def best_change(
    extractor: Extractor, images: Sequence[Image], *, scales: bool = True, negative: bool = True
) -> Change | None:
    """The change after which the descriptors of two images are most alike; None if all leave them unlike.

    Only descriptors are compared (`turn_evidence`); no network but that of the front end runs.

    Args:
        extractor: the front end.
        images: both.
        scales, negative: which changes are tried.
    """
    best, most = None, _CONVINCING
    for change in _changes(scales=scales, negative=negative):
        crops = change.applied(images, _COMPARED_SIDE)
        found = evidence(*extractor([crop.as_image() for crop in crops]))
        if found > most:
            best, most = change, found
    return best


def evidence(features0: Features, features1: Features) -> float:
    """How distinct mutually nearest descriptors are in the best quarter turn, a keypoint."""
    fewer = min(len(features0), len(features1))
    if not fewer:
        return 0.0
    return float(turn_evidence(Features.stack([features0]), Features.stack([features1])).max()) / fewer


def _changes(*, scales: bool, negative: bool) -> Iterator[Change]:
    for scale in _CHANGES if scales else ():
        yield Change(f"scale {scale:.2g}", scale)
    if negative:
        yield Change("negative", negative=True)
