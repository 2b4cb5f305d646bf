"""The SQLite file of a run: its tables, how it is opened, and what its errors mean to a user.

In WAL mode exactly one connection may write and checkpoint: libraries before SQLite 3.51.3 can lose a
transaction where one connection writes while another one checkpoints (sqlite.org/wal.html, "The WAL-Reset
Bug"). The lock of `locking.py` keeps a second writer out; readers are opened read-only and never checkpoint.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from matcher.collection.encoding import DamagedError
from matcher.collection.run_files import DATABASE as DATABASE
from matcher.errors import IntegrityError, UsageError

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
