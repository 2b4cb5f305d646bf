"""NumPy arrays and torch tensors side by side, without loading torch.

A value can only be a tensor in a process that has loaded torch, so nothing here imports it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np


def loaded_torch() -> ModuleType | None:
    """torch, if this process has loaded it."""
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor."""
    torch = loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def library(value: Any) -> ModuleType:
    """torch for a tensor, else NumPy: for functions that both have under one name."""
    return loaded_torch() if is_tensor(value) else np


def to_numpy(value: Any) -> np.ndarray:
    """A tensor on any device, or an array, as an array; the same memory where that is possible."""
    if not is_tensor(value):
        return np.asarray(value)
    tensor = value.detach().cpu()
    return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()  # NumPy has none
