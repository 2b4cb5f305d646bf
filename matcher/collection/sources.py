"""Which images and pairs a run has: selections and forms of names, photos with masks, how pairs are chosen.

A source of features provides names, a stamp (cheap; differs if the content may have changed), a digest of the
content, and an image's features: `Photos` by a front end, `export.hloc.HlocFeatures` from a file.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from matcher.collection.schema import damaged, name_fault, parse_json
from matcher.errors import ImageError, UsageError
from matcher.files import open_given, read_given
from matcher.images import find_mask, list_images, no_mask
from matcher.pipeline import Pipeline
from matcher.types import Features, Image

if TYPE_CHECKING:
    FeatureSource = "Photos | HlocFeatures"

# Names of images, as a run holds them and as people write them.


def _plain(text: str) -> str:
    """A name with accents composed (macOS decomposes them) and slashes forward."""
    return unicodedata.normalize("NFC", text).replace("\\", "/").removeprefix("./")


class NameTable:
    """Finds images by what people write: accents composed or not, `\\`, another case, an absolute path in the
    image folder, that folder's own name in front, or no suffix, wherever only one image can be meant."""

    def __init__(self, names: Iterable[str], folder: Path | None = None) -> None:
        """Names of a run's images, and the folder that they are below."""
        self.names = list(dict.fromkeys(names))
        self._exact = {name: number for number, name in enumerate(self.names)}
        self._folder = folder

    @cached_property
    def _forms(self) -> dict[str, int | None]:
        """The image of each form of a name; None of several."""
        whole: dict[str, int | None] = {}
        stems: dict[str, int | None] = {}
        for number, name in enumerate(self.names):
            form = _plain(name).casefold()
            for table, key in ((whole, form), (stems, str(PurePosixPath(form).with_suffix("")))):
                table[key] = None if key in table else number
        return {**stems, **whole}

    def find(self, word: str) -> int | None:
        """The number of the image that is meant; None if there is none, or several."""
        if word in self._exact:
            return self._exact[word]
        plain = _plain(word)
        if self._folder is not None:  # what follows the folder, or its own name
            real = os.path.realpath(plain) if Path(plain).is_absolute() else plain
            places = [(plain, self._folder.absolute()), (plain, self._folder.name)]
            for path, start in (*places, (_plain(real), os.path.realpath(self._folder))):
                if str(start) and path.startswith(head := f"{_plain(str(start))}/"):
                    plain = path.removeprefix(head)
                    break
        return self._forms.get(plain.casefold())


