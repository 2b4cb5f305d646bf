"""Promise 8: no answer is silently wrong. What has no geometry says so and why, and never is the identity."""

import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.config import EstimationConfig
from matcher.verify.estimation import RobustEstimator

pytestmark = pytest.mark.promise(8)
CAMERAS = (Camera(500, 500, 320, 240), Camera(500, 500, 320, 240))
KINDS = ("homography", "fundamental", "essential")


def spread(seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).uniform((0, 0), (640, 480), (120, 2)).astype(np.float32)


def seen_in_depth(behind: bool) -> list[np.ndarray]:
    """Points seen by two cameras side by side; `behind`: all of them behind both."""
    rng = np.random.default_rng(9)
    world = np.column_stack([rng.uniform(-2, 2, (150, 2)), rng.uniform(4, 9, 150)]) * (-1) ** behind
    sides = (world, world - (0.5, 0, 0))
    return [(side[:, :2] / side[:, 2:] * 500 + (320, 240)).astype(np.float32) for side in sides]


LINE = np.linspace((100, 50), (500, 350), 120, dtype=np.float32)
# Name → points of both images, and the status for homography, fundamental and essential. Points that are
# mirrored, or behind both cameras, have an epipolar geometry: they alone cannot say more.
CASES = {
    "one point, many times": ([spread()[[0] * 99]] * 2, ("too_few", "too_few", "too_few")),
    "points on a line": ((LINE, LINE), ("degenerate", "degenerate", "degenerate")),
    "nothing in common": ((spread(), spread(6)), ("no_model", "low_inliers", "low_inliers")),
    "a scene in depth": (seen_in_depth(False), ("ok", "ok", "ok")),
    "two identical sets": ((spread(), spread()), ("ok", "degenerate", "degenerate")),
    "mirrored": ((spread(), spread() * (-1, 1) + np.float32((640, 0))), ("no_model", "degenerate", "ok")),
    "behind both cameras": (seen_in_depth(True), ("ok", "ok", "ok")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("error")
def test_the_status_says_what_there_is(kind, name):
    points, wanted = CASES[name][0], CASES[name][1][KINDS.index(kind)]
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
