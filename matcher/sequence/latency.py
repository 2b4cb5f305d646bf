"""How long the stages of a frame take: percentiles over the last frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import numpy as np

PERCENTILES = (50, 95, 99)


class StageTimes:
    """Milliseconds of the stages of one frame."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what passes to a stage."""
        start = perf_counter()
        yield
        self._spent[stage] = self._spent.get(stage, 0.0) + 1000 * (perf_counter() - start)

    def milliseconds(self) -> dict[str, float]:
        """Stage → milliseconds, and their total."""
        return {**self._spent, "total": sum(self._spent.values())}


class Latency:
    """Milliseconds of each stage over the last `window` frames."""

    def __init__(self, window: int = 512) -> None:
        self._rows: deque[dict[str, float]] = deque(maxlen=window)

    def add(self, milliseconds: Mapping[str, float]) -> None:
        """Take in the stages of one frame."""
        self._rows.append(dict(milliseconds))

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Stage → {"p50", "p95", "p99", "max"} in milliseconds; empty before the first frame."""
        stages = dict.fromkeys(stage for row in self._rows for stage in row)
        table = {}
        for stage in stages:
            values = [row[stage] for row in self._rows if stage in row]
            found = np.percentile(values, PERCENTILES).tolist()
            table[stage] = {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}
            table[stage]["max"] = max(values)
        return table

    def __len__(self) -> int:
        """Frames that the percentiles are of."""
        return len(self._rows)
