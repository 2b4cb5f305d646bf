"""Folders of photos as people have them: suffixes, links, accents, and where photos were taken."""

import unicodedata

import numpy as np
import PIL.Image
import pytest
from collection_runs import QUICK, photos

from matcher.cli import main
from matcher.collection.store import Store
from matcher.export.colmap import read_exif
from matcher.image_files import read_gps
from matcher.images import list_images, read_image

PIXELS = np.random.default_rng(0).integers(0, 255, (40, 60), dtype=np.uint8)


@pytest.mark.parametrize("suffix", ["jfif", "jpe", "JPG", "apng", "tif", "jpf", "jpx", "j2k", "hif", "heics"])
def test_every_suffix_of_a_format_that_is_read(tmp_path, suffix):
    names = {"jpf": "JPEG2000", "jpx": "JPEG2000", "j2k": "JPEG2000", "apng": "PNG", "tif": "TIFF"}
    if suffix in ("hif", "heics"):
        pytest.importorskip("pillow_heif").register_heif_opener()
        names[suffix] = "HEIF"
    PIL.Image.fromarray(PIXELS).convert("RGB").save(tmp_path / f"a.{suffix}", names.get(suffix, "JPEG"))
    assert list(list_images(tmp_path)) == [f"a.{suffix}"]
    assert read_image(tmp_path / f"a.{suffix}").size == (60, 40)


def test_links_to_folders_are_followed_once(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "photos"
    for place in (elsewhere / "deep", folder / "sub"):
        place.mkdir(parents=True)
        (place / "a.jpg").touch()
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (folder / "again").symlink_to(folder / "sub")
    (folder / "nowhere").symlink_to(tmp_path / "absent")
    assert sorted(list_images(folder)) == ["link/deep/a.jpg", "sub/a.jpg"]
    (tmp_path / "alias").symlink_to(folder)
    assert sorted(list_images(tmp_path / "alias")) == ["link/deep/a.jpg", "sub/a.jpg"]


@pytest.mark.parametrize(("stored", "listed"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_lists_name_accents_composed_or_not(tmp_path, capfd, stored, listed):
    """macOS stores them decomposed, and lists come from elsewhere."""
    folder = tmp_path / "photos"
    first, second, third = photos(folder, 3)
    name = unicodedata.normalize(stored, "été.png")
    (folder / first).rename(folder / name)
    written = unicodedata.normalize(listed, name)
    (tmp_path / "pairs.csv").write_text(f"{written},{second}\n", encoding="utf-8")
    (tmp_path / "names.txt").write_text(f"{written}\n{second}\n", encoding="utf-8")
    command = ["collection", folder, "--run", tmp_path / "run", *QUICK, "--workers", 0]
    command += ["--pairs", tmp_path / "pairs.csv", "--include", f"@{tmp_path / 'names.txt'}"]
    assert main([*map(str, command)]) == 0
    assert "another form" in capfd.readouterr().err
    with Store.open(tmp_path / "run") as store:
        assert {*store.known_pairs()} == {frozenset((name, second))}
        assert third not in store.names().values()


def test_positions_and_focal_lengths_of_heic_photos_are_read(tmp_path):
    pytest.importorskip("pillow_heif").register_heif_opener()
    exif = PIL.Image.Exif()
    exif[0x8769] = {0xA405: 28}
    exif[0x8825] = {1: "N", 2: (46.0, 30.0, 0.0), 3: "W", 4: (7.0, 0.0, 36.0)}
    for name, form in (("a.heic", "HEIF"), ("b.jpg", "JPEG")):
        PIL.Image.fromarray(PIXELS).convert("RGB").save(tmp_path / name, form, exif=exif)
        assert read_gps(tmp_path / name) == pytest.approx((46.5, -7.01, 0.0))
        assert read_exif(tmp_path / name).focal_35mm == 28
