"""The keypoints that the front end scored highest."""

from __future__ import annotations

import numpy as np

from matcher.data.features import Features
from matcher.data.tensors import to_numpy


def strongest_rows(features: Features, count: int) -> np.ndarray:
    """Rows of the `count` keypoints of the highest scores, in their order; of equal ones the first."""
    return np.sort(np.argsort(-to_numpy(features.scores), kind="stable")[:count])


def strongest(features: Features, count: int) -> Features:
    """The features of one image, at most `count`, those of the highest scores, in their order."""
    return features if len(features) <= count else features.select(strongest_rows(features, count))
