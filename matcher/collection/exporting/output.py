"""Outputs that appear whole or not at all, and what an export tells of itself."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from matcher.errors import UsageError


@dataclass
class ExportReport:
    """What an export wrote, and what it had to leave out."""

    path: Path
    images: int = 0
    keypoints: int = 0
    pairs: int = 0
    verified: int = 0  # pairs with a geometry
    matches: int = 0
    given_cameras: list[int] = field(default_factory=list)  # numbers of those that are not to be refined
    left_out: list[str] = field(default_factory=list)  # what is damaged or cannot be said in the format
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report for people."""
        first = (
            f"{self.images} images with {self.keypoints} keypoints, {self.pairs} pairs "
            f"({self.verified} verified) with {self.matches} matches"
        )
        return [first, *self.notes, *(f"left out: {reason}" for reason in self.left_out)]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file's name beside `path`; what is written there takes the name when the block ends well.

    Raises:
        UsageError: the folder is absent or cannot be written, or `path` is a folder.
        OSError: the disk is full.
    """
    check_place(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    part = _part(path)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        for leftover in (part, *(part.with_name(part.name + end) for end in ("-wal", "-shm", "-journal"))):
            leftover.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when the block ends well; errors as `whole_file`.

    Raises:
        UsageError: `path` exists and is not an empty folder.
    """
    check_place(path)
    check_empty(path)
    part = _part(path)
    try:
        part.mkdir()
        yield part
        if path.exists():
            path.rmdir()
        part.replace(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_place(path: Path) -> None:
    """Refuse, before any work, an output whose folder is absent or cannot be written.

    Raises:
        UsageError: it is so.
    """
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{path}: there is no folder {parent}; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: the folder {parent} cannot be written")


def check_empty(path: Path) -> None:
    """Refuse, before any work, a folder that holds something.

    Raises:
        UsageError: it does, or `path` is a file.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists and is not an empty folder; name another, or delete it")


def _part(path: Path) -> Path:
    return path.absolute().with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.part")
