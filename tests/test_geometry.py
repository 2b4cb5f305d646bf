"""The pixel convention: resizing, turning, warping, and distances to epipolar lines."""

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from matcher.geometry import (
    UPRIGHT,
    inside,
    resize_points,
    resized,
    stored_to_upright,
    turn_angles,
    upright_size,
    upright_to_stored,
    warp_points,
)
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose


def gaussian(size: tuple[int, int], centre: np.ndarray, sigma: float) -> np.ndarray:
    y, x = np.mgrid[: size[1], : size[0]]
    return np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / (2 * sigma**2))


def centroid(picture: np.ndarray) -> np.ndarray:
    y, x = np.mgrid[: picture.shape[0], : picture.shape[1]]
    return np.array([(x * picture).sum(), (y * picture).sum()]) / picture.sum()


@pytest.mark.parametrize(
    ("size", "longer_side", "expected"),
    [
        ((4000, 3000), 1024, (1024, 768)),
        ((3000, 4001), 1024, (768, 1024)),
        ((640, 480), 1024, (640, 480)),
        ((640, 480), None, (640, 480)),
        ((10000, 3), 100, (5000, 2)),
        ((12000, 400), 1024, (4857, 162)),
        ((400, 100), 100, (100, 25)),
        ((1, 1), 1024, (1, 1)),
    ],
)
def test_resized_is_only_ever_smaller(size, longer_side, expected) -> None:
    new, scale = resized(size, longer_side)
    assert new == expected
    assert scale == (expected[0] / size[0], expected[1] / size[1])


def test_resize_points_is_what_resizing_does() -> None:
    size, centre = (301, 201), np.array([120.3, 77.8])
    new, scale = resized(size, 100)
    small = cv2.resize(gaussian(size, centre, 15.0), new, interpolation=cv2.INTER_AREA)
    assert scale[0] != scale[1]  # rounding makes the axes differ
    np.testing.assert_allclose(centroid(small), resize_points(centre, scale), atol=0.01)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turning_points_is_what_turning_images_does(orientation: int) -> None:
    stored = np.zeros((5, 8), np.uint8)
    stored[1, 6] = 255
    picture = Image.fromarray(stored)
    picture.getexif()[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(picture))
    assert upright_size((8, 5), orientation) == (upright.shape[1], upright.shape[0])
    y, x = np.argwhere(upright)[0]
    np.testing.assert_array_equal(stored_to_upright(np.array([6, 1]), (8, 5), orientation), [x, y])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_to_stored_is_the_inverse(orientation: int, rng: np.random.Generator) -> None:
    points = rng.uniform(0, 400, (30, 2))
    there = stored_to_upright(points, (640, 360), orientation)
    np.testing.assert_allclose(upright_to_stored(there, (640, 360), orientation), points, atol=1e-10)
    np.testing.assert_array_equal(UPRIGHT[orientation] @ UPRIGHT[orientation].T, np.eye(2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_angles_turn_with_the_points(orientation: int, rng: np.random.Generator) -> None:
    start, angles = rng.uniform(0, 300, (20, 2)), rng.uniform(-np.pi, np.pi, 20)
    end = start + np.stack([np.cos(angles), np.sin(angles)], axis=1)
    moved = stored_to_upright(end, (640, 360), orientation) - stored_to_upright(
        start, (640, 360), orientation
    )
    turned = turn_angles(angles, UPRIGHT[orientation])
    np.testing.assert_allclose(np.stack([np.cos(turned), np.sin(turned)], axis=1), moved, atol=1e-9)


def test_warp_points_is_the_projection(rng: np.random.Generator) -> None:
    homography = np.array([[0.9, 0.1, 20], [-0.05, 1.1, -7], [1e-4, -2e-4, 1]])
    points = rng.uniform(0, 500, (25, 2))
    expected = cv2.perspectiveTransform(points[None], homography)[0]
    np.testing.assert_allclose(warp_points(points, homography), expected, atol=1e-9)
    back = warp_points(warp_points(points, homography), np.linalg.inv(homography))
    np.testing.assert_allclose(back, points, atol=1e-8)


def test_points_behind_the_horizon_are_nan() -> None:
    homography = np.array([[1, 0, 0], [0, 1, 0], [0.01, 0, -1.0]])
    warped = warp_points(np.array([[50.0, 0], [100, 0], [200, 10]]), homography)
    assert np.isnan(warped[:2]).all()
    np.testing.assert_allclose(warped[2], [200, 10])


def test_inside_is_the_area_of_the_pixels() -> None:
    points = np.array([[-0.5, -0.5], [9.5, 4.5], [-0.51, 0], [9.51, 0], [0, 4.51], [np.nan, 0], [3, 2]])
    assert inside(points, (10, 5)).tolist() == [True, True, False, False, False, False, True]


@pytest.fixture
def two_cameras(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of one scene in two images, and the fundamental matrix between them."""
    K0 = np.array([[500, 0, 320], [0, 510, 240], [0, 0, 1.0]])
    K1 = np.array([[600, 0, 300], [0, 590, 200], [0, 0, 1.0]])
    cam1_from_cam0 = np.eye(4)
    cam1_from_cam0[:3, :3] = cv2.Rodrigues(np.array([0.1, -0.3, 0.05]))[0]
    cam1_from_cam0[:3, 3] = [1.0, 0.2, -0.1]
    scene = rng.uniform([-2, -2, 4], [2, 2, 9], (30, 3))
    moved = scene @ cam1_from_cam0[:3, :3].T + cam1_from_cam0[:3, 3]
    points0, points1 = scene @ K0.T, moved @ K1.T
    return (
        points0[:, :2] / points0[:, 2:],
        points1[:, :2] / points1[:, 2:],
        fundamental_from_pose(K0, K1, cam1_from_cam0),
    )


def test_true_pairs_lie_on_their_epipolar_lines(two_cameras) -> None:
    points0, points1, fundamental = two_cameras
    assert epipolar_distance(points0, points1, fundamental).max() < 1e-9
    assert abs(np.linalg.det(fundamental)) < 1e-12
    assert epipolar_distance(points0, np.roll(points1, 1, axis=0), fundamental).min() > 0


def test_epipolar_distance_is_in_pixels(two_cameras) -> None:
    points0, points1, fundamental = two_cameras
    lines1 = np.concatenate([points0, np.ones((30, 1))], axis=1) @ fundamental.T
    normal = lines1[:, :2] / np.linalg.norm(lines1[:, :2], axis=1, keepdims=True)
    moved = points1 + 3 * normal
    lines0 = np.concatenate([moved, np.ones((30, 1))], axis=1) @ fundamental
    in_image0 = np.abs((lines0[:, :2] * points0).sum(1) + lines0[:, 2]) / np.linalg.norm(
        lines0[:, :2], axis=1
    )
    np.testing.assert_allclose(epipolar_distance(points0, moved, fundamental), (3 + in_image0) / 2, rtol=1e-9)
    np.testing.assert_allclose(
        epipolar_distance(moved, points0, fundamental.T),
        epipolar_distance(points0, moved, fundamental),
        rtol=1e-12,
    )
