"""A run on disk: images, keypoints, features and finished pairs, read by `Store` and written by `Writer`.

It is a folder: `run.db` (SQLite), descriptor files that may be deleted after matching, and refined keypoints.
It may be read while a run writes it.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from sqlite3 import Connection
from types import NoneType
from typing import Any, BinaryIO, NamedTuple, get_args
from zipfile import BadZipFile

import numpy as np
import safetensors
from safetensors.numpy import load as parse
from safetensors.numpy import save as pack

from matcher.arrays import root_sift, to_numpy
from matcher.cameras import Camera
from matcher.collection import schema
from matcher.collection.schema import (
    DONE,
    FAILED,
    TILE_BITS,
    WAITING,
    Counts,
    DamagedError,
    FailedPair,
    Status,
    StoredImage,
    StoredPair,
    StoreLock,
    check,
    checksum,
    decode_camera,
    decode_keypoints,
    decode_pair,
    encode_camera,
    encode_keypoints,
    guarded,
    parse_json,
    to_json,
)
from matcher.collection.sources import PairChoice, name_fault
from matcher.errors import IntegrityError, UsageError
from matcher.files import write_whole
from matcher.types import Features

# Descriptors lie in files beside the database, one record after another.

MAX_BYTES = 1 << 30  # of one file; a record that begins before it may end behind it
_OPTIONAL = ("scales", "orientations", "affine_frames")
_SIFT_STEPS = 8  # the smallest number of a SIFT descriptor that is not 0 is hardly ever larger


class RecordLocation(NamedTuple):
    """Where a record of descriptors lies."""

    file: int
    start: int
    length: int
    crc: int


def file_path(folder: Path, number: int) -> Path:
    """The descriptor file of that number."""
    return folder / f"descriptors-{number:05d}.bin"


def read_record(folder: Path, place: RecordLocation) -> bytes:
    """The bytes of a record.

    Raises:
        FileNotFoundError: its file was deleted.
        DamagedError: they are not what was written.
    """
    path = file_path(folder, place.file)
    schema.refuse_irregular(path)
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
        fits_half = np.all(np.abs(values) < np.finfo(np.float16).max)
        arrays["descriptors"] = values.astype(np.float16 if fits_half else np.float32)
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
        return Features(keypoints, found, **facts, **arrays)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"a descriptor record cannot be decoded ({error})") from error


def _sift_numbers(values: np.ndarray) -> np.ndarray | None:
    """(N, D) uint8 from which `root_sift` makes exactly these descriptors; None where there are none such."""
    shares = values.astype(np.float32) ** 2
    smallest = np.where(shares > 0, shares, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    numbers = np.zeros(shares.shape, np.uint8)
    left = np.flatnonzero(np.isfinite(smallest[:, 0]))
    for step in range(1, _SIFT_STEPS + 1):
        tried = np.rint(shares[left] * (step / smallest[left]))
        fits = np.all(tried <= 255, axis=1)
        rows, tried = left[fits], tried[fits].astype(np.uint8)
        exact = np.all(root_sift(tried) == values[rows], axis=1)
        numbers[rows[exact]] = tried[exact]
        left = np.setdiff1d(left, rows[exact])
    return None if len(left) or not np.array_equal(root_sift(numbers), values) else numbers


# Refined keypoints of a run: one file beside its store, deleted as soon as the run's pairs change.


class RefinedKeypoints(NamedTuple):
    """The keypoints of one image; track observations are refined against their track's reference."""

    keypoints: np.ndarray  # (N, 2) float32 stored pixels
    covariances: np.ndarray  # (N, 2, 2) float32 stored pixels²; the prior for keypoints not refined
    refined: np.ndarray  # (N,) bool


def write_refined(run_dir: Path, found: Mapping[str, RefinedKeypoints]) -> None:
    """Write the refined keypoints of all images of a run; this replaces earlier ones."""
    columns = [np.concatenate(column) for column in zip(*found.values(), strict=True)]
    arrays = dict(zip(RefinedKeypoints._fields, columns, strict=True))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, names=np.array(list(found), dtype=np.str_), **arrays)
    write_whole(run_dir / schema.REFINED, buffer.getvalue())


