"""Linear maps of rows without gradients, as a CPU is fast at them.

PyTorch gives float32 products to MKL, which leaves AVX-512 unused on processors that are not Intel's. oneDNN,
which PyTorch holds as well and gives bfloat16 products to, takes less than half the time there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.kernels.library import processor_flags, processor_maker

# Channels of rows that one thread takes at a time; what goes into and comes out of a map fits its cache.
CACHED_ROWS = 2**18
# oneDNN's products are compiled again for every number of rows, which takes as long as a dozen of them: they
# only see multiples of this.
ROW_STEP = 64
_LEAST_WEIGHTS = 2**12  # of a map that is worth oneDNN


def rows_at_once(rows: int, channels: int, device: torch.device) -> Iterator[slice]:
    """Slices of `rows` that stay in the caches of all threads; all rows at once on other devices, and where
    a compiler decides.

    Their lengths are multiples of `ROW_STEP` if there are as many rows; for that the last one reaches back
    over rows of the one before, which are computed twice.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        yield from [slice(0, rows)] if rows else []
        return
    step = CACHED_ROWS * torch.get_num_threads() // channels
    step = max(step // ROW_STEP, 1) * ROW_STEP
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        even = start + (stop - start) // ROW_STEP * ROW_STEP
        if even > start:
            yield slice(start, even)
        if even < stop:
            yield slice(max(stop - ROW_STEP, 0), stop)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, inputs) weightᵀ + bias → (T, outputs), on a CPU `rows_at_once` where oneDNN computes it."""
    if x.device.type != "cpu" or not len(x) % ROW_STEP or not _by_onednn(x, weight):
        return linear_at_once(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    for rows in rows_at_once(len(x), max(weight.shape), x.device):
        out[rows] = linear_at_once(x[rows], weight, bias)
    return out


def linear_at_once(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of all rows at once."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and _by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether such rows on a CPU are multiplied by oneDNN."""
    if x.dtype != torch.float32:
        return True
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return len(x) >= ROW_STEP and weight.numel() >= _LEAST_WEIGHTS and x.dim() == 2 and mkl_is_slow()


@cache
def mkl_is_slow() -> bool:
    """Whether this processor has AVX-512, is not Intel's, and this PyTorch has oneDNN's linear maps."""
    if "avx512f" not in processor_flags() or processor_maker() in (None, "GenuineIntel"):
        return False
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
