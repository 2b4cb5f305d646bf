"""Whether a store is sound: it may come from anybody, so everything in it is read with suspicion once.

Before any other query: the tables are those that a run makes and nothing else is there; every number is in
its range; every row belongs to an image. One pass over all rows but the pairs' contents, which are checked as
they are read. The time is bounded by the size of the files, whatever is in them.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

from matcher.collection import schema
from matcher.collection.descriptors import RecordLocation, read_record
from matcher.collection.encoding import DamagedError, check, decode_camera, parse_json
from matcher.collection.pair_choice import PairChoice
from matcher.collection.sources import name_fault
from matcher.errors import IntegrityError

_STEPS_A_BYTE, _STEPS = 40, 5_000_000  # instructions of SQLite's machine that a check may take
_TEXT = 10_000  # characters
_LARGEST = 2**31 - 1
_FILES = 10**6  # number of a descriptor file
_FILE_END = 2**40  # bytes
_SCALES = (1e-6, 1e6)  # resized / stored size
_SETTINGS = 1 << 20  # characters

_ENDS = (
    "typeof(image0) != 'integer' OR typeof(image1) != 'integer' OR image0 = image1"
    " OR image0 NOT IN (SELECT id FROM images) OR image1 NOT IN (SELECT id FROM images)"
)
_UNKNOWN = "image NOT IN (SELECT id FROM images)"
_CRC = f"typeof(crc) != 'integer' OR crc NOT BETWEEN 0 AND {2**32 - 1}"
# Table → what names a row, a condition that no row may meet, and what it means.
_RULES = (
    (
        "keypoints",
        "image",
        f"{_UNKNOWN} OR typeof(data) != 'blob' OR {_CRC}",
        "no keypoints of an image of the run",
    ),
    (
        "descriptors",
        "image",
        f"{_UNKNOWN} OR {_CRC}"
        f" OR typeof(file) != 'integer' OR file NOT BETWEEN 0 AND {_FILES}"
        f" OR typeof(start) != 'integer' OR start NOT BETWEEN 0 AND {_FILE_END}"
        f" OR typeof(length) != 'integer' OR length NOT BETWEEN 0 AND {_LARGEST}",
        "no place of an image's descriptors",
    ),
    ("pairs INDEXED BY pairs_by_images", "image0, image1", _ENDS, "no pair of two images of the run"),
    (
        "failed",
        "image0, image1",
        f"{_ENDS} OR typeof(reason) != 'text' OR length(reason) > {_TEXT}",
        "no failed pair of two images of the run",
    ),
    (
        "waiting",
        "image0, image1",
        f"{_ENDS} OR tile0 IS NOT image0 >> {schema.TILE_BITS} OR tile1 IS NOT image1 >> {schema.TILE_BITS}",
        "no waiting pair of two images of the run",
    ),
)
_IMAGES = (
    "id, name, status, reason, sha256, stamp, camera, width, height, images.count, scale_x, scale_y, exif,"
    " kind, length(data)"
)


def check_store(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a store that no run can have written.

    Raises:
        IntegrityError: there is such a thing in it; the message names the row.
    """
    with (
        bounded(connection, path),
        schema.guarded(path),
        schema.undamaged(path),
        _snapshot(connection),
    ):
        _check_schema(connection)
        _check_meta(connection)
        for row in connection.execute(
            f"SELECT {_IMAGES} FROM images LEFT JOIN keypoints ON image = id ORDER BY id"
        ):
            _check_image(row)
        for table, names, condition, meaning in _RULES:
            sql = f"SELECT {names} FROM {table} WHERE {condition} LIMIT 1"
            if (found := connection.execute(sql).fetchone()) is not None:
                where = ", ".join(map(_shown, found))
                raise DamagedError(f"row {where} of {table.split()[0]}: {meaning}")


