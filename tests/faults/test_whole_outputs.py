"""Promise 2: nothing half-written is taken for whole. An output appears complete, or the old one stays."""

import errno
import os
import subprocess
from contextlib import suppress
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_log_on_a_full_disk_ends_nothing(tmp_path, capfd):
    assert main(["status", str(small_run(tmp_path / "run")), "--log", "/dev/full"]) == 4
    said = capfd.readouterr()
    assert said.err.count("--log /dev/full is incomplete") == 1 and "Traceback" not in said.err, said.err
    assert "1 failed" in said.out


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("form", ["npz", "hloc", "kapture", "openmvg", "colmap"])
def test_an_export_to_a_full_disk(tmp_path, capfd, form):
    pytest.importorskip({"hloc": "h5py", "colmap": "pycolmap"}.get(form, "numpy"))
    run, disk = small_run(tmp_path / "run"), tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        with suppress(OSError), (disk / "others").open("wb", buffering=0) as others:
            while True:  # until nothing is left
                others.write(bytes(4096))
        out = disk / {"npz": "m.npz", "colmap": "m.db"}.get(form, "folder")
        assert main(["export", str(run), "--to", form, str(out)]) == 6
        assert "Traceback" not in capfd.readouterr().err
        assert [path.name for path in disk.iterdir()] == ["others"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


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
