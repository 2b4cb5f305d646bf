"""A compiled library is code: it is loaded only where nobody but this user can have put it there."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import warnings
from pathlib import Path

from matcher.files import NotOursError, check_own, open_own

_DESCRIPTORS = Path("/proc/self/fd")


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
        remedy = "; delete it and run `python scripts/build_kernels.py`" * isinstance(error, NotOursError)
        warnings.warn(f"the compiled kernels are not used: {error}{remedy}", UserWarning, stacklevel=2)
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
    with open_own(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        record = _record(path)
        if not record.is_file() or record.read_text(encoding="ascii", errors="replace").strip() != digest:
            raise NotOursError(f"{path} is not what was compiled here")
        check_own(record, record.lstat(), stat.S_ISREG)
        return os.dup(file.fileno())


def _record(path: Path) -> Path:
    return path.with_suffix(".sha256")
