"""Colour of 16 bits a sample, which Pillow reads as 8: OpenCV reads it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import BinaryIO

import cv2
import numpy as np
import PIL.Image

from matcher.errors import ImageWarning

_BITS_PER_SAMPLE = 258  # TIFF
_PNG_DEPTH = 24  # byte of the file


def is_deep(image: PIL.Image.Image, file: BinaryIO) -> bool:
    """Whether a PNG or TIFF that Pillow opened has colour of 16 bits."""
    if image.format == "TIFF":
        return image.mode in ("RGB", "RGBA", "RGBX") and set(_tag(image)) == {16}
    if image.format != "PNG" or image.mode not in ("RGB", "RGBA"):
        return False
    place = file.tell()
    file.seek(_PNG_DEPTH)
    depth = file.read(1)
    file.seek(place)
    return depth == b"\x10"


def _tag(image: PIL.Image.Image) -> tuple[int, ...]:
    found = image.tag_v2.get(_BITS_PER_SAMPLE, ())
    return found if isinstance(found, tuple) else (found,)


def read_deep(
    file: BinaryIO, path: Path, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """(H, W, 3) uint16 RGB in stored pixels, and where alpha is not 0.

    Args:
        file: a PNG or TIFF that was decoded without an error, so it is whole.
        path: for the warning.
        size: its (width, height).

    Returns:
        None, with an `ImageWarning`, for a file that OpenCV reads otherwise: then its 8 bits have to do.
    """
    file.seek(0)
    found = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_UNCHANGED)
    fits = found is not None and found.dtype == np.uint16 and found.ndim == 3
    if not fits or found.shape[:2] != size[::-1] or found.shape[2] not in (3, 4):
        warnings.warn(
            f"{path}: its 16 bits a sample are read as 8; a 16-bit PNG keeps them", ImageWarning, stacklevel=5
        )
        return None
    opaque = found[..., 3] != 0 if found.shape[2] == 4 else None
    return np.ascontiguousarray(found[..., 2::-1]), opaque
