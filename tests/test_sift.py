"""SIFT in the project's pixel convention, on images whose keypoints are known."""

import cv2
import numpy as np
import pytest
from random_front_end import texture

from matcher.config import ExtractorConfig
from matcher.extract.extractor import SiftExtractor, root_sift
from matcher.types import Features, Image

CENTRES = np.array([[40.0, 50.0], [120.25, 44.5], [79.6, 120.3], [160.1, 110.75], [201.4, 60.0]])


def blobs(
    size: tuple[int, int] = (240, 160), centres: np.ndarray = CENTRES, sigma: float = 5.0
) -> np.ndarray:
    """Bright Gaussians (H, W) uint8; the centre of the first pixel is (0, 0)."""
    y, x = np.mgrid[: size[1], : size[0]]
    squares = (x[..., None] - centres[:, 0]) ** 2 + (y[..., None] - centres[:, 1]) ** 2
    return (30 + 200 * np.exp(-squares / (2 * sigma**2)).sum(-1)).clip(0, 255).round().astype(np.uint8)


def extract(pixels: np.ndarray, size: tuple[int, int] | None = None, **fields) -> Features:
    config = fields.pop("config", ExtractorConfig())
    image = Image(pixels, size or pixels.shape[1::-1], **fields)
    return SiftExtractor(config)([image])[0]


def nearest(features: Features, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distance from each point to its nearest keypoint, and which one that is."""
    distances = np.linalg.norm(points[:, None] - features.keypoints.numpy()[None], axis=-1)
    return distances.min(1), distances.argmin(1)


@pytest.mark.parametrize("sigma", [3.0, 5.0, 8.0])
def test_blobs_are_found_at_their_centres(sigma: float) -> None:
    features = extract(blobs(sigma=sigma))
    distance, which = nearest(features, CENTRES)
    assert distance.max() < 0.1
    # A Gaussian blob answers most at its own scale; OpenCV's size is a diameter.
    np.testing.assert_allclose(features.scales[which], 2 * sigma, rtol=0.25)


@pytest.mark.parametrize("degrees", [20, 90, -135])
def test_angles_run_from_x_towards_y(rng: np.random.Generator, degrees: float) -> None:
    picture = texture(rng, 400, 400, sigma=2)
    # getRotationMatrix2D turns from y towards x in image coordinates, hence the minus.
    turn = cv2.getRotationMatrix2D((199.5, 199.5), -degrees, 1.0)
    turned = cv2.warpAffine(picture, turn, (400, 400), flags=cv2.INTER_CUBIC)
    angle = np.deg2rad(degrees)
    np.testing.assert_allclose(turn[:, :2] @ [1, 0], [np.cos(angle), np.sin(angle)], atol=1e-12)

    features0, features1 = extract(picture), extract(turned)
    expected = features0.keypoints.double().numpy() @ turn[:, :2].T + turn[:, 2]
    near = np.linalg.norm(expected - 199.5, axis=1) < 150
    distance, which = nearest(features1, expected)
    products = (features0.descriptors * features1.descriptors[which]).sum(1).numpy()
    same = near & (distance < 0.5) & (products > 0.9)
    assert same.sum() > 50
    change = (features1.orientations[which] - features0.orientations).numpy()[same]
    error = np.abs(np.angle(np.exp(1j * (change - angle))))
    assert np.median(error) < np.deg2rad(2)
    assert np.quantile(error, 0.8) < np.deg2rad(8)


def test_mask_is_kept_and_filled(rng: np.random.Generator) -> None:
    """The strongest points lie outside the mask; inside there are still `max_keypoints`."""
    picture = texture(rng, 400, 300, sigma=2).astype(np.float32)
    picture[:, 200:] = 128 + (picture[:, 200:] - 128) * 0.35
    picture = picture.astype(np.uint8)
    mask = np.zeros((300, 400), bool)
    mask[:, 210:] = True
    config = ExtractorConfig(max_keypoints=100)
    assert (extract(picture, config=config).keypoints[:, 0] > 210).float().mean() < 0.2
    inside = extract(picture, config=config, mask=mask)
    assert len(inside) == 100
    x, y = inside.keypoints.round().long().unbind(1)
    assert mask[y.numpy(), x.numpy()].all()
    everything = extract(picture, config=ExtractorConfig(max_keypoints=10**5), mask=mask)
    assert inside.scores.min() >= everything.scores.sort(descending=True).values[99]


def test_root_sift_is_its_formula(rng: np.random.Generator) -> None:
    raw = rng.integers(0, 200, (5, 128)).astype(np.float32)
    expected = np.sqrt(raw.astype(np.float64) / raw.sum(1, keepdims=True))
    np.testing.assert_allclose(root_sift(raw), expected, atol=1e-6)
    assert root_sift(np.zeros((2, 128), np.float32)).tolist() == np.zeros((2, 128)).tolist()
    assert root_sift(raw.astype(np.uint8)).dtype == np.float32


def test_the_largest_or_the_strongest_are_kept(rng: np.random.Generator) -> None:
    picture = texture(rng, 320, 240, sigma=2)
    every = extract(picture)
    configs = [ExtractorConfig(max_keypoints=60, keep=keep) for keep in ("strongest", "largest")]
    strongest, largest = (extract(picture, config=config) for config in configs)
    assert len(every) > 200 and len(strongest) == len(largest) == 60
    assert strongest.scores.min() >= every.scores.sort(descending=True).values[59]
    assert largest.scales.min() >= every.scales.sort(descending=True).values[59]
    assert largest.scores.diff().le(0).all()  # still strongest first
    rows = (every.keypoints[:, None] == largest.keypoints).all(2)
    rows &= every.orientations[:, None] == largest.orientations
    index, which = rows.nonzero().T
    assert len(index) == 60
    assert every.descriptors[index].equal(largest.descriptors[which])
