"""Confidence intervals of 95 % by a seeded bootstrap over the pairs (Efron 1979)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
COVERAGE = 0.95
Statistic = Callable[[np.ndarray], np.ndarray]  # (…, n) → (…,)


@dataclass(frozen=True)
class Estimate:
    """A statistic and its confidence interval."""

    value: float
    low: float
    high: float
    spread: float  # standard deviation over the estimator's seeds


def resample(count: int, seed: int) -> np.ndarray:
    """(RESAMPLES, count) int64 indices drawn with replacement; the same for every row of a table."""
    return np.random.default_rng([seed, count]).integers(0, count, (RESAMPLES, count))


def estimate(values: np.ndarray, statistic: Statistic, draws: np.ndarray) -> Estimate:
    """A statistic over pairs with its percentile bootstrap interval.

    Args:
        values: (S, n) of n pairs under S estimator seeds; the statistic is averaged over the seeds.
        statistic: a function along the last axis.
        draws: (R, n) from `resample`.
    """
    return _summary(statistic(values), statistic(values[:, draws]).mean(axis=0), values.shape[1])


def difference(values: np.ndarray, other: np.ndarray, statistic: Statistic, draws: np.ndarray) -> Estimate:
    """As `estimate`, for the difference of two methods on the same resampled pairs (a paired interval)."""
    by_seed = statistic(values) - statistic(other)
    resampled = statistic(values[:, draws]).mean(axis=0) - statistic(other[:, draws]).mean(axis=0)
    return _summary(by_seed, resampled, values.shape[1])


def mean(values: np.ndarray) -> np.ndarray:
    """Mean of the finite values along the last axis; NaN without any."""
    known = np.isfinite(values)
    count = known.sum(axis=-1)
    total = np.where(known, values, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def median(values: np.ndarray) -> np.ndarray:
    """Median along the last axis."""
    return np.median(values, axis=-1) if values.shape[-1] else np.full(values.shape[:-1], np.nan)


def _summary(by_seed: np.ndarray, resampled: np.ndarray, pairs: int) -> Estimate:
    """A single pair has no interval."""
    value, spread = float(by_seed.mean()), float(by_seed.std())
    known = resampled[np.isfinite(resampled)]
    if not len(known) or pairs < 2:
        return Estimate(value, float("nan"), float("nan"), spread)
    low, high = np.percentile(known, [50 * (1 - COVERAGE), 50 * (1 + COVERAGE)])
    return Estimate(value, float(low), float(high), spread)
