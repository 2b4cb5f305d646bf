"""Promise 1 for maps that grow: killed at any moment or out of room, they go on by the same command."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
from collection_runs import pairs_done, start, wait_for
from collection_scene import render_photos

from matcher.cli import main
from matcher.collection.store import Store
from matcher.sfm.models import read_given_poses

pytest.importorskip("pycolmap")
pytestmark = [
    pytest.mark.promise(1),
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux"),
]
NEW = ("photo1.png", "photo4.png", "photo6.png")


@pytest.fixture
def grown(tmp_path):
    """A model of four photos, three more beside them, and the command that adds them."""
    render_photos(tmp_path / "photos", count=7)
    (tmp_path / "later").mkdir()
    for name in NEW:
        (tmp_path / "photos" / name).rename(tmp_path / "later" / name)
    fast = ("--preset", "nearest", "--max-keypoints", "400", "--workers", "0", "--threads", "1")
    camera = ("--camera", "528,528,239.5,179.5")
    made = ("sfm", tmp_path / "photos", "--out", tmp_path / "model", *fast, *camera)
    assert main([str(part) for part in made]) == 0
    (tmp_path / "later").rename(tmp_path / "photos" / "later")
    more = ("sfm", tmp_path / "photos" / "later", "--continue", tmp_path / "model")
    return tmp_path, (*more, "--workers", 0, "--threads", 1, "--out", tmp_path / "grown")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def finish(folder: Path, command: tuple, model: dict[str, bytes], pairs: int) -> None:
    """The run is sound and has what it had, the model is as it was, and the same command ends well."""
    assert files(folder / "model") == model
    with Store.open(folder / "model-run") as store:
        assert store.check() == [] and store.counts().pairs_done >= pairs
    assert main([str(part) for part in command]) == 0
    assert len(read_given_poses(folder / "grown").cam_from_world) == 7
    assert files(folder / "model") == model
    assert json.loads((folder / "grown" / "summary.json").read_text())["images"] == 7


@pytest.mark.parametrize("moment", ["matching", "mapping"])
def test_a_killed_map_grows_on(grown, moment, tried):
    folder, command = grown
    model, run = files(folder / "model"), folder / "model-run"
    before = pairs_done(run)
    process = start(*command)
    if moment == "matching":
        wait_for(lambda: pairs_done(run) > before, process)
    else:
        wait_for(lambda: any(folder.glob(".grown*")), process)
    done = pairs_done(run)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    tried(1)
    assert done > before and not (folder / "grown").exists()
    finish(folder, command, model, done)


def test_a_map_that_has_no_room_grows_on(grown, tried):
    folder, command = grown
    model, before = files(folder / "model"), pairs_done(folder / "model-run")
    limits = (resource.RLIMIT_FSIZE, (300_000, 300_000))
    process = start(*command, preexec_fn=lambda: resource.setrlimit(*limits))
    _, errors = process.communicate(timeout=300)
    tried(1)
    assert process.returncode in (4, 6) and "Traceback" not in errors, (process.returncode, errors)
    assert not (folder / "grown").exists()
    finish(folder, command, model, before)
