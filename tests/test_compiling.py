"""What `torch.compile` takes whole: blocks, front end network and Sinkhorn, without a graph break."""

from dataclasses import replace

import pytest
import torch
from random_matcher import WITH_MATCH_PROBABILITY, random_model

from matcher.extract.learned import FeatureNetwork
from matcher.match.blocks import Layout
from matcher.match.gpu import Transport
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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_blocks_for_inference_are_one_graph_each(backend, precision, masked):
    layer = inference_network(random_model(config=GUIDED), "cpu", precision).layers[0]
    tokens, rotations = random_numbers(2 * POINTS, 48), random_numbers(2 * POINTS, 2, 12, seed=1)
    live = torch.ones(2, POINTS, dtype=torch.bool)
    live[1, 50:] = False
    layout = Layout(((POINTS, POINTS),), live if masked else None)
    for block, given in ((layer.self_block, (tokens, rotations)), (layer.cross_block, (tokens,))):
        expected, found = block(*given, layout), whole(block, backend)(*given, layout)
        torch.testing.assert_close(found, expected, atol=1e-4 if precision == "float32" else 0.1, rtol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_in_training_are_one_graph_each(backend):
    layer = random_model(config=GUIDED).layers[0].train()
    given = random_numbers(2 * POINTS, 48), random_numbers(2 * POINTS, 2, 12, seed=1)
    layout = Layout(((POINTS, POINTS),))
    gradients = []
    for block in (layer, whole(layer, backend)):
        layer.zero_grad()
        block(*given, layout).square().sum().backward()
        gradients.append(layer.self_block.attention.qkv.weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch.no_grad()
def test_the_front_end_network_is_one_graph(backend):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = FeatureNetwork().eval()
    pixels = random_numbers(1, 1, 64, 96).sigmoid()
    torch.testing.assert_close(whole(network, backend)(pixels)[0], network(pixels)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch.no_grad()
def test_sinkhorn_on_a_gpu_is_one_graph(backend):
    live = torch.ones(2, 64, dtype=torch.bool)
    live[1, 40:] = False

    def potentials(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        transport = Transport(live, live.flip(0))
        transport.begin(scores, None, 1e-2, 100)
        transport.iterate(8)
        transport.absorb()
        transport.iterate(8)
        return transport.finish()

    scores = 3 * random_numbers(2, 65, 65)
    for found, expected in zip(whole(potentials, backend)(scores), potentials(scores), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
