"""Rendered scenes against rays cast at planes in space."""

import cv2
import numpy as np
import pytest
from training_data import look, texture

from matcher.evaluate.synthetic import (
    NOTHING,
    Plane,
    SceneRecipe,
    build_planes,
    place_camera,
    project,
    render,
)

RECIPE = SceneRecipe(width=160, height=120)
EMPTY = np.full((120, 160), 7, np.uint8)


def scene(rng: np.random.Generator, count: int) -> tuple[list[Plane], tuple]:
    planes = build_planes([texture(rng, finest=6) for _ in range(count)], RECIPE, rng)
    return planes, place_camera(RECIPE, count > 1, rng)


def test_project_is_the_pinhole_camera(rng):
    (plane,), (K, R, t) = scene(rng, 1)
    u, v = 31.0, 77.5
    seen = K @ (R @ (plane.origin + u * plane.right + v * plane.down) + t)
    np.testing.assert_allclose(project(plane, K, R, t) @ [u, v, 1], seen, rtol=1e-12)
    depth = (R @ (plane.origin + u * plane.right + v * plane.down) + t)[2]
    assert seen[2] == pytest.approx(depth)


@pytest.mark.parametrize("seed", range(4))
def test_texture_pixels_appear_where_they_project(seed):
    rng = np.random.default_rng(seed)
    (plane,), camera = scene(rng, 1)
    view = render([plane], camera, EMPTY)
    grid = np.stack(np.meshgrid(np.arange(3, 157, 5), np.arange(3, 117, 5)), -1).reshape(-1, 2)
    lifted = np.column_stack([grid, np.ones(len(grid))]) @ view.homographies[0].T
    at = lifted[:, :2] / lifted[:, 2:]
    inside = ((at > 1) & (at < (158, 118))).all(1)
    assert inside.sum() > 100
    shown = cv2.remap(
        view.pixels.astype(np.float32), at[inside].astype(np.float32)[None], None, cv2.INTER_LINEAR
    )[0]
    error = np.abs(shown - plane.texture[grid[inside, 1], grid[inside, 0]])
    # A shift by half a pixel would give about 6 grey levels here.
    assert np.median(error) < 2
    assert np.percentile(error, 95) < 6


@pytest.mark.parametrize("seed", range(3))
def test_labels_are_the_nearest_plane(seed):
    rng = np.random.default_rng([9, seed])
    planes, camera = scene(rng, 4)
    view = render(planes, camera, EMPTY)
    pixels = rng.integers(0, (160, 120), (400, 2))
    expected, _ = look(planes, camera, pixels.astype(float))
    agreed = view.labels[pixels[:, 1], pixels[:, 0]] == expected
    assert len(np.unique(expected)) > 2
    assert agreed.mean() > 0.985  # the rest lies within half a pixel of an edge


def test_the_nearer_plane_hides_the_farther_in_any_order():
    flat = np.array([1.0, 0, 0]), np.array([0, 1.0, 0])
    near = Plane(np.full((20, 20), 200, np.uint8), np.array([-10.0, -10, 50]), *flat)
    far = Plane(np.full((80, 80), 90, np.uint8), np.array([-40.0, -40, 100]), *flat)
    K = np.array([[100.0, 0, 79.5], [0, 100, 59.5], [0, 0, 1]])
    for planes, number in (([near, far], 0), ([far, near], 1)):
        view = render(planes, (K, np.eye(3), np.zeros(3)), EMPTY)
        assert view.labels[60, 80] == number
        assert view.pixels[60, 80] == 200
        assert view.pixels[60, 50] == 90
        assert view.labels[60, 2] == NOTHING
        assert view.pixels[60, 2] == 7


def test_a_plane_behind_the_camera_is_not_seen():
    behind = Plane(np.full((80, 80), 90, np.uint8), np.array([-40.0, -40, -100]), np.eye(3)[0], np.eye(3)[1])
    K = np.array([[100.0, 0, 79.5], [0, 100, 59.5], [0, 0, 1]])
    view = render([behind], (K, np.eye(3), np.zeros(3)), EMPTY)
    assert (view.labels == NOTHING).all()
    assert (view.pixels == 7).all()
