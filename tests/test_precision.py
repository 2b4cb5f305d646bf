"""Half precision against float32, and what a fixed network has found since these numbers were written."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from random_matcher import as_table

import matcher
from matcher.config import ContextConfig, ExtractorConfig, MatchingPolicy, NetworkConfig
from matcher.extract.extractor import SiftExtractor
from matcher.images import read_image
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.types import Features, Image, Matches
from matcher.weights.files import load_model

GOLDEN = Path(__file__).with_name("golden_matches.json")


def described(views, count: int) -> tuple[Features, Features]:
    extractor = SiftExtractor(ExtractorConfig(max_keypoints=count))
    return tuple(extractor([view if isinstance(view, Image) else read_image(view)])[0] for view in views)


def run(matcher: AttentionMatcher, features: tuple[Features, Features]) -> Matches:
    return matcher(*(Features.stack([f]) for f in features))[0]


@torch.no_grad()
def fixed_model(features: tuple[Features, Features]) -> MatchingNetwork:
    """Parameters from NumPy's generator, so that they are the same with every version of torch."""
    context = ContextConfig(dim=32, heads=2, depth=3)
    policy = MatchingPolicy(match_threshold=0.05, exit_share=0.9, prune_matchability=0.2)
    with torch.random.fork_rng(devices=[]):
        model = MatchingNetwork(NetworkConfig(context=context, policy=policy)).eval()
    rng = np.random.default_rng(11)
    # In the order that the parameters had when the matches were stored.
    named = sorted(model.state_dict().items(), key=lambda item: item[0].replace(".attention.", "."))
    for name, value in named:
        if value.dim() == 2:
            gain = 0.3 if "narrow" in name else 15**0.5 / 32**0.25 if "projection" in name else 1.0
            drawn = rng.normal(scale=gain / value.shape[1] ** 0.5, size=tuple(value.shape))
            value.copy_(torch.from_numpy(drawn.astype(np.float32)))
        elif "norm" not in name:
            value.zero_()
    model.standardise(torch.cat([f.descriptors for f in features]))
    return model


def test_a_fixed_network_finds_what_it_found_before(views) -> None:
    """Indices may differ where OpenCV's SIFT does by a rounding; a change of the network shows in most."""
    golden = {(i, j): score for i, j, score in json.loads(GOLDEN.read_text())}
    features = described(views, 256)
    found = as_table(run(AttentionMatcher(fixed_model(features), precision="float32"), features))
    common = golden.keys() & found.keys()
    assert len(common) >= 0.98 * max(len(golden), len(found))
    assert np.median([abs(golden[pair] - found[pair]) for pair in common]) < 1e-3


def seen_askew(view: Path) -> Image:
    """The image by a camera that stands elsewhere."""
    pixels = read_image(view).pixels
    warp = np.array([[0.95, -0.12, 20], [0.1, 1.02, -15], [2e-4, -1e-4, 1]])
    return read_image(cv2.warpPerspective(pixels, warp, pixels.shape[1::-1]))


@pytest.mark.parametrize("adaptive", [False, True])
def test_shipped_weights_in_bfloat16_on_the_bundled_views(views, shipped_weights, adaptive) -> None:
    """Decisions near their threshold fall either way."""
    model, _, _ = load_model(shipped_weights)
    model = model.with_policy(replace(model.config.policy, early_exit=adaptive, pruning=adaptive))
    matchers = [AttentionMatcher(model, precision=p) for p in ("float32", "bfloat16")]
    same = total = 0
    for pair in (views, *((view, seen_askew(view)) for view in views)):
        features = described(pair, 512)
        exact, coarse = (as_table(run(matcher, features)) for matcher in matchers)
        same += len(exact.keys() & coarse.keys())
        total += max(len(exact), len(coarse))
    assert total > 150 and same >= 0.98 * total


@pytest.mark.parametrize("preset", ["hybrid", "nearest-learned"])
@pytest.mark.parametrize("emulated", [True, False])
def test_emulated_half_precision_is_said(monkeypatch, emulated, preset):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: not emulated)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        matcher.load(preset, precision="auto", device="cpu")
        matcher.load(preset, precision="float32", device="cpu")
        assert not found
        matcher.load(preset, precision="bfloat16", device="cpu")
    said = [str(warning.message) for warning in found]
    assert len(said) == emulated and all("takes float32" in text for text in said)
