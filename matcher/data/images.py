"""Picture files and arrays → `Image`: probe the header, decode, scale to 8 bits, turn upright, shrink.

Pillow decodes, because it raises where a file is cut short (OpenCV fills the rest with grey) and reports EXIF
orientation separately. Each format's class is opened by signature instead of by `PIL.Image.open`, so that the
pixel limit is the caller's and Pillow's process-wide one stays as it is.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np
import PIL.Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from matcher.data.geometry import UPRIGHT, resized, upright_size
from matcher.data.image import Image
from matcher.errors import ImageError, MatcherError, UsageError, install_command

PathLike = str | os.PathLike[str]
MAX_PIXELS = 178_000_000
EXIF_ORIENTATION = 0x0112

_ACCEPTED = "grey (H, W), RGB (H, W, 3) or RGBA (H, W, 4) of uint8, uint16, bool or float in [0, 1]"
_STRIP_ROWS = 256  # Pillow → NumPy in strips takes half the time of one piece: the copies stay in the cache
_INVERSE_TURN = {6: 8, 8: 6}  # every other orientation undoes itself


def read_image(
    path: PathLike,
    *,
    resize: int | None = 1024,
    upright: bool = True,
    max_pixels: int = MAX_PIXELS,
    mask: PathLike | np.ndarray | None = None,
) -> Image:
    """The first frame of a JPEG, PNG, TIFF, WebP, BMP, PGM, PPM or (with the `heif` extra) HEIC file.

    16-bit samples are scaled by their full range; alpha 0 becomes mask False.

    Args:
        path: the file.
        resize: longer side in pixels, only ever made smaller; None keeps the size.
        upright: turn the pixels as EXIF says; False keeps the stored pixels and reports orientation 1.
        max_pixels: width · height above which the file is refused from its header, undecoded.
        mask: picture file (not 0 = keep) or (H, W) array, in stored pixels.

    Raises:
        ImageError: the file is missing, not a known picture, too large, cut short or damaged.
        UsageError: an argument that cannot be used, or a mask of another size than the stored picture.
    """
    path = _as_path(path)
    _check_limits(resize, max_pixels)
    raw, opaque, orientation = _decode(path, max_pixels)
    try:
        pixels = _to_uint8(raw)
    except ValueError as error:
        raise ImageError(f"{path}: {error}; convert it to 8- or 16-bit samples") from error
    keep = _combined(opaque, mask, pixels.shape[:2], max_pixels)
    return _finish(pixels, keep, orientation if upright else 1, resize, path)


def image_from_array(
    array: np.ndarray, *, resize: int | None = 1024, mask: PathLike | np.ndarray | None = None
) -> Image:
    """A picture in memory: (H, W), (H, W, 3) RGB or (H, W, 4) RGBA; uint8, uint16, bool or float in [0, 1].

    Raises:
        UsageError: another shape or dtype, values outside the range, NaN, or a mask of another size.
    """
    _check_limits(resize, MAX_PIXELS)
    raw = np.asarray(array)
    channels = raw.shape[2:] or (1,)
    if raw.ndim not in (2, 3) or channels[0] not in (1, 3, 4) or raw.size == 0:
        raise UsageError(f"an array of shape {raw.shape} is not a picture; accepted: {_ACCEPTED}")
    opaque = raw[..., 3] != 0 if channels[0] == 4 else None
    if raw.ndim == 3:
        raw = raw[..., 0] if channels[0] == 1 else raw[..., :3]
    try:
        pixels = _to_uint8(raw)
    except ValueError as error:
        raise UsageError(f"the array cannot be used: {error}; accepted: {_ACCEPTED}") from error
    return _finish(pixels, _combined(opaque, mask, pixels.shape[:2], MAX_PIXELS), 1, resize, None)


def read_mask(path: PathLike, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """(H, W) bool from a picture file, in stored pixels: True where any channel is not 0 and alpha is not 0.

    Raises:
        ImageError: as `read_image`.
    """
    raw, opaque, _ = _decode(_as_path(path), max_pixels)
    keep = raw != 0 if raw.ndim == 2 else np.any(raw != 0, axis=2)
    return keep if opaque is None else keep & opaque


def _as_path(path: PathLike) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise UsageError(f"a picture is given by its path, not by {type(path).__name__}") from None


def _check_limits(resize: int | None, max_pixels: int) -> None:
    if max_pixels < 1 or (resize is not None and resize < 1):
        raise UsageError(f"resize ({resize}) and max_pixels ({max_pixels}) must be at least 1")


def _open_heif(file: BinaryIO) -> PIL.Image.Image:
    try:
        from pillow_heif import HeifImageFile
    except ModuleNotFoundError:
        raise ImageError(
            f"{file.name}: HEIC needs pillow-heif; run {install_command('heif')} or convert it to JPEG"
        ) from None
    return HeifImageFile(file)


_FORMATS: tuple[tuple[str, bytes, Callable[[BinaryIO], PIL.Image.Image]], ...] = (
    ("JPEG", rb"\xff\xd8\xff", JpegImageFile),
    ("PNG", rb"\x89PNG\r\n\x1a\n", PngImageFile),
    ("TIFF", rb"II[*+]\0|MM\0[*+]", TiffImageFile),
    ("WebP", rb"RIFF.{4}WEBP", WebPImageFile),
    ("BMP", rb"BM", BmpImageFile),
    ("PGM or PPM", rb"P[2356]\s", PpmImageFile),
    ("HEIC", rb".{4}ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", _open_heif),
)


def _open_regular(path: Path) -> BinaryIO:
    """The opened file; anything that is not a regular, non-empty file is refused before it can block."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"{path}: not a file (a directory, pipe or device); name one picture file")
        if status.st_size == 0:
            raise ImageError(f"{path}: the file is empty; copy or export it again")
        return path.open("rb")
    except OSError as error:
        raise ImageError(f"{path}: cannot be opened ({error.strerror}); check the path") from error
    except ValueError as error:  # a NUL byte in the name
        raise ImageError(f"{os.fspath(path)!r}: not a file name ({error}); check the path") from error


