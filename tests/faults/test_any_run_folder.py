"""Promises 4 and 5 for run folders that nobody thought of: any values, rows and bytes of a finished run."""

import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from fuzzing import examples, seeded
from hostile_runs import small_run
from hypothesis import given
from hypothesis import strategies as st

from matcher.cli import main

pytestmark = pytest.mark.promise(5)
SECONDS = 5.0

VALUES = st.one_of(
    st.none(),
    st.sampled_from([0, 1, 2, 3, 4, 99, -1, 2**31, 2**40, 2**63 - 1, -(2**63)]),
    st.sampled_from([0.5, -0.0, 1e-308, 1e308, float("inf"), 1e19]),
    st.sampled_from(
        ["", "x", "1", "a.jpg", "../a.jpg", "/etc/passwd", "[" * 4000, "{}", "null", "NaN", "a\x1b[2J"]
    ),
    st.text(max_size=5).filter(lambda text: text.isprintable()),
    st.binary(max_size=40),
)
CELLS = st.tuples(st.just("cell"), st.integers(0, 200), st.integers(0, 20), VALUES)
ROWS = st.tuples(st.sampled_from(["delete", "copy"]), st.integers(0, 20), st.integers(0, 20), st.none())
BYTES = st.tuples(
    st.just("byte"), st.sampled_from(["run.db", "descriptors-00000.bin"]), st.integers(0), st.integers(0, 255)
)
CUTS = st.tuples(
    st.just("cut"), st.sampled_from(["run.db", "descriptors-00000.bin"]), st.integers(0), st.none()
)


def tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    return [name for (name,) in rows if not name.startswith("sqlite_")]


def change(run: Path, what: str, first, second: int, value) -> None:
    """One change; rows and columns are counted round and round."""
    if what in ("byte", "cut"):
        data = bytearray((run / first).read_bytes())
        place = second % max(1, len(data))
        data[place : place + 1] = [value] if what == "byte" else data[:0]
        (run / first).write_bytes(data if what == "byte" else data[:place])
        return
    connection = sqlite3.connect(run / "run.db", isolation_level=None)
    try:
        names = tables(connection)
        if not names:  # the file is cut short
            return
        if what == "cell":
            columns = [(t, row[1]) for t in names for row in connection.execute(f"PRAGMA table_info({t})")]
            table, column = columns[first % len(columns)]
        else:
            table = names[first % len(names)]
        rows = [row for (row,) in connection.execute(f"SELECT rowid FROM {table}")]
        if not rows:
            return
        row = rows[second % len(rows)]
        if what == "cell":
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, row))
        elif what == "delete":
            connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
        else:
            connection.execute(f"INSERT INTO {table} SELECT * FROM {table} WHERE rowid = ?", (row,))
    except (sqlite3.Error, UnicodeDecodeError):
        pass  # the store's own schema does not let it in, or the file is damaged already
    finally:
        connection.close()


def test_names_of_tables_that_are_no_text(tmp_path, capfd):
    """Found by chance: SQLite's message about them is no text either."""
    run = small_run(tmp_path / "run")
    data = (run / "run.db").read_bytes()
    place = data.index(b"CREATE TABLE images") + 8
    (run / "run.db").write_bytes(data[:place] + b"\x80" + data[place + 1 :])
    assert main(["status", str(run)]) == 5
    assert "run.db is damaged" in capfd.readouterr().err


@examples(20, 3_000)
def test_run_folders_of_any_values(tmp_path, capfd, tried, examples):
    """Every command reads them or says in time what is damaged; nothing appears beside its output."""
    sound, run, out = small_run(tmp_path / "sound"), tmp_path / "run", tmp_path / "out"
    commands = (
        ["status", run, "--check"],
        ["export", run, "--to", "npz", out / "matches.npz", "--overwrite"],
        ["report", run, "--output", out / "report.html", "--overwrite"],
    )
    codes = set()

    @seeded(examples)
    @given(st.lists(st.one_of(CELLS, CELLS, CELLS, ROWS, BYTES, CUTS), min_size=1, max_size=3))
    def check(changes):
        tried()
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(sound, run)
        out.mkdir()
        for each in changes:
            change(run, *each)
        for command in commands:
            begun = time.process_time()
            code = main([*map(str, command)])
            assert time.process_time() - begun < SECONDS, (command[0], changes)
            errors = capfd.readouterr().err
            assert code in (0, 2, 4, 5), (command[0], changes, errors)
            assert "internal error" not in errors and "Traceback" not in errors, (command[0], changes, errors)
            codes.add(code)
        assert {path.name for path in out.iterdir()} <= {"matches.npz", "report.html", "report_pairs"}

    check()
    assert codes >= {0, 5}
    assert {path.name for path in tmp_path.iterdir()} == {"sound", "run", "out"}
