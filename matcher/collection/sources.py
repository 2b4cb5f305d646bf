"""Which images and pairs a run has: names, photos with masks, existing features, how pairs are chosen.

A source of features provides names, a stamp (cheap; differs if the content may have changed), a digest of the
content, and an image's features: `Photos` by a front end, `HlocFeatures` from a file.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np

from matcher.collection.schema import damaged, name_fault, parse_json
from matcher.config import NetworkConfig, from_dict
from matcher.errors import ImageError, MatcherError, UsageError, optional
from matcher.files import open_given, read_text
from matcher.geometry import resized
from matcher.images import find_mask, find_masks, list_images
from matcher.pipeline import Pipeline
from matcher.types import Features, Image


def _plain(text: str) -> str:
    """A name with accents composed (macOS decomposes them) and slashes forward."""
    return unicodedata.normalize("NFC", text).replace("\\", "/").removeprefix("./")


class NameTable:
    """Finds images by what people write: accents composed or not, `\\`, another case, an absolute path in the
    image folder, that folder's own name in front, or no suffix, wherever only one image can be meant."""

    def __init__(self, names: Iterable[str], folder: Path | None = None) -> None:
        self.names = list(dict.fromkeys(names))
        self._exact = {name: number for number, name in enumerate(self.names)}
        self._folder = folder

    @cached_property
    def _forms(self) -> dict[str, int | None]:
        """The image of each form of a name; None of several."""
        whole: dict[str, int | None] = {}
        stems: dict[str, int | None] = {}
        for number, name in enumerate(self.names):
            form = _plain(name).casefold()  # of which a path would intern all parts
            for table, key in ((whole, form), (stems, re.sub(r"(?<=[^/])\.[^./]*$", "", form))):
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
            else:
                if re.match("([A-Za-z]:|/)/", plain):  # written on Windows, wherever the folder lay there
                    plain = plain.partition(f"/{self._folder.name}/")[2]
        return self._forms.get(plain.casefold())


