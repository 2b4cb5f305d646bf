"""Folders of photos as people have them: suffixes, order, links, accents, and where photos were taken."""

import unicodedata

import numpy as np
import PIL.Image
import pytest
from collection_runs import QUICK, photos

from matcher.cli import main
from matcher.collection.store import Store
from matcher.errors import UsageError
from matcher.export.colmap import read_exif
from matcher.image_files import read_gps
from matcher.images import find_images, is_image, list_images, natural_key
from matcher.train.views import read_photo

PIXELS = np.random.default_rng(0).integers(0, 255, (40, 60), dtype=np.uint8)


def test_images_below_a_folder(tmp_path):
    for name in ("b.JPG", "a/c.heic", "a/d.txt", ".hidden.jpg", ".cache/e.png", "a/f.pbm"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_images(tmp_path) == [tmp_path / name for name in ("a/c.heic", "a/f.pbm", "b.JPG")]
    assert not any(map(is_image, ("jpg", "a.jpg.txt", "a.mp4", "")))
    for folder in (tmp_path / ".cache" / "none", tmp_path / "absent"):
        with pytest.raises(UsageError, match=str(folder)):
            find_images(folder)
    names = ["f10", "f9", "f1", "f", "10", "9", "f2b3", "f2b20", "f2a"]
    assert sorted(names, key=natural_key) == ["9", "10", "f", "f1", "f2a", "f2b3", "f2b20", "f9", "f10"]


def test_links_to_folders_are_followed_once(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "photos"
    for place in (elsewhere / "deep", folder / "sub"):
        place.mkdir(parents=True)
        (place / "a.jpg").touch()
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (folder / "again").symlink_to(folder / "sub")
    (folder / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "alias").symlink_to(folder)
    for named in (folder, tmp_path / "alias"):
        assert sorted(list_images(named)) == ["link/deep/a.jpg", "sub/a.jpg"]


def test_lists_name_accents_composed_or_not(tmp_path, capfd):
    """macOS stores them decomposed, and lists come from elsewhere."""
    folder = tmp_path / "photos"
    first, second, third = photos(folder, 3)
    name = unicodedata.normalize("NFD", "été.png")
    (folder / first).rename(folder / name)
    written = unicodedata.normalize("NFC", name)
    (tmp_path / "pairs.csv").write_text(f"{written},{second}\n", encoding="utf-8")
    (tmp_path / "names.txt").write_text(f"{written}\n{second}\n", encoding="utf-8")
    command = ["collection", folder, "--run", tmp_path / "run", *QUICK, "--workers", 0]
    command += ["--pairs", tmp_path / "pairs.csv", "--include", f"@{tmp_path / 'names.txt'}"]
    assert main([*map(str, command)]) == 0
    assert "another form" in capfd.readouterr().err
    with Store.open(tmp_path / "run") as store:
        assert {*store.known_pairs()} == {frozenset((name, second))}
        assert third not in store.names().values()


def test_heic_photos_and_their_headers_are_read(tmp_path):
    pytest.importorskip("pillow_heif").register_heif_opener()
    exif = PIL.Image.Exif()
    exif[0x8769] = {0xA405: 28}
    exif[0x8825] = {1: "N", 2: (46.0, 30.0, 0.0), 3: "W", 4: (7.0, 0.0, 36.0)}
    for name, form in (("a.heic", "HEIF"), ("b.jpg", "JPEG")):
        PIL.Image.fromarray(PIXELS).convert("RGB").save(tmp_path / name, form, exif=exif)
        assert read_gps(tmp_path / name) == pytest.approx((46.5, -7.01, 0.0))
        assert read_exif(tmp_path / name).focal_35mm == 28
    assert read_photo(tmp_path / "a.heic").shape == (40, 60)
    (tmp_path / "b.heic").write_bytes((tmp_path / "a.heic").read_bytes()[:200])
    assert read_photo(tmp_path / "b.heic") is None
