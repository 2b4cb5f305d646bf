"""Reading images: values of every depth and mode, orientation, masks, files to refuse; folders of photos."""

import io
import os
import threading
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import PIL.features
import PIL.Image
import pytest
import torch

import matcher
from matcher.errors import ImageError, ImageWarning, UsageError
from matcher.export.colmap import read_exif
from matcher.geometry import resize_points, resized, upright_to_stored
from matcher.image_files import decode, read_gps
from matcher.images import MAX_PIXELS, find_images, is_image, list_images, natural_key, read_image, read_mask
from matcher.processes import at_once
from matcher.train.views import read_photo

POINTS = np.array([[40.0, 30.0], [250.0, 40.0], [60.0, 180.0], [200.0, 150.0]])  # stored xy
LOSSLESS = {"webp": {"lossless": True, "exact": True}}


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
    places = zip(POINTS, (4, 6, 8, 10), strict=True)
    light = [np.exp(-((x - px) ** 2 + (y - py) ** 2) / (2 * s * s)) for (px, py), s in places]
    return np.rint(255 * np.max(light, axis=0)).astype(np.uint8)


# Orientation and resize.


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_turns_upright_and_points_map_back(tmp_path, blobs, orientation):
    path = save(tmp_path / "a.jpg", PIL.Image.fromarray(blobs), exif=exif(orientation), quality=95)
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
    assert read_image(path, upright=False).orientation == 1


def test_long_strips_are_resized_by_area(tmp_path, recwarn):
    path = save(tmp_path / "wide.png", np.zeros((400, 12000), np.uint8))
    with pytest.warns(ImageWarning, match=r"wide\.png: .* is a long strip"):
        assert read_image(path).pixels.shape == (162, 4857)
    with pytest.warns(ImageWarning, match="40000 x 1 is a long strip"):
        image = read_image(np.zeros((1, 40_000), np.uint8), resize=50)
    assert image.pixels.shape == (1, 8660) and image.scale == (8660 / 40_000, 1.0)
    recwarn.clear()
    assert resized((4000, 1000), 1024)[0] == (1024, 256)
    assert resized((3000, 100), 1024) == ((3000, 100), (1.0, 1.0))  # has less than the area already
    read_image(np.zeros((100, 3000), np.uint8))
    assert not recwarn.list


# Depths and modes.


@pytest.mark.parametrize("suffix", ["png", "tif", "bmp", "webp"])
def test_lossless_formats_are_exact_and_alpha_zero_is_the_mask(tmp_path, noise, suffix):
    options = LOSSLESS.get(suffix, {})
    image = read_image(save(tmp_path / f"a.{suffix}", noise, **options))
    assert image.pixels.dtype == np.uint8 and image.mask is None and np.array_equal(image.pixels, noise)
    if suffix == "bmp":
        return
    alpha = np.full(noise.shape[:2], 255, np.uint8)
    alpha[:20], alpha[20:30] = 0, 1
    image = read_image(save(tmp_path / f"b.{suffix}", np.dstack([noise, alpha]), **options))
    assert np.array_equal(image.pixels, noise) and np.array_equal(image.mask, alpha > 0)


def test_grey_stays_grey(tmp_path, noise):
    grey, alpha = noise[..., 0], np.where(noise[..., 1] > 128, 255, 0).astype(np.uint8)
    for name in ("a.png", "a.bmp", "a.tif"):
        assert np.array_equal(read_image(save(tmp_path / name, grey)).pixels, grey)
    image = read_image(save(tmp_path / "la.png", PIL.Image.fromarray(np.dstack([grey, alpha]), "LA")))
    assert np.array_equal(image.pixels, grey) and np.array_equal(image.mask, alpha > 0)
    image = read_image(save(tmp_path / "b.png", grey, transparency=7))
    assert np.array_equal(image.mask, grey != 7) and np.array_equal(image.pixels, grey)
    assert read_image(save(tmp_path / "one.png", np.array([[7]], np.uint8))).pixels.tolist() == [[7]]


