"""Our own front end and SuperPoint: against their definitions and transformers, on images hard to take."""

import json
import re
from itertools import permutations

import numpy as np
import peers
import pytest
import torch
from random_front_end import build, random_parameters, same, texture, whole
from safetensors.torch import save_file
from scipy.ndimage import map_coordinates

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.extract.learned import (
    WINDOW,
    Architecture,
    FeatureNetwork,
    architecture_of,
    candidates,
    folded,
    grown,
    sample,
    shapes_of,
    subpixel,
)
from matcher.extract.superpoint import SuperPoint
from matcher.onnx_engine import OnnxExtractor
from matcher.torch_engine import build_extractor
from matcher.weights.files import save_front_end

SMALLER = Architecture(widths=(16, 32, 64, 128), depths=(2, 2, 3, 3), hidden=256)
LARGER = Architecture(widths=(20, 32, 64, 130, 48), depths=(2, 3, 3, 4, 2), hidden=300)


def random_network(*sizes: Architecture, **options) -> FeatureNetwork:
    network = FeatureNetwork(*sizes, **options).eval()
    random_parameters(network)
    return network


@pytest.fixture
def picture(rng) -> np.ndarray:
    return texture(rng, 160, 120, sigma=2)


def test_folding_changes_nothing(picture):
    trained = random_network(normalised=True)
    pixels = torch.from_numpy(picture[:112])[None, None].float() / 255
    with torch.no_grad():
        logits, maps = trained(pixels)
        plain_logits, plain_maps = folded(trained)(pixels)
    torch.testing.assert_close([plain_logits, *plain_maps], [logits, *maps], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_grown_network_computes_the_same(picture):
    plain = random_network(SMALLER)
    larger = grown(plain, LARGER)
    pixels = torch.from_numpy(picture[:96])[None, None].float() / 255
    points = torch.rand(1, 50, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([160.0, 96.0])
    logits, maps = plain(pixels)
    large_logits, large_maps = larger(pixels)
    torch.testing.assert_close(large_logits, logits, rtol=1e-4, atol=1e-4)
    assert [level.shape[1] for level in large_maps] == list(LARGER.widths)
    for ours, theirs in zip(maps, large_maps, strict=False):
        torch.testing.assert_close(theirs[:, : ours.shape[1]], ours, rtol=1e-4, atol=1e-4)
    described = larger.describe(large_maps, points)
    torch.testing.assert_close(described, plain.describe(maps, points), rtol=1e-4, atol=1e-4)
    again = grown(plain, LARGER).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in larger.state_dict().items())


def test_a_weights_file_tells_its_sizes(picture, tmp_path):
    network = random_network(LARGER)
    assert architecture_of({name: value.shape for name, value in network.state_dict().items()}) == LARGER
    save_front_end(network, "learned", tmp_path / "large.safetensors")
    config = ExtractorConfig(kind="learned", max_keypoints=50)
    extractor = build_extractor(config, tmp_path / "large.safetensors", precision="float32")
    assert extractor.network.sizes == LARGER
    (found,) = extractor([whole(picture[:100])])  # padded to multiples of 32
    pixels = torch.from_numpy(np.pad(picture[:100], ((0, 28), (0, 0)), mode="edge"))[None, None].float() / 255
    with torch.no_grad():
        described = network.describe(network(pixels)[1], found.keypoints[None])[0]
    assert len(found) > 0
    torch.testing.assert_close(found.descriptors, described, rtol=0, atol=0.01)  # stored as float32


def test_a_header_that_promises_much_asks_for_no_memory(tmp_path):
    """Sizes count only where the file has as many numbers."""
    shapes = shapes_of(Architecture((4096,) * 6, (60,) * 6, 4096))
    entries = {n: {"dtype": "F16", "shape": shape, "data_offsets": [0, 0]} for n, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"frontend": "learned"}, **entries}).encode()
    (tmp_path / "huge.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = ExtractorConfig(kind="learned")
    for engine, part in ((build_extractor, "network"), (OnnxExtractor, "graph")):
        with pytest.raises(IntegrityError, match=r"huge\.safetensors is not an intact safetensors file"):
            getattr(engine(config, tmp_path / "huge.safetensors"), part)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("encoder.1.0.0.weight", (32, 15, 3, 3)), ("descriptor.0.weight", (384, 431)), ("more", (3,))],
)
def test_both_engines_refuse_tensors_that_do_not_fit_each_other(tmp_path, name, shape):
    tensors = {**FeatureNetwork().state_dict(), name: torch.zeros(shape)}
    save_file(tensors, tmp_path / "odd.safetensors", {"frontend": "learned"})
    config = ExtractorConfig(kind="learned")
    with pytest.raises(IntegrityError, match=rf"odd\.safetensors does not hold .*: {re.escape(name)}"):
        _ = build_extractor(config, tmp_path / "odd.safetensors").network
    with pytest.raises(UsageError, match=r"odd\.safetensors is of a front end of other sizes"):
        _ = OnnxExtractor(config, tmp_path / "odd.safetensors").graph


@pytest.mark.parametrize("radius", [0, 2, 5])
def test_peaks_are_the_largest_around(radius):
    logits = torch.rand(2, 23, 31, generator=torch.Generator().manual_seed(1))
    found = candidates(logits, radius, 0)
    for b, y, x in torch.cartesian_prod(torch.arange(2), torch.arange(23), torch.arange(31)).tolist():
        around = logits[b, max(0, y - radius) : y + radius + 1, max(0, x - radius) : x + radius + 1]
        assert bool(found[b, y, x]) == (logits[b, y, x] == around.max())


