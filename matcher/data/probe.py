"""What a file is before it is decoded: a regular file, and which image format by its first bytes.

Each format's class is opened by signature instead of by `PIL.Image.open`, so that the pixel limit is the
caller's and Pillow's process-wide one stays as it is.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import PIL.Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from matcher.errors import ImageError, UsageError, install_command

PathLike = str | os.PathLike[str]
Opener = Callable[[BinaryIO], PIL.Image.Image]
_URL = re.compile(r"(https?|ftp|file|s3|gs):/+(?=[^/])", re.IGNORECASE)


def as_path(path: PathLike) -> Path:
    """An image's path.

    Raises:
        UsageError: something that is no path.
        ImageError: a URL.
    """
    try:
        found = Path(path)
    except TypeError:
        raise UsageError(f"an image is given by its path, not by {type(path).__name__}") from None
    if _URL.match(os.fspath(path)) and not found.exists():
        # A Path has lost one of the two slashes.
        url = _URL.sub(lambda scheme: f"{scheme[1]}://", os.fspath(path), count=1)
        raise ImageError(f"{url}: images are read from files; download it first, then name the file")
    return found


def open_regular(path: Path) -> BinaryIO:
    """The opened file; anything that is not a regular, non-empty file is refused before it can block.

    Raises:
        ImageError: the file is missing, empty, a folder, a pipe or a device.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"{path}: not a file (a directory, pipe or device); name one image file")
        if status.st_size == 0:
            raise ImageError(f"{path}: the file is empty; copy or export it again")
        return path.open("rb")
    except OSError as error:
        raise ImageError(f"{path}: cannot be opened ({error.strerror}); check the path") from error
    except ValueError as error:  # a NUL byte in the name
        raise ImageError(f"{os.fspath(path)!r}: not a file name ({error}); check the path") from error


def find_format(file: BinaryIO, path: Path) -> tuple[str, Opener | None]:
    """Name and Pillow class of the image format, from the file's first bytes; None: `netpbm` reads it.

    Raises:
        ImageError: a format that is not known.
    """
    head = file.read(16)
    file.seek(0)
    for name, signature, opener in _FORMATS:
        if re.match(signature, head, re.DOTALL):
            return name, opener
    known = ", ".join(name for name, _, _ in _FORMATS)
    raise ImageError(f"{path}: not an image in a known format ({known}); convert it to PNG or JPEG")


def _open_heif(file: BinaryIO) -> PIL.Image.Image:
    try:
        from pillow_heif import HeifImageFile
    except ModuleNotFoundError:
        raise ImageError(
            f"{file.name}: HEIC needs pillow-heif: {install_command('heif')}, or convert it to JPEG"
        ) from None
    return HeifImageFile(file)


def _open_avif(file: BinaryIO) -> PIL.Image.Image:
    try:
        from PIL.AvifImagePlugin import SUPPORTED, AvifImageFile
    except ModuleNotFoundError:  # Pillow before 11.3
        SUPPORTED = False
    if not SUPPORTED:
        raise ImageError(f"{file.name}: this Pillow cannot read AVIF; update pillow, or convert it to JPEG")
    return AvifImageFile(file)


_FORMATS: tuple[tuple[str, bytes, Opener | None], ...] = (  # None: `netpbm`
    ("JPEG", rb"\xff\xd8\xff", JpegImageFile),
    ("PNG", rb"\x89PNG\r\n\x1a\n", PngImageFile),
    ("TIFF", rb"II[*+]\0|MM\0[*+]", TiffImageFile),
    ("WebP", rb"RIFF.{4}WEBP", WebPImageFile),
    ("BMP", rb"BM", BmpImageFile),
    ("PGM, PPM, PBM or PFM", rb"P[1-6Ff]\s", None),
    ("GIF", rb"GIF8[79]a", GifImageFile),
    ("JPEG 2000", rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", Jpeg2KImageFile),
    ("AVIF", rb".{4}ftypavi[fs]", _open_avif),
    ("HEIC", rb".{4}ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", _open_heif),
)
