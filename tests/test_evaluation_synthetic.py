import cv2
import numpy as np
import pytest

import matcher
from matcher.errors import UsageError
from matcher.evaluate.measure import reprojection_errors
from matcher.evaluate.synthetic import (
    LEVELS,
    degrade,
    draw_homography,
    recoloured,
    sensor_set,
    synthetic_set,
    unrelated_set,
    warp,
    zoomed_set,
)
from matcher.geometry import inside, warp_points
from matcher.images import find_images, gradient_image, image_from_array


@pytest.fixture
def photos(tmp_path, rng):
    """Five textured pictures in two folders."""
    for number in range(5):
        noise = rng.integers(0, 256, (60, 80, 3)).astype(np.uint8)
        folder = tmp_path / ("a" if number < 3 else "b")
        folder.mkdir(exist_ok=True)
        cv2.imwrite(
            str(folder / f"{number}.png"), cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)
        )
    return tmp_path


def test_pairs_follow_from_seed_and_number_alone(photos):
    few, many = (synthetic_set(find_images(photos), count=count, seed=3).pairs for count in (8, 40))
    other = synthetic_set(find_images(photos), count=8, seed=4).pairs
    for i in range(8):
        assert np.array_equal(few[i].H_1_from_0, many[i].H_1_from_0)
        assert np.array_equal(few[i].image1.pixels, many[i].image1.pixels)
        assert not np.array_equal(few[i].H_1_from_0, other[i].H_1_from_0)
    assert [few[i].group for i in range(5)] == ["level 1", "level 2", "level 3", "level 4", "level 1"]
    assert len({many[4 * i].image0.path for i in range(5)}) == 5  # every photo once before any again
    with pytest.raises(IndexError):
        few[8]


def test_truth_is_exact_in_the_pixel_convention(photos):
    """Matches of the warped view agree with the homography to a fraction of a pixel, without a bias."""
    pipe = matcher.load("nearest")
    pair = synthetic_set(find_images(photos), count=1, levels=(1,)).pairs[0]
    found = pipe.match(pair.image0.pixels, pair.image1.pixels)
    errors = reprojection_errors(found.points0, found.points1, pair.H_1_from_0)
    near = errors < 3
    assert near.sum() > 100
    bias = (warp_points(found.points0, pair.H_1_from_0) - found.points1)[near].mean(axis=0)
    assert np.median(errors[near]) < 0.5
    assert np.abs(bias).max() < 0.1


def test_warp_moves_pixel_centres_and_is_black_outside(rng):
    pixels = rng.integers(1, 256, (40, 50)).astype(np.uint8)
    shift = np.array([[1, 0, 7.0], [0, 1, -3.0], [0, 0, 1]])
    view = warp(pixels, shift)
    assert np.array_equal(view[:37, 7:], pixels[3:, :43])
    assert not view[:, :7].any() and not view[37:].any()


@pytest.mark.parametrize("number", LEVELS)
def test_levels_keep_their_bounds(number, rng):
    size, level = (640, 480), LEVELS[number]
    for _ in range(50):
        H = draw_homography(size, level, rng)
        grid = np.stack(np.meshgrid(np.linspace(0, 639, 20), np.linspace(0, 479, 20)), -1).reshape(-1, 2)
        assert inside(warp_points(grid, H), size).mean() > 0.3
        assert np.isfinite(warp_points(grid, H)).all()


@pytest.mark.parametrize("shape", [(50, 60), (50, 60, 3)])
def test_disturbance_keeps_shape_and_grows(shape, rng):
    pixels = rng.integers(60, 200, shape).astype(np.uint8)
    changes = []
    for strength in (0.1, 1.5):
        found = [degrade(pixels, strength, np.random.default_rng(i)) for i in range(20)]
        assert all(view.shape == shape and view.dtype == np.uint8 for view in found)
        changes.append(np.mean([np.abs(view.astype(float) - pixels).mean() for view in found]))
    assert changes[1] > 1.5 * changes[0]


