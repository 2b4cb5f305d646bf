"""Matching on Metal, simulated: what it finds, and that nothing needs numbers that Metal lacks."""

import numpy as np
import pytest
from simulated_gpu import simulated_gpu

import matcher


@pytest.fixture(scope="module")
def views() -> list[np.ndarray]:
    return [matcher.read_image(f"assets/view{number}.jpg", resize=240).pixels for number in (0, 1)]


@pytest.mark.parametrize("preset", ["hybrid-learned", "hybrid", "nearest-learned", "nearest"])
def test_a_pair_has_the_matches_of_the_cpu(views, preset):
    options = {"precision": "float32", "max_keypoints": 256}
    expected = matcher.load(preset, device="cpu", **options).match(*views)
    with simulated_gpu("mps"):
        found = matcher.load(preset, device="mps", **options).match(*views)
    assert len(expected.matches) > 30
    assert {*map(tuple, found.matches.indices)} == {*map(tuple, expected.matches.indices)}
