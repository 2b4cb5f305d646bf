"""Promises 4 and 5 for features of others: a file reaches nothing else, and takes no more than it holds."""

import time

import numpy as np
import pytest
from command import run

from matcher.collection.store import Store

h5py = pytest.importorskip("h5py")
pytestmark = pytest.mark.promise(5)
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
    options = ("--features", file, "--preset", "nearest", "--exhaustive", "--workers", 0)
    return run("collection", file.parent / "photos", "--run", run_dir, *options)


def replace(group, key: str, value) -> None:
    del group[key]
    group[key] = value


def huge(group, key: str, shape: tuple[int, ...]) -> None:
    del group[key]
    group.create_dataset(key, shape=shape, dtype="f4", chunks=True)


def external(group, key: str, path) -> None:
    del group[key]
    group.create_dataset(key, (10, 2), "f4", external=[(str(path), 0, h5py.h5f.UNLIMITED)])


# What is done to the entry of one image; every one is an image that failed, with a reason.
FAULTS = {
    "points of NaN": lambda g, p: replace(g, "keypoints", np.full((30, 2), np.nan, np.float32)),
    "points of text": lambda g, p: replace(g, "keypoints", np.array([b"a", b"b"])),
    "more points than descriptors": lambda g, p: replace(g, "keypoints", np.zeros((31, 2), np.float32)),
    "no descriptors": lambda g, p: g.__delitem__("descriptors"),
    "a size too large": lambda g, p: replace(g, "image_size", np.array([2.0**40, 4])),
    "a terabyte of points": lambda g, p: huge(g, "keypoints", (2**37, 2)),
    "a link within": lambda g, p: replace(g, "keypoints", h5py.SoftLink("/good.jpg/keypoints")),
    "a link without": lambda g, p: replace(g, "keypoints", h5py.ExternalLink(str(p), "/x")),
    "data of another file": lambda g, p: external(g, "keypoints", p),
}


def test_entries_that_are_none_fail_with_their_reason(tmp_path, capfd, tried):
    (tmp_path / "photos").mkdir()
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
    tried(len(FAULTS))


def test_names_that_lead_elsewhere_are_not_taken(tmp_path, capfd, tried):
    (tmp_path / "photos").mkdir()
    names = ["../up.jpg", "sub/../../up.jpg", "a\nb.jpg", "\x1b[2J.jpg", "x" * 2000]
    with h5py.File(tmp_path / "features.h5", "w") as file:
        entry(file, "good.jpg"), entry(file, "sub/good.jpg")
        for name in names:
            entry(file, name)
    collect(tmp_path / "features.h5", tmp_path / "run")
    capfd.readouterr()
    with Store.open(tmp_path / "run") as store:
        assert sorted(image.name for image in store.images()) == ["good.jpg", "sub/good.jpg"]
    tried(len(names))


@pytest.mark.parametrize("depth", [0, 1000])
def test_groups_in_groups_without_end_are_refused_soon(tmp_path, capfd, depth):
    """A group that holds itself is looked at once; a thousand in each other took HDF5's own search 11 s."""
    (tmp_path / "photos").mkdir()
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


def test_features_files_with_bytes_changed(tmp_path, capfd, tried):
    """Other features, or a clear error: HDF5 has errors of its own for a heap or a type that is damaged."""
    (tmp_path / "photos").mkdir()
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
        tried()
    assert len(codes) > 1
