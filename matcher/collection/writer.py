"""The writing side of a store: the only connection that writes, behind the store's lock.

What a `transaction` wrote has reached the disk when the block ends; where the process dies inside it, nothing
of it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from matcher.collection import schema
from matcher.collection.descriptors import MAX_BYTES, DescriptorWriter, file_path
from matcher.collection.encoding import checksum, encode_camera, encode_keypoints, to_json
from matcher.collection.locking import StoreLock
from matcher.collection.pair_choice import PairChoice
from matcher.collection.refined_keypoints import delete_refined
from matcher.collection.run_folder import check_writable
from matcher.collection.schema import DONE, TILE_BITS
from matcher.collection.store import Store
from matcher.collection.store_check import check_store
from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.tensors import to_numpy
from matcher.errors import UsageError

_FORGET_PAIRS = """
CREATE TEMP TABLE touched AS SELECT image0, image1 FROM {table} WHERE image0 IN gone OR image1 IN gone;
INSERT OR IGNORE INTO waiting SELECT image0 >> {bits}, image1 >> {bits}, image0, image1 FROM touched;
DELETE FROM {table} WHERE (image0, image1) IN (SELECT image0, image1 FROM touched);
DROP TABLE touched;
"""


class EncodedPair(NamedTuple):
    """A finished pair as it lies in the store."""

    image0: int  # numbers of the images
    image1: int
    seconds: float
    crc: int
    data: bytes


class ImageFacts(NamedTuple):
    """What the store keeps of an image that was read, beside its features."""

    sha256: str
    stamp: str = ""  # of the file, to see without reading that it is the same


class Writer:
    """Writes an existing store; `store` reads through the same connection."""

    def __init__(self, run_dir: str | Path, max_file_bytes: int = MAX_BYTES) -> None:
        """Take the lock and open the store.

        Raises:
            UsageError: there is no store, it cannot be written, or another run is writing it.
            IntegrityError: it is damaged, or was written by a newer matcher.
        """
        folder = Path(run_dir)
        self._path = folder / schema.DATABASE
        if not self._path.is_file():
            Store.open(folder)  # raises an error that explains how to create one
        check_writable(folder)
        self._lock = StoreLock(folder)
        try:
            self._connection = schema.open_writing(self._path, check_store)
            self.store = Store(folder, self._connection)
            with schema.guarded(self._path):
                sql = "SELECT file, start + length FROM descriptors ORDER BY file DESC, start DESC LIMIT 1"
                number, end = self._connection.execute(sql).fetchone() or (0, 0)
        except BaseException:
            self._lock.release()
            raise
        self._descriptors = DescriptorWriter(folder, number, end, max_file_bytes)

    def close(self) -> None:
        """Fold the write-ahead log into the file and let others write."""
        try:
            self._descriptors.close()
            self._connection.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything in the block durably, or nothing.

        Raises:
            OSError: the disk is full.
        """
        with schema.guarded(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._descriptors.sync()
            with schema.guarded(self._path):
                self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk rolls back by itself
                self._connection.execute("ROLLBACK")
            raise

    def execute(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of one statement."""
        with schema.guarded(self._path):
            return self._connection.execute(sql, tuple(values)).fetchall()

    def execute_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """One statement for every row, streamed; the number of rows that it changed."""
        with schema.guarded(self._path):
            return self._connection.executemany(sql, rows).rowcount

    def add_images(self, names: Iterable[str]) -> None:
        """Images that are to be read; those that the store has stay as they are."""
        self.execute_many("INSERT OR IGNORE INTO images (name, status) VALUES (?, 0)", ((n,) for n in names))

    def put_camera(self, name: str, camera: Camera | None) -> None:
        """The camera of an image."""
        text = None if camera is None else to_json(encode_camera(camera))
        self.execute("UPDATE images SET camera = ? WHERE name = ?", (text, name))

    def put_features(self, name: str, features: Features, record: bytes, facts: ImageFacts) -> None:
        """Keypoints and descriptors (`record`, from `encode_features`) of an image, added where it is new."""
        self.add_images([name])
        number = self.number(name)
        data = encode_keypoints(to_numpy(features.keypoints))
        width, height = features.image_size
        row = (DONE, facts.sha256, facts.stamp, width, height, len(features), *features.scale.tolist())
        self.execute(
            "UPDATE images SET status = ?, reason = '', sha256 = ?, stamp = ?, width = ?, height = ?,"
            " count = ?, scale_x = ?, scale_y = ?, exif = ?, kind = ? WHERE id = ?",
            (*row, int(features.matched_orientation), features.kind, number),
        )
        self.execute("REPLACE INTO keypoints VALUES (?, ?, ?)", (number, data, checksum(data)))
        self.put_descriptors(number, record)

    def put_descriptors(self, number: int, record: bytes) -> None:
        """The descriptor record of an image."""
        place = self._descriptors.append(record)
        self.execute("REPLACE INTO descriptors VALUES (?, ?, ?, ?, ?)", (number, *place))

    def fail_image(self, name: str, reason: str, facts: ImageFacts | None = None) -> None:
        """An image that cannot be used, and why; its stamp shows when a retry is worthwhile."""
        sha256, stamp = facts or ImageFacts("")
        sql = "UPDATE images SET status = 2, reason = ?, sha256 = ?, stamp = ? WHERE name = ?"
        self.execute(sql, (reason, sha256, stamp, name))

    def put_pairs(self, pairs: Iterable[EncodedPair]) -> None:
        """Finished pairs; they no longer wait."""
        delete_refined(self.store.folder)
        pairs = list(pairs)
        sql = "REPLACE INTO pairs (image0, image1, seconds, crc, data) VALUES (?, ?, ?, ?, ?)"
        self.execute_many(sql, pairs)
        self._settled((pair.image0, pair.image1) for pair in pairs)

    def fail_pairs(self, pairs: Iterable[tuple[int, int, str]]) -> None:
        """Pairs by the numbers of their images, with the reason; they no longer wait."""
        pairs = list(pairs)
        self.execute_many("REPLACE INTO failed VALUES (?, ?, ?)", pairs)
        self._settled(pair[:2] for pair in pairs)

    def _settled(self, pairs: Iterable[tuple[int, int]]) -> None:
        sql = "DELETE FROM waiting WHERE tile0 = ? AND tile1 = ? AND image0 = ? AND image1 = ?"
        self.execute_many(sql, ((a >> TILE_BITS, b >> TILE_BITS, a, b) for a, b in pairs))

    def number(self, name: str) -> int:
        """The image's number in the database.

        Raises:
            UsageError: there is none of that name.
        """
        rows = self.execute("SELECT id FROM images WHERE name = ?", (name,))
        if not rows:
            raise UsageError(f"the run {self.store.folder} has no image {name!r}")
        return rows[0][0]

    def forget(self, names: Iterable[str]) -> None:
        """Images that have changed: they and all their pairs are to be done again."""
        delete_refined(self.store.folder)
        self.execute("CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY)")
        self.execute_many("INSERT INTO gone SELECT id FROM images WHERE name = ?", ((n,) for n in names))
        for table in ("pairs", "failed"):
            for statement in _FORGET_PAIRS.format(table=table, bits=TILE_BITS).split(";"):
                self.execute(statement)
        for table, key in (("keypoints", "image"), ("descriptors", "image")):
            self.execute(f"DELETE FROM {table} WHERE {key} IN gone")
        self.execute("UPDATE images SET status = 0, reason = '', count = 0 WHERE id IN gone")
        self.execute("DROP TABLE gone")
        self.store.drop_cache()

    def retry_failed(self) -> None:
        """Images and pairs that failed are to be tried again."""
        self.execute("UPDATE images SET status = 0, reason = '' WHERE status = 2")
        bits = TILE_BITS
        self.execute(
            f"INSERT INTO waiting SELECT image0 >> {bits}, image1 >> {bits}, image0, image1 FROM failed"
        )
        self.execute("DELETE FROM failed")

    def let_failed_pairs_wait(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Failed pairs, by the numbers of their images, are to be tried again."""
        pairs = list(pairs)
        tiles = ((a >> TILE_BITS, b >> TILE_BITS, a, b) for a, b in pairs)
        self.execute_many("INSERT OR IGNORE INTO waiting VALUES (?, ?, ?, ?)", tiles)
        self.execute_many("DELETE FROM failed WHERE image0 = ? AND image1 = ?", pairs)

    def set_image_folder(self, folder: Path) -> None:
        """Where the images are now."""
        self.execute("UPDATE meta SET value = ? WHERE key = 'image_folder'", (str(folder.absolute()),))

    def set_pair_choice(self, choice: PairChoice) -> None:
        """Keep how pairs were chosen, for images that are added later."""
        self.execute("REPLACE INTO meta VALUES ('pair_choice', ?)", (choice.to_json(),))

    def without_descriptors(self) -> set[int]:
        """Numbers of the images with keypoints whose descriptors were deleted or never copied."""
        files = [row[0] for row in self.execute("SELECT DISTINCT file FROM descriptors")]
        lost = [number for number in files if not file_path(self.store.folder, number).is_file()]
        sql = (
            "SELECT id FROM images LEFT JOIN descriptors ON image = id WHERE status = 1"
            f" AND (image IS NULL OR file IN ({', '.join('?' * len(lost))}))"
        )
        return {row[0] for row in self.execute(sql, lost)}
