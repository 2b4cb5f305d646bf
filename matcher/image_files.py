"""What an image file holds: samples as stored, where they are opaque, EXIF orientation, GPS position."""

from __future__ import annotations

import math
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

import cv2
import numpy as np
import PIL.Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ExifTags import IFD, Base
from PIL.GifImagePlugin import GifImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from matcher.cameras import Camera, focal_of_film
from matcher.errors import ImageError, ImageWarning, MatcherError, UsageError, install_command
from matcher.geometry import UPRIGHT

# What a file is before it is decoded: a regular file, and which image format by its first bytes.

PathLike = str | os.PathLike[str]
Opener = Callable[[BinaryIO], PIL.Image.Image]
_URL = re.compile(r"(https?|ftp|file|s3|gs):/+(?=[^/])", re.IGNORECASE)


def as_path(path: PathLike) -> Path:
    """An image's path; `UsageError`: something that is no path; `ImageError`: a URL."""
    try:
        found = Path(path)
        found = found if found.exists() else found.expanduser()
    except RuntimeError:  # a home that nobody has
        return Path(path)
    except TypeError:
        raise UsageError(f"an image is given by its path, not by {type(path).__name__}") from None
    if _URL.match(os.fspath(path)) and not found.exists():  # a Path has lost one of the two slashes
        url = _URL.sub(lambda scheme: f"{scheme[1]}://", os.fspath(path), count=1)
        raise ImageError(f"{url}: images are read from files; download it first, then name the file")
    return found


def open_regular(path: Path) -> BinaryIO:
    """The opened file; `ImageError` for what is missing, empty or, before it can block, no regular file."""
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


RAW_SUFFIXES = (  # of photos as the sensor took them, most of them TIFFs whose first page is a thumbnail
    *(".nef", ".nrw", ".cr2", ".cr3", ".crw", ".dng", ".arw", ".srf", ".sr2", ".raf", ".rw2", ".orf", ".pef"),
    *(".srw", ".x3f", ".3fr", ".fff", ".iiq", ".mrw", ".dcr", ".kdc", ".erf", ".mef", ".mos", ".rwl"),
)


def find_format(file: BinaryIO, path: Path) -> tuple[str, Opener | None]:
    """Name and Pillow class (None: OpenCV reads it) of the image format, by the file's first bytes."""
    head = file.read(256)
    file.seek(0)
    found = [(name, opener) for name, signature, opener in _FORMATS if re.match(signature, head, re.DOTALL)]
    if path.suffix.lower() in RAW_SUFFIXES and (not found or found[0][0] == "TIFF"):
        raise ImageError(f"{path}: {_RAW}")
    if found:
        return found[0]
    if others := [text for text, signature in _OTHERS.items() if re.match(signature, head, re.DOTALL)]:
        raise ImageError(f"{path}: no image that can be read, but {others[-1]}")
    known = ", ".join(name for name, _, _ in _FORMATS)
    raise ImageError(f"{path}: not an image in a known format ({known}); convert it to PNG or JPEG")


_RAW = "a RAW photo, or the preview inside one; develop it to JPEG or TIFF"
_OTHERS = {  # what else people give, and what to do, by the first bytes
    "a PDF; save its pages as images, such as by `pdftoppm -r 300 -png`": rb".{,9}%PDF-",
    "a video; save its frames, such as by `ffmpeg -i`": rb".{4}(ftyp|moov|mdat)|\x1aE\xdf\xa3|RIFF.{4}AVI ",
    "a drawing (SVG, PostScript); save it as PNG": rb"\s*<(\?xml.*<)?svg|%!PS|\xc5\xd0\xd3\xc6",
    "a file of Photoshop, GIMP or of HDR; save it as TIFF or PNG": rb"8BPS|gimp xcf|v/1\x01|#\?R",
    _RAW: rb".{4}ftypcrx|FUJIFILMCCD-RAW|IIR[OS]|MMOR|IIU\0|FOVb|.{6}HEAPCCDR",
}


