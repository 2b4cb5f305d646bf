"""Images in folders: which files, in which order, and where shared data lie."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from matcher.errors import UsageError
from matcher.images import data_folder, find_images, is_image, list_images, natural_key
from matcher.train.views import read_photo


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def test_images_below_a_folder(tmp_path):
    touch(tmp_path, "b.JPG", "a/c.heic", "a/d.txt", ".hidden.jpg", ".cache/e.png", "a/f.pbm")
    assert sorted(list_images(tmp_path)) == ["a/c.heic", "a/f.pbm", "b.JPG"]
    assert find_images(tmp_path) == [tmp_path / "a/c.heic", tmp_path / "a/f.pbm", tmp_path / "b.JPG"]


def test_no_images_are_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"no images here \(looked for \.jpg"):
        find_images(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        find_images(tmp_path / "absent")


def test_names_that_are_images():
    assert all(map(is_image, ("a.HEIF", Path("b.webp"), "c.d.tiff")))
    assert not any(map(is_image, ("jpg", "a.jpg.txt", "a.mp4", "")))


def test_numbers_sort_as_numbers():
    names = ["f10", "f9", "f1", "f", "10", "9", "f2b3", "f2b20", "f2a"]
    assert sorted(names, key=natural_key) == ["9", "10", "f", "f1", "f2a", "f2b3", "f2b20", "f9", "f10"]


def test_the_data_folder(monkeypatch):
    monkeypatch.setenv("MATCHER_DATA", "/somewhere")
    assert data_folder() == Path("/somewhere")
    monkeypatch.delenv("MATCHER_DATA")
    assert data_folder() == Path(__file__).resolve().parents[2] / "shared"


def test_training_reads_heic(tmp_path, views):
    pillow_heif = pytest.importorskip("pillow_heif")
    pixels = cv2.resize(cv2.imread(str(views[0]))[..., ::-1], (160, 120))
    path = tmp_path / "a.heic"
    pillow_heif.from_bytes("RGB", (160, 120), np.ascontiguousarray(pixels).tobytes()).save(path)
    assert find_images(tmp_path) == [path]
    grey = read_photo(path)
    assert grey.shape == (120, 160)
    assert np.abs(grey.astype(int) - cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)).mean() < 6
    (tmp_path / "b.heic").write_bytes(path.read_bytes()[:200])
    assert read_photo(tmp_path / "b.heic") is None
