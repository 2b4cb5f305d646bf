"""Small tensors without waiting for a GPU, as every plain upload and every inverse that is checked does."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def constant(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers, in nested tuples, as a tensor; uploaded once, so not to be written to."""
    return torch.tensor(values, dtype=dtype, device=device)


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the processor's memory on the device, which is not waited for."""
    return values.to(device, non_blocking=True)


def inverse(matrices: Tensor) -> Tensor:
    """Inverses of regular matrices (B, N, N)."""
    return torch.linalg.inv_ex(matrices).inverse
