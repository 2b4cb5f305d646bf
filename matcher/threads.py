"""Environment variables for the number of CPU threads; torch, OpenCV and BLAS read them when imported."""

from __future__ import annotations

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")


def thread_environment(count: int) -> dict[str, str]:
    """Environment variables with which a process uses `count` CPU threads."""
    return dict.fromkeys(_VARIABLES, str(count))
