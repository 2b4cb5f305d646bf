"""Pair lists: what people put in them, and what comes out."""

import time
import tracemalloc
import unicodedata
from pathlib import Path

import pytest
from random_collection import SETTINGS

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
from matcher.collection.store import Store, Writer
from matcher.collection.workers import add_pairs, match_jobs
from matcher.errors import UsageError

NAMES = ["a.jpg", "b.jpg", "sub/c.jpg", "my photo.jpg", "été.jpg"]


@pytest.fixture
def read(tmp_path):
    """A list as bytes or text → its pairs and its faults."""

    def run(content, names=NAMES, **options):
        path = tmp_path / "pairs.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        faults = []
        return list(read_pairs(path, names, faults.append, **options)), faults

    return run


def test_a_plain_list(read):
    text = "a.jpg b.jpg\nb.jpg   sub/c.jpg\n./a.jpg été.jpg"
    pairs = [("a.jpg", "b.jpg"), ("b.jpg", "sub/c.jpg"), ("a.jpg", "été.jpg")]
    assert read(text) == (pairs, [])
    # a byte order mark, other line endings, comments and blank lines are read in silence
    text = b"\xef\xbb\xbf" + text.replace("\n", "\r\n\r\n# a comment\r\n  \n").encode()
    assert read(text) == (pairs, [])
    for line in (
        "my photo.jpg\ta.jpg",
        '"my photo.jpg" a.jpg',
        'my photo.jpg ; "a.jpg"',
        '"my photo.jpg","a.jpg"',
    ):
        assert read(line) == ([("my photo.jpg", "a.jpg")], [])
    name = b"caf\xe9.jpg".decode(errors="surrogateescape")
    assert read(b"caf\xe9.jpg a.jpg", ["a.jpg", name]) == ([(name, "a.jpg")], [])


def test_other_forms_of_names_are_taken_and_said(read, tmp_path):
    """As spreadsheets, hloc, COLMAP, Windows and macOS write them."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    folder, link = tmp_path / "photos", tmp_path / "link"
    for line, pair in (
        (r".\sub\c.jpg,.\a.jpg", ("sub/c.jpg", "a.jpg")),
        ("photos/sub/c.jpg photos/a.jpg", ("sub/c.jpg", "a.jpg")),
        (f"{link}/sub/c.jpg {folder}/a.jpg", ("sub/c.jpg", "a.jpg")),
        ("A sub/c", ("a.jpg", "sub/c.jpg")),
        (unicodedata.normalize("NFD", "été.jpg a.jpg"), ("été.jpg", "a.jpg")),
    ):
        pairs, faults = read(line, folder=folder)
        assert pairs == [pair] and {fault.kind for fault in faults} == {OTHER_FORM}


def test_what_may_be_several_images_is_not_guessed(read):
    names = ["a.jpg", "a.png", "B.jpg", "b.jpg", "c.jpg"]
    pairs, faults = read("a c.jpg\nb.JPG c.jpg\nB.jpg c", names)
    assert pairs == [("B.jpg", "c.jpg")]
    assert [(fault.line, fault.kind) for fault in faults] == [(1, MISSING), (2, MISSING), (3, OTHER_FORM)]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("sub/c.jpg b.jpg", REPEATED),
        ("a.jpg a.jpg", SELF),
        ("../../etc/passwd a.jpg", MISSING),
        (r"C:\photos\a.jpg a.jpg", MISSING),
        ("a.jpg", COLUMNS),
        ("a.jpg b" + "x" * 50_000, COLUMNS),
    ],
)
def test_a_line_that_gives_no_pair_is_reported_by_its_number(read, line, kind):
    pairs, faults = read(f"b.jpg sub/c.jpg\n{line}\na.jpg b.jpg 0.93\n", folder=Path("/photos"))
    assert pairs == [("b.jpg", "sub/c.jpg"), ("a.jpg", "b.jpg")]
    assert sorted((fault.line, fault.kind) for fault in faults) == [(2, kind), (3, EXTRA)]
    assert all(len(str(fault)) < 200 and str(fault).isprintable() for fault in faults)


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "wide.txt").write_text("a.jpg b.jpg", encoding="utf-16")
    for name in ("none.txt", "", "wide.txt"):
        with pytest.raises(UsageError, match=name or "pair list"):
            read_pairs(tmp_path / name, NAMES)


def test_a_long_list_takes_bounded_time_and_memory(tmp_path):
    """Read, and its pairs added to a run of 2000 images."""
    names = [f"day {index // 100}/image-{index:05d}.jpg" for index in range(2000)]
    lines = [f"{names[i]}\t{names[(i + step) % 2000]}\n" for step in range(1, 5) for i in range(2000)]
    (tmp_path / "pairs.txt").write_text("".join(lines) + "none.jpg none.jpg\n" * 2_000)
    Store.create(tmp_path / "run", SETTINGS).close()
    tally = FaultTally()
    with Writer(tmp_path / "run") as writer:
        with writer.transaction():
            writer.add_images(names)
        began = time.process_time()
        tracemalloc.start()
        pairs = read_pairs(tmp_path / "pairs.txt", names, tally)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert add_pairs(writer, pairs) == (8_000, 8_000)
        assert len(next(match_jobs(writer, 1)).items) == 8
    assert tally.counts[MISSING] == 2_000 and peak < 5e6 and time.process_time() - began < 8  # traced


def test_sequential_pairs_follow_the_numbers_in_the_names():
    assert list(sequential(["f10", "f2", "f1"], 1)) == [("f1", "f2"), ("f2", "f10")]
    assert len(list(sequential([f"f{i}" for i in range(10)], 3))) == 9 + 8 + 7
