"""Two calls at once, and the two files of a pair, which are read so."""

import threading
import warnings
from time import sleep

import numpy as np
import PIL.Image
import pytest

import matcher
from matcher.errors import ImageError
from matcher.image_files import decode
from matcher.images import read_input
from matcher.processes import at_once


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr("matcher.processes.compute_threads", lambda: 2)


def test_of_two_errors_the_first_is_told(two_threads, tmp_path):
    pipeline = matcher.load("nearest", max_keypoints=50)
    with pytest.raises(ImageError, match=r"first\.png"):
        pipeline.match(tmp_path / "first.png", tmp_path / "second.png")


def test_files_of_a_pair_are_read_at_once(two_threads, views, monkeypatch):
    meeting, pipeline = threading.Barrier(2, timeout=10), matcher.load("nearest", max_keypoints=200)
    arrays = [np.asarray(PIL.Image.open(path)) for path in views]

    def read(image, **options):
        if not isinstance(image, np.ndarray | matcher.Image):
            meeting.wait()
        return read_input(image, **options)

    monkeypatch.setattr("matcher.pipeline.read_input", read)
    from_arrays, from_files = pipeline.match(*arrays), pipeline.match(*views)
    np.testing.assert_array_equal(from_files.points1, from_arrays.points1)


def test_warnings_are_as_before_when_large_files_were_read_at_once(two_threads, tmp_path, monkeypatch):
    path = tmp_path / "large.png"
    PIL.Image.new("L", (40, 30)).save(path)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
    whole = PIL.PngImagePlugin.PngImageFile.load

    def slow(image):
        sleep(0.1)
        return whole(image)

    monkeypatch.setattr(PIL.PngImagePlugin.PngImageFile, "load", slow)
    before = list(warnings.filters)

    def later():
        sleep(0.05)  # the other has begun and will end before this
        return decode(path, 10**4)

    with warnings.catch_warnings():
        at_once(lambda: decode(path, 10**4), later)
        assert list(warnings.filters) == before