@dataclass(frozen=True)
class Selection:
    """Images to use and to leave out, by patterns of their names.

    A name is a path below the image folder, with `/`. A pattern is a name, a folder that ends in `/`, or a
    glob (`*`, `?`, `[abc]`); a pattern without `/` is compared with the last part of the name. Case
    matters.

        >>> from matcher.collection.sources import Selection
        >>> Selection(include=("left/",), exclude=("*_blurred.jpg",)).apply(["left/a.jpg", "right/a.jpg"])
        ['left/a.jpg']
    """

    include: tuple[str, ...] = ()  # nothing: all images
    exclude: tuple[str, ...] = ()

    @classmethod
    def parse(cls, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
        """Patterns as a user gives them: `@FILE` stands for the names in a file, one per line; `UsageError`:
        such a file cannot be read, or names nothing."""

        def expanded(patterns: Sequence[str]) -> Iterator[str]:
            for pattern in patterns:
                if pattern.startswith("@"):
                    yield from _listed(Path(pattern[1:]))
                else:
                    yield pattern.removeprefix("./")

        return cls(tuple(expanded(include)), tuple(expanded(exclude)))

    def apply(self, names: Iterable[str]) -> list[str]:
        """The selected names, in the order given; `UsageError`: a pattern that matches no name, or nothing is
        left."""
        names = list(names)
        fitting = {p: {name for name in names if _fits(name, p)} for p in (*self.include, *self.exclude)}
        if unknown := [pattern for pattern, found in fitting.items() if not found]:
            raise UsageError(f"no image is called {unknown[0]!r}; names are paths below the image folder")
        included = set().union(*map(fitting.get, self.include)) if self.include else set(names)
        chosen = included.difference(*map(fitting.get, self.exclude))
        kept = [name for name in names if name in chosen]
        if names and not kept:
            raise UsageError("no image is left: every image is excluded")
        return kept

    def of_usable(self, found: Iterable[str]) -> tuple[list[str], list[str]]:
        """Sorted names of the selected ones that a store can hold, and those that none can; as `apply`."""
        names = sorted(set(found))
        usable = [name for name in names if name_fault(name) is None]
        return self.apply(usable), [ascii(name) for name in names if name_fault(name) is not None]


def _fits(name: str, pattern: str) -> bool:
    name, pattern = (unicodedata.normalize("NFC", text) for text in (name, pattern))
    if pattern.endswith("/"):
        return name.startswith(pattern)
    tail = name if "/" in pattern else PurePosixPath(name).name
    return name == pattern or fnmatchcase(tail, pattern)


def _listed(path: Path) -> list[str]:
    """The names in a file, which mean themselves; blank lines and lines that begin with # are skipped."""
    try:
        lines = read_given(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{path}: the list of images cannot be read ({reason})") from None
    names = [_plain(line.strip()) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not names:
        raise UsageError(f"{path}: the list names no image")
    return [name if name.endswith("/") else escape(name) for name in names]


# Photos: the images of a folder, with or without masks.


class Extracted(NamedTuple):
    """Features of one image and what else the store keeps of it, or why there are none."""

    name: str
    features: Features | Image | None = None  # the image, before they are found
    sha256: str = ""
    stamp: str = ""
    data: bytes = b""  # the record of the features, which are without descriptors then
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether there are none."""
        return self.features is None


@dataclass(frozen=True)
class Photos:
    """Images of a folder and the folders in it, with or without masks."""

    folder: Path
    masks: Path | None = None  # a mask has its image's name, or that with .png added or in place of .jpg
    selection: Selection = field(default_factory=Selection)
    uses_front_end = True

    def settings(self) -> dict[str, Any]:
        """Whether there are masks; which is known by their content."""
        return {"kind": "photos", "masks": self.masks is not None}

    def names(self) -> tuple[list[str], list[str]]:
        """Sorted names of the selected images, and the file names that no store can hold; `UsageError`: no
        folder of images or of masks, or a selection that fits nothing."""
        for folder in (self.folder, self.masks):
            if folder is not None and not folder.is_dir():
                raise UsageError(f"{folder} is not a folder of images")
        return self.selection.of_usable(list_images(self.folder))

    def stamp(self, name: str) -> str:
        """Length and times of the image and of its mask; empty where there is none."""
        stamps = [stamp_of(path) for path in self._files(name)]
        return " ".join(stamps) if all(stamps) else ""

    def digest(self, name: str) -> str:
        """The sha256 of the image's bytes, and those of its mask; `ImageError` where there is none."""
        found = hashlib.sha256()
        for path in self._files(name):
            try:
                with open_given(path) as file:
                    hashlib.file_digest(file, lambda: found)
            except OSError as error:
                raise ImageError(f"{path} cannot be read ({error.strerror}); check the path") from None
        return found.hexdigest()

    def read(self, name: str, pipeline: Pipeline) -> Extracted:
        """The image, for the front end; errors of `matcher.read_image`."""
        stamp, digest = self.stamp(name), self.digest(name)
        path, *masks = self._files(name)
        return Extracted(name, pipeline.read(path, masks[0] if masks else None), digest, stamp)

    def masked(self, names: Sequence[str]) -> int | None:
        """How many of the images have a mask; None where no masks were given; `UsageError`: none has."""
        if self.masks is None:
            return None
        count = sum(len(self._files(name)) > 1 for name in names)
        if count == 0:
            raise no_mask(self.masks, names, str(self.folder))
        return count

    def _files(self, name: str) -> list[Path]:
        """The image, and its mask where it has one."""
        mask = None if self.masks is None else find_mask(self.masks, name)
        return [self.folder / name, *([] if mask is None else [mask])]


def check_masks(source: FeatureSource) -> int | None:
    """How many of the source's images have a mask; None where no masks were given; `UsageError`: there are no
    images, or masks were given and none of them belongs to an image."""
    names, unusable = source.names()
    if unusable and not names:
        raise UsageError(
            f"{source.folder}: none of the names of its {len(unusable)} images can be stored "
            f"({', '.join(unusable[:5])}); rename them, or set PYTHONUTF8=1 where they are UTF-8 and the "
            "locale is not"
        )
    if not names:
        raise UsageError(f"{source.folder} holds no images")
    return source.masked(names)


def stamp_of(path: Path) -> str:
    """Length and times of a file; empty where there is none."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


# How pairs are chosen: as in the run so far, or by the number of images.

PairMethod = Literal["names", "file", "exhaustive", "sequential", "similar", "preemptive", "nearby"]


@dataclass(frozen=True)
class PairChoice:
    """How pairs were chosen; stored, so that images added later are paired in the same way."""

    method: PairMethod
    neighbours: int | None = None  # of the methods that have a number of them
    by_default: bool = False  # not requested by the user

    @property
    def from_list(self) -> bool:
        """Whether pairs came from a list: then only the user can choose others."""
        return self.method in ("names", "file")

    @property
    def needs_features(self) -> bool:
        """Whether images must be extracted before their pairs can be chosen."""
        return self.method in ("similar", "preemptive")

    @classmethod
    def from_json(cls, text: str) -> PairChoice:
        """One whose fields are in JSON; `IntegrityError` for anything else."""
        values = parse_json(text, "the choice of pairs")
        with suppress(TypeError):
            found = cls(**values)
            right = found.neighbours is None or (type(found.neighbours) is int and found.neighbours >= 1)
            if found.method in get_args(PairMethod) and right and type(found.by_default) is bool:
                return found
        raise damaged("the choice of pairs", ascii(values)[:80])


def default_choice(
    images: int, *, exhaustive_up_to: int = 50, neighbours: int = 20, preemptive: bool = False
) -> PairChoice:
    """Every pair of a small collection, the `neighbours` most similar images of each in one of more than
    `exhaustive_up_to` images; of these, if `preemptive`, only those whose strongest keypoints agree."""
    if images <= exhaustive_up_to:
        return PairChoice("exhaustive", by_default=True)
    return PairChoice("preemptive" if preemptive else "similar", neighbours, by_default=True)
