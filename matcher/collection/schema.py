"""The SQLite file of a run: records and their bytes, tables, how it is opened, and who may write it.

In WAL mode exactly one connection may write and checkpoint: libraries before SQLite 3.51.3 can lose a
transaction where one connection writes while another one checkpoints (sqlite.org/wal.html, "The WAL-Reset
Bug"). `StoreLock` keeps a second writer out; readers are opened read-only and never checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sqlite3
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from matcher.cameras import Camera
from matcher.config import GeometryKind, GeometryStatus
from matcher.errors import IntegrityError, UsageError
from matcher.files import read_given
from matcher.types import Matches, TwoViewGeometry

DATABASE, LOCK, HOLDER, REFINED = "run.db", "lock.db", "holder.txt", "refined.npz"
INDEX = "retrieval.npz"  # global descriptors of the images of a map
APPLICATION, VERSION = 0x4D544352, 2  # "MTCR"
WAITING, DONE, FAILED = range(3)  # status of an image
TILE_BITS = 5  # images of a tile: 32, whose features fit in memory together

# Records: what a store holds about an image and a pair; K matches, points in stored pixels.

Status = Literal["waiting", "done", "failed"]  # in the order of their numbers in the database


@dataclass(frozen=True)
class StoredImage:
    """One image of a collection."""

    name: str  # path below the image folder, with forward slashes
    path: Path  # where the image was found
    sha256: str  # of the file, or of its entry in a features file; empty while unknown
    size: tuple[int, int]  # (width, height) as stored; (0, 0) while unknown
    count: int  # keypoints N
    camera: Camera | None
    status: Status
    reason: str  # why it failed; empty otherwise


@dataclass(frozen=True, eq=False)
class StoredPair:
    """One finished pair; name0 sorts before name1."""

    name0: str
    name1: str
    matches: Matches  # scores to within 1/131070; points are keypoints unless the matcher refined them
    geometry: TwoViewGeometry
    seconds: float  # matching and verifying


@dataclass(frozen=True)
class FailedPair:
    """A pair that could not be matched, and why."""

    name0: str
    name1: str
    reason: str


@dataclass(frozen=True)
class Counts:
    """Progress of a run."""

    images: int  # all of them: done, failed and waiting
    images_failed: int
    images_waiting: int
    pairs: int  # all of them: done, failed and waiting
    pairs_failed: int
    pairs_waiting: int

    @property
    def images_done(self) -> int:
        """Images with keypoints."""
        return self.images - self.images_failed - self.images_waiting

    @property
    def pairs_done(self) -> int:
        """Finished pairs."""
        return self.pairs - self.pairs_failed - self.pairs_waiting


# Bytes of records, each with a CRC-32 beside it. Decoding is where they are validated.


class DamagedError(ValueError):
    """Stored bytes are damaged."""


def checksum(data: bytes) -> int:
    """CRC-32, as zlib computes it."""
    return zlib.crc32(data)


def check(data: bytes, crc: int, what: str) -> bytes:
    """The bytes, if their checksum is right; `what` names them in the message.

    Raises:
        DamagedError: they have another checksum.
    """
    if zlib.crc32(data) != crc:
        raise DamagedError(f"{what} is damaged (its checksum differs)")
    return data


def parse_json(text: str, what: str) -> Any:
    """The value of a text as JSON has it; `DamagedError` where it is none or nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is no JSON ({error})") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def to_json(value: Any) -> str:
    """A text that `parse_json` takes."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def encode_camera(camera: Camera) -> dict[str, Any]:
    """A camera ready for JSON."""
    return asdict(camera)


def decode_camera(value: Any, what: str = "a camera") -> Camera:
    """The inverse of `encode_camera`; `DamagedError` for anything else."""
    try:
        size, distortion = value["size"] and tuple(value["size"]), tuple(value["distortion"])
        numbers = (*(value[name] for name in ("fx", "fy", "cx", "cy")), *(size or ()), *distortion)
        if any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
            raise ValueError("not all of its values are numbers")
        return Camera(**{**value, "size": size, "distortion": distortion})
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise DamagedError(f"{what} is none ({error})") from error


def common_camera(settings: Mapping[str, Any]) -> Camera | None:
    """The camera of every image of a run that has none of its own."""
    value = settings.get("camera")
    return None if value is None else decode_camera(value, "its camera")


def encode_keypoints(keypoints: np.ndarray) -> bytes:
    """(N, 2) float32."""
    return np.ascontiguousarray(keypoints, dtype="<f4").tobytes()


def decode_keypoints(data: bytes, count: int, what: str) -> np.ndarray:
    """(N, 2) float32; `DamagedError` where they are not so many points, all finite."""
    if len(data) != 8 * count:
        raise DamagedError(f"{what}: {len(data)} bytes are not {count} points")
    points = np.frombuffer(data, dtype="<f4").reshape(-1, 2).astype(np.float32)
    if not np.isfinite(points).all():
        raise DamagedError(f"{what} are not all finite")
    return points


_SCORE_STEPS = 65535


def encode_pair(
    matches: Matches, geometry: TwoViewGeometry, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> bytes:
    """A pair without its names; keypoints are (N, 2) and (M, 2) float32 of the two images.

    Raises:
        ValueError: indices outside the keypoints, or arrays whose lengths differ: nothing is to be written.
    """
    indices = np.asarray(matches.indices, dtype=np.int64).reshape(-1, 2)
    columns = (matches.scores, matches.points0, matches.points1, geometry.inliers)
    if any(len(column) != len(indices) for column in columns):
        raise ValueError("matches, scores, points and inliers differ in number")
    if (indices < 0).any() or (indices >= (len(keypoints0), len(keypoints1))).any():
        raise ValueError("a match refers to a keypoint that the image does not have")
    if not np.isfinite(matches.scores).all():
        raise ValueError("a match has a score that is not finite")
    kind, status = (
        get_args(names).index(name)
        for names, name in ((GeometryKind, geometry.kind), (GeometryStatus, geometry.status))
    )
    wide = max(len(keypoints0), len(keypoints1)) > 65536
    arrays = {
        "facts": np.array([kind, status, matches.layers_run, matches.kept0, matches.kept1], np.int32),
        "indices": indices.astype(np.uint32 if wide else np.uint16),
        "scores": np.rint(np.clip(matches.scores, 0, 1) * _SCORE_STEPS).astype(np.uint16),
        "inliers": np.packbits(np.asarray(geometry.inliers, dtype=bool)),
    }
    models = {"matrix": geometry.matrix, "pose": geometry.cam1_from_cam0, "homography": geometry.homography}
    models["alternatives"] = np.array(geometry.alternatives) if geometry.alternatives else None
    for name, model in models.items():
        if model is not None:
            arrays[name] = np.ascontiguousarray(model, dtype=np.float64)
    sides = ((matches.points0, keypoints0), (matches.points1, keypoints1))
    for side, (points, keypoints) in enumerate(sides):
        points = np.ascontiguousarray(points, dtype=np.float32)
        if not np.array_equal(points, keypoints[indices[:, side]]):
            arrays[f"points{side}"] = points
    return save(arrays)


def decode_pair(
    data: bytes, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> tuple[Matches, TwoViewGeometry]:
    """The inverse of `encode_pair`.

    Raises:
        DamagedError: the bytes do not make a pair of these images.
    """
    try:
        arrays = load(data)
        kind, status, layers, *kept = (int(number) for number in arrays["facts"])
        indices = arrays["indices"].astype(np.int64)
        count = len(indices)
        bits = arrays["inliers"]
        if min(kind, status, layers, *kept) < 0 or bits.shape != (-(-count // 8),):
            raise ValueError("a number is out of range")
        points = [
            arrays.get(f"points{side}", keypoints[indices[:, side]])
            for side, keypoints in enumerate((keypoints0, keypoints1))
        ]
        scores = arrays["scores"].astype(np.float32) / np.float32(_SCORE_STEPS)
        matrix, pose, homography = (arrays.get(name) for name in ("matrix", "pose", "homography"))
        poses = arrays.get("alternatives", np.zeros((0, 4, 4)))
        wanted = ((indices, (count, 2)), (scores, (count,)), *((side, (count, 2)) for side in points))
        models = ((matrix, (3, 3)), (pose, (4, 4)), (homography, (3, 3)), (poses, (len(poses), 4, 4)))
        for values, shape in (*wanted, *models):
            if values is not None and (values.shape != shape or not np.isfinite(values).all()):
                raise ValueError("an array has another shape, or is not finite")
        inliers = np.unpackbits(bits, count=count).astype(bool)
        named = get_args(GeometryKind)[kind], get_args(GeometryStatus)[status]
        plane = {"homography": homography, "alternatives": tuple(poses)}
        geometry = TwoViewGeometry(*named, inliers, matrix, pose, **plane)
        if geometry.status == "ok" and (matrix is None or (geometry.kind == "essential" and pose is None)):
            raise ValueError("a geometry has no matrix")
        return Matches(indices, points[0], points[1], scores, layers, *kept), geometry
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        raise DamagedError(f"a pair cannot be decoded ({error})") from error


# The tables: columns, and what holds of every row. SQLite enforces it when we write, and finds what breaks it
# in a file of somebody else. Pairs are appended in the order in which they finish; `waiting` holds what is
# left, tile by tile, so that pairs that share images are matched one after another.

_CRC, _ENDS = "crc INTEGER NOT NULL", "image0 INTEGER NOT NULL, image1 INTEGER NOT NULL"
_CRC_RULE, _ENDS_RULE = "crc BETWEEN 0 AND 4294967295", "image0 != image1"
_TABLES = {
    "meta": ("key TEXT PRIMARY KEY, value TEXT NOT NULL", "length(value) < 1000000"),
    "images": (
        "id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, status INTEGER NOT NULL,"
        " reason TEXT NOT NULL DEFAULT '', sha256 TEXT NOT NULL DEFAULT '', stamp TEXT NOT NULL DEFAULT '',"
        " camera TEXT, width INTEGER NOT NULL DEFAULT 0, height INTEGER NOT NULL DEFAULT 0,"
        " count INTEGER NOT NULL DEFAULT 0, scale_x REAL NOT NULL DEFAULT 1, scale_y REAL NOT NULL DEFAULT 1,"
        " exif INTEGER NOT NULL DEFAULT 1, kind TEXT NOT NULL DEFAULT ''",
        "id BETWEEN 0 AND 1 << 53 AND status BETWEEN 0 AND 2 AND exif BETWEEN 1 AND 8"
        f" AND width BETWEEN status = {DONE} AND 1 << 30 AND height BETWEEN status = {DONE} AND 1 << 30"
        " AND count BETWEEN 0 AND 1 << 31"
        " AND scale_x BETWEEN 1e-6 AND 1e6 AND scale_y BETWEEN 1e-6 AND 1e6"
        " AND max(length(reason), length(sha256), length(stamp), length(kind)) < 10000",
    ),
    "keypoints": (f"image INTEGER PRIMARY KEY, data BLOB NOT NULL, {_CRC}", _CRC_RULE),
    "descriptors": (
        "image INTEGER PRIMARY KEY, file INTEGER NOT NULL, start INTEGER NOT NULL,"
        f" length INTEGER NOT NULL, {_CRC}",
        "file BETWEEN 0 AND 1000000 AND start BETWEEN 0 AND 1 << 40 AND length BETWEEN 0 AND 1 << 31"
        f" AND {_CRC_RULE}",
    ),
    "pairs": (
        f"id INTEGER PRIMARY KEY, {_ENDS}, seconds REAL NOT NULL, {_CRC}, data BLOB NOT NULL",
        f"{_ENDS_RULE} AND seconds BETWEEN 0 AND 1e9 AND {_CRC_RULE}",
    ),
    "failed": (
        f"{_ENDS}, reason TEXT NOT NULL, PRIMARY KEY (image0, image1)",
        f"{_ENDS_RULE} AND length(reason) < 10000",
    ),
    "waiting": (
        f"tile0 INTEGER NOT NULL, tile1 INTEGER NOT NULL, {_ENDS},"
        " PRIMARY KEY (tile0, tile1, image0, image1)",
        f"{_ENDS_RULE} AND tile0 = image0 >> {TILE_BITS} AND tile1 = image1 >> {TILE_BITS}",
    ),
}
_WITHOUT_ROWID = ("meta", "failed", "waiting")


def _tables() -> str:
    """The statements that make them."""
    made = ""
    for name, (columns, rule) in _TABLES.items():
        more = ", WITHOUT ROWID" if name in _WITHOUT_ROWID else ""
        made += f"CREATE TABLE {name} ({columns}, CHECK ({rule})) STRICT{more};\n"
    return f"{made}CREATE UNIQUE INDEX pairs_by_images ON pairs (image0, image1);\n"


DAMAGED = "is damaged; restore the run from a copy, or delete it and match again"
_PAGE = 16384  # bytes; rows of 2 to 3 kB leave little of it empty
_WAIT = 30.0  # seconds that a connection waits for another one's lock


def make(path: Path, meta: dict[str, str]) -> None:
    """Create an empty database at `path`, with these rows of `meta`; it gets its name when it is complete."""
    part = path.with_name(f".{path.name}.part")
    for suffix in ("", "-wal", "-shm", "-journal"):  # of a process that was killed here
        part.with_name(f"{part.name}{suffix}").unlink(missing_ok=True)
    with guarded(path), closing(sqlite3.connect(part, timeout=_WAIT, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        _make_durable(connection)
        marks = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
        connection.executescript(f"BEGIN; {_tables()} {marks} COMMIT;")
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    part.rename(path)


def open_writing(path: Path) -> sqlite3.Connection:
    """The connection that writes and checkpoints an existing store."""
    connection = _opened(path, "rw")
    with guarded(path):
        _make_durable(connection)
    return connection


def open_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection; works beside a run, and in a folder that cannot be written."""
    return _opened(path, reading_mode(path))


