"""Sessions of ONNX Runtime.

Sharp softmaxes give numbers below 10⁻³⁸, with which a processor takes many times as long unless its thread
treats them as zero. ONNX Runtime sets that for the thread that creates the first session of a process only,
so all sessions are created and run in one thread of their own; other threads of a program stay as they are.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import onnxruntime

from matcher.errors import UsageError
from matcher.threads import compute_threads

LEAST_VERSION = (1, 17)  # the first with operator set 20
_QUIET = 3  # errors only


class Model:
    """A model that is ready to run on the CPU."""

    def __init__(self, data: bytes, version: str = onnxruntime.__version__) -> None:
        """Load the bytes of an .onnx file.

        Raises:
            UsageError: ONNX Runtime is too old for our files.
        """
        if tuple(int(part) for part in version.split(".")[:2]) < LEAST_VERSION:
            wanted = ".".join(map(str, LEAST_VERSION))
            raise UsageError(f"onnxruntime {version} is too old; install at least version {wanted}")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        options.intra_op_num_threads = compute_threads()
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        create = _thread(os.getpid()).submit(
            onnxruntime.InferenceSession, data, options, providers=["CPUExecutionProvider"]
        )
        self._session = create.result()
        self.inputs = [each.name for each in self._session.get_inputs()]
        self.outputs = [each.name for each in self._session.get_outputs()]

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs by name, for the inputs by name."""
        found = _thread(os.getpid()).submit(self._session.run, None, arrays)
        return dict(zip(self.outputs, found.result(), strict=True))


@cache
def _thread(process: int) -> ThreadPoolExecutor:
    """The thread of a process, which does not outlive a fork."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"onnxruntime-{process}")
