"""Keypoints by tiles that do not depend on the pair: for collections, whose pairs share those of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

import numpy as np

from matcher.config import EstimationConfig
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.matches import Matches
from matcher.data.protocols import Extractor, Matcher
from matcher.data.tensors import to_numpy
from matcher.errors import UsageError
from matcher.pipeline import Pipeline
from matcher.tiling.extraction import spread, tiled_features
from matcher.tiling.windows import corresponding, joined_matches, window_features
from matcher.verify.estimation import RobustEstimator

_FIRST = 2048  # keypoints of either image, the strongest ones of each part of it, that are matched first
_AS_ONE = 4096  # keypoints of either image up to which all are matched with all
_ORDINARY = 1024  # pixels of the longer side to which the threshold of the first matches refers


def by_tiles(pipeline: Pipeline, most: int) -> Pipeline:
    """The pipeline with keypoints at full resolution, by tiles, that all pairs of an image share.

    Two images with many keypoints are matched by the strongest of each part of them first; the geometry of
    these says which windows correspond, and where there is none they are all the matches. No image is made
    smaller and no tile left out for the sake of a pair, so images may differ in scale as much as the matcher
    tolerates. Memory is that of one decoded image, 3 bytes a pixel and once more while it is decoded, of one
    batch of tiles, and of one window.

    >>> import matcher, numpy as np
    >>> from matcher.tiling.shared import by_tiles
    >>> pipeline = by_tiles(matcher.load("nearest", max_keypoints=500), 4000)
    >>> image = np.random.default_rng(0).integers(0, 255, (1000, 1600), dtype=np.uint8)
    >>> len(pipeline.extract(image)) > 700
    True

    Args:
        pipeline: its `max_keypoints` are those of a tile. Where its configuration has no `tiles` yet, images
            keep their full size from here on.
        most: keypoints of an image.

    Raises:
        UsageError: a number of keypoints below 1.
    """
    if isinstance(most, bool) or not isinstance(most, Integral) or most < 1:
        raise UsageError(f"tiles must be a whole number of keypoints of at least 1, not {most!r}")
    extractor = replace(pipeline.config.extractor.of_size(None), tiles=int(most))
    return replace(
        pipeline,
        extractor=TiledExtractor(pipeline.extractor, int(most)),
        matcher=WindowedMatcher(pipeline.matcher),
        config=replace(pipeline.config, extractor=extractor),
        passes=None,
    )


class TiledExtractor:
    """A front end for images of any size."""

    def __init__(self, extractor: Extractor, most: int) -> None:
        """Keep the front end of a tile and the number of keypoints of an image."""
        self.extractor, self.most = extractor, most

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """The features of each image, best first, spread over it."""
        return [tiled_features(image, self.extractor, self.most) for image in images]


class WindowedMatcher:
    """A matcher for any number of keypoints: a few of them say which windows of both images correspond."""

    def __init__(self, matcher: Matcher) -> None:
        """Keep the matcher of a window; where it has a device and a precision, these are known here too."""
        self.matcher = matcher
        for name in ("device", "precision"):
            if hasattr(matcher, name):
                setattr(self, name, getattr(matcher, name))

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch."""
        pairs = zip(features0.unstack(), features1.unstack(), strict=True)
        return [self._pair(*pair) for pair in pairs]

    def _pair(self, features0: Features, features1: Features) -> Matches:
        sides = (features0, features1)
        if max(map(len, sides)) <= _AS_ONE:
            return self._one(*sides)
        points = [to_numpy(features.keypoints) for features in sides]
        chosen = [spread(at, to_numpy(f.scores), _FIRST) for at, f in zip(points, sides, strict=True)]
        first = self._one(*(f.select(index) for f, index in zip(sides, chosen, strict=True)))
        scale = max(1.0, max(max(f.image_size) for f in sides) / _ORDINARY)
        estimate = RobustEstimator(EstimationConfig(kind="fundamental"))
        geometry = estimate(first.points0, first.points1, thresholds_scale=scale)
        if geometry.status != "ok":
            ends = first.indices.T
            indices = np.stack([index[end] for index, end in zip(chosen, ends, strict=True)], axis=1)
            return replace(first, indices=indices, kept0=len(features0), kept1=len(features1))
        agree = geometry.inliers
        pairs = corresponding(*points, first.points0[agree], first.points1[agree])
        found = [
            self._one(window_features(features0, pair.index0), window_features(features1, pair.index1))
            for pair in pairs
        ]
        return joined_matches(pairs, found, *points)

    def _one(self, features0: Features, features1: Features) -> Matches:
        return self.matcher(Features.stack([features0]), Features.stack([features1]))[0]
