"""Points of distorting lenses: against COLMAP's own models, and a pose that needs them undistorted."""

import numpy as np
import pytest

from matcher.cameras import CAMERA_MODELS, Camera
from matcher.config import EstimationConfig
from matcher.verify.adjustment import undistort
from matcher.verify.estimation import RobustEstimator

DISTORTION = {
    "SIMPLE_PINHOLE": (),
    "PINHOLE": (),
    "SIMPLE_RADIAL": (-0.15,),
    "RADIAL": (-0.2, 0.05),
    "OPENCV": (-0.2, 0.05, 0.002, -0.001),
    "FULL_OPENCV": (-0.2, 0.05, 0.002, -0.001, 0.01, 0.02, -0.01, 0.003),
    "SIMPLE_RADIAL_FISHEYE": (0.05,),
    "RADIAL_FISHEYE": (0.05, -0.01),
    "OPENCV_FISHEYE": (0.05, -0.01, 0.003, 0.001),
    "FOV": (0.8,),
    "THIN_PRISM_FISHEYE": (0.05, -0.01, 0.001, 0.002, 0.001, 0.0005, 0.001, -0.001),
}


def camera_of(model: str) -> Camera:
    fy = 800.0 if CAMERA_MODELS[model][0] == 1 else 820.0
    return Camera(800.0, fy, 511.5, 383.5, (1024, 768), model, DISTORTION[model])


def seen(camera: Camera, rays: np.ndarray) -> np.ndarray:
    """Stored pixels (N, 2) of rays (N, 2) at depth 1, by COLMAP."""
    pycolmap = pytest.importorskip("pycolmap")
    model, params = camera.to_colmap()
    lens = pycolmap.Camera(model=model, width=1024, height=768, params=params)
    return lens.img_from_cam(np.column_stack([rays, np.ones(len(rays))])) - 0.5


@pytest.mark.parametrize("model", CAMERA_MODELS)
def test_every_model_is_inverted(model, rng):
    camera = camera_of(model)
    rays = rng.uniform([-0.55, -0.42], [0.55, 0.42], (300, 2))
    found = undistort(seen(camera, rays), camera)
    np.testing.assert_allclose(found, rays * (camera.fx, camera.fy) + (camera.cx, camera.cy), atol=1e-3)
    assert undistort(np.zeros((0, 2)), camera).shape == (0, 2)


def test_a_pose_needs_the_distortion(rng):
    camera = Camera(800.0, 800.0, 511.5, 383.5, (1024, 768), "RADIAL", (-0.35, 0.12))
    world = rng.uniform([-3, -2, 5], [3, 2, 9], (400, 3))
    angle = np.radians(8)
    rotation = np.array([[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]])
    moved = world @ rotation.T + [1.0, 0.1, 0.2]
    points = [seen(camera, p[:, :2] / p[:, 2:]) + rng.normal(0, 0.3, (400, 2)) for p in (world, moved)]
    estimator = RobustEstimator(EstimationConfig(kind="essential"))

    def off(given: Camera) -> tuple[float, int]:
        found = estimator(*points, cameras=(given, given))
        turn = found.cam1_from_cam0[:3, :3] @ rotation.T
        return float(np.degrees(np.arccos(np.clip((np.trace(turn) - 1) / 2, -1, 1)))), int(
            found.inliers.sum()
        )

    right, plain = off(camera), off(Camera(800.0, 800.0, 511.5, 383.5))
    assert right[0] < 0.2 and right[1] > 390
    assert plain[1] < right[1] - 20
