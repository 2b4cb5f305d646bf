"""The store of a run: what is written comes back, what is damaged is said; pair lists."""

import tracemalloc
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_collection import SETTINGS, features, fill, pair, put_features

from matcher.cameras import Camera
from matcher.collection import schema
from matcher.collection.pairs import (
    COLUMNS,
    EXTRA,
    MISSING,
    OTHER_FORM,
    REPEATED,
    SELF,
    FaultTally,
    read_pairs,
    sequential,
)
from matcher.collection.schema import Counts, decode_pair, encode_pair
from matcher.collection.sources import NameTable
from matcher.collection.store import Store, Writer
from matcher.collection.workers import add_pairs, match_jobs
from matcher.errors import IntegrityError, UsageError
from matcher.types import Repetition


@pytest.mark.parametrize(
    ("count0", "refined", "matches"), [(400, False, 0), (400, False, 299), (70_000, True, 299)]
)
def test_a_pair_survives_its_bytes(rng, count0, refined, matches):
    points0 = rng.uniform(0, 6000, (count0, 2)).astype(np.float32)
    points1 = rng.uniform(0, 6000, (300, 2)).astype(np.float32)
    wanted = pair(rng, "a", "b", points0, points1, matches)
    moved = wanted.matches.points1 + refined * (rng.random((matches, 1)) < 0.5).astype(np.float32)
    wanted = replace(wanted, matches=replace(wanted.matches, points1=moved, overlay=points0[None, :2]))
    pose = np.vstack([rng.normal(size=(3, 4)), [0, 0, 0, 1]])
    known = {"cam1_from_cam0": pose, "repetition": Repetition(0.25, 0.5, 0.75), "evidence": 1.5}
    geometry = replace(wanted.geometry, kind="essential", **known)
    data = encode_pair(wanted.matches, geometry, points0, points1)
    assert refined or len(data) < 3000
    found, read = decode_pair(data, points0, points1)
    for name in ("indices", "points0", "points1", "layers_run", "kept0", "kept1", "overlay"):
        assert np.array_equal(getattr(found, name), getattr(wanted.matches, name)), name
    assert np.allclose(found.scores, wanted.matches.scores, atol=0.5001 / 65535)
    for name in ("inliers", "matrix", "cam1_from_cam0", "status", "repetition", "evidence"):
        assert np.array_equal(getattr(read, name), getattr(geometry, name)), name
    with pytest.raises(IntegrityError):
        decode_pair(data[:-1], points0, points1)


def test_a_store_gives_back_what_was_written(rng, tmp_path):
    written = fill(tmp_path / "run", rng)
    distorted = Camera(500, 500, 320.5, 240, (640, 480), "SIMPLE_RADIAL", (0.1,))
    with Writer(tmp_path / "run") as writer:
        with writer.transaction():
            writer.put_camera("im 002.jpg", distorted)
        with pytest.raises(ZeroDivisionError), writer.transaction():
            put_features(writer, "lost.jpg", features(rng))
            raise ZeroDivisionError
    with Store.open(tmp_path / "run") as store:
        assert store.settings == SETTINGS and store.image_folder == tmp_path / "photos"
        assert store.counts() == Counts(4, 0, 0, 6, 0, 0)
        images = store.images()
        assert [image.name for image in images] == [f"im {n:03d}.jpg" for n in range(4)]
        assert (images[0].size, images[0].count, images[0].status) == ((640, 480), 400, "done")
        assert images[0].path == tmp_path / "photos" / "im 000.jpg"
        assert (images[0].camera, images[2].camera) == (None, distorted)
        for found, wanted in zip(store.pairs(), written, strict=True):
            assert (found.name0, found.name1) == (wanted.name0, wanted.name1)
            assert np.array_equal(found.matches.indices, wanted.matches.indices)
        kept = store.features("im 001.jpg")
        assert np.array_equal(kept.keypoints, store.keypoints("im 001.jpg"))
        assert (kept.kind, int(kept.exif_orientation)) == ("sift", 6)
        assert store.check() == []
        with pytest.raises(UsageError, match="absent"):
            store.keypoints("absent.jpg")


