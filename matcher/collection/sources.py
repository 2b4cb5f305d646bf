"""The source of an image's features: its file and a front end, or a file of existing features.

A source provides names, a stamp (cheap; differs if the content may have changed), a digest of the content,
and the features of an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from matcher.collection.selection import Selection
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.masks import find_mask, no_mask
from matcher.data.photos import list_images
from matcher.errors import ImageError, UsageError
from matcher.pipeline import Pipeline

_BLOCK = 1 << 20  # bytes read at once
_SHOWN = 5  # names in a message
_LONGEST_NAME = 1024  # characters


@dataclass(frozen=True, eq=False)
class Extracted:
    """Features of one image and what else the store keeps of it; or the image, before they are found."""

    features: Features | Image
    sha256: str
    stamp: str


class FeatureSource(Protocol):
    """Where features come from; it is sent to workers."""

    folder: Path  # of the images
    uses_front_end: bool

    def settings(self) -> dict[str, Any]:
        """What results depend on besides the images, as JSON values."""

    def names(self) -> tuple[list[str], list[str]]:
        """Sorted names of the images, and the file names that no store can hold."""

    def stamp(self, name: str) -> str:
        """What changes when the content does; empty where there is nothing."""

    def digest(self, name: str) -> str:
        """The sha256 of the content; `ImageError` where there is nothing."""

    def read(self, name: str, pipeline: Pipeline) -> Extracted:
        """The features where the source has them, else the image; `MatcherError` where it cannot be used."""


@dataclass(frozen=True)
class Photos:
    """Images of a folder and the folders in it, with or without masks."""

    folder: Path
    masks: Path | None = None  # a mask has its image's name, or that with .png added or in place of .jpg
    selection: Selection = field(default_factory=Selection)
    uses_front_end: bool = True

    def settings(self) -> dict[str, Any]:
        """Whether there are masks; which is known by their content."""
        return {"kind": "photos", "masks": self.masks is not None}

    def names(self) -> tuple[list[str], list[str]]:
        """Sorted names of the selected images, and the file names that no store can hold.

        Raises:
            UsageError: no folder of images or of masks, or a selection that fits nothing.
        """
        for folder in (self.folder, self.masks):
            if folder is not None and not folder.is_dir():
                raise UsageError(f"{folder} is not a folder of images")
        found = sorted(set(list_images(self.folder)))
        unusable = [name for name in found if name_fault(name) is not None]
        return self.selection.apply(sorted(set(found) - set(unusable))), [*map(ascii, unusable)]

    def masked(self, names: Iterable[str]) -> list[str]:
        """Those of the names whose image has a mask."""
        return [name for name in names if len(self._files(name)) > 1]

    def stamp(self, name: str) -> str:
        """Length and times of the image and of its mask."""
        try:
            return " ".join(stamp_of(path) for path in self._files(name))
        except OSError:
            return ""

    def digest(self, name: str) -> str:
        """The sha256 of the image's bytes, and those of its mask."""
        found = hashlib.sha256()
        for path in self._files(name):
            if path.exists() and not path.is_file():
                raise ImageError(f"{path} is not a file; an image or a mask must be one")
            try:
                with path.open("rb") as file:
                    while block := file.read(_BLOCK):
                        found.update(block)
            except OSError as error:
                raise ImageError(f"{path} cannot be read ({error.strerror}); check the path") from None
        return found.hexdigest()

    def read(self, name: str, pipeline: Pipeline) -> Extracted:
        """The image, for the front end; errors of `matcher.read_image`."""
        stamp, digest = self.stamp(name), self.digest(name)
        path, *masks = self._files(name)
        image = pipeline.read(path, masks[0] if masks else None)
        return Extracted(image, digest, stamp)

    def _files(self, name: str) -> list[Path]:
        """The image, and its mask where it has one."""
        files = [self.folder / name]
        mask = None if self.masks is None else find_mask(self.masks, name)
        return files if mask is None else [*files, mask]


def check_masks(source: FeatureSource) -> int | None:
    """How many of the source's images have a mask; None where no masks were given.

    Raises:
        UsageError: there are no images, or masks were given and none of them belongs to an image.
    """
    names, unusable = source.names()
    if unusable and not names:
        some = ", ".join(unusable[:_SHOWN])
        raise UsageError(
            f"{source.folder}: none of the names of its {len(unusable)} images can be stored ({some}); "
            "rename them, or set PYTHONUTF8=1 where they are UTF-8 and the locale is not"
        )
    if not names:
        raise UsageError(f"{source.folder} holds no images")
    if not isinstance(source, Photos) or source.masks is None:
        return None
    count = len(source.masked(names))
    if count == 0:
        raise no_mask(source.masks, names, str(source.folder))
    return count


def is_text(name: str) -> bool:
    """Whether a name can be stored and printed on one line."""
    return name.isprintable() and not any("\ud800" <= letter <= "\udfff" for letter in name)


def name_fault(name: Any) -> str | None:
    """What is wrong with the name of an image, as a message; None where nothing is.

    A name is a path below the image folder, on one line: exports make files of it.
    """
    if not isinstance(name, str) or not name:
        return "is no text"
    if len(name) > _LONGEST_NAME:
        return f"has more than {_LONGEST_NAME} characters"
    if not is_text(name):
        return "holds control characters"
    if name.startswith("/") or ".." in name.split("/"):
        return "leads out of the image folder"
    return None


def stamp_of(path: Path) -> str:
    """Length and times of a file; `OSError` where there is none."""
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
