"""Promises 4 and 5 for run folders: whatever is in one, every command ends soon with a clear error or a right
answer, writes nothing elsewhere and deletes nothing."""

import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from collection_runs import QUICK, photos
from hostile_runs import EDITS, apply, blob, damaged_pair, edit, planted_files, small_run

from matcher.cli import main
from matcher.collection.store import Store, Writer
from matcher.errors import IntegrityError

pytestmark = pytest.mark.promise(5)
SECONDS = 5.0


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return small_run(tmp_path_factory.mktemp("sound") / "run")


@pytest.fixture
def run(sound, tmp_path) -> Path:
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def commands(run: Path) -> list[list[str]]:
    out = run.parent / "out"
    out.mkdir(exist_ok=True)
    return [
        ["status", str(run), "--check", "--tracks"],
        ["report", str(run), "--output", str(out / "report.html"), "--overwrite"],
        ["export", str(run), "--to", "npz", str(out / "matches.npz"), "--overwrite"],
        ["merge", str(run), "--into", str(out / "merged"), "--descriptors"],
    ]


def codes(run: Path, capfd) -> list[int]:
    """Exit codes of all commands on a run, each in time and without a traceback."""
    found = []
    for command in commands(run):
        begun = time.process_time()
        found.append(main(command))
        assert time.process_time() - begun < SECONDS
        errors = capfd.readouterr().err
        assert "internal error" not in errors and "Traceback" not in errors, (command[0], errors)
    return found


def test_the_sound_run_is_read(run, capfd):
    """The same commands on the run as it was made: what fails below, fails by what was changed."""
    assert codes(run, capfd) == [4, 0, 0, 4]


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_store_is_not_opened(run, tried, name):
    apply(run, name)
    begun = time.process_time()
    with pytest.raises(IntegrityError, match=r"run\.db.* is damaged"):
        Store.open(run)
    with pytest.raises(IntegrityError, match=r"run\.db.* is damaged"):
        Writer(run)
    assert time.process_time() - begun < SECONDS
    tried(2)


@pytest.mark.parametrize("name", [*EDITS][::12])
def test_every_command_refuses_it(run, capfd, tried, name):
    apply(run, name)
    assert codes(run, capfd) == [5] * 4
    photos(run.parent / "photos", 2)
    assert main(["collection", str(run.parent / "photos"), "--run", str(run), *QUICK]) in (2, 5)
    assert main(["sfm", str(run), "--out", str(run.parent / "model")]) == 5
    assert "internal error" not in capfd.readouterr().err
    tried(6)


def test_the_row_is_named(run):
    edit(run, "UPDATE images SET exif = 9 WHERE id = 2")
    with pytest.raises(IntegrityError, match=r"row 2 of images \('b\.jpg'\): its exif is 9"):
        Store.open(run)
    edit(run, "UPDATE images SET exif = 1 WHERE id = 2", "UPDATE pairs SET image1 = 9 WHERE id = 2")
    with pytest.raises(IntegrityError, match=r"row 2, 9 of pairs: no pair of two images of the run"):
        Store.open(run)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_keypoints_that_are_not_finite(run, capfd, value):
    points = np.zeros((20, 2), "<f4")
    points[3, 1] = value
    blob(run, points.tobytes())
    assert codes(run, capfd)[1:] == [5, 5, 5]


@pytest.mark.parametrize("length", [0, 7, 152, 168, 8000])
def test_keypoints_of_another_length(run, capfd, tried, length):
    blob(run, bytes(length))
    assert codes(run, capfd) == [5] * 4
    tried(4)


PAIRS = {
    "cut": lambda data: data[:-3],
    "longer": lambda data: data + b"\0",
    "version": lambda data: bytes([9]) + data[1:],
    "kind": lambda data: data[:1] + bytes([200]) + data[2:],
    "status": lambda data: data[:2] + bytes([200]) + data[3:],
    "flags": lambda data: data[:3] + bytes([255]) + data[4:],
    "count": lambda data: data[:4] + struct.pack("<I", 2**32 - 1) + data[8:],
    "index": lambda data: data[:18] + b"\xff\xff" + data[20:],
    "matrix": lambda data: data[:-8] + struct.pack("<d", np.nan),
    "empty": lambda data: b"",
    "no matrix": lambda data: data[:3] + bytes([0]) + data[4:-72],
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_whose_bytes_are_wrong(run, capfd, tried, name):
    damaged_pair(run, PAIRS[name])
    assert codes(run, capfd)[1:3] == [5, 5]
    tried(3)


@pytest.mark.parametrize("seconds", ["9e999", "-1", "'x'"])
def test_a_pair_whose_seconds_are_wrong(run, capfd, seconds):
    edit(run, f"UPDATE pairs SET seconds = {seconds} WHERE id = 1")
    assert codes(run, capfd)[1:3] == [5, 5]


@pytest.mark.parametrize("name", planted_files(Path(), Path()))
def test_files_that_are_no_files(run, tmp_path, capfd, tried, name):
    """A link is not followed, a pipe not waited for, and nothing appears or goes elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    planted_files(run, outside)[name]()
    before = {path.name: path.stat().st_mtime_ns for path in outside.iterdir()}
    assert codes(run, capfd)[:3] == [5] * 3
    with pytest.raises(IntegrityError):
        Writer(run)
    assert {path.name: path.stat().st_mtime_ns for path in outside.iterdir()} == before
    tried(4)


def test_descriptors_that_are_a_link_are_neither_read_nor_written(run, tmp_path):
    (tmp_path / "target").write_bytes(b"mine")
    (run / "descriptors-00000.bin").unlink()
    (run / "descriptors-00000.bin").symlink_to(tmp_path / "target")
    with Store.open(run) as store, pytest.raises(IntegrityError, match="is a link"):
        store.features("a.jpg")
    with Writer(run) as writer, writer.transaction():
        writer.put_descriptors(1, b"record")
    assert (tmp_path / "target").read_bytes() == b"mine"


def test_refined_keypoints_of_other_images_or_sizes(run, capfd):
    arrays = {
        "names": np.array(["a.jpg"]),
        "offsets": np.array([0, 20]),
        "keypoints": np.zeros((20, 2), np.float32),
        "covariances": np.zeros((20, 2, 2), np.float32),
        "refined": np.zeros(20, bool),
    }
    wrong = {
        "more points than the image has": {"offsets": np.array([0, 5])},
        "not finite": {"keypoints": np.full((20, 2), np.nan, np.float32)},
        "another image": {"names": np.array(["z.jpg"])},
        "unpacks to far more than it should": {"keypoints": np.zeros((3_000_000, 2), np.float32)},
        "objects": {"offsets": np.array([{}, 1], dtype=object)},
    }
    for fault, change in wrong.items():
        np.savez_compressed(run / "refined.npz", **{**arrays, **change})
        assert main(commands(run)[2]) == 5, fault
        assert "refined.npz is damaged" in capfd.readouterr().err


def test_reading_without_end_is_stopped(tmp_path, monkeypatch):
    """Where pages of the file refer to each other in circles, no count of rows is an end."""
    from matcher.collection import store as store_check

    run = small_run(tmp_path / "run")
    monkeypatch.setattr(store_check, "_STEPS", -1)
    monkeypatch.setattr(store_check, "_STEPS_A_BYTE", 0)
    with Writer(run) as writer, writer.transaction():
        writer.add_images(f"{number}.jpg" for number in range(3000))
    with pytest.raises(IntegrityError, match="has no end"):
        Store.open(run)
