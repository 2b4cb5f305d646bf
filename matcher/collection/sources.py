"""The source of an image's features: its file and a front end, or a file of existing features.

A source provides names, a stamp (cheap; differs if the content may have changed), a digest of the content,
and the features of an image.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, get_args
from zipfile import BadZipFile, ZipFile

import numpy as np
import safetensors
from safetensors.numpy import load as parse
from safetensors.numpy import save as pack

from matcher.arrays import root_sift, to_numpy
from matcher.collection.schema import REFINED as FILE
from matcher.collection.schema import DamagedError, check, checksum, parse_json, refuse_irregular
from matcher.errors import ImageError, IntegrityError, UsageError
from matcher.files import read_given, write_whole
from matcher.images import find_mask, list_images, no_mask
from matcher.pipeline import Pipeline
from matcher.types import Features, Image

# --- selection: Which images of a folder are used: patterns of names, or lists of names in files.


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
        """Patterns as a user gives them: `@FILE` stands for the names in a file, one per line.

        Raises:
            UsageError: such a file cannot be read, or names nothing.
        """
        return cls(_expanded(include), _expanded(exclude))

    def keeps(self, name: str) -> bool:
        """Whether an image of that name is selected."""
        included = not self.include or any(_fits(name, pattern) for pattern in self.include)
        return included and not any(_fits(name, pattern) for pattern in self.exclude)

    def apply(self, names: Iterable[str]) -> list[str]:
        """The selected names, in the order given.

        Raises:
            UsageError: a pattern that matches no name, or nothing is left.
        """
        names = list(names)
        for pattern in (*self.include, *self.exclude):
            if not any(_fits(name, pattern) for name in names):
                raise UsageError(f"no image is called {pattern!r}; names are paths below the image folder")
        kept = [name for name in names if self.keeps(name)]
        if names and not kept:
            raise UsageError("no image is left: every image is excluded")
        return kept


def _fits(name: str, pattern: str) -> bool:
    if pattern.endswith("/"):
        return name.startswith(pattern)
    tail = name if "/" in pattern else PurePosixPath(name).name
    return name == pattern or fnmatchcase(tail, pattern)


def _expanded(patterns: Sequence[str]) -> tuple[str, ...]:
    found: list[str] = []
    for pattern in patterns:
        if pattern.startswith("@"):
            found += _listed(Path(pattern[1:]))
        else:
            found.append(pattern.removeprefix("./"))
    return tuple(found)


def _listed(path: Path) -> list[str]:
    """The names in a file, which mean themselves; blank lines and lines that begin with # are skipped."""
    try:
        lines = read_given(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{path}: the list of images cannot be read ({reason})") from None
    names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not names:
        raise UsageError(f"{path}: the list names no image")
    return [name if name.endswith("/") else escape(name.removeprefix("./")) for name in names]


# --- sources: The source of an image's features: its file and a front end, or a file of existing features.

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


# --- pair_choice: Which pairs a run matches by default: as in the run so far, or by the number of images.

PairMethod = Literal["names", "file", "exhaustive", "sequential", "similar", "preemptive", "nearby"]
EXHAUSTIVE_UP_TO = 50  # images; 1,225 pairs
NEIGHBOURS = 20  # most similar images of each, in a larger collection
_FROM_FEATURES = ("similar", "preemptive")


@dataclass(frozen=True)
class PairChoice:
    """How pairs were chosen; stored, so that images added later are paired in the same way."""

    method: PairMethod
    neighbours: int | None = None  # of the methods that have a number of them
    by_default: bool = False  # not requested by the user

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `Collection.add_pairs`; empty if pairs came from a list."""
        if self.method in ("names", "file"):
            return {}
        return {self.method: True if self.neighbours is None else self.neighbours}

    @property
    def needs_features(self) -> bool:
        """Whether images must be extracted before their pairs can be chosen."""
        return self.method in _FROM_FEATURES

    def to_json(self) -> str:
        """As the store keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PairChoice:
        """The inverse of `to_json`.

        Raises:
            DamagedError: it is not what `to_json` makes.
        """
        values = parse_json(text, "the choice of pairs")
        right = (
            isinstance(values, dict)
            and {"method"} <= set(values) <= {field.name for field in fields(cls)}
            and values["method"] in get_args(PairMethod)
            and isinstance(values.get("by_default", False), bool)
            and (values.get("neighbours") is None or is_count(values["neighbours"]))
        )
        if not right:
            raise DamagedError(f"the choice of pairs is {ascii(values)[:80]}")
        return cls(**values)


def is_count(value: Any) -> bool:
    """Whether a value is a number of neighbours."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def requested_choice(
    pairs: Iterable[tuple[str, str]] | PairChoice | None,
    file: object | None,
    exhaustive: bool,
    **neighbours: int | None,
) -> PairChoice:
    """The choice that the arguments of `Collection.add_pairs` make; `neighbours`: those that are numbers.

    Raises:
        UsageError: not exactly one of them was given.
    """
    counts = {method: count for method, count in neighbours.items() if count is not None}
    if sum([exhaustive, pairs is not None, file is not None, *(1 for _ in counts)]) != 1:
        raise UsageError(
            "pairs come from exactly one of: names, a file, exhaustive, "
            + ", ".join(f"{method}=K" for method in neighbours)
        )
    if isinstance(pairs, PairChoice):
        if pairs.method in ("names", "file"):
            raise UsageError("the pairs of this run came from a list; list those of the new images as well")
        return pairs
    if counts:
        ((method, count),) = counts.items()
        return PairChoice(method, count)
    return PairChoice("exhaustive" if exhaustive else "names" if file is None else "file")


def default_choice(
    images: int,
    *,
    exhaustive_up_to: int = EXHAUSTIVE_UP_TO,
    neighbours: int = NEIGHBOURS,
    preemptive: bool = False,
) -> PairChoice:
    """Every pair of a small collection, the most similar images of each in a larger one.

    Args:
        images: of the collection.
        exhaustive_up_to: images of which every pair is matched.
        neighbours: similar images of each, in a collection of more.
        preemptive: of these, only those whose strongest keypoints agree.
    """
    if images <= exhaustive_up_to:
        return PairChoice("exhaustive", by_default=True)
    return PairChoice("preemptive" if preemptive else "similar", neighbours, by_default=True)


# --- descriptors: Descriptor files beside the database: only matching needs them, so they may be deleted
# afterwards.

MAX_BYTES = 1 << 30  # of one file; a record that begins before it may end behind it
_OPTIONAL = ("scales", "orientations", "affine_frames")
_SIFT_STEPS = 8  # the smallest number of a SIFT descriptor that is not 0 is hardly ever larger


class RecordLocation(NamedTuple):
    """Location of a record."""

    file: int
    start: int
    length: int
    crc: int


def file_path(folder: Path, number: int) -> Path:
    """The descriptor file of that number."""
    return folder / f"descriptors-{number:05d}.bin"


class DescriptorWriter:
    """Appends records; only the process that holds the store's lock may have one."""

    def __init__(self, folder: Path, number: int, end: int, max_bytes: int = MAX_BYTES) -> None:
        """Continue in file `number` after byte `end`, where the last known record ends."""
        path = file_path(folder, number)
        if path.is_file() and path.stat().st_size < end:  # cut short: what follows goes to a new file
            number, end = number + 1, 0
        self._folder, self._number, self._end, self._limit = folder, number, end, max_bytes
        self._file: BinaryIO | None = None

    def append(self, record: bytes) -> RecordLocation:
        """Write a record; it has reached the disk after `sync`.

        Raises:
            OSError: the disk is full; partial data are overwritten next time.
        """
        if self._end >= self._limit:
            self.close()
            self._number, self._end = self._number + 1, 0
        if self._file is None:
            path = file_path(self._folder, self._number)
            # A file that was deleted gets no new records: its number stays a sign that it is gone.
            if self._end and not path.is_file():
                self._number, self._end = self._number + 1, 0
                path = file_path(self._folder, self._number)
            refuse_irregular(path)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            self._file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        _write_at(self._file, self._end, record)
        place = RecordLocation(self._number, self._end, len(record), checksum(record))
        self._end += len(record)
        return place

    def sync(self) -> None:
        """Wait until all records have reached the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None


def _write_at(file: BinaryIO, start: int, record: bytes) -> None:
    file.seek(start)
    file.truncate()
    view = memoryview(record)
    while view:
        view = view[file.write(view) :]


def read_record(folder: Path, place: RecordLocation) -> bytes:
    """The bytes of a record.

    Raises:
        FileNotFoundError: its file was deleted.
        DamagedError: they are not what was written.
    """
    path = file_path(folder, place.file)
    refuse_irregular(path)
    with path.open("rb") as file:
        file.seek(place.start)
        return check(file.read(place.length), place.crc, f"{path}, byte {place.start}")


def encode_features(features: Features) -> bytes:
    """A record: everything of one image's features but keypoints, size, orientation and kind."""
    arrays = {
        name: to_numpy(getattr(features, name)).astype(np.float32)
        for name in ("scores", *_OPTIONAL)
        if getattr(features, name) is not None
    }
    values = to_numpy(features.descriptors)
    whole = _sift_numbers(values) if values.min(initial=0) >= 0 else None
    if whole is not None:
        arrays["sift"] = whole
    else:
        half = values.astype(np.float16) if np.all(np.abs(values) < 65504) else None
        arrays["descriptors"] = values.astype(np.float32) if half is None else half
    return pack({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode_features(record: bytes, keypoints: np.ndarray, **facts: Any) -> Features:
    """Features with float32 descriptors, from a record and what the database knows.

    Args:
        record: as `encode_features` made it.
        keypoints: (N, 2) float32 stored pixels.
        facts: the fields of `Features` that an image has once: size, scale, exif_orientation, kind.

    Raises:
        DamagedError: not a record of that many keypoints.
    """
    try:
        arrays = parse(record)
        numbers = arrays.pop("sift", None)
        found = root_sift(numbers) if numbers is not None else arrays.pop("descriptors").astype(np.float32)
        if "frames" in arrays:  # the name in stores made before
            arrays["affine_frames"] = arrays.pop("frames")
        return Features(keypoints, found, **facts, **arrays)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"a descriptor record cannot be decoded ({error})") from error


def _sift_numbers(values: np.ndarray) -> np.ndarray | None:
    """(N, D) uint8 from which `root_sift` makes exactly these descriptors; None where there are none such."""
    shares = values.astype(np.float32) ** 2
    smallest = np.where(shares > 0, shares, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    numbers = np.zeros(shares.shape, np.uint8)
    open_rows = np.isfinite(smallest[:, 0])
    for step in range(1, _SIFT_STEPS + 1):
        rows = np.flatnonzero(open_rows)
        tried = np.rint(shares[rows] * (step / smallest[rows]))
        fits = np.all(tried <= 255, axis=1)
        rows, tried = rows[fits], tried[fits].astype(np.uint8)
        exact = np.all(root_sift(tried) == values[rows], axis=1)
        numbers[rows[exact]] = tried[exact]
        open_rows[rows[exact]] = False
    return None if open_rows.any() or not np.array_equal(root_sift(numbers), values) else numbers


# --- refined_keypoints: Refined keypoints of a run: one file beside its store, deleted as soon as the run's
# pairs change.

_BYTES_A_POINT = 8 + 16 + 1  # keypoint, covariance and whether it was refined
_BYTES_AN_IMAGE = 8 + 4 * 1024  # where its points begin, and its name
_OVERHEAD = 1 << 16


class RefinedKeypoints(NamedTuple):
    """The keypoints of one image; track observations are refined against their track's reference."""

    keypoints: np.ndarray  # (N, 2) float32 stored pixels
    covariances: np.ndarray  # (N, 2, 2) float32 stored pixels²; the prior for keypoints not refined
    refined: np.ndarray  # (N,) bool


def write_refined(run_dir: Path, found: Mapping[str, RefinedKeypoints]) -> Path:
    """Write the refined keypoints of all images of a run; this replaces earlier ones."""
    names = list(found)
    columns = [np.concatenate(column) for column in zip(*found.values(), strict=True)]
    arrays = dict(zip(RefinedKeypoints._fields, columns, strict=True))
    offsets = np.cumsum([0, *(len(each.keypoints) for each in found.values())])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, names=np.array(names, dtype=np.str_), offsets=offsets, **arrays)
    write_whole(run_dir / FILE, buffer.getvalue())
    return run_dir / FILE


def read_refined(run_dir: Path, counts: Mapping[str, int]) -> dict[str, RefinedKeypoints]:
    """The refined keypoints of a run by name of image; empty if it has none.

    Args:
        run_dir: of the run.
        counts: the number of keypoints of each of its images.

    Raises:
        IntegrityError: the file is damaged, or is not of these images.
    """
    path = run_dir / FILE
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            _check_size(stored.zip, counts)
            offsets = stored["offsets"].tolist()
            columns = [stored[name] for name in RefinedKeypoints._fields]
            found = {
                str(name): RefinedKeypoints(*(column[start:stop] for column in columns))
                for name, start, stop in zip(stored["names"], offsets[:-1], offsets[1:], strict=True)
            }
        _check_columns(found, counts)
        return found
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        RuntimeError,
        BadZipFile,
        zlib.error,
    ) as error:
        raise IntegrityError(f"{path} is damaged ({error}): delete it and refine the run again") from error


def _check_size(archive: ZipFile, counts: Mapping[str, int]) -> None:
    """Refuse what would unpack to more than the points of the run."""
    most = _BYTES_A_POINT * sum(counts.values()) + _BYTES_AN_IMAGE * (len(counts) + 1) + _OVERHEAD
    if (size := sum(member.file_size for member in archive.infolist())) > most:
        raise ValueError(f"{size} bytes are more than the run's keypoints take")


def _check_columns(found: Mapping[str, RefinedKeypoints], counts: Mapping[str, int]) -> None:
    for name, (points, covariances, refined) in found.items():
        count = counts.get(name, -1)
        shapes = (points.shape, covariances.shape, refined.shape)
        if shapes != ((count, 2), (count, 2, 2), (count,)):
            raise ValueError(f"{name}: arrays of {shapes} are not those of {max(count, 0)} keypoints")
        if not (np.isfinite(points).all() and np.isfinite(covariances).all()):
            raise ValueError(f"{name}: a value is not finite")


def delete_refined(run_dir: Path) -> None:
    """Delete refined keypoints, because the pairs that they came from have changed."""
    (run_dir / FILE).unlink(missing_ok=True)
