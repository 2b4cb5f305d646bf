"""Reading a run's store: images, keypoints, features and finished pairs, each checked.

A store is a folder: `run.db` (SQLite), and descriptor files that may be deleted after matching. It may be
read while a run writes it. `writer.py` writes it.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from sqlite3 import Connection
from types import NoneType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import Camera
from matcher.collection import schema
from matcher.collection.schema import (
    DONE,
    TILE_BITS,
    Counts,
    DamagedError,
    FailedPair,
    Status,
    StoredImage,
    StoredPair,
    StoreLock,
    check,
    check_files,
    checksum,
    decode_camera,
    decode_keypoints,
    decode_pair,
    encode_camera,
    encode_keypoints,
    parse_json,
    to_json,
)
from matcher.collection.sources import (
    MAX_BYTES,
    DescriptorWriter,
    PairChoice,
    RecordLocation,
    RefinedKeypoints,
    decode_features,
    delete_refined,
    file_path,
    name_fault,
    read_record,
    read_refined,
)
from matcher.errors import IntegrityError, UsageError
from matcher.types import Features

# --- store_check: Whether a store is sound: it may come from anybody, so everything in it is read with
# suspicion once.

_STEPS_A_BYTE, _STEPS = 40, 5_000_000  # instructions of SQLite's machine that a check may take
_TEXT = 10_000  # characters
_LARGEST = 2**31 - 1
_FILES = 10**6  # number of a descriptor file
_FILE_END = 2**40  # bytes
_SCALES = (1e-6, 1e6)  # resized / stored size
_SETTINGS = 1 << 20  # characters

_ENDS = (
    "typeof(image0) != 'integer' OR typeof(image1) != 'integer' OR image0 = image1"
    " OR image0 NOT IN (SELECT id FROM images) OR image1 NOT IN (SELECT id FROM images)"
)
_UNKNOWN = "image NOT IN (SELECT id FROM images)"
_CRC = f"typeof(crc) != 'integer' OR crc NOT BETWEEN 0 AND {2**32 - 1}"
# Table → what names a row, a condition that no row may meet, and what it means.
_RULES = (
    (
        "keypoints",
        "image",
        f"{_UNKNOWN} OR typeof(data) != 'blob' OR {_CRC}",
        "no keypoints of an image of the run",
    ),
    (
        "descriptors",
        "image",
        f"{_UNKNOWN} OR {_CRC}"
        f" OR typeof(file) != 'integer' OR file NOT BETWEEN 0 AND {_FILES}"
        f" OR typeof(start) != 'integer' OR start NOT BETWEEN 0 AND {_FILE_END}"
        f" OR typeof(length) != 'integer' OR length NOT BETWEEN 0 AND {_LARGEST}",
        "no place of an image's descriptors",
    ),
    ("pairs INDEXED BY pairs_by_images", "image0, image1", _ENDS, "no pair of two images of the run"),
    (
        "failed",
        "image0, image1",
        f"{_ENDS} OR typeof(reason) != 'text' OR length(reason) > {_TEXT}",
        "no failed pair of two images of the run",
    ),
    (
        "waiting",
        "image0, image1",
        f"{_ENDS} OR tile0 IS NOT image0 >> {schema.TILE_BITS} OR tile1 IS NOT image1 >> {schema.TILE_BITS}",
        "no waiting pair of two images of the run",
    ),
)
_IMAGES = (
    "id, name, status, reason, sha256, stamp, camera, width, height, images.count, scale_x, scale_y, exif,"
    " kind, length(data)"
)


def check_store(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a store that no run can have written.

    Raises:
        IntegrityError: there is such a thing in it; the message names the row.
    """
    with (
        bounded(connection, path),
        schema.guarded(path),
        schema.undamaged(path),
        _snapshot(connection),
    ):
        _check_schema(connection)
        _check_meta(connection)
        for row in connection.execute(
            f"SELECT {_IMAGES} FROM images LEFT JOIN keypoints ON image = id ORDER BY id"
        ):
            _check_image(row)
        for table, names, condition, meaning in _RULES:
            sql = f"SELECT {names} FROM {table} WHERE {condition} LIMIT 1"
            if (found := connection.execute(sql).fetchone()) is not None:
                where = ", ".join(map(_shown, found))
                raise DamagedError(f"row {where} of {table.split()[0]}: {meaning}")