@dataclass(frozen=True)
class Selection:
    """Images to use and to leave out, by patterns of their names, which are paths below the image folder,
    with `/`.

    A pattern is a name, a folder that ends in `/`, or a glob (`*`, `?`, `[abc]`); one without `/` is compared
    with the last part of the name. Case matters.
    """

    include: tuple[str, ...] = ()  # nothing: all images
    exclude: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()  # images of a run, which may be excluded even if they are gone

    @classmethod
    def parse(cls, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
        """Patterns as a user gives them: `@FILE` stands for the names in a file, which mean themselves, one a
        line, # before what is none; `UsageError`: it cannot be read, or names nothing."""

        def expanded(pattern: str) -> list[str]:
            if not pattern.startswith("@"):
                return [pattern.removeprefix("./")]
            path = Path(pattern[1:])
            try:
                lines = [line.strip() for line in read_text(path).splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
                raise UsageError(f"{path}: the list of images cannot be read ({reason})") from None
            names = [_plain(line) for line in lines if line and not line.startswith("#")]
            if not names:
                raise UsageError(f"{path}: the list names no image")
            return [name if name.endswith("/") else escape(name) for name in names]

        return cls(*(tuple(chain.from_iterable(map(expanded, given))) for given in (include, exclude)))

    def apply(self, names: Iterable[str]) -> list[str]:
        """The selected names, in the order given; `UsageError`: a pattern that matches none, or nothing is
        left."""
        names = list(names)
        exact: dict[str, set[str]] = {}  # as thousands of names may be given
        for name in names:
            whole = unicodedata.normalize("NFC", name)
            for key in (whole, PurePosixPath(whole).name):
                exact.setdefault(key, set()).add(name)
        fitting = {
            p: {name for name in names if _fits(name, p)}
            if p.endswith("/") or set("*?[").intersection(p)
            else exact.get(unicodedata.normalize("NFC", p), set())
            for p in (*self.include, *self.exclude)
        }
        missing = [pattern for pattern, found in fitting.items() if not found]
        gone = {p for p in self.exclude if p in missing and any(_fits(name, p) for name in self.known)}
        if unknown := [pattern for pattern in missing if pattern not in gone.difference(self.include)]:
            raise UsageError(f"no image is called {unknown[0]!r}; names are paths below the image folder")
        included = set().union(*map(fitting.get, self.include)) if self.include else set(names)
        chosen = included.difference(*map(fitting.get, self.exclude))
        kept = [name for name in names if name in chosen]
        if names and not kept:
            raise UsageError("no image is left: every image is excluded")
        return kept

    def takes(self, name: str) -> bool:
        """Whether an image of that name would be selected, whatever others there are."""
        wanted = not self.include or any(_fits(name, pattern) for pattern in self.include)
        return wanted and not any(_fits(name, pattern) for pattern in self.exclude)

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


class Extracted(NamedTuple):
    """Features of one image and what else the store keeps of it, or why there are none."""

    name: str
    features: Features | Image | None = None  # the image, before they are found
    sha256: str = ""
    stamp: str = ""
    data: bytes = b""  # the record of the features, which are without descriptors then
    reason: str = ""  # of a failure


@dataclass(frozen=True)
class Photos:
    """Images of a folder and the folders in it, with or without masks."""

    folder: Path
    masks: Path | None = None  # a mask has its image's name, or that with .png added or in place of .jpg
    selection: Selection = field(default_factory=Selection)
    uses_front_end = True

    def names(self) -> tuple[list[str], list[str]]:
        """Sorted names of the selected images, and the file names that no store can hold."""
        for folder in (self.folder, self.masks):
            if folder is not None and not folder.is_dir():
                hint = "; of a video, take frames: `ffmpeg -i VIDEO -r 2 DIR/%05d.jpg`" * folder.is_file()
                raise UsageError(f"{folder} is not a folder of images{hint}")
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

    def _files(self, name: str) -> list[Path]:
        """The image, and its mask where it has one."""
        mask = None if self.masks is None else find_mask(self.masks, name)
        return [self.folder / name, *([] if mask is None else [mask])]


def stamp_of(path: Path) -> str:
    """Length and times of a file; empty where there is none."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


# Existing features in hloc's layout, which may be anybody's: HDF5 can link to other files, and says sizes
# that no memory holds. Pixels as ours: the centre of the first one is (0, 0).

HLOC_OPTIONAL = {"scores": "scores", "scales": "scales", "oris": "orientations"}  # hloc's name → ours


@dataclass(frozen=True)
class HlocFeatures:
    """A file of features; the images themselves are not read."""

    folder: Path  # where the images are, for exports that name them
    file: Path
    selection: Selection = field(default_factory=Selection)
    uses_front_end, masks = False, None

    def names(self) -> tuple[list[str], list[str]]:
        """Sorted names of the selected groups with keypoints, each group once whatever links there are to it,
        and the names that no store can hold."""
        names, seen, waiting = [], set(), []
        with self._open() as file:
            import h5py

            waiting.append(("", file))
            while waiting:
                above, group = waiting.pop()
                for key in group:
                    if group.get(key, getclass=True, getlink=True) is not h5py.HardLink:
                        continue
                    name, item = above + key, group[key]
                    if not isinstance(item, h5py.Group) or (place := h5py.h5o.get_info(item.id).addr) in seen:
                        continue
                    seen.add(place)
                    if name.count("/") > 64:  # HDF5's own search takes a time that grows with the square
                        raise UsageError(f"{self.file} has groups in groups, more than 64 deep")
                    if "keypoints" in set(item):  # a link is not followed to see it
                        names.append(name)
                    waiting.append((f"{name}/", item))
        if not names:
            raise UsageError(f"{self.file} holds no group with keypoints; it is no features file of hloc's")
        return self.selection.of_usable(names)

    def stamp(self, name: str) -> str:
        """Length and times of the file; empty where there is none."""
        return stamp_of(self.file)

    def digest(self, name: str) -> str:
        """The sha256 of the image's entry; `ImageError` where there is none."""
        return self._read(name)[1]

    def read(self, name: str, pipeline: Pipeline) -> Extracted:
        """The features of one image, treated as found at the pipeline's `resize`, as thresholds need it."""
        arrays, digest = self._read(name)
        try:
            if absent := [key for key in ("keypoints", "descriptors", "image_size") if key not in arrays]:
                raise UsageError(f"it has no {absent[0]}")
            sides = arrays["image_size"].reshape(-1).astype(np.float64)  # a half float may be
            if len(sides) != 2 or not np.all((sides >= 1) & (sides <= 2**30)):
                raise UsageError(f"its image_size is {sides[:4].tolist()}")
            size = (int(sides[0]), int(sides[1]))
            optional = {ours: arrays[theirs] for theirs, ours in HLOC_OPTIONAL.items() if theirs in arrays}
            angles = optional.get("orientations")
            if angles is not None and np.abs(angles).max(initial=0) > 2 * np.pi + 1e-3:  # degrees
                optional["orientations"] = np.deg2rad(angles.astype(np.float32))
            scale = resized(size, pipeline.config.extractor.resize)[1]
            points, descriptors = arrays["keypoints"][:, :2], arrays["descriptors"].T
            features = Features(points, descriptors, size=size, scale=scale, **optional)
            config = pipeline.config.matcher
            if isinstance(config, NetworkConfig):
                if (dim := features.descriptors.shape[-1]) != config.descriptor_dim:
                    taken = f"{pipeline.preset} takes {config.descriptor_dim}"
                    raise UsageError(f"descriptors have {dim} numbers, {taken}; give their kind's preset")
                inputs = " ".join(config.position.inputs)
                for dataset, found in (("scale", features.scales), ("orientation", features.orientations)):
                    if dataset in inputs and found is None:
                        raise UsageError(f"{pipeline.preset} needs each {dataset} (`scales`, `oris`)")
        except (UsageError, IndexError, ValueError) as error:
            raise ImageError(f"{self.file}: {name}: {error}") from error
        return Extracted(name, features, digest, self.stamp(name))

    def _read(self, name: str) -> tuple[dict[str, np.ndarray], str]:
        """The arrays of an image's entry, and their sha256."""
        with self._open(ImageError, f"{name} ") as file:
            if name not in file:
                raise ImageError(f"{self.file} has no features of {name}; names are paths below a folder")
            group, wanted = file[name], {"keypoints", "descriptors", "image_size", *HLOC_OPTIONAL}
            keys = sorted(wanted.intersection(getattr(group, "keys", tuple)()))
            arrays, digest = {key: _array(group, key) for key in keys}, hashlib.sha256()
        for key, array in arrays.items():
            digest.update(f"{key} {array.dtype} {array.shape};".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return arrays, digest.hexdigest()

    @contextmanager
    def _open(self, kind: type[MatcherError] = UsageError, what: str = "") -> Iterator[Any]:
        """The file, opened; errors of HDF5 in the block are of that kind, as it may be damaged anywhere."""
        with optional():
            import h5py

        if not self.file.is_file():
            raise UsageError(f"{self.file} is not a file; check the path of the features")
        try:
            with h5py.File(self.file, "r") as file:
                yield file
        except MatcherError:
            raise
        except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise kind(f"{self.file}: {what}cannot be read as HDF5 ({error}); export it again") from None


def _array(group: Any, key: str) -> np.ndarray:
    """A dataset of numbers that lie in the file itself, and are no more than it can hold."""
    import h5py

    if not isinstance(group.get(key, getlink=True), h5py.HardLink):
        raise ValueError(f"{key} is a link")
    found = group[key]
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
        raise ValueError(f"{key} is not in the file itself")
    if found.dtype.kind not in "fiu":
        raise ValueError(f"{key} holds {found.dtype}, not numbers")
    if found.nbytes > (1 << 20) + 1100 * found.id.get_storage_size():  # compression makes it no smaller
        raise ValueError(f"{key} would be {found.nbytes} bytes, more than the file can hold")
    return np.asarray(found)


FeatureSource = Photos | HlocFeatures


def find_source(
    folder: Path, masks: str | Path | None, features: str | Path | None, selection: Selection
) -> tuple[FeatureSource, list[str], list[str], int | None]:
    """A features file, or else the images themselves; the names of the images, those that no store can hold,
    and how many have a mask, None where none were given. `UsageError`: there are no images, or no masks."""
    source = Photos(folder, None if masks is None else Path(masks), selection)
    if features is not None:
        if masks is not None:
            raise UsageError("masks and features cannot be combined: masks are for finding keypoints")
        source = HlocFeatures(folder, Path(features), selection)
    names, unusable = source.names()
    if unusable and not names:
        found = f"none of its names can be stored ({', '.join(unusable[:5])})"
        raise UsageError(f"{folder}: {found}; rename them, or set PYTHONUTF8=1 if they are UTF-8")
    if not names:
        raise UsageError(f"{folder} holds no images")
    masked = None if source.masks is None else len(find_masks(source.masks, names, str(folder)))
    return source, names, unusable, masked


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
        with suppress(ValueError, LookupError):
            found = from_dict(cls, values)
            if found.neighbours is None or found.neighbours >= 1:
                return found
        raise damaged("the choice of pairs", ascii(values)[:80])


def default_choice(
    images: int, *, exhaustive_up_to: int = 50, neighbours: int = 20, preemptive: bool = False
) -> PairChoice:
    """Every pair of up to `exhaustive_up_to` images, else the `neighbours` most similar ones of each; of
    these, if `preemptive`, those whose strongest keypoints agree."""
    if images <= exhaustive_up_to:
        return PairChoice("exhaustive", by_default=True)
    return PairChoice("preemptive" if preemptive else "similar", neighbours, by_default=True)
