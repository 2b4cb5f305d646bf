"""Two calls at once, and the two files of a pair, which are read so."""

import threading
import warnings

import numpy as np
import PIL.Image
import pytest
import torch

import matcher
from matcher.errors import ImageError
from matcher.image_files import decode
from matcher.processes import at_once


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
