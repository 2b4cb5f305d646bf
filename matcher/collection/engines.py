"""Which processes do the work of a run, and how many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matcher.collection.settings import Setup
from matcher.collection.workers import Engine, InProcess, LocalWorkers
from matcher.loading import devices

EngineName = Literal["local", "ray"]
_GPU_BATCH = 8  # images or pairs that a GPU works on together


@dataclass(frozen=True)
class Workers:
    """Which processes do the work; results do not depend on it."""

    engine: EngineName = "local"
    count: int | None = None  # processes; 0: this one; None: one per core or GPU
    threads: int | None = None  # of each; None: the cores divided by the processes
    batch: int | None = None  # images or pairs worked on together; None: 1 on a CPU, 8 on a GPU


def start_engine(run_dir: Path, setup: Setup, workers: Workers) -> Engine:
    """Start the engine; close it after use.

    Raises:
        UsageError: a missing device or extra.
    """
    if workers.engine == "ray":
        from matcher.collection.cluster import RayWorkers

        return RayWorkers(run_dir, setup, workers.count, workers.threads)
    every = devices(setup.options)
    cores = available_cores()
    count = workers.count
    if count is None:
        count = cores if every == ["cpu"] else len(every)
    if count == 0:
        return InProcess(run_dir, setup)
    chosen = [every[number % len(every)] for number in range(count)]
    return LocalWorkers(run_dir, setup, chosen, workers.threads or max(1, cores // count))


def batch_size(setup: Setup, workers: Workers) -> int:
    """Images that are extracted, or pairs that are matched, together."""
    return workers.batch or (1 if devices(setup.options) == ["cpu"] else _GPU_BATCH)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
