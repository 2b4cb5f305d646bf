"""A compiled library is code: it is loaded only where nobody but this user can have put it there."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import warnings
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DESCRIPTORS = Path("/proc/self/fd")


class NotOursError(Exception):
    """A library that somebody else may have put there; the message says what is wrong and what helps."""


def keep(made: Path, path: Path) -> None:
    """Move a library that was just compiled to `path`, whose folder is only this user's, with its checksum.

    Raises:
        OSError: it cannot be kept there.
    """
    made.chmod(0o644)
    digest = made.with_name(_record(path).name)
    digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
    digest.chmod(0o644)
    digest.replace(_record(path))
    made.replace(path)


def make_private(folder: Path) -> None:
    """Make a folder that nobody else can write.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)


def load(path: Path) -> ctypes.CDLL | None:
    """The library that `keep` left at `path`; None, with a warning where there is one, if it cannot be used.

    Folder, library and checksum must belong to this user or to root, be no links, and be writable by nobody
    else; the bytes must be those that were compiled. The file that was checked is the file that is loaded.
    """
    try:
        descriptor = _open_checked(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (NotOursError, OSError) as error:
        warnings.warn(f"the compiled kernels are not used: {error}", UserWarning, stacklevel=2)
        return None
    try:
        # By descriptor, so that no other file can take the name in between. It stays open: the loader knows
        # libraries by their names, and the number must not come to name another one.
        return ctypes.CDLL(str(_DESCRIPTORS / str(descriptor) if _DESCRIPTORS.is_dir() else path))
    except OSError:  # made for another system, or files may not be executed there
        os.close(descriptor)
        return None


def _open_checked(path: Path) -> int:
    """An open descriptor of a library that is ours."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        _check(path.parent, path.parent.lstat(), stat.S_ISDIR)
        _check(path, os.fstat(descriptor), stat.S_ISREG)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        record = _record(path)
        if not record.is_file() or record.read_text(encoding="ascii", errors="replace").strip() != digest:
            raise NotOursError(f"{path} is not what was compiled here; {_REMEDY}")
        _check(record, record.lstat(), stat.S_ISREG)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_REMEDY = "delete it and run `python scripts/build_kernels.py`"


def _check(path: Path, status: os.stat_result, kind: object) -> None:
    if not kind(status.st_mode):
        raise NotOursError(f"{path} is a link; {_REMEDY}")
    if not hasattr(os, "geteuid"):
        return  # without POSIX rights
    if status.st_uid not in (os.geteuid(), 0):
        raise NotOursError(f"{path} belongs to somebody else; {_REMEDY}")
    if status.st_mode & _OTHERS_WRITE:
        raise NotOursError(f"{path} can be written by others; {_REMEDY}")


def _record(path: Path) -> Path:
    return path.with_suffix(".sha256")