def read_refined(run_dir: Path, counts: Mapping[str, int]) -> dict[str, RefinedKeypoints]:
    """The refined keypoints of a run by name of image; empty if it has none.

    Args:
        run_dir: of the run.
        counts: the number of keypoints of each of its images.

    Raises:
        IntegrityError: the file is damaged, or is not of these images.
    """
    path = run_dir / schema.REFINED
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            # 25 bytes a keypoint, names of at most 1,024 characters of 4 bytes, and headers
            most = 25 * sum(counts.values()) + 4096 * (len(counts) + 1) + (1 << 16)
            if sum(member.file_size for member in stored.zip.infolist()) > most:
                raise ValueError("it unpacks to more than the run's keypoints take")
            names = [str(name) for name in stored["names"]]
            columns = [stored[field] for field in RefinedKeypoints._fields]
        total = sum(counts[name] for name in names)
        if [column.shape for column in columns] != [(total, 2), (total, 2, 2), (total,)]:
            raise ValueError("its arrays are not those of the run's keypoints")
        if not all(np.isfinite(column).all() for column in columns[:2]):
            raise ValueError("a value is not finite")
    except (
        *(OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError),
        *(BadZipFile, zlib.error),
    ) as error:
        raise IntegrityError(f"{path} is damaged ({error}): delete it and refine the run again") from error
    ends = np.cumsum([counts[name] for name in names])[:-1]
    parts = zip(*(np.split(column, ends) for column in columns), strict=True)
    return {name: RefinedKeypoints(*part) for name, part in zip(names, parts, strict=True)}


# The folder of a run.


