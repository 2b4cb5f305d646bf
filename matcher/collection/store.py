"""Reading a run's store: images, keypoints, features and finished pairs, each checked.

A store is a folder: `run.db` (SQLite), and descriptor files that may be deleted after matching. It may be
read while a run writes it. `writer.py` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from sqlite3 import Connection
from types import TracebackType
from typing import Any

import numpy as np

from matcher.collection import schema
from matcher.collection.descriptors import RecordLocation, decode_features, file_path, read_record
from matcher.collection.encoding import (
    DamagedError,
    check,
    decode_camera,
    decode_keypoints,
    decode_pair,
    parse_json,
    to_json,
)
from matcher.collection.locking import StoreLock
from matcher.collection.pair_choice import PairChoice
from matcher.collection.records import Counts, FailedPair, Status, StoredImage, StoredPair
from matcher.collection.refined_keypoints import RefinedKeypoints, read_refined
from matcher.collection.run_files import check_files
from matcher.collection.run_folder import check_writable
from matcher.collection.store_check import bounded, check_settings, check_store, find_damage, one_line
from matcher.data.features import Features
from matcher.errors import IntegrityError, UsageError

STATUSES: tuple[Status, ...] = ("waiting", "done", "failed")  # by their number in the database
_CACHED_KEYPOINTS = 1024  # images
_PAIR = "image0, image1, seconds, crc, data"
_IMAGE = "name, sha256, width, height, count, camera, status, reason"


class Store:
    """A run on disk. Every method raises `IntegrityError` if the store is damaged."""

    def __init__(self, folder: Path, connection: Connection) -> None:
        self.folder = folder
        self._connection = connection
        self._path = folder / schema.DATABASE
        self._refined: dict[str, RefinedKeypoints] | None = None
        self._keypoints = lru_cache(_CACHED_KEYPOINTS)(self._read_keypoints)

    @classmethod
    def create(
        cls, run_dir: str | Path, settings: dict[str, Any], image_folder: str | Path | None = None
    ) -> Store:
        """Create an empty store.

        Args:
            run_dir: the folder, created if missing.
            settings: what the results depend on, ready for `json.dumps`.
            image_folder: where the images are; the current folder when absent.

        Raises:
            UsageError: there is a store already, or the folder cannot be written.
        """
        folder = Path(run_dir)
        check_writable(folder)
        lock = StoreLock(folder)
        try:
            path = folder / schema.DATABASE
            if path.exists():
                raise UsageError(f"{folder} holds a run already; open it, or name another folder")
            rows = {"settings": to_json(settings)}
            rows["image_folder"] = str(Path(image_folder or ".").absolute())
            schema.make(path, rows)
        finally:
            lock.release()
        return cls.open(folder)

    @classmethod
    def create_if_absent(cls, run_dir: Path, settings: dict[str, Any], image_folder: str | Path) -> None:
        """A new, empty store where there is none; errors as of `create`."""
        if not (run_dir / schema.DATABASE).exists():
            cls.create(run_dir, settings, image_folder).close()

    @classmethod
    def open(cls, run_dir: str | Path) -> Store:
        """A store that exists, for reading.

        Raises:
            UsageError: there is none.
            IntegrityError: it is damaged, or was written by a newer matcher.
        """
        folder = Path(run_dir)
        path = folder / schema.DATABASE
        check_files(folder)
        if not path.is_file():
            raise UsageError(
                f"{folder} holds no run; create one with `matcher collection IMAGES --run {folder}`"
            )
        return cls(folder, schema.open_reading(path, check_store))

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on: preset, weights, configuration."""
        with schema.undamaged(self._path):
            return check_settings(parse_json(self._meta("settings"), "its settings"))

    @property
    def image_folder(self) -> Path:
        """Where the images were when the run was last started."""
        return Path(self._meta("image_folder"))

    @property
    def pair_choice(self) -> PairChoice | None:
        """How the run's pairs were chosen; None before there are any."""
        rows = list(self.rows("SELECT value FROM meta WHERE key = 'pair_choice'"))
        with schema.undamaged(self._path):
            return PairChoice.from_json(rows[0][0]) if rows else None

    def unpaired(self) -> int:
        """The number of images without a pair, except those that failed or have no keypoints."""
        ends = " UNION ".join(
            f"SELECT image{end} FROM {table}" for table in ("pairs", "failed", "waiting") for end in (0, 1)
        )
        usable = "(status = 0 OR status = 1 AND count > 0)"
        return next(self.rows(f"SELECT count(*) FROM images WHERE {usable} AND id NOT IN ({ends})"))[0]

    def images(self) -> list[StoredImage]:
        """All images, by name."""
        folder = self.image_folder
        rows = self.rows(f"SELECT {_IMAGE} FROM images ORDER BY name")
        with schema.undamaged(self._path):
            return [_image(row, folder) for row in rows]

    def image(self, name: str) -> StoredImage:
        """One image.

        Raises:
            UsageError: the run has none of that name.
        """
        rows = list(self.rows(f"SELECT {_IMAGE} FROM images WHERE name = ?", name))
        if not rows:
            raise UsageError(f"the run {self.folder} has no image {name!r}")
        with schema.undamaged(self._path):
            return _image(rows[0], self.image_folder)

    def keypoints(self, name: str) -> np.ndarray:
        """(N, 2) float32 stored pixels, the centre of the first pixel being (0, 0).

        Raises:
            UsageError: the image is not in the run, or has no keypoints (yet).
        """
        return self._keypoints(self._done(name)[0])

    def refined_keypoints(self, name: str) -> RefinedKeypoints | None:
        """Keypoints with their positions refined track by track, None where the run was not refined."""
        if self._refined is None:
            self._refined = read_refined(self.folder, {i.name: i.count for i in self.images()})
        return self._refined.get(name)

    def scale(self, name: str) -> tuple[float, float]:
        """(sx, sy), the size in which keypoints were found / stored size, along the stored axes."""
        return self._done(name)[1]["scale"]

    def features(self, name: str) -> Features:
        """Keypoints and descriptors, as the matcher was given them.

        Raises:
            UsageError: the image is not in the run, or has no keypoints (yet).
            IntegrityError: the file of its descriptors was deleted; the message names the remedy.
        """
        number, facts = self._done(name)
        sql = "SELECT file, start, length, crc FROM descriptors WHERE image = ?"
        place = next((RecordLocation(*row) for row in self.rows(sql, number)), None)
        try:
            if place is None:
                raise FileNotFoundError
            with schema.undamaged(self._path):
                return decode_features(read_record(self.folder, place), self._keypoints(number), **facts)
        except FileNotFoundError:
            lost = self._path if place is None else file_path(self.folder, place.file)
            raise IntegrityError(
                f"{lost} no longer holds the descriptors of {name}: `matcher collection {self.image_folder} "
                f"--run {self.folder} --descriptors` extracts them again"
            ) from None

    def pairs(self) -> Iterator[StoredPair]:
        """Finished pairs, one after another, in an order that does not depend on when they were finished."""
        names = self.names()
        for row in self.rows(f"SELECT {_PAIR} FROM pairs ORDER BY image0, image1"):
            yield self._pair(names, row)

    def pair(self, name0: str, name1: str) -> StoredPair:
        """One finished pair, given in either order of its images.

        Raises:
            UsageError: the run has no such image, or the pair is not finished.
        """
        numbers = sorted(self._number(name) for name in (name0, name1))
        rows = list(self.rows(f"SELECT {_PAIR} FROM pairs WHERE image0 = ? AND image1 = ?", *numbers))
        if not rows:
            numbers.reverse()
            rows = list(self.rows(f"SELECT {_PAIR} FROM pairs WHERE image0 = ? AND image1 = ?", *numbers))
        if not rows:
            raise UsageError(f"the run {self.folder} has no finished pair of {name0} and {name1}")
        return self._pair(self.names(), rows[0])

    def _pair(self, names: dict[int, str], row: tuple[Any, ...]) -> StoredPair:
        image0, image1, seconds, crc, data = row
        name0, name1 = self._named(names, image0), self._named(names, image1)
        with schema.undamaged(self._path):
            if not (isinstance(seconds, float) and 0 <= seconds < math.inf):
                raise DamagedError(f"the pair {name0} and {name1} took {seconds} seconds")
            check(data, crc, f"the pair {name0} and {name1}")
            matches, geometry = decode_pair(data, self._keypoints(image0), self._keypoints(image1))
        return StoredPair(name0, name1, matches, geometry, seconds)

    def _named(self, names: dict[int, str], number: int) -> str:
        """The name of an image; a run that writes meanwhile may have added it."""
        if number not in names:
            names |= self.names()
        if number not in names:
            raise IntegrityError(f"{self._path} {schema.DAMAGED} (it has no image {number})")
        return names[number]

    def _number(self, name: str) -> int:
        rows = list(self.rows("SELECT id FROM images WHERE name = ?", name))
        if not rows:
            raise UsageError(f"the run {self.folder} has no image {name!r}")
        return rows[0][0]

    def failed(self) -> Iterator[FailedPair]:
        """Pairs that could not be matched."""
        names = self.names()
        for image0, image1, reason in self.rows("SELECT * FROM failed ORDER BY image0, image1"):
            yield FailedPair(self._named(names, image0), self._named(names, image1), one_line(reason))

    def drop_cache(self) -> None:
        """Forget cached keypoints, because they have changed."""
        self._keypoints.cache_clear()
        self._refined = None

    def counts(self) -> Counts:
        """Progress of the run."""
        by_status = dict(self.rows("SELECT status, count(*) FROM images GROUP BY status"))
        waiting, done, failed = (by_status.get(number, 0) for number in range(3))
        # The index is a tenth of the table.
        finished = "SELECT count(*) FROM pairs INDEXED BY pairs_by_images"
        sql = f"SELECT ({finished}), (SELECT count(*) FROM failed), (SELECT count(*) FROM waiting)"
        pairs, pairs_failed, pairs_waiting = next(self.rows(sql))
        total = pairs + pairs_failed + pairs_waiting
        return Counts(waiting + done + failed, failed, waiting, total, pairs_failed, pairs_waiting)

    def names(self) -> dict[int, str]:
        """Names of the images by their number in the database."""
        return dict(self.rows("SELECT id, name FROM images"))

    def check(self) -> list[str]:
        """Read everything and list what is damaged; empty if nothing is."""
        with bounded(self._connection, self._path):
            return find_damage(self.rows, self.folder)

    def _meta(self, key: str) -> str:
        rows = list(self.rows("SELECT value FROM meta WHERE key = ?", key))
        if not rows:
            raise IntegrityError(f"{self._path} has no {key}: it {schema.DAMAGED}")
        return rows[0][0]

    def _done(self, name: str) -> tuple[int, dict[str, Any]]:
        """The number of an image with keypoints, and the fields of its features that a record lacks."""
        columns = "id, width, height, scale_x, scale_y, exif, kind"
        sql = f"SELECT {columns} FROM images WHERE name = ? AND status = 1"
        rows = list(self.rows(sql, name))
        if not rows:
            image = self.image(name)
            raise UsageError(f"{name} has no keypoints: {image.reason or 'it is still to be read'}")
        number, width, height, scale_x, scale_y, orientation, kind = rows[0]
        facts = {"size": (width, height), "scale": (scale_x, scale_y), "kind": kind}
        return number, {**facts, "exif_orientation": orientation}

    def _read_keypoints(self, number: int) -> np.ndarray:
        rows = list(self.rows("SELECT data, crc FROM keypoints WHERE image = ?", number))
        with schema.undamaged(self._path):
            if not rows:
                raise DamagedError(f"the keypoints of image {number} are absent")
            what = f"the keypoints of image {number}"
            return decode_keypoints(check(*rows[0], what), what)

    def rows(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Rows of one statement, streamed."""
        with schema.guarded(self._path):
            for row in self._connection.execute(sql, values):  # noqa: UP028  (closing it late must not fail)
                yield row


def _image(row: tuple[Any, ...], folder: Path) -> StoredImage:
    name, sha256, width, height, count, camera, status, reason = row
    known = None if camera is None else decode_camera(parse_json(camera, f"the camera of {name}"))
    size = (width, height)
    return StoredImage(name, folder / name, sha256, size, count, known, STATUSES[status], one_line(reason))
