"""Promise 4 for masks and tiles: what is no mask of its image, or no size of a tile, is a clear error."""

import os
import struct
import time
import zlib

import PIL.Image
import pytest
from collection_runs import QUICK, photos

from matcher.cli import main
from matcher.collection.store import Store

pytestmark = pytest.mark.promise(4)
SECONDS = 5.0


def huge_header(path) -> None:
    """A PNG that promises 10¹⁰ pixels in 60 bytes."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IEND\xaeB`\x82")


WRONG = {
    "another size": lambda path: PIL.Image.new("L", (20, 20), 255).save(path),
    "a huge header": huge_header,
    "a letter": lambda path: path.write_bytes(b"dear photo"),
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("absent.png"),
}


@pytest.fixture
def folder(tmp_path):
    """Three photos, and masks of two that keep all."""
    names = photos(tmp_path / "photos", 3)
    (tmp_path / "masks").mkdir()
    for name in names[1:]:
        PIL.Image.new("L", (200, 160), 255).save(tmp_path / "masks" / name)
    return tmp_path, names


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_mask_is_refused(folder, capfd, tried, name):
    """In one pair; and in a folder of masks, where the image fails rather than going unmasked."""
    path, names = folder
    WRONG[name](path / "masks" / names[0])
    begun = time.process_time()
    pair = [path / "photos" / each for each in names[:2]]
    assert main([*map(str, ("match", *pair, "--mask0", path / "masks" / names[0], *QUICK))]) in (2, 3)
    errors = capfd.readouterr().err
    assert names[0] in errors and "Traceback" not in errors and "internal error" not in errors, errors
    given = ("--masks", path / "masks", "--exhaustive", "--workers", 0)
    assert main([*map(str, ("collection", path / "photos", "--run", path / "run", *QUICK, *given))]) == 4
    with Store.open(path / "run") as store:
        failed = {image.name: image.reason for image in store.images() if image.status == "failed"}
        assert store.counts().pairs_done == 1
    assert list(failed) == names[:1] and "masks" in failed[names[0]]
    assert time.process_time() - begun < SECONDS
    tried(2)


def test_numbers_of_keypoints_that_tiles_cannot_find(folder, capfd):
    path, names = folder
    pair = [str(path / "photos" / each) for each in names[:2]]
    for number in ("0", "1e9", "many"):
        assert main(["match", *pair, "--preset", "nearest", "--tiles", "--max-keypoints", number]) == 2
        errors = capfd.readouterr().err
        assert "max-keypoints" in errors and "Traceback" not in errors and "internal" not in errors, errors
