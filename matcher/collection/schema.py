"""The SQLite file of a run: its tables, how it is opened, and what its errors mean to a user.

In WAL mode exactly one connection may write and checkpoint: libraries before SQLite 3.51.3 can lose a
transaction where one connection writes while another one checkpoints (sqlite.org/wal.html, "The WAL-Reset
Bug"). The lock of `locking.py` keeps a second writer out; readers are opened read-only and never checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sqlite3
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from matcher.cameras import Camera
from matcher.config import GeometryKind, GeometryStatus
from matcher.errors import IntegrityError, UsageError
from matcher.files import read_given
from matcher.types import Matches, TwoViewGeometry

# --- run_files: The files of a run's folder, which may come from anybody: each is a file of its own, or
# absent.

DATABASE, LOCK, HOLDER, REFINED = "run.db", "lock.db", "holder.txt", "refined.npz"
INDEX = "retrieval.npz"  # global descriptors of the images of a map
_LOGS = ("-wal", "-shm", "-journal")
_FILES = (*(f"{name}{log}" for name in (DATABASE, LOCK) for log in ("", *_LOGS)), HOLDER, REFINED, INDEX)
# The last bytes of a rollback journal that belongs to several databases (SQLite's file format, section 3);
# ours never do, and SQLite would delete the file that it names.
_SEVERAL = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"


def check_files(folder: Path) -> None:
    """Refuse a run whose files are not all regular files.

    Raises:
        IntegrityError: a link, a pipe or a folder in the place of a file, or a journal that names others.
    """
    for name in _FILES:
        path = folder / name
        try:
            status = path.lstat()
        except OSError:
            continue  # absent
        refuse_irregular(path, status)
        if name.endswith("-journal") and status.st_size:
            with path.open("rb") as file:
                file.seek(-min(status.st_size, len(_SEVERAL)), os.SEEK_END)
                if file.read() == _SEVERAL:
                    raise IntegrityError(f"{path} is not the journal of a run; delete it")


def refuse_irregular(path: Path, status: os.stat_result | None = None) -> None:
    """Refuse a path that is not a file of its own; without a file there, nothing happens.

    Raises:
        IntegrityError: a link, a pipe, a device or a folder.
    """
    try:
        mode = (path.lstat() if status is None else status).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "not a file"
        raise IntegrityError(f"{path} is {kind}; a run holds its files itself: restore it from a copy")


# --- records: What a store holds about an image and a pair; K matches, points in stored pixels.

Status = Literal["done", "failed", "waiting"]


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


# --- encoding: Bytes of a pair and of keypoints: compact, little endian, each with a CRC-32 beside it.

_HEAD = "<BBBBIHII"  # version, kind, status, flags, K, layers run, kept 0, kept 1
_VERSION = 1
_WIDE, _MATRIX, _POSE, _REFINED0, _REFINED1 = 1, 2, 4, 8, 16
_SCORE_STEPS = 65535
_INTRINSICS = ("fx", "fy", "cx", "cy")


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
    if not isinstance(data, bytes) or zlib.crc32(data) != crc:
        raise DamagedError(f"{what} is damaged (its checksum differs)")
    return data


def encode_keypoints(keypoints: np.ndarray) -> bytes:
    """(N, 2) float32."""
    return np.ascontiguousarray(keypoints, dtype="<f4").tobytes()


def decode_keypoints(data: bytes, what: str) -> np.ndarray:
    """(N, 2) float32; `what` names them in the message.

    Raises:
        DamagedError: they are no points, or not all finite.
    """
    if len(data) % 8:
        raise DamagedError(f"{what}: {len(data)} bytes are no points")
    points = np.frombuffer(data, dtype="<f4").reshape(-1, 2).astype(np.float32)
    if not np.isfinite(points).all():
        raise DamagedError(f"{what} are not all finite")
    return points


def encode_camera(camera: Camera) -> list[Any] | dict[str, Any]:
    """A camera ready for JSON: fx, fy, cx, cy of a pinhole camera of any size, else its fields by name."""
    if camera == Camera(camera.fx, camera.fy, camera.cx, camera.cy):
        return [camera.fx, camera.fy, camera.cx, camera.cy]
    values = asdict(camera)
    return {**values, "size": camera.size and list(camera.size), "distortion": list(camera.distortion)}


def common_camera(settings: Mapping[str, Any]) -> Camera | None:
    """The camera of every image of a run that has none of its own; errors as `decode_camera`."""
    value = settings.get("camera")
    return None if value is None else decode_camera(value)


def decode_camera(value: Any, what: str = "a camera") -> Camera:
    """The inverse of `encode_camera`; `what` names the value in the message.

    Raises:
        DamagedError: it is not what `encode_camera` makes.
    """
    try:
        if isinstance(value, dict):
            fields = {**value, "distortion": tuple(value.get("distortion", ()))}
            numbers = [
                *(value[name] for name in _INTRINSICS),
                *(value.get("size") or ()),
                *fields["distortion"],
            ]
        else:
            fields, numbers = dict(zip(_INTRINSICS, value, strict=True)), value
        # `Camera` would take numbers in texts.
        if all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
            return Camera(**fields)
        raise ValueError("not all of them are numbers")
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise DamagedError(f"{what} is none ({error})") from error


def parse_json(text: str, what: str) -> Any:
    """The value of a text as JSON has it; `what` names the text in the message.

    Raises:
        DamagedError: it is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is no JSON ({error})") from error