def reading_mode(path: Path) -> str:
    """How SQLite reads the file: beside a run, or where nothing can be written; `UsageError`: not at all."""
    if os.access(path.parent, os.W_OK):
        return "ro"
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:
        raise UsageError(f"{path} was not closed and its folder cannot be written; copy it to one that can")
    return "ro&immutable=1"


def uri(path: Path, mode: str) -> str:
    """The file as SQLite takes it where it is to be opened in some mode."""
    return f"{path.absolute().as_uri()}?mode={mode}"


def is_store(path: Path) -> bool:
    """Whether a file may be deleted as a store of ours: it is absent, or its header carries our mark."""
    try:
        with path.open("rb") as file:
            header = file.read(72)
    except FileNotFoundError:
        return True
    return header[68:72] == APPLICATION.to_bytes(4, "big")  # the application_id of SQLite's file format


def _make_durable(connection: sqlite3.Connection) -> None:
    # A folder on a network may refuse the write-ahead log; the rollback journal is slower and as safe.
    if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = TRUNCATE")
    connection.execute("PRAGMA synchronous = FULL")  # what is committed has reached the disk


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to a store that anybody may have made (sqlite.org/security.html), checked whole."""
    with guarded(path):
        connection = sqlite3.connect(uri(path, mode), uri=True, timeout=_WAIT, isolation_level=None)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            if hasattr(connection, "setconfig"):  # from Python 3.12 on
                connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
            (application,), (version,) = (
                connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
            )
            if application != APPLICATION:
                raise IntegrityError(f"{path} is not a store of a matcher run: name another folder")
            if version != VERSION:
                raise IntegrityError(
                    f"{path} was written by {'a newer' if version > VERSION else 'an older'} matcher (store "
                    f"version {version}, this one reads {VERSION}): use that one, or match again"
                )
            # Views, triggers and tables of others would run in our queries, or break them.
            if set(connection.execute("SELECT name, sql FROM sqlite_schema")) != _objects():
                raise DamagedError("its tables are not those of a run")
            if (said := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise DamagedError(one_line(str(said)))
            for table, (_, rule) in _TABLES.items():  # which SQLite only looks at where it may write
                if connection.execute(f"SELECT 1 FROM {table} WHERE NOT ({rule}) LIMIT 1").fetchone():
                    raise DamagedError(f"a row of {table} holds what none can")
        except BaseException:
            connection.close()
            raise
    return connection


@cache
def _objects() -> set[tuple[str, str | None]]:
    """Name and SQL of everything that a store holds."""
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(_tables())
        return set(made.execute("SELECT name, sql FROM sqlite_schema"))


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Translate the errors of SQLite and of decoding.

    Raises:
        IntegrityError: the file is damaged or no database; the message names the remedy.
        UsageError: it cannot be opened or written, or is held by another process.
        OSError: ENOSPC, the disk is full.
    """
    try:
        yield
    except DamagedError as error:
        raise IntegrityError(f"{path} {DAMAGED} ({error})") from error
    except UnicodeDecodeError as error:  # of a column, or of SQLite's own message about it
        raise IntegrityError(f"{path} {DAMAGED} (text in it is not UTF-8)") from error
    except sqlite3.Error as error:
        extended = getattr(error, "sqlite_errorcode", None) or 0
        code = extended & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, f"no space; free some, run again ({error})", str(path)) from error
        if extended == sqlite3.SQLITE_IOERR_WRITE:
            # SQLite reports a quota or limit that is exhausted in this way.
            raise OSError(errno.EDQUOT, f"no more can be written ({error})", str(path)) from error
        if code == sqlite3.SQLITE_IOERR:
            raise OSError(errno.EIO, f"disk error ({error})", str(path)) from error
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise UsageError(f"{path} cannot be opened ({error}); check the folder's permissions") from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise UsageError(f"{path} is held by another process ({error}); wait for it to end") from error
        if isinstance(error, (sqlite3.ProgrammingError, sqlite3.IntegrityError)):
            raise
        raise IntegrityError(f"{path} {DAMAGED} ({error})") from error


