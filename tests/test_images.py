"""Reading images: values of every depth and mode, orientation, masks, and files that must be refused."""

import io
import os
import struct
import sys
import zlib
from pathlib import Path

import cv2
import numpy as np
import PIL.features
import PIL.Image
import pytest
import torch
from PIL import ImageOps

from matcher.errors import ImageError, ImageWarning, UsageError
from matcher.geometry import resize_points, resized, upright_to_stored
from matcher.images import MAX_PIXELS, image_from_array, read_image, read_input
from matcher.images import read_mask as read_mask_file


def read_mask(path):
    return read_mask_file(path, MAX_PIXELS)


POINTS = np.array([[40.0, 30.0], [250.0, 40.0], [60.0, 180.0], [200.0, 150.0]])  # stored xy


def save(path, picture, **options):
    (picture if isinstance(picture, PIL.Image.Image) else PIL.Image.fromarray(picture)).save(path, **options)
    return path


def exif(orientation):
    tags = PIL.Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.fixture
def noise(rng):
    return rng.integers(0, 256, (45, 61, 3), dtype=np.uint8)


@pytest.fixture
def blobs():
    """Four Gaussian blobs of different width: (220, 300) grey."""
    y, x = np.mgrid[:220, :300]
    sigmas = (4, 6, 8, 10)
    light = [
        np.exp(-((x - px) ** 2 + (y - py) ** 2) / (2 * s * s))
        for (px, py), s in zip(POINTS, sigmas, strict=True)
    ]
    return np.rint(255 * np.max(light, axis=0)).astype(np.uint8)


def centroids(pixels, near):
    """Centres of light within 12 px of the points `near`."""
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]]
    found = []
    for px, py in near:
        weight = pixels * ((x - px) ** 2 + (y - py) ** 2 < 144.0)
        found.append([(weight * x).sum() / weight.sum(), (weight * y).sum() / weight.sum()])
    return np.array(found)


# --- orientation and resize ---


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_turns_upright_and_points_map_back(tmp_path, blobs, orientation, suffix):
    options = {"jpg": {"quality": 95}, "webp": {"lossless": True}}.get(suffix, {})
    path = save(tmp_path / f"a.{suffix}", PIL.Image.fromarray(blobs), exif=exif(orientation), **options)
    image = read_image(path, resize=150)
    assert (image.size, image.orientation) == ((300, 220), orientation)
    assert image.pixels.shape[:2] == ((150, 110) if orientation >= 5 else (110, 150))
    grey = image.pixels if image.pixels.ndim == 2 else image.pixels[..., 0]
    peaks = np.argwhere(grey > 240)[:, ::-1].astype(float)
    upright = resize_points(peaks, (1 / image.scale[0], 1 / image.scale[1]))
    stored = upright_to_stored(upright, image.size, orientation)
    distance = np.linalg.norm(stored[:, None] - POINTS, axis=2)
    assert distance.min(axis=1).max() < 6  # every peak is a blob
    for blob in range(4):  # and the mean of a blob's peaks is its centre
        assert np.abs(stored[distance.argmin(axis=1) == blob].mean(axis=0) - POINTS[blob]).max() < 1


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_stored_pixels_of_tiff_are_taken_back(tmp_path, noise, orientation, compression):
    path = save(tmp_path / "a.tif", noise, exif=exif(orientation), compression=compression)
    stored = read_image(path, upright=False)
    assert stored.orientation == 1 and np.array_equal(stored.pixels, noise)
    upright = read_image(path)
    assert upright.orientation == orientation and upright.size == (61, 45)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_pixels_equal_an_independent_transpose(tmp_path, noise, orientation):
    path = save(tmp_path / "a.png", noise, exif=exif(orientation))
    with PIL.Image.open(path) as picture:
        assert np.array_equal(read_image(path).pixels, np.asarray(ImageOps.exif_transpose(picture)))
    assert np.array_equal(read_image(path, upright=False).pixels, noise)


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_senseless_orientation_is_upright(tmp_path, noise, orientation):
    assert read_image(save(tmp_path / "a.png", noise, exif=exif(orientation))).orientation == 1