def _sniff(file: BinaryIO, path: Path) -> tuple[str, Callable[[BinaryIO], PIL.Image.Image]]:
    head = file.read(16)
    file.seek(0)
    for name, signature, opener in _FORMATS:
        if re.match(signature, head, re.DOTALL):
            return name, opener
    known = ", ".join(name for name, _, _ in _FORMATS)
    raise ImageError(f"{path}: not a picture in a known format ({known}); convert it to PNG or JPEG")


@contextmanager
def _decoding(path: Path, name: str) -> Iterator[None]:
    """Whatever a decoder raises on damaged bytes, as one error that names the file and the remedy."""
    try:
        yield
    except (MatcherError, MemoryError):
        raise
    except PIL.Image.DecompressionBombError as error:
        raise ImageError(
            f"{path}: the {name} is beyond its decoder's own limit ({error}); make the picture smaller"
        ) from error
    except Exception as error:
        raise ImageError(
            f"{path}: the {name} cannot be decoded ({error}); it is cut short or damaged: export it again"
        ) from error


def _quiet(pixels: int) -> AbstractContextManager[Any]:
    """No warning of Pillow's for a size the caller allows; the filters stay alone where it would not warn."""
    if pixels <= (PIL.Image.MAX_IMAGE_PIXELS or pixels):
        return nullcontext()
    return warnings.catch_warnings(action="ignore", category=PIL.Image.DecompressionBombWarning)


def _decode(path: Path, max_pixels: int) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Stored pixels (H, W[, 3]) as the file's samples, alpha > 0 (H, W) or None, EXIF orientation."""
    with _open_regular(path) as file:
        name, opener = _sniff(file, path)
        with _decoding(path, name):
            picture = opener(file)
        width, height = picture.size
        if width * height > max_pixels:
            raise ImageError(
                f"{path}: {width} x {height} pixels are more than the limit of {max_pixels}; "
                "make the picture smaller or raise max_pixels (--max-pixels)"
            )
        with _decoding(path, name), _quiet(width * height):
            turned = _orientation(picture.tag_v2) if isinstance(picture, TiffImageFile) else 1
            picture.load()
            raw, opaque = _samples(picture)
            orientation = _orientation(picture.getexif()) if turned == 1 else turned
    if turned != 1:  # Pillow turns TIFF upright by itself, and only TIFF: take it back
        back = _INVERSE_TURN.get(turned, turned)
        raw, opaque = _turned(raw, back), None if opaque is None else _turned(opaque, back)
    return raw, opaque, orientation


