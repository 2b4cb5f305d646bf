"""The parameters of weights files as NumPy arrays, for engines without torch.

Errors are `IntegrityError` and read on after the file's name.
"""

from __future__ import annotations

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as parse

from matcher.errors import IntegrityError
from matcher.weights.renames import current_names


def read_arrays(data: bytes) -> dict[str, np.ndarray]:
    """All arrays of a safetensors file by their present names, numbers with a fraction as float32.

    Raises:
        IntegrityError: the bytes are damaged, or numbers are not finite.
    """
    try:
        arrays = current_names(parse(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"is not an intact safetensors file ({error})") from error
    arrays = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in arrays.items()}
    if broken := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise IntegrityError(f"holds numbers that are not finite: {', '.join(broken[:8])}")
    return arrays
