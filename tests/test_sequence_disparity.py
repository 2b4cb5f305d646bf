from dataclasses import replace

import cv2
import numpy as np
import pytest

from matcher.images import image_from_array
from matcher.sequence.stereo import complete_partners
from matcher.types import Image

FAR, NEAR, EDGE = 6.5, 14.25, 200  # disparities left and right of a column of the left image
SIZE = (400, 240)


def texture(seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal((SIZE[1], SIZE[0] + 100))
    return cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 1.5), None, 30, 220, cv2.NORM_MINMAX)


def shifted(wall: np.ndarray, x: float) -> np.ndarray:
    return cv2.warpAffine(wall, np.float64([[1, 0, -x], [0, 1, 0]]), SIZE, flags=cv2.INTER_CUBIC)


@pytest.fixture
def pair() -> tuple[Image, Image]:
    """A far wall, and a nearer one from column EDGE of the left image on, that hides some of it."""
    walls = texture(1), texture(2)
    pictures = []
    for side in (0, 1):
        far, near = (shifted(wall, 40 + side * d) for wall, d in zip(walls, (FAR, NEAR), strict=True))
        edge = round(EDGE - side * NEAR)
        pictures.append(np.where(np.arange(SIZE[0]) < edge, far, near).clip(0, 255).astype(np.uint8))
    return image_from_array(pictures[0]), image_from_array(pictures[1])


@pytest.fixture
def points() -> np.ndarray:
    x, y = np.meshgrid(np.arange(44, 370, 10), np.arange(20, 220, 10))
    return (np.column_stack([x.ravel(), y.ravel()]) + 0.3).astype(np.float32)


def true_right(points: np.ndarray) -> np.ndarray:
    disparity = np.where(points[:, 0] < EDGE, FAR, NEAR)
    return (points - np.column_stack([disparity, np.zeros(len(points))])).astype(np.float32)


def linked(points: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """A share of the points linked to where they are, but for noise of a pixel along the row."""
    rng = np.random.default_rng(seed)
    true = true_right(points)
    chosen = rng.random(len(points)) < share
    right = np.where(chosen[:, None], true, np.nan).astype(np.float32)
    right[:, 0] += rng.uniform(-1.5, 1.5, len(points))
    return right


def test_links_are_placed_exactly_and_the_rest_is_found(pair, points):
    right = linked(points, 0.4)
    found = complete_partners(pair, points, right)
    known = np.isfinite(found[:, 0])
    error = np.abs(found - true_right(points))[known]
    assert found.dtype == np.float32 and known.mean() > 0.85
    assert np.median(error[:, 0]) < 0.05 and (error[:, 0] < 0.5).mean() > 0.99
    assert error[:, 1].max() < 1e-4


def test_what_the_right_image_hides_is_left_out(pair, points):
    right = linked(points, 0.4)
    hidden = (points[:, 0] > EDGE - (NEAR - FAR)) & (points[:, 0] < EDGE)
    assert hidden.sum() >= 15
    assert np.isnan(complete_partners(pair, points, right)[hidden, 0]).mean() >= 0.75


def test_a_wrong_link_is_left_out_and_one_without_texture_stays(pair, points):
    right = linked(points, 0.5)
    wrong = np.flatnonzero(np.isfinite(right[:, 0]))[::7]
    right[wrong, 0] -= 30
    found = complete_partners(pair, points, right)
    assert (np.abs(found - true_right(points))[wrong, 0] > 2).mean() < 0.05
    flat = tuple(image_from_array(np.full((SIZE[1], SIZE[0]), 90, np.uint8)) for _ in range(2))
    np.testing.assert_allclose(complete_partners(flat, points, right), right, atol=1e-4)


def test_resized_images_give_pixels_of_the_files(pair, points):
    right = linked(points, 0.4)
    double = [image_from_array(cv2.resize(image.pixels, None, fx=2, fy=2), resize=SIZE[0]) for image in pair]
    found = complete_partners((double[0], double[1]), 2 * points + 0.5, 2 * right + 0.5)
    known = np.isfinite(found[:, 0])
    assert known.mean() > 0.85
    error = np.abs(found - (2 * true_right(points) + 0.5))[known, 0]
    assert np.median(error) < 0.15 and (error < 1).mean() > 0.98


def test_nothing_is_done_without_links_or_to_images_on_their_side(pair, points):
    right = linked(points, 0.4)
    few = right.copy()
    few[np.flatnonzero(np.isfinite(right[:, 0]))[3:]] = np.nan
    assert complete_partners(pair, points, few) is few
    turned = tuple(replace(image, orientation=6, size=image.size[::-1]) for image in pair)
    assert complete_partners(turned, points, right) is right
    none = complete_partners(pair, points[:0], right[:0])
    assert none.shape == (0, 2)


def ground(points: np.ndarray) -> np.ndarray:
    """Disparity of ground that rises by a third of a pixel a row, as a road does before a car."""
    return 5 + 0.33 * (points[:, 1] - 20) + 0.08 * (points[:, 0] - 200)


def test_ground_that_slants_is_found_as_well_as_a_wall(points):
    wall = texture(3).astype(np.float32)
    x, y = np.meshgrid(np.arange(SIZE[0], dtype=np.float32), np.arange(SIZE[1], dtype=np.float32))
    left = cv2.remap(wall, x + 90, y, cv2.INTER_CUBIC)
    # x_right = x_left - disparity(x_left, y), solved for x_left.
    source = (x + 5 + 0.33 * (y - 20) - 0.08 * 200) / (1 - 0.08)
    right = cv2.remap(wall, source + 90, y, cv2.INTER_CUBIC)
    pair = tuple(image_from_array(each.clip(0, 255).astype(np.uint8)) for each in (left, right))
    true = points - np.column_stack([ground(points), np.zeros(len(points))]).astype(np.float32)
    seen = (true[:, 0] > 8) & (source.min() < points[:, 0])
    rng = np.random.default_rng(1)
    chosen = rng.random(len(points)) < 0.4
    given = np.where(chosen[:, None], true, np.nan).astype(np.float32)
    given[:, 0] += rng.uniform(-1.0, 1.0, len(points))
    found = complete_partners(pair, points, given)
    known = np.isfinite(found[:, 0])
    assert known[seen & chosen].mean() > 0.95 and known[seen & ~chosen].mean() > 0.85
    error = (found - true)[known & seen, 0]
    assert (
        abs(np.median(error)) < 0.02
        and np.median(np.abs(error)) < 0.06
        and (np.abs(error) < 0.5).mean() > 0.99
    )
