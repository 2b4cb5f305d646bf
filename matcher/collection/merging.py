"""Joins the stores of the parts (shards) of a collection into one, by image name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from matcher.collection import schema
from matcher.collection.descriptors import RecordLocation, read_record
from matcher.collection.schema import DONE, TILE_BITS
from matcher.collection.settings import refuse_changes
from matcher.collection.store import Store
from matcher.collection.writer import EncodedPair, Writer
from matcher.errors import IntegrityError, UsageError

_SAME = "Only runs with the same settings can be joined"
_ROWS = 2048  # pairs of a transaction
_COLUMNS = "status, reason, sha256, stamp, camera, width, height, count, scale_x, scale_y, exif, kind"


def merge(
    runs: Sequence[Path], into: Path, *, descriptors: bool = False, on_report: Callable[[str], None]
) -> None:
    """Add the contents of `runs` to `into`, which is created if missing.

    A finished pair replaces a failed one, and that replaces a waiting one. If two runs found different
    keypoints in an image (on machines that round differently), the first run's are kept, and the other run's
    pairs with this image are matched again.

    Args:
        runs: folders of stores with the same settings, parts apart.
        into: folder of the store to create or to add to.
        descriptors: also copy descriptors; only further pairs need them.
        on_report: called with a line about each run.

    Raises:
        UsageError: settings differ, an image's content differs, `into` is one of the runs, or is in use.
        IntegrityError: a store is damaged.
    """
    if any(os.path.realpath(run) == os.path.realpath(into) for run in runs):
        raise UsageError(f"{into} is one of the runs to join; join them into another folder")
    with ExitStack() as stack:
        stores = [stack.enter_context(Store.open(run)) for run in runs]
        wanted = {**stores[0].settings, "shard": None}
        for store in stores:
            refuse_changes(store.folder, {**store.settings, "shard": None}, wanted, _SAME)
        there = [stack.enter_context(Store.open(into))] if (into / schema.DATABASE).exists() else []
        _refuse_changed_images([*there, *stores])
        if not there:
            Store.create(into, wanted, stores[0].image_folder).close()
        writer = stack.enter_context(Writer(into))
        refuse_changes(into, writer.store.settings, wanted, _SAME)
        with writer.transaction():
            writer.add_images(sorted({name for store in stores for name in store.names().values()}))
        for store in stores:
            _StoreMerge(writer, store, descriptors).run(on_report)


def _refuse_changed_images(stores: Sequence[Store]) -> None:
    """Checked before anything is written, so that no partial merge is left."""
    seen: dict[str, tuple[str, Path]] = {}
    for store in stores:
        for name, digest in store.rows("SELECT name, sha256 FROM images WHERE status = ?", DONE):
            first, folder = seen.setdefault(name, (digest, store.folder))
            if first != digest:
                raise UsageError(
                    f"{name} is one image in {folder} and another in {store.folder}: do the older run "
                    "again (`matcher collection IMAGES --run …`), then join them"
                )


class _StoreMerge:
    """Copies one store into another."""

    def __init__(self, writer: Writer, store: Store, descriptors: bool) -> None:
        self._writer, self._store, self._copy = writer, store, descriptors
        ours = {name: number for number, name in writer.store.names().items()}
        self._numbers = {number: ours[name] for number, name in store.names().items()}
        self._other: set[int] = set()  # images of the store, by its numbers, with other keypoints than ours

    def run(self, on_report: Callable[[str], None]) -> None:
        names = self._store.names()
        for numbers in _groups(iter(sorted(names))):
            with self._writer.transaction():
                for number in numbers:
                    self._join_image(number, names[number])
        pairs = sum(self._join_pairs(rows) for rows in _groups(self._rows("pairs", "seconds, crc, data")))
        for rows in _groups(self._rows("failed", "reason")):
            with self._writer.transaction():
                self._writer.fail_pairs(row for row in self._mapped(rows) if not self._known("pairs", row))
        for rows in _groups(self._rows("waiting", "NULL")):
            self._let_wait(self._mapped(rows))
        differing = f"; keypoints of {len(self._other)} images differ" if self._other else ""
        on_report(f"{self._store.folder}: {pairs} pairs joined{differing}")

    def _join_image(self, number: int, name: str) -> None:
        writer, target = self._writer, self._numbers[number]
        row = next(self._store.rows(f"SELECT {_COLUMNS} FROM images WHERE id = ?", number))
        ours = writer.execute(f"SELECT {_COLUMNS} FROM images WHERE id = ?", (target,))[0]
        if row[0] != DONE:
            if ours[0] != DONE and row[0] > ours[0]:
                self._set_image(target, row)
            return
        data, crc = next(self._store.rows("SELECT data, crc FROM keypoints WHERE image = ?", number))
        self._store.keypoints(name)  # raises where they are damaged
        if ours[0] == DONE:
            if writer.execute("SELECT crc FROM keypoints WHERE image = ?", (target,)) != [(crc,)]:
                self._other.add(number)
            return
        self._set_image(target, row)
        writer.execute("REPLACE INTO keypoints VALUES (?, ?, ?)", (target, data, crc))
        if self._copy:
            self._join_descriptors(number, target, name)

    def _set_image(self, target: int, row: tuple[Any, ...]) -> None:
        marks = ", ".join("?" * len(row))
        self._writer.execute(f"UPDATE images SET ({_COLUMNS}) = ({marks}) WHERE id = ?", (*row, target))

    def _join_descriptors(self, number: int, target: int, name: str) -> None:
        sql = "SELECT file, start, length, crc FROM descriptors WHERE image = ?"
        for place in self._store.rows(sql, number):
            try:
                self._writer.put_descriptors(target, read_record(self._store.folder, RecordLocation(*place)))
            except FileNotFoundError:
                return  # deleted on purpose
            except ValueError as error:
                raise IntegrityError(f"{self._store.folder}: the descriptors of {name}: {error}") from error

    def _join_pairs(self, rows: Sequence[tuple[Any, ...]]) -> int:
        """Copy finished pairs; those whose keypoints are not ours wait."""
        foreign = [row for row in rows if self._other & {row[0], row[1]}]
        kept = [EncodedPair(*row) for row in self._mapped(row for row in rows if row not in foreign)]
        new = [pair for pair in kept if not self._known("pairs", pair)]
        with self._writer.transaction():
            self._writer.put_pairs(new)
            self._writer.execute_many(
                "DELETE FROM failed WHERE image0 = ? AND image1 = ?", [(p.image0, p.image1) for p in new]
            )
        self._let_wait(self._mapped(foreign))
        return len(new)

    def _let_wait(self, rows: Iterator[tuple[Any, ...]]) -> None:
        free = [row[:2] for row in rows if not (self._known("pairs", row) or self._known("failed", row))]
        sql = "INSERT OR IGNORE INTO waiting VALUES (?, ?, ?, ?)"
        with self._writer.transaction():
            self._writer.execute_many(sql, [(a >> TILE_BITS, b >> TILE_BITS, a, b) for a, b in free])

    def _known(self, table: str, pair: Sequence[Any]) -> bool:
        sql = f"SELECT 1 FROM {table} WHERE image0 = ? AND image1 = ?"
        return bool(self._writer.execute(sql, pair[:2]))

    def _rows(self, table: str, columns: str) -> Iterator[tuple[Any, ...]]:
        return self._store.rows(f"SELECT image0, image1, {columns} FROM {table} ORDER BY image0, image1")

    def _mapped(self, rows: Any) -> Iterator[tuple[Any, ...]]:
        return ((self._numbers[row[0]], self._numbers[row[1]], *row[2:]) for row in rows)


def _groups(rows: Iterator[Any]) -> Iterator[list[Any]]:
    while group := list(islice(rows, _ROWS)):
        yield group
