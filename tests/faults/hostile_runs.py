"""A small finished run, and what others may have put in its place."""

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
        writer.let_wait("SELECT 1 AS image0, 3 AS image1")
    return folder


def edit(run: Path, *statements: str, values: tuple = ()) -> None:
    """Change a store as its owner can, with any SQLite shell."""
    connection = sqlite3.connect(run / "run.db", isolation_level=None)
    for pragma in ("writable_schema", "ignore_check_constraints"):
        connection.execute(f"PRAGMA {pragma} = ON")
    for statement in statements:
        connection.execute(statement, values if "?" in statement else ())
    connection.close()


def put_blob(run: Path, table: str, row: int, data: bytes) -> None:
    """Other bytes of an image's keypoints or of a pair, with a right checksum."""
    key = "image" if table == "keypoints" else "id"
    edit(run, f"UPDATE {table} SET data = ?, crc = ? WHERE {key} = {row}", values=(data, zlib.crc32(data)))


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, 'x' AS name FROM n"

# Statements that change one thing each.
EDITS = {
    "a view without end": ("DROP TABLE images", f"CREATE VIEW images AS {ENDLESS}"),
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON pairs BEGIN DELETE FROM images; END",),
    "another table": ("CREATE VIRTUAL TABLE more USING fts5(x)",),
    "no table of pairs": ("DROP TABLE pairs",),
    "no index of pairs": ("DROP INDEX pairs_by_images",),
    "a default that calls": (
        "UPDATE sqlite_schema SET sql = replace(sql, 'DEFAULT ''''', 'DEFAULT (hex(zeroblob(99)))')",
    ),
    **{
        f"{column} {value}": (f"UPDATE images SET {column} = {value} WHERE id = 1",)
        for column, value in (
            *(("status", "7"), ("width", "1 << 40"), ("height", "0"), ("count", "-1"), ("scale_x", "9e999")),
            *(("scale_y", "0.0"), ("exif", "9"), ("kind", "hex(zeroblob(9999))"), ("id", "-3")),
            *(("name", "'../../evil.jpg'"), ("name", "'/etc/passwd'"), ("name", "'a' || char(27) || '[2J'")),
            *(
                ("camera", "'[1]'"),
                ("camera", "'{}'"),
                ("camera", f"'{'[' * 3000}'"),
                ("name", "x'ff' || ''"),
            ),
        )
    },
    "a pair of no image": ("UPDATE pairs SET image0 = 99 WHERE image0 = 1",),
    "a pair of one image": ("UPDATE pairs SET image1 = image0 WHERE id = 1",),
    "seconds without end": ("UPDATE pairs SET seconds = 9e999",),
    "a waiting pair in another tile": ("UPDATE waiting SET tile0 = 5",),
    "no keypoints": ("DELETE FROM keypoints WHERE image = 1",),
    "descriptors anywhere": ("UPDATE descriptors SET start = 1 << 60 WHERE image = 1",),
    **{
        f"settings {value[:12]}": (f"UPDATE meta SET value = '{value}' WHERE key = 'settings'",)
        for value in ("7", "x", "[" * 5000, '{"config": []}', '{"preset": 7}', '{"camera": [1]}')
    },
    "no settings": ("DELETE FROM meta WHERE key = 'settings'",),
    "a folder that is no path": ("UPDATE meta SET value = 'a' || char(0) WHERE key = 'image_folder'",),
}


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

    links, pipes = (
        ("lock.db", "holder.txt", "run.db-wal", "refined.npz"),
        ("run.db", "lock.db", "refined.npz"),
    )
    return {
        **{f"{name} is a link": link(name) for name in links},
        **{f"{name} is a pipe": pipe(name) for name in pipes},
        "run.db is a link": linked_database,
        "a journal that names another file": journal,
    }
