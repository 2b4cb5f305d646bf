"""Our front end in ONNX Runtime."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from matcher.config import ExtractorConfig
from matcher.extract.front_end import resolve
from matcher.onnx.interface import SETTINGS
from matcher.onnx.kept import kept_model
from matcher.onnx.runtime import Model
from matcher.onnx.trained import trained_front_end
from matcher.types import Features, Image


class OnnxExtractor:
    """The front end `learned`, whose model is built at the first call."""

    def __init__(self, config: ExtractorConfig, weights: str | Path | None = None) -> None:
        """Keep what is needed.

        Args:
            config: settings that are None become the published ones.
            weights: file of the parameters; the shipped one when absent.

        Raises:
            UsageError: a setting that this front end does not have, or a value out of range.
        """
        self.config = resolve(config, SETTINGS)
        self.weights = weights

    @cached_property
    def model(self) -> Model:
        """The model, built when it is first used.

        Raises:
            IntegrityError: the parameters are absent or damaged.
        """
        trained = trained_front_end(self.config, self.weights)
        settings = {name: getattr(trained.config, name) for name in SETTINGS}

        def write() -> bytes:
            from matcher.onnx.models import extractor_model

            return extractor_model(trained)

        return kept_model((trained.sha256, repr(settings)), write)

    def limited(self, max_keypoints: int) -> OnnxExtractor:
        """The same with another number of keypoints; the model is shared."""
        _ = self.model
        changed = copy.copy(self)
        changed.config = replace(self.config, max_keypoints=max_keypoints)
        return changed

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image in stored pixels, strongest first.

        Raises:
            IntegrityError: the parameters are absent or damaged.
        """
        return [self._extract(image) for image in images]

    def _extract(self, image: Image) -> Features:
        grey = image.grey()
        mask = np.ones(grey.shape, bool) if image.mask is None else np.ascontiguousarray(image.mask, bool)
        found = self.model(
            image=grey[None, None].astype(np.float32) / np.float32(255),
            mask=mask,
            max_keypoints=np.array([self.config.max_keypoints]),
        )
        return Features(
            keypoints=image.to_stored(found["keypoints"].astype(np.float64)).astype(np.float32),
            descriptors=found["descriptors"],
            scores=found["scores"],
            kind=self.config.kind,
            **image.features_fields(),
        )
