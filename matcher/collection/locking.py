"""One run at a time per store: a lock that the operating system releases when its holder dies."""

from __future__ import annotations

import os
import socket
import sqlite3
from contextlib import suppress
from pathlib import Path

from matcher.collection.run_files import HOLDER, LOCK, check_files
from matcher.errors import UsageError
from matcher.files import read_given


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
