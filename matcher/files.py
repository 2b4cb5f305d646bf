"""Files and folders that appear whole or not at all and spare what is foreign, and the cache folder."""

from __future__ import annotations

import codecs
import errno
import glob
import json
import os
import re
import secrets
import shutil
import stat
import struct
import sys
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from time import time
from typing import Any, BinaryIO, TextIO

from matcher.errors import UsageError

MARK = b"written by matcher"
# How our tables begin, which have no room for a mark. QGIS writes the same header of points, and its numbers
# with other decimals.
_TABLES = re.compile(
    rb"name0,name1,matches,inliers,status,probability(,planar(,repetitive)?)?\n|"
    rb"method,pair,groups,seed,|x0,y0,x1,y1,score,inlier\n|"
    rb"pixel,line,map_x,map_y,residual,score\n|"
    rb"(#CRS: .*\n)?mapX,mapY,sourceX,sourceY,enable,dX,dY,residual\n"
    rb"(-?\d+\.\d{10},){4}1(,-?\d+\.\d{10}){3}\n"
)
LARGEST_TEXT = 1 << 28  # bytes of a list, of poses or of a description that somebody made


def temporary_name(path: Path) -> Path:
    """A hidden name in the same folder that nothing has."""
    return path.absolute().with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.part")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path for what is to be at `path`, so that no reader ever sees half a file: where the
    block ends well, it reaches the disk and takes the name in one step; else the old file stays as it was."""
    part = temporary_name(path)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        for end in ("", "-wal", "-shm", "-journal"):  # a database has logs
            part.with_name(part.name + end).unlink(missing_ok=True)


def write_whole(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`, replacing what was there; as `whole_file`."""
    with whole_file(Path(path)) as part, part.open("xb") as file:
        file.write(data)


def write_output(path: str | Path, data: bytes) -> None:
    """As `write_whole`, with our mark in the formats that have room for one."""
    write_whole(path, _marked(data, Path(path).suffix.lower()))


def check_output(path: str | Path, suffixes: Sequence[str], *, overwrite: bool = True) -> Path:
    """The path of an output of one of some suffixes, such as ".json"; `UsageError`: it cannot be written, or
    is a file that must not be replaced (see `refuse_foreign`; every command passes False unless allowed)."""
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{path}: the name of this output must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    _check_parent(path)
    refuse_foreign(path, overwrite=overwrite)
    return path


def _check_parent(path: Path) -> None:
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{path}: there is no folder {parent}; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: the folder {parent} cannot be written")


def refuse_foreign(path: Path, *, overwrite: bool) -> None:
    """Refuse, by `UsageError`, to replace a file without our mark, unless `overwrite` allows it."""
    if not overwrite and (path.exists() or path.is_symlink()) and not is_ours(path):
        raise UsageError(
            f"{path} exists, and matcher may not have written it; name another file, or replace it with "
            "overwrite=True"
        )


def is_ours(path: Path) -> bool:
    """Whether a file carries the mark that `write_output` leaves, or begins as our tables do; False where it
    cannot be read."""
    try:
        with open_given(path) as file:
            start = file.read(4096)
            file.seek(max(0, path.stat().st_size - 4096))
            return MARK in start or MARK in file.read(4096) or _TABLES.match(start) is not None
    except OSError:
        return False


def _marked(data: bytes, suffix: str) -> bytes:
    """The bytes of a file with our mark in a comment of its format, or in a member of a JSON object; without
    it where there is room for none."""
    if suffix in (".html", ".svg", ".md"):
        return data + b"\n<!-- " + MARK + b" -->\n"
    if suffix == ".pdf":
        return data + b"%" + MARK + b"\n"
    if suffix == ".txt":
        return data + b"# " + MARK + b"\n"
    if data[:4] in (b"II*\0", b"MM\0*"):  # a TIFF, of which readers see what its offsets lead to
        return data + MARK
    if suffix == ".json" and data[:1] == b"{" and data[1:].strip() != b"}":
        return b'{"software": "' + MARK + b'",' + data[1:]
    if suffix == ".png" and data[-8:-4] == b"IEND":
        text = b"tEXtComment\0" + MARK
        chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
        return data[:-12] + chunk + data[-12:]
    if suffix in (".jpg", ".jpeg") and data[:4] == b"\xff\xd8\xff\xe0":
        behind_header = 4 + int.from_bytes(data[4:6], "big")
        comment = b"\xff\xfe" + struct.pack(">H", len(MARK) + 2) + MARK
        return data[:behind_header] + comment + data[behind_header:]
    if suffix == ".npz" and data[-22:-18] == b"PK\5\6":  # a zip archive that has no comment yet
        return data[:-2] + struct.pack("<H", len(MARK)) + MARK
    return data


def add_mark(path: Path) -> None:
    """Put our mark behind a file whose readers do not look there, such as a TIFF."""
    with path.open("ab") as file:
        file.write(MARK)


def open_given(path: str | Path) -> BinaryIO:
    """Open a file that anybody may have made, to read: no pipe is waited for, and no device read; `OSError`:
    it is absent, cannot be read, or is a folder, pipe or device."""

    def check(status: os.stat_result) -> None:
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a file, but a pipe or device", str(path))

    return _opened(path, check)


