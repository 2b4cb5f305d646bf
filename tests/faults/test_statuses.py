"""Promise 8: no answer is silently wrong. What has no geometry says so and why, and never is the identity."""

import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.verify.estimation import RobustEstimator

pytestmark = pytest.mark.promise(8)
CAMERAS = (Camera(500, 500, 320, 240), Camera(500, 500, 320, 240))
KINDS = ("homography", "fundamental", "essential")


def spread(count: int = 120, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).uniform((0, 0), (640, 480), (count, 2)).astype(np.float32)


def on_a_line(count: int = 120) -> np.ndarray:
    steps = np.linspace(0, 1, count, dtype=np.float32)
    return np.stack([100 + 400 * steps, 50 + 300 * steps], 1)


def mirrored() -> tuple[np.ndarray, np.ndarray]:
    points = spread()
    return points, points * (-1, 1) + np.float32((640, 0))


def seen_in_depth(behind: bool) -> tuple[np.ndarray, np.ndarray]:
    """Points seen by two cameras side by side; `behind`: all of them behind both."""
    rng = np.random.default_rng(9)
    world = np.column_stack([rng.uniform(-2, 2, (150, 2)), rng.uniform(4, 9, 150)])
    world = -world if behind else world
    sides = [world - (0.0, 0, 0), world - (0.5, 0, 0)]
    return tuple((side[:, :2] / side[:, 2:] * 500 + (320, 240)).astype(np.float32) for side in sides)


# Name → points of both images, and the status for homography, fundamental and essential. Points that are
# mirrored, or behind both cameras, have an epipolar geometry: they alone cannot say more.
CASES = {
    "one point, many times": (lambda: (np.tile(spread(1), (99, 1)),) * 2, ("too_few", "too_few", "too_few")),
    "points on a line": (lambda: (on_a_line(), on_a_line()), ("degenerate", "degenerate", "degenerate")),
    "nothing in common": (lambda: (spread(), spread(seed=6)), ("no_model", "low_inliers", "low_inliers")),
    "a scene in depth": (lambda: seen_in_depth(False), ("ok", "ok", "ok")),
    "two identical sets": (lambda: (spread(), spread()), ("ok", "degenerate", "degenerate")),
    "mirrored": (mirrored, ("no_model", "degenerate", "ok")),
    "behind both cameras": (lambda: seen_in_depth(True), ("ok", "ok", "ok")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("error")
def test_the_status_says_what_there_is(kind, name):
    points, wanted = CASES[name][0](), CASES[name][1][KINDS.index(kind)]
    estimator = RobustEstimator(EstimationConfig(kind=kind))
    found = estimator(*points, cameras=CAMERAS if kind == "essential" else None)
    assert found.status == wanted
    assert len(found.inliers) == len(points[0])
    if found.status != "ok":
        assert found.cam1_from_cam0 is None or found.status == "low_inliers"
    else:
        assert np.isfinite(found.matrix).all() and found.inliers.sum() >= 8
        if kind != "homography":
            assert not np.allclose(found.matrix, np.eye(3))