def test_a_point_moves_to_the_centroid_of_its_window():
    logits = torch.full((1, 9, 9), -20.0)
    logits[0, 4, 4] = logits[0, 4, 5] = 3.0
    logits[0, 4, 8] = 30.0  # beyond the window
    moved = subpixel(logits, torch.tensor([[[4, 4]]]))
    torch.testing.assert_close(moved, torch.tensor([[[4.5, 4.0]]]), atol=1e-6, rtol=0)
    corner = subpixel(torch.zeros(1, 9, 9), torch.tensor([[[0, 8]]]))
    half = (WINDOW // 2) / 2
    torch.testing.assert_close(corner, torch.tensor([[[half, 8 - half]]]))


def test_maps_are_read_at_their_pixels():
    maps = torch.rand(1, 3, 6, 8, generator=torch.Generator().manual_seed(2))
    points = torch.tensor([[[2.0, 3.0], [2.5, 3.0], [-4.0, 9.0]]])
    found = sample([maps], 2 * points)[0]
    torch.testing.assert_close(found[0], maps[0, :, 3, 2])
    torch.testing.assert_close(found[1], (maps[0, :, 3, 2] + maps[0, :, 3, 3]) / 2)
    torch.testing.assert_close(found[2], maps[0, :, 5, 0])


def test_images_together_are_as_alone(rng):
    """In other numbers the convolutions sum in another order, so places may differ by rounding."""
    pictures = [whole(texture(rng, *size, sigma=2)) for size in ((96, 80), (64, 64), (96, 80), (96, 80))]
    extract = build("learned")
    for together, picture in zip(extract(pictures), pictures, strict=True):
        (alone,) = extract([picture])
        assert len(together) == len(alone)
        torch.testing.assert_close(together.keypoints, alone.keypoints, rtol=0, atol=1e-2)
        torch.testing.assert_close(together.descriptors, alone.descriptors, rtol=0, atol=1e-3)


def test_constant_and_dark_images_have_no_points(rng):
    extract = build_extractor(ExtractorConfig(kind="learned"))
    for value in (0, 128, 255):
        assert len(extract([whole(np.full((90, 120), value, np.uint8))])[0]) == 0
    noise = rng.normal(8, 1, (240, 320)).clip(0, 255).astype(np.uint8)
    assert len(extract([whole(noise)])[0]) < 250  # of 2,048


# --- SuperPoint: against transformers with the same parameters, and its definitions.


@pytest.mark.parametrize("settings", [{}, {"nms_radius": 2, "score_threshold": 0.02}, {"max_keypoints": 50}])
@pytest.mark.parametrize("size", [(160, 120), (96, 152)])
def test_it_is_what_transformers_has(rng, settings, size):
    options = {"max_keypoints": 5000} | settings
    names = {"score_threshold": "keypoint_threshold", "nms_radius": "nms_radius"}
    given = {names[name]: value for name, value in settings.items() if name in names}
    random_parameters(theirs := peers.transformers_superpoint(border_removal_distance=0, **given))

    def fill(network: SuperPoint, _: ExtractorConfig) -> None:
        # Both list encoder, points, descriptors, in the order in which pixels pass through them.
        values = theirs.state_dict().values()
        network.load_state_dict(dict(zip(network.state_dict(), values, strict=True)))

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


@pytest.mark.parametrize("exact", [True, False])
def test_descriptors_are_read_where_the_convention_says(rng, exact):
    network = SuperPoint(normalised=exact)
    maps = rng.standard_normal((256, 6, 9))
    points = np.array([[3.5, 3.5], [0, 0], [71, 47], [40, 20], [12.25, 30.5]])
    found = network.describe(torch.from_numpy(maps)[None], torch.from_numpy(points)).numpy()
    for point, descriptor in zip(points, found, strict=True):
        cells = [1 / 8, 1 / 8] if exact else [8 / (8 * 9 - 4.5), 5 / (8 * 6 - 4.5)]
        at = ((point - 3.5) * cells)[::-1, None]  # zero outside
        expected = [map_coordinates(each, at, order=1, mode="grid-constant")[0] for each in maps]
        np.testing.assert_allclose(descriptor, expected / np.linalg.norm(expected), atol=1e-6)


@pytest.mark.parametrize(("kind", "other"), permutations(["superpoint", "superpoint-open"]))
def test_weights_files_are_read_strictly(picture, tmp_path, kind, other):
    network = build(kind).network
    config = ExtractorConfig(kind=kind, max_keypoints=100)
    path = tmp_path / "front.safetensors"
    save_front_end(network, kind, path)
    images = [whole(picture)]
    assert same(build(kind, max_keypoints=100)(images)[0], build_extractor(config, path)(images)[0])
    save_front_end(network, other, path)
    with pytest.raises(IntegrityError, match=f"of the front end {other}, not of {kind}"):
        build_extractor(config, path)(images)
    save_front_end(SuperPoint(normalised=kind == "superpoint"), kind, path)
    with pytest.raises(IntegrityError, match=r"(missing|extra): .*norm\.weight"):
        build_extractor(config, path)(images)