def test_ten_to_sixteen_bits_use_the_full_range_whatever_a_hot_pixel_has(tmp_path, rng):
    for bits, name in (16, "a.png"), (16, "a.tif"), (14, "a.tif"), (12, "a.png"), (10, "a.tif"):
        ramp = np.r_[65535, np.linspace(0, 2**bits - 1, 55999).round()].astype(np.uint16).reshape(700, 80)
        pixels = read_image(save(tmp_path / name, ramp), resize=None).pixels
        exact = np.minimum(ramp * (255 / (2**bits - 1)), 255)
        assert np.abs(pixels - exact).max() <= 0.5 + 1e-6 and len(np.unique(pixels)) == 256
    colour = rng.integers(0, 65536, (20, 30, 3), dtype=np.uint16)
    for name in ("c.png", "c.tif"):
        cv2.imwrite(str(tmp_path / name), colour[..., ::-1])
        image = read_image(tmp_path / name, keep_stored=True)
        assert np.abs(image.pixels - colour / 257).max() <= 1.0 and image.stored.dtype == np.uint16


def test_palette_bits_and_cmyk(tmp_path, noise):
    indices = np.repeat(np.arange(3, dtype=np.uint8), 20).reshape(6, 10)
    picture = PIL.Image.fromarray(indices, "P")
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)[indices]
    image = read_image(save(tmp_path / "b.png", picture, transparency=1))
    assert np.array_equal(image.pixels, colours) and np.array_equal(image.mask, indices != 1)
    bits = noise[..., 0] > 128
    assert np.array_equal(read_image(save(tmp_path / "a.tif", bits)).pixels, np.where(bits, 255, 0))
    flat = PIL.Image.new("RGB", (32, 32), (200, 80, 30)).convert("CMYK")
    for name in ("c.jpg", "c.tif"):
        colour = read_image(save(tmp_path / name, flat)).pixels.reshape(-1, 3).mean(axis=0)
        assert np.abs(colour - (200, 80, 30)).max() < 4


def test_lossy_and_rare_formats(tmp_path, blobs):
    formats = {"a.gif": {}, "a.jp2": {}, "a.j2k": {}}
    formats |= {"a.avif": {"quality": 95}} if PIL.features.check("avif") else {}
    if find_spec("pillow_heif"):
        import_module("pillow_heif").register_heif_opener()
        formats["a.heic"] = {"quality": 95}
    for name, options in formats.items():
        path = save(tmp_path / name, PIL.Image.fromarray(blobs).convert("RGB"), **options)
        pixels = read_image(path).pixels
        grey = pixels if pixels.ndim == 2 else pixels[..., 1]
        assert grey.shape == blobs.shape and np.abs(grey.astype(int) - blobs).mean() < 3, name
    (tmp_path / "a.pbm").write_bytes(b"P1\n3 2\n1 0 1\n0 0 1\n")
    assert read_image(tmp_path / "a.pbm").pixels.tolist() == [[0, 255, 0], [255, 255, 0]]


@pytest.mark.parametrize(("kind", "top"), [("P5", 1023), ("P6", 65535), ("P3", 1023)])
def test_netpbm_of_every_depth(tmp_path, rng, kind, top):
    values = rng.integers(0, top + 1, (20, 30, 3) if kind in ("P6", "P3") else (20, 30))
    body = values.astype(">u2" if top > 255 else np.uint8).tobytes()
    if kind in ("P2", "P3"):
        body = " ".join(map(str, values.ravel().tolist())).encode()
    (tmp_path / "a.pnm").write_bytes(f"{kind}\n30 20\n{top}\n".encode() + body)
    pixels = read_image(tmp_path / "a.pnm").pixels
    assert pixels.dtype == np.uint8 and np.abs(pixels - values * (255 / top)).max() <= 1.0


# Files that must be refused.


