"""Rotary encoding against its equation, and the frame that positions are measured in."""

import numpy as np
import pytest
import torch

from matcher.config import ExtractorConfig, PositionConfig
from matcher.errors import UsageError
from matcher.extract.sift import SiftExtractor
from matcher.geometry import UPRIGHT, turn_angles, upright_size, upright_to_stored
from matcher.images import read_image
from matcher.match.position import RotaryPosition, position_inputs, rotate
from matcher.types import Features

NAMES = ("xy", "scale", "orientation")


def make_features(rng: np.random.Generator, count: int = 12, size: tuple[int, int] = (640, 360)) -> Features:
    return Features(
        keypoints=rng.uniform(0, size, (count, 2)),
        descriptors=np.zeros((count, 4)),
        size=size,
        scales=rng.uniform(2, 40, count),
        orientations=rng.uniform(-np.pi, np.pi, count),
    )


@pytest.mark.parametrize("exif", range(1, 9))
def test_a_turned_image_has_the_inputs_of_the_upright_one(rng: np.random.Generator, exif: int) -> None:
    stored_size = (640, 360)
    size = upright_size(stored_size, exif)
    upright = make_features(rng, size=size)
    turned = Features(
        keypoints=upright_to_stored(upright.keypoints.double().numpy(), stored_size, exif),
        descriptors=upright.descriptors,
        size=stored_size,
        scales=upright.scales,
        orientations=turn_angles(upright.orientations.double().numpy(), UPRIGHT[exif].T),
        exif_orientation=exif,
    )
    expected = position_inputs(upright, NAMES)
    torch.testing.assert_close(position_inputs(turned, NAMES), expected, atol=1e-5, rtol=0)
    batch = position_inputs(Features.stack([turned, turned]), NAMES)
    torch.testing.assert_close(batch, expected.expand(2, -1, -1), atol=1e-5, rtol=0)


def turned_by(x: torch.Tensor, position: RotaryPosition, features: Features, names) -> torch.Tensor:
    """Heads (N, heads, head_dim) after their rotation."""
    return rotate(x[None, :, None], position(position_inputs(features, names))[None])[0, :, 0]


def test_rotation_is_the_equation(rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    position = RotaryPosition(PositionConfig(), head_dim=8)
    features = make_features(rng)
    x = torch.from_numpy(rng.normal(size=(12, 3, 8)).astype(np.float32))
    turned = turned_by(x, position, features, NAMES).detach().numpy()

    inputs = position_inputs(features, NAMES).double().numpy()
    weight = position.frequencies.weight.detach().double().numpy()
    expected = np.zeros((12, 3, 8))
    for point in range(12):
        for channel in range(4):
            angle = weight[channel] @ inputs[point]
            matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            pair = [channel, channel + 4]
            expected[point][:, pair] = x[point, :, pair].double().numpy() @ matrix.T
    np.testing.assert_allclose(turned, expected, atol=2e-5)
    half = turned_by(x.bfloat16(), position, features, NAMES)
    assert half.dtype == torch.bfloat16
    np.testing.assert_allclose(half.float().detach().numpy(), expected, atol=0.05)


def test_products_depend_on_differences_of_position_only(rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    position = RotaryPosition(PositionConfig(inputs=("xy",)), head_dim=16)
    features = make_features(rng)
    shifted = Features(
        features.keypoints + torch.tensor([30.0, -20.0]), features.descriptors, size=features.size
    )
    q, k = torch.randn(2, 12, 1, 16)

    def products(f: Features) -> torch.Tensor:
        turned = [turned_by(each, position, f, ("xy",))[:, 0] for each in (q, k)]
        return turned[0] @ turned[1].T

    torch.testing.assert_close(products(features), products(shifted), atol=1e-4, rtol=0)
    assert not torch.allclose(products(features), q[:, 0] @ k[:, 0].T, atol=0.1)


RAW = ("raw_scale", "raw_sigma", "raw_orientation")


def test_raw_inputs_are_colmaps(views) -> None:
    """LightGlue's SIFT network was trained on COLMAP's keypoints."""
    pycolmap = pytest.importorskip("pycolmap")
    image = read_image(views[0])
    (features,) = SiftExtractor(ExtractorConfig(max_keypoints=1500))([image])
    grey = image.pixels if image.pixels.ndim == 2 else image.pixels @ np.array([0.299, 0.587, 0.114])
    theirs, _ = pycolmap.Sift(device=pycolmap.Device.cpu).extract(grey.astype(np.float32) / 255)
    raw = position_inputs(features, RAW).numpy()
    near = np.linalg.norm(features.keypoints.numpy()[:, None] + 0.5 - theirs[:, :2], axis=2) < 0.3
    near &= np.abs(raw[:, 2][:, None] - theirs[:, 3]) < 0.1
    ours, index = near.nonzero()
    assert len(ours) > 400
    ratio = raw[ours, 1] / (theirs[index, 2] * 1024 / max(image.size))
    assert np.median(ratio) == pytest.approx(1.0, abs=1e-3)
    assert np.median(np.abs(ratio - 1)) < 0.01
    assert (np.abs(raw[ours, 2]) > 3).any()


@pytest.mark.parametrize("exif", range(1, 9))
def test_frames_are_the_ends_of_the_axes_in_the_upright_image(rng: np.random.Generator, exif: int) -> None:
    size = (640, 360)
    upright = Features(
        keypoints=rng.uniform(0, size, (9, 2)),
        descriptors=np.zeros((9, 4)),
        size=size,
        affine_frames=rng.normal(0, 20, (9, 2, 2)),
    )
    expected = [
        (upright.keypoints.numpy() + upright.affine_frames.numpy()[..., i] - np.array(size) / 2) / 320
        for i in (0, 1)
    ]
    stored_size = size if exif < 5 else size[::-1]
    points = upright_to_stored(upright.keypoints.double().numpy(), stored_size, exif)
    turned = Features(
        keypoints=points,
        descriptors=np.zeros((9, 4)),
        size=stored_size,
        affine_frames=UPRIGHT[exif].T @ upright.affine_frames.double().numpy(),
        exif_orientation=exif,
    )
    found = position_inputs(turned, ("xy", "frame"))
    assert found.shape == (9, 6)
    np.testing.assert_allclose(found[:, 2:], np.concatenate(expected, axis=1), atol=1e-5)
    with pytest.raises(UsageError, match=r"needs affine_frames of the keypoints: Features\(affine_frames="):
        position_inputs(make_features(rng), ("frame",))
