"""LoFTR from our blocks against kornia's, and what matching without a detector adds to them."""

from dataclasses import replace
from functools import cache

import cv2
import numpy as np
import peers
import pytest
import torch
from random_front_end import texture, whole
from torch import nn

from matcher.config import PositionConfig
from matcher.errors import UsageError
from matcher.geometry import resize_points, upright_to_stored
from matcher.loading import load
from matcher.match.loftr import GridExtractor
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.match.position import SinePosition
from matcher.presets import LOFTR_TRANSPORT, PRESETS
from matcher.types import Features
from matcher.weights.published import choose_layout, convert, import_checkpoint

KORNIA_SHIFT = 0.5  # its pixels have their centres at +0.5, ours at 0
NETWORKS = [("outdoor", "dual_softmax"), ("outdoor", "sinkhorn"), ("indoor_new", "dual_softmax")]
# Width and height of both images: equal, and no multiples of 8 of different shapes.
SIZES = [((112, 88), (112, 88)), ((101, 69), (86, 94))]


def seeded_texture(width: int, height: int, seed: int) -> np.ndarray:
    return texture(np.random.default_rng(seed), width, height, sigma=1.5)


def picture_pair(seed: int, size0: tuple[int, int], size1: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Two cuts of one noisy texture, so that random networks find cells that look alike."""
    clean = seeded_texture(200, 200, seed)
    noise = np.random.default_rng(seed + 100).normal(0, 6, clean.shape)
    noisy = np.clip(clean + noise, 0, 255).astype(np.uint8)
    sides = zip((clean, noisy), (size0, size1), strict=True)
    return tuple(np.ascontiguousarray(pixels[:h, :w]) for pixels, (w, h) in sides)


@torch.no_grad()
def tell_cells_apart(peer: nn.Module, spread: float) -> None:
    """Random cells are all alike and match nothing: centre them, scale them, let them keep what they are."""
    seen, last = [], peer.backbone.layer3_outconv
    hook = last.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0][0].flatten(1)))
    peer.backbone(torch.from_numpy(seeded_texture(128, 96, 5))[None, None].float() / 255)
    hook.remove()
    mean, weight = seen[0].mean(1), last.weight[:, :, 0, 0]
    weight -= torch.outer(weight @ mean, mean) / (mean @ mean)
    weight *= spread / (weight @ seen[0]).std()
    for layer in peer.loftr_coarse.layers:
        layer.norm2.weight *= 0.2
    peer.fine_preprocess.down_proj.weight /= spread
    peer.fine_preprocess.merge_feat.weight *= 0.1
    for layer in peer.loftr_fine.layers:
        layer.norm2.weight *= 0.5


def transport(scores: torch.Tensor, bin_score: torch.Tensor, iterations: int) -> torch.Tensor:
    """Log probabilities (B, N+1, M+1), the dustbins last."""
    padded = bin_score.repeat(len(scores), scores.shape[1] + 1, scores.shape[2] + 1)
    padded[:, :-1, :-1] = scores
    u, v = peers.naive_sinkhorn(padded, iterations)
    return padded + u.unsqueeze(2) + v.unsqueeze(1)


@cache
def kornia_loftr(name: str, kind: str) -> nn.Module:
    """kornia's LoFTR; it has no transport solver of its own and is lent the naive one."""
    peer = peers.kornia_loftr(0, name)
    tell_cells_apart(peer, 10.0 if kind == "sinkhorn" else 2.5)
    if kind == "sinkhorn":
        coarse = peer.coarse_matching
        coarse.match_type, coarse.skh_iters, coarse.skh_prefilter = "sinkhorn", 3, True
        coarse.config = {**coarse.config, "sparse_spvs": False}
        coarse.log_optimal_transport = transport
        coarse.bin_score = nn.Parameter(torch.tensor(2.0))
    return peer


@cache
def ours(name: str = "outdoor", kind: str = "dual_softmax") -> tuple[GridExtractor, AttentionMatcher]:
    """Ours with kornia's parameters, by the table of the published layout."""
    config = PRESETS["loftr-" + name.replace("_", "-")].matcher
    if kind == "sinkhorn":
        config = replace(config, assignment=LOFTR_TRANSPORT)
    with torch.random.fork_rng(devices=[]):
        model = MatchingNetwork(config)
    tensors = kornia_loftr(name, kind).state_dict()
    model.load_state_dict(convert(tensors, model.state_dict(), choose_layout(tensors, "LoFTR"), heads=8))
    matcher = AttentionMatcher(model.eval(), precision="float32")
    return GridExtractor(matcher.model.backbone), matcher


def match(images, extractor, matcher):
    return matcher(*(Features.stack([features]) for features in extractor(images)))[0]


def as_table(points0, points1, scores) -> dict[tuple, np.ndarray]:
    """Points of image 1 and score by the point of image 0."""
    rows = np.column_stack([points1, scores])
    return {tuple(p): row for p, row in zip(np.asarray(points0).tolist(), rows, strict=True)}


@pytest.mark.parametrize(("name", "kind"), NETWORKS)
def test_loftr_is_kornias(name: str, kind: str) -> None:
    peer, (extractor, matcher) = kornia_loftr(name, kind), ours(name, kind)
    total, offsets = 0, []
    for seed, sizes in enumerate(SIZES):
        pixels = picture_pair(seed, *sizes)
        with torch.no_grad():
            data = {f"image{i}": torch.from_numpy(p)[None, None].float() / 255 for i, p in enumerate(pixels)}
            theirs = peer(data)
        points = [(theirs[f"keypoints{i}"] - KORNIA_SHIFT).numpy() for i in (0, 1)]
        expected = as_table(*points, theirs["confidence"].numpy())
        found = match([whole(p) for p in pixels], extractor, matcher)
        table = as_table(found.points0, found.points1, found.scores)
        assert table.keys() == expected.keys()
        for place, row in table.items():
            assert np.abs(row[:2] - expected[place][:2]).max() < 1e-2
            assert abs(row[2] - expected[place][2]) < 1e-4
        features = extractor([whole(pixels[1])])[0]
        offsets.append(found.points1 - features.keypoints.numpy()[found.indices[:, 1]])
        total += len(found)
    assert total > 30
    offsets = np.abs(np.concatenate(offsets))
    assert (offsets <= 4).all()
    assert ((offsets > 0.05) & (offsets < 3.9)).mean() > 0.5  # neither unmoved nor at the end of the window


@pytest.mark.parametrize("size", [(1, 1), (33, 7)])
def test_tiny_images_match_nothing(size: tuple[int, int]) -> None:
    extractor, matcher = ours()
    pixels = seeded_texture(120, 96, 1)
    features = extractor([whole(pixels), whole(np.ascontiguousarray(pixels[: size[1], : size[0]]))])
    assert len(features[1]) == -(-size[0] // 8) * -(-size[1] // 8)
    for order in (features, features[::-1]):
        assert len(matcher(*(Features.stack([f]) for f in order))[0]) == 0


def test_cells_cover_the_image_and_are_never_cut_off() -> None:
    pixels = seeded_texture(125, 91, 0)
    features = ours()[0]([whole(pixels)])[0]
    assert features.grid.tolist() == [16, 12]
    assert features.maps.shape == (128, 46, 63)
    assert features.keypoints[0].tolist() == [-0.5, -0.5]
    assert features.keypoints[-1].tolist() == [15 * 8 - 0.5, 11 * 8 - 0.5]
    assert features.keypoints.equal(8 * features.cells - 0.5)
    colour = ours()[0]([whole(cv2.merge([pixels] * 3))])[0]
    assert torch.allclose(colour.descriptors, features.descriptors, atol=1e-4)


def test_points_are_reported_in_stored_pixels() -> None:
    """Resized and turned images move the points, not the matches."""
    extractor, matcher = ours()
    pixels = picture_pair(0, *SIZES[0])
    plain = match([whole(p) for p in pixels], extractor, matcher)
    stored, scale = (240, 304), (0.5, 0.5)
    turned = [whole(p, size=stored, scale=scale, orientation=6) for p in pixels]
    found = match(turned, extractor, matcher)
    assert len(plain) > 10
    assert np.array_equal(found.indices, plain.indices)
    for name in ("points0", "points1"):
        expected = upright_to_stored(resize_points(getattr(plain, name), (2.0, 2.0)), stored, 6)
        np.testing.assert_allclose(getattr(found, name), expected, atol=1e-3)


def test_a_mask_takes_cells_away() -> None:
    extractor, matcher = ours()
    pixels = picture_pair(0, *SIZES[0])
    mask = np.zeros(pixels[0].shape, bool)
    mask[:, :80] = True
    features = extractor([whole(pixels[0], mask=mask)])[0]
    assert len(features) == 10 * 11
    found = match([whole(pixels[0], mask=mask), whole(pixels[1])], extractor, matcher)
    assert len(found) > 3
    assert (found.points0[:, 0] < 80).all()
    assert len(match([whole(pixels[0], mask=~mask & False), whole(pixels[1])], extractor, matcher)) == 0


@pytest.mark.parametrize("frequencies", ["geometric", "steep"])
def test_sine_positions_are_the_equation(frequencies: str) -> None:
    rng = np.random.default_rng(0)
    cells, dim = rng.integers(0, 300, (50, 2)), 64
    found = SinePosition(PositionConfig(kind="sine", frequencies=frequencies), dim)(torch.from_numpy(cells))
    expected = np.zeros((50, dim))
    for k in range(dim // 4):
        omega = np.exp(-2.0 * k) if frequencies == "steep" else 10000.0 ** (-4 * k / dim)
        for axis in (0, 1):
            expected[:, 4 * k + 2 * axis] = np.sin(omega * (cells[:, axis] + 1))
            expected[:, 4 * k + 2 * axis + 1] = np.cos(omega * (cells[:, axis] + 1))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["sinkhorn", "dual_softmax"])
def test_a_published_file_chooses_its_assignment(kind: str, tmp_path) -> None:
    """Lightning's file of the transport network holds a bin score; imported, it matches as the peer does."""
    peer, output = kornia_loftr("outdoor", kind), tmp_path / "ours.safetensors"
    path, how = tmp_path / "theirs.ckpt", {"shelf": "state_dict", "prefix": "matcher."}
    peers.write_published(peer.state_dict(), path, **how)
    import_checkpoint(path, "loftr-outdoor", output)
    pipeline = load("loftr-outdoor", weights=output, precision="float32", device="cpu")
    expected = LOFTR_TRANSPORT if kind == "sinkhorn" else PRESETS["loftr-outdoor"].matcher.assignment
    assert pipeline.config.matcher.assignment == expected
    result = pipeline.match(*picture_pair(0, *SIZES[0]))
    reference = match([whole(p) for p in picture_pair(0, *SIZES[0])], *ours("outdoor", kind))
    assert len(reference) > 8
    assert np.array_equal(result.matches.indices, reference.indices)
    np.testing.assert_allclose(result.scores, reference.scores, atol=1e-6)
    strict = load("loftr-outdoor", weights=output, device="cpu", match_threshold=0.3, geometry="none")
    features = [strict.extract(p) for p in picture_pair(0, *SIZES[0])]
    assert (strict.match_features(*features).scores > 0.3).all()
    for name, value in (("max_keypoints", 100), ("frontend_weights", "x.pth")):
        with pytest.raises(UsageError, match=name):
            load("loftr-outdoor", weights=output, **{name: value})
