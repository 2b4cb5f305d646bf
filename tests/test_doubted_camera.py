"""A camera that was given is doubted where the fundamental matrices of pairs clearly imply another one."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from matcher.cameras import Camera
from matcher.export.colmap import CameraChoice
from matcher.sfm.cameras import better_focal
from matcher.sfm.reconstruct import _doubt
from matcher.types import TwoViewGeometry

FOCAL = 500.0


def camera(focal):
    return Camera(focal, focal, 320, 240, (640, 480))


def pairs(count=30, status="ok", inliers=80, turn=0.3):
    """A store's pairs: cameras of `FOCAL` that turn at random, with a little noise."""
    rng = np.random.default_rng(3)
    inverse = np.linalg.inv([[FOCAL, 0, 320], [0, FOCAL, 240], [0, 0, 1]])
    found = []
    for number in range(count):
        x, y, z = rng.standard_normal(3)
        cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
        matrix = inverse.T @ cross @ Rotation.from_rotvec(turn * rng.standard_normal(3)).as_matrix() @ inverse
        matrix *= 1 + 1e-3 * rng.standard_normal((3, 3))
        geometry = TwoViewGeometry("fundamental", status, np.ones(inliers, bool), matrix)
        found.append(SimpleNamespace(name0="a.jpg", name1=f"b{number}.jpg", geometry=geometry))
    return SimpleNamespace(pairs=lambda: iter(found))


@pytest.mark.parametrize("factor", [0.4, 0.7, 1.4, 3.0])
def test_a_wrong_focal_length_is_noticed(factor):
    assert better_focal(pairs(), camera(factor * FOCAL)) == pytest.approx(FOCAL, rel=0.1)


@pytest.mark.parametrize("factor", [0.95, 1.0, 1.05])
def test_a_right_one_is_not_doubted(factor):
    assert better_focal(pairs(), camera(factor * FOCAL)) is None


def test_too_little_says_nothing():
    wrong = camera(3 * FOCAL)
    assert better_focal(pairs(count=7), wrong) is None
    assert better_focal(pairs(inliers=20), wrong) is None
    assert better_focal(pairs(status="low_inliers"), wrong) is None
    assert better_focal(pairs(), wrong, only={"a.jpg", "b1.jpg"}) is None
    assert better_focal(pairs(), camera(100 * FOCAL)) is None  # none of those that are tried fits


def test_the_note_names_the_remedy():
    said = _doubt(pairs(), CameraChoice(camera=camera(3 * FOCAL)), None)
    assert "not 1500" in said and "leave it out" in said
    assert _doubt(pairs(), CameraChoice(camera=camera(FOCAL)), None) == ""
    assert _doubt(pairs(), CameraChoice(), None) == _doubt(pairs(), None, None) == ""
