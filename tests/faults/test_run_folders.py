"""Promises 4 and 5 for run folders and features of others: every command ends soon with a clear error or a
right answer, writes nothing elsewhere and deletes nothing."""

import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from collection_runs import QUICK, photos
from command import run as command
from hostile_runs import EDITS, edit, planted_files, put_blob, small_run
from safetensors.numpy import load, save

from matcher.collection.schema import RefinedKeypoints, unsealed
from matcher.collection.store import Store, Writer
from matcher.errors import IntegrityError

pytestmark = pytest.mark.promise(5)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return small_run(tmp_path_factory.mktemp("sound") / "run")


@pytest.fixture
def run(sound, tmp_path) -> Path:
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def codes(run: Path, capfd) -> list[int]:
    """Exit codes of the commands that read a run, each in time and without a traceback."""
    out, found = run.parent / "out", []
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for words in (
        ("status", run, "--check", "--tracks"),
        ("report", run, "--output", out / "report.html"),
        ("export", run, "--to", "npz", out / "matches.npz"),
        ("merge", run, "--into", out / "merged", "--descriptors"),
    ):
        begun = time.process_time()
        found.append(command(*words))
        assert time.process_time() - begun < 5
        errors = capfd.readouterr().err
        assert "internal error" not in errors and "Traceback" not in errors, (words[0], errors)
    return found


def test_the_sound_run_is_read(run, capfd):
    """The same commands on the run as it was made: what fails below, fails by what was changed."""
    assert codes(run, capfd) == [4, 4, 0, 4]  # an image has failed, and no page can be drawn


def test_edited_stores_are_refused(sound, tmp_path):
    """By what opens them, or by what reads the row that was changed."""
    for number, statements in enumerate(EDITS.values()):
        run = Path(shutil.copytree(sound, tmp_path / f"run {number}"))
        edit(run, *statements)
        with pytest.raises(IntegrityError), Store.open(run) as store:
            assert store.images() and list(store.pairs())


@pytest.mark.parametrize("name", ["a view without end", "camera", "settings [[[[[[[[[[[["])
def test_no_command_takes_an_edited_store(run, capfd, name):
    edit(run, *EDITS[name])
    found = codes(run, capfd)
    assert set(found) <= {0, 4, 5} and found.count(5) >= 2, found


def test_it_is_neither_continued_nor_reconstructed(run, capfd):
    edit(run, *EDITS["a trigger"])
    photos(run.parent / "photos", 2)
    assert command("collection", run.parent / "photos", "--run", run, *QUICK) in (2, 5)
    assert command("sfm", run, "--out", run.parent / "model") in (2, 5)  # 2 without pycolmap
    assert "internal error" not in capfd.readouterr().err


def test_keypoints_whose_bytes_are_wrong(run, capfd):
    wrong = [np.full((20, 2), np.nan, "<f4").tobytes(), b"", bytes(152), bytes(8000)]
    for data in wrong:
        put_blob(run, "keypoints", 1, data)
        assert codes(run, capfd)[1:] == [5, 5, 5]


def changed(name: str, value: np.ndarray | None):
    """The bytes of a pair with another array."""

    def change(data: bytes) -> bytes:
        arrays = {**load(data), name: value}
        return save({key: array for key, array in arrays.items() if array is not None})

    return change


PAIRS = {
    "cut": lambda data: data[:-3],
    "a terabyte": lambda data: (2**40).to_bytes(8, "little") + data[8:],
    "no geometry of that kind": changed("facts", np.array([200, 0, 1, 1, 1], np.int32)),
    "no status of that kind": changed("facts", np.array([0, -1, 1, 1, 1], np.int32)),
    "an index": changed("indices", np.full((15, 2), 20, np.uint16)),
    "too few scores": changed("scores", np.zeros(14, np.uint16)),
    "NaN": changed("matrix", np.full((3, 3), np.nan)),
    "no matrix": changed("matrix", None),
    "points": changed("points0", np.zeros((3, 2), np.float32)),
}


def test_pairs_whose_bytes_are_wrong(run, capfd):
    with Store.open(run) as store:
        ((data,),) = store.rows("SELECT data FROM pairs WHERE id = 1")
    for change in PAIRS.values():
        put_blob(run, "pairs", 1, change(unsealed(data, "a pair")))
        with pytest.raises(IntegrityError), Store.open(run) as store:
            list(store.pairs())
    assert codes(run, capfd)[1:3] == [5, 5]


@pytest.mark.parametrize("name", planted_files(Path(), Path()))
def test_files_that_are_no_files(run, tmp_path, capfd, name):
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


def test_refined_keypoints_of_other_images_or_sizes(run, capfd):
    for points in (np.zeros((5, 2)), np.full((20, 2), np.nan)):
        found = points.astype(np.float32), np.zeros((20, 2, 2), np.float32), np.zeros(20, bool)
        with Writer(run) as writer, writer.transaction():
            writer.put_refined({"a.jpg": RefinedKeypoints(*found)})
        assert codes(run, capfd)[2] == 5


