"""Observations whose refined position is uncertain are left out of a finished model."""

import numpy as np
import pytest
from collection_scene import centres, synthetic_store

from matcher.benchmark.rows import aligned
from matcher.collection.store import RefinedKeypoints
from matcher.sfm.cameras import deviations
from matcher.sfm.reconstruct import reconstruct

pytest.importorskip("pycolmap")
EXACT, INEXACT = 0.1, 1.5  # pixels


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models with all observations and with the certain ones; a third are 15 times less certain."""
    store, poses = synthetic_store(np.random.default_rng(5), count=7, points=250, wrong=0.1, noise=0.0)
    rng, refined = np.random.default_rng(6), {}
    for image in store.images():
        points = store.keypoints(image.name)
        spread = np.where(rng.random(len(points)) < 1 / 3, INEXACT, EXACT)
        moved = points + spread[:, None] * rng.normal(0, 1, points.shape)
        covariances = spread[:, None, None] ** 2 * np.eye(2)
        refined[image.name] = RefinedKeypoints(moved.astype(np.float32), covariances, spread > 0)
    store.refined_keypoints = refined.get
    out = tmp_path_factory.mktemp("models")
    every = reconstruct(store, out / "every", threads=1).largest
    certain = reconstruct(store, out / "certain", threads=1, max_deviation=0.5).largest
    return every, certain, centres(poses), out


def test_what_is_left_is_exact_and_all_images_stay(models):
    every, certain, _, out = models
    assert every.registered == certain.registered == 7
    assert every.mean_reprojection_error > 0.4
    assert certain.mean_reprojection_error < 3 * EXACT
    assert 0.55 < certain.observations / every.observations < 0.75
    assert certain.points > 0.85 * every.points
    assert not list(out.glob("*/deviations.npz"))


def test_cameras_become_more_exact(models):
    every, certain, truth, _ = models
    worst = []
    for model in (every, certain):
        found = np.array([centre for _, centre in sorted(model.centres().items())])
        worst.append(np.linalg.norm(aligned(found, truth) - truth, axis=1).max())
    assert worst[1] < 0.7 * worst[0]


def test_the_deviation_is_along_the_less_certain_axis():
    along = np.array([[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]])
    covariances = np.stack([along @ np.diag([0.01, 4.0]) @ along.T, np.eye(2)])
    refined = RefinedKeypoints(np.zeros((2, 2), np.float32), covariances, np.array([True, False]))
    found = deviations(refined)
    assert found[0] == pytest.approx(2) and np.isnan(found[1])