@pytest.mark.parametrize("size", [(301, 220), (1023, 300), (101, 400)])
def test_resize_round_trip_is_exact_on_both_axes(blobs, size):
    picture = np.asarray(PIL.Image.fromarray(blobs).resize(size, PIL.Image.BICUBIC))
    image = image_from_array(picture, resize=64)
    height, width = image.pixels.shape
    assert max(width, height) == 64 and image.size == size
    assert image.scale == (width / size[0], height / size[1])
    corners = np.array([[-0.5, -0.5], [size[0] - 0.5, size[1] - 0.5]])
    small = resize_points(corners, image.scale)
    assert np.allclose(small, [[-0.5, -0.5], [width - 0.5, height - 0.5]], atol=1e-12)


def test_resize_keeps_the_pixel_centres(blobs):
    image = image_from_array(blobs, resize=157)
    found = centroids(image.pixels.astype(float), resize_points(POINTS, image.scale))
    assert np.abs(resize_points(found, tuple(1 / s for s in image.scale)) - POINTS).max() < 0.15


def test_small_images_are_not_enlarged(noise):
    assert np.array_equal(image_from_array(noise, resize=1024).pixels, noise)
    assert np.array_equal(image_from_array(noise, resize=None).pixels, noise)


# --- depths and modes ---


@pytest.mark.parametrize(
    ("suffix", "options"), [("png", {}), ("tif", {}), ("bmp", {}), ("webp", {"lossless": True})]
)
def test_rgb_is_exact_in_lossless_formats(tmp_path, noise, suffix, options):
    image = read_image(save(tmp_path / f"a.{suffix}", noise, **options))
    assert image.pixels.dtype == np.uint8 and image.mask is None and np.array_equal(image.pixels, noise)


def test_grey_stays_grey(tmp_path, noise):
    for name in ("a.png", "a.bmp", "a.tif"):
        assert np.array_equal(read_image(save(tmp_path / name, noise[..., 0])).pixels, noise[..., 0])


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_use_the_full_range(tmp_path, name):
    ramp = np.linspace(0, 65535, 64 * 80).round().astype(np.uint16).reshape(64, 80)
    pixels = read_image(save(tmp_path / name, ramp)).pixels
    assert np.abs(pixels - ramp / 257).max() <= 0.5 + 1e-6
    assert len(np.unique(pixels)) == 256


def test_sixteen_bit_tall_image_spans_strips(tmp_path):
    ramp = np.arange(700 * 3, dtype=np.uint16).reshape(700, 3) * 31
    pixels = read_image(save(tmp_path / "a.png", ramp), resize=None).pixels
    assert np.abs(pixels - ramp / 257).max() <= 0.5 + 1e-6


def test_float_tiff(tmp_path):
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    assert np.array_equal(read_image(save(tmp_path / "a.tif", values)).pixels.ravel(), np.arange(256))
    with pytest.raises(ImageError, match=r"b\.tif.*\[0, 1\]"):
        read_image(save(tmp_path / "b.tif", values * 300))
    values[3, 3] = np.nan
    with pytest.raises(ImageError, match=r"c\.tif"):
        read_image(save(tmp_path / "c.tif", values))


def test_integer_tiff_is_a_clear_error(tmp_path):
    path = save(tmp_path / "a.tif", np.zeros((4, 4), np.int32))
    with pytest.raises(ImageError, match=r"a\.tif.*int32.*16-bit"):
        read_image(path)


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_alpha_zero_becomes_the_mask(tmp_path, noise, suffix):
    alpha = np.full(noise.shape[:2], 255, np.uint8)
    alpha[:20], alpha[20:30] = 0, 1
    options = {"webp": {"lossless": True, "exact": True}}.get(suffix, {})
    image = read_image(save(tmp_path / f"a.{suffix}", np.dstack([noise, alpha]), **options))
    assert np.array_equal(image.pixels, noise) and np.array_equal(image.mask, alpha > 0)


