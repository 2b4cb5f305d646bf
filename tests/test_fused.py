"""Layers fused for inference give what the trained layers give, and share nothing with them."""

from dataclasses import replace

import pytest
import torch

from matcher.config import ContextConfig
from matcher.kernels import calls as linear
from matcher.match import context as fused
from matcher.match.blocks import Layout
from matcher.match.context import FusedSelfBlock, Layer, build_layer, fuse_layer
from matcher.presets import find_preset

WIDTH = 64
LAYOUTS = [Layout(((40, 40),)), Layout(((33, 70), (0, 5), (12, 1)))]
CONFIGS = {
    "lightglue": ContextConfig(dim=64, heads=2),
    "superglue": ContextConfig(dim=64, heads=4, shared_qk=False, norm="batch", activation="relu"),
    "scaled": ContextConfig(dim=64, heads=2, scale_logits_above=8),
    "without bias": ContextConfig(dim=64, heads=2, bias=False),
    "additive": ContextConfig(dim=64, heads=2, attention="additive"),
    "general": ContextConfig(dim=64, heads=2, attention="general"),
    "linear": ContextConfig(dim=64, heads=2, attention="linear"),
    "loftr": replace(find_preset("loftr-outdoor").matcher.context, dim=64),
}


@torch.no_grad()
def random_layer(config: ContextConfig) -> Layer:
    """All parameters and running means away from where an untrained layer has them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layer = build_layer(config).eval()
        for name, value in layer.state_dict().items():
            if value.is_floating_point():
                spread = 0.1 + torch.rand_like(value)
                value.copy_(
                    spread if "running_var" in name else spread * value + 0.1 * torch.randn_like(value)
                )
    return layer.requires_grad_(False)


def run(layer: Layer, layout: Layout, turned: bool, heads: int = 2) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    count = layout.starts[-1]
    x = torch.randn(count, WIDTH, generator=rng)
    angles = torch.randn(count, WIDTH // heads // 2, generator=rng)
    with torch.inference_mode():
        return layer(x, torch.stack([angles.cos(), angles.sin()], 1) if turned else None, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_are_the_layers(name: str, layout: Layout, monkeypatch) -> None:
    layer = random_layer(CONFIGS[name])
    rotated = name not in ("superglue", "loftr")
    expected = run(layer, layout, rotated)
    inference = fuse_layer(layer, torch.float32)
    stays = name in ("loftr", "additive", "general")  # their form cannot be fused
    assert isinstance(inference.self_block, FusedSelfBlock) != stays
    for cached in (linear.CACHED_ROWS, 1):  # all rows at once, and the fewest
        monkeypatch.setattr(linear, "CACHED_ROWS", cached)
        monkeypatch.setattr(fused, "CACHED_ROWS", cached)
        torch.testing.assert_close(run(inference, layout, rotated), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(run(layer, layout, rotated), expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_changing_the_trained_weights_does_not_reach_the_fused_layer(name: str) -> None:
    layer = random_layer(CONFIGS[name])
    inference = fuse_layer(layer, torch.float32)
    rotated = name not in ("superglue", "loftr")
    before, trained = run(inference, LAYOUTS[0], rotated), run(layer, LAYOUTS[0], rotated)
    with torch.no_grad():
        for value in layer.state_dict().values():
            if value.is_floating_point():
                value.mul_(1.5).add_(0.1)
    assert torch.equal(run(inference, LAYOUTS[0], rotated), before)
    assert not torch.allclose(run(layer, LAYOUTS[0], rotated), trained, atol=1e-2)


def test_half_precision_is_about_as_near_to_the_truth_as_before() -> None:
    layout, exact = LAYOUTS[0], random_layer(CONFIGS["lightglue"])
    truth = run(exact, layout, turned=True)
    inference = fuse_layer(exact, torch.bfloat16)
    before = (run(exact.to(torch.bfloat16), layout, turned=True) - truth).abs().mean()
    after = (run(inference, layout, turned=True) - truth).abs().mean()
    assert 0 < after < 1.2 * before


def test_a_layer_trains_after_it_was_fused() -> None:
    layer = random_layer(CONFIGS["lightglue"]).requires_grad_(True)
    inference = fuse_layer(layer, torch.float32)
    x = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
    layer(x, None, LAYOUTS[0]).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert not any(p.requires_grad for p in inference.parameters())
