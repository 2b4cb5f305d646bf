"""Images in memory: which arrays and tensors are images, and their samples as 8 bits."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from matcher.data.tensors import is_tensor, to_numpy
from matcher.errors import UsageError

ACCEPTED = (
    "one image, grey (H, W), RGB (H, W, 3) or RGBA (H, W, 4), as a tensor also (1, H, W) or (3, H, W), of "
    "uint8, uint16, bool or float in [0, 1]"
)


def as_array(image: Any) -> np.ndarray:
    """A NumPy array of an image in memory.

    Args:
        image: an array, or a torch tensor on any device, (H, W), (H, W, C) or (C, H, W) with C = 1, 3 or 4.
            A tensor's channels that come first are moved behind.

    Raises:
        UsageError: something else.
    """
    if isinstance(image, np.ndarray):
        return image
    if not is_tensor(image):
        raise UsageError(
            "an image is a path, an Image, a NumPy array, a PIL image or a torch tensor, "
            f"not {type(image).__name__}; accepted: {ACCEPTED}"
        )
    array = to_numpy(image)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    return array


def split_alpha(array: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(H, W), (H, W, 1), (H, W, 3) or (H, W, 4) → (H, W) or (H, W, 3), and where alpha is not 0 or None.

    Raises:
        UsageError: another shape.
    """
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
