"""What `torch.compile` takes whole: layers and the front end network, without a graph break."""

from dataclasses import replace

import pytest
import torch
from random_matcher import WITH_MATCH_PROBABILITY, random_model

from matcher.extract.learned import FeatureNetwork
from matcher.match.network import inference_network

POINTS = 96
GUIDED = replace(WITH_MATCH_PROBABILITY, guided=True)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def random_numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def whole(function, backend: str):
    return torch.compile(function, fullgraph=True, backend=backend)


def tokens(batch: int = 1) -> tuple[torch.Tensor, int, torch.Tensor]:
    return random_numbers(batch, 2 * POINTS, 48), POINTS, random_numbers(batch, 2 * POINTS, 2, 24, seed=1)


@pytest.mark.parametrize(
    ("backend", "precision", "masked"), [("eager", "float32", True), ("aot_eager", "bfloat16", False)]
)
@torch.no_grad()
def test_a_layer_for_inference_is_one_graph(backend, precision, masked):
    layer = inference_network(random_model(config=GUIDED), "cpu", precision).layers[0]
    mask = torch.ones(2, 2 * POINTS, dtype=torch.bool)
    mask[1, 50:120] = False
    given = (*tokens(2), mask if masked else None)
    expected, found = layer(*given), whole(layer, backend)(*given)
    valid = mask if masked else torch.ones_like(mask)
    tolerance = 1e-4 if precision == "float32" else 0.1
    torch.testing.assert_close(found[valid], expected[valid], atol=tolerance, rtol=0)


def test_a_layer_in_training_is_one_graph():
    layer = random_model(config=GUIDED).layers[0].train()
    gradients = []
    for block in (layer, whole(layer, "aot_eager")):
        layer.zero_grad()
        block(*tokens()).square().sum().backward()
        gradients.append(layer.self_block.attention.qkv.weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=1e-2, rtol=1e-3)


@torch.no_grad()
def test_the_front_end_network_is_one_graph():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = FeatureNetwork().eval()
    pixels = random_numbers(1, 1, 64, 96).sigmoid()
    torch.testing.assert_close(whole(network, "eager")(pixels)[0], network(pixels)[0], atol=1e-4, rtol=0)
