"""A small finished run, and what others may have put in its place."""

import os
import shutil
import sqlite3
from functools import partial
from pathlib import Path

import numpy as np
from random_collection import features, pair, put_features, put_pair

from matcher.cameras import Camera
from matcher.collection.schema import sealed
from matcher.collection.store import EncodedPair, Store, Writer

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
            put_features(writer, name, made[name], "0" * 64)
        writer.add_images(["lost.jpg"])
        writer.fail_image("lost.jpg", "it is cut short")
        writer.put_camera("a.jpg", Camera(500.0, 500.0, 320.0, 240.0))
        for name0, name1 in (("a.jpg", "b.jpg"), ("b.jpg", "sub/c.jpg")):
            points = [made[name].keypoints.numpy() for name in (name0, name1)]
            put_pair(writer, pair(rng, name0, name1, *points, 15))
        writer.put_pairs([EncodedPair(1, 4, reason="lost.jpg: it is cut short")])
        writer.execute("INSERT INTO waiting VALUES (1, 3)")
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
    edit(run, f"UPDATE {table} SET data = ? WHERE rowid = {row}", values=(sealed(data),))


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, 'x' AS name FROM n"
FIELDS = {"status": "7", "width": "1 << 40", "count": "-1", "scale_x": "9e999", "exif": "9", "id": "-3"}
FIELDS |= {"name": "'../../evil.jpg'", "camera": f"'{'[' * 3000}'", "kind": "hex(zeroblob(9999))"}

# Statements that change one thing each.
EDITS = {
    "a view without end": ("DROP TABLE images", f"CREATE VIEW images AS {ENDLESS}"),
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON pairs BEGIN DELETE FROM images; END",),
    "no table of pairs": ("DROP TABLE pairs",),
    "a default that calls": (
        "UPDATE sqlite_schema SET sql = replace(sql, 'DEFAULT ''''', 'DEFAULT (hex(zeroblob(99)))')",
    ),
    **{f"{field}": (f"UPDATE images SET {field} = {value} WHERE id = 1",) for field, value in FIELDS.items()},
    "a name of control characters": ("UPDATE images SET name = 'a' || char(27) || '[2J' WHERE id = 1",),
    "a name that is no UTF-8": ("UPDATE images SET name = x'ff' || '' WHERE id = 1",),
    "a camera that is none": ("UPDATE images SET camera = '{}' WHERE id = 1",),
    "a pair of no image": ("UPDATE pairs SET image0 = 99 WHERE image0 = 1",),
    "a pair of one image": ("UPDATE pairs SET image1 = image0 WHERE id = 1",),
    "seconds without end": ("UPDATE pairs SET seconds = 9e999",),
    "no keypoints": ("DELETE FROM keypoints WHERE image = 1",),
    **{
        f"settings {value[:12]}": (f"UPDATE meta SET value = '{value}' WHERE key = 'settings'",)
        for value in ("7", "[" * 5000, '{"config": []}', '{"camera": [1]}')
    },
    "no settings": ("DELETE FROM meta WHERE key = 'settings'",),
    "a folder that is no path": ("UPDATE meta SET value = 'a' || char(0) WHERE key = 'image_folder'",),
}


def planted_files(run: Path, outside: Path) -> dict:
    """Files in a run's folder that are something else."""

    def link(name: str) -> None:
        if (run / name).exists():
            shutil.move(run / name, outside / "target")
        (run / name).symlink_to(outside / "target")

    def pipe(name: str) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    def journal() -> None:
        name = str(outside / "precious").encode()
        tail = len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big")
        (run / "run.db-journal").write_bytes(bytes(512) + name + tail + bytes.fromhex("d9d505f920a163d7"))

    links = ("run.db", "lock.db", "run.db-wal", "descriptors.db")
    return {
        **{f"{name} is a link": partial(link, name) for name in links},
        **{f"{name} is a pipe": partial(pipe, name) for name in ("run.db", "retrieval.safetensors")},
        "a journal that names another file": journal,
    }
