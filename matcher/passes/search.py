"""Search for a change of scale or an inversion of grey values, for pairs with few inliers in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.protocols import Extractor
from matcher.data.tensors import to_numpy
from matcher.match.turns import evidence_of_turns
from matcher.passes.crops import Crop
from matcher.passes.regions import CommonRegion, crops_of

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