def _open_heif(file: BinaryIO) -> PIL.Image.Image:
    try:
        from pillow_heif import HeifImageFile
    except ModuleNotFoundError:
        raise ImageError(
            f"{file.name}: HEIC needs pillow-heif: {install_command('pillow-heif')}, or convert it to JPEG"
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


_FORMATS: tuple[tuple[str, bytes, Opener | None], ...] = (
    ("JPEG", rb"\xff\xd8\xff", JpegImageFile),
    ("PNG", rb"\x89PNG\r\n\x1a\n", PngImageFile),
    ("TIFF", rb"II[*+]\0|MM\0[*+]", TiffImageFile),
    ("WebP", rb"RIFF.{4}WEBP", WebPImageFile),
    ("BMP", rb"BM", BmpImageFile),
    ("PGM, PPM, PBM", rb"P[1-6f]\s", PpmImageFile),
    ("PFM", rb"PF\s", None),  # of colour, which Pillow does not read
    ("GIF", rb"GIF8[79]a", GifImageFile),
    ("JPEG 2000", rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", Jpeg2KImageFile),
    ("AVIF", rb".{4}ftypavi[fs]", _open_avif),
    ("HEIC", rb".{4}ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", _open_heif),
)


# An image file's bytes → its samples in stored pixels, where it is opaque, and its EXIF orientation.


class Decoded(NamedTuple):
    """An image as stored in its file."""

    samples: np.ndarray  # (H, W) or (H, W, 3) RGB, in the file's depth
    opaque: np.ndarray | None  # (H, W) bool, where alpha is not 0; None: everywhere
    orientation: int  # EXIF 1-8


def decode(path: Path, max_pixels: int) -> Decoded:
    """The first frame or page of an image file, with an `ImageWarning` if there are more; `ImageError`:
    missing, not a known image, larger than `max_pixels`, cut short or damaged."""
    with open_regular(path) as file:
        return decode_open(file, path, max_pixels)


def decode_open(file: BinaryIO, path: Path, max_pixels: int) -> Decoded:
    """As `decode`, of an open file; `path` is its name in messages."""
    name, opener = find_format(file, path)
    with _decoding(path, name):
        if opener is None:
            header = re.match(rb"PF\s+(\d{1,9})\s+(\d{1,9})\s", file.read(64))
            if header is None:
                raise ValueError("its header has no size")
            _check_size(path, int(header[1]), int(header[2]), max_pixels)
            if (samples := _by_opencv(file)) is None:
                raise ValueError("samples are missing")
            return Decoded(np.ascontiguousarray(samples[..., ::-1]), None, 1)
        if name == "JPEG":
            _check_scans(file)
        elif opener is PpmImageFile:
            _check_header(file)
        image = opener(file)
        _refuse_preview(image, path)
        _check_size(path, *image.size, max_pixels)
    with _decoding(path, name), _quiet(image.width * image.height):
        try:
            pages = getattr(image, "n_frames", 1)
        except Exception:  # a later page is damaged, and it is not needed
            pages = 1
        if pages > 1:
            what = "pages" if name == "TIFF" else "frames"
            warnings.warn(f"{path}: has {pages} {what}; the first one is used", ImageWarning, stacklevel=3)
        turned = _orientation(image.tag_v2) if isinstance(image, TiffImageFile) else 1
        deep = _is_deep(image)
        image.load()  # also where OpenCV reads the samples: it would not see that bytes are missing
        if turned != 1 or not deep or (found := _read_deep(file, path, image.size)) is None:
            found = _samples_of(image)
        raw, opaque = found
        orientation = _orientation(image.getexif()) if turned == 1 else turned
    if turned != 1:  # Pillow turns TIFF upright by itself, and only TIFF: take it back
        back = {6: 8, 8: 6}.get(turned, turned)  # every other orientation undoes itself
        raw, opaque = turned_by(raw, back), None if opaque is None else turned_by(opaque, back)
    return Decoded(raw, opaque, orientation)


def _check_scans(file: BinaryIO) -> None:
    """Refuse a JPEG of more than 64 scans, for each of which a decoder goes over the whole picture; encoders
    write at most about 10. The file is at its start before and afterwards."""
    data, most, scan, end = file.read(), 64, 0xDA, 0xD9
    file.seek(0)
    if data.count(b"\xff\xda") <= most:  # the bytes may also lie in a profile or a thumbnail
        return
    # In the samples of a scan, a zero follows each 0xFF that is no marker; restarts lie between them.
    at, scans, marked = 2, 0, re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]", re.DOTALL)
    while (marker := marked.search(data, at)) is not None and (kind := marker[0][-1]) != end:
        at = marker.end()
        if kind not in (0x01, 0xD8):  # these have no length
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
        scans += kind == scan
        if scans > most:
            raise ValueError(f"it has more than {most} scans")


def _check_header(file: BinaryIO) -> None:
    """Refuse a netpbm header without end, such as of comments, which Pillow reads byte by byte."""
    head = re.sub(rb"#[^\r\n]*[\r\n]", b" ", file.read(1 << 16))
    file.seek(0)
    kind, *values = [*head.split(None, 4), b""]
    values = values[: 2 if kind in (b"P1", b"P4") else 3]
    if any(not value or value.startswith(b"#") for value in values):
        raise ValueError("its header does not end within 65536 bytes")


def _by_opencv(file: BinaryIO) -> np.ndarray | None:
    file.seek(0)
    return cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_UNCHANGED)


