"""Promise 2: nothing half-written is taken for whole. An output appears complete, or the old one stays."""

import errno
import os
from pathlib import Path

import pytest
from hostile_runs import small_run

import matcher
from matcher import files
from matcher.cli import main

pytestmark = pytest.mark.promise(2)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    from collection_runs import photos

    folder = tmp_path_factory.mktemp("pair")
    names = photos(folder, 2)
    pipe = matcher.load("nearest", max_keypoints=100, device="cpu", refine=False)
    return pipe.match(*(folder / name for name in names))


def fails(number: int):
    def call(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


# What may go wrong on the way to the disk: name → what is replaced by a failure.
STEPS = {
    "flushing to the disk": (files.os, "fsync", errno.ENOSPC),
    "taking the name": (Path, "replace", errno.EIO),
    "taking the name, quota": (Path, "replace", errno.EDQUOT),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("suffix", [".npz", ".json", ".png", ".svg", ".pdf"])
def test_a_result_is_whole_or_the_old_one(result, tmp_path, monkeypatch, step, suffix):
    path = tmp_path / f"out{suffix}"
    write = result.save if suffix in (".npz", ".json") else result.plot
    write(path)
    before = path.read_bytes()
    where, name, number = STEPS[step]
    monkeypatch.setattr(where, name, fails(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        write(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("form", ["npz", "hloc", "kapture", "openmvg", "colmap"])
def test_an_export_is_whole_or_absent(tmp_path, monkeypatch, capfd, form):
    pytest.importorskip({"hloc": "h5py", "colmap": "pycolmap"}.get(form, "numpy"))
    run = small_run(tmp_path / "run")
    out = tmp_path / "out" / {"npz": "m.npz", "colmap": "m.db"}.get(form, "folder")
    out.parent.mkdir()
    monkeypatch.setattr(Path, "replace", fails(errno.ENOSPC))
    monkeypatch.setattr(Path, "rename", fails(errno.ENOSPC))
    monkeypatch.setattr(os, "replace", fails(errno.ENOSPC))
    monkeypatch.setattr(os, "rename", fails(errno.ENOSPC))
    assert main(["export", str(run), "--to", form, str(out)]) == 6
    assert "Traceback" not in capfd.readouterr().err
    assert not out.exists()
    assert list(out.parent.iterdir()) == []
