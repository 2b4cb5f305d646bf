"""Pair lists: what people put in them, and what comes out."""

import time
import tracemalloc

import pytest

from matcher.collection.pairs import (
    ABSOLUTE,
    COLUMNS,
    DUPLICATE,
    EXTRA,
    LONG,
    MISSING,
    OUTSIDE,
    REVERSED,
    SELF,
    FaultTally,
    exhaustive,
    read_pairs,
    sequential,
)
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
    pairs, faults = read("a.jpg b.jpg\nb.jpg   sub/c.jpg\n./a.jpg été.jpg")
    assert pairs == [("a.jpg", "b.jpg"), ("b.jpg", "sub/c.jpg"), ("a.jpg", "été.jpg")]
    assert faults == []


def test_byte_order_mark_line_endings_comments_and_blank_lines_are_read_in_silence(read):
    pairs, faults = read(b"\xef\xbb\xbfa.jpg b.jpg\r\n\r\n# a comment\r\n  \na.jpg sub/c.jpg\r\n")
    assert pairs == [("a.jpg", "b.jpg"), ("a.jpg", "sub/c.jpg")]
    assert faults == []


def test_names_with_spaces_by_tab_or_in_quotes(read):
    for line in ("my photo.jpg\ta.jpg", '"my photo.jpg" a.jpg', '"my photo.jpg"   "a.jpg"'):
        assert read(line) == ([("my photo.jpg", "a.jpg")], [])
    pairs, (fault,) = read("my photo.jpg a.jpg")
    assert pairs == [] and fault.kind == COLUMNS and "double quotes" in fault.text


def test_a_name_of_other_bytes_is_found(read):
    name = b"caf\xe9.jpg".decode(errors="surrogateescape")
    assert read(b"caf\xe9.jpg a.jpg", ["a.jpg", name]) == ([(name, "a.jpg")], [])


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("b.jpg sub/c.jpg", DUPLICATE),
        ("sub/c.jpg b.jpg", REVERSED),
        ("a.jpg a.jpg", SELF),
        ("a.jpg none.jpg", MISSING),
        ("a.jpg A.JPG", MISSING),
        ("../../etc/passwd a.jpg", OUTSIDE),
        ("a.jpg sub/../../secret.jpg", OUTSIDE),
        (r"..\..\secret.jpg a.jpg", OUTSIDE),
        ("/etc/passwd a.jpg", ABSOLUTE),
        (r"C:\photos\a.jpg a.jpg", ABSOLUTE),
        ("a.jpg", COLUMNS),
        ("a.jpg b" + "x" * 50_000, LONG),
        ("a.jpg b\0.jpg", MISSING),
    ],
)
def test_a_line_that_gives_no_pair_is_reported_by_its_number(read, line, kind):
    pairs, faults = read(f"b.jpg sub/c.jpg\n{line}\na.jpg b.jpg\n")
    assert pairs == [("b.jpg", "sub/c.jpg"), ("a.jpg", "b.jpg")]
    (fault,) = faults
    assert (fault.line, fault.kind) == (2, kind)
    assert len(str(fault)) < 200 and str(fault).isprintable()


def test_a_third_column_is_remarked_and_the_pair_used(read):
    pairs, (fault,) = read("a.jpg b.jpg 0.93")
    assert pairs == [("a.jpg", "b.jpg")]
    assert (fault.line, fault.kind) == (1, EXTRA)


def test_duplicates_are_found_over_the_border_of_chunks(read):
    lines = ["a.jpg b.jpg", "a.jpg sub/c.jpg", "b.jpg a.jpg", "b.jpg sub/c.jpg", "a.jpg b.jpg"]
    pairs, faults = read("\n".join(lines), chunk=2)
    assert pairs == [("a.jpg", "b.jpg"), ("a.jpg", "sub/c.jpg"), ("b.jpg", "sub/c.jpg")]
    assert [(fault.line, fault.kind) for fault in faults] == [(3, REVERSED), (5, DUPLICATE)]


def test_what_cannot_be_read_is_refused_before_the_first_pair(tmp_path):
    with pytest.raises(UsageError, match=r"none\.txt.*No such file"):
        read_pairs(tmp_path / "none.txt", NAMES)
    with pytest.raises(UsageError, match="Is a directory"):
        read_pairs(tmp_path, NAMES)
    (tmp_path / "wide.txt").write_text("a.jpg b.jpg", encoding="utf-16")
    with pytest.raises(UsageError, match="save it as UTF-8"):
        read_pairs(tmp_path / "wide.txt", NAMES)


def test_the_tally_counts_everything_and_keeps_the_first(read):
    tally = FaultTally(kept=2)
    _, faults = read("a.jpg a.jpg\n" * 50 + "a.jpg none.jpg\na.jpg b.jpg 1\n")
    for fault in faults:
        tally(fault)
    assert (tally.counts[SELF], tally.counts[MISSING], tally.refused) == (50, 1, 51)
    first, *rest = tally.lines()
    assert first == f"50 × {SELF}: line 1 (a.jpg), 2 (a.jpg), …"
    assert len(rest) == 2


def test_a_long_list_starts_at_once_in_bounded_memory(tmp_path):
    names = [f"folder/image-{index:05d}.jpg" for index in range(5000)]
    path = tmp_path / "pairs.txt"
    lines = [f"{names[i]} {names[(i + step) % 5000]}\n" for step in range(1, 21) for i in range(5000)]
    path.write_text("".join(lines))
    began = time.perf_counter()
    reading = read_pairs(path, names)
    next(reading)
    assert time.perf_counter() - began < 5
    assert sum(1 for _ in reading) == 99_999


def test_memory_does_not_grow_with_the_list(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("a.jpg b.jpg\nb.jpg none.jpg\n" * 10_000)
    tally = FaultTally()
    tracemalloc.start()
    assert list(read_pairs(path, NAMES, tally, chunk=500)) == [("a.jpg", "b.jpg")]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tally.counts[DUPLICATE], tally.counts[MISSING]) == (9_999, 10_000)
    assert peak < 1e6


def test_exhaustive_pairs():
    assert list(exhaustive(["a", "b", "c", "a"])) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert list(exhaustive(["a"])) == []


def test_sequential_pairs_follow_the_numbers_in_the_names():
    assert list(sequential(["f10", "f2", "f1"], 1)) == [("f1", "f2"), ("f2", "f10")]
    assert len(list(sequential([f"f{i}" for i in range(10)], 3))) == 9 + 8 + 7
    assert list(sequential(["2.jpg", "a.jpg", "10"], 1)) == [("2.jpg", "10"), ("10", "a.jpg")]
    with pytest.raises(UsageError, match="at least 1"):
        sequential(["a", "b"], 0)