def test_grey_with_alpha(tmp_path, noise):
    alpha = np.where(noise[..., 1] > 128, 255, 0).astype(np.uint8)
    image = read_image(save(tmp_path / "a.png", PIL.Image.fromarray(np.dstack([noise[..., 0], alpha]), "LA")))
    assert np.array_equal(image.pixels, noise[..., 0]) and np.array_equal(image.mask, alpha > 0)


def test_palette_and_its_transparent_colour(tmp_path):
    indices = np.repeat(np.arange(3, dtype=np.uint8), 20).reshape(6, 10)
    picture = PIL.Image.fromarray(indices, "P")
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)[indices]
    image = read_image(save(tmp_path / "a.png", picture))
    assert np.array_equal(image.pixels, colours) and image.mask is None
    image = read_image(save(tmp_path / "b.png", picture, transparency=1))
    assert np.array_equal(image.pixels, colours) and np.array_equal(image.mask, indices != 1)


def test_transparent_grey_values(tmp_path):
    grey = np.arange(60, dtype=np.uint8).reshape(6, 10)
    image = read_image(save(tmp_path / "a.png", grey, transparency=7))
    assert np.array_equal(image.mask, grey != 7) and np.array_equal(image.pixels, grey)
    deep = (grey.astype(np.uint16) * 1000)[:, :]
    chunk = struct.pack(">H", 7000)
    data = io.BytesIO()
    PIL.Image.fromarray(deep).save(data, "png")
    png = data.getvalue()
    trns = struct.pack(">I", 2) + b"tRNS" + chunk + struct.pack(">I", zlib.crc32(b"tRNS" + chunk))
    (tmp_path / "b.png").write_bytes(png[:33] + trns + png[33:])
    assert np.array_equal(read_image(tmp_path / "b.png").mask, deep != 7000)


def test_one_bit_and_cmyk(tmp_path, noise):
    bits = noise[..., 0] > 128
    for name in ("a.png", "a.tif"):
        assert np.array_equal(read_image(save(tmp_path / name, bits)).pixels, np.where(bits, 255, 0))
    flat = PIL.Image.new("RGB", (32, 32), (200, 80, 30)).convert("CMYK")
    for name in ("c.jpg", "c.tif"):
        colour = read_image(save(tmp_path / name, flat)).pixels.reshape(-1, 3).mean(axis=0)
        assert np.abs(colour - (200, 80, 30)).max() < 4


def test_first_frame_of_many(tmp_path, noise):
    second = PIL.Image.fromarray(255 - noise)
    path = save(tmp_path / "a.tif", noise, save_all=True, append_images=[second])
    with pytest.warns(ImageWarning, match=r"a\.tif: has 2 pages; the first one is used"):
        assert np.array_equal(read_image(path).pixels, noise)
    path = save(tmp_path / "a.webp", noise, save_all=True, append_images=[second], lossless=True)
    with pytest.warns(ImageWarning, match="2 frames"):
        assert np.array_equal(read_image(path).pixels, noise)
    path = save(tmp_path / "a.gif", noise[..., 0], save_all=True, append_images=[second])
    with pytest.warns(ImageWarning, match="2 frames"):
        grey = read_image(path).pixels
    assert np.array_equal(grey if grey.ndim == 2 else grey[..., 0], noise[..., 0])


def test_gif_jp2_and_avif(tmp_path, blobs):
    for name, options in (("a.gif", {}), ("a.jp2", {}), ("a.j2k", {}), ("a.avif", {"quality": 95})):
        if name == "a.avif" and not PIL.features.check("avif"):
            continue
        path = save(tmp_path / name, PIL.Image.fromarray(blobs).convert("RGB"), **options)
        pixels = read_image(path).pixels
        assert pixels.shape[:2] == blobs.shape
        grey = pixels if pixels.ndim == 2 else pixels[..., 1]
        assert np.abs(grey.astype(int) - blobs).mean() < 3, name


