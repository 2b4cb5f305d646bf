"""CPU threads, and how much torch keeps in memory: environment variables and numbers; no torch."""

from __future__ import annotations

import os
import sys
from functools import cache

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_KEPT = "128"  # of torch's 1024; a pair of images takes some 40, and each is up to half a megabyte


def thread_environment(count: int) -> dict[str, str]:
    """Environment variables with which a process uses `count` CPU threads."""
    return dict.fromkeys(_VARIABLES, str(count))


def compute_threads() -> int:
    """Threads that this process may use: torch's where it is loaded, else OMP_NUM_THREADS or the cores."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.get_num_threads()
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bound_primitives() -> None:
    """Let torch keep fewer of the operations that it compiles for each shape, unless the user says how many.

    A sequence meets hundreds of shapes, as its frames have different numbers of points. It takes effect if
    nothing was computed before in this process.
    """
    os.environ.setdefault(_PRIMITIVES, _KEPT)


@cache
def compute_alone_after_fork() -> None:
    """Let processes that are forked from this one compute on one thread.

    Of the threads of OpenMP and torch only the one that forks exists in the child, which would wait for the
    others for ever.
    """

    def alone() -> None:
        os.environ.update(thread_environment(1))
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=alone)
