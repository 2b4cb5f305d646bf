"""Promises 1 and 2: outputs are whole and replace nothing of others; closed or full streams end no work."""

import errno
import os
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from collection_runs import QUICK, photos
from command import run
from hostile_runs import small_run

import matcher
from matcher import files
from matcher.collection.store import Store
from matcher.files import whole_folder

FORMS = {"npz": "m.npz", "csv": "m.csv", "colmap": "m.db", "hloc": "a", "kapture": "b", "openmvg": "c"}
NEEDED = {"hloc": "h5py", "colmap": "pycolmap"}
linux = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    for number, name in enumerate(photos(folder / "photos", 3)):
        (folder / "photos" / name).rename(folder / "photos" / f"view{number}.png")  # hloc takes no spaces
    given = (folder / "photos", "--run", folder / "run", *QUICK, "--workers", 0, "--exhaustive")
    assert run("collection", *given) == 0
    return folder / "run"


def fails(number: int):
    def call(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.promise(2)
@pytest.mark.parametrize("where", [(files.os, "fsync", errno.ENOSPC), (Path, "replace", errno.EIO)])
def test_a_result_is_whole_or_the_old_one(views, tmp_path, monkeypatch, where):
    result = matcher.load("nearest", max_keypoints=100, refine=False).match(*views)
    outputs = {f"out{suffix}": result.save for suffix in (".npz", ".json", ".csv")} | {"out.png": result.plot}
    for name, write in outputs.items():
        write(tmp_path / name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(*where[:2], fails(where[2]))
    for name, write in outputs.items():
        with pytest.raises(OSError, match=os.strerror(where[2])):
            write(tmp_path / name, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.promise(2)
@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_whole_or_absent_and_replaces_only_its_own(tmp_path, stored, monkeypatch, capfd, form):
    pytest.importorskip(NEEDED.get(form, "numpy"))
    out = tmp_path / FORMS[form]
    with monkeypatch.context() as patch:
        for place in (Path, os):
            for name in ("replace", "rename"):
                patch.setattr(place, name, fails(errno.ENOSPC))
        assert run("export", stored, "--to", form, out) == 6
    assert "Traceback" not in capfd.readouterr().err and list(tmp_path.iterdir()) == []
    mine = out / "notes.txt" if out.suffix == "" else out
    mine.parent.mkdir(exist_ok=True)
    if form == "colmap":
        with sqlite3.connect(mine) as connection:
            connection.execute("CREATE TABLE treasure (value)")
        connection.close()
    else:
        mine.write_text("mine")
    before = mine.read_bytes()
    assert run("export", stored, "--to", form, out) == 2
    assert "--overwrite" in capfd.readouterr().err and mine.read_bytes() == before
    for _ in range(2):
        assert run("export", stored, "--to", form, out, "--overwrite") == 0
    assert (mine.read_bytes() == before) == out.is_dir()  # files of others in a folder stay
    # an archive or list is ours; to a database COLMAP may have added, and in a folder others have files
    assert run("export", stored, "--to", form, out) == (0 if form in ("npz", "csv") else 2)


@pytest.mark.promise(2)
def test_what_an_earlier_export_wrote_is_deleted_with_it(tmp_path):
    for names in (("sparse/0/a", "sparse/1/a"), ("sparse/0/a",)):
        with whole_folder(tmp_path / "model", overwrite=True) as part:
            for name in names:
                (part / name).parent.mkdir(parents=True)
                (part / name).write_text("new")
        (tmp_path / "model" / "notes.txt").write_text("mine")
    assert (tmp_path / "model" / "notes.txt").exists() and not (tmp_path / "model/sparse/1/a").exists()


@pytest.mark.promise(2)
@linux
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("form", ["npz", "hloc", "colmap"])
def test_an_export_to_a_full_disk(stored, tmp_path, capfd, form):
    pytest.importorskip(NEEDED.get(form, "numpy"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        with suppress(OSError), (tmp_path / "others").open("wb", buffering=0) as others:
            while True:  # until nothing is left
                others.write(bytes(4096))
        assert run("export", stored, "--to", form, tmp_path / FORMS[form]) == 6
        assert "Traceback" not in capfd.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["others"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.promise(2)
def test_reports_and_runs_replace_only_their_own(stored, tmp_path, capfd):
    page, pages = tmp_path / "page.html", tmp_path / "page_pairs"
    page.write_text("mine")
    assert run("report", stored, "--output", page, "--pages", 1) == 2
    assert "--overwrite" in capfd.readouterr().err and page.read_text() == "mine"
    page.unlink()
    pages.mkdir()
    (pages / "00001.html").write_text("mine")
    assert run("report", stored, "--output", page, "--pages", 1) == 2
    assert (pages / "00001.html").read_text() == "mine" and not page.exists()
    assert run("report", stored, "--output", page, "--pages", 1, "--overwrite") == 0
    assert run("report", stored, "--output", page, "--pages", 1) == 0
    (tmp_path / "run.db").write_bytes(b"mine")
    given = ("--run", tmp_path, *QUICK, "--workers", 0, "--exhaustive", "--restart")
    assert run("collection", stored.parent / "photos", *given) == 2
    assert (tmp_path / "run.db").read_bytes() == b"mine"


@pytest.mark.promise(1)
@linux
@pytest.mark.parametrize(("redirection", "code"), [("<&- >&- 2>&-", 0), ("> /dev/full", 6)])
def test_a_run_whose_messages_nobody_reads(tmp_path, redirection, code):
    """With all three closed, a database had the number to which libraries print."""
    photos(tmp_path / "photos", 3)
    command = [sys.executable, "-P", "-m", "matcher", "collection", tmp_path / "photos", "--run"]
    command += [tmp_path / "run", *QUICK, "--exhaustive", "--workers", "0"]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *map(str, command)]
    assert subprocess.run(shell, check=False).returncode == code
    with Store.open(tmp_path / "run") as store:
        assert store.check() == [] and store.counts().pairs_done == 3


@pytest.mark.promise(1)
@linux
def test_a_log_on_a_full_disk_ends_nothing(tmp_path, capfd):
    assert run("status", small_run(tmp_path / "run"), "--log", "/dev/full") == 4
    said = capfd.readouterr()
    assert said.err.count("--log /dev/full is incomplete") == 1 and "Traceback" not in said.err
    assert "1 failed" in said.out