def test_damaged_files_are_refused(tmp_path, noise):
    path = save(tmp_path / "a.png", noise)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))
    with pytest.raises(ImageError, match=r"a\.png"):
        read_image(path)
    path.write_bytes(bytes(data[:4000]))
    with pytest.raises(ImageError, match=r"a\.png.*cut short"):
        read_image(PIL.Image.open(path))


def test_paths_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    for name, tags in (("a.tif", {254: 1}), ("b.CR2", {})):  # a NEF's first page; by its name
        PIL.Image.new("L", (16, 10)).save(tmp_path / name, "tiff", tiffinfo=tags)
    names = ("pipe.jpg", "loop.jpg", "none.jpg", "a.tif", "b.CR2")
    paths = (tmp_path, *(tmp_path / name for name in names))
    for path in (*paths, "a\0b.jpg", "/dev/null", "https://x.org/a/b.jpg", Path("s3://x/y.png")):
        with pytest.raises(ImageError):
            read_image(path)
    with pytest.raises(UsageError, match="int"):
        read_image(3)
    with pytest.raises(UsageError, match="max_pixels"):
        read_image("a.png", max_pixels=0)


def test_what_is_no_image_is_named_with_a_remedy(tmp_path):
    starts = {b"%PDF-1.7": "PDF.*pages", b"\0\0\0\x18ftypmp42": "video.*frames", b"8BPS": "Photoshop.*TIFF"}
    starts |= {b"<?xml?>\n<svg>": "SVG.*PNG", b"\0\0\0\x18ftypcrx ": "RAW.*develop", b"any": "known format"}
    for start, named in starts.items():
        (tmp_path / "a.jpg").write_bytes(start + bytes(99))
        with pytest.raises(ImageError, match=rf"a\.jpg: .*{named}"):
            read_image(tmp_path / "a.jpg")


def test_odd_names_and_home_folders_work(tmp_path, noise, monkeypatch):
    data = io.BytesIO()
    PIL.Image.fromarray(noise).save(data, "png")
    for name in ("with space.png", "Größe 写真.png", "new\nline.png", os.fsdecode(b"\xff\xfe.png")):
        (tmp_path / name).write_bytes(data.getvalue())
        assert np.array_equal(read_image(tmp_path / name).pixels, noise)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_image("~/with space.png").size == noise.shape[1::-1]
    with (tmp_path / "with space.png").open() as file, pytest.raises(UsageError, match="'rb'"):
        read_image(file)


# Masks.


def test_a_mask_is_turned_and_shrunk_with_the_image_and_meets_alpha(tmp_path, noise):
    keep = np.zeros(noise.shape[:2], np.uint8)
    keep[10:30, 5:40] = 1  # as little as 1 of 255 keeps
    path, mask = save(tmp_path / "a.png", noise, exif=exif(6)), save(tmp_path / "mask.png", keep)
    image = read_image(path, mask=mask)
    assert np.array_equal(image.mask, np.rot90(keep == 1, -1)) and image.mask.flags.c_contiguous
    small = read_image(path, mask=keep.astype(bool), resize=20)
    assert small.mask.shape == small.pixels.shape[:2]
    assert abs(small.mask.mean() - keep.mean()) < 0.05
    alpha = np.full(noise.shape[:2], 255, np.uint8)
    alpha[:20] = 0
    image = read_image(np.dstack([noise, alpha]), mask=mask)
    assert np.array_equal(image.mask, (keep > 0) & (alpha > 0))
    deep = save(tmp_path / "m.png", np.array([[0, 1], [300, 65535]], np.uint16))
    assert read_mask(deep, MAX_PIXELS).tolist() == [[False, True], [True, True]]


# Arrays.


