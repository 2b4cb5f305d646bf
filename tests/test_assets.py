"""The demo views and the cameras they claim to have."""

import json
from pathlib import Path

import numpy as np
import pytest

import matcher
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose

ASSETS = Path(__file__).resolve().parent.parent / "assets"
TRUTH = json.loads((ASSETS / "poses.json").read_text("utf-8"))
K = np.array(TRUTH["K"])


@pytest.mark.parametrize("other", [1, 2])
def test_poses_are_rigid_and_a_real_change_of_viewpoint(other):
    T = np.array(TRUTH[f"cam{other}_from_cam0"])
    world = [np.array(TRUTH["cam_from_world"][f"view{i}.jpg"]) for i in (0, other)]
    np.testing.assert_allclose(T @ world[0], world[1], atol=1e-12)
    np.testing.assert_allclose(T[:3, :3] @ T[:3, :3].T, np.eye(3), atol=1e-12)
    assert np.degrees(np.arccos((np.trace(T[:3, :3]) - 1) / 2)) > 20
    assert np.linalg.norm(T[:3, 3]) > 0.5


@pytest.mark.parametrize("other", [1, 2])
def test_matches_of_the_views_agree_with_the_cameras_to_a_fraction_of_a_pixel(other):
    result = matcher.load("nearest").match(ASSETS / "view0.jpg", ASSETS / f"view{other}.jpg")
    F = fundamental_from_pose(K, K, np.array(TRUTH[f"cam{other}_from_cam0"]))
    distance = epipolar_distance(result.points0.astype(float), result.points1.astype(float), F)
    assert len(distance) > 200
    assert (distance < 3).mean() > 0.7
    assert np.median(distance[result.geometry.inliers]) < 0.3


def test_files_are_small_and_of_the_stated_size():
    for index in range(3):
        path = ASSETS / f"view{index}.jpg"
        assert path.stat().st_size < 200_000
        assert matcher.read_image(path).size == tuple(TRUTH["size"])
