"""Cameras of a reconstruction: unknown ones begin simply, wrong ones are said, uncertain observations go."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from collection_scene import aligned, centres, synthetic_store
from scipy.spatial.transform import Rotation

from matcher.cameras import Camera
from matcher.collection.schema import RefinedKeypoints
from matcher.export.colmap import CameraChoice
from matcher.sfm.reconstruct import check_given_camera, reconstruct
from matcher.types import TwoViewGeometry

pytest.importorskip("pycolmap")


def test_cameras_get_their_distortion_once_all_images_are_registered(tmp_path):
    """COLMAP registers few images of unknown cameras with many parameters."""
    store, poses = synthetic_store(np.random.default_rng(6), count=8, points=350, camera=None)
    choice = CameraChoice(model="FULL_OPENCV", sharing="single")
    made = reconstruct(store, tmp_path / "model", choice=choice, threads=1).largest
    assert made.registered == 8 and made.mean_reprojection_error < 1
    assert {camera["model"] for camera in made.cameras.values()} == {"FULL_OPENCV"}
    found, truth = np.array([centre for _, centre in sorted(made.centres().items())]), centres(poses)
    largest = np.linalg.norm(truth[:, None] - truth, axis=2).max()
    assert np.linalg.norm(aligned(found, truth) - truth, axis=1).max() < 0.02 * largest


# --- A camera that was given

FOCAL = 500.0


def camera(focal):
    return Camera(focal, focal, 320, 240, (640, 480))


def pairs(count=30, status="ok", inliers=80):
    """A store's pairs: cameras of `FOCAL` that turn at random, with a little noise."""
    rng = np.random.default_rng(3)
    inverse = np.linalg.inv(camera(FOCAL).K)
    found = []
    for number in range(count):
        x, y, z = rng.standard_normal(3)
        cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
        turn = Rotation.from_rotvec(0.3 * rng.standard_normal(3)).as_matrix()
        matrix = inverse.T @ cross @ turn @ inverse * (1 + 1e-3 * rng.standard_normal((3, 3)))
        geometry = TwoViewGeometry("fundamental", status, np.ones(inliers, bool), matrix)
        found.append(SimpleNamespace(name0="a.jpg", name1=f"b{number}.jpg", geometry=geometry))
    return SimpleNamespace(pairs=lambda: iter(found))


@pytest.mark.parametrize("factor", [0.4, 0.95, 1.0, 1.4])
def test_a_wrong_focal_length_is_noticed_and_a_right_one_is_not(factor):
    said = check_given_camera(pairs(), CameraChoice(camera=camera(factor * FOCAL)))
    assert bool(said) == (not 0.9 < factor < 1.1)
    assert not said or int(re.search(r"near (\d+) px", said)[1]) == pytest.approx(FOCAL, rel=0.1)


# --- Uncertain observations

EXACT, INEXACT = 0.1, 1.5  # pixels


def test_models_without_uncertain_observations_are_more_exact(tmp_path):
    """A third are 15 times less certain; all images and most points stay."""
    store, poses = synthetic_store(np.random.default_rng(5), count=7, points=250, wrong=0.1, noise=0.0)
    rng, refined = np.random.default_rng(6), {}
    for image in store.images():
        points = store.keypoints(image.name)
        spread = np.where(rng.random(len(points)) < 1 / 3, INEXACT, EXACT)
        moved = points + spread[:, None] * rng.normal(0, 1, points.shape)
        covariances = spread[:, None, None] ** 2 * np.eye(2)
        refined[image.name] = RefinedKeypoints(moved.astype(np.float32), covariances, spread > 0)
    store.refined_keypoints = refined.get
    every = reconstruct(store, tmp_path / "every", threads=1).largest
    certain = reconstruct(store, tmp_path / "certain", threads=1, max_deviation=0.5).largest
    assert every.registered == certain.registered == 7
    assert every.mean_reprojection_error > 0.4 and certain.mean_reprojection_error < 3 * EXACT
    assert 0.55 < certain.observations / every.observations < 0.75
    assert certain.points > 0.85 * every.points
    truth, worst = centres(poses), []
    for model in (every, certain):
        found = np.array([centre for _, centre in sorted(model.centres().items())])
        worst.append(np.linalg.norm(aligned(found, truth) - truth, axis=1).max())
    assert worst[1] < 0.7 * worst[0]