def to_json(value: Any) -> str:
    """A text that `parse_json` takes."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def encode_pair(
    matches: Matches, geometry: TwoViewGeometry, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> bytes:
    """A pair without its names; keypoints are (N, 2) and (M, 2) float32 of the two images.

    Raises:
        ValueError: indices outside the keypoints, or arrays whose lengths differ: nothing is to be written.
    """
    indices = _checked_indices(matches, geometry, len(keypoints0), len(keypoints1))
    wide = max(len(keypoints0), len(keypoints1)) > 65536
    parts = [
        indices.astype("<u4" if wide else "<u2").tobytes(),
        np.rint(np.clip(matches.scores, 0, 1) * _SCORE_STEPS).astype("<u2").tobytes(),
        np.packbits(geometry.inliers.astype(bool)).tobytes(),
    ]
    flags = _WIDE if wide else 0
    if geometry.matrix is not None:
        flags |= _MATRIX
        parts.append(np.asarray(geometry.matrix, dtype="<f8").reshape(3, 3).tobytes())
    if geometry.cam1_from_cam0 is not None:
        flags |= _POSE
        parts.append(np.asarray(geometry.cam1_from_cam0, dtype="<f8").reshape(4, 4).tobytes())
    sides = (
        (_REFINED0, matches.points0, keypoints0, indices[:, 0]),
        (_REFINED1, matches.points1, keypoints1, indices[:, 1]),
    )
    for flag, points, keypoints, index in sides:
        points = np.asarray(points, dtype=np.float32)
        differs = np.any(points != keypoints[index], axis=1)
        if differs.any():
            flags |= flag
            parts += [np.packbits(differs).tobytes(), points[differs].astype("<f4").tobytes()]
    kind = get_args(GeometryKind).index(geometry.kind)
    status = get_args(GeometryStatus).index(geometry.status)
    numbers = (len(matches), matches.layers_run, matches.kept0, matches.kept1)
    return b"".join([struct.pack(_HEAD, _VERSION, kind, status, flags, *numbers), *parts])


def _checked_indices(matches: Matches, geometry: TwoViewGeometry, count0: int, count1: int) -> np.ndarray:
    indices = np.asarray(matches.indices, dtype=np.int64).reshape(-1, 2)
    lengths = {len(indices), len(matches.scores), len(geometry.inliers)}
    if lengths | {len(matches.points0), len(matches.points1)} != {len(indices)}:
        raise ValueError("matches, scores, points and inliers differ in number")
    if len(indices) and (indices.min() < 0 or np.any(indices.max(axis=0) >= (count0, count1))):
        raise ValueError("a match refers to a keypoint that the image does not have")
    if not np.isfinite(matches.scores).all():
        raise ValueError("a match has a score that is not finite")
    return indices


def decode_pair(
    data: bytes, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> tuple[Matches, TwoViewGeometry]:
    """The inverse of `encode_pair`.

    Raises:
        DamagedError: the bytes do not make a pair of these images.
    """
    try:
        return _decode_pair(_Cursor(data), keypoints0, keypoints1)
    except (struct.error, ValueError, IndexError) as error:
        raise DamagedError(f"a pair cannot be decoded ({error})") from error


class _Cursor:
    """Reads arrays from bytes one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, struct.calcsize(_HEAD)
        self.head = struct.unpack_from(_HEAD, data)

    def take(self, dtype: str, count: int) -> np.ndarray:
        array = np.frombuffer(self.data, dtype, count, self.place)
        self.place += array.nbytes
        return array

    def bits(self, count: int) -> np.ndarray:
        return np.unpackbits(self.take("u1", -(-count // 8)), count=count).astype(bool)


def _decode_pair(
    cursor: _Cursor, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> tuple[Matches, TwoViewGeometry]:
    version, kind, status, flags, count, layers, kept0, kept1 = cursor.head
    if version != _VERSION:
        raise ValueError(f"version {version}")
    indices = cursor.take("<u4" if flags & _WIDE else "<u2", 2 * count).astype(np.int64).reshape(-1, 2)
    scores = cursor.take("<u2", count).astype(np.float32) / np.float32(_SCORE_STEPS)
    inliers = cursor.bits(count)
    matrix = cursor.take("<f8", 9).astype(np.float64).reshape(3, 3) if flags & _MATRIX else None
    pose = cursor.take("<f8", 16).astype(np.float64).reshape(4, 4) if flags & _POSE else None
    points = [keypoints0[indices[:, 0]], keypoints1[indices[:, 1]]]
    for side, flag in enumerate((_REFINED0, _REFINED1)):
        if flags & flag:
            differs = cursor.bits(count)
            points[side][differs] = cursor.take("<f4", 2 * int(differs.sum())).reshape(-1, 2)
    if cursor.place != len(cursor.data):
        raise ValueError("bytes are left over")
    if not all(np.isfinite(values).all() for values in (*points, matrix, pose) if values is not None):
        raise ValueError("a point or a matrix is not finite")
    matches = Matches(indices, points[0], points[1], scores, layers, kept0, kept1)
    geometry = TwoViewGeometry(
        get_args(GeometryKind)[kind], get_args(GeometryStatus)[status], inliers, matrix, pose
    )
    if geometry.status == "ok" and (matrix is None or (geometry.kind == "essential" and pose is None)):
        raise ValueError("a geometry has no matrix")
    return matches, geometry


# --- schema: The SQLite file of a run: its tables, how it is opened, and what its errors mean to a user.

APPLICATION = 0x4D544352  # "MTCR"
VERSION = 1
WAITING, DONE, FAILED = range(3)  # status of an image
TILE_BITS = 5  # images of a tile: 32, whose features fit in memory together
Check = Callable[[sqlite3.Connection, Path], None]
DAMAGED = "is damaged; restore the run from a copy, or delete it and match again"
_PAGE = 16384  # bytes; rows of 2 to 3 kB leave little of it empty
_WAIT = 30.0  # seconds that a connection waits for another one's lock

# Pairs are appended in the order in which they finish; `waiting` holds what is left, tile by tile, so that
# pairs that share images are matched one after another.
TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE images (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, status INTEGER NOT NULL, reason TEXT NOT NULL DEFAULT '',
  sha256 TEXT NOT NULL DEFAULT '', stamp TEXT NOT NULL DEFAULT '', camera TEXT,
  width INTEGER NOT NULL DEFAULT 0, height INTEGER NOT NULL DEFAULT 0, count INTEGER NOT NULL DEFAULT 0,
  scale_x REAL NOT NULL DEFAULT 1, scale_y REAL NOT NULL DEFAULT 1, exif INTEGER NOT NULL DEFAULT 1,
  kind TEXT NOT NULL DEFAULT ''
);
CREATE TABLE keypoints (image INTEGER PRIMARY KEY, data BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE descriptors (
  image INTEGER PRIMARY KEY, file INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
  crc INTEGER NOT NULL
);
CREATE TABLE pairs (
  id INTEGER PRIMARY KEY, image0 INTEGER NOT NULL, image1 INTEGER NOT NULL, seconds REAL NOT NULL,
  crc INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE UNIQUE INDEX pairs_by_images ON pairs (image0, image1);
CREATE TABLE failed (
  image0 INTEGER NOT NULL, image1 INTEGER NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (image0, image1)
) WITHOUT ROWID;
CREATE TABLE waiting (
  tile0 INTEGER NOT NULL, tile1 INTEGER NOT NULL, image0 INTEGER NOT NULL, image1 INTEGER NOT NULL,
  PRIMARY KEY (tile0, tile1, image0, image1)
) WITHOUT ROWID;
"""


def make(path: Path, meta: dict[str, str]) -> None:
    """Create an empty database at `path`; it gets its name when it is complete.

    Args:
        path: where nothing is yet.
        meta: rows of its first table.
    """
    part = path.with_name(f".{path.name}.part")
    for suffix in ("", "-wal", "-shm", "-journal"):  # of a process that was killed here
        part.with_name(f"{part.name}{suffix}").unlink(missing_ok=True)
    with guarded(path), closing(sqlite3.connect(part, timeout=_WAIT, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        _settle(connection)
        marks = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
        connection.executescript(f"BEGIN; {TABLES} {marks} COMMIT;")
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    part.rename(path)


def open_writing(path: Path, check: Check) -> sqlite3.Connection:
    """The connection that writes and checkpoints an existing store.

    Args:
        path: of the database.
        check: called with the connection before anything is written.
    """
    connection = _opened(path, "rw", check)
    with guarded(path):
        _settle(connection)
    return connection


def open_reading(path: Path, check: Check) -> sqlite3.Connection:
    """A read-only connection; works beside a run, and in a folder that cannot be written.

    Args:
        path: of the database.
        check: called with the connection before anything else is read.
    """
    mode = "ro" if os.access(path.parent, os.W_OK) else "ro&immutable=1"
    log = path.with_name(f"{path.name}-wal")
    if "immutable" in mode and log.is_file() and log.stat().st_size:
        raise UsageError(f"{path} was not closed and its folder cannot be written; copy it to one that can")
    return _opened(path, mode, check)


def _opened(path: Path, mode: str, check: Check) -> sqlite3.Connection:
    with guarded(path):
        connection = sqlite3.connect(_uri(path, mode), uri=True, timeout=_WAIT, isolation_level=None)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            _check(connection, path)
            check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def is_store(path: Path) -> bool:
    """Whether a file may be deleted as a store of ours: it is absent, or its header carries our mark."""
    try:
        with path.open("rb") as file:
            header = file.read(72)
    except FileNotFoundError:
        return True
    return header[68:72] == APPLICATION.to_bytes(4, "big")  # the application_id of SQLite's file format


def _uri(path: Path, mode: str) -> str:
    return f"{path.absolute().as_uri()}?mode={mode}"


def _settle(connection: sqlite3.Connection) -> None:
    # A folder on a network may refuse the write-ahead log; the rollback journal is slower and as safe.
    if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = TRUNCATE")
    connection.execute("PRAGMA synchronous = FULL")  # what is committed has reached the disk


def _check(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION:
        raise IntegrityError(f"{path} is not a store of a matcher run: name another folder")
    if version > VERSION:
        raise IntegrityError(
            f"{path} was written by a newer matcher (store version {version}, this one reads {VERSION}): "
            "update matcher"
        )


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """What does not decode is an `IntegrityError` that names the store and the remedy."""
    try:
        yield
    except DamagedError as error:
        raise IntegrityError(f"{path} {DAMAGED} ({error})") from error


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Translate SQLite's errors.

    Raises:
        IntegrityError: the file is damaged or no database.
        UsageError: it cannot be opened or written, or is held by another process.
        OSError: ENOSPC, the disk is full.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # of a column, or of SQLite's own message about it
        raise IntegrityError(f"{path} {DAMAGED} (text in it is not UTF-8)") from error
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, f"no space; free some, run again ({error})", str(path)) from error
        if (getattr(error, "sqlite_errorcode", None) or 0) == sqlite3.SQLITE_IOERR_WRITE:
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
        # The statements are constant: a table or column that is missing was lost.
        raise IntegrityError(f"{path} {DAMAGED} ({error})") from error


# --- locking: One run at a time per store: a lock that the operating system releases when its holder dies.


class StoreLock:
    """Held from creation until `release`, or until the process ends for any reason.

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
            if (error.sqlite_errorcode & 0xFF) == sqlite3.SQLITE_BUSY:
                raise UsageError(
                    f"{folder} is being written by another run{_holder(folder)}; wait for it to end, or "
                    "name another folder"
                ) from None
            raise UsageError(f"{folder} cannot be written ({error}); name a folder that can") from None
        except BaseException:
            self._connection.close()
            raise
        # For the message alone, so a disk that is full must not stop the run here.
        with suppress(OSError):
            (folder / HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")

    def release(self) -> None:
        """Let others write."""
        self._connection.close()


def _holder(folder: Path) -> str:
    try:
        said = read_given(folder / HOLDER).decode("utf-8", "replace")[:200]
    except OSError:
        return ""
    return f" ({''.join(each if each.isprintable() else '?' for each in said)})"