def _orientation(tags: Any) -> int:
    value = tags.get(EXIF_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _samples(picture: PIL.Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
    """Samples of a decoded picture as grey or RGB in the file's depth, and where alpha is not 0."""
    if picture.mode.startswith("I") or picture.mode == "F":
        raw = _strips(picture)  # Pillow's own conversion to 8 bits would clip instead of scale
        clear = picture.info.get("transparency")
        return raw, raw != clear if isinstance(clear, int) else None
    grey = picture.mode in ("1", "L", "LA", "La")
    if not picture.has_transparency_data:
        mode = "L" if grey else "RGB"
        return _strips(picture if picture.mode == mode else picture.convert(mode)), None
    raw = _strips(picture.convert("LA" if grey else "RGBA"))
    return raw[..., 0] if grey else raw[..., :3], raw[..., -1] != 0


def _strips(picture: PIL.Image.Image) -> np.ndarray:
    width, height = picture.size
    probe = np.asarray(picture.crop((0, 0, width, 1)))
    array = np.empty((height, *probe.shape[1:]), dtype=probe.dtype)
    for top in range(0, height, _STRIP_ROWS):
        bottom = min(top + _STRIP_ROWS, height)
        array[top:bottom] = np.asarray(picture.crop((0, top, width, bottom)))
    return array


def _to_uint8(raw: np.ndarray) -> np.ndarray:
    """Samples of any accepted depth, scaled by the full range of their type."""
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


def _combined(
    opaque: np.ndarray | None, mask: PathLike | np.ndarray | None, shape: tuple[int, int], max_pixels: int
) -> np.ndarray | None:
    """(H, W) bool: where the picture is opaque and the caller's mask keeps it; None = everywhere."""
    if mask is None:
        return opaque
    if isinstance(mask, np.ndarray):
        name, keep = "the mask", mask != 0
    else:
        name, keep = str(mask), read_mask(mask, max_pixels=max_pixels)
    if keep.shape != shape:
        found, wanted = (" x ".join(map(str, reversed(size))) for size in (keep.shape, shape))
        raise UsageError(
            f"{name} is {found} pixels, its picture {wanted}; "
            "a mask has the size of the picture as stored, before EXIF orientation and resize"
        )
    return keep if opaque is None else keep & opaque


def _turned(array: np.ndarray, orientation: int) -> np.ndarray:
    """Stored array (H, W[, C]) → upright view; the signed permutation that `geometry` applies to points."""
    turn = UPRIGHT[orientation]
    array = array if turn[0, 0] else array.swapaxes(0, 1)
    return array[:: turn[1].sum(dtype=int), :: turn[0].sum(dtype=int)]


def _finish(
    pixels: np.ndarray, keep: np.ndarray | None, orientation: int, resize: int | None, path: Path | None
) -> Image:
    """Shrink first, then turn: the same picture, and only the small one is moved."""
    size = (pixels.shape[1], pixels.shape[0])
    new_size, scale = resized(upright_size(size, orientation), resize)
    target = upright_size(new_size, orientation)  # the swap undoes itself
    if target != size:
        pixels = cv2.resize(pixels, target, interpolation=cv2.INTER_AREA)
        if keep is not None:
            # kept where more than half of the resized pixel's area is
            keep = cv2.resize(keep * np.uint8(255), target, interpolation=cv2.INTER_AREA) > 127
    pixels = np.ascontiguousarray(_turned(pixels, orientation))
    keep = None if keep is None else np.ascontiguousarray(_turned(keep, orientation))
    return Image(pixels=pixels, size=size, scale=scale, orientation=orientation, path=path, mask=keep)
