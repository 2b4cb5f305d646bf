"""Environment variables that torch, OpenCV and BLAS read: CPU threads, and how much is kept in memory."""

from __future__ import annotations

import os

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_KEPT = "128"  # of torch's 1024; a pair of images takes some 40, and each is up to half a megabyte


def thread_environment(count: int) -> dict[str, str]:
    """Environment variables with which a process uses `count` CPU threads."""
    return dict.fromkeys(_VARIABLES, str(count))


def bound_primitives() -> None:
    """Let torch keep fewer of the operations that it compiles for each shape, unless the user says how many.

    A sequence meets hundreds of shapes, as its frames have different numbers of points. It takes effect if
    nothing was computed before in this process.
    """
    os.environ.setdefault(_PRIMITIVES, _KEPT)
