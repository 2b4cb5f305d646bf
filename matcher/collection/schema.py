"""The SQLite files of a run: records and their bytes, tables, how they are opened, and who may write.

In WAL mode exactly one connection may write and checkpoint: libraries before SQLite 3.51.3 can lose a
transaction where one connection writes while another one checkpoints (sqlite.org/wal.html, "The WAL-Reset
Bug"). `lock` keeps a second writer out; readers are opened read-only and never checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from matcher.cameras import Camera
from matcher.config import GeometryKind, GeometryStatus
from matcher.errors import IntegrityError, UsageError
from matcher.types import Features, Matches, Repetition, TwoViewGeometry, root_sift, to_numpy
from matcher.verify.likelihood import SCORE_STEPS
from matcher.verify.overlay import CommonOverlay
from matcher.verify.verdict import verdict_of

# The files of a run: its database, descriptors (which may be deleted after matching), the lock of its writer,
# and the global descriptors of the images of a map.
DATABASE, DESCRIPTORS, LOCK, INDEX = "run.db", "descriptors.db", "lock.db", "retrieval.safetensors"
WAITING, DONE, FAILED = range(3)  # status of an image

# Records: what a store holds about an image and a pair; K matches, points in stored pixels.

Status = Literal["waiting", "done", "failed"]  # in the order of their numbers in the database


@dataclass(frozen=True)
class StoredImage:
    """One image of a collection."""

    name: str  # path below the image folder, with forward slashes
    path: Path  # where the image was found
    sha256: str  # of the file, or of its entry in a features file; empty while unknown
    size: tuple[int, int]  # (width, height) as stored; (0, 0) while unknown
    count: int  # keypoints N
    camera: Camera | None
    status: Status
    reason: str  # why it failed; empty otherwise
    number: int = 0  # in the database


@dataclass(frozen=True, eq=False)
class StoredPair:
    """One finished pair; name0 sorts before name1."""

    name0: str
    name1: str
    matches: Matches  # scores to within 1/131070; points are keypoints unless the matcher refined them
    geometry: TwoViewGeometry
    seconds: float  # matching and verifying

    def probability(self, sizes: Mapping[str, tuple[int, int]]) -> float | None:
        """Of the same place, from images of stored (width, height) by name; None without geometry."""
        verdict = verdict_of(self.matches, self.geometry, sizes[self.name0], sizes[self.name1])
        return None if verdict is None else verdict.probability


class RefinedKeypoints(NamedTuple):
    """The keypoints of one image; track observations are refined against their track's reference."""

    keypoints: np.ndarray  # (N, 2) float32 stored pixels
    covariances: np.ndarray  # (N, 2, 2) float32 stored pixels²; the prior for keypoints not refined
    refined: np.ndarray  # (N,) bool


@dataclass(frozen=True)
class Counts:
    """Progress of a run."""

    images: int  # all of them: done, failed and waiting
    images_failed: int
    images_waiting: int
    pairs: int  # all of them: done, failed and waiting
    pairs_failed: int
    pairs_waiting: int

    @property
    def images_done(self) -> int:
        """Images with keypoints."""
        return self.images - self.images_failed - self.images_waiting

    @property
    def pairs_done(self) -> int:
        """Finished pairs."""
        return self.pairs - self.pairs_failed - self.pairs_waiting


# Bytes of records. Decoding is where they are validated, by `IntegrityError`: a store may be anybody's.


def damaged(what: object, why: object) -> IntegrityError:
    """The error for stored bytes that are not what they should be."""
    return IntegrityError(f"{what} is damaged; restore the run from a copy, or match again ({why})")


def sealed(data: bytes) -> bytes:
    """Bytes with their CRC-32 behind them."""
    return data + zlib.crc32(data).to_bytes(4, "little")


def unsealed(data: bytes, what: object) -> bytes:
    """The inverse of `sealed`; `IntegrityError`, which names `what`, where the checksum is another."""
    if not isinstance(data, bytes) or sealed(data[:-4]) != data:
        raise damaged(what, "its checksum differs")
    return data[:-4]


def packed(**arrays: np.ndarray | None) -> bytes:
    """A record of the arrays that are there, with its checksum."""
    return sealed(save({name: np.ascontiguousarray(a) for name, a in arrays.items() if a is not None}))


