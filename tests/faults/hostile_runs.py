"""A small finished run, and what a stranger may have made of it."""

import os
import shutil
import sqlite3
import zlib
from pathlib import Path

import numpy as np
from random_collection import features, pair, put_features, put_pair

from matcher.cameras import Camera
from matcher.collection.store import ImageFacts, Store, Writer

SETTINGS = {
    "preset": "nearest",
    "weights": None,
    "upright": True,
    "source": {"kind": "photos", "masks": False},
    "config": {"extractor": {"max_keypoints": 20, "resize": 640}, "estimation": {"kind": "fundamental"}},
}


def small_run(folder: Path) -> Path:
    """Four images, of which one has failed, and every status of a pair."""
    rng = np.random.default_rng(7)
    Store.create(folder, SETTINGS, folder.parent / "photos").close()
    names = ["a.jpg", "b.jpg", "sub/c.jpg"]
    made = {name: features(rng, 20) for name in names}
    with Writer(folder) as writer, writer.transaction():
        for name in names:
            put_features(writer, name, made[name], ImageFacts("0" * 64))
        writer.add_images(["lost.jpg"])
        writer.fail_image("lost.jpg", "it is cut short")
        writer.put_camera("a.jpg", Camera(500.0, 500.0, 320.0, 240.0))
        for name0, name1 in (("a.jpg", "b.jpg"), ("b.jpg", "sub/c.jpg")):
            points = [made[name].keypoints.numpy() for name in (name0, name1)]
            put_pair(writer, pair(rng, name0, name1, *points, 15))
        writer.fail_pairs([(1, 4, "lost.jpg: it is cut short")])
        writer.execute("INSERT INTO waiting VALUES (0, 0, 1, 3)")
    return folder


def edit(run: Path, *statements: str, values: tuple = ()) -> None:
    """Change a store as its owner can, with any SQLite shell."""
    connection = sqlite3.connect(run / "run.db", isolation_level=None)
    connection.execute("PRAGMA writable_schema = ON")
    for statement in statements:
        connection.execute(statement, values if "?" in statement else ())
    connection.close()


def blob(run: Path, data: bytes) -> None:
    edit(run, "UPDATE keypoints SET data = ?, crc = ? WHERE image = 1", values=(data, zlib.crc32(data)))


RECURSIVE = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, 'x' AS name"

