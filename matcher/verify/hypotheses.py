"""Matched points of a pair, hypotheses of their geometry, and which of these is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

LOSS_SCALE = 0.5  # pixels; errors well above it no longer pull a refined model
CONFIDENCE = 0.9999
MAX_ITERATIONS = 10_000

_AGREED = 0.8  # share of matches that agree with a hypothesis, at which no other is tried
_CELL = 32.0  # pixels of the resized image


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

    def most_probable(self, share: float) -> MatchedPoints:
        """At least a share of the matches, in the same order: all as probable as the last of them."""
        least = np.quantile(self.probable, 1 - share, method="higher")
        part = self.probable >= least
        if part.all():
            return self
        covariances = None if self.covariances is None else self.covariances[part]
        return MatchedPoints(self.points0[part], self.points1[part], self.probable[part], covariances)

    @cached_property
    def weights(self) -> np.ndarray:
        """(N,) how much each match says, 1 on average: less where there are many others.

        Neighbours lie off their true places by the same lens distortion, rolling shutter or motion, so a
        hundred on one poster say little more than ten, and less than ten all over the image. Divided by
        the matches in the same cell of a grid, the geometric mean over both images.
        """
        counts = [_in_same_cell(points) for points in self.sides]
        weights = 1 / np.sqrt(counts[0] * counts[1])
        return weights / weights.mean()


def trials(
    matched: MatchedPoints, plan: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, MatchedPoints]]:
    """Each factor of the threshold in a plan, with its share of the matches; none twice."""
    done = set()
    for factor, share in plan:
        part = matched.most_probable(share)
        if (factor, len(part)) not in done:
            done.add((factor, len(part)))
            yield factor, part


def _in_same_cell(points: np.ndarray) -> np.ndarray:
    """(N,) how many points lie in the cell of each of (N, 2)."""
    cells = np.floor(points / _CELL)
    _, cell, counts = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    return counts[cell.reshape(-1)]


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
    agreeing: float  # share of all matches, by the threshold that it was found with


def made(hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses up to the first that most matches agree with; those after it are not made."""
    found = []
    for one in hypotheses:
        found.append(one)
        if one.agreeing >= _AGREED:
            break
    return found


def likeliest(hypotheses: Sequence[Hypothesis]) -> Hypothesis | None:
    """The likeliest hypothesis, the earliest of equals; None where none has a likelihood."""
    known = [one for one in hypotheses if not np.isnan(one.likelihood)]
    return max(known, key=lambda one: one.likelihood, default=None)
