"""A run on disk: images, keypoints, features and finished pairs, read by `Store` and written by `Writer`.

It is a folder with two SQLite databases: `run.db`, and `descriptors.db`, which may be deleted after matching.
It may be read while a run writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from sqlite3 import Connection
from typing import Any, NamedTuple, get_args

import numpy as np
from safetensors.numpy import load

from matcher.cameras import Camera
from matcher.collection import schema
from matcher.collection.schema import DONE, FAILED, WAITING, RefinedKeypoints, guarded
from matcher.collection.sources import PairChoice
from matcher.errors import IntegrityError, UsageError
from matcher.types import Features, thinned, to_numpy
from matcher.verify.overlay import CommonOverlay, common_overlay
from matcher.verify.repetition import beside_overlay

PAIRS = ("pairs", "failed", "waiting")  # the tables of pairs: finished, failed, still to be matched


class Store(AbstractContextManager):
    """A run on disk. Every method raises `IntegrityError` if the store is damaged."""

    def __init__(self, folder: Path, connection: Connection, descriptors: Connection | None = None) -> None:
        self.folder, self._path = folder, folder / schema.DATABASE
        self._connection, self._descriptors = connection, descriptors
        self._keypoints = lru_cache(1024)(self._read_keypoints)

    @classmethod
    def create(
        cls, run_dir: str | Path, settings: dict[str, Any], images: str | Path = ".", *, restart: bool = False
    ) -> Store:
        """Create an empty store for the images of a folder; `restart` deletes the files of one that is there,
        all others stay. `UsageError`: there is one already, or a database of something else."""
        folder = Path(run_dir)
        paths = [folder / name for name in (schema.DESCRIPTORS, schema.INDEX, schema.DATABASE)]
        with closing(schema.lock(folder)):
            if restart:
                if strange := [path for path in (paths[0], paths[2]) if not schema.is_ours(path)]:
                    raise UsageError(f"{strange[0]} is no store of a matcher run: move it away")
                schema.remove(*paths)
            if paths[2].exists():
                raise UsageError(f"{folder} holds a run already; open it, or name another folder")
            known = dict(settings=schema.to_json(settings), image_folder=str(Path(images).absolute()))
            schema.make(paths[2], **known)
        return cls.open(folder)

    @classmethod
    def open(cls, run_dir: str | Path) -> Store:
        """A store that exists, for reading; `UsageError`: there is none."""
        folder = Path(run_dir)
        schema.check_files(folder)
        if not (folder / schema.DATABASE).is_file():
            own = Path(f"{folder}-run", schema.DATABASE).is_file()  # as of a model that `sfm` made
            how = f"give {folder}-run" if own else f"make one: `matcher collection IMAGES --run {folder}`"
            raise UsageError(f"{folder} holds no run; {how}")
        return cls(folder, schema.opened(folder / schema.DATABASE))

    def close(self) -> None:
        """Close the files; the store cannot be used afterwards."""
        self._connection.close()
        if self._descriptors is not None:
            self._descriptors.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _meta(self) -> dict[str, str]:
        return dict(self.rows("SELECT key, value FROM meta"))

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on: preset, weights, configuration."""
        return schema.parse_json(self._meta["settings"], f"{self._path}: the settings")

    @property
    def image_folder(self) -> Path:
        """Where the images were when the run was last started."""
        return Path(self._meta["image_folder"])

    @property
    def pair_choice(self) -> PairChoice | None:
        """How the run's pairs were chosen; None before there are any."""
        found = self._meta.get("pair_choice")
        return None if found is None else PairChoice.from_json(found)

    @property
    def overlays(self) -> list[CommonOverlay]:
        """What lies over most images of a size; keypoints on it were left out."""
        return schema.decode_overlays(self._meta.get("overlays", "[]"), f"{self._path}: the overlays")

    def unpaired(self) -> list[schema.StoredImage]:
        """Images without a pair, by name, except those that failed or have no keypoints."""
        ends = " UNION ".join(f"SELECT image{end} FROM {table}" for table in PAIRS for end in (0, 1))
        usable = f"(status = {WAITING} OR status = {DONE} AND count > 0)"
        return self.images(f"WHERE {usable} AND id NOT IN ({ends}) ORDER BY name")

    def images(self, which: str = "ORDER BY name", *values: object) -> list[schema.StoredImage]:
        """All images, by name, or those that a clause of SQL selects."""
        found, folder = [], self.image_folder
        sql = f"SELECT name, sha256, width, height, count, camera, status, reason, id FROM images {which}"
        for name, sha256, *size, count, camera, status, reason, number in self.rows(sql, *values):
            what = f"{self._path}: the camera of {name}"
            known = schema.decode_camera(camera and schema.parse_json(camera, what), what)
            said = get_args(schema.Status)[status], schema.one_line(reason), number
            found.append(schema.StoredImage(name, folder / name, sha256, tuple(size), count, known, *said))
        return found

    def image(self, name: str) -> schema.StoredImage:
        """One image; `UsageError`: the run has none of that name."""
        for image in self.images("WHERE name = ?", name):
            return image
        raise UsageError(f"the run {self.folder} has no image {name!r}")

    def names(self) -> dict[int, str]:
        """Names of the images by their number in the database."""
        return dict(self.rows("SELECT id, name FROM images"))

    def keypoints(self, name: str) -> np.ndarray:
        """(N, 2) float32 stored pixels; `UsageError`: the image is not in the run, or has no keypoints
        (yet)."""
        return self._keypoints(self._done(name)[0])

    def refined_keypoints(self, name: str) -> RefinedKeypoints | None:
        """Keypoints with their positions refined track by track, None where the run was not refined."""
        what = f"{self._path}: the refined keypoints of {name}"
        sql = "SELECT data, count FROM refined JOIN images ON id = image WHERE name = ?"
        return next((schema.decode_refined(*row, what) for row in self.rows(sql, name)), None)

    def scale(self, name: str) -> tuple[float, float]:
        """(sx, sy), the size in which keypoints were found / stored size, along the stored axes."""
        return self._done(name)[1]["scale"]

    def features(self, name: str) -> Features:
        """Keypoints and descriptors, as the matcher was given them; `IntegrityError`: they were deleted."""
        number, facts = self._done(name)
        path = self.folder / schema.DESCRIPTORS
        if (record := self.record(number)) is None:
            remedy = f"`matcher collection {self.image_folder} --run {self.folder} --descriptors`"
            raise IntegrityError(f"{path} does not hold the descriptors of {name}: {remedy} finds them again")
        what = f"{path}: the descriptors of {name}"
        return schema.decode_features(record, self._keypoints(number), what, **facts)

    def record(self, number: int) -> bytes | None:
        """The descriptors of an image by its number, as `encode_features` made them; None: deleted."""
        rows = self._described("SELECT data FROM descriptors WHERE image = ?", number)
        return next((row[0] for row in rows), None)

    def compared(self) -> dict[tuple[str, str, bool], tuple[int, bool]]:
        """All that `Writer.put_compared` was given since an image or the overlay changed."""
        names, found, what = self.names(), {}, f"{self.folder / schema.DESCRIPTORS}: compared pairs"
        for (data,) in self._described("SELECT data FROM descriptors WHERE image < 0 ORDER BY image DESC"):
            with schema.decoding(what):
                for one, two, whole, inliers, likely in load(schema.unsealed(data, what))["rows"].tolist():
                    found[names[one], names[two], bool(whole)] = int(inliers), bool(likely)
        return found

    def pairs(self, of: Collection[str] | None = None) -> Iterator[schema.StoredPair]:
        """Finished pairs, if given only those `of` images of these names, in an order that does not depend on
        when they were finished."""
        sizes = {overlay.size for overlay in self.overlays}
        overlaid = {image.name for image in (self.images() if sizes else ()) if image.size in sizes}
        for name0, name1, *ends, seconds, data in self._named("image0, image1, seconds, data", "pairs"):
            if of is not None and name0 not in of and name1 not in of:
                continue
            points = [self._keypoints(number) for number in ends]
            what = f"{self._path}: the pair {name0} and {name1}"
            matches, geometry = schema.decode_pair(data, *points, what)
            if {name0, name1} & overlaid:
                geometry = beside_overlay(geometry)
            yield schema.StoredPair(name0, name1, matches, geometry, seconds)

    def known_pairs(self) -> set[frozenset[str]]:
        """The names of all pairs of the run, finished, failed or waiting."""
        return {frozenset(row[:2]) for table in PAIRS for row in self._named("0", table)}

    def failed(self) -> Iterator[tuple[str, str, str]]:
        """The names of the images of pairs that could not be matched, and why."""
        for *ends, reason in self._named("failed.reason", "failed"):
            yield *ends, schema.one_line(reason)

    def waiting(self) -> Iterator[tuple[str, str]]:
        """The names of the images of pairs that were not matched yet."""
        return ((name0, name1) for name0, name1, _ in self._named("0", "waiting"))

    def _named(self, columns: str, table: str) -> Iterator[tuple[Any, ...]]:
        """The names of the images of every pair of a table, and these columns."""
        names = "images AS a ON a.id = image0 CROSS JOIN images AS b ON b.id = image1"
        sql = f"SELECT a.name, b.name, {columns} FROM {table} CROSS JOIN {names} ORDER BY image0, image1"
        return self.rows(sql)

    def counts(self) -> schema.Counts:
        """Progress of the run."""
        by_status = dict(self.rows("SELECT status, count(*) FROM images GROUP BY status"))
        tables = ", ".join(f"(SELECT count(*) FROM {table})" for table in PAIRS)
        pairs = next(self.rows(f"SELECT {tables}"))
        failed, waiting = by_status.get(FAILED, 0), by_status.get(WAITING, 0)
        return schema.Counts(sum(by_status.values()), failed, waiting, sum(pairs), *pairs[1:])

    def check(self) -> list[str]:
        """Read everything that has a checksum and list what is damaged; empty if nothing is."""
        checked = "PRAGMA integrity_check(20)"
        faults = [row[0] for rows in (self.rows, self._described) for row in rows(checked) if row[0] != "ok"]
        for table in ("keypoints", "refined", "pairs", "descriptors"):
            rows = self._described if table == "descriptors" else self.rows
            for number, data in rows(f"SELECT rowid, data FROM {table}"):
                try:
                    schema.unsealed(data, f"{table}: row {number}")
                except IntegrityError as error:
                    faults.append(str(error))
        return faults

    def rows(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Rows of one statement, streamed."""
        with guarded(self._path):
            for row in self._connection.execute(sql, values):  # noqa: UP028  (closing it late must not fail)
                yield row

    def _described(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Rows of the database of descriptors; none where it was deleted."""
        path = self.folder / schema.DESCRIPTORS
        if self._descriptors is None and path.is_file():
            self._descriptors = schema.opened(path)
        with guarded(path):
            yield from () if self._descriptors is None else self._descriptors.execute(sql, values)

    def _done(self, name: str) -> tuple[int, dict[str, Any]]:
        """The number of an image with keypoints, and the fields of its features that a record lacks."""
        columns = "id, width, height, scale_x, scale_y, exif, kind"
        sql = f"SELECT {columns} FROM images WHERE name = ? AND status = {DONE}"
        for number, *sides, orientation, kind in self.rows(sql, name):
            size, scale = tuple(sides[:2]), tuple(sides[2:])
            return number, {"size": size, "scale": scale, "kind": kind, "exif_orientation": orientation}
        raise UsageError(f"{name} has no keypoints: {self.image(name).reason or 'it is still to be read'}")

    def _read_keypoints(self, number: int) -> np.ndarray:
        what = f"{self._path}: the keypoints of image {number}"
        sql = "SELECT data, count FROM keypoints JOIN images ON id = image WHERE id = ?"
        for row in self.rows(sql, number):
            return schema.decode_keypoints(*row, what)
        raise schema.damaged(what, "there are none")


def names_in(run: Path) -> frozenset[str]:
    """Names of the images of a run; none where there is no run."""
    if not (run / schema.DATABASE).is_file():
        return frozenset()
    with Store.open(run) as store:
        return frozenset(store.names().values())


def gone(store: Store) -> set[str]:
    """Images of a run that are no longer in the folder of its photos; none where that holds no image of it,
    as after a move, or where features are from a file."""
    photos = store.settings.get("source", {}).get("kind") == "photos"
    absent = {image.name for image in store.images() if photos and not image.path.is_file()}
    return absent if absent and len(absent) < len(store.names()) else set()


class EncodedPair(NamedTuple):
    """A pair as it lies in the store, or why it could not be matched."""

    image0: int  # numbers of the images
    image1: int
    seconds: float = 0.0
    data: bytes = b""
    reason: str = ""  # of a failure


class Writer(Store):
    """A store that exists, for reading and writing, locked; others can read it meanwhile."""

    def __init__(self, run_dir: str | Path) -> None:
        folder = Path(run_dir)
        path, described = folder / schema.DATABASE, folder / schema.DESCRIPTORS
        if not path.is_file():
            Store.open(folder)  # raises an error that explains how to create one
        self._lock = schema.lock(folder)
        try:
            connection = schema.opened(path, writing=True)
            if not described.exists():
                schema.make(described)
            super().__init__(folder, connection, schema.opened(described, writing=True))
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Fold the write-ahead logs into the files and let others write."""
        try:
            super().close()
        finally:
            self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything in the block durably, or nothing; `OSError`: the disk is full."""
        both = (self._descriptors, self._connection)  # in this order no image is without its descriptors
        with guarded(self._path):
            try:
                for connection in both:
                    connection.execute("BEGIN IMMEDIATE")
                yield
                for connection in both:
                    connection.execute("COMMIT")
            except BaseException:
                for connection in both:
                    if connection.in_transaction:  # a full disk rolls back by itself
                        connection.execute("ROLLBACK")
                raise

    def execute(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of one statement."""
        return list(self.rows(sql, *values))

    def execute_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """One statement for every row, streamed; the number of rows that it changed."""
        with guarded(self._path):
            return max(0, self._connection.executemany(sql, rows).rowcount)

    def add_images(self, names: Iterable[str]) -> None:
        """Images that are to be read; those that the store has stay as they are."""
        sql = f"INSERT OR IGNORE INTO images (name, status) VALUES (?, {WAITING})"
        self.execute_many(sql, ((name,) for name in names))

    def put_camera(self, name: str, camera: Camera) -> None:
        """The camera of an image."""
        self.execute("UPDATE images SET camera = ? WHERE name = ?", schema.to_json(asdict(camera)), name)

    def put_features(
        self, name: str, features: Features, record: bytes, sha256: str = "", stamp: str = ""
    ) -> None:
        """The features of an image, added where it is new: `record` from `encode_features`, the digest of its
        file, and a stamp to see without reading that it is the same."""
        self.add_images([name])
        number, scale = self.image(name).number, map(float, features.scale.tolist())
        self.execute(
            f"UPDATE images SET status = {DONE}, reason = '', sha256 = ?, stamp = ?, width = ?, height = ?,"
            " scale_x = ?, scale_y = ?, exif = ?, kind = ? WHERE id = ?",
            *(sha256, stamp, *features.image_size, *scale),
            *(int(features.matched_orientation), features.kind, number),
        )
        self._put_keypoints(number, to_numpy(features.keypoints), record)

    def _put_keypoints(self, number: int, keypoints: np.ndarray, record: bytes) -> None:
        self.execute("UPDATE images SET count = ? WHERE id = ?", len(keypoints), number)
        self.execute("REPLACE INTO keypoints VALUES (?, ?)", number, schema.encode_keypoints(keypoints))
        self.put_descriptors(number, record)

    def put_descriptors(self, number: int, record: bytes) -> None:
        """The descriptor record of an image."""
        with guarded(self.folder / schema.DESCRIPTORS):
            self._descriptors.execute("REPLACE INTO descriptors VALUES (?, ?)", (number, record))

    def put_compared(self, found: Iterable[tuple[tuple[str, str, bool], tuple[int, bool]]]) -> None:
        """More of what comparing pairs by their strongest keypoints found: both names, whether by the whole
        pipeline, inliers, whether they agree. It lies beside the descriptors, by numbers below 0."""
        numbers = {name: number for number, name in self.names().items()}
        rows = [(numbers[first], numbers[second], *rest, *what) for (first, second, *rest), what in found]
        with self.transaction():
            sql = "INSERT INTO descriptors SELECT min(0, min(image)) - 1, ? FROM descriptors"
            self._descriptors.execute(sql, (schema.packed(rows=np.array(rows, np.int64)),))

    def put_refined(self, found: Mapping[str, RefinedKeypoints]) -> None:
        """The refined keypoints of images; what has expired holds again for the others."""
        sql = "REPLACE INTO refined SELECT id, ? FROM images WHERE name = ?"
        self.execute_many(sql, ((schema.packed(**each._asdict()), name) for name, each in found.items()))
        self.execute("UPDATE OR IGNORE refined SET image = -image WHERE image < 0")
        self.execute("DELETE FROM refined WHERE image < 0")

    def expire_refined(self) -> None:
        """Pairs have changed, so all keypoints are to be refined again; what was found is kept under the
        negative number of its image, for those whose photo is gone by then."""
        self.execute("UPDATE OR REPLACE refined SET image = -image WHERE image > 0")

    def fail_image(self, name: str, reason: str, stamp: str = "") -> None:
        """An image that cannot be used, and why; its stamp shows when a retry is worthwhile."""
        sql = f"UPDATE images SET status = {FAILED}, reason = ?, sha256 = '', stamp = ? WHERE name = ?"
        self.execute(sql, reason, stamp, name)

    def put_pairs(self, pairs: Iterable[EncodedPair]) -> None:
        """Finished and failed pairs; they no longer wait."""
        pairs = list(pairs)
        if done := [pair[:4] for pair in pairs if pair.data]:
            self.expire_refined()
        self.execute_many("REPLACE INTO pairs (image0, image1, seconds, data) VALUES (?, ?, ?, ?)", done)
        lost = [(*pair[:2], pair.reason) for pair in pairs if not pair.data]
        self.execute_many("REPLACE INTO failed VALUES (?, ?, ?)", lost)
        sql = "DELETE FROM waiting WHERE image0 = ? AND image1 = ?"
        self.execute_many(sql, (pair[:2] for pair in pairs))

    def forget(self, names: Iterable[str]) -> None:
        """Images that have changed: they and all their pairs are to be done again."""
        ids = ", ".join(str(self.image(name).number) for name in names)
        self.execute(f"DELETE FROM refined WHERE abs(image) IN ({ids})")
        self.expire_refined()
        for table in ("pairs", "failed"):
            self.wait_again(table, ids)
        self.execute(f"DELETE FROM keypoints WHERE image IN ({ids})")
        self._descriptors.execute(f"DELETE FROM descriptors WHERE image < 0 OR image IN ({ids})")
        self.execute(f"UPDATE images SET status = {WAITING}, reason = '', count = 0 WHERE id IN ({ids})")
        self._keypoints.cache_clear()

    def wait_again(self, table: str, ids: str) -> None:
        """Pairs of "pairs" or "failed" with one of these images are to be matched again."""
        theirs = f"FROM {table} WHERE image0 IN ({ids}) OR image1 IN ({ids})"
        self.execute(f"INSERT OR IGNORE INTO waiting SELECT image0, image1 {theirs}")
        self.execute(f"DELETE {theirs}")

    def retry_failed(self) -> None:
        """Images and pairs that failed are to be tried again."""
        self.execute(f"UPDATE images SET status = {WAITING}, reason = '' WHERE status = {FAILED}")
        self.wait_again("failed", "SELECT id FROM images")

    def set_meta(self, key: str, value: str) -> None:
        """`image_folder`: where the images are now; `pair_choice`: how pairs were chosen; `overlays`."""
        self.execute("REPLACE INTO meta VALUES (?, ?)", key, value)

    def leave_out_overlays(self, some: Collection[int] | None = None) -> None:
        """Find what lies over most images of a size, once, before any pair is matched, in those with `some`
        numbers, or up to 100 of each size; its keypoints go."""
        known = {overlay.size: overlay for overlay in self.overlays}
        done = self.images(f"WHERE status = {DONE} ORDER BY width, height, name")
        for size, images in [(size, list(alike)) for size, alike in groupby(done, lambda image: image.size)]:
            if size not in known:
                asked = [image.name for image in images if some is None or image.number in some]
                asked = thinned(asked, 100)  # as many tell what lies over most of them
                points = [self.keypoints(name) for name in asked]
                if (found := common_overlay(points, size, self.scale(images[0].name))) is None:
                    continue
                known[size] = found
                with self.transaction():  # first: where a run is killed, the next one leaves out the same
                    self.set_meta("overlays", schema.encode_overlays(known.values()))
                    self._descriptors.execute("DELETE FROM descriptors WHERE image < 0")
            with self.transaction():
                for image in images:
                    beside = known[size].beside(self.keypoints(image.name))
                    if not beside.all():
                        record = schema.chosen_features(self.record(image.number), beside, image.name)
                        self._put_keypoints(image.number, self.keypoints(image.name)[beside], record)
            self._keypoints.cache_clear()

    def without_descriptors(self) -> set[int]:
        """Numbers of the images with keypoints whose descriptors were deleted or never copied."""
        done = {number for (number,) in self.execute(f"SELECT id FROM images WHERE status = {DONE}")}
        return done - {number for (number,) in self._descriptors.execute("SELECT image FROM descriptors")}