def netpbm(path, kind, values, top):
    """A binary or plain PGM or PPM file, without Pillow."""
    height, width = values.shape[:2]
    head = f"{kind}\n{width} {height}\n{top}\n".encode()
    if kind in ("P2", "P3"):
        path.write_bytes(head + " ".join(map(str, values.ravel().tolist())).encode())
    else:
        path.write_bytes(head + values.astype(">u2" if top > 255 else np.uint8).tobytes())
    return path


@pytest.mark.parametrize("top", [255, 1023, 4095, 65535])
@pytest.mark.parametrize("kind", ["P5", "P2", "P6", "P3"])
def test_netpbm_of_every_depth(tmp_path, rng, kind, top):
    shape = (20, 30, 3) if kind in ("P6", "P3") else (20, 30)
    values = rng.integers(0, top + 1, shape)
    pixels = read_image(netpbm(tmp_path / "a.pnm", kind, values, top)).pixels
    assert pixels.dtype == np.uint8 and pixels.shape == shape
    assert np.abs(pixels - values * (255 / top)).max() <= 1.0


def test_sixteen_bit_colour_png(tmp_path, rng):
    values = rng.integers(0, 65536, (20, 30, 3), dtype=np.uint16)
    cv2.imwrite(str(tmp_path / "a.png"), values[..., ::-1])
    assert np.abs(read_image(tmp_path / "a.png").pixels - values / 257).max() <= 1.0


def test_bitmaps(tmp_path):
    (tmp_path / "a.pbm").write_bytes(b"P1\n3 2\n1 0 1\n0 0 1\n")
    assert read_image(tmp_path / "a.pbm").pixels.tolist() == [[0, 255, 0], [255, 255, 0]]


def test_one_pixel(tmp_path):
    image = read_image(save(tmp_path / "a.png", np.array([[7]], np.uint8)))
    assert image.pixels.tolist() == [[7]] and image.size == (1, 1) and image.scale == (1.0, 1.0)


def test_very_long_image_keeps_a_pixel_of_width():
    with pytest.warns(ImageWarning, match="40000 x 1 is a long strip"):
        image = image_from_array(np.zeros((1, 40_000), np.uint8), resize=50)
    assert image.pixels.shape == (1, 8660) and image.scale == (8660 / 40_000, 1.0)


@pytest.mark.parametrize(("size", "expected"), [((12000, 400), (4857, 162)), ((400, 12000), (162, 4857))])
def test_a_panorama_is_resized_by_area_and_says_so(tmp_path, size, expected):
    path = save(tmp_path / "wide.png", np.zeros(size[::-1], np.uint8))
    with pytest.warns(ImageWarning, match=r"wide\.png: .* is a long strip, so it is resized by its area"):
        image = read_image(path)
    assert image.pixels.shape == expected[::-1]
    assert image.pixels.size == pytest.approx(1024 * 768, rel=0.01)


def test_ordinary_and_small_strips_are_resized_as_before(recwarn):
    assert resized((4000, 1000), 1024)[0] == (1024, 256)
    assert resized((1241, 376), 1024)[0] == (1024, 310)
    assert resized((3000, 100), 1024) == ((3000, 100), (1.0, 1.0))  # has less than the area already
    image_from_array(np.zeros((100, 3000), np.uint8))
    assert not recwarn.list


# --- files that must be refused ---


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("tenth", range(1, 10))
@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("jpg", {"quality": 90}),
        ("jpg", {"quality": 90, "progressive": True}),
        ("png", {}),
        ("webp", {"quality": 90}),
        ("bmp", {}),
        ("tif", {"compression": "tiff_lzw"}),
        ("tif", {}),
    ],
)
def test_cut_files_are_refused(tmp_path, rng, tenth, suffix, options):
    path = save(tmp_path / f"cut.{suffix}", rng.integers(0, 256, (150, 200, 3), dtype=np.uint8), **options)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * tenth // 10])
    with pytest.raises(ImageError, match=rf"cut\.{suffix}.*(again|convert)"):
        read_image(path)


