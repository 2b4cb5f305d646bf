"""Whether kernels are used on this machine: each kind is tried once, against stock operators.

A kernel whose results are not those of the stock operators, or which is slower, is left alone. What was found
is kept in the cache folder, for this library, processor, version of PyTorch and number of threads.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from matcher.files import NotOursError, cache_folder, open_own
from matcher.kernels.library import SWITCH, library_in_use, supported

_ROUNDS = 7
_LARGEST = 1 << 20  # bytes of what was found
SLOWER = 1.1  # times the stock operators' time, at most
_running: dict[str, bool] = {}  # trials under way, whose kernels may run


class Trial(NamedTuple):
    """A kernel, the stock operators that do the same, and how far apart their results may be."""

    kernel: Callable[[], Tensor | None]
    stock: Callable[[], Tensor]
    tolerance: float


def granted(name: str, make: Callable[[], Trial]) -> bool:
    """Whether kernels of the kind `name` are used here; always where MATCHER_COMPILED names a target.

    Args:
        name: of the kind.
        make: what tries it.
    """
    if _running.get(name) or os.environ.get(SWITCH) in supported():
        return True
    return _granted(name, make, library_in_use(), torch.get_num_threads())


@cache
def _granted(name: str, make: Callable[[], Trial], library: str, threads: int) -> bool:
    record, key = _record(), f"{name} {library} {_processor()} torch {torch.__version__} {threads} threads"
    known = _read(record)
    if isinstance(known.get(key), bool):
        return known[key]
    _running[name] = True
    try:
        with torch.inference_mode():
            known[key] = _passes(make())
    finally:
        _running[name] = False
    _keep(record, known)
    return known[key]


def _passes(tried: Trial) -> bool:
    found, expected = tried.kernel(), tried.stock()
    if found is None or not agree(found, expected, tried.tolerance):
        return False
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for call, seconds in zip((tried.kernel, tried.stock), times, strict=True):
            start = perf_counter()
            call()
            seconds.append(perf_counter() - start)
    return min(times[0]) <= SLOWER * min(times[1])


def agree(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether the results of a kernel are those of stock operators."""
    same_shape = found.shape == expected.shape
    return same_shape and torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=0.02)


def _record() -> Path | None:
    try:
        return cache_folder() / "kernels" / "trials.json"
    except (OSError, RuntimeError):  # no home folder
        return None


def _read(record: Path | None) -> dict[str, bool]:
    try:
        if record is None:
            return {}
        with open_own(record) as file:  # it decides which kernels are trusted
            known = json.loads(file.read(_LARGEST))
    except (NotOursError, OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _keep(record: Path | None, known: dict[str, bool]) -> None:
    if record is None or not record.parent.is_dir():
        return
    with suppress(OSError):  # it is tried again by the next process
        descriptor, name = tempfile.mkstemp(dir=record.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1)
        Path(name).replace(record)


@cache
def _processor() -> str:
    information = Path("/proc/cpuinfo")
    with suppress(OSError):
        names = [x for x in information.read_text().splitlines() if x.startswith(("model name", "CPU part"))]
        if names:
            return names[0].split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