def test_arrays_of_every_depth_and_layout_agree(noise):
    deep, read_only = noise.astype(np.uint16) * 257, noise.copy()
    read_only.setflags(write=False)
    depths = (noise, deep, noise / 255, (noise / 255).astype(np.float32), (noise / 255).astype(np.float16))
    for array in (*depths, np.asfortranarray(noise), noise[::-1].copy()[::-1], read_only, deep.astype(">u2")):
        assert np.array_equal(read_image(array).pixels, noise)
    assert np.array_equal(read_image(noise[..., :1]).pixels, noise[..., 0])
    tensor = torch.from_numpy(noise)
    for same in (tensor, tensor.permute(2, 0, 1) / 255, tensor.double() / 255):
        assert np.array_equal(read_image(same).pixels, noise)
    half = read_image((tensor / 255).bfloat16().requires_grad_()).pixels
    assert np.abs(half.astype(int) - noise).max() <= 1
    assert np.array_equal(read_image(noise[..., 0] > 9).pixels, np.where(noise[..., 0] > 9, 255, 0))


def test_arrays_that_are_no_images():
    flat = np.zeros((20, 20))
    for array in (np.zeros((3, 20, 20), np.uint8), flat.astype(np.int64), flat + 255, torch.zeros(2, 20, 20)):
        with pytest.raises(UsageError, match="accepted: one image"):
            read_image(array)
    with pytest.raises(UsageError, match="getmaskarray"):
        read_image(np.ma.masked_array(flat, mask=flat == 0))


@pytest.mark.parametrize("mode", ["LA", "P", "I;16"])
def test_pillow_images_are_read_as_their_files(tmp_path, noise, mode):
    deep = PIL.Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    picture = deep if mode == "I;16" else PIL.Image.fromarray(noise).convert(mode)
    path = save(tmp_path / "a.png", picture, exif=exif(6))
    wanted, found = read_image(path), read_image(PIL.Image.open(path))
    assert found.size == wanted.size and found.orientation == wanted.orientation == 6
    assert np.array_equal(found.pixels, wanted.pixels)
    assert (found.mask is None) == (wanted.mask is None)
    stored = read_image(picture := PIL.Image.open(path), upright=False)
    picture.close()
    with pytest.raises(ImageError, match="while it is open"):
        read_image(picture)
    assert (stored.orientation, stored.exif_orientation) == (1, 6)


# --- Folders of photos as people have them.


PIXELS = np.random.default_rng(0).integers(0, 255, (40, 60), dtype=np.uint8)


def test_images_below_a_folder(tmp_path):
    others = ("a/d.txt", "a/g.NEF", "a/h.TGA", "i.ico", ".hidden.jpg", ".cache/e.png")
    for name in ("b.JPG", "a/c.heic", "a/f.pbm", *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "c.png").symlink_to("absent.png")  # is an error when it is read, not overlooked
    with pytest.warns(ImageWarning, match="1 RAW photo"), pytest.warns(ImageWarning, match=r"2 .*ico, \.tga"):
        found = find_images(tmp_path)
    assert found == [tmp_path / name for name in ("a/c.heic", "a/f.pbm", "b.JPG", "c.png")]
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


# --- Two calls at once.


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_calls_run_at_once_and_of_two_errors_the_first_is_told(two_threads, tmp_path, views):
    meeting = threading.Barrier(2, timeout=30)
    assert sorted(at_once(meeting.wait, meeting.wait)) == [0, 1]
    pipeline = matcher.load("nearest", max_keypoints=50)
    with pytest.raises(ImageError, match=r"first\.png"):
        pipeline.match(tmp_path / "first.png", tmp_path / "second.png")
    arrays = [np.asarray(PIL.Image.open(path)) for path in views]
    np.testing.assert_array_equal(pipeline.match(*views).points1, pipeline.match(*arrays).points1)


def test_warnings_are_as_before_when_large_files_were_read_at_once(two_threads, tmp_path, monkeypatch):
    path = tmp_path / "large.png"
    PIL.Image.new("L", (400, 300)).save(path)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 100_000)  # Pillow would warn
    with warnings.catch_warnings():
        before = list(warnings.filters)
        for _ in range(20):
            at_once(lambda: decode(path, 10**6), lambda: decode(path, 10**6))
        assert list(warnings.filters) == before