def test_a_few_lost_bytes_are_noticed(tmp_path, noise):
    path = save(tmp_path / "a.jpg", noise)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ImageError, match="cut short"):
        read_image(path)


def test_png_with_a_wrong_checksum(tmp_path, noise):
    path = save(tmp_path / "a.png", noise)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))
    with pytest.raises(ImageError, match=r"a\.png"):
        read_image(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.jpg", b"", "empty"),
        ("text.jpg", b"This is not a picture at all.\n", "known format"),
        ("soi.jpg", b"\xff\xd8\xff", "cut short"),
        ("bm.bmp", b"BM, said the text", "cut short"),
        ("sig.png", b"\x89PNG\r\n\x1a\n" + bytes(100), "cut short"),
        ("zeros.tif", b"II*\0" + bytes(100), "cut short"),
        ("riff.webp", b"RIFF\x10\0\0\0WEBP" + bytes(40), "cut short"),
        ("a.gif", b"GIF89a" + bytes(40), "cut short|damaged"),
        ("a.jp2", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40), "cut short"),
        ("a.avif", b"\0\0\0\x18ftypavif" + bytes(40), "cut short"),
        ("a.pgm", b"P5\n9 9\n65535\n" + bytes(40), "cut short"),
        ("a.svg", b"<svg></svg>", "known format"),
    ],
)
def test_what_is_no_image(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageError, match=reason) as error:
        read_image(tmp_path / name)
    assert name in str(error.value)


def test_paths_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    for path in (
        tmp_path,
        tmp_path / "pipe.jpg",
        tmp_path / "loop.jpg",
        tmp_path / "none.jpg",
        "a\0b.jpg",
        "/dev/null",
    ):
        with pytest.raises(ImageError, match=r"tmp|test_|none|a.*b\.jpg|null"):
            read_image(path)
    with pytest.raises(UsageError, match="int"):
        read_image(3)


def test_odd_names_work(tmp_path, noise):
    for name in ("with space.png", "Größe 写真.png", "new\nline.png", os.fsdecode(b"\xff\xfe.png")):
        data = io.BytesIO()
        PIL.Image.fromarray(noise).save(data, "png")
        (tmp_path / name).write_bytes(data.getvalue())
        assert np.array_equal(read_image(tmp_path / name).pixels, noise)


