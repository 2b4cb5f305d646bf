"""Matches of a pair and the geometry that they agree with; NumPy, K matches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.config import GeometryKind, GeometryStatus


@dataclass(frozen=True, eq=False)
class Matches:
    """Mutual matches of one pair, best first."""

    indices: np.ndarray  # (K, 2) int64 into the features of image 0 and 1
    points0: np.ndarray  # (K, 2) float32 stored pixels
    points1: np.ndarray  # (K, 2)
    scores: np.ndarray  # (K,) float32 in [0, 1]
    layers_run: int = 0
    kept0: int = 0  # points not pruned
    kept1: int = 0

    def __len__(self) -> int:
        """The number of matches K."""
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class TwoViewGeometry:
    """A model of how two views relate, or the reason why there is none."""

    kind: GeometryKind
    status: GeometryStatus
    inliers: np.ndarray  # (K,) bool
    matrix: np.ndarray | None = None  # (3, 3) float64: H, F or E; maps 0 to 1
    cam1_from_cam0: np.ndarray | None = None  # (4, 4) float64, unit translation; essential only
