"""Sessions of ONNX Runtime."""

from __future__ import annotations

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
        # Sharp softmaxes are full of them, and they take ten times the time of other numbers.
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.inputs = [each.name for each in self._session.get_inputs()]
        self.outputs = [each.name for each in self._session.get_outputs()]

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs by name, for the inputs by name."""
        return dict(zip(self.outputs, self._session.run(None, arrays), strict=True))