@contextmanager
def decoding(what: object) -> Iterator[None]:
    """`IntegrityError`, which names `what`, for anything that stops the block."""
    try:
        yield
    except (SafetensorError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise damaged(what, error) from error


def _check_arrays(arrays: Mapping[str, np.ndarray], **shapes: tuple[int, ...]) -> None:
    """`ValueError` where an array that is there has another shape, or is not finite."""
    for name, shape in shapes.items():
        if name in arrays and (arrays[name].shape != shape or not np.isfinite(arrays[name]).all()):
            raise ValueError(f"{name} has another shape, or is not finite")


def parse_json(text: str, what: object) -> Any:
    """The value of a text as JSON has it; `IntegrityError` where it is none or nested too deeply."""
    with decoding(what):
        return json.loads(text, parse_constant=int)  # which refuses NaN and Infinity


def to_json(value: Any) -> str:
    """A text that `parse_json` takes."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def decode_camera(value: Any, what: str = "its camera") -> Camera | None:
    """A camera from its fields, None from None; `IntegrityError` for anything else."""
    with decoding(what):
        return None if value is None else Camera(**value)


def common_camera(settings: Mapping[str, Any]) -> Camera | None:
    """The camera of every image of a run that has none of its own."""
    return decode_camera(settings.get("camera"))


def encode_keypoints(keypoints: np.ndarray) -> bytes:
    """(N, 2) float32."""
    return sealed(np.ascontiguousarray(keypoints, dtype="<f4").tobytes())


def decode_keypoints(data: bytes, count: int, what: str) -> np.ndarray:
    """(N, 2) float32 from a record."""
    with decoding(what):
        points = np.frombuffer(unsealed(data, what), dtype="<f4").reshape(count, 2).astype(np.float32)
        _check_arrays({"points": points}, points=(count, 2))
        return points


def encode_features(features: Features) -> bytes:
    """Everything of one image's features but keypoints, size, orientation and kind."""
    fields = {name: getattr(features, name) for name in ("scores", "scales", "orientations", "affine_frames")}
    arrays = {name: to_numpy(v).astype(np.float32) for name, v in fields.items() if v is not None}
    values = to_numpy(features.descriptors)
    if values.min(initial=0) >= 0 and (whole := _sift_numbers(values)) is not None:
        return packed(**arrays, sift=whole)
    fits_half = np.all(np.abs(values) < np.finfo(np.float16).max)
    return packed(**arrays, descriptors=values.astype(np.float16 if fits_half else np.float32))


def decode_features(record: bytes, keypoints: np.ndarray, what: str, **facts: Any) -> Features:
    """Features with float32 descriptors, from a record and what the database knows."""
    with decoding(what):
        arrays = load(unsealed(record, what))
        numbers = arrays.pop("sift", None)
        found = root_sift(numbers) if numbers is not None else arrays.pop("descriptors").astype(np.float32)
        return Features(keypoints, found, **facts, **arrays)


def chosen_features(record: bytes, chosen: np.ndarray, what: str) -> bytes:
    """A record of features with only those `chosen` (N,) bool; one that has no others stays as it is."""
    with decoding(what):
        arrays, count = load(unsealed(record, what)), np.count_nonzero(chosen)
        return packed(**{name: a if len(a) == count else a[chosen] for name, a in arrays.items()})


def encode_overlays(overlays: Iterable[CommonOverlay]) -> str:
    """What lies over the images of a run, a size each, as a text."""
    return to_json([(each.size, each.scale, each.points.round(2).tolist()) for each in overlays])


def decode_overlays(text: str, what: str) -> list[CommonOverlay]:
    """The inverse of `encode_overlays`."""
    with decoding(what):
        found = []
        for size, scale, points in parse_json(text, what):
            size, scale, places = tuple(map(int, size)), tuple(map(float, scale)), np.array(points, float)
            _check_arrays({"points": places}, points=(len(points), 2))
            if len(size) != 2 or len(scale) != 2 or not all(0 < n <= 2**30 for n in (*size, *scale)):
                raise ValueError("no size or scale of images")
            found.append(CommonOverlay(size, scale, places))
        return found


def _sift_numbers(values: np.ndarray) -> np.ndarray | None:
    """(N, D) uint8 from which `root_sift` makes exactly these descriptors; None where there are none such."""
    shares = values.astype(np.float32) ** 2
    smallest = np.where(shares > 0, shares, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    numbers = np.zeros(shares.shape, np.uint8)
    left = np.flatnonzero(np.isfinite(smallest[:, 0]))
    for step in range(1, 9):  # the smallest number that is not 0 is hardly ever larger
        tried = np.rint(shares[left] * (step / smallest[left]))
        fits = np.all(tried <= 255, axis=1)
        rows, tried = left[fits], tried[fits].astype(np.uint8)
        exact = np.all(root_sift(tried) == values[rows], axis=1)
        numbers[rows[exact]] = tried[exact]
        left = np.setdiff1d(left, rows[exact])
    return None if len(left) or not np.array_equal(root_sift(numbers), values) else numbers


def decode_refined(data: bytes, count: int, what: str) -> RefinedKeypoints:
    """Refined keypoints of an image, from a record."""
    with decoding(what):
        arrays = load(unsealed(data, what))
        _check_arrays(arrays, keypoints=(count, 2), covariances=(count, 2, 2), refined=(count,))
        return RefinedKeypoints(**arrays)


def encode_pair(
    matches: Matches, geometry: TwoViewGeometry, keypoints0: np.ndarray, keypoints1: np.ndarray
) -> bytes:
    """A pair without its names; keypoints are (N, 2) and (M, 2) float32 of the two images. `ValueError`: they
    are not those of the matches."""
    indices = np.asarray(matches.indices, dtype=np.int64).reshape(-1, 2)
    columns = (matches.scores, matches.points0, matches.points1, geometry.inliers)
    if any(len(column) != len(indices) for column in columns):
        raise ValueError("matches, scores, points and inliers differ in number")
    outside = (indices < 0).any() or (indices >= (len(keypoints0), len(keypoints1))).any()
    if outside or not np.isfinite(matches.scores).all():
        raise ValueError("a match is of a keypoint that the image does not have, or its score not finite")
    kind = get_args(GeometryKind).index(geometry.kind)
    status = get_args(GeometryStatus).index(geometry.status)
    wide = max(len(keypoints0), len(keypoints1)) > 65536
    models = {"matrix": geometry.matrix, "pose": geometry.cam1_from_cam0, "homography": geometry.homography}
    models["repetition"] = geometry.repetition
    models["alternatives"] = np.array(geometry.alternatives) if geometry.alternatives else None
    models["evidence"] = geometry.evidence
    more = {"overlay": matches.overlay} if len(matches.overlay) else {}
    for side, keypoints in enumerate((keypoints0, keypoints1)):
        points = np.asarray((matches.points0, matches.points1)[side], dtype=np.float32)
        if not np.array_equal(points, keypoints[indices[:, side]]):
            more[f"points{side}"] = points
    return packed(
        facts=np.array([kind, status, matches.layers_run, matches.kept0, matches.kept1], np.int32),
        indices=indices.astype(np.uint32 if wide else np.uint16),
        scores=np.rint(np.clip(matches.scores, 0, 1) * SCORE_STEPS).astype(np.uint16),
        inliers=np.packbits(np.asarray(geometry.inliers, dtype=bool)),
        **{name: None if model is None else np.asarray(model, np.float64) for name, model in models.items()},
        **more,
    )


def decode_pair(
    data: bytes, keypoints0: np.ndarray, keypoints1: np.ndarray, what: str = "a pair"
) -> tuple[Matches, TwoViewGeometry]:
    """The inverse of `encode_pair`."""
    with decoding(what):
        arrays = load(unsealed(data, what))
        count, others = len(arrays["indices"]), arrays.get("alternatives", np.zeros((0, 4, 4)))
        overlay = arrays.get("overlay", np.zeros((0, 2, 2), np.float32))
        matched = {"indices": (count, 2), "scores": (count,), "inliers": (-(-count // 8),), "facts": (5,)}
        models = {"matrix": (3, 3), "pose": (4, 4), "homography": (3, 3), "alternatives": (len(others), 4, 4)}
        models["repetition"] = (3,) if np.shape(arrays.get("repetition")) == (3,) else (4,)  # 3 in older runs
        models |= {"evidence": (1,), "overlay": (len(overlay), 2, 2)}
        _check_arrays(arrays, **matched, **models, points0=(count, 2), points1=(count, 2))
        kind, status, *numbers = (int(number) for number in arrays["facts"])
        if min(kind, status, *numbers) < 0:
            raise ValueError("a number is below 0")
        indices = arrays["indices"].astype(np.int64)
        ends = zip(indices.T, (keypoints0, keypoints1), strict=True)
        points = [arrays.get(f"points{side}", keypoints[rows]) for side, (rows, keypoints) in enumerate(ends)]
        geometry = TwoViewGeometry(
            get_args(GeometryKind)[kind],
            get_args(GeometryStatus)[status],
            np.unpackbits(arrays["inliers"], count=count).astype(bool),
            arrays.get("matrix"),
            arrays.get("pose"),
            homography=arrays.get("homography"),
            alternatives=tuple(others),
            evidence=arrays["evidence"].item() if "evidence" in arrays else None,
            repetition=Repetition(*arrays["repetition"].tolist()) if "repetition" in arrays else None,
        )
        posed = geometry.kind != "essential" or geometry.cam1_from_cam0 is not None
        if geometry.status == "ok" and (geometry.matrix is None or not posed):
            raise ValueError("a geometry has no matrix")
        scores = arrays["scores"].astype(np.float32) / np.float32(SCORE_STEPS)
        return Matches(indices, *points, scores, *numbers, overlay=overlay), geometry


# The tables by file: columns, and what holds of every row. SQLite enforces it when we write, and we look for
# what breaks it when we open. Pairs are appended as they finish; `waiting` holds what is left.


VERSION = 3
_ENDS = "image0 INTEGER NOT NULL, image1 INTEGER NOT NULL"
_DATA = ("image INTEGER PRIMARY KEY, data BLOB NOT NULL", "length(data) >= 4")
_APPLICATION = {DATABASE: 0x4D544352, DESCRIPTORS: 0x4D544344}  # SQLite's application_id: "MTCR", "MTCD"
TABLES = {
    DATABASE: {
        "meta": ("key TEXT PRIMARY KEY, value TEXT NOT NULL", "length(value) < 1000000"),
        "images": (
            "id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, status INTEGER NOT NULL,"
            " reason TEXT NOT NULL DEFAULT '', sha256 TEXT NOT NULL DEFAULT '',"
            " stamp TEXT NOT NULL DEFAULT '', camera TEXT, width INTEGER NOT NULL DEFAULT 0,"
            " height INTEGER NOT NULL DEFAULT 0, count INTEGER NOT NULL DEFAULT 0,"
            " scale_x REAL NOT NULL DEFAULT 1, scale_y REAL NOT NULL DEFAULT 1,"
            " exif INTEGER NOT NULL DEFAULT 1, kind TEXT NOT NULL DEFAULT ''",
            "id BETWEEN 0 AND 1 << 53 AND status BETWEEN 0 AND 2 AND exif BETWEEN 1 AND 8"
            f" AND width BETWEEN status = {DONE} AND 1 << 30 AND height BETWEEN status = {DONE} AND 1 << 30"
            " AND count BETWEEN 0 AND 1 << 31"
            " AND scale_x BETWEEN 1e-6 AND 1e6 AND scale_y BETWEEN 1e-6 AND 1e6"
            " AND max(length(reason), length(sha256), length(stamp), length(kind)) < 10000",
        ),
        "keypoints": _DATA,
        "refined": _DATA,
        "pairs": (
            f"id INTEGER PRIMARY KEY, {_ENDS}, seconds REAL NOT NULL, data BLOB NOT NULL",
            "image0 != image1 AND seconds BETWEEN 0 AND 1e9",
        ),
        "failed": (
            f"{_ENDS}, reason TEXT NOT NULL, PRIMARY KEY (image0, image1)",
            "image0 != image1 AND length(reason) < 10000",
        ),
        "waiting": (f"{_ENDS}, PRIMARY KEY (image0, image1)", "image0 != image1"),
    },
    DESCRIPTORS: {"descriptors": _DATA},
}


def _statements(file: str) -> str:
    made = ""
    for name, (columns, rule) in TABLES[file].items():
        more = ", WITHOUT ROWID" if name in ("meta", "failed", "waiting") else ""
        made += f"CREATE TABLE {name} ({columns}, CHECK ({rule})) STRICT{more};\n"
    index = "CREATE UNIQUE INDEX pairs_by_images ON pairs (image0, image1);\n"
    return made + index * (file == DATABASE)


def make(path: Path, **meta: str) -> None:
    """Create a database, with these rows of `meta`; it gets its name when it is complete."""
    part = path.with_name(f".{path.name}.part")
    remove(part, path)  # of a process that was killed here, or the logs of a deleted file
    with guarded(path), closing(_connected(part, "rwc")) as connection:
        connection.execute("PRAGMA page_size = 16384")  # rows of 2 to 3 kB leave little of it empty
        _make_durable(connection)
        marks = f"PRAGMA application_id = {_APPLICATION[path.name]}; PRAGMA user_version = {VERSION};"
        connection.executescript(f"BEGIN; {_statements(path.name)} {marks} COMMIT;")
        if meta:
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    part.rename(path)


def remove(*paths: Path) -> None:
    """Delete databases with their logs."""
    for path in paths:
        for log in ("-wal", "-shm", "-journal", ""):
            path.with_name(f"{path.name}{log}").unlink(missing_ok=True)


def opened(path: Path, *, writing: bool = False) -> sqlite3.Connection:
    """A connection to a database that anybody may have made (sqlite.org/security.html), checked whole;
    records are checked when they are read. Only one that is `writing` checkpoints."""
    mode = "rw" if writing else "ro"
    if not writing and not os.access(path.parent, os.W_OK):
        log, mode = path.with_name(f"{path.name}-wal"), "ro&immutable=1"
        if log.is_file() and log.stat().st_size:
            raise UsageError(f"{path} was not closed, and its folder cannot be written: copy it elsewhere")
    with guarded(path):
        connection = _connected(path, mode)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            if hasattr(connection, "setconfig"):  # from Python 3.12 on
                connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
            names = ("application_id", "user_version")
            application, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
            if application != _APPLICATION[path.name]:
                raise IntegrityError(f"{path} is not a store of a matcher run: name another folder")
            if version != VERSION:
                age = f"{'a newer' if version > VERSION else 'an older'} matcher (store version {version})"
                raise IntegrityError(f"{path} was written by {age}: use that one, or match again")
            # Views, triggers and tables of others would run in our queries, or break them.
            objects = "SELECT name, sql FROM sqlite_schema ORDER BY name"
            with closing(sqlite3.connect(":memory:")) as ours:
                ours.executescript(_statements(path.name))
                if list(connection.execute(objects)) != list(ours.execute(objects)):
                    raise damaged(path, "its tables are not those of a run")
            if path.name == DATABASE:
                _check_rows(connection, path)
            if writing:
                _make_durable(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    # 30 seconds: as long as it waits for another one's lock.
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", 30.0, isolation_level=None, uri=True)


def _make_durable(connection: sqlite3.Connection) -> None:
    # A folder on a network may refuse the write-ahead log; the rollback journal is slower and as safe.
    if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = TRUNCATE")
    connection.execute("PRAGMA synchronous = FULL")  # what is committed has reached the disk


def is_ours(path: Path) -> bool:
    """Whether a file may be deleted as the database of that name: absent, or with our mark in its header."""
    if not path.exists():
        return True
    with path.open("rb") as file:  # SQLite's format has the mark in bytes 68 to 71
        return file.read(72)[68:] == _APPLICATION[path.name].to_bytes(4, "big")


def _check_rows(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database with a row that none can have, or settings of other types (`IntegrityError`)."""
    if (said := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise damaged(path, one_line(str(said)))
    for table, (columns, rule) in TABLES[DATABASE].items():  # which SQLite only looks at where it may write
        known = "image0 IN (SELECT id FROM images) AND image1 IN (SELECT id FROM images)"
        rule = f"{rule} AND {known}" if _ENDS in columns else rule
        if connection.execute(f"SELECT 1 FROM {table} WHERE NOT ({rule}) LIMIT 1").fetchone():
            raise damaged(path, f"a row of {table} holds what none can")
    for (name,) in connection.execute("SELECT name FROM images"):
        if (fault := name_fault(name)) is not None:
            raise damaged(path, f"the name of an image, {ascii(name)[:60]}, {fault}")
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    if not meta.get("image_folder") or "\0" in meta["image_folder"]:
        raise damaged(path, "its image_folder is no path")
    settings = parse_json(meta.get("settings", ""), path)
    if not isinstance(settings, dict):
        raise damaged(path, "its settings are no table")
    types = {  # of what we read, tables before what is in them
        **dict.fromkeys(("preset", "weights", "frontend_weights", "precision", "shard"), str | None),
        **{"upright": bool, "alpha_mask": bool, "source": dict, "config": dict},
        **{f"config.{name}": dict for name in ("extractor", "matcher", "estimation")},
        **{"config.extractor.resize": int | None, "config.refine": dict | None},
    }
    for place, kind in types.items():
        *tables, key = place.split(".")
        values = reduce(lambda table, name: table.get(name, {}), tables, settings)
        if key in values and not isinstance(values[key], kind):
            raise damaged(path, f"its setting {place} is {ascii(values[key])[:60]}")
    common_camera(settings)


def name_fault(name: str) -> str | None:
    """What is wrong with the name of an image, a path below the image folder of which exports make files;
    None: nothing."""
    if not 0 < len(name) <= 1024:
        return "has not 1 to 1024 characters"
    if not name.isprintable():  # surrogates are not
        return "holds control characters"
    if name.startswith("/") or ".." in name.split("/"):
        return "leads out of the image folder"
    return None


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Translate the errors of SQLite: `IntegrityError` for a file that is damaged or no database,
    `UsageError` for one that cannot be opened or is held, `OSError` for a disk that is full or fails."""
    try:
        yield
    except UnicodeDecodeError as error:  # a column, or SQLite's own message
        raise damaged(path, error) from error
    except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
        raise
    except sqlite3.Error as error:
        extended = getattr(error, "sqlite_errorcode", None) or 0
        code = extended & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, f"no space; free some, run again ({error})", str(path)) from error
        if code == sqlite3.SQLITE_IOERR:  # a quota that is exhausted is reported as one of writing
            kind = errno.EDQUOT if extended == sqlite3.SQLITE_IOERR_WRITE else errno.EIO
            raise OSError(kind, f"disk error ({error})", str(path)) from error
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise UsageError(f"{path} cannot be opened ({error}); check the folder's permissions") from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise UsageError(f"{path} is held by another process ({error}); wait for it to end") from error
        raise damaged(path, error) from error


def one_line(text: str) -> str:
    """A text of unknown origin as a terminal may be given it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def check_files(folder: Path) -> None:
    """`IntegrityError` for what is no file of its own in the place of a run's, or a journal that names
    others: a run's folder may be anybody's."""
    for name in (DATABASE, DESCRIPTORS, LOCK, INDEX):
        for log in ("", "-wal", "-shm", "-journal"):
            path = folder / f"{name}{log}"
            if not os.path.lexists(path):
                continue
            if not stat.S_ISREG(path.lstat().st_mode):
                raise IntegrityError(f"{path} is a link or not a file; restore the run from a copy")
            # The last bytes of a rollback journal that belongs to several databases (SQLite's file format,
            # section 3); ours never do, and SQLite would delete the file that it names.
            with path.open("rb") as file:
                file.seek(-min(8, path.stat().st_size), os.SEEK_END)
                if log == "-journal" and file.read() == b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7":
                    raise IntegrityError(f"{path} is not the journal of a run; delete it")


def lock(folder: Path) -> sqlite3.Connection:
    """Let no other process write a run until what is returned is closed, or this one ends for any reason: an
    exclusive transaction on a database of its own, which works wherever SQLite does."""
    check_files(folder)
    held = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):  # SQLite would lock a file that it may only read
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        held = sqlite3.connect(folder / LOCK, timeout=0, isolation_level=None)
        held.execute("PRAGMA locking_mode = EXCLUSIVE")
        held.execute("BEGIN EXCLUSIVE")
    except (OSError, sqlite3.Error) as error:
        if held is not None:
            held.close()
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            raise UsageError(f"{folder} is being written by another run; wait for it to end") from None
        raise UsageError(f"{folder} cannot be written ({error}); name a folder that can") from None
    return held
