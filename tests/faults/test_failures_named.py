"""Promise 9: what failed is named. Every image, pair and line without a result is counted, with why."""

import sys

import pytest
from collection_runs import QUICK, photos
from command import run

from matcher.collection.store import Store

pytestmark = pytest.mark.promise(9)


@pytest.fixture
def folder(tmp_path):
    """Three photos that are whole, and one of every kind of damage."""
    names = photos(tmp_path / "photos", 3)
    whole = (tmp_path / "photos" / names[0]).read_bytes()
    damaged = {
        "cut.png": whole[: len(whole) // 2],
        "empty.jpg": b"",
        "text.jpg": b"this is a letter",
        "flipped.png": whole[:200] + bytes([whole[200] ^ 64]) + whole[201:],
        "page.png": b"<!doctype html><title>404</title>",
    }
    for name, data in damaged.items():
        (tmp_path / "photos" / name).write_bytes(data)
    return tmp_path / "photos", sorted(damaged)


def test_images_that_cannot_be_used_are_named_with_their_reasons(folder, tmp_path, capfd):
    run_dir = tmp_path / "run"
    command = ["collection", folder[0], "--run", run_dir, *QUICK, "--exhaustive", "--workers", 0]
    assert run(*command) == 4
    capfd.readouterr()
    with Store.open(run_dir) as store:
        failed = {image.name: image.reason for image in store.images() if image.status == "failed"}
        pairs = {frozenset(ends) for *ends, _ in store.failed()}
        counts = store.counts()
    assert sorted(failed) == folder[1] and all(failed.values())
    assert counts.pairs_done == 3 and len(pairs) == counts.pairs_failed == 25
    assert run("status", run_dir) == 4
    shown = capfd.readouterr().out
    assert all(name in shown for name in folder[1]) and "25 failed" in shown
    assert run("report", run_dir, "--output", tmp_path / "r.html") == 0
    page = (tmp_path / "r.html").read_text("utf-8")
    assert all(name in page for name in folder[1])


def test_names_that_cannot_be_stored_are_named(tmp_path, capfd):
    """It said that the folder holds no images, in a locale that is not UTF-8 for example."""
    (name,) = photos(tmp_path / "photos", 1)
    (tmp_path / "photos" / name).rename(tmp_path / "photos" / "a\nb.png")
    command = ["collection", tmp_path / "photos", "--run", tmp_path / "run", *QUICK, "--exhaustive"]
    assert run(*command) == 2
    assert "be stored ('a\\nb.png')" in capfd.readouterr().err
    photos(tmp_path / "photos", 2)
    assert run(*command, "-q") == 4 and "a\\nb.png" in capfd.readouterr().err


# --- COLMAP's process, when it aborts or is killed.


DEATHS = {
    "SIGABRT": "import os, sys; print('Check failed: x > 0', file=sys.stderr, flush=True); os.abort()",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("name", DEATHS)
def test_the_command_outlives_colmap(tmp_path, monkeypatch, capfd, name):
    pytest.importorskip("pycolmap")
    photos(tmp_path / "photos", 3)
    dying = [sys.executable, "-c", DEATHS[name]]
    monkeypatch.setattr("matcher.sfm.reconstruct.child_command", lambda _: dying)
    code = run("sfm", tmp_path / "photos", "--out", tmp_path / "model", *QUICK, "--workers", 0)
    errors = capfd.readouterr().err
    assert code not in (0, 1) and "Traceback" not in errors and "internal error" not in errors, errors
    assert f"COLMAP's process ended early (signal {name})" in errors
    assert ("Check failed: x > 0" in errors) == (name == "SIGABRT")
    assert not (tmp_path / "model").exists()
    with Store.open(tmp_path / "model-run") as store:
        assert store.check() == [] and store.counts().pairs_done == 3