@contextmanager
def bounded(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Stop SQLite where it does more than reading every byte a few times can take."""
    size = sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}-wal")) if file.is_file())
    left, every = [_STEPS + _STEPS_A_BYTE * size], 10_000

    def stop() -> bool:
        left[0] -= every
        return left[0] < 0

    connection.set_progress_handler(stop, every)
    try:
        yield
    except IntegrityError as error:
        if left[0] >= 0:
            raise
        raise IntegrityError(f"{path} {schema.DAMAGED} (reading it has no end)") from error
    finally:
        connection.set_progress_handler(None, 0)


@contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """All queries see one state, also while another process writes."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


def _check_schema(connection: sqlite3.Connection) -> None:
    """Views and triggers of others would run in our queries; a table of another shape would break them."""
    found: dict[str, str | None] = {}
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
        if name not in _objects() or name in found:
            raise DamagedError(f"it holds a {_shown(kind)} {_shown(name)} that no run makes")
        found[name] = sql
    for name, sql in _objects().items():
        if found.get(name, "") != sql:
            raise DamagedError(f"its {name} is not that of a run")


@cache
def _objects() -> dict[str, str | None]:
    """The SQL of everything that a store holds, by name."""
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(schema.TABLES)
        return dict(made.execute("SELECT name, sql FROM sqlite_master"))


def _check_meta(connection: sqlite3.Connection) -> None:
    meta = {}
    for key, value in connection.execute("SELECT key, value FROM meta"):
        _require(isinstance(key, str) and isinstance(value, str), f"row {_shown(key)} of meta: no text")
        _require(len(value) <= _SETTINGS, f"row {_shown(key)} of meta: {len(value)} characters")
        meta[key] = value
    for key in ("settings", "image_folder"):
        _require(key in meta, f"it has no {key}")
    _require("\0" not in meta["image_folder"], "its image_folder is no path")
    check_settings(parse_json(meta["settings"], "its settings"))
    if "pair_choice" in meta:
        PairChoice.from_json(meta["pair_choice"])


def check_settings(settings: Any) -> dict[str, Any]:
    """The settings of a run, if the parts that we read have their types.

    Raises:
        DamagedError: one has another.
    """
    _require(isinstance(settings, dict), "its settings are no table")
    config = settings.get("config", {})
    _require(isinstance(config, dict), f"its setting config is {_shown(config)}")
    _require(isinstance(config.get("extractor", {}), dict), "its setting extractor is no table")
    for values, key, kinds in (
        *((settings, key, kinds) for key, kinds in _SETTING_TYPES.items()),
        *((config, key, kinds) for key, kinds in _PART_TYPES.items()),
        (config.get("extractor", {}), "resize", (int, NoneType)),
    ):
        found = values.get(key, _MISSING)
        _require(found is _MISSING or isinstance(found, kinds), f"its setting {key} is {_shown(found)}")
    if settings.get("camera") is not None:
        decode_camera(settings["camera"], "its camera")
    return settings


_MISSING = ("missing",)  # no value of JSON's
_TEXT_OR_NONE = (str, NoneType)
_SETTING_TYPES: dict[str, tuple[type, ...]] = {
    "preset": _TEXT_OR_NONE,
    "weights": _TEXT_OR_NONE,
    "frontend_weights": _TEXT_OR_NONE,
    "precision": _TEXT_OR_NONE,
    "shard": _TEXT_OR_NONE,
    "config": (dict,),
    "upright": (bool,),
    "alpha_mask": (bool,),
    "source": (dict,),
}
_PART_TYPES: dict[str, tuple[type, ...]] = {
    "extractor": (dict,),
    "matcher": (dict,),
    "estimation": (dict,),
    "refine": (dict, NoneType),
}


def _check_image(row: tuple[Any, ...]) -> None:
    number, name, status, reason, sha256, stamp, camera, *rest = row
    where = f"row {_shown(number)} of images ({_shown(name)})"
    _require(isinstance(number, int) and 0 <= number < 2**53, f"{where}: its number is out of range")
    _require(name_fault(name) is None, f"{where}: its name {name_fault(name)}")
    _require(_whole(status, 0, 2), f"{where}: its status is {_shown(status)}")
    for what, text, most in (("reason", reason, _TEXT), ("sha256", sha256, 128), ("stamp", stamp, 1_000)):
        _require(isinstance(text, str) and len(text) <= most, f"{where}: its {what} is {_shown(text)}")
    if camera is not None:
        _require(isinstance(camera, str), f"{where}: its camera is {_shown(camera)}")
        decode_camera(parse_json(camera, f"{where}: its camera"), f"{where}: its camera")
    _check_features(where, status == schema.DONE, *rest)


def _check_features(
    where: str,
    done: bool,
    width: Any,
    height: Any,
    count: Any,
    scale_x: Any,
    scale_y: Any,
    exif: Any,
    kind: Any,
    length: Any,
) -> None:
    for what, value in (("width", width), ("height", height)):
        _require(_whole(value, int(done), 2**30), f"{where}: its {what} is {_shown(value)}")
    _require(_whole(count, 0, _LARGEST), f"{where}: its count is {_shown(count)}")
    for what, value in (("scale_x", scale_x), ("scale_y", scale_y)):
        right = isinstance(value, float) and math.isfinite(value) and _SCALES[0] <= value <= _SCALES[1]
        _require(right, f"{where}: its {what} is {_shown(value)}")
    _require(_whole(exif, 1, 8), f"{where}: its exif is {_shown(exif)}")
    _require(isinstance(kind, str) and len(kind) <= 100, f"{where}: its kind is {_shown(kind)}")
    if done:
        _require(length == 8 * count, f"{where}: {_shown(length)} bytes are not {_shown(count)} keypoints")


def one_line(text: str) -> str:
    """A text of unknown origin as a terminal may be given it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and least <= value <= most


def _require(right: bool, fault: str) -> None:
    if not right:
        raise DamagedError(fault)


def _shown(value: Any) -> str:
    """A value of unknown origin for a message: short, on one line."""
    return ascii(value if not isinstance(value, (str, bytes)) else value[:60])[:80]


def find_damage(rows: Callable[[str], Iterator[tuple[Any, ...]]], folder: Path) -> list[str]:
    """Read everything that has a checksum and list what is damaged; `rows` runs a statement."""
    faults = [row[0] for row in rows("PRAGMA integrity_check(20)") if row[0] != "ok"]
    for table, what in (("keypoints", "the keypoints of image"), ("pairs", "pair")):
        for number, crc, data in rows(f"SELECT rowid, crc, data FROM {table}"):
            try:
                check(data, crc, f"{what} {number}")
            except DamagedError as error:
                faults.append(str(error))
    for place in rows("SELECT file, start, length, crc FROM descriptors"):
        try:
            read_record(folder, RecordLocation(*place))
        except FileNotFoundError:
            continue  # deleting them is allowed
        except DamagedError as error:
            faults.append(str(error))
    return faults


# --- run_folder: The folder of a run: created if missing, and cleared of a store's own files.


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
    check_files(run_dir)
    descriptors = [*run_dir.glob(file_path(run_dir, 0).name.replace("00000", "[0-9]*"))]
    if folders := [path for path in descriptors if path.is_dir() and not path.is_symlink()]:
        raise UsageError(f"{folders[0]} is a folder, which no run makes; move it away")
    if not schema.is_store(run_dir / schema.DATABASE):
        raise UsageError(
            f"{run_dir / schema.DATABASE} is no store of a matcher run, so restart=True does not delete it: "
            "move it away, or name another run_dir"
        )
    lock = StoreLock(run_dir)
    try:
        for suffix in ("-wal", "-shm", "-journal", ""):
            (run_dir / f"{schema.DATABASE}{suffix}").unlink(missing_ok=True)
        delete_refined(run_dir)
        for path in descriptors:
            path.unlink()
    finally:
        lock.release()


# --- store: Reading a run's store: images, keypoints, features and finished pairs, each checked.

STATUSES: tuple[Status, ...] = ("waiting", "done", "failed")  # by their number in the database
_CACHED_KEYPOINTS = 1024  # images
_PAIR = "image0, image1, seconds, crc, data"
_IMAGE = "name, sha256, width, height, count, camera, status, reason"


class Store:
    """A run on disk. Every method raises `IntegrityError` if the store is damaged."""

    def __init__(self, folder: Path, connection: Connection) -> None:
        self.folder = folder
        self._connection = connection
        self._path = folder / schema.DATABASE
        self._refined: dict[str, RefinedKeypoints] | None = None
        self._keypoints = lru_cache(_CACHED_KEYPOINTS)(self._read_keypoints)

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
            path = folder / schema.DATABASE
            if path.exists():
                raise UsageError(f"{folder} holds a run already; open it, or name another folder")
            rows = {"settings": to_json(settings)}
            rows["image_folder"] = str(Path(image_folder or ".").absolute())
            schema.make(path, rows)
        finally:
            lock.release()
        return cls.open(folder)

    @classmethod
    def create_if_absent(cls, run_dir: Path, settings: dict[str, Any], image_folder: str | Path) -> None:
        """A new, empty store where there is none; errors as of `create`."""
        if not (run_dir / schema.DATABASE).exists():
            cls.create(run_dir, settings, image_folder).close()

    @classmethod
    def open(cls, run_dir: str | Path) -> Store:
        """A store that exists, for reading.

        Raises:
            UsageError: there is none.
            IntegrityError: it is damaged, or was written by a newer matcher.
        """
        folder = Path(run_dir)
        path = folder / schema.DATABASE
        check_files(folder)
        if not path.is_file():
            raise UsageError(
                f"{folder} holds no run; create one with `matcher collection IMAGES --run {folder}`"
            )
        return cls(folder, schema.open_reading(path, check_store))

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on: preset, weights, configuration."""
        with schema.undamaged(self._path):
            return check_settings(parse_json(self._meta("settings"), "its settings"))

    @property
    def image_folder(self) -> Path:
        """Where the images were when the run was last started."""
        return Path(self._meta("image_folder"))

    @property
    def pair_choice(self) -> PairChoice | None:
        """How the run's pairs were chosen; None before there are any."""
        rows = list(self.rows("SELECT value FROM meta WHERE key = 'pair_choice'"))
        with schema.undamaged(self._path):
            return PairChoice.from_json(rows[0][0]) if rows else None

    def unpaired(self) -> int:
        """The number of images without a pair, except those that failed or have no keypoints."""
        ends = " UNION ".join(
            f"SELECT image{end} FROM {table}" for table in ("pairs", "failed", "waiting") for end in (0, 1)
        )
        usable = "(status = 0 OR status = 1 AND count > 0)"
        return next(self.rows(f"SELECT count(*) FROM images WHERE {usable} AND id NOT IN ({ends})"))[0]

    def images(self) -> list[StoredImage]:
        """All images, by name."""
        folder = self.image_folder
        rows = self.rows(f"SELECT {_IMAGE} FROM images ORDER BY name")
        with schema.undamaged(self._path):
            return [_image(row, folder) for row in rows]

    def image(self, name: str) -> StoredImage:
        """One image.

        Raises:
            UsageError: the run has none of that name.
        """
        rows = list(self.rows(f"SELECT {_IMAGE} FROM images WHERE name = ?", name))
        if not rows:
            raise UsageError(f"the run {self.folder} has no image {name!r}")
        with schema.undamaged(self._path):
            return _image(rows[0], self.image_folder)

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
            with schema.undamaged(self._path):
                return decode_features(read_record(self.folder, place), self._keypoints(number), **facts)
        except FileNotFoundError:
            lost = self._path if place is None else file_path(self.folder, place.file)
            raise IntegrityError(
                f"{lost} no longer holds the descriptors of {name}: `matcher collection {self.image_folder} "
                f"--run {self.folder} --descriptors` extracts them again"
            ) from None

    def pairs(self) -> Iterator[StoredPair]:
        """Finished pairs, one after another, in an order that does not depend on when they were finished."""
        names = self.names()
        for row in self.rows(f"SELECT {_PAIR} FROM pairs ORDER BY image0, image1"):
            yield self._pair(names, row)

    def pair(self, name0: str, name1: str) -> StoredPair:
        """One finished pair, given in either order of its images.

        Raises:
            UsageError: the run has no such image, or the pair is not finished.
        """
        numbers = sorted(self._number(name) for name in (name0, name1))
        rows = list(self.rows(f"SELECT {_PAIR} FROM pairs WHERE image0 = ? AND image1 = ?", *numbers))
        if not rows:
            numbers.reverse()
            rows = list(self.rows(f"SELECT {_PAIR} FROM pairs WHERE image0 = ? AND image1 = ?", *numbers))
        if not rows:
            raise UsageError(f"the run {self.folder} has no finished pair of {name0} and {name1}")
        return self._pair(self.names(), rows[0])

    def _pair(self, names: dict[int, str], row: tuple[Any, ...]) -> StoredPair:
        image0, image1, seconds, crc, data = row
        name0, name1 = self._named(names, image0), self._named(names, image1)
        with schema.undamaged(self._path):
            if not (isinstance(seconds, float) and 0 <= seconds < math.inf):
                raise DamagedError(f"the pair {name0} and {name1} took {seconds} seconds")
            check(data, crc, f"the pair {name0} and {name1}")
            matches, geometry = decode_pair(data, self._keypoints(image0), self._keypoints(image1))
        return StoredPair(name0, name1, matches, geometry, seconds)

    def _named(self, names: dict[int, str], number: int) -> str:
        """The name of an image; a run that writes meanwhile may have added it."""
        if number not in names:
            names |= self.names()
        if number not in names:
            raise IntegrityError(f"{self._path} {schema.DAMAGED} (it has no image {number})")
        return names[number]

    def _number(self, name: str) -> int:
        rows = list(self.rows("SELECT id FROM images WHERE name = ?", name))
        if not rows:
            raise UsageError(f"the run {self.folder} has no image {name!r}")
        return rows[0][0]

    def failed(self) -> Iterator[FailedPair]:
        """Pairs that could not be matched."""
        names = self.names()
        for image0, image1, reason in self.rows("SELECT * FROM failed ORDER BY image0, image1"):
            yield FailedPair(self._named(names, image0), self._named(names, image1), one_line(reason))

    def drop_cache(self) -> None:
        """Forget cached keypoints, because they have changed."""
        self._keypoints.cache_clear()
        self._refined = None

    def counts(self) -> Counts:
        """Progress of the run."""
        by_status = dict(self.rows("SELECT status, count(*) FROM images GROUP BY status"))
        waiting, done, failed = (by_status.get(number, 0) for number in range(3))
        # The index is a tenth of the table.
        finished = "SELECT count(*) FROM pairs INDEXED BY pairs_by_images"
        sql = f"SELECT ({finished}), (SELECT count(*) FROM failed), (SELECT count(*) FROM waiting)"
        pairs, pairs_failed, pairs_waiting = next(self.rows(sql))
        total = pairs + pairs_failed + pairs_waiting
        return Counts(waiting + done + failed, failed, waiting, total, pairs_failed, pairs_waiting)

    def names(self) -> dict[int, str]:
        """Names of the images by their number in the database."""
        return dict(self.rows("SELECT id, name FROM images"))

    def check(self) -> list[str]:
        """Read everything and list what is damaged; empty if nothing is."""
        with bounded(self._connection, self._path):
            return find_damage(self.rows, self.folder)

    def _meta(self, key: str) -> str:
        rows = list(self.rows("SELECT value FROM meta WHERE key = ?", key))
        if not rows:
            raise IntegrityError(f"{self._path} has no {key}: it {schema.DAMAGED}")
        return rows[0][0]

    def _done(self, name: str) -> tuple[int, dict[str, Any]]:
        """The number of an image with keypoints, and the fields of its features that a record lacks."""
        columns = "id, width, height, scale_x, scale_y, exif, kind"
        sql = f"SELECT {columns} FROM images WHERE name = ? AND status = 1"
        rows = list(self.rows(sql, name))
        if not rows:
            image = self.image(name)
            raise UsageError(f"{name} has no keypoints: {image.reason or 'it is still to be read'}")
        number, width, height, scale_x, scale_y, orientation, kind = rows[0]
        facts = {"size": (width, height), "scale": (scale_x, scale_y), "kind": kind}
        return number, {**facts, "exif_orientation": orientation}

    def _read_keypoints(self, number: int) -> np.ndarray:
        rows = list(self.rows("SELECT data, crc FROM keypoints WHERE image = ?", number))
        with schema.undamaged(self._path):
            if not rows:
                raise DamagedError(f"the keypoints of image {number} are absent")
            what = f"the keypoints of image {number}"
            return decode_keypoints(check(*rows[0], what), what)

    def rows(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Rows of one statement, streamed."""
        with schema.guarded(self._path):
            for row in self._connection.execute(sql, values):  # noqa: UP028  (closing it late must not fail)
                yield row


def _image(row: tuple[Any, ...], folder: Path) -> StoredImage:
    name, sha256, width, height, count, camera, status, reason = row
    known = None if camera is None else decode_camera(parse_json(camera, f"the camera of {name}"))
    size = (width, height)
    return StoredImage(name, folder / name, sha256, size, count, known, STATUSES[status], one_line(reason))


# --- writer: The writing side of a store: the only connection that writes, behind the store's lock.

_FORGET_PAIRS = """
CREATE TEMP TABLE touched AS SELECT image0, image1 FROM {table} WHERE image0 IN gone OR image1 IN gone;
INSERT OR IGNORE INTO waiting SELECT image0 >> {bits}, image1 >> {bits}, image0, image1 FROM touched;
DELETE FROM {table} WHERE (image0, image1) IN (SELECT image0, image1 FROM touched);
DROP TABLE touched;
"""


class EncodedPair(NamedTuple):
    """A finished pair as it lies in the store."""

    image0: int  # numbers of the images
    image1: int
    seconds: float
    crc: int
    data: bytes


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
            IntegrityError: it is damaged, or was written by a newer matcher.
        """
        folder = Path(run_dir)
        self._path = folder / schema.DATABASE
        if not self._path.is_file():
            Store.open(folder)  # raises an error that explains how to create one
        check_writable(folder)
        self._lock = StoreLock(folder)
        try:
            self._connection = schema.open_writing(self._path, check_store)
            self.store = Store(folder, self._connection)
            with schema.guarded(self._path):
                sql = "SELECT file, start + length FROM descriptors ORDER BY file DESC, start DESC LIMIT 1"
                number, end = self._connection.execute(sql).fetchone() or (0, 0)
        except BaseException:
            self._lock.release()
            raise
        self._descriptors = DescriptorWriter(folder, number, end, max_file_bytes)

    def close(self) -> None:
        """Fold the write-ahead log into the file and let others write."""
        try:
            self._descriptors.close()
            self._connection.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything in the block durably, or nothing.

        Raises:
            OSError: the disk is full.
        """
        with schema.guarded(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._descriptors.sync()
            with schema.guarded(self._path):
                self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk rolls back by itself
                self._connection.execute("ROLLBACK")
            raise

    def execute(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of one statement."""
        with schema.guarded(self._path):
            return self._connection.execute(sql, tuple(values)).fetchall()

    def execute_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """One statement for every row, streamed; the number of rows that it changed."""
        with schema.guarded(self._path):
            return self._connection.executemany(sql, rows).rowcount

    def add_images(self, names: Iterable[str]) -> None:
        """Images that are to be read; those that the store has stay as they are."""
        self.execute_many("INSERT OR IGNORE INTO images (name, status) VALUES (?, 0)", ((n,) for n in names))

    def put_camera(self, name: str, camera: Camera | None) -> None:
        """The camera of an image."""
        text = None if camera is None else to_json(encode_camera(camera))
        self.execute("UPDATE images SET camera = ? WHERE name = ?", (text, name))

    def put_features(self, name: str, features: Features, record: bytes, facts: ImageFacts) -> None:
        """Keypoints and descriptors (`record`, from `encode_features`) of an image, added where it is new."""
        self.add_images([name])
        number = self.number(name)
        data = encode_keypoints(to_numpy(features.keypoints))
        width, height = features.image_size
        row = (DONE, facts.sha256, facts.stamp, width, height, len(features), *features.scale.tolist())
        self.execute(
            "UPDATE images SET status = ?, reason = '', sha256 = ?, stamp = ?, width = ?, height = ?,"
            " count = ?, scale_x = ?, scale_y = ?, exif = ?, kind = ? WHERE id = ?",
            (*row, int(features.matched_orientation), features.kind, number),
        )
        self.execute("REPLACE INTO keypoints VALUES (?, ?, ?)", (number, data, checksum(data)))
        self.put_descriptors(number, record)

    def put_descriptors(self, number: int, record: bytes) -> None:
        """The descriptor record of an image."""
        place = self._descriptors.append(record)
        self.execute("REPLACE INTO descriptors VALUES (?, ?, ?, ?, ?)", (number, *place))

    def fail_image(self, name: str, reason: str, facts: ImageFacts | None = None) -> None:
        """An image that cannot be used, and why; its stamp shows when a retry is worthwhile."""
        sha256, stamp = facts or ImageFacts("")
        sql = "UPDATE images SET status = 2, reason = ?, sha256 = ?, stamp = ? WHERE name = ?"
        self.execute(sql, (reason, sha256, stamp, name))

    def put_pairs(self, pairs: Iterable[EncodedPair]) -> None:
        """Finished pairs; they no longer wait."""
        delete_refined(self.store.folder)
        pairs = list(pairs)
        sql = "REPLACE INTO pairs (image0, image1, seconds, crc, data) VALUES (?, ?, ?, ?, ?)"
        self.execute_many(sql, pairs)
        self._settled((pair.image0, pair.image1) for pair in pairs)

    def fail_pairs(self, pairs: Iterable[tuple[int, int, str]]) -> None:
        """Pairs by the numbers of their images, with the reason; they no longer wait."""
        pairs = list(pairs)
        self.execute_many("REPLACE INTO failed VALUES (?, ?, ?)", pairs)
        self._settled(pair[:2] for pair in pairs)

    def _settled(self, pairs: Iterable[tuple[int, int]]) -> None:
        sql = "DELETE FROM waiting WHERE tile0 = ? AND tile1 = ? AND image0 = ? AND image1 = ?"
        self.execute_many(sql, ((a >> TILE_BITS, b >> TILE_BITS, a, b) for a, b in pairs))

    def number(self, name: str) -> int:
        """The image's number in the database.

        Raises:
            UsageError: there is none of that name.
        """
        rows = self.execute("SELECT id FROM images WHERE name = ?", (name,))
        if not rows:
            raise UsageError(f"the run {self.store.folder} has no image {name!r}")
        return rows[0][0]

    def forget(self, names: Iterable[str]) -> None:
        """Images that have changed: they and all their pairs are to be done again."""
        delete_refined(self.store.folder)
        self.execute("CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY)")
        self.execute_many("INSERT INTO gone SELECT id FROM images WHERE name = ?", ((n,) for n in names))
        for table in ("pairs", "failed"):
            for statement in _FORGET_PAIRS.format(table=table, bits=TILE_BITS).split(";"):
                self.execute(statement)
        for table, key in (("keypoints", "image"), ("descriptors", "image")):
            self.execute(f"DELETE FROM {table} WHERE {key} IN gone")
        self.execute("UPDATE images SET status = 0, reason = '', count = 0 WHERE id IN gone")
        self.execute("DROP TABLE gone")
        self.store.drop_cache()

    def retry_failed(self) -> None:
        """Images and pairs that failed are to be tried again."""
        self.execute("UPDATE images SET status = 0, reason = '' WHERE status = 2")
        bits = TILE_BITS
        self.execute(
            f"INSERT INTO waiting SELECT image0 >> {bits}, image1 >> {bits}, image0, image1 FROM failed"
        )
        self.execute("DELETE FROM failed")

    def let_failed_pairs_wait(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Failed pairs, by the numbers of their images, are to be tried again."""
        pairs = list(pairs)
        tiles = ((a >> TILE_BITS, b >> TILE_BITS, a, b) for a, b in pairs)
        self.execute_many("INSERT OR IGNORE INTO waiting VALUES (?, ?, ?, ?)", tiles)
        self.execute_many("DELETE FROM failed WHERE image0 = ? AND image1 = ?", pairs)

    def set_image_folder(self, folder: Path) -> None:
        """Where the images are now."""
        self.execute("UPDATE meta SET value = ? WHERE key = 'image_folder'", (str(folder.absolute()),))

    def set_pair_choice(self, choice: PairChoice) -> None:
        """Keep how pairs were chosen, for images that are added later."""
        self.execute("REPLACE INTO meta VALUES ('pair_choice', ?)", (choice.to_json(),))

    def without_descriptors(self) -> set[int]:
        """Numbers of the images with keypoints whose descriptors were deleted or never copied."""
        files = [row[0] for row in self.execute("SELECT DISTINCT file FROM descriptors")]
        lost = [number for number in files if not file_path(self.store.folder, number).is_file()]
        sql = (
            "SELECT id FROM images LEFT JOIN descriptors ON image = id WHERE status = 1"
            f" AND (image IS NULL OR file IN ({', '.join('?' * len(lost))}))"
        )
        return {row[0] for row in self.execute(sql, lost)}
