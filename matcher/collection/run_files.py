"""The files of a run's folder, which may come from anybody: each is a file of its own, or absent.

SQLite follows links, and writes and deletes what a rollback journal names; a pipe would keep a reader waiting
for ever. So the folder is looked at before anything in it is opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from matcher.errors import IntegrityError

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