def test_damage_and_other_versions_are_said(rng, tmp_path):
    fill(tmp_path, rng)
    path = tmp_path / schema.DATABASE
    whole = path.read_bytes()
    with Store.open(tmp_path) as store:
        ((blob,),) = store.rows("SELECT data FROM pairs WHERE id = 3")
    place = whole.find(blob[-300:-240])
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    with Store.open(tmp_path) as store:
        with pytest.raises(IntegrityError, match=r"im 000.jpg and im 003.jpg"):
            list(store.pairs())
        assert len(store.check()) == 1
    for damaged in (b"no database at all" * 99, whole[: len(whole) // 3], b"", b"\0" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"run\.db"):
            Store.open(tmp_path)
    path.write_bytes(whole[:60] + (99).to_bytes(4, "big") + whole[64:])  # SQLite's user_version
    for opened in (Store.open, Writer):
        with pytest.raises(IntegrityError, match="newer"):
            opened(tmp_path)


# --- Pair lists: what people put in them, and what comes out.


NAMES = ["a.jpg", "b.jpg", "sub/c.jpg", "my photo.jpg", "été.jpg"]


@pytest.fixture
def read(tmp_path):
    """A list as bytes or text → its pairs and its faults."""

    def run(content, names=NAMES, **options):
        path = tmp_path / "pairs.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        faults = []
        return list(read_pairs(path, names, lambda *fault: faults.append(fault), **options)), faults

    return run


def test_a_plain_list(read):
    text = "a.jpg b.jpg\nb.jpg   sub/c.jpg\n./a.jpg été.jpg"
    pairs = [("a.jpg", "b.jpg"), ("b.jpg", "sub/c.jpg"), ("a.jpg", "été.jpg")]
    assert read(text) == (pairs, [])
    # a byte order mark, other line endings, comments and blank lines are read in silence
    text = b"\xef\xbb\xbf" + text.replace("\n", "\r\n\r\n# a comment\r\n  \n").encode()
    assert read(text) == read(text.decode().encode("utf-16")) == (pairs, [])
    for line in (
        "my photo.jpg\ta.jpg",
        '"my photo.jpg" a.jpg',
        'my photo.jpg ; "a.jpg"',
        '"my photo.jpg","a.jpg"',
    ):
        assert read(line) == ([("my photo.jpg", "a.jpg")], [])
    name = b"caf\xe9.jpg".decode(errors="surrogateescape")
    assert read(b"caf\xe9.jpg a.jpg", ["a.jpg", name]) == ([(name, "a.jpg")], [])
    with pytest.raises(UsageError, match=r"none\.txt"):
        read_pairs("none.txt", NAMES)


def test_other_forms_of_names_are_taken_and_said(read, tmp_path):
    """As spreadsheets, hloc, COLMAP, Windows and macOS write them."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    folder, link = tmp_path / "photos", tmp_path / "link"
    for line, wanted in (
        (r".\sub\c.jpg,.\a.jpg", ("sub/c.jpg", "a.jpg")),
        ("photos/sub/c.jpg photos/a.jpg", ("sub/c.jpg", "a.jpg")),
        (f"{link}/sub/c.jpg {folder}/a.jpg", ("sub/c.jpg", "a.jpg")),
        (r"C:\my\photos\sub\c.jpg;\\pc\photos\A.JPG", ("sub/c.jpg", "a.jpg")),
        ("A sub/c", ("a.jpg", "sub/c.jpg")),
        (unicodedata.normalize("NFD", "été.jpg a.jpg"), ("été.jpg", "a.jpg")),
    ):
        pairs, faults = read(line, folder=folder)
        assert pairs == [wanted] and {kind for _, kind, _ in faults} == {OTHER_FORM}


def test_what_may_be_several_images_is_not_guessed(read):
    names = ["a.jpg", "a.png", "B.jpg", "b.jpg", "c.jpg"]
    pairs, faults = read("a c.jpg\nb.JPG c.jpg\nB.jpg c", names)
    assert pairs == [("B.jpg", "c.jpg")]
    assert [fault[:2] for fault in faults] == [(1, MISSING), (2, MISSING), (3, OTHER_FORM)]
    found = read("a.jpg b.jpg\nb.jpg a.jpg\na.jpg a.jpg\nb.jpg a.jpg", partners=NameTable(["a.jpg", "b.jpg"]))
    assert found[0] == [("a.jpg", "b.jpg"), ("b.jpg", "a.jpg"), ("a.jpg", "a.jpg")]  # second ones are others


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("sub/c.jpg b.jpg", REPEATED),
        ("a.jpg a.jpg", SELF),
        ("../../etc/passwd a.jpg", MISSING),
        (r"C:\photo\a.jpg a.jpg", MISSING),
        ("a.jpg", COLUMNS),
        ("a.jpg b" + "x" * 50_000, COLUMNS),
    ],
)
def test_a_line_that_gives_no_pair_is_reported_by_its_number(read, line, kind):
    pairs, faults = read(f"b.jpg sub/c.jpg\n{line}\na.jpg b.jpg 0.93\n", folder=Path("/photos"))
    assert pairs == [("b.jpg", "sub/c.jpg"), ("a.jpg", "b.jpg")]
    assert sorted(fault[:2] for fault in faults) == [(2, kind), (3, EXTRA)]
    assert all(len(text) < 100 and text.isprintable() for *_, text in faults)


def test_a_long_list_takes_bounded_memory(tmp_path):
    """Read, and its pairs added to a run of 2000 images."""
    names = [f"day {index // 100}/image-{index:05d}.jpg" for index in range(2000)]
    lines = [f"{names[i]}\t{names[(i + step) % 2000]}\n" for step in range(1, 5) for i in range(2000)]
    (tmp_path / "pairs.txt").write_text("".join(lines) + "none.jpg none.jpg\n" * 2_000)
    Store.create(tmp_path / "run", SETTINGS).close()
    tally = FaultTally()
    with Writer(tmp_path / "run") as writer:
        with writer.transaction():
            writer.add_images(names)
        tracemalloc.start()
        pairs = read_pairs(tmp_path / "pairs.txt", names, tally)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert add_pairs(writer, pairs) == (8_000, 8_000)
        assert len(next(match_jobs(writer, 1)).items) == 8
    assert tally.counts[MISSING] == 2_000 and peak < 5e6


def test_sequential_pairs_follow_the_numbers_in_the_names():
    assert list(sequential(["f10", "f2", "f1"], 1)) == [("f1", "f2"), ("f2", "f10")]
    assert len(list(sequential([f"f{i}" for i in range(10)], 3))) == 9 + 8 + 7
