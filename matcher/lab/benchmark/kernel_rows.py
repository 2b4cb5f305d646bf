"""The rows of the benchmark that compare the kernels of every target that runs here with stock operators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from matcher.extract.learned import try_peaks
from matcher.kernels import SWITCH
from matcher.kernels.calls import (
    try_absorb,
    try_attention,
    try_half_attention,
    try_half_rows,
    try_half_turns,
    try_rows,
    try_turns,
)
from matcher.kernels.candidates import try_candidates
from matcher.kernels.library import kernels, supported
from matcher.kernels.maps import try_half_maps, try_half_samples, try_maps, try_samples
from matcher.kernels.trials import SLOWER
from matcher.lab.benchmark.network_rows import BenchmarkRow
from matcher.lab.benchmark.timing import Stopwatch
from matcher.match.network.consensus import try_local_maps

TRIALS = {
    "attention, bfloat16": try_half_attention,
    "attention, float32": try_attention,
    "feed-forward steps, bfloat16": try_half_rows,
    "feed-forward steps, float32": try_rows,
    "candidates": try_candidates,
    "maps, bfloat16": try_half_maps,
    "maps, float32": try_maps,
    "samples, bfloat16": try_half_samples,
    "samples, float32": try_samples,
    "peaks": try_peaks,
    "turns, bfloat16": try_half_turns,
    "turns, float32": try_turns,
    "absorption of potentials": try_absorb,
    "local maps": try_local_maps,
}


@contextmanager
def target(name: str) -> Iterator[None]:
    """While it is open, the kernels of that target are used, or none for "0"."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def kernel_rows(watch: Stopwatch) -> Iterator[BenchmarkRow]:
    """Every kind of kernel of every target whose library is there and runs here."""
    for name in supported():
        with target(name):
            if kernels() is None:
                continue  # not compiled: MATCHER_COMPILED=name python scripts/build_kernels.py
            for kind, make in TRIALS.items():
                tried = make()
                with torch.inference_mode():
                    if tried.kernel() is None:
                        continue  # not made for this target
                    times = watch.alternate({"kernel": tried.kernel, "stock": tried.stock})
                used = times["kernel"].minimum <= SLOWER * times["stock"].minimum
                note = "" if used else "left alone here"
                work, against = f"kernel {name}: {kind}", "stock operators"
                yield BenchmarkRow(work, against, times["kernel"], times["stock"], note=note)