def _check_size(path: Path, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError(
            f"{path}: {width} x {height} pixels are more than the limit of {max_pixels}; "
            "make the image smaller or raise max_pixels"
        )


def _refuse_preview(image: PIL.Image.Image, path: Path) -> None:
    subfile = image.tag_v2.get(254) if isinstance(image, TiffImageFile) else 0
    if isinstance(subfile, int) and subfile & 1:  # NewSubfileType: a smaller version of another page
        raise ImageError(f"{path}: {_RAW}")


def from_pillow(image: PIL.Image.Image) -> Decoded:
    """A PIL image in memory, as it stands: what its EXIF orientation asks for is reported, not done."""
    path = Path(getattr(image, "filename", "") or "the PIL image")
    with _decoding(path, image.format or "image"):
        _refuse_preview(image, path)
        image.load()
        turned = isinstance(image, TiffImageFile)  # by Pillow, whatever its tags are
        return Decoded(*_samples_of(image), 1 if turned else _orientation(image.getexif()))


def _is_deep(image: PIL.Image.Image) -> bool:
    """Whether a PNG, TIFF or PPM that Pillow opened has colour of 16 bits, which Pillow reads as 8."""
    if isinstance(image, PpmImageFile):
        tile = image.tile[0]
        return image.mode == "RGB" and tile[0] == "ppm" and tile[3][-1] == 65535  # its largest value
    if image.format == "TIFF":
        bits = image.tag_v2.get(258, ())  # BitsPerSample
        return image.mode in ("RGB", "RGBA", "RGBX") and set(np.atleast_1d(bits).tolist()) == {16}
    return image.format == "PNG" and image.mode in ("RGB", "RGBA") and image.tile[0][3].endswith(";16B")


def _read_deep(file: BinaryIO, path: Path, size: tuple[int, int]) -> tuple[np.ndarray, ...] | None:
    """(H, W, 3) uint16 RGB of a PNG or TIFF of this size in stored pixels, and where alpha is not 0 or None;
    None, with an `ImageWarning`, for a file that OpenCV reads otherwise: then its 8 bits have to do."""
    found = _by_opencv(file)
    fits = found is not None and found.dtype == np.uint16 and found.ndim == 3
    if not fits or found.shape[:2] != size[::-1] or found.shape[2] not in (3, 4):
        text = "its 16 bits a sample are read as 8; a 16-bit PNG keeps them"
        warnings.warn(f"{path}: {text}", ImageWarning, stacklevel=5)
        return None
    opaque = found[..., 3] != 0 if found.shape[2] == 4 else None
    return np.ascontiguousarray(found[..., 2::-1]), opaque


@contextmanager
def _decoding(path: Path, name: str) -> Iterator[None]:
    """Whatever a decoder raises on damaged bytes, as one error that names the file and the remedy."""
    try:
        yield
    except (MatcherError, MemoryError, ImageWarning):
        raise
    except Exception as error:
        why = "it is cut short, damaged or beyond what its decoder takes: export it again, perhaps smaller"
        if name == "TIFF" and re.search("pixel mode|samples per pixel", str(error)):
            why = "grey or RGB of 8 or 16 bits is read; `matcher align --gcp` reads any bands"
        if "closed" in str(error):
            why = "give the image while it is open"
        raise ImageError(f"{path}: the {name} cannot be decoded ({error}); {why}") from error


_alone: dict[str, Lock] = {}


@contextmanager
def _quiet(pixels: int) -> Iterator[None]:
    """No warning of Pillow's for a size that the caller allows."""
    if pixels <= (PIL.Image.MAX_IMAGE_PIXELS or pixels):
        yield
        return
    # The filters are those of all threads, so one image at a time changes them and puts them back.
    alone, unwanted = _alone.setdefault("filters", Lock()), PIL.Image.DecompressionBombWarning
    with alone, warnings.catch_warnings(action="ignore", category=unwanted):
        yield


def _orientation(tags: Any) -> int:
    value = tags.get(0x0112, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _samples_of(image: PIL.Image.Image) -> tuple[np.ndarray, np.ndarray | None]:
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
    """The samples, strip by strip: at once they would be held twice for a moment."""
    array, (width, height) = np.empty(0), image.size
    for top in range(0, height, 256):
        strip = np.asarray(image.crop((0, top, width, min(top + 256, height))))
        array = np.empty((height, *strip.shape[1:]), strip.dtype) if top == 0 else array
        array[top : top + 256] = strip
    return array


def turned_by(array: np.ndarray, orientation: int) -> np.ndarray:
    """Stored array (H, W[, C]) → upright view; the signed permutation that `geometry` applies to points."""
    turn = UPRIGHT[orientation]
    array = array if turn[0, 0] else array.swapaxes(0, 1)
    return array[:: turn[1].sum(dtype=int), :: turn[0].sum(dtype=int)]


# What its header says.


def read_header(path: Path, part: int) -> tuple[tuple[int, int], dict[int, Any], dict[int, Any]]:
    """(width, height) and EXIF tags of an image file, and those of one part of them, such as GPS; any
    `Exception`, as a header can be wrong in any way."""
    with warnings.catch_warnings(action="ignore"), open_regular(path) as file:
        opener = find_format(file, path)[1] or PIL.Image.open
        with opener(file) as photo:
            tags = photo.getexif()
            return photo.size, dict(tags), dict(tags.get_ifd(part))


def read_resolution(paths: Iterable[Path | None]) -> tuple[int, int] | None:
    """Dots per inch along x and y that all of these image files state; None: not all state the same, or
    more than a million, which is no resolution of a scan."""
    found = set()
    for path in paths:
        try:
            with open_regular(path) as file, (find_format(file, path)[1] or PIL.Image.open)(file) as photo:
                found.add(tuple(round(float(dots)) for dots in photo.info["dpi"]))
        except Exception:  # as a header can be wrong in any way
            return None
    return found.pop() if len(found) == 1 and 0 < min(*found) <= max(*found) <= 1e6 else None


def read_gps(path: Path) -> tuple[float, float, float] | None:
    """Latitude and longitude in degrees, north and east positive, and metres above the ellipsoid, 0 where
    there are none; None where the header has no position, or one that cannot be."""

    def degrees(direction: int, negative: str) -> float:
        """Of the tag of the direction and the one behind it, which has the value."""
        whole, minutes, seconds = (float(value) for value in tags[direction + 1])
        value = whole + minutes / 60 + seconds / 3600
        return -value if str(tags.get(direction, "")).strip("\0 ").upper() == negative else value

    try:
        tags = read_header(path, IFD.GPSInfo)[2]
        latitude, longitude = degrees(1, "S"), degrees(3, "W")
        metres = float(tags.get(6, 0.0))
    except Exception:  # a header can be wrong in any way, and nothing depends on it
        return None
    if not (abs(latitude) <= 90 and abs(longitude) <= 180) or latitude == longitude == 0:
        return None
    below = tags.get(5, b"\0") in (1, b"\1")
    return latitude, longitude, (-metres if below else metres) if math.isfinite(metres) else 0.0


def read_camera(path: Path) -> Camera | None:
    """A camera of the focal length that a photo's EXIF header states; None without."""
    try:
        (width, height), _, tags = read_header(path, IFD.Exif)
        longer = max(width, height)
        focal = focal_of_film(float(tags[Base.FocalLengthIn35mmFilm]), (width, height))
        if not 0.2 * longer < focal < 50 * longer:  # of no camera
            return None
        return Camera(focal, focal, (width - 1) / 2, (height - 1) / 2, size=(width, height))
    except Exception:  # a header can be wrong in any way, and nothing depends on it
        return None
