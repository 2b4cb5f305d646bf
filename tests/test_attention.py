"""Attention against loops written from the equations, the layers made of it, rotary encoding."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from matcher.attention import MultiHeadAttention, additive_mask, build_attention, scaled_dot_product
from matcher.config import ContextConfig, ExtractorConfig, PositionConfig
from matcher.errors import UsageError
from matcher.extract.extractor import SiftExtractor
from matcher.geometry import UPRIGHT, turn_angles, upright_size, upright_to_stored
from matcher.images import read_image
from matcher.match.blocks import Layer, folded
from matcher.match.position import CorrespondenceGuidance, Points, RotaryPosition, position_inputs, rotate
from matcher.types import Features

SCORES = ("softmax", "linear", "additive", "general")


def random(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> np.ndarray:
    """softmax(q·k / √d) v in float64, one query at a time."""
    out = np.zeros((len(q), v.shape[1]))
    for i, query in enumerate(q.double().numpy()):
        keys = np.flatnonzero(allowed[i].numpy())
        if len(keys):
            weights = np.exp([query @ k[j].double().numpy() / math.sqrt(q.shape[1]) for j in keys])
            out[i] = np.average(v[keys].double().numpy(), axis=0, weights=weights)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "m"), [(7, 5), (5, 600), (600, 5), (1, 1)])
def test_softmax_attention_is_the_equation(dtype: torch.dtype, n: int, m: int) -> None:
    q, k, v = (x.to(dtype) for x in (3 * random(n, 8), random(m, 8, seed=1), random(m, 8, seed=2)))
    found = scaled_dot_product(*(x[None, None] for x in (q, k, v)))[0, 0]
    assert found.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 0.05
    expected = naive(q, k, v, torch.ones(n, m, dtype=torch.bool))
    np.testing.assert_allclose(found.float(), expected, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_masked_attention_is_the_equation(causal: bool) -> None:
    q, k, v = random(6, 8), random(6, 8, seed=1), random(6, 8, seed=2)
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[2] = False
    allowed = mask & torch.ones(6, 6, dtype=torch.bool).tril() if causal else mask
    for given in (mask, torch.zeros(6, 6).masked_fill(~mask, -math.inf)):
        found = scaled_dot_product(q, k, v, given, causal=causal)
        np.testing.assert_allclose(found, naive(q, k, v, allowed), atol=2e-6)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shared_qk", [False, True])
def test_heads_are_projected_compared_and_joined(score: str, shared_qk: bool) -> None:
    attention = MultiHeadAttention(12, 3, score, shared_qk=shared_qk)
    x, source = random(2, 5, 12), random(2, 7, 12, seed=1)
    parts = attention.qkv(source).view(2, 7, -1, 3, 4)
    q, k, v = attention.qkv(x).view(2, 5, -1, 3, 4)[:, :, 0], parts[:, :, -2], parts[:, :, -1]
    heads = [attention.score(q[:, :, h], k[:, :, h], v[:, :, h]) for h in range(3)]
    expected = attention.out(torch.cat(heads, dim=-1))
    found, weights = attention(x, source, weights=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert weights.shape == (2, 3, 5, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5), atol=1e-4, rtol=0)
    torch.testing.assert_close(weights[:, 1] @ v[:, :, 1], heads[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("score", ["softmax", "additive", "general"])
def test_masks_go_with_every_softmax(score: str) -> None:
    attention, x = MultiHeadAttention(8, 2, score), random(5, 8)
    mask = torch.tensor([True, True, False, True, False])
    torch.testing.assert_close(attention(x, mask=mask), attention(x, x[mask]), atol=1e-5, rtol=1e-4)
    first = attention(x, causal=True)
    torch.testing.assert_close(first[:3], attention(x[:3], causal=True), atol=1e-5, rtol=1e-4)
    alone = attention(x, mask=torch.zeros(5, dtype=torch.bool))
    torch.testing.assert_close(alone, attention.out.bias.expand(5, 8))
    attention(x, mask=(torch.arange(5) > 0).unsqueeze(1)).sum().backward()  # a row without a column
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())
    assert additive_mask(x, x, mask)[0].isneginf().equal(~mask)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(UsageError, match="heads"):
        MultiHeadAttention(8, heads=3)
    with pytest.raises(UsageError, match="cosine"):
        build_attention("cosine", 4)
    attention = MultiHeadAttention(8, 2, "linear")
    for wrong in (np.zeros((3, 8), np.float32), torch.zeros(3, 7), torch.zeros(8), torch.zeros(2, 3, 8)):
        with pytest.raises(UsageError, match=r"\(…, N, 8\)"):
            attention(torch.zeros(3, 3, 8), wrong)
    for score in ("softmax", "linear", "additive", "general"):
        for wrong in (np.zeros((3, 4), np.float32), torch.zeros(3, 5), torch.zeros(4), torch.zeros(3, 3, 4)):
            with pytest.raises(UsageError, match="keys"):
                build_attention(score, 4)(torch.zeros(2, 3, 4), wrong, wrong)
    with pytest.raises(UsageError, match="linear"):
        attention(torch.zeros(3, 8), causal=True)
    for mask in (torch.ones(3, dtype=torch.int64), torch.ones(2, 3, 3), torch.ones(4), np.ones(3, bool)):
        with pytest.raises(UsageError, match="a mask"):
            MultiHeadAttention(8, 2, "general")(torch.zeros(3, 8), mask=mask)
        with pytest.raises(UsageError, match="a mask"):
            build_attention("linear", 8)(*torch.zeros(3, 3, 8), mask=mask)
    nothing, q = torch.zeros(0, 4), random(3, 4)
    for name in ("linear", "softmax"):
        found = build_attention(name, 4)(q, nothing, nothing, torch.zeros(0, dtype=torch.bool))
        assert found.equal(torch.zeros(3, 4))


@torch.no_grad()
def random_layer(**changes) -> Layer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layer = Layer(ContextConfig(dim=24, heads=3, **changes)).eval()
        for value in layer.parameters():
            value += 0.1 * torch.randn_like(value)
        for part in layer.modules():
            if isinstance(part, torch.nn.BatchNorm1d):
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2.0)
    return layer


LAYERS = {
    "lightglue": {},
    "superglue": {"shared_qk": False, "norm": "batch", "activation": "relu"},
    "loftr": {"attention": "linear", "norm": "output", "bias": False, "sequential_cross": True},
    "additive": {"attention": "additive"},
}
layers = pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)


def rotations(batch: int, count: int) -> torch.Tensor:
    angles = random(batch, count, 4, seed=9)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 2)


@layers
def test_a_layer_is_attention_in_each_image_then_between_them(changes) -> None:
    """Image by image, by `MultiHeadAttention`; without rotations."""
    layer, x, n = random_layer(**changes), random(1, 12, 24), 7
    own, cross = layer.self_block, layer.cross_block

    def updated(block, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        message = block.message_norm(block.attention(target, source))
        hidden = block.ffn.widen(torch.cat([target, message], -1))
        hidden = block.ffn.activate(block.ffn.norm(hidden))
        return target + block.ffn.output_norm(block.ffn.narrow(hidden))

    x0, x1 = (updated(own, side, side) for side in (x[:, :n], x[:, n:]))
    first = updated(cross, x0, x1)
    second = updated(cross, x1, first if cross.sequential else x0)
    torch.testing.assert_close(layer(x, n), torch.cat([first, second], 1), atol=1e-4, rtol=1e-4)


@layers
@torch.no_grad()
def test_folding_changes_nothing_and_shares_nothing(changes) -> None:
    layer, x = random_layer(**changes), random(2, 12, 24)
    given = (x, 7, rotations(2, 12))
    expected, frozen = layer(*given), folded(layer, torch.float32)
    torch.testing.assert_close(frozen(*given), expected, atol=1e-4, rtol=1e-4)
    half = folded(layer, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(half(*given), expected, atol=0.3, rtol=0.1)
    for value in layer.parameters():
        value.add_(1.0)
    torch.testing.assert_close(frozen(*given), expected, atol=1e-4, rtol=1e-4)


@layers
@torch.no_grad()
def test_padding_is_not_attended_to(changes) -> None:
    layer, n = random_layer(**changes), 7
    pairs = [random(1, 12, 24), random(1, 6, 24, seed=1)]  # the second has 4 and 2 points
    padded = torch.full((2, 12, 24), 100.0)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    for b, (pair, (a, c)) in enumerate(zip(pairs, [(7, 5), (4, 2)], strict=True)):
        padded[b, :a], padded[b, n : n + c] = pair[0, :a], pair[0, a:]
        mask[b, :a] = mask[b, n : n + c] = True
    found = layer(padded, n, None, mask)
    torch.testing.assert_close(found[0], layer(pairs[0], n)[0], atol=1e-4, rtol=1e-4)
    alone = layer(pairs[1], 4)[0]
    torch.testing.assert_close(found[1][mask[1]], alone, atol=1e-4, rtol=1e-4)


# --- Positions.


NAMES = ("xy", "scale", "orientation")


def make_features(rng: np.random.Generator, count: int = 12, size: tuple[int, int] = (640, 360)) -> Features:
    return Features(
        keypoints=rng.uniform(0, size, (count, 2)),
        descriptors=np.zeros((count, 4)),
        size=size,
        scales=rng.uniform(2, 40, count),
        orientations=rng.uniform(-np.pi, np.pi, count),
        affine_frames=rng.normal(0, 20, (count, 2, 2)),
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
        affine_frames=UPRIGHT[exif].T @ upright.affine_frames.double().numpy(),
        exif_orientation=exif,
    )
    expected = position_inputs(upright, (*NAMES, "frame"))
    ends = upright.keypoints[:, None] + upright.affine_frames.mT - upright.size / 2  # of the axes of frames
    torch.testing.assert_close(expected[:, -4:], ends.flatten(1) / 320, atol=1e-5, rtol=0)
    torch.testing.assert_close(position_inputs(turned, (*NAMES, "frame")), expected, atol=1e-5, rtol=0)
    batch = position_inputs(Features.stack([turned, turned]), (*NAMES, "frame"))
    torch.testing.assert_close(batch, expected.expand(2, -1, -1), atol=1e-5, rtol=0)
    with pytest.raises(UsageError, match=r"needs affine_frames of the keypoints: Features\(affine_frames="):
        position_inputs(replace(turned, affine_frames=None), ("frame",))


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


def test_phases_keep_their_digits_in_mixed_precision() -> None:
    position, inputs = RotaryPosition(PositionConfig(inputs=("xy",)), head_dim=16), torch.rand(1, 9, 2)
    exact = position(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(position(inputs), exact)


# --- Guided tokens.


@torch.no_grad()
def test_agreement_is_the_sum_of_cosines_of_both_sides() -> None:
    rng = torch.Generator().manual_seed(1)
    guidance = CorrespondenceGuidance(16, 2)
    for parameter in guidance.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng))
    sides = [
        Points(*(torch.randn(n, c, generator=rng) * s for c, s in ((16, 1.0), (2, 0.5), (2, 0.5))))
        for n in (5, 4)
    ]
    guess, waves = guidance.factors(Points(*map(torch.cat, zip(*sides, strict=True))), depth=1)
    found = guess[:5] @ waves[5:].T + waves[:5] @ guess[5:].T
    omega, weight = guidance.frequencies.weight.double(), guidance.weight[1].double()
    confidences = [2 * guidance.confidence[1](side.x).sigmoid().double().squeeze(1) for side in sides]

    def nearness(predicted: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return (weight * torch.cos(omega @ (predicted - position).double())).sum()

    for i in range(5):
        for j in range(4):
            there = nearness(sides[0].predicted[i], sides[1].positions[j])
            back = nearness(sides[1].predicted[j], sides[0].positions[i])
            expected = confidences[0][i] * there + confidences[1][j] * back
            assert torch.isclose(found[i, j].double(), expected, atol=1e-4)
