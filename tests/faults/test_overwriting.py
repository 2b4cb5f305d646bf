"""Promise 2: no command replaces a file that it did not write, unless --overwrite says so."""

import sqlite3
from pathlib import Path

import pytest
from collection_runs import QUICK, photos
from command import run

pytestmark = pytest.mark.promise(2)

FILES = {"colmap": "mine.db", "npz": "mine.npz"}
FOLDERS = ("hloc", "openmvg", "kapture")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    names = photos(folder / "photos", 3)
    for number, name in enumerate(names):
        (folder / "photos" / name).rename(folder / "photos" / f"view{number}.png")
    given = (folder / "photos", "--run", folder / "run", *QUICK, "--workers", 0, "--exhaustive")
    assert run("collection", *given) == 0
    return folder / "run"


def test_a_foreign_database_is_not_replaced(stored, tmp_path, capfd):
    """Reproduced once: `export run --to colmap mine.db` wrote over a table of something else, exit 0."""
    pytest.importorskip("pycolmap")
    path = tmp_path / "mine.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE treasure (value)")
        connection.execute("INSERT INTO treasure VALUES (42)")
    connection.close()
    before = path.read_bytes()
    assert run("export", stored, "--to", "colmap", path) == 2
    assert "--overwrite" in capfd.readouterr().err
    assert path.read_bytes() == before
    assert run("export", stored, "--to", "colmap", path, "--overwrite") == 0
    assert path.read_bytes() != before
    before = path.read_bytes()
    assert run("export", stored, "--to", "colmap", path) == 2  # COLMAP may have added to it
    assert path.read_bytes() == before


def test_an_archive_of_ours_is_replaced_and_another_is_not(stored, tmp_path, capfd):
    path = tmp_path / "mine.npz"
    path.write_bytes(b"mine")
    assert run("export", stored, "--to", "npz", path) == 2
    assert "--overwrite" in capfd.readouterr().err and path.read_bytes() == b"mine"
    assert run("export", stored, "--to", "npz", path, "--overwrite") == 0
    assert run("export", stored, "--to", "npz", path) == 0


@pytest.mark.parametrize("form", FOLDERS)
def test_files_of_others_in_a_folder_stay(stored, tmp_path, capfd, form):
    if form == "hloc":
        pytest.importorskip("h5py")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert run("export", stored, "--to", form, folder) == 2
    assert "--overwrite" in capfd.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert run("export", stored, "--to", form, folder, "--overwrite") == 0
    assert (folder / "notes.txt").read_text() == "mine"
    written = {path.relative_to(folder) for path in folder.rglob("*")}
    assert len(written) > 3
    assert run("export", stored, "--to", form, folder, "--overwrite") == 0
    assert {path.relative_to(folder) for path in folder.rglob("*")} == written


def test_what_an_earlier_export_wrote_is_deleted_with_it(tmp_path):
    from matcher.export.output import whole_folder

    for names in (("sparse/0/a", "sparse/1/a"), ("sparse/0/a",)):
        with whole_folder(tmp_path / "model", overwrite=True) as part:
            for name in names:
                (part / name).parent.mkdir(parents=True)
                (part / name).write_text("new")
        (tmp_path / "model" / "notes.txt").write_text("mine")
    files = sorted(p.relative_to(tmp_path / "model").as_posix() for p in (tmp_path / "model").rglob("?*.*"))
    assert files == [".matcher-files.json", "notes.txt"]
    assert not (tmp_path / "model" / "sparse" / "1" / "a").exists()


def test_a_report_replaces_reports_only(stored, tmp_path, capfd):
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert run("report", stored, "--output", page, "--pages", 1) == 2
    assert "--overwrite" in capfd.readouterr().err and page.read_text() == "mine"
    page.unlink()
    (tmp_path / "page_pairs").mkdir()
    (tmp_path / "page_pairs" / "00001.html").write_text("mine")
    assert run("report", stored, "--output", page, "--pages", 1) == 2
    assert (tmp_path / "page_pairs" / "00001.html").read_text() == "mine" and not page.exists()
    assert run("report", stored, "--output", page, "--pages", 1, "--overwrite") == 0
    assert run("report", stored, "--output", page, "--pages", 1) == 0


def test_a_restart_deletes_no_database_of_others(stored, tmp_path, capfd):
    (tmp_path / "run.db").write_bytes(b"mine")
    given = ("--run", tmp_path, *QUICK, "--workers", 0, "--exhaustive", "--restart")
    assert run("collection", stored.parent / "photos", *given) == 2
    assert "no store" in capfd.readouterr().err
    assert (tmp_path / "run.db").read_bytes() == b"mine"
