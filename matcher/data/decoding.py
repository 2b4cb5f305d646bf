"""An image file's bytes → its samples in stored pixels, where it is opaque, and its EXIF orientation.

Pillow decodes, because it raises where a file is cut short (OpenCV fills the rest with grey) and reports EXIF
orientation separately.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile

from matcher.data import netpbm
from matcher.data.deep import is_deep, read_deep
from matcher.data.geometry import UPRIGHT
from matcher.data.jpeg import check_scans
from matcher.data.probe import find_format, open_regular
from matcher.errors import ImageError, ImageWarning, MatcherError

EXIF_ORIENTATION = 0x0112
_STRIP_ROWS = 256  # Pillow → NumPy in strips takes half the time of one piece: the copies stay in the cache
_shared: dict[str, Lock] = {}  # between threads
_INVERSE_TURN = {6: 8, 8: 6}  # every other orientation undoes itself


class Decoded(NamedTuple):
    """An image as stored in its file."""

    samples: np.ndarray  # (H, W) or (H, W, 3) RGB, in the file's depth
    opaque: np.ndarray | None  # (H, W) bool, where alpha is not 0; None: everywhere
    orientation: int  # EXIF 1-8


def decode(path: Path, max_pixels: int) -> Decoded:
    """The first frame or page of an image file; with an `ImageWarning` if there are more.

    Raises:
        ImageError: missing, not a known image, larger than `max_pixels`, cut short or damaged.
    """
    with open_regular(path) as file:
        name, opener = find_format(file, path)
        if opener is None:
            with _decoding(path, name):
                kind, *size, top = netpbm.read_header(file)
            _check_size(path, *size, max_pixels)
            with _decoding(path, name):
                return Decoded(netpbm.read_samples(file, kind, *size, top), None, 1)
        with _decoding(path, name):
            if name == "JPEG":
                check_scans(file)
            image = opener(file)
        width, height = image.size
        _check_size(path, width, height, max_pixels)
        _warn_of_pages(image, path, name)
        with _decoding(path, name), _quiet(width * height):
            turned = _orientation(image.tag_v2) if isinstance(image, TiffImageFile) else 1
            deep = is_deep(image, file)
            image.load()  # also where OpenCV reads the samples: it would not see that bytes are missing
            if turned != 1 or not deep or (found := read_deep(file, path, image.size)) is None:
                found = samples_of(image)
            raw, opaque = found
            orientation = _orientation(image.getexif()) if turned == 1 else turned
    if turned != 1:  # Pillow turns TIFF upright by itself, and only TIFF: take it back
        back = _INVERSE_TURN.get(turned, turned)
        raw, opaque = turned_by(raw, back), None if opaque is None else turned_by(opaque, back)
    return Decoded(raw, opaque, orientation)


def _check_size(path: Path, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError(
            f"{path}: {width} x {height} pixels are more than the limit of {max_pixels}; "
            "make the image smaller or raise max_pixels"
        )


def from_pillow(image: PIL.Image.Image) -> Decoded:
    """A PIL image in memory, as it stands: what its EXIF orientation asks for is reported, not done.

    Raises:
        ImageError: it was opened from a file that is cut short or damaged.
    """
    path = Path(getattr(image, "filename", "") or "the PIL image")
    with _decoding(path, image.format or "image"):
        image.load()
        turned = isinstance(image, TiffImageFile)  # by Pillow, whatever its tags are
        return Decoded(*samples_of(image), 1 if turned else _orientation(image.getexif()))


def _warn_of_pages(image: PIL.Image.Image, path: Path, name: str) -> None:
    try:
        pages = getattr(image, "n_frames", 1)
    except Exception:  # a later page is damaged, and it is not needed
        return
    if pages > 1:
        what = "pages" if name == "TIFF" else "frames"
        warnings.warn(f"{path}: has {pages} {what}; the first one is used", ImageWarning, stacklevel=4)


@contextmanager
def _decoding(path: Path, name: str) -> Iterator[None]:
    """Whatever a decoder raises on damaged bytes, as one error that names the file and the remedy."""
    try:
        yield
    except (MatcherError, MemoryError):
        raise
    except PIL.Image.DecompressionBombError as error:
        raise ImageError(
            f"{path}: the {name} is beyond its decoder's own limit ({error}); make the image smaller"
        ) from error
    except Exception as error:
        raise ImageError(
            f"{path}: the {name} cannot be decoded ({error}); it is cut short or damaged: export it again"
        ) from error


@contextmanager
def _quiet(pixels: int) -> Iterator[None]:
    """No warning of Pillow's for a size the caller allows; the filters stay alone where it would not warn.

    The filters are those of all threads, so one image at a time changes them and puts them back.
    """
    if pixels <= (PIL.Image.MAX_IMAGE_PIXELS or pixels):
        yield
        return
    alone = _shared.setdefault("filters", Lock())
    with alone, warnings.catch_warnings(action="ignore", category=PIL.Image.DecompressionBombWarning):
        yield


def _orientation(tags: Any) -> int:
    value = tags.get(EXIF_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def samples_of(image: PIL.Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
    """Samples of a decoded image as grey or RGB in the file's depth, and where alpha is not 0."""
    if image.mode.startswith("I") or image.mode == "F":
        raw = _strips(image)  # Pillow's own conversion to 8 bits would clip instead of scale
        if isinstance(image, PpmImageFile) and image.mode == "I":
            raw = raw.astype(np.uint16)  # Pillow scales a deep PGM to 16 bits, in 32-bit numbers
        clear = image.info.get("transparency")
        return raw, raw != clear if isinstance(clear, int) else None
    grey = image.mode in ("1", "L", "LA", "La")
    if not image.has_transparency_data:
        mode = "L" if grey else "RGB"
        return _strips(image if image.mode == mode else image.convert(mode)), None
    raw = _strips(image.convert("LA" if grey else "RGBA"))
    return raw[..., 0] if grey else raw[..., :3], raw[..., -1] != 0


def _strips(image: PIL.Image.Image) -> np.ndarray:
    width, height = image.size
    probe = np.asarray(image.crop((0, 0, width, 1)))
    array = np.empty((height, *probe.shape[1:]), dtype=probe.dtype)
    for top in range(0, height, _STRIP_ROWS):
        bottom = min(top + _STRIP_ROWS, height)
        array[top:bottom] = np.asarray(image.crop((0, top, width, bottom)))
    return array


def turned_by(array: np.ndarray, orientation: int) -> np.ndarray:
    """Stored array (H, W[, C]) → upright view; the signed permutation that `geometry` applies to points."""
    turn = UPRIGHT[orientation]
    array = array if turn[0, 0] else array.swapaxes(0, 1)
    return array[:: turn[1].sum(dtype=int), :: turn[0].sum(dtype=int)]
