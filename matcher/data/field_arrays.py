"""The fields of `Features` as arrays or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.data.tensors import is_tensor, library
from matcher.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

ORIENTATIONS = ("exif_orientation", "view_orientation")


def as_array(value: Any, name: str) -> np.ndarray:
    """A field of `Features` as a copy in the field's own type; `UsageError` for what is no number."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise UsageError(f"Features.{name} must hold numbers of at most 64 bits, not {array.dtype}")
    # A copy that keeps scalars scalar, which ascontiguousarray would not.
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if name == "mask":
        return array.astype(bool, copy=False)
    if name in ORIENTATIONS:
        return array.astype(np.int64, copy=False)
    keep = name == "descriptors" and array.dtype.kind == "f"
    return array if keep else array.astype(np.float32, copy=False)


def as_tensor(value: Any, name: str) -> Tensor:
    """As `as_array`, as a tensor; a tensor is not copied."""
    import torch

    if not is_tensor(value):
        return torch.from_numpy(as_array(value, name))
    if name == "mask":
        return value.bool()
    if name in ORIENTATIONS:
        return value.to(torch.int64)
    return value if name == "descriptors" and value.is_floating_point() else value.to(torch.float32)


def all_finite(value: np.ndarray | Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    # The sum shows it at a tenth of the cost, unless it overflows.
    xp = library(value)
    with np.errstate(all="ignore"):
        return bool(xp.isfinite(value.sum()) or xp.isfinite(value).all())


def stack_padded(values: Sequence[np.ndarray | Tensor]) -> np.ndarray | Tensor:
    """Arrays or tensors of any sizes along a new first axis, with zeros where they are shorter."""
    shape = [len(values), *map(max, zip(*(value.shape for value in values), strict=True))]
    widest = max(values, key=lambda value: value.dtype.itemsize)
    padded = widest.new_zeros(shape) if is_tensor(widest) else np.zeros(shape, widest.dtype)
    for index, value in enumerate(values):
        padded[(index, *map(slice, value.shape))] = value
    return padded
