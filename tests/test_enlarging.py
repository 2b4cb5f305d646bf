"""Images with too few keypoints are searched enlarged; positions and thresholds stay those of the file."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
from random_front_end import texture

import matcher
from matcher.collection.store import Store
from matcher.config import ExtractorConfig
from matcher.extract.extractor import extracted
from matcher.images import read_image
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
    assert len(found) == len(
        front_end.one(blank(*size).resized(1 if expected is None else max(expected) / max(size)))
    )
    assert found.scale.tolist() == [1, 1]  # thresholds stay pixels of the file
    points = np.asarray(found.keypoints)
    assert (points >= 0).all() and (points < size).all()


def test_an_image_without_any_keypoint_or_with_none_more_stays():
    class Fixed(Recorder):
        def one(self, image):
            return super().one(image).select(np.arange(self.count))

    front_end = Fixed()
    for front_end.count, searches in ((0, 1), (5, 2)):
        front_end.seen.clear()
        (found,) = extracted(front_end, [blank(400, 300)], ExtractorConfig(sparse_resize=1024))
        assert len(front_end.seen) == searches
        np.testing.assert_array_equal(found.keypoints, front_end.one(blank(400, 300)).keypoints)


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
    torch, onnx = (
        matcher.load(engine=engine, precision="float32").extract(paths[0]) for engine in ("torch", "onnx")
    )
    assert len(torch) == len(onnx) > len(matcher.load(resize=480).extract(paths[0]))
    collection = matcher.Collection.open(tmp_path / "run", workers=0, precision="float32")
    collection.add_images(tmp_path)
    collection.add_pairs(exhaustive=True)
    collection.run()
    with Store.open(tmp_path / "run") as store:
        assert len(store.features("0.png")) == len(torch)
