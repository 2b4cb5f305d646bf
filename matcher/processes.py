"""Threads, memory and child processes, by environment variables and numbers; no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")

_GIVEN = "OMP_NUM_THREADS"  # set by the user: so many threads are wanted
_VARIABLES = (_GIVEN, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_KEPT = "128"  # of torch's 1024; a pair of images takes some 40, and each is up to half a megabyte
_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def thread_environment(count: int) -> dict[str, str]:
    """Environment variables with which a process uses `count` CPU threads."""
    return dict.fromkeys(_VARIABLES, str(count))


def compute_threads() -> int:
    """Threads that this process may use: torch's where it is loaded, else OMP_NUM_THREADS or the cores."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.get_num_threads()
    given = os.environ.get(_GIVEN, "")
    return int(given) if given.isdecimal() and int(given) else usable_cores()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def at_once(first: Callable[[], Made], second: Callable[[], Made]) -> tuple[Made, Made]:
    """What two calls return, the second on a thread of its own where this process may use two.

    If both raise, it is what the first raised. The thread has ended when this returns.
    """
    if compute_threads() < 2:
        return first(), second()
    from concurrent.futures import ThreadPoolExecutor  # here, because `matcher --help` reads this file

    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(second)
        return first(), beside.result()


def restrain_libraries() -> None:
    """Let torch keep fewer of the operations that it compiles for each shape, of which a sequence has
    hundreds, and ONNX Runtime neither tell its maker of its use nor keep an identifier in the home folder,
    unless the user has set how; it takes effect if neither is at work in this process yet."""
    os.environ.setdefault(_PRIMITIVES, _KEPT)
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@cache
def keep_freed_memory(everything: bool = False) -> None:
    """Let the process keep 128 MiB that it has freed, or all, unless the user has set how glibc allocates.

    By default glibc gives large blocks back to the system, which clears them page by page when the next image
    or training step needs them: a tenth of the processor time of a match, half of that of a step. What lies
    free between blocks in use is kept, too: some 400 MB after hundreds of images of many sizes, and as much
    again for each thread that matches, if they did not share two heaps.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in _MALLOC):
        return
    import ctypes  # here, because `matcher --help` reads this file

    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        # Larger blocks, or none, come from the system and go back at once; so much of the others is kept.
        m_arena_max, m_mmap_max, m_mmap_threshold, m_trim_threshold = -8, -4, -3, -1
        mallopt(*((m_mmap_max, 0) if everything else (m_mmap_threshold, 32 << 20)))
        if not everything:
            mallopt(m_arena_max, 2)
        mallopt(m_trim_threshold, 2**31 - 1 if everything else 128 << 20)


@cache
def compute_alone_after_fork() -> None:
    """Let processes that are forked from this one compute on one thread: of those of OpenMP and torch only
    the one that forks exists in the child, which would wait for the others for ever."""

    def alone() -> None:
        os.environ.update(thread_environment(1))
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=alone)


# Python processes of our own: they import what this one can, and nothing from the working folder.

_SAFE = "PYTHONSAFEPATH"  # Python then leaves the working folder off the import path, as with -P


def child_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package; use it with `child_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(threads: int | None = None) -> dict[str, str]:
    """Environment in which a Python process finds what this one imports from, but for the working folder, and
    uses so many CPU threads."""
    # Relative entries, such as the '' of `python -c`, mean the working folder.
    paths = [path for path in sys.path if Path(path).is_absolute()]
    ours = str(Path(__file__).resolve().parent.parent)
    if next((path for path in paths if (Path(path) / "matcher").is_dir()), None) != ours:
        paths.insert(0, ours)  # the child is to run this package, not another one that is installed
    limits = {} if threads is None else thread_environment(threads)
    return {**os.environ, **limits, "PYTHONPATH": os.pathsep.join(paths), _SAFE: "1"}
