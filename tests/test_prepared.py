"""Blocks prepared for inference say what the blocks themselves say."""

from dataclasses import replace

import pytest
import torch

from matcher.config import ContextConfig
from matcher.match.network import prepared
from matcher.match.network.context import Layer
from matcher.match.network.packed import Layout
from matcher.presets import find_preset

LAYOUTS = [Layout(((40, 40),)), Layout(((33, 70), (0, 5), (12, 1)))]
CONFIGS = {
    "lightglue": ContextConfig(dim=64, heads=2),
    "superglue": ContextConfig(dim=64, heads=4, shared_qk=False, norm="batch", activation="relu"),
    "without bias": ContextConfig(dim=64, heads=2, bias=False),
    "loftr": replace(find_preset("loftr-outdoor").matcher.context, dim=64),
}


@torch.no_grad()
def random_layer(config: ContextConfig) -> Layer:
    """All parameters and running means away from where an untrained layer has them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layer = Layer(config).eval()
        for name, value in layer.state_dict().items():
            if value.is_floating_point():
                spread = 0.1 + torch.rand_like(value)
                value.copy_(
                    spread if "running_var" in name else spread * value + 0.1 * torch.randn_like(value)
                )
    return layer.requires_grad_(False)


def run(layer: Layer, layout: Layout, turned: bool) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    count, dim = layout.starts[-1], layer.self_block.qkv.in_features
    x = torch.randn(count, dim, generator=rng)
    angles = torch.randn(count, dim // layer.self_block.heads // 2, generator=rng)
    with torch.inference_mode():
        return layer(x, torch.stack([angles.cos(), angles.sin()], 1) if turned else None, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_prepared_layers_are_the_layers(name: str, layout: Layout, monkeypatch) -> None:
    layer = random_layer(CONFIGS[name])
    turned = name in ("lightglue", "without bias")
    expected = run(layer, layout, turned)
    names = set(layer.state_dict())
    layer.prepare(torch.float32)
    assert set(layer.state_dict()) == names
    assert (layer.self_block.prepared is None) == (name == "loftr")
    for cached in (prepared.CACHED_ROWS, 1):  # all rows at once, and the fewest
        monkeypatch.setattr(prepared, "CACHED_ROWS", cached)
        torch.testing.assert_close(run(layer, layout, turned), expected, atol=2e-5, rtol=1e-5)


def test_half_precision_is_about_as_near_to_the_truth_as_before() -> None:
    layout = LAYOUTS[0]
    exact = random_layer(CONFIGS["lightglue"])
    truth = run(exact, layout, turned=True)
    coarse = random_layer(CONFIGS["lightglue"]).to(torch.bfloat16)
    before = (run(coarse, layout, turned=True) - truth).abs().mean()
    coarse = random_layer(CONFIGS["lightglue"])
    coarse.prepare(torch.bfloat16)
    coarse.to(torch.bfloat16)
    after = (run(coarse, layout, turned=True) - truth).abs().mean()
    assert 0 < after < 1.2 * before


def test_gradients_flow_where_nothing_was_prepared() -> None:
    layer = random_layer(CONFIGS["lightglue"]).requires_grad_(True)
    x = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
    layer(x, None, LAYOUTS[0]).sum().backward()
    assert all(p.grad is not None for name, p in layer.named_parameters() if "key" not in name)


@pytest.mark.parametrize("rows", [0, 1, 64, 700])
def test_rows_are_covered_in_blocks_of_few_lengths(rows: int) -> None:
    parts = list(prepared.rows_at_once(rows, 2**12, torch.device("cpu")))
    assert sorted({i for part in parts for i in range(rows)[part]}) == list(range(rows))
    assert all(part.stop <= rows for part in parts)
    if rows >= prepared.ROW_STEP:
        assert all((part.stop - part.start) % prepared.ROW_STEP == 0 for part in parts)
        assert sum(part.stop - part.start for part in parts) < rows + prepared.ROW_STEP


@pytest.mark.parametrize("rows", [0, 5, 64, 150])
def test_a_map_by_blocks_is_the_map(rows: int) -> None:
    rng = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=rng).bfloat16() for shape in ((rows, 16), (24, 16), (24,))
    )
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(prepared.linear(x, weight, bias), expected)