# Statements that change one thing each.
EDITS = {
    "images are a view without end": (
        "DROP TABLE images",
        f"CREATE VIEW images AS {RECURSIVE}, 1 AS status, '' AS reason FROM n",
    ),
    "pairs are a view without end": (
        "DROP TABLE pairs",
        f"CREATE VIEW pairs AS {RECURSIVE} FROM n",
    ),
    "meta is a view without end": ("DROP TABLE meta", f"CREATE VIEW meta AS {RECURSIVE} FROM n"),
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON pairs BEGIN DELETE FROM images; END",),
    "another table": ("CREATE TABLE more (x)",),
    "a virtual table": ("CREATE VIRTUAL TABLE more USING fts5(x)",),
    "no table of pairs": ("DROP TABLE pairs",),
    "no index of pairs": ("DROP INDEX pairs_by_images",),
    "a table with other columns": ("ALTER TABLE images RENAME COLUMN width TO broad",),
    "a table with a default that calls": (
        "DROP TABLE failed",
        "CREATE TABLE failed (image0 INTEGER, image1 INTEGER, reason TEXT DEFAULT (randomblob(9)))",
    ),
    **{
        f"status {value}": (f"UPDATE images SET status = {value} WHERE id = 1",)
        for value in ("7", "-1", "'x'", "1e30", "x'00'")
    },
    **{
        f"camera {name}": (f"UPDATE images SET camera = '{text}' WHERE id = 1",)
        for name, text in {
            "{}": "{}", "[1]": "[1]", "null": "null", "nested": "[" * 3000, "word": '[1, 2, 3, "a"]',
            "text": "abc", "zero": "[0, 0, 0, 0]", "infinite": "[1e999, 1, 1, 1]", "NaN": "[NaN, 1, 1, 1]",
            "true": "[true, 1, 1, 1]", "size": '{"fx": 1, "fy": 1, "cx": 1, "cy": 1, "size": ["1", 2]}',
            "unknown": '{"fx": 1, "fy": 1, "cx": 1, "cy": 1, "run": "x"}', "numbers": "9" * 5000,
            "distortion": '{"fx": 1, "fy": 1, "cx": 1, "cy": 1, "distortion": 5}',
        }.items()
    },
    **{
        f"{column} {value}": (f"UPDATE images SET {column} = {value} WHERE id = 1",)
        for column, values in {
            "width": ("1 << 40", "0", "-5", "'wide'", "1.5"), "height": ("9223372036854775807", "0"),
            "count": ("1000000000", "-1", "'many'", "19", "0"),
            "scale_x": ("0", "-1", "1e308", "9e999", "'x'"), "scale_y": ("0",),
            "exif": ("0", "9", "'x'"), "kind": ("x'00'", "hex(zeroblob(9999))"),
            "name": ("''", "'../../evil.jpg'", "'/etc/passwd'", "'sub/../../x'", "'a' || char(10) || 'b'",
                     "'a' || char(27) || '[2J'", "x'ff'", "hex(zeroblob(9999))"),
            "reason": ("x'00'", "hex(zeroblob(999999))"), "sha256": ("x'00'", "hex(zeroblob(999))"),
            "stamp": ("x'00'",), "id": ("-3", "1 << 60"),
        }.items()
        for value in values
    },
    **{
        f"{table}, no image {end}": (f"UPDATE {table} SET image{end} = 99 WHERE image{end} = {now}",)
        for table, end, now in (
            ("pairs", 0, 1), ("pairs", 1, 3), ("failed", 0, 1), ("failed", 1, 4), ("waiting", 0, 1),
        )
    },
    "a pair of one image": ("UPDATE pairs SET image1 = image0 WHERE id = 1",),
    "a pair of text": ("UPDATE pairs SET image0 = 'x' WHERE id = 1",),
    "a waiting pair in another tile": ("UPDATE waiting SET tile0 = 5",),
    "a reason that is no text": ("UPDATE failed SET reason = x'00'",),
    "keypoints of another image": ("UPDATE keypoints SET image = 77 WHERE image = 1",),
    "no keypoints": ("DELETE FROM keypoints WHERE image = 1",),
    "keypoints that are text": ("UPDATE keypoints SET data = 'abc' WHERE image = 1",),
    "a checksum that is text": ("UPDATE keypoints SET crc = 'abc' WHERE image = 1",),
    **{
        f"descriptors, {column} {value}": (f"UPDATE descriptors SET {column} = {value} WHERE image = 1",)
        for column, value in (
            ("file", "-1"), ("file", "1 << 40"), ("file", "'x'"), ("start", "-1"), ("start", "1 << 60"),
            ("start", "'x'"), ("length", "-1"), ("length", "1 << 40"), ("length", "'x'"), ("crc", "-1"),
        )
    },
    **{
        f"settings {value[:12]}": ("UPDATE meta SET value = ? WHERE key = 'settings'", value)
        for value in (
            "[]", "7", "null", "x", "[" * 5000, '{"config": null}', '{"config": []}', '{"preset": 7}',
            '{"config": {"extractor": 7}}', '{"config": {"extractor": {"resize": "x"}}}', '{"source": 7}',
            '{"camera": [1]}', '{"upright": "yes"}', '{"config": {"estimation": null}}', '{"weights": NaN}',
        )
    },
    **{
        f"pair choice {value[:20]}": ("INSERT INTO meta VALUES ('pair_choice', ?)", value)
        for value in ("7", "{}", '{"method": "other"}', '{"method": "similar", "neighbours": -1}', "[" * 5000)
    },
    "no settings": ("DELETE FROM meta WHERE key = 'settings'",),
    "no image folder": ("DELETE FROM meta WHERE key = 'image_folder'",),
    "a folder that is no path": ("UPDATE meta SET value = 'a' || char(0) WHERE key = 'image_folder'",),
}  # fmt: skip


def apply(run: Path, name: str) -> None:
    """Make the edit of that name."""
    statements = EDITS[name]
    if "?" in statements[0]:
        edit(run, statements[0], values=statements[1:])
    else:
        edit(run, *statements)


def damaged_pair(run: Path, change) -> None:
    """Change the bytes of a pair, with a right checksum."""
    connection = sqlite3.connect(run / "run.db", isolation_level=None)
    (data,) = connection.execute("SELECT data FROM pairs WHERE id = 1").fetchone()
    data = change(bytearray(data))
    connection.execute(
        "UPDATE pairs SET data = ?, crc = ? WHERE id = 1", (bytes(data), zlib.crc32(bytes(data)))
    )
    connection.close()


def planted_files(run: Path, outside: Path) -> dict:
    """Files in a run's folder that are something else."""

    def link(name: str):
        def make() -> None:
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(outside / "target")

        return make

    def pipe(name: str):
        def make() -> None:
            (run / name).unlink(missing_ok=True)
            os.mkfifo(run / name)

        return make

    def linked_database() -> None:
        shutil.move(run / "run.db", outside / "target")
        (run / "run.db").symlink_to(outside / "target")

    def journal() -> None:
        name = str(outside / "precious").encode()
        tail = len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big")
        (run / "run.db-journal").write_bytes(bytes(512) + name + tail + bytes.fromhex("d9d505f920a163d7"))

    return {
        **{
            f"{name} is a link": link(name) for name in ("lock.db", "holder.txt", "run.db-wal", "refined.npz")
        },
        **{f"{name} is a pipe": pipe(name) for name in ("run.db", "lock.db", "refined.npz")},
        "run.db is a link": linked_database,
        "a journal that names another file": journal,
    }
