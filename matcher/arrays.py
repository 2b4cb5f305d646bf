"""Arrays and tensors given by users: images in memory, the fields of `Features`, descriptors of SIFT."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from matcher.config import GRID_KIND
from matcher.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


# NumPy arrays and torch tensors side by side, without loading torch.


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


# Images in memory: which arrays and tensors are images, and their samples as 8 bits.

ACCEPTED = (
    "one image, grey (H, W), RGB (H, W, 3) or RGBA (H, W, 4), as a tensor also (1, H, W), (3, H, W) or "
    "(1, 3, H, W), of uint8, uint16, bool or float in [0, 1]"
)


def as_array(image: Any) -> np.ndarray:
    """A NumPy array of an image in memory: an array, or a torch tensor on any device, (H, W), (H, W, C) or
    (C, H, W) with C = 1, 3 or 4, whose channels are moved behind; `UsageError`: something else."""
    if isinstance(image, np.ndarray):
        return image
    if not is_tensor(image):
        raise UsageError(
            "an image is a path, an Image, a NumPy array, a PIL image or a torch tensor, "
            f"not {type(image).__name__}; accepted: {ACCEPTED}"
        )
    array = to_numpy(image)
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    return array


def split_alpha(array: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(H, W), (H, W, 1), (H, W, 3) or (H, W, 4) → (H, W) or (H, W, 3), and where alpha is not 0 or None;
    `UsageError`: another shape."""
    channels = array.shape[2:] or (1,)
    if array.ndim not in (2, 3) or channels[0] not in (1, 3, 4) or array.size == 0:
        raise UsageError(f"an array of shape {array.shape} is not an image; accepted: {ACCEPTED}")
    opaque = array[..., 3] != 0 if channels[0] == 4 else None
    if array.ndim == 3:
        array = array[..., 0] if channels[0] == 1 else array[..., :3]
    return array, opaque


def to_uint8(raw: np.ndarray) -> np.ndarray:
    """Samples of any accepted depth, scaled by the full range of their type; `ValueError` for others."""
    raw = np.ascontiguousarray(raw, dtype=raw.dtype.newbyteorder("="))
    if raw.dtype == np.uint8:
        return raw
    if raw.dtype == np.bool_:
        return raw * np.uint8(255)
    if raw.dtype == np.uint16:
        return cv2.convertScaleAbs(raw, alpha=255 / 65535)
    if raw.dtype.kind != "f":
        raise ValueError(f"samples of type {raw.dtype}")
    low, high = float(raw.min()), float(raw.max())  # NaN propagates and fails the comparison
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # a hair of overshoot is interpolation's rounding
        raise ValueError(f"float samples from {low:g} to {high:g}, which should lie in [0, 1]")
    return np.rint(np.clip(raw, 0, 1) * np.float32(255)).astype(np.uint8)


def to_grey(raw: np.ndarray) -> np.ndarray:
    """(H, W) grey of samples that `to_uint8` accepts, in their depth: uint8, uint16, float32 up to 255."""
    raw = np.ascontiguousarray(raw, dtype=raw.dtype.newbyteorder("="))
    if raw.dtype == np.bool_:
        raw = raw * np.uint8(255)
    elif raw.dtype.kind == "f":
        raw = np.clip(raw, 0, 1).astype(np.float32) * np.float32(255)
    return raw if raw.ndim == 2 else cv2.cvtColor(raw, cv2.COLOR_RGB2GRAY)


# The fields of `Features` as arrays or tensors.

ORIENTATIONS = ("exif_orientation", "view_orientation")


def as_array_field_arrays(value: Any, name: str) -> np.ndarray:
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
        return torch.from_numpy(as_array_field_arrays(value, name))
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
    if len(values) == 1:
        return values[0][None]
    shape = [len(values), *map(max, zip(*(value.shape for value in values), strict=True))]
    widest = max(values, key=lambda value: value.dtype.itemsize)
    padded = widest.new_zeros(shape) if is_tensor(widest) else np.zeros(shape, widest.dtype)
    for index, value in enumerate(values):
        padded[(index, *map(slice, value.shape))] = value
    return padded


# Descriptor norms and RootSIFT.

SIFT_DIM = 128
# Front ends whose descriptors have any length; those of all others have norm 1.
UNNORMALISED = ("dedodeb", "dedodeg", GRID_KIND)
JOINED = "joined"  # kind of the features of several front ends


def root_sift(descriptors: np.ndarray) -> np.ndarray:
    """Raw SIFT (N, 128) → square roots of the L1-normalised values, float32 of norm 1.

    Arandjelović and Zisserman, Three things everyone should know to improve object retrieval, 2012.
    """
    total = np.maximum(descriptors.sum(axis=1, keepdims=True, dtype=np.float32), 1e-6)
    return np.sqrt(descriptors.astype(np.float32) / total)


def typical_norm(descriptors: np.ndarray) -> float:
    """Median Euclidean norm of descriptors (N, D) that are not zero; 1 where there is none."""
    norms = np.linalg.norm(descriptors.astype(np.float32), axis=-1)
    norms = norms[norms > 0]
    return float(np.median(norms)) if len(norms) else 1.0


def is_raw_sift(descriptors: np.ndarray) -> bool:
    """Whether (N, 128) descriptors look like SIFT's as OpenCV gives them: not negative, of norm 512 or so."""
    some = descriptors[:64]  # RootSIFT has norm 1, OpenCV's about 512
    return some.shape[-1] == SIFT_DIM and bool((some >= 0).all()) and typical_norm(some) > 2
