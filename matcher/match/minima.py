"""Mutual minima of a matrix of costs; no torch."""

from __future__ import annotations

import numpy as np


def mutual_minima(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns (K,) int64 of the finite entries of costs (N, M) that are the least of both.

    Of equal entries the first counts.
    """
    if 0 in costs.shape:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows, columns = np.arange(len(costs)), costs.argmin(1)
    mutual = (costs.argmin(0)[columns] == rows) & np.isfinite(costs[rows, columns])
    return rows[mutual], columns[mutual]