def check_writable(folder: Path) -> None:
    """Create the folder if it is missing.

    Raises:
        UsageError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({error.strerror}); name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder} cannot be written; name another folder")


def delete_store(run_dir: Path) -> None:
    """Delete a store's own files and leave all others.

    Raises:
        UsageError: a run is writing it, `run.db` is a database of something else, or a file is a folder.
    """
    descriptors = [*run_dir.glob("descriptors-[0-9]*.bin")]
    if folders := [path for path in descriptors if path.is_dir() and not path.is_symlink()]:
        raise UsageError(f"{folders[0]} is a folder, which no run makes; move it away")
    lock = StoreLock(run_dir)
    try:
        if not schema.is_store(run_dir / schema.DATABASE):
            raise UsageError(
                f"{run_dir / schema.DATABASE} is no store of a matcher run, so restart=True does not delete "
                "it: move it away, or name another run_dir"
            )
        ours = [f"{schema.DATABASE}{suffix}" for suffix in ("-wal", "-shm", "-journal", "")]
        for path in (*(run_dir / name for name in (*ours, schema.REFINED)), *descriptors):
            path.unlink(missing_ok=True)
    finally:
        lock.release()


# Reading.

_PAIR = "image0, image1, seconds, crc, data"
_IMAGE = "name, sha256, width, height, count, camera, status, reason"


class Store:
    """A run on disk. Every method raises `IntegrityError` if the store is damaged."""

    def __init__(self, folder: Path, connection: Connection) -> None:
        """Use `open`."""
        self.folder = folder
        self._connection = connection
        self._path = folder / schema.DATABASE
        self._refined: dict[str, RefinedKeypoints] | None = None
        self._keypoints = lru_cache(1024)(self._read_keypoints)

    @classmethod
    def create(
        cls, run_dir: str | Path, settings: dict[str, Any], image_folder: str | Path | None = None
    ) -> Store:
        """Create an empty store.

        Args:
            run_dir: the folder, created if missing.
            settings: what the results depend on, ready for `json.dumps`.
            image_folder: where the images are; the current folder when absent.

        Raises:
            UsageError: there is a store already, or the folder cannot be written.
        """
        folder = Path(run_dir)
        check_writable(folder)
        lock = StoreLock(folder)
        try:
            if (folder / schema.DATABASE).exists():
                raise UsageError(f"{folder} holds a run already; open it, or name another folder")
            rows = {"settings": to_json(settings), "image_folder": str(Path(image_folder or ".").absolute())}
            schema.make(folder / schema.DATABASE, rows)
        finally:
            lock.release()
        return cls.open(folder)

    @classmethod
    def open(cls, run_dir: str | Path) -> Store:
        """A store that exists, for reading.

        Raises:
            UsageError: there is none.
            IntegrityError: it is damaged, or was written by another version of matcher.
        """
        folder = Path(run_dir)
        schema.check_files(folder)
        if not (folder / schema.DATABASE).is_file():
            raise UsageError(
                f"{folder} holds no run; create one with `matcher collection IMAGES --run {folder}`"
            )
        return cls(folder, schema.open_reading(folder / schema.DATABASE))

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on: preset, weights, configuration."""
        with guarded(self._path):
            return _checked_settings(parse_json(self._meta("settings") or "", "its settings"))

    @property
    def image_folder(self) -> Path:
        """Where the images were when the run was last started."""
        with guarded(self._path):
            found = self._meta("image_folder")
            if not found or "\0" in found:
                raise DamagedError("its image_folder is no path")
            return Path(found)

    @property
    def pair_choice(self) -> PairChoice | None:
        """How the run's pairs were chosen; None before there are any."""
        with guarded(self._path):
            found = self._meta("pair_choice")
            return None if found is None else PairChoice.from_json(found)

    def unpaired(self) -> int:
        """The number of images without a pair, except those that failed or have no keypoints."""
        ends = " UNION ".join(
            f"SELECT image{end} FROM {table}" for table in ("pairs", "failed", "waiting") for end in (0, 1)
        )
        usable = f"(status = {WAITING} OR status = {DONE} AND count > 0)"
        return next(self.rows(f"SELECT count(*) FROM images WHERE {usable} AND id NOT IN ({ends})"))[0]

    def images(self) -> list[StoredImage]:
        """All images, by name."""
        folder = self.image_folder
        with guarded(self._path):
            return [_image(row, folder) for row in self.rows(f"SELECT {_IMAGE} FROM images ORDER BY name")]

    def image(self, name: str) -> StoredImage:
        """One image.

        Raises:
            UsageError: the run has none of that name.
        """
        with guarded(self._path):
            for row in self.rows(f"SELECT {_IMAGE} FROM images WHERE name = ?", name):
                return _image(row, self.image_folder)
        raise UsageError(f"the run {self.folder} has no image {name!r}")

    def keypoints(self, name: str) -> np.ndarray:
        """(N, 2) float32 stored pixels, the centre of the first pixel being (0, 0).

        Raises:
            UsageError: the image is not in the run, or has no keypoints (yet).
        """
        return self._keypoints(self._done(name)[0])

    def refined_keypoints(self, name: str) -> RefinedKeypoints | None:
        """Keypoints with their positions refined track by track, None where the run was not refined."""
        if self._refined is None:
            self._refined = read_refined(self.folder, {i.name: i.count for i in self.images()})
        return self._refined.get(name)

    def scale(self, name: str) -> tuple[float, float]:
        """(sx, sy), the size in which keypoints were found / stored size, along the stored axes."""
        return self._done(name)[1]["scale"]

    def features(self, name: str) -> Features:
        """Keypoints and descriptors, as the matcher was given them.

        Raises:
            UsageError: the image is not in the run, or has no keypoints (yet).
            IntegrityError: the file of its descriptors was deleted; the message names the remedy.
        """
        number, facts = self._done(name)
        sql = "SELECT file, start, length, crc FROM descriptors WHERE image = ?"
        place = next((RecordLocation(*row) for row in self.rows(sql, number)), None)
        try:
            if place is None:
                raise FileNotFoundError
            with guarded(self._path):
                return decode_features(read_record(self.folder, place), self._keypoints(number), **facts)
        except FileNotFoundError:
            lost = self._path if place is None else file_path(self.folder, place.file)
            raise IntegrityError(
                f"{lost} no longer holds the descriptors of {name}: `matcher collection {self.image_folder} "
                f"--run {self.folder} --descriptors` extracts them again"
            ) from None

    def pairs(self, of: Collection[str] | None = None) -> Iterator[StoredPair]:
        """Finished pairs, one after another, in an order that does not depend on when they were finished.

        Args:
            of: names of images: only their pairs; None: all.
        """
        names, where = self.names(), ""
        if of is not None:
            ids = ", ".join(str(number) for number, name in names.items() if name in of)
            where = f"WHERE image0 IN ({ids}) OR image1 IN ({ids})"
        for row in self.rows(f"SELECT {_PAIR} FROM pairs {where} ORDER BY image0, image1"):
            yield self._pair(names, row)

    def pair(self, name0: str, name1: str) -> StoredPair:
        """One finished pair, given in either order of its images.

        Raises:
            UsageError: the run has no such image, or the pair is not finished.
        """
        numbers = {name: number for number, name in self.names().items()}
        for name in (name0, name1):
            if name not in numbers:
                raise UsageError(f"the run {self.folder} has no image {name!r}")
        ends = numbers[name0], numbers[name1]
        sql = f"SELECT {_PAIR} FROM pairs WHERE (image0, image1) IN (VALUES (?, ?), (?, ?))"
        for row in self.rows(sql, *ends, *ends[::-1]):
            return self._pair(self.names(), row)
        raise UsageError(f"the run {self.folder} has no finished pair of {name0} and {name1}")

    def known_pairs(self) -> set[frozenset[str]]:
        """The names of all pairs of the run, finished, failed or waiting."""
        tables = ("pairs", "failed", "waiting")
        sql = " UNION ".join(f"SELECT image0, image1 FROM {table}" for table in tables)
        names = self.names()
        return {frozenset(self._ends(names, *ends)) for ends in self.rows(sql)}

    def failed(self) -> Iterator[FailedPair]:
        """Pairs that could not be matched."""
        names = self.names()
        for image0, image1, reason in self.rows("SELECT * FROM failed ORDER BY image0, image1"):
            yield FailedPair(*self._ends(names, image0, image1), schema.one_line(reason))

    def names(self) -> dict[int, str]:
        """Names of the images by their number in the database."""
        with guarded(self._path):
            return {number: _name(name) for number, name in self.rows("SELECT id, name FROM images")}

    def counts(self) -> Counts:
        """Progress of the run."""
        by_status = dict(self.rows("SELECT status, count(*) FROM images GROUP BY status"))
        waiting, done, failed = (by_status.get(number, 0) for number in (WAITING, DONE, FAILED))
        # The index is a tenth of the table.
        finished = "SELECT count(*) FROM pairs INDEXED BY pairs_by_images"
        sql = f"SELECT ({finished}), (SELECT count(*) FROM failed), (SELECT count(*) FROM waiting)"
        pairs, pairs_failed, pairs_waiting = next(self.rows(sql))
        total = pairs + pairs_failed + pairs_waiting
        return Counts(waiting + done + failed, failed, waiting, total, pairs_failed, pairs_waiting)

    def check(self) -> list[str]:
        """Read everything that has a checksum and list what is damaged; empty if nothing is."""
        faults = [row[0] for row in self.rows("PRAGMA integrity_check(20)") if row[0] != "ok"]
        for table, what in (("keypoints", "the keypoints of image"), ("pairs", "pair")):
            for number, crc, data in self.rows(f"SELECT rowid, crc, data FROM {table}"):
                if checksum(data) != crc:
                    faults.append(f"{what} {number} is damaged (its checksum differs)")
        for place in self.rows("SELECT file, start, length, crc FROM descriptors"):
            try:
                read_record(self.folder, RecordLocation(*place))
            except FileNotFoundError:
                continue  # deleting them is allowed
            except DamagedError as error:
                faults.append(str(error))
        return faults

    def drop_cache(self) -> None:
        """Forget cached keypoints, because they have changed."""
        self._keypoints.cache_clear()
        self._refined = None

    def rows(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Rows of one statement, streamed."""
        with guarded(self._path):
            for row in self._connection.execute(sql, values):  # noqa: UP028  (closing it late must not fail)
                yield row

    def _meta(self, key: str) -> str | None:
        return next((row[0] for row in self.rows("SELECT value FROM meta WHERE key = ?", key)), None)

    def _pair(self, names: dict[int, str], row: tuple[Any, ...]) -> StoredPair:
        image0, image1, seconds, crc, data = row
        name0, name1 = self._ends(names, image0, image1)
        with guarded(self._path):
            check(data, crc, f"the pair {name0} and {name1}")
            matches, geometry = decode_pair(data, self._keypoints(image0), self._keypoints(image1))
        return StoredPair(name0, name1, matches, geometry, seconds)

    def _ends(self, names: dict[int, str], *numbers: int) -> Iterator[str]:
        """The names of images; a run that writes meanwhile may have added them."""
        for number in numbers:
            if number not in names:
                names |= self.names()
            if number not in names:
                raise IntegrityError(f"{self._path} {schema.DAMAGED} (it has no image {number})")
            yield names[number]

    def _done(self, name: str) -> tuple[int, dict[str, Any]]:
        """The number of an image with keypoints, and the fields of its features that a record lacks."""
        columns = "id, width, height, scale_x, scale_y, exif, kind"
        sql = f"SELECT {columns} FROM images WHERE name = ? AND status = {DONE}"
        for number, width, height, scale_x, scale_y, orientation, kind in self.rows(sql, name):
            facts = {"size": (width, height), "scale": (scale_x, scale_y), "kind": kind}
            return number, {**facts, "exif_orientation": orientation}
        raise UsageError(f"{name} has no keypoints: {self.image(name).reason or 'it is still to be read'}")

    def _read_keypoints(self, number: int) -> np.ndarray:
        what = f"the keypoints of image {number}"
        sql = "SELECT data, crc, count FROM keypoints JOIN images ON id = image WHERE image = ?"
        with guarded(self._path):
            for data, crc, count in self.rows(sql, number):
                return decode_keypoints(check(data, crc, what), count, what)
            raise DamagedError(f"{what} are absent")


def _name(name: str) -> str:
    if (fault := name_fault(name)) is not None:
        raise DamagedError(f"the name of an image, {ascii(name)[:60]}, {fault}")
    return name


def _image(row: tuple[Any, ...], folder: Path) -> StoredImage:
    name, sha256, width, height, count, camera, status, reason = row
    what = f"the camera of {_name(name)}"
    known = None if camera is None else decode_camera(parse_json(camera, what), what)
    states = get_args(Status)
    size = (width, height)
    return StoredImage(
        name, folder / name, sha256, size, count, known, states[status], schema.one_line(reason)
    )


_TEXT = (str, NoneType)
# In this order: a table before what is in it.
_TYPES: dict[str, tuple[type, ...]] = {
    **{name: _TEXT for name in ("preset", "weights", "frontend_weights", "precision", "shard")},
    **{name: (bool,) for name in ("upright", "alpha_mask")},
    **{name: (dict,) for name in ("source", "config")},
    **{f"config.{name}": (dict,) for name in ("extractor", "matcher", "estimation")},
    "config.extractor.resize": (int, NoneType),
    "config.refine": (dict, NoneType),
}


def _checked_settings(settings: Any) -> dict[str, Any]:
    """The settings of a run, if the parts that we read have their types."""
    if not isinstance(settings, dict):
        raise DamagedError("its settings are no table")
    for place, kinds in _TYPES.items():
        *tables, key = place.split(".")
        values = settings
        for table in tables:
            values = values.get(table, {})
        if key in values and not isinstance(values[key], kinds):
            raise DamagedError(f"its setting {place} is {ascii(values[key])[:60]}")
    schema.common_camera(settings)
    return settings


# Writing: the only connection that writes, behind the store's lock.


class EncodedPair(NamedTuple):
    """A finished pair as it lies in the store."""

    image0: int  # numbers of the images
    image1: int
    seconds: float
    crc: int
    data: bytes

    failed = False

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)


class ImageFacts(NamedTuple):
    """What the store keeps of an image that was read, beside its features."""

    sha256: str
    stamp: str = ""  # of the file, to see without reading that it is the same


class Writer:
    """Writes an existing store; `store` reads through the same connection."""

    def __init__(self, run_dir: str | Path, max_file_bytes: int = MAX_BYTES) -> None:
        """Take the lock and open the store.

        Raises:
            UsageError: there is no store, it cannot be written, or another run is writing it.
            IntegrityError: it is damaged, or was written by another version of matcher.
        """
        folder = Path(run_dir)
        self._path = folder / schema.DATABASE
        if not self._path.is_file():
            Store.open(folder)  # raises an error that explains how to create one
        check_writable(folder)
        self._lock = StoreLock(folder)
        try:
            self._connection = schema.open_writing(self._path)
            self.store = Store(folder, self._connection)
            sql = "SELECT file, start + length FROM descriptors ORDER BY file DESC, start DESC LIMIT 1"
            self._number, self._end = next(self.store.rows(sql), (0, 0))
        except BaseException:
            self._lock.release()
            raise
        self._limit = max_file_bytes
        self._file: BinaryIO | None = None  # of descriptors

    def close(self) -> None:
        """Fold the write-ahead log into the file and let others write."""
        try:
            if self._file is not None:
                self._file.close()
            self._connection.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything in the block durably, or nothing.

        Raises:
            OSError: the disk is full.
        """
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            if self._file is not None:
                os.fsync(self._file.fileno())
            self.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk rolls back by itself
                self._connection.execute("ROLLBACK")
            raise

    def execute(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of one statement."""
        with guarded(self._path):
            return self._connection.execute(sql, tuple(values)).fetchall()

    def execute_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """One statement for every row, streamed; the number of rows that it changed."""
        with guarded(self._path):
            return self._connection.executemany(sql, rows).rowcount

    def number(self, name: str) -> int:
        """The image's number in the database.

        Raises:
            UsageError: there is none of that name.
        """
        for (number,) in self.execute("SELECT id FROM images WHERE name = ?", (name,)):
            return number
        raise UsageError(f"the run {self.store.folder} has no image {name!r}")

    def add_images(self, names: Iterable[str]) -> None:
        """Images that are to be read; those that the store has stay as they are."""
        sql = f"INSERT OR IGNORE INTO images (name, status) VALUES (?, {WAITING})"
        self.execute_many(sql, ((name,) for name in names))

    def put_camera(self, name: str, camera: Camera | None) -> None:
        """The camera of an image."""
        text = None if camera is None else to_json(encode_camera(camera))
        self.execute("UPDATE images SET camera = ? WHERE name = ?", (text, name))

    def put_features(self, name: str, features: Features, record: bytes, facts: ImageFacts) -> None:
        """Keypoints and descriptors (`record`, from `encode_features`) of an image, added where it is new."""
        self.add_images([name])
        number = self.number(name)
        data = encode_keypoints(to_numpy(features.keypoints))
        scale = map(float, features.scale.tolist())
        row = (facts.sha256, facts.stamp, *features.image_size, len(features), *scale)
        self.execute(
            f"UPDATE images SET status = {DONE}, reason = '', sha256 = ?, stamp = ?, width = ?, height = ?,"
            " count = ?, scale_x = ?, scale_y = ?, exif = ?, kind = ? WHERE id = ?",
            (*row, int(features.matched_orientation), features.kind, number),
        )
        self.execute("REPLACE INTO keypoints VALUES (?, ?, ?)", (number, data, checksum(data)))
        self.put_descriptors(number, record)

    def put_descriptors(self, number: int, record: bytes) -> None:
        """Append the descriptor record of an image; it reaches the disk at the end of the transaction.

        Raises:
            OSError: the disk is full; partial data are overwritten next time.
        """
        if self._end >= self._limit:
            self._next_file()
        if self._file is None:
            path = file_path(self.store.folder, self._number)
            # A file that was cut short or deleted gets no new records.
            if self._end and (not path.is_file() or path.stat().st_size < self._end):
                self._next_file()
                path = file_path(self.store.folder, self._number)
            schema.refuse_irregular(path)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            self._file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        self._file.seek(self._end)
        self._file.truncate()  # what was not committed
        left = memoryview(record)
        while left:
            left = left[self._file.write(left) :]
        place = RecordLocation(self._number, self._end, len(record), checksum(record))
        self._end += len(record)
        self.execute("REPLACE INTO descriptors VALUES (?, ?, ?, ?, ?)", (number, *place))

    def _next_file(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
        self._file, self._number, self._end = None, self._number + 1, 0

    def fail_image(self, name: str, reason: str, facts: ImageFacts | None = None) -> None:
        """An image that cannot be used, and why; its stamp shows when a retry is worthwhile."""
        sql = f"UPDATE images SET status = {FAILED}, reason = ?, sha256 = ?, stamp = ? WHERE name = ?"
        self.execute(sql, (reason, *(facts or ImageFacts("")), name))

    def put_pairs(self, pairs: Iterable[EncodedPair]) -> None:
        """Finished pairs; they no longer wait."""
        self._forget_refined()
        pairs = list(pairs)
        sql = "REPLACE INTO pairs (image0, image1, seconds, crc, data) VALUES (?, ?, ?, ?, ?)"
        self.execute_many(sql, pairs)
        self._settle(pairs)

    def fail_pairs(self, pairs: Iterable[tuple[int, int, str]]) -> None:
        """Pairs by the numbers of their images, with the reason; they no longer wait."""
        pairs = list(pairs)
        self.execute_many("REPLACE INTO failed VALUES (?, ?, ?)", pairs)
        self._settle(pairs)

    def _settle(self, pairs: Iterable[tuple[Any, ...]]) -> None:
        sql = "DELETE FROM waiting WHERE tile0 = ? AND tile1 = ? AND image0 = ? AND image1 = ?"
        self.execute_many(sql, ((a >> TILE_BITS, b >> TILE_BITS, a, b) for a, b, *_ in pairs))

    def let_wait(self, pairs: str) -> int:
        """Let the pairs wait that a statement selects as `image0, image1`; how many did not yet."""
        return self.execute_many(
            f"INSERT OR IGNORE INTO waiting SELECT image0 >> {TILE_BITS}, image1 >> {TILE_BITS}, image0,"
            f" image1 FROM ({pairs})",
            [()],
        )

    def settle_all(self) -> None:
        """What is finished has not failed, and neither waits."""
        self._forget_refined()
        finished = "SELECT image0, image1 FROM pairs INDEXED BY pairs_by_images"
        self.execute(f"DELETE FROM failed WHERE (image0, image1) IN ({finished})")
        known = f"{finished} UNION ALL SELECT image0, image1 FROM failed"
        self.execute(f"DELETE FROM waiting WHERE (image0, image1) IN ({known})")

    def forget(self, names: Iterable[str]) -> None:
        """Images that have changed: they and all their pairs are to be done again."""
        self._forget_refined()
        self.execute("CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY)")
        self.execute_many("INSERT INTO gone SELECT id FROM images WHERE name = ?", ((n,) for n in names))
        for table in ("pairs", "failed"):
            theirs = f"FROM {table} WHERE image0 IN gone OR image1 IN gone"
            self.let_wait(f"SELECT image0, image1 {theirs}")
            self.execute(f"DELETE {theirs}")
        for table in ("keypoints", "descriptors"):
            self.execute(f"DELETE FROM {table} WHERE image IN gone")
        self.execute(f"UPDATE images SET status = {WAITING}, reason = '', count = 0 WHERE id IN gone")
        self.execute("DROP TABLE gone")
        self.store.drop_cache()

    def retry_failed(self) -> None:
        """Images and pairs that failed are to be tried again."""
        self.execute(f"UPDATE images SET status = {WAITING}, reason = '' WHERE status = {FAILED}")
        self.let_wait("SELECT image0, image1 FROM failed")
        self.execute("DELETE FROM failed")

    def set_meta(self, key: str, value: str) -> None:
        """`image_folder`: where the images are now; `pair_choice`: how pairs were chosen."""
        self.execute("REPLACE INTO meta VALUES (?, ?)", (key, value))

    def without_descriptors(self) -> set[int]:
        """Numbers of the images with keypoints whose descriptors were deleted or never copied."""
        files = [row[0] for row in self.execute("SELECT DISTINCT file FROM descriptors")]
        lost = [number for number in files if not file_path(self.store.folder, number).is_file()]
        sql = (
            f"SELECT id FROM images LEFT JOIN descriptors ON image = id WHERE status = {DONE}"
            f" AND (image IS NULL OR file IN ({', '.join('?' * len(lost))}))"
        )
        return {row[0] for row in self.execute(sql, lost)}

    def _forget_refined(self) -> None:
        (self.store.folder / schema.REFINED).unlink(missing_ok=True)
