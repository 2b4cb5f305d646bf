"""What a pipeline is made of: an extractor, a matcher and an estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.matches import Matches, TwoViewGeometry


class Extractor(Protocol):
    """A front end: images → features of each, unpadded."""

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Detect and describe."""


class Matcher(Protocol):
    """Features of B pairs → matches of each; both arguments are batches.

    One whose scores are probabilities may have a `calibration` (`matcher.config.CalibrationConfig`), by which
    a pipeline corrects those of refined and of verified matches; the scores of others stay as they are.
    """

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Match every pair of the batch."""


class Estimator(Protocol):
    """Matched points → two-view geometry.

    One whose attribute `takes_covariances` is true is also given `covariances`, of points1 in stored pixels²
    (K, 2, 2), where matches have them.
    """

    def __call__(
        self,
        points0: np.ndarray,
        points1: np.ndarray,
        *,
        cameras: tuple[Camera, Camera] | None = None,
        scores: np.ndarray | None = None,
        thresholds_scale: float = 1.0,
    ) -> TwoViewGeometry:
        """Estimate robustly; bad points give a status, never an error."""
