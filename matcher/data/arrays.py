"""Pictures in memory → NumPy arrays as `image_from_array` takes them: PIL pictures, torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import torch

from matcher.errors import UsageError


def array_from(picture: Any) -> np.ndarray:
    """A NumPy array of a picture in memory.

    Args:
        picture: an array; a PIL picture, upright or not, whose EXIF orientation is not applied; or a torch
            tensor, (H, W), (H, W, C) or (C, H, W) with C = 1, 3 or 4, on any device. Channels that come first
            are moved behind.

    Raises:
        UsageError: something else.
    """
    if isinstance(picture, np.ndarray):
        return picture
    if isinstance(picture, torch.Tensor):
        return _from_tensor(picture)
    if isinstance(picture, PIL.Image.Image):
        return _from_pillow(picture)
    raise UsageError(
        "a picture is a path, an Image, a NumPy array, a PIL picture or a torch tensor, "
        f"not {type(picture).__name__}"
    )


def _from_tensor(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has none
        tensor = tensor.float()
    if tensor.dim() == 3 and tensor.shape[0] in (1, 3, 4) and tensor.shape[2] not in (1, 3, 4):
        tensor = tensor.permute(1, 2, 0)
    return tensor.numpy()


def _from_pillow(picture: PIL.Image.Image) -> np.ndarray:
    if picture.mode in ("1", "L", "RGB", "RGBA", "I;16", "F"):
        return np.asarray(picture)
    if picture.mode in ("LA", "La") or picture.has_transparency_data:
        return np.asarray(picture.convert("RGBA"))
    if picture.mode.startswith("I"):
        raise UsageError(f"a PIL picture of mode {picture.mode!r} has over 16 bits; convert it to 'I;16'")
    return np.asarray(picture.convert("RGB"))