@contextmanager
def bounded(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Stop SQLite where it does more than reading every byte a few times can take."""
    size = sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}-wal")) if file.is_file())
    left, every = [_STEPS + _STEPS_A_BYTE * size], 10_000

    def stop() -> bool:
        left[0] -= every
        return left[0] < 0

    connection.set_progress_handler(stop, every)
    try:
        yield
    except IntegrityError as error:
        if left[0] >= 0:
            raise
        raise IntegrityError(f"{path} {schema.DAMAGED} (reading it has no end)") from error
    finally:
        connection.set_progress_handler(None, 0)


@contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """All queries see one state, also while another process writes."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


def _check_schema(connection: sqlite3.Connection) -> None:
    """Views and triggers of others would run in our queries; a table of another shape would break them."""
    found: dict[str, str | None] = {}
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
        if name not in _objects() or name in found:
            raise DamagedError(f"it holds a {_shown(kind)} {_shown(name)} that no run makes")
        found[name] = sql
    for name, sql in _objects().items():
        if found.get(name, "") != sql:
            raise DamagedError(f"its {name} is not that of a run")


@cache
def _objects() -> dict[str, str | None]:
    """The SQL of everything that a store holds, by name."""
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(schema.TABLES)
        return dict(made.execute("SELECT name, sql FROM sqlite_master"))


def _check_meta(connection: sqlite3.Connection) -> None:
    meta = {}
    for key, value in connection.execute("SELECT key, value FROM meta"):
        _require(isinstance(key, str) and isinstance(value, str), f"row {_shown(key)} of meta: no text")
        _require(len(value) <= _SETTINGS, f"row {_shown(key)} of meta: {len(value)} characters")
        meta[key] = value
    for key in ("settings", "image_folder"):
        _require(key in meta, f"it has no {key}")
    _require("\0" not in meta["image_folder"], "its image_folder is no path")
    check_settings(parse_json(meta["settings"], "its settings"))
    if "pair_choice" in meta:
        PairChoice.from_json(meta["pair_choice"])


def check_settings(settings: Any) -> dict[str, Any]:
    """The settings of a run, if the parts that we read have their types.

    Raises:
        DamagedError: one has another.
    """
    _require(isinstance(settings, dict), "its settings are no table")
    config = settings.get("config", {})
    _require(isinstance(config, dict), f"its setting config is {_shown(config)}")
    _require(isinstance(config.get("extractor", {}), dict), "its setting extractor is no table")
    for values, key, kinds in (
        *((settings, key, kinds) for key, kinds in _SETTING_TYPES.items()),
        *((config, key, kinds) for key, kinds in _PART_TYPES.items()),
        (config.get("extractor", {}), "resize", (int, NoneType)),
    ):
        found = values.get(key, _MISSING)
        _require(found is _MISSING or isinstance(found, kinds), f"its setting {key} is {_shown(found)}")
    if settings.get("camera") is not None:
        decode_camera(settings["camera"], "its camera")
    return settings


_MISSING = ("missing",)  # no value of JSON's
_TEXT_OR_NONE = (str, NoneType)
_SETTING_TYPES: dict[str, tuple[type, ...]] = {
    "preset": _TEXT_OR_NONE,
    "weights": _TEXT_OR_NONE,
    "frontend_weights": _TEXT_OR_NONE,
    "precision": _TEXT_OR_NONE,
    "shard": _TEXT_OR_NONE,
    "config": (dict,),
    "upright": (bool,),
    "alpha_mask": (bool,),
    "source": (dict,),
}
_PART_TYPES: dict[str, tuple[type, ...]] = {
    "extractor": (dict,),
    "matcher": (dict,),
    "estimation": (dict,),
    "refine": (dict, NoneType),
}


def _check_image(row: tuple[Any, ...]) -> None:
    number, name, status, reason, sha256, stamp, camera, *rest = row
    where = f"row {_shown(number)} of images ({_shown(name)})"
    _require(isinstance(number, int) and 0 <= number < 2**53, f"{where}: its number is out of range")
    _require(name_fault(name) is None, f"{where}: its name {name_fault(name)}")
    _require(_whole(status, 0, 2), f"{where}: its status is {_shown(status)}")
    for what, text, most in (("reason", reason, _TEXT), ("sha256", sha256, 128), ("stamp", stamp, 1_000)):
        _require(isinstance(text, str) and len(text) <= most, f"{where}: its {what} is {_shown(text)}")
    if camera is not None:
        _require(isinstance(camera, str), f"{where}: its camera is {_shown(camera)}")
        decode_camera(parse_json(camera, f"{where}: its camera"), f"{where}: its camera")
    _check_features(where, status == schema.DONE, *rest)


def _check_features(
    where: str,
    done: bool,
    width: Any,
    height: Any,
    count: Any,
    scale_x: Any,
    scale_y: Any,
    exif: Any,
    kind: Any,
    length: Any,
) -> None:
    for what, value in (("width", width), ("height", height)):
        _require(_whole(value, int(done), 2**30), f"{where}: its {what} is {_shown(value)}")
    _require(_whole(count, 0, _LARGEST), f"{where}: its count is {_shown(count)}")
    for what, value in (("scale_x", scale_x), ("scale_y", scale_y)):
        right = isinstance(value, float) and math.isfinite(value) and _SCALES[0] <= value <= _SCALES[1]
        _require(right, f"{where}: its {what} is {_shown(value)}")
    _require(_whole(exif, 1, 8), f"{where}: its exif is {_shown(exif)}")
    _require(isinstance(kind, str) and len(kind) <= 100, f"{where}: its kind is {_shown(kind)}")
    if done:
        _require(length == 8 * count, f"{where}: {_shown(length)} bytes are not {_shown(count)} keypoints")


def one_line(text: str) -> str:
    """A text of unknown origin as a terminal may be given it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and least <= value <= most


def _require(right: bool, fault: str) -> None:
    if not right:
        raise DamagedError(fault)


def _shown(value: Any) -> str:
    """A value of unknown origin for a message: short, on one line."""
    return ascii(value if not isinstance(value, (str, bytes)) else value[:60])[:80]


def find_damage(rows: Callable[[str], Iterator[tuple[Any, ...]]], folder: Path) -> list[str]:
    """Read everything that has a checksum and list what is damaged; `rows` runs a statement."""
    faults = [row[0] for row in rows("PRAGMA integrity_check(20)") if row[0] != "ok"]
    for table, what in (("keypoints", "the keypoints of image"), ("pairs", "pair")):
        for number, crc, data in rows(f"SELECT rowid, crc, data FROM {table}"):
            try:
                check(data, crc, f"{what} {number}")
            except DamagedError as error:
                faults.append(str(error))
    for place in rows("SELECT file, start, length, crc FROM descriptors"):
        try:
            read_record(folder, RecordLocation(*place))
        except FileNotFoundError:
            continue  # deleting them is allowed
        except DamagedError as error:
            faults.append(str(error))
    return faults
