"""Sessions of ONNX Runtime.

Sharp softmaxes give numbers below 10⁻³⁸, with which a processor takes many times as long unless its thread
treats them as zero. ONNX Runtime sets that for the thread that creates the first session of a process only,
so that one is created, and all are run, in one thread of their own; other threads of a program stay as they
are. Sessions are created in another thread, while images are read and their keypoints found.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime

from matcher.errors import UsageError
from matcher.onnx.builder import Builder
from matcher.processes import compute_threads

LEAST_VERSION = (1, 17)  # the first with operator set 20
_QUIET = 3  # errors only


class Model:
    """A model that is ready to run on the CPU."""

    def __init__(
        self,
        data: bytes,
        version: str | None = None,
        create: Callable[[bytes], onnxruntime.InferenceSession] | None = None,
    ) -> None:
        """Load the bytes of an .onnx file, beside what the caller does next.

        Args:
            data: the bytes.
            version: of ONNX Runtime; that of the one that is installed when absent.
            create: makes a session of them; `session` when absent.

        Raises:
            UsageError: ONNX Runtime is too old for our files.
        """
        version = version or onnxruntime.__version__
        if tuple(int(part) for part in version.split(".")[:2]) < LEAST_VERSION:
            wanted = ".".join(map(str, LEAST_VERSION))
            raise UsageError(f"onnxruntime {version} is too old; install at least version {wanted}")
        self._created = _threads(os.getpid()).creating.submit(create or session, data)

    @cached_property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        return [each.name for each in self._created.result().get_inputs()]

    @cached_property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        return [each.name for each in self._created.result().get_outputs()]

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs by name, for the inputs by name."""
        run = self._created.result().run
        found = _threads(os.getpid()).running.submit(run, None, arrays)
        return dict(zip(self.outputs, found.result(), strict=True))


class _Threads(NamedTuple):
    running: ThreadPoolExecutor
    creating: ThreadPoolExecutor


@cache
def _threads(process: int) -> _Threads:
    """The threads of a process, which do not outlive a fork; one has created the first session."""
    names = (f"onnxruntime-{what}-{process}" for what in ("run", "create"))
    threads = _Threads(*(ThreadPoolExecutor(1, thread_name_prefix=name) for name in names))
    graph = Builder("nothing")
    graph.output("same", graph.Identity(graph.input("any", "float32", "count")), "float32")
    threads.running.submit(session, graph.encode({})).result()
    return threads


def session(
    data: bytes, *, optimise: bool = True, keep_at: Path | None = None
) -> onnxruntime.InferenceSession:
    """A session, to be called in one of our threads.

    Args:
        data: an .onnx file, or what a session left at `keep_at`.
        optimise: not needed for what was optimised before.
        keep_at: where the optimised model is written to, in ONNX Runtime's own format.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = compute_threads()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if keep_at is not None:
        options.optimized_model_filepath = str(keep_at)
        options.add_session_config_entry("session.save_model_format", "ORT")
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
