"""Promises 4 and 8 for pictures and masks: the damaged are a clear error, soon; others are read right."""

import os
import struct
import time
import zlib
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
from collection_runs import QUICK, photos
from fuzzing import seeded
from hypothesis import given
from hypothesis import strategies as st

import matcher
from matcher.cli import main
from matcher.collection.store import Store
from matcher.errors import ImageError, MatcherError
from matcher.image_files import decode
from matcher.images import MAX_PIXELS, read_mask

pytestmark = pytest.mark.promise(4)
SECONDS = 5.0  # for a megabyte


def picture(size: tuple[int, int] = (48, 36)) -> np.ndarray:
    noise = np.random.default_rng(4).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return cv2.GaussianBlur(noise, (0, 0), 1.5)


def encoded(folder: Path, suffix: str) -> bytes:
    path = folder / f"whole{suffix}"
    if suffix in (".pgm", ".ppm", ".pbm", ".pfm"):
        grey = picture()[..., 0]
        kinds = {
            ".pgm": b"P5 48 36 1023\n" + (grey.astype(int) * 4).astype(">u2").tobytes(),
            ".ppm": b"P6 48 36 255\n" + picture().tobytes(),
            ".pbm": b"P4 48 36\n" + np.packbits(grey > 127, axis=1).tobytes(),
            ".pfm": b"Pf 48 36 -1.0\n" + (grey / np.float32(255)).astype("<f4").tobytes(),
        }
        path.write_bytes(kinds[suffix])
    else:
        PIL.Image.fromarray(picture()).save(path)
    return path.read_bytes()


FORMATS = (".png", ".jpg", ".tif", ".webp", ".bmp", ".gif", ".pgm", ".ppm", ".pbm", ".pfm")


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_picture_that_is_cut_short(tmp_path, suffix):
    data, path = encoded(tmp_path, suffix), tmp_path / f"cut{suffix}"
    for part in range(8):
        path.write_bytes(data[: len(data) * part // 8])
        with pytest.raises(ImageError, match=path.name):
            decode(path, 10**6)


@pytest.mark.parametrize(
    "head",
    [
        b"P6\n#" + b"x" * 1_000_000 + b"\n8 8\n255\n" + bytes(192),
        b"P2\n" + b"9" * 1_000_000,
        b"PF\n99999999 99999999\n1.0\n",
        b"P5\n-4 36\n255\n" + bytes(9999),
        b"Pf\n8 8\nnan\n" + bytes(256),
    ],
    ids=lambda head: head[:9].decode(),
)
def test_a_netpbm_file_that_is_no_picture(tmp_path, head):
    """The header with one long comment took 25 seconds of reading."""
    (tmp_path / "a.ppm").write_bytes(head)
    begun = time.process_time()
    with pytest.raises(ImageError, match=r"a\.ppm"):
        decode(tmp_path / "a.ppm", 10**8)
    assert time.process_time() - begun < SECONDS


def png(width: int, height: int, depth: int = 1) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    rows = zlib.compress(bytes(min(10**6, (1 + width // 8) * height)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(30_000, 30_000), (2**31 - 1, 1), (0, 5)])
def test_a_header_that_promises_too_much(tmp_path, size):
    """As an image, and as a mask; nothing is decoded."""
    (tmp_path / "a.png").write_bytes(png(*size))
    begun, limit = time.process_time(), PIL.Image.MAX_IMAGE_PIXELS
    for read in (matcher.read_image, lambda path: read_mask(path, MAX_PIXELS)):
        with pytest.raises(ImageError, match=r"a\.png"):
            read(tmp_path / "a.png")
    assert time.process_time() - begun < SECONDS and limit == PIL.Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(("kind", "order"), [("Pf", "<"), ("Pf", ">"), ("PF", "<")])
def test_float_maps(tmp_path, rng, kind, order):
    shape = (12, 16, 3) if kind == "PF" else (12, 16)
    values = rng.random(shape).astype(np.float32)
    head = f"{kind}\n16 12\n{'-1.0' if order == '<' else '1.0'}\n".encode()
    (tmp_path / "a.pfm").write_bytes(head + values[::-1].astype(f"{order}f4").tobytes())
    assert np.array_equal(decode(tmp_path / "a.pfm", 10**6).samples, values)
    assert np.array_equal(matcher.read_image(tmp_path / "a.pfm").pixels, np.rint(values * 255))
    (tmp_path / "b.pfm").write_bytes(head + (values * 9).astype(f"{order}f4").tobytes())
    with pytest.raises(ImageError, match=r"b\.pfm.*\[0, 1\]"):
        matcher.read_image(tmp_path / "b.pfm")


def check_bytes(folder: Path, data: bytes) -> np.ndarray | None:
    path, found = folder / "fuzzed", None
    path.write_bytes(data)
    begun = time.process_time()
    try:
        found = decode(path, 10**6).samples
    except MatcherError as error:
        assert "fuzzed" in str(error)
    else:
        assert found.shape[0] * found.shape[1] <= 10**6 and found.dtype.kind in "ufi"
    assert time.process_time() - begun < SECONDS
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", FORMATS)
def test_a_picture_with_pieces_changed(tmp_path, suffix):
    """Another picture, or a clear error; a flipped bit of a PNG is never another picture."""
    data = encoded(tmp_path, suffix)
    whole, places = decode(tmp_path / f"whole{suffix}", 10**6).samples, st.integers(0, len(data) - 1)

    @seeded(15)
    @given(st.lists(st.tuples(places, st.binary(max_size=9), st.integers(0, 9)), max_size=5))
    def check(changes):
        changed = bytearray(data)
        for place, new, gone in changes:
            changed[place : place + gone] = new
        check_bytes(tmp_path, bytes(changed))

    check()
    for bit in np.random.default_rng(8).integers(0, 8 * len(data), 30):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        found = check_bytes(tmp_path, bytes(flipped))
        assert suffix != ".png" or found is None or np.array_equal(found, whole)


def test_a_jpeg_of_endless_scans_is_refused(tmp_path):
    """A megabyte of them kept the decoder busy for more than five minutes."""
    black = PIL.Image.fromarray(np.zeros((3000, 3000), np.uint8))
    black.save(tmp_path / "a.jpg", progressive=True, comment=b"\xff\xda" * 300)
    data, begun = (tmp_path / "a.jpg").read_bytes(), time.process_time()
    assert decode(tmp_path / "a.jpg", 10**7).samples.shape == (3000, 3000)  # a comment is no scan
    last = data[data.rfind(b"\xff\xda") : -2]
    (tmp_path / "a.jpg").write_bytes(data[:-2] + last * (1_000_000 // len(last)) + data[-2:])
    with pytest.raises(ImageError, match=r"a\.jpg.*more than 64 scans"):
        decode(tmp_path / "a.jpg", 10**7)
    assert time.process_time() - begun < SECONDS


# --- Masks: what is none of its image is a clear error.


WRONG = {
    "another size": lambda path: PIL.Image.new("L", (20, 20), 255).save(path),
    "a huge header": lambda path: path.write_bytes(png(100_000, 100_000, 8)),
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
def test_what_is_no_mask_is_refused(folder, capfd, name):
    """In one pair; and in a folder of masks, where the image fails rather than going unmasked."""
    path, names = folder
    WRONG[name](path / "masks" / names[0])
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
