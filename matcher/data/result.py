"""Everything known of one matched pair."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from matcher.data.features import Features
from matcher.data.matches import Matches, TwoViewGeometry


@dataclass(frozen=True, eq=False)
class Result:
    """Everything known of one matched pair."""

    features0: Features
    features1: Features
    matches: Matches
    geometry: TwoViewGeometry
    path0: Path | None = None
    path1: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # read, extract, match, verify, total

    @property
    def points0(self) -> np.ndarray:
        """(K, 2) matched points of image 0, stored pixels."""
        return self.matches.points0

    @property
    def points1(self) -> np.ndarray:
        """(K, 2) matched points of image 1, stored pixels."""
        return self.matches.points1

    @property
    def scores(self) -> np.ndarray:
        """(K,) match probabilities."""
        return self.matches.scores