def _opened(path: str | Path, check: Callable[[os.stat_result], None], more: int = 0) -> BinaryIO:
    """A file, open to read, unless the check raises; what was checked is what is opened."""
    flags = ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")  # no pipe is waited for
    descriptor = os.open(path, sum((getattr(os, name, 0) for name in flags), os.O_RDONLY | more))
    try:
        check(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_given(path: str | Path, largest: int = LARGEST_TEXT) -> bytes:
    """The bytes of a file that anybody may have made; `OSError`: as `open_given`, or it is larger."""
    with open_given(path) as file:
        if os.fstat(file.fileno()).st_size > largest:
            raise OSError(errno.EFBIG, f"larger than {largest >> 10:,} kB", str(path))
        return file.read()


def _encoding(start: bytes) -> str:
    # Editors and spreadsheets of Windows begin with a byte order mark; PowerShell's `>` writes UTF-16.
    wide = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if wide else "utf-8-sig"


def read_text(path: str | Path, largest: int = LARGEST_TEXT) -> str:
    """The text of a file that anybody may have made, UTF-8 or, with a byte order mark, UTF-16; `OSError`: as
    `read_given`, `UnicodeDecodeError`: it is neither."""
    data = read_given(path, largest)
    return data.decode(_encoding(data))


def open_text(path: str | Path) -> TextIO:
    """Open such a file of any length; of UTF-8, bytes that are none become surrogates, as in names of files;
    `OSError`: as `open_given`."""
    file = open_given(path)
    encoding = _encoding(file.peek(2))
    return TextIOWrapper(file, encoding, "replace" if encoding == "utf-16" else "surrogateescape")


def read_toml(path: str | Path) -> dict[str, Any]:
    """What a TOML file of at most 32 kB holds; `UsageError`: it cannot be read, or is no TOML."""
    try:
        # The time that TOML takes grows with the square of its length.
        return tomllib.loads(read_text(path, 32 * 1024))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a TOML file ({error})") from None


def cache_folder() -> Path:
    """The user's cache: MATCHER_CACHE, else the platform's own place (XDG_CACHE_HOME on Linux)."""
    if named := os.environ.get("MATCHER_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "matcher" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "matcher"
    # The XDG specification tells programs to ignore relative paths.
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "matcher"


_WRITTEN = ".matcher-files.json"  # names of the files that we wrote into a folder


@contextmanager
def whole_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, absent or empty, that takes its name when the block ends well.
    With `overwrite` it may hold files: what an earlier export wrote there is deleted, files of the same name
    as a new one are replaced, and all others stay."""
    check_folder(path, overwrite=overwrite)
    # What programs that were killed left of this folder goes; what another one is writing stays.
    for part in path.absolute().parent.glob(f".{glob.escape(path.name[:80])}.{'[0-9a-f]' * 8}.part"):
        with suppress(OSError, ImportError):
            old = part.is_dir() and not part.is_symlink() and part.stat().st_mtime < time() - 10
            if old:  # else another program may not have locked it yet
                os.close(_hold(part))
                shutil.rmtree(part, ignore_errors=True)
    part, held = temporary_name(path), None
    part.mkdir()
    with suppress(OSError, ImportError):  # this disk or system has no locks
        held = _hold(part)
    try:
        yield part
        names = sorted(file.relative_to(part).as_posix() for file in part.rglob("*") if file.is_file())
        (part / _WRITTEN).write_text(json.dumps(names), encoding="utf-8")
        if not path.exists() or not any(path.iterdir()):
            if path.exists():
                path.rmdir()
            part.replace(path)
            return

        def through_link(name: str) -> bool:
            return any((path / way).is_symlink() for way in Path(name).parents[:-1])

        if through := next(filter(through_link, names), None):
            raise UsageError(f"{path / through}: there is a link on the way; name another folder")
        before: object = None  # the files of an earlier export
        with suppress(OSError, ValueError, RecursionError):
            before = json.loads(read_given(path / _WRITTEN).decode("utf-8"))
        for old in before if isinstance(before, list) else []:
            inside = isinstance(old, str) and not Path(old).is_absolute() and ".." not in Path(old).parts
            if inside and old not in names and not through_link(old) and (path / old).is_file():
                (path / old).unlink()
        for name in (*names, _WRITTEN):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).replace(path / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if held is not None:
            os.close(held)


def _hold(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed or the program ends; `OSError`: another has."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_folder(path: Path, *, overwrite: bool = False) -> None:
    """Before any work, the errors of `whole_folder`."""
    _check_parent(path)
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{path} is a link to nothing; name another folder")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise UsageError(
            f"{path} exists and is not an empty folder; name another, or write into it with overwrite=True "
            "(files of the same names are replaced, others stay)"
        )


# Files in the cache that are run or trusted.


class NotOursError(Exception):
    """A file in the cache that somebody else may have put there; the message says what is wrong."""


def make_private(folder: Path) -> None:
    """Make a folder that nobody else can write; `OSError`: it cannot be made, or belongs to somebody else."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)


def open_own(path: Path) -> BinaryIO:
    """Open a file to read, if nobody but this user or root can have put it there; else `NotOursError`."""

    def check(status: os.stat_result) -> None:
        check_own(path.parent, path.parent.lstat(), stat.S_ISDIR)
        check_own(path, status, stat.S_ISREG)

    return _opened(path, check, getattr(os, "O_NOFOLLOW", 0))


def check_own(path: Path, status: os.stat_result, kind: Callable[[int], bool]) -> None:
    """Refuse, by `NotOursError`, what is of another kind (of `stat`), as a link or a pipe, of another user,
    or writable by others."""
    if not kind(status.st_mode):
        what = "a link" if stat.S_ISLNK(status.st_mode) else "a pipe, a device or a folder"
        raise NotOursError(f"{path} is {what}")
    if not hasattr(os, "geteuid"):
        return  # without POSIX rights
    if status.st_uid not in (os.geteuid(), 0):
        raise NotOursError(f"{path} belongs to somebody else")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotOursError(f"{path} can be written by others")
