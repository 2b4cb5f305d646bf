"""Matched points of a pair, hypotheses of their geometry, and which of these is kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

LOSS_SCALE = 0.5  # pixels; errors well above it no longer pull a refined model
CONFIDENCE = 0.9999
MAX_ITERATIONS = 10_000

_AGREED = 0.7  # share of matches that agree with a hypothesis, at which no other is tried


@dataclass(frozen=True, eq=False)
class MatchedPoints:
    """Distinct, finite matches of a pair, in resized pixels."""

    points0: np.ndarray  # (N, 2)
    points1: np.ndarray  # (N, 2)
    probable: np.ndarray  # (N,) match probabilities
    covariances: np.ndarray | None = None  # (N, 2, 2) of points1

    def __len__(self) -> int:
        return len(self.points0)

    @property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """The points of both images."""
        return self.points0, self.points1

    def best_first(self) -> np.ndarray | None:
        """The order (N,) for progressive sampling (PROSAC, Chum and Matas 2005), if there is one."""
        return np.argsort(-self.probable, kind="stable") if np.ptp(self.probable) > 0 else None


@dataclass(frozen=True, eq=False)
class TwoViewModel:
    """A two-view geometry of N matches, in resized pixels."""

    matrix: np.ndarray  # (3, 3)
    inliers: np.ndarray  # (N,) bool
    cam1_from_cam0: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A model that may be the right one."""

    model: TwoViewModel
    likelihood: float  # logarithm, of `likelihood.py`
    agreeing: float  # share of the matches, by the threshold that it was found with


def likeliest(hypotheses: Iterable[Hypothesis | None]) -> TwoViewModel | None:
    """The model of the likeliest hypothesis; those after one that most matches agree with are not made."""
    best = None
    for one in hypotheses:
        if one is None:
            continue
        if best is None or one.likelihood > best.likelihood:
            best = one
        if one.agreeing >= _AGREED:
            break
    return None if best is None else best.model