def test_unrelated_pairs_come_from_different_folders(photos):
    found = unrelated_set(find_images(photos), count=30, seed=1)
    assert len(found) == 30
    assert all(pair.image0.path.parent != pair.image1.path.parent for pair in found.pairs)
    again = unrelated_set(find_images(photos), count=5, seed=1)
    assert [pair.name for pair in again.pairs] == [pair.name for pair in found.pairs][:5]


def test_what_cannot_be_made(photos):
    paths = find_images(photos)
    with pytest.raises(UsageError, match="levels"):
        synthetic_set(paths, levels=(1, 5))
    for make in (synthetic_set, zoomed_set, sensor_set, unrelated_set):
        with pytest.raises(UsageError, match="at least 1"):
            make(paths, count=0)
    with pytest.raises(UsageError, match="two photos"):
        unrelated_set(paths[:1])


def test_level_0_changes_the_light_alone(photos):
    pair = synthetic_set(find_images(photos), count=1, levels=[0]).pairs[0]
    np.testing.assert_allclose(pair.H_1_from_0, np.eye(3), atol=1e-6)
    assert pair.image0.pixels.shape == pair.image1.pixels.shape
    assert not np.array_equal(pair.image0.pixels, pair.image1.pixels)


def test_zoomed_pairs_show_a_part_at_several_times_the_scale(photos):
    found = zoomed_set(find_images(photos), count=6, seed=3)
    for number, pair in enumerate(found.pairs):
        wide, part = (pair.image0, pair.image1) if number % 2 == 0 else (pair.image1, pair.image0)
        assert wide.pixels.shape[0] < part.pixels.shape[0]
        homography = pair.H_1_from_0 if number % 2 == 0 else np.linalg.inv(pair.H_1_from_0)
        height, width = part.pixels.shape[:2]
        centre = warp_points(np.array([[width / 2, height / 2]]), np.linalg.inv(homography))
        around = warp_points(centre + np.array([[0, 0], [1, 0], [0, 1]]), homography)
        zoom = np.sqrt(abs(np.linalg.det(around[1:] - around[0])))
        assert 2 < zoom < 7.5
        back = cv2.warpPerspective(
            part.pixels, np.linalg.inv(homography), wide.pixels.shape[1::-1], flags=cv2.INTER_AREA
        )
        covered = cv2.warpPerspective(
            np.ones((height, width), np.uint8), np.linalg.inv(homography), wide.pixels.shape[1::-1]
        )
        alike = np.corrcoef(back[covered > 0].ravel(), wide.pixels[covered > 0].ravel())[0, 1]
        assert alike > 0.5
    assert found.pairs[2].name == zoomed_set(find_images(photos), count=3, seed=3).pairs[2].name


def test_two_sensors_see_the_same_edges_in_other_greys(rng):
    photo = cv2.resize(
        rng.integers(0, 256, (12, 16), dtype=np.uint8), (320, 240), interpolation=cv2.INTER_AREA
    )
    of_greys, of_edges = [], []
    for _ in range(12):
        seen = [recoloured(photo, rng) for _ in range(2)]
        edges = [gradient_image(image_from_array(each), 2.0).pixels for each in seen]
        of_greys.append(np.corrcoef(*map(np.ravel, seen))[0, 1])
        of_edges.append(np.corrcoef(*map(np.ravel, edges))[0, 1])
    assert np.mean(of_edges) > 0.6 > 0.3 > np.mean(of_greys) and np.min(of_greys) < -0.3
    assert recoloured(photo, rng).shape == photo.shape and recoloured(photo, rng).dtype == np.uint8


def test_pairs_of_two_sensors_are_a_photo_and_a_warp_of_it(photos):
    found = sensor_set(find_images(photos), count=6, seed=3)
    again = sensor_set(find_images(photos), count=3, seed=3)
    assert np.array_equal(found.pairs[2].image1.pixels, again.pairs[2].image1.pixels)
    for pair in found.pairs:
        width, height = pair.image0.pixels.shape[::-1]
        assert pair.image1.pixels.shape == (height, width)
        middle = warp_points(np.array([[width / 2, height / 2]]), pair.H_1_from_0)
        assert inside(middle, (width, height)).all()