def bomb(path, side):
    """A 1-bit PNG of side² pixels, all zero, written without holding it in memory."""
    packer = zlib.compressobj(9)
    row = bytes(1 + side // 8)
    body = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", body), (b"IEND", b""))
    packed = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    return path


def test_a_bomb_is_refused_from_its_header(tmp_path, monkeypatch, recwarn):
    path = bomb(tmp_path / "bomb.png", 30_000)
    assert path.stat().st_size < 200_000
    limit = PIL.Image.MAX_IMAGE_PIXELS
    monkeypatch.setattr("matcher.image_files.PngImageFile.load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(ImageError, match=r"bomb\.png: 30000 x 30000 .*178000000.*max_pixels"):
        read_image(path)
    with pytest.raises(ImageError, match="bomb"):
        read_mask(path)
    assert limit == PIL.Image.MAX_IMAGE_PIXELS and not recwarn.list


def test_the_limit_is_the_callers(tmp_path, noise, monkeypatch, recwarn):
    path = save(tmp_path / "a.png", noise)
    with pytest.raises(ImageError, match="61 x 45"):
        read_image(path, max_pixels=61 * 45 - 1)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 61 * 45 // 2 + 1)  # Pillow would warn
    for name in ("a.png", "a.jpg", "a.webp", "b.tif"):
        options = {"compression": "tiff_lzw"} if name == "b.tif" else {}
        assert read_image(save(tmp_path / name, noise, **options), max_pixels=61 * 45).size == (61, 45)
    assert not recwarn.list


def test_heic_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # as if it were not installed
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    with pytest.raises(ImageError, match=r"a\.heic.*pip install .pillow-heif"):
        read_image(tmp_path / "a.heic")


def test_heic_is_read(tmp_path, blobs):
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(PIL.Image.fromarray(blobs).convert("RGB")).save(tmp_path / "a.heic", quality=95)
    image = read_image(tmp_path / "a.heic")
    assert image.size == (300, 220) and np.abs(image.pixels[..., 1].astype(int) - blobs).mean() < 3


@pytest.mark.parametrize("path", ["https://x.org/a/b.jpg", Path("https://x.org/a/b.jpg"), "s3://x/y.png"])
def test_urls_are_to_be_downloaded_first(path):
    with pytest.raises(ImageError, match=r"^(https://x\.org/a/b\.jpg|s3://x/y\.png): .*download it first"):
        read_image(path)


# --- masks ---


def test_mask_is_turned_and_shrunk_with_the_image(tmp_path, noise):
    keep = np.zeros(noise.shape[:2], np.uint8)
    keep[10:30, 5:40] = 1  # as little as 1 of 255 keeps
    path = save(tmp_path / "a.png", noise, exif=exif(6))
    mask = save(tmp_path / "mask.png", keep)
    assert np.array_equal(read_mask(mask), keep == 1)
    image = read_image(path, mask=mask)
    assert np.array_equal(image.mask, np.rot90(keep == 1, -1)) and image.mask.flags.c_contiguous
    small = read_image(path, mask=keep.astype(bool), resize=20)
    assert small.mask.shape == small.pixels.shape[:2]
    assert abs(small.mask.mean() - keep.mean()) < 0.05


def test_mask_meets_alpha(tmp_path, noise):
    alpha = np.full(noise.shape[:2], 255, np.uint8)
    alpha[:20] = 0
    keep = np.zeros(noise.shape[:2], bool)
    keep[:, :30] = True
    image = read_image(save(tmp_path / "a.png", np.dstack([noise, alpha])), mask=keep)
    assert np.array_equal(image.mask, keep & (alpha > 0))
    image = image_from_array(np.dstack([noise, alpha]), mask=save(tmp_path / "m.png", keep))
    assert np.array_equal(image.mask, keep & (alpha > 0))


def test_mask_values_are_not_scaled_away(tmp_path):
    deep = np.array([[0, 1], [300, 65535]], np.uint16)
    assert read_mask(save(tmp_path / "m.png", deep)).tolist() == [[False, True], [True, True]]


def test_mask_of_another_size_names_both(tmp_path, noise):
    mask = save(tmp_path / "m.png", np.ones((61, 45), np.uint8))
    with pytest.raises(UsageError, match=r"m\.png is 45 x 61 pixels, its image 61 x 45"):
        read_image(save(tmp_path / "a.png", noise), mask=mask)
    with pytest.raises(UsageError, match="61 x 45"):
        image_from_array(noise, mask=np.ones((3, 45, 60), bool))


def test_images_and_masks_in_the_forms_that_people_hold(tmp_path, noise):
    image = read_image(save(tmp_path / "a.png", noise))
    encoded = (tmp_path / "a.png").read_bytes()
    for same in (encoded, io.BytesIO(encoded), torch.from_numpy(noise).permute(2, 0, 1)[None]):
        assert np.array_equal(read_input(same, resize=None).pixels, image.pixels)
    keep = np.zeros(noise.shape[:2], bool)
    keep[5:20, 7:30] = True
    for mask in (keep[..., None], np.stack([keep] * 3, -1), keep * 255.0, torch.from_numpy(keep)[None]):
        assert np.array_equal(image_from_array(noise, mask=mask).mask, keep)
    with pytest.raises(ImageError, match="in memory"):
        read_input(b"no image")


def test_a_home_folder_is_found(tmp_path, noise, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "a.png", noise)
    assert read_image("~/a.png").size == noise.shape[1::-1]


# --- arrays ---


def test_arrays_of_every_depth_agree(noise):
    for array in (noise, noise.astype(np.uint16) * 257, noise / 255, (noise / 255).astype(np.float32)):
        assert np.array_equal(image_from_array(array).pixels, noise)
    assert np.array_equal(image_from_array((noise / 255).astype(np.float16)).pixels, noise)
    assert np.array_equal(image_from_array(noise[..., :1]).pixels, noise[..., 0])
    assert np.array_equal(image_from_array(noise[..., 0] > 9).pixels, np.where(noise[..., 0] > 9, 255, 0))


def test_array_layouts_agree(noise):
    expected = image_from_array(noise, resize=32).pixels
    read_only = noise.copy()
    read_only.setflags(write=False)
    swapped = (noise.astype(np.uint16) * 257).astype(">u2")
    for array in (np.asfortranarray(noise), noise[::-1].copy()[::-1], read_only, swapped):
        assert np.array_equal(image_from_array(array, resize=32).pixels, expected)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 20, 20), np.uint8),
        np.zeros((20, 20, 2), np.uint8),
        np.zeros((1, 20, 20, 3), np.uint8),
        np.zeros((0, 20), np.uint8),
        np.zeros(20, np.uint8),
        np.zeros((20, 20), np.int64),
        np.zeros((20, 20), complex),
        np.array([["a", "b"]], dtype=object),
        [[0, 1]],
        np.full((20, 20), 255.0),
        np.full((20, 20), -0.5),
        np.full((20, 20), np.nan),
        np.full((20, 20), np.inf),
        None,
    ],
)
def test_arrays_that_are_no_images(array):
    with pytest.raises(UsageError, match=r"accepted: one image, grey \(H, W\), RGB"):
        image_from_array(array)


