"""Promise 9 for COLMAP's process: when it aborts or is killed, the command says so and what it had stays."""

import sys

import pytest
from collection_runs import QUICK, photos

from matcher.cli import main
from matcher.collection.store import Store

pytest.importorskip("pycolmap")
pytestmark = pytest.mark.promise(9)
DEATHS = {
    "SIGABRT": "import os, sys; print('Check failed: x > 0', file=sys.stderr, flush=True); os.abort()",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("name", DEATHS)
def test_the_command_outlives_colmap(tmp_path, monkeypatch, capfd, name):
    photos(tmp_path / "photos", 3)
    monkeypatch.setattr(
        "matcher.sfm.reconstruct.child_command", lambda _: [sys.executable, "-c", DEATHS[name]]
    )
    made = ("sfm", tmp_path / "photos", "--out", tmp_path / "model", *QUICK, "--workers", 0)
    code = main([str(part) for part in made])
    errors = capfd.readouterr().err
    assert code not in (0, 1) and "Traceback" not in errors and "internal error" not in errors, errors
    assert f"COLMAP's process ended early (signal {name})" in errors
    assert ("Check failed: x > 0" in errors) == (name == "SIGABRT")
    assert not (tmp_path / "model").exists()
    with Store.open(tmp_path / "model-run") as store:
        assert store.check() == [] and store.counts().pairs_done == 3
