"""SIFT's threshold from frame to frame: points much weaker than the weakest one kept are skipped."""

from __future__ import annotations

from dataclasses import replace

from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.protocols import Extractor
from matcher.extract.sift import SiftExtractor

_SHARE = 0.6  # of the weakest point's response; a frame rarely has that much less contrast than the last one
_INTERVALS = 3  # of an octave, into which OpenCV divides its threshold


class AdaptiveContrast:
    """Extracts frames that come in order; their points are those that the front end alone would give.

    SIFT keeps the strongest of its points. Which they are does not depend on its threshold as long as enough
    pass it, but the time does: with 512 points of a frame, three in four are found only to be dropped again.
    Where too few pass, the frame is searched again by the front end's own threshold.
    """

    def __init__(self) -> None:
        self._weakest = 0.0  # response of the last frame's weakest point

    def extract(self, extractor: Extractor, images: list[Image]) -> list[Features]:
        """Features of each image, as the extractor gives them."""
        if not isinstance(extractor, SiftExtractor) or extractor.config.keep != "strongest":
            return extractor(images)
        config = extractor.config
        raised = max(config.contrast_threshold, _SHARE * _INTERVALS * self._weakest)
        features = SiftExtractor(replace(config, contrast_threshold=raised))(images)
        if raised > config.contrast_threshold:
            few = [i for i, found in enumerate(features) if len(found) < config.max_keypoints]
            for i, again in zip(few, extractor([images[i] for i in few]), strict=True):
                features[i] = again
        full = all(0 < len(found) == config.max_keypoints for found in features)
        self._weakest = min(float(found.scores[-1]) for found in features) if full else 0.0
        return features