def test_limits_must_make_sense(noise):
    with pytest.raises(UsageError, match="resize"):
        image_from_array(noise, resize=0)
    with pytest.raises(UsageError, match="max_pixels"):
        read_image("a.png", max_pixels=0)


def test_tensors_are_images(noise):
    tensor = torch.from_numpy(noise)
    for same in (
        tensor,
        tensor.permute(2, 0, 1),
        tensor.permute(2, 0, 1) / 255,
        tensor[..., :3].double() / 255,
    ):
        assert np.array_equal(image_from_array(same).pixels, noise)
    assert np.array_equal(image_from_array(tensor[..., 0]).pixels, noise[..., 0])
    assert np.array_equal(image_from_array(tensor[None, ..., 0]).pixels, noise[..., 0])
    half = image_from_array((tensor / 255).bfloat16().requires_grad_()).pixels
    assert np.abs(half.astype(int) - noise).max() <= 1
    with pytest.raises(UsageError, match=r"shape \(2, 20, 20\)"):
        image_from_array(torch.zeros(2, 20, 20))


def test_pillow_images_are_read_as_their_files(tmp_path, noise):
    for mode in ("RGB", "L", "RGBA", "LA", "P", "1", "I;16"):
        deep = PIL.Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
        picture = deep if mode == "I;16" else PIL.Image.fromarray(noise).convert(mode)
        path = save(tmp_path / "a.png", picture, exif=exif(6))
        wanted = read_image(path)
        with PIL.Image.open(path) as opened:
            found = image_from_array(opened)
        assert found.size == wanted.size and found.orientation == wanted.orientation == 6
        assert np.array_equal(found.pixels, wanted.pixels), mode
        assert (found.mask is None) == (wanted.mask is None)
    stored = image_from_array(PIL.Image.open(tmp_path / "a.png"), upright=False)
    assert (stored.orientation, stored.exif_orientation) == (1, 6)


def test_a_damaged_pillow_image_is_an_image_error(tmp_path, noise):
    path = save(tmp_path / "a.png", noise)
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(ImageError, match=r"a\.png.*cut short"):
        image_from_array(PIL.Image.open(path))
