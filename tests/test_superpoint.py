"""SuperPoint: against transformers with the same parameters, and against its definitions."""

import numpy as np
import pytest
import torch
from random_front_end import build, random_parameters, same, share_found, texture, whole

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError
from matcher.extract.superpoint import SuperPoint
from matcher.torch_engine import build_extractor
from matcher.weights.files import save_front_end

KINDS = ["superpoint", "superpoint-open"]


@pytest.fixture
def picture(rng) -> np.ndarray:
    return texture(rng, 160, 120)


def transformers_superpoint(**settings):
    """transformers' network with random parameters, and the same parameters for ours."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.SuperPointForKeypointDetection(transformers.SuperPointConfig(**settings)).eval()
    random_parameters(theirs)

    def fill(network: SuperPoint, _: ExtractorConfig) -> None:
        # Both list encoder, points, descriptors, in the order in which pixels pass through them.
        values = theirs.state_dict().values()
        network.load_state_dict(dict(zip(network.state_dict(), values, strict=True)))

    return theirs, fill


@pytest.mark.parametrize("settings", [{}, {"nms_radius": 2, "score_threshold": 0.02}, {"max_keypoints": 50}])
@pytest.mark.parametrize("size", [(160, 120), (96, 152)])
def test_it_is_what_transformers_has(rng, settings, size):
    options = {"max_keypoints": 5000} | settings
    names = {"score_threshold": "keypoint_threshold", "nms_radius": "nms_radius"}
    given = {names[name]: value for name, value in settings.items() if name in names}
    theirs, fill = transformers_superpoint(border_removal_distance=0, **given)
    pixels = texture(rng, *size)
    batch = torch.from_numpy(pixels)[None, None].float().expand(1, 3, -1, -1) / 255
    with torch.no_grad():
        expected = theirs(batch)
    points = (expected.keypoints[0] * torch.tensor(size)).round()
    inner = ((points >= 4) & (points < torch.tensor(size) - 4)).all(1).nonzero()[:, 0]
    best = inner[expected.scores[0][inner].argsort(descending=True)[: options["max_keypoints"]]]
    points, scores, descriptors = points[best], expected.scores[0][best], expected.descriptors[0][best]
    (ours,) = build("superpoint", fill, **options)([whole(pixels)])
    assert len(ours) == len(points) > 40
    ranked = [np.lexsort(p.numpy().T) for p in (points, ours.keypoints)]
    torch.testing.assert_close(ours.keypoints[ranked[1]], points[ranked[0]], rtol=0, atol=0)
    torch.testing.assert_close(ours.scores[ranked[1]], scores[ranked[0]], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.descriptors[ranked[1]], descriptors[ranked[0]], rtol=0, atol=1e-4)


def test_the_retraining_normalises_after_it_rectifies():
    network = SuperPoint(normalised=True).eval()
    random_parameters(network)
    block = network.encoder[0]
    pixels = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    maps = torch.conv2d(pixels, block.conv.weight, block.conv.bias, padding=1).clamp(min=0)
    spread = (block.norm.running_var + 1e-3).sqrt().view(-1, 1, 1)
    expected = (maps - block.norm.running_mean.view(-1, 1, 1)) / spread
    expected = expected * block.norm.weight.view(-1, 1, 1) + block.norm.bias.view(-1, 1, 1)
    torch.testing.assert_close(block(pixels), expected)
    # The last layers are normalised too, but not rectified.
    assert (network.descriptors[1](torch.randn(1, 256, 4, 4)) < 0).any()


def bilinear(maps: np.ndarray, x: float, y: float) -> np.ndarray:
    """(C, h, w) at one position in cells, zero outside, in float64."""
    total = np.zeros(len(maps))
    for j in (int(np.floor(x)), int(np.floor(x)) + 1):
        for i in (int(np.floor(y)), int(np.floor(y)) + 1):
            if 0 <= j < maps.shape[2] and 0 <= i < maps.shape[1]:
                total += maps[:, i, j] * (1 - abs(x - j)) * (1 - abs(y - i))
    return total


@pytest.mark.parametrize("exact", [True, False])
def test_descriptors_are_read_where_the_convention_says(rng, exact):
    network = SuperPoint(normalised=exact)
    maps = rng.standard_normal((256, 6, 9))
    points = np.array([[3.5, 3.5], [0, 0], [71, 47], [40, 20], [12.25, 30.5]])
    found = network.describe(torch.from_numpy(maps)[None], torch.from_numpy(points)).numpy()
    for point, descriptor in zip(points, found, strict=True):
        if exact:
            x, y = (point - 3.5) / 8
        else:
            x, y = (point - 3.5) * [8, 5] / [8 * 9 - 4.5, 8 * 6 - 4.5]
        expected = bilinear(maps, x, y)
        np.testing.assert_allclose(descriptor, expected / np.linalg.norm(expected), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shift_by_whole_cells_shifts_the_points_by_as_much(rng, kind):
    patch = texture(rng, 64, 64)
    images = []
    for x, y in ((56, 56), (64, 72)):
        pixels, mask = np.full((184, 184), 128, np.uint8), np.zeros((184, 184), bool)
        pixels[y : y + 64, x : x + 64] = patch
        mask[y : y + 64, x : x + 64] = True
        images.append(whole(pixels, mask))
    first, second = build(kind)(images)
    assert len(first) == len(second) > 30
    assert share_found(first.keypoints + torch.tensor([8.0, 16.0]), second.keypoints, 0.0) == 1.0


def test_masks_black_and_tiny_images(picture):
    mask = np.zeros(picture.shape, bool)
    mask[30:90, 20:70] = True
    extractor = build("superpoint", score_threshold=0.02, max_keypoints=5000)
    masked, free, black, tiny, colour = extractor(
        [
            whole(picture, mask),
            whole(picture),
            whole(np.zeros((64, 80), np.uint8)),
            whole(np.full((1, 1, 3), 200, np.uint8)),
            whole(np.repeat(picture[..., None], 3, axis=2)),
        ]
    )
    x, y = masked.keypoints.long().T
    assert bool(torch.from_numpy(mask)[y, x].all())
    inside = torch.from_numpy(mask)[free.keypoints[:, 1].long(), free.keypoints[:, 0].long()]
    assert len(masked) == int(inside.sum()) > 10
    assert len(tiny) == 0
    assert bool((black.keypoints >= 4).all() & (black.keypoints <= torch.tensor([75, 59])).all())
    assert tiny.descriptors.shape == (0, 256)
    assert same(free, colour)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_files_are_read_strictly(picture, tmp_path, kind):
    network = build(kind).network
    config = ExtractorConfig(kind=kind, max_keypoints=100)
    path = tmp_path / "front.safetensors"
    save_front_end(network, kind, path)
    images = [whole(picture)]
    assert same(build(kind, max_keypoints=100)(images)[0], build_extractor(config, path)(images)[0])

    other = next(name for name in KINDS if name != kind)
    save_front_end(network, other, path)
    with pytest.raises(IntegrityError, match=f"of the front end {other}, not of {kind}"):
        build_extractor(config, path)([whole(picture)])
    save_front_end(SuperPoint(normalised=kind == "superpoint"), kind, path)
    with pytest.raises(IntegrityError, match=r"(missing|extra): .*norm\.weight"):
        build_extractor(config, path)([whole(picture)])
