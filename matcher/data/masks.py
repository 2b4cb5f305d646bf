"""Where keypoints may lie: masks from files and arrays, in stored pixels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from matcher.data.decoding import decode
from matcher.data.probe import PathLike, as_path
from matcher.data.tensors import is_tensor, to_numpy
from matcher.errors import UsageError


def read_mask(path: PathLike, max_pixels: int) -> np.ndarray:
    """(H, W) bool from an image file, in stored pixels: True where any channel is not 0 and alpha is not 0.

    Raises:
        ImageError: as `matcher.data.images.read_image`.
    """
    raw, opaque, _ = decode(as_path(path), max_pixels)
    keep = raw != 0 if raw.ndim == 2 else np.any(raw != 0, axis=2)
    return keep if opaque is None else keep & opaque


def find_mask(folder: Path, name: str) -> Path | None:
    """The mask in a folder of masks of the image of that name, relative to its own folder; None without one.

    The mask of `a/b.jpg` is called `a/b.jpg`, `a/b.jpg.png` or `a/b.png`. A link to nothing, a pipe or a
    device of that name counts as one, so that reading it fails rather than the image going unmasked.
    """
    path = folder / name
    choices = (path, path.with_name(f"{path.name}.png"), path.with_suffix(".png"))
    return next((mask for mask in choices if os.path.lexists(mask) and not mask.is_dir()), None)


def find_masks(folder: Path, names: Iterable[str], where: str) -> dict[str, Path]:
    """The masks by name of image, of those that have one.

    Args:
        folder: of masks.
        names: of the images, relative to their own folder.
        where: the images are, for the message.

    Raises:
        UsageError: no folder, or one without a mask of any of the images.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of masks")
    names = list(names)
    found = {name: mask for name in names if (mask := find_mask(folder, name)) is not None}
    if not found:
        raise no_mask(folder, names, where)
    return found


def no_mask(folder: Path, names: Sequence[str], where: str) -> UsageError:
    """The error for a folder that holds no mask of any image."""
    first = names[0]
    return UsageError(
        f"{folder} holds no mask of any of the {len(names)} images of {where}: the mask of {first} is called "
        f"{first}, {first}.png or {Path(first).with_suffix('.png')}"
    )


def combined(
    opaque: np.ndarray | None,
    mask: PathLike | np.ndarray | Any | None,
    shape: tuple[int, int],
    max_pixels: int,
) -> np.ndarray | None:
    """(H, W) bool: where the image is opaque and the caller's mask keeps it; None = everywhere.

    Raises:
        ImageError: the mask's file cannot be read.
        UsageError: the mask is none, or of another size than the stored image, of shape (H, W).
    """
    if mask is None:
        return opaque
    if isinstance(mask, (str, os.PathLike)):
        name, keep = str(mask), read_mask(mask, max_pixels)
    else:
        name, keep = "the mask", _in_memory(mask)
    if keep.shape != shape:
        found, wanted = (" x ".join(map(str, reversed(size))) for size in (keep.shape, shape))
        raise UsageError(
            f"{name} is {found} pixels, its image {wanted}; "
            "a mask has the size of the image as stored, before EXIF orientation and resize"
        )
    return keep if opaque is None else keep & opaque


def _in_memory(mask: Any) -> np.ndarray:
    """(H, W) bool of an array, a PIL image or a torch tensor."""
    if isinstance(mask, PIL.Image.Image):
        mask = mask.convert("L")
    array = to_numpy(mask) if is_tensor(mask) else np.asarray(mask)
    if array.dtype.kind not in "biuf":
        kind = type(mask).__name__
        raise UsageError(f"a mask is a path, an array, a PIL image or a torch tensor, (H, W), not {kind}")
    return array != 0
