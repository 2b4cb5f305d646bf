"""Timing of alternating calls in one process, so that other load on the machine affects all equally."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from matcher.lab.benchmark.memory import resident

Call = Callable[[], object]
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Samples:
    """Measurements of one call."""

    values: tuple[float, ...]  # seconds or bytes, in the order of measuring

    @property
    def minimum(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def median(self) -> float:
        """The median value."""
        return median(self.values)

    @property
    def maximum(self) -> float:
        """The largest value."""
        return max(self.values)


@dataclass(frozen=True)
class Stopwatch:
    """How calls are timed."""

    device: torch.device
    repeats: int = 5  # of every call, at most
    seconds: float = 40.0  # no new round starts after that
    clock: Callable[[], float] = perf_counter

    def synchronise(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, call: Call) -> float:
        """Seconds of one call, including the work of the device."""
        self.synchronise()
        start = self.clock()
        call()
        self.synchronise()
        return self.clock() - start

    def alternate(self, calls: Mapping[str, Call]) -> dict[str, Samples]:
        """Run every call once as a warm-up, then all alternately, `repeats` times or for `seconds`."""
        for call in calls.values():
            self.once(call)
        found: dict[str, list[float]] = {name: [] for name in calls}
        start = perf_counter()
        for _ in range(self.repeats):
            for name, call in calls.items():
                found[name].append(self.once(call))
            if perf_counter() - start > self.seconds:
                break
        return {name: Samples(tuple(values)) for name, values in found.items()}


def memory_above(call: Call, device: torch.device) -> int | None:
    """Peak memory of a call above the level before it, in bytes; None where it cannot be measured.

    On CUDA the peak of the allocator; on Linux the peak of the resident set, after freed memory was returned
    to the system. The call runs once before it is measured.
    """
    call()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    if sys.platform != "linux":
        return None
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
    except (AttributeError, OSError):
        return None
    before = resident("VmRSS")
    call()
    return max(resident("VmHWM") - before, 0)
