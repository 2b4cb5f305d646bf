"""Scenes with relief: the same for the same random state, exact by independent matches, honest about rims."""

import cv2
import numpy as np
import pytest
from training_data import texture

from matcher.evaluate.posed import (
    HIDDEN,
    NOTHING,
    UNKNOWN,
    VISIBLE_STATE,
    Framing,
    PosedView,
    dense_positions,
    dominant_turn,
    reframe,
    sparse_positions,
    transfer,
)
from matcher.evaluate.protocols import PhotoSet, draw_lens
from matcher.train.labelling import match_errors, sift_features
from matcher.train.relief import Relief, ViewCamera, rectangle, render, with_relief

SIZE = (320, 240)


def noise(seed: int, side: int = 600) -> np.ndarray:
    """(side, side) uint8 with detail at several scales."""
    return texture(np.random.default_rng(seed), side, side, finest=5)


def camera(x: float, angle: float = 0.0, size: tuple[int, int] = SIZE) -> ViewCamera:
    """A camera at (x, 0, 0) that looks along z, turned about the vertical by degrees."""
    K = np.array([[300.0, 0, (size[0] - 1) / 2], [0, 300.0, (size[1] - 1) / 2], [0, 0, 1]])
    R = cv2.Rodrigues(np.array([0, np.deg2rad(angle), 0]))[0]
    return ViewCamera(K, R, -R @ np.array([x, 0, 0]), size)


@pytest.fixture(scope="module")
def surfaces():
    """A wall with relief at 3 m and a flat picture before it at 2 m."""
    wall = rectangle(noise(1), np.array([0, 0, 3.0]), np.array([5.0, 0, 0]), np.array([0, 5.0, 0]))
    heights = cv2.GaussianBlur(noise(2).astype(np.float32), (0, 0), 12) / 255
    near = rectangle(noise(3), np.array([0.1, 0, 2.0]), np.array([0.8, 0, 0]), np.array([0, 0.6, 0]))
    return [with_relief(wall, heights, 0.4), near]


def views(surfaces, *cameras: ViewCamera) -> list[PosedView]:
    return [render(surfaces, each, np.zeros(each.size[::-1], np.uint8)) for each in cameras]


def test_depth_of_a_flat_surface_is_exact(surfaces):
    (view,) = views(surfaces[1:], camera(0))
    assert 1 / view.inverse_depth[120, 160] == pytest.approx(2.0, rel=1e-4)
    assert view.inverse_depth[5, 5] == NOTHING


def test_relief_lies_between_its_lowest_and_highest_height(surfaces):
    (view,) = views(surfaces[:1], camera(0.3, 8))
    shown = view.inverse_depth[view.inverse_depth > 0]
    R = view.cam_from_world[:3, :3]
    rows, columns = np.nonzero(view.inverse_depth > 0)
    rays = np.linalg.inv(view.K) @ np.stack([columns, rows, np.ones(len(rows))])
    world = R.T @ (rays / shown) + np.array([[0.3], [0], [0]])
    assert (world[2] > 2.59).all() and (world[2] < 3.01).all()
    assert np.ptp(world[2]) > 0.15


def test_positions_agree_with_independent_matches(surfaces):
    first, second = views(surfaces, camera(0), camera(0.4, -6))
    positions = dense_positions(first, second)
    errors = match_errors(sift_features(first.pixels), sift_features(second.pixels), positions)
    near = errors[errors < 6]
    assert len(near) > 40 and len(near) > 0.9 * len(errors)
    assert np.median(near) < 0.5


def test_there_and_back_is_the_same_point_and_covered_pixels_are_hidden(surfaces):
    first, second = views(surfaces, camera(0), camera(0.5, -9))
    transferred, back = dense_positions(first, second), dense_positions(second, first)
    visible = transferred[0] >= 0
    rows, columns = np.nonzero(visible)
    corresponding, state = transfer(transferred[:, visible].T, back)
    returned = state == VISIBLE_STATE
    error = np.hypot(*(corresponding - np.stack([columns, rows], 1))[returned].T)
    assert returned.mean() > 0.9 and np.quantile(error, 0.99) < 1.0 and np.median(error) < 0.1
    assert (transferred[0] == HIDDEN).mean() > 0.03
    assert (transferred[0] == UNKNOWN).mean() < 0.05
    # Left of the near picture's left rim the wall is covered in the view from the right.
    assert transferred[0, 120, 112] == HIDDEN


def test_a_lens_and_a_new_framing_keep_positions_exact(surfaces):
    first, second = views(surfaces, camera(0), camera(0.4, -6))
    turn = cv2.Rodrigues(np.array([0.03, -0.05, 0.4]))[0]
    K = np.array([[420.0, 0, 150], [0, 420.0, 110], [0, 0, 1]])
    lens = draw_lens(SIZE, np.random.default_rng(3))
    framed = reframe(second, Framing(K, SIZE, turn, lens))
    points = np.random.default_rng(0).uniform((60, 20), (300, 220), (300, 2))
    direct = sparse_positions(first, second, points)
    through = sparse_positions(first, framed, points)
    both = (direct[:, 0] >= 0) & (through[:, 0] >= 0)
    assert both.sum() > 40
    x, y = lens.to_pinhole(*(np.ascontiguousarray(c)[:, None] for c in through[both].T))
    rays = turn.T @ np.linalg.inv(K) @ np.stack([x[:, 0], y[:, 0], np.ones(both.sum())])
    pixels = second.K @ rays
    assert np.abs(pixels[:2] / pixels[2] - direct[both].T).max() < 0.1


@pytest.fixture
def photo_folder(tmp_path) -> PhotoSet:
    paths = []
    for number in range(4):
        paths.append(tmp_path / f"{number}.png")
        cv2.imwrite(str(paths[-1]), np.stack([noise(10 + number)] * 3, -1))
    return PhotoSet(paths, colour=True)


def test_a_pair_is_the_same_for_the_same_random_state(photo_folder):
    first, again = (Relief(photo_folder).pair(np.random.default_rng(5), SIZE) for _ in range(2))
    assert np.array_equal(first.pixels0, again.pixels0)
    assert np.array_equal(first.positions1, again.positions1)
    assert first.pixels0.shape == SIZE[::-1] and first.scenes


def test_pairs_of_many_scenes_agree_with_independent_matches(photo_folder):
    source, medians = Relief(photo_folder), []
    for seed in range(8):
        pair = source.pair(np.random.default_rng(seed), SIZE)
        described = [sift_features(pixels) for pixels in (pair.pixels0, pair.pixels1)]
        errors = match_errors(*described, pair.positions0)
        if (errors < 6).sum() >= 10:
            medians.append(np.median(errors[errors < 6]))
    assert len(medians) >= 3
    assert np.median(medians) < 1.0


@pytest.mark.parametrize(("share", "opposite"), [(0.0, False), (1.0, True)])
def test_some_cameras_look_from_the_opposite_side(tmp_path, monkeypatch, share, opposite):
    monkeypatch.setattr("matcher.train.relief.ANYWHERE_SHARE", share)
    photo = tmp_path / "photo.png"
    cv2.imwrite(str(photo), noise(5, 256))
    source = Relief(PhotoSet([photo]))
    pairs = [source.pair(np.random.default_rng([3, number]), (64, 64)) for number in range(8)]
    assert (2 in [dominant_turn(pair) for pair in pairs]) == opposite
