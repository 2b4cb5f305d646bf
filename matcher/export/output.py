"""Folders that appear completely or not at all and replace nothing unasked; what exporters read of a run."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

import numpy as np

from matcher.collection.schema import common_camera
from matcher.collection.tracks import contradicted_pairs
from matcher.errors import IntegrityError, UsageError
from matcher.files import read_given, temporary_name

if TYPE_CHECKING:
    from matcher.collection.schema import StoredImage, StoredPair
    from matcher.collection.store import Store
    from matcher.types import Features

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
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{path}: there is no folder {parent}; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: the folder {parent} cannot be written")
    if path.is_symlink() and not path.exists():
        raise UsageError(f"{path} is a link to nothing; name another folder")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise UsageError(
            f"{path} exists and is not an empty folder; name another, or write into it with overwrite=True "
            "(files of the same names are replaced, others stay)"
        )


# What every exporter reads of a run, and says of it.


@dataclass
class ExportReport:
    """What an export wrote, and what it had to leave out."""

    path: Path
    images: int = 0
    keypoints: int = 0
    pairs: int = 0
    verified: int = 0  # pairs with a geometry
    matches: int = 0
    given_cameras: list[int] = field(default_factory=list)  # numbers of those that must not be refined
    cameras: int = 0
    guessed_cameras: int = 0  # photos of which nothing says the focal length
    left_out: list[str] = field(default_factory=list)  # what is damaged, or what the format cannot hold
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report, ready to print."""
        first = (
            f"{self.images} images with {self.keypoints} keypoints, {self.pairs} pairs "
            f"({self.verified} verified) with {self.matches} matches"
        )
        return [first, *self.notes, *(f"left out: {reason}" for reason in self.left_out)]


class ExportedRun:
    """The images of a run that have features, by name, with their keypoints, features and pairs; the report
    counts what is read, and names what is left out."""

    def __init__(
        self, store: Store, out: Path, *, utf8: str | None = None, only: Collection[str] | None = None
    ) -> None:
        """Of `only` images of these names; `UsageError`: none has features, or names are not UTF-8 where the
        format, named by `utf8`, needs it."""
        self.store, self.report, common = store, ExportReport(out), common_camera(store.settings)
        images = sorted(store.images(), key=lambda image: image.name)
        images = [image for image in images if only is None or image.name in only]
        for status in ("failed", "waiting"):
            if names := [image.name for image in images if image.status == status]:
                note = f"{len(names)} images {status} in the run are not written: {_few(names)}"
                self.report.notes.append(note)
        self.images: list[StoredImage] = [
            replace(image, camera=image.camera or common) for image in images if image.status == "done"
        ]
        self.names = [image.name for image in self.images]
        if not self.images:
            raise UsageError(
                "the run has no image with features; finish it first: `matcher collection … --run …`"
            )
        if utf8 is not None:
            self.refuse_names(
                lambda name: re.search("[\ud800-\udfff]", name), f"are not UTF-8, which {utf8} needs"
            )
        self.report.images, self.report.keypoints = len(self.images), sum(each.count for each in self.images)

    def keypoints(self, name: str) -> np.ndarray:
        """(N, 2) float32 in stored pixels; refined ones if the run was refined."""
        refined = self.store.refined_keypoints(name)
        points = self.store.keypoints(name) if refined is None else refined.keypoints
        return np.ascontiguousarray(points, dtype=np.float32)

    def features(self, name: str) -> Features | None:
        """An image's features; None, noted once, where descriptors were deleted."""
        try:
            return self.store.features(name)
        except IntegrityError as error:
            if not any(known.startswith("without descriptors") for known in self.report.notes):
                self.report.notes.append(f"without descriptors: {error}")
            return None

    def pairs(self, without: Collection[tuple[str, str]] = ()) -> Iterator[StoredPair]:
        """The pairs of those images, with name0 before name1, but for those `without`, those that others
        contradict, and, as programs that read them would crash, those in which a keypoint is matched
        twice."""
        known, contradicted = set(self.names), contradicted_pairs(self.store, without)
        self.report.left_out += [f"the pair {a} {b}: other pairs contradict it" for a, b in contradicted]
        without = {*without, *contradicted}
        for pair in self.store.pairs():
            ends = (pair.name0, pair.name1)
            if not known.issuperset(ends) or ends in without:
                continue
            if any(len(np.unique(column)) != len(column) for column in pair.matches.indices.T):
                self.report.left_out.append(f"the pair {' '.join(ends)}: a keypoint is matched twice")
                continue
            self.report.pairs += 1
            self.report.matches += len(pair.matches)
            self.report.verified += pair.geometry.verified
            yield pair

    def refuse_names(self, bad: Callable[[str], object], reason: str) -> None:
        """Refuse an export whose format cannot hold some of the names (`UsageError`)."""
        if found := [name for name in self.names if bad(name)]:
            raise UsageError(f"{len(found)} names {reason}; rename them: {_few(found)}")

    def refuse_collisions(self, key: Callable[[str], str], reason: str) -> None:
        """Refuse an export whose format would give one key to several names (`UsageError`)."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(key(name), []).append(name)
        if found := [" = ".join(group) for group in groups.values() if len(group) > 1]:
            raise UsageError(f"{len(found)} groups of names become one {reason}; rename them: {_few(found)}")


def _few(names: Sequence[str]) -> str:
    shown = [name.encode("utf-8", "backslashreplace").decode() for name in names[:5]]
    return ", ".join(shown) + (", …" if len(names) > 5 else "")