def one_line(text: str) -> str:
    """A text of unknown origin as a terminal may be given it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


# The files of a run's folder, which may be anybody's: each is a file of its own, or absent.

_LOGS = ("", "-wal", "-shm", "-journal")
_FILES = (*(f"{name}{log}" for name in (DATABASE, LOCK) for log in _LOGS), HOLDER, REFINED, INDEX)
# The last bytes of a rollback journal that belongs to several databases (SQLite's file format, section 3);
# ours never do, and SQLite would delete the file that it names.
_SEVERAL = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"


def check_files(folder: Path) -> None:
    """Refuse a run whose files are not all regular files.

    Raises:
        IntegrityError: a link, a pipe or a folder in the place of a file, or a journal that names others.
    """
    for name in _FILES:
        refuse_irregular(folder / name)
    for name in (DATABASE, LOCK):
        journal = folder / f"{name}-journal"
        if journal.is_file() and (size := journal.stat().st_size):
            with journal.open("rb") as file:
                file.seek(-min(size, len(_SEVERAL)), os.SEEK_END)
                if file.read() == _SEVERAL:
                    raise IntegrityError(f"{journal} is not the journal of a run; delete it")


def refuse_irregular(path: Path) -> None:
    """Refuse a link, a pipe, a device or a folder (`IntegrityError`); nothing happens where nothing is."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "not a file"
        raise IntegrityError(f"{path} is {kind}; a run holds its files itself: restore it from a copy")


class StoreLock:
    """One writer at a time: held from creation until `release`, or until the process ends for any reason.

    An exclusive transaction on a database of its own is the lock, because it works wherever SQLite does.
    """

    def __init__(self, folder: Path) -> None:
        """Take it.

        Raises:
            UsageError: another process holds it, or the folder cannot be written.
            IntegrityError: the folder holds links or pipes instead of a run's files.
        """
        check_files(folder)
        self._connection = sqlite3.connect(folder / LOCK, timeout=0, isolation_level=None)
        try:
            self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            self._connection.close()
            if (error.sqlite_errorcode & 0xFF) != sqlite3.SQLITE_BUSY:
                raise UsageError(f"{folder} cannot be written ({error}); name a folder that can") from None
            holder = ""
            with suppress(OSError):
                holder = f" ({one_line(read_given(folder / HOLDER).decode('utf-8', 'replace')[:200])})"
            raise UsageError(
                f"{folder} is being written by another run{holder}; wait for it to end, or name another "
                "folder"
            ) from None
        # For the message alone, so a disk that is full must not stop the run here.
        with suppress(OSError):
            (folder / HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")

    def release(self) -> None:
        """Let others write."""
        self._connection.close()
