"""Images of too few keypoints are searched enlarged, soft ones smaller; positions are those of the file."""

from dataclasses import replace

import cv2
import numpy as np
import PIL.Image
import pytest
from collection_runs import matched
from random_front_end import texture

import matcher
from matcher.config import ExtractorConfig, PipelineConfig
from matcher.extract.extractor import extracted
from matcher.images import edge_blur, read_image, without_blur
from matcher.types import Features


class Recorder:
    """A front end that finds a keypoint in every 40 x 40 pixels of what it is given, and keeps its size."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, int]]] = []

    def __call__(self, images):
        self.seen.append([image.pixels.shape for image in images])
        return [self.one(image) for image in images]

    def one(self, image):
        height, width = image.pixels.shape[:2]
        places = np.stack(np.meshgrid(np.arange(20, width, 40), np.arange(20, height, 40)), axis=-1)
        points = places.reshape(-1, 2).astype(np.float64)
        return Features(
            image.to_stored(points).astype(np.float32),
            np.eye(64, dtype=np.float32)[np.zeros(len(points), int)],
            kind="learned",
            **image.features_fields(),
        )


def blank(width: int, height: int, resize: int = 1024):
    return read_image(np.full((height, width), 90, np.uint8), resize=resize)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((400, 300), (600, 800)), ((800, 600), (768, 1024)), ((300, 800), (1024, 384)), ((1024, 768), None)],
)
def test_an_image_with_too_few_keypoints_is_searched_enlarged(size, expected):
    front_end, config = Recorder(), ExtractorConfig(sparse_resize=1024, max_keypoints=2000)
    (found,) = extracted(front_end, [blank(*size)], config)
    assert front_end.seen == [[size[::-1]]] + ([] if expected is None else [[expected]])
    factor = 1 if expected is None else max(expected) / max(size)
    assert len(found) == len(front_end.one(blank(*size).resized(factor)))
    assert found.scale.tolist() == [1, 1]  # thresholds stay pixels of the file
    points = np.asarray(found.keypoints)
    assert (points >= 0).all() and (points < size).all()


def plain_room(rng: np.random.Generator) -> np.ndarray:
    """(360, 480) uint8: a smooth wall with one poster of detail."""
    pixels = np.full((360, 480), 120, np.uint8)
    pixels[100:240, 140:340] = texture(rng, 200, 140)
    return cv2.GaussianBlur(pixels, (0, 0), 0.6)


def test_the_default_preset_finds_more_in_a_plain_room_with_masks_and_in_pixels_of_the_file(rng):
    pipe, pixels = matcher.load(), plain_room(rng)
    once = replace(pipe, config=replace(pipe.config, extractor=pipe.config.extractor.of_size(1024)))
    few, many = once.extract(pixels), pipe.extract(pixels)
    assert 0 < len(few) < len(many) <= 2048
    near = np.linalg.norm(np.asarray(few.keypoints)[:, None] - np.asarray(many.keypoints), axis=2).min(1)
    assert np.median(near) < 1.0, "the same places"
    keep = np.zeros(pixels.shape, bool)
    keep[:, :240] = True
    masked = pipe.extract(pixels, keep)
    assert len(masked) and (np.asarray(masked.keypoints)[:, 0] < 240).all()
    within = matcher.load(resize=480)  # the longer side, which nothing exceeds
    assert within.config.extractor.sparse_resize == 480 and len(within.extract(pixels)) == len(few)
    assert matcher.load(resize=2048).config.extractor.sparse_resize == 1024
    assert matcher.load(resize=None).config.extractor.sparse_resize == 1024


def test_both_engines_and_a_collection_search_alike(rng, tmp_path):
    for place, pixels in enumerate((plain_room(rng), plain_room(rng))):
        cv2.imwrite(str(tmp_path / f"{place}.png"), pixels)
    paths = sorted(tmp_path.glob("*.png"))
    pipes = [matcher.load(engine=engine, precision="float32") for engine in ("torch", "onnx")]
    torch, onnx = (pipe.extract(paths[0]) for pipe in pipes)
    assert len(torch) == len(onnx) > len(matcher.load(resize=480).extract(paths[0]))
    options = {"preset": "hybrid-learned", "max_keypoints": None, "precision": "float32"}
    with matched(tmp_path / "run", tmp_path, **options).store as store:
        assert len(store.features("0.png")) == len(torch)


# --- Soft images are made smaller.


SIZE = (960, 720)


def scene(seed=0, size=SIZE):
    """Rectangles of random grey at random angles, with the edges of a good lens: (H, W) uint8."""
    rng = np.random.default_rng(seed)
    pixels = np.full((2 * size[1], 2 * size[0]), 120, np.uint8)
    for _ in range(160):
        box = (rng.uniform(0, 2 * np.array(size)), rng.uniform(60, 400, 2), rng.uniform(0, 180))
        corners = cv2.boxPoints((*map(tuple, box[:2]), box[2]))
        cv2.fillPoly(pixels, [np.int32(corners)], int(rng.integers(20, 236)))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)


def enlarged(pixels, factor, noise=0.0, quality=None, gain=1.0):
    """What a sensor that resolves 1 / factor of its pixels stores."""
    height, width = pixels.shape
    small = cv2.resize(pixels, (round(width / factor), round(height / factor)), interpolation=cv2.INTER_AREA)
    large = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC) * gain
    large = large + noise * np.random.default_rng(1).standard_normal(large.shape)
    large = np.clip(np.rint(large), 0, 255).astype(np.uint8)
    if quality is None:
        return large
    options = [cv2.IMWRITE_JPEG_QUALITY, quality]
    return cv2.imdecode(cv2.imencode(".jpg", large, options)[1], cv2.IMREAD_UNCHANGED)


@pytest.mark.parametrize("sigma", [1.0, 1.5, 2.5])
def test_the_blur_of_edges_is_found_whatever_their_contrast(sigma):
    blurred = cv2.GaussianBlur(scene(), (0, 0), sigma)
    assert edge_blur(blurred) == pytest.approx(sigma, abs=0.25)
    assert edge_blur(blurred // 4) == pytest.approx(sigma, abs=0.35)


@pytest.mark.parametrize("damage", [{}, {"quality": 50}, {"noise": 3, "gain": 0.3}])
def test_sharp_images_keep_their_size_and_enlarged_ones_do_not(damage):
    sharp = scene()
    assert without_blur(enlarged(sharp, 1, **damage), 480) == 1
    factor = without_blur(enlarged(sharp, 2.5, **damage), 480)
    assert 0.5 <= factor < 0.85


def test_what_is_not_soft_as_a_whole_keeps_its_size():
    part, rng = scene(), np.random.default_rng(0)
    part[:, 480:] = cv2.GaussianBlur(part, (0, 0), 4)[:, 480:]  # out of focus
    noise, dark = rng.integers(0, 256, (720, 960)), rng.normal(40, 3, (720, 960))
    for pixels in (part, noise, dark, np.full((720, 960), 90), np.zeros((3, 2000))):
        assert without_blur(np.rint(pixels).astype(np.uint8), 480) == 1
    blurred = cv2.GaussianBlur(scene(), (0, 0), 5)
    assert without_blur(blurred, 600) == pytest.approx(600 / 960)
    assert without_blur(blurred, 960) == 1


@pytest.mark.parametrize("orientation", [1, 6])
def test_points_of_a_soft_image_are_pixels_of_the_file(tmp_path, orientation):
    path, tags = tmp_path / "soft.png", PIL.Image.Exif()
    tags[0x0112] = orientation
    stored = cv2.GaussianBlur(scene(), (0, 0), 3)
    PIL.Image.fromarray(stored).save(path, exif=tags)
    keep = np.zeros(stored.shape, bool)
    keep[:, :480] = True
    image = read_image(path, resize=800, soft_resize=400, mask=keep)
    assert 400 <= max(image.pixels.shape) < 800 and image.mask.shape == image.pixels.shape
    assert image.size == (960, 720) and image.is_reduced(800)
    corner = np.array([image.pixels.shape[1] - 0.5, image.pixels.shape[0] - 0.5])
    expected = [959.5, 719.5] if orientation == 1 else [959.5, -0.5]
    np.testing.assert_allclose(image.to_stored(corner), expected, atol=1e-6)
    assert image.mask.mean() == pytest.approx(0.5, abs=0.01)
    plain = read_image(path, resize=800)
    assert max(plain.pixels.shape) == 800 and not plain.is_reduced(800)


def test_the_default_preset_reads_soft_images_smaller_unless_a_size_is_given():
    soft, sharp = enlarged(scene(), 2.5, noise=3), scene()
    pipe = matcher.load()
    assert pipe.config.extractor.soft_resize == 640
    assert max(pipe.read(soft).pixels.shape) < 960 == max(pipe.read(sharp).pixels.shape)
    assert max(matcher.load(resize=1024).read(soft).pixels.shape) == 960
    assert PipelineConfig().extractor == ExtractorConfig(soft_resize=None)