@pytest.mark.parametrize("count", [12, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_bytes(sound, tmp_path, capfd, count):
    """Bits that flip and files that are cut: commands read them or say in time what is damaged."""
    rng, run, seen = random.Random(count), tmp_path / "run", set()
    for _ in range(count):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(sound, run)
        for _ in range(rng.randint(1, 3)):
            path = run / rng.choice(["run.db", "run.db", "descriptors.db"])
            data = bytearray(path.read_bytes())
            # The pages of a database begin with what says how the rest is read.
            place = rng.choice([rng.randrange(len(data)), rng.randrange(8) * 16384 + rng.randrange(120)])
            data[place : place + 1] = bytes([rng.randrange(256)])
            path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        found = codes(run, capfd)
        assert set(found) <= {0, 2, 4, 5}
        seen.update(found)
    assert seen >= {0, 5}


# --- Features of others: a file reaches nothing else, and takes no more than it holds.


h5py = pytest.importorskip("h5py")
SECONDS = 5.0


def entry(file, name: str, count: int = 30, seed: int = 1):
    rng = np.random.default_rng(seed)
    group = file.create_group(name)
    group["keypoints"] = rng.uniform(0, 90, (count, 2)).astype(np.float32)
    descriptors = rng.random((128, count)).astype(np.float32)
    group["descriptors"] = descriptors / np.linalg.norm(descriptors, axis=0)
    group["image_size"] = np.array([100, 100])
    return group


def collect(file, run_dir) -> int:
    """Matches the features of a file, in a run for a folder of photos without any."""
    (file.parent / "photos").mkdir(exist_ok=True)
    options = ("--features", file, "--preset", "nearest", "--exhaustive", "--workers", 0)
    return command("collection", file.parent / "photos", "--run", run_dir, *options)


def replace(group, key: str, value) -> None:
    del group[key]
    group[key] = value


def stored(group, key: str, shape: tuple[int, ...], **how) -> None:
    del group[key]
    group.create_dataset(key, shape, "f4", **how)


# What is done to the entry of one image; every one is an image that failed, with a reason.
FAULTS = {
    "points of NaN": lambda g, p: replace(g, "keypoints", np.full((30, 2), np.nan, np.float32)),
    "points of text": lambda g, p: replace(g, "keypoints", np.array([b"a", b"b"])),
    "more points than descriptors": lambda g, p: replace(g, "keypoints", np.zeros((31, 2), np.float32)),
    "no descriptors": lambda g, p: g.__delitem__("descriptors"),
    "a size too large": lambda g, p: replace(g, "image_size", np.array([2.0**40, 4])),
    "a terabyte of points": lambda g, p: stored(g, "keypoints", (2**37, 2), chunks=True),
    "a link within": lambda g, p: replace(g, "keypoints", h5py.SoftLink("/good.jpg/keypoints")),
    "a link without": lambda g, p: replace(g, "keypoints", h5py.ExternalLink(str(p), "/x")),
    "data of another file": lambda g, p: stored(g, "keypoints", (10, 2), external=[(str(p), 0, 80)]),
}


def test_entries_that_are_none_fail_with_their_reason(tmp_path, capfd):
    (tmp_path / "secret").write_bytes(bytes(4096))
    with h5py.File(tmp_path / "features.h5", "w") as file:
        entry(file, "good.jpg"), entry(file, "other.jpg", seed=1)
        for name, fault in FAULTS.items():
            fault(entry(file, f"{name}.jpg"), tmp_path / "secret")
    code = collect(tmp_path / "features.h5", run_dir := tmp_path / "run")
    errors = capfd.readouterr().err
    assert code == 4 and "Traceback" not in errors, errors
    with Store.open(run_dir) as store:
        failed = {image.name: image.reason for image in store.images() if image.status == "failed"}
        assert failed.keys() == {f"{name}.jpg" for name in FAULTS}
        assert all("features.h5" in reason for reason in failed.values())
        assert store.counts().pairs_done == 1


def test_names_that_lead_elsewhere_are_not_taken(tmp_path, capfd):
    names = ["../up.jpg", "sub/../../up.jpg", "a\nb.jpg", "\x1b[2J.jpg", "x" * 2000]
    with h5py.File(tmp_path / "features.h5", "w") as file:
        entry(file, "good.jpg"), entry(file, "sub/good.jpg")
        for name in names:
            entry(file, name)
    collect(tmp_path / "features.h5", tmp_path / "run")
    capfd.readouterr()
    with Store.open(tmp_path / "run") as store:
        assert sorted(image.name for image in store.images()) == ["good.jpg", "sub/good.jpg"]


@pytest.mark.parametrize("depth", [0, 1000])
def test_groups_in_groups_without_end_are_refused_soon(tmp_path, capfd, depth):
    """A group that holds itself is looked at once; a thousand in each other took HDF5's own search 11 s."""
    with h5py.File(tmp_path / "features.h5", "w") as file:
        entry(file, "good.jpg"), entry(file, "sub/other.jpg", seed=2)
        file["sub/again"], file["good.jpg/self"] = file["/"], file["good.jpg"]
        group = file.create_group("d")
        for _ in range(depth):
            group = group.create_group("d")
    begun = time.process_time()
    code = collect(tmp_path / "features.h5", tmp_path / "run")
    assert time.process_time() - begun < SECONDS
    errors = capfd.readouterr().err
    assert "Traceback" not in errors and "internal error" not in errors, errors
    assert code == (2 if depth else 0) and ("groups in groups" in errors) == bool(depth)


def test_features_files_with_bytes_changed(tmp_path, capfd):
    """Other features, or a clear error: HDF5 has errors of its own for a heap or a type that is damaged."""
    with h5py.File(tmp_path / "whole.h5", "w", libver="latest") as file:
        entry(file, "good.jpg"), entry(file, "other.jpg", seed=2)
    whole, rng, path = (tmp_path / "whole.h5").read_bytes(), np.random.default_rng(5), tmp_path / "x.h5"
    codes = set()
    for number in range(15):
        changed = bytearray(whole)
        for place in rng.integers(0, min(len(whole), 6000) if number % 2 else len(whole), 1 + number % 4):
            changed[place] = rng.integers(256)
        path.write_bytes(changed[: None if number % 5 else rng.integers(len(whole))])
        codes.add(collect(path, tmp_path / f"run{number}"))
        errors = capfd.readouterr().err
        assert codes <= {0, 2, 4, 5} and "Traceback" not in errors and "internal error" not in errors, errors
    assert len(codes) > 1
