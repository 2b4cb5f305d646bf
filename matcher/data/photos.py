"""Image files in folders: which suffixes are images, in what order, and where the shared data lie.

Nothing here opens an image; `read_image` reports what is wrong with one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from matcher.errors import UsageError

IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".tif",
    ".tiff",
    ".webp",
    ".bmp",
    ".pgm",
    ".ppm",
    ".pbm",
    ".pnm",
    ".pfm",
    ".gif",
    ".jp2",
    ".avif",
    ".heic",
    ".heif",
)
DATA_VARIABLE = "MATCHER_DATA"  # environment variable that names the folder of `data_folder`


def is_image(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name has the suffix of an image, in any case."""
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - odd names must not raise


def list_images(folder: Path) -> Iterator[str]:
    """Names of the image files below a folder, relative to it, with forward slashes, in no certain order.

    Hidden files and folders are left out.
    """
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in files:
            if not file.startswith(".") and is_image(file):
                yield (Path(where) / file).relative_to(folder).as_posix()


def find_images(folder: Path) -> list[Path]:
    """All image files below a folder, sorted by path.

    Raises:
        UsageError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder of images")
    found = sorted(path for name in list_images(folder) if (path := folder / name).is_file())
    if not found:
        raise UsageError(f"{folder}: no images here (looked for {', '.join(IMAGE_SUFFIXES)})")
    return found


def natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key that compares runs of digits as numbers (frame2 before frame10); the name breaks ties."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(p), "") if p[0] in "0123456789" else (1, 0, p) for p in parts], name


def data_folder() -> Path:
    """Where photos/ and bench/ lie: the folder `$MATCHER_DATA`, else `shared` beside the checkout."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else Path(__file__).resolve().parents[3] / "shared"
