"""A folder of numbered files of arrays, each written whole; several processes may fill or read it at once."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from matcher.errors import IntegrityError

ABANDONED_AFTER = 3600.0  # seconds after which an unfinished file belongs to no running process


class CacheFolder:
    """Files `000000.npz`, `000001.npz`, … in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        """The file of a number."""
        return self.folder / f"{number:06d}.npz"

    def ready(self) -> list[int]:
        """The numbers of the files written so far."""
        return sorted(int(path.stem) for path in self.folder.glob("??????.npz"))

    def write(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a file, whole or not at all.

        Raises:
            OSError: the disk is full.
        """
        temporary = self.folder / f".{number:06d}.{os.getpid()}.npz"
        try:
            np.savez(temporary, **arrays)
            temporary.replace(self.path(number))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @contextmanager
    def opened(self, number: int) -> Iterator[Mapping[str, np.ndarray]]:
        """The arrays of a file, within a `with` block.

        Raises:
            IntegrityError: the file is absent or damaged.
        """
        path = self.path(number)
        try:
            with np.load(path, allow_pickle=False) as stored:
                yield stored
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise IntegrityError(f"{path} is damaged ({error}): delete it, it will be made again") from error

    def remove_unfinished(self) -> None:
        """Delete what killed processes left unfinished."""
        for leftover in self.folder.glob(".*.npz"):
            if time.time() - leftover.stat().st_mtime > ABANDONED_AFTER:
                leftover.unlink(missing_ok=True)
