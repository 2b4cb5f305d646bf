"""The score functions as building blocks, against their equations in float64 loops."""

import doctest

import numpy as np
import pytest
import torch
from torch import Tensor

import matcher.attention
from matcher.attention import (
    AdditiveAttention,
    GeneralAttention,
    MultiHeadAttention,
    build_attention,
    linear_attention,
    scaled_dot_product,
)
from matcher.config import ContextConfig
from matcher.match.blocks import Layout
from matcher.match.context import build_layer

N, M, D = 5, 7, 4
NAMES = ("softmax", "linear", "additive", "general")


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, M, M))


def kernel(name: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        built = build_attention(name, D)
    return built.double() if isinstance(built, torch.nn.Module) else built


def naive(q: Tensor, k: Tensor, v: Tensor, score, allowed=lambda i, j: True) -> np.ndarray:
    """Row by row: exp(score) normalised over the allowed columns, times the values."""
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        columns = [j for j in range(len(k)) if allowed(i, j)]
        weights = np.array([score(q[i].detach().numpy(), k[j].detach().numpy()) for j in columns])
        if len(weights):
            weights = np.exp(weights - weights.max())
            out[i] = (weights / weights.sum()) @ v[columns].numpy()
    return out


def dot(q, k):
    return q @ k / np.sqrt(D)


def test_scaled_dot_product(qkv):
    np.testing.assert_allclose(scaled_dot_product(*qkv), naive(*qkv, dot), rtol=1e-6)


def test_boolean_and_additive_masks_agree(qkv):
    mask = torch.rand(N, M, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[2] = False
    expected = naive(*qkv, dot, allowed=lambda i, j: bool(mask[i, j]))
    np.testing.assert_allclose(scaled_dot_product(*qkv, mask), expected, rtol=1e-6)
    additive = torch.zeros(N, M, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    np.testing.assert_allclose(scaled_dot_product(*qkv, additive), expected, rtol=1e-6)
    assert scaled_dot_product(*qkv, mask)[2].eq(0).all()


def test_under_a_causal_mask_a_row_is_independent_of_later_ones(qkv):
    _, k, v = qkv
    out = scaled_dot_product(k, k, v, causal=True)
    np.testing.assert_allclose(out, naive(k, k, v, dot, allowed=lambda i, j: j <= i), rtol=1e-6)
    later_k, later_v = k.clone(), v.clone()
    later_k[4:], later_v[4:] = 9.0, -9.0
    assert scaled_dot_product(later_k, later_k, later_v, causal=True)[:4].equal(out[:4])


def test_linear_attention(qkv):
    def feature(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def score(q, k):
        return np.log(feature(q) @ feature(k))

    np.testing.assert_allclose(linear_attention(*qkv), naive(*qkv, score), rtol=1e-6)
    mask = torch.tensor([True, False, True, True, False, True, True])
    expected = naive(*qkv, score, allowed=lambda i, j: bool(mask[j]))
    np.testing.assert_allclose(linear_attention(*qkv, mask), expected, rtol=1e-6)


def test_additive_attention(qkv):
    block: AdditiveAttention = kernel("additive")
    w_q, w_k, w = (p.weight.detach().numpy() for p in (block.query, block.key, block.score))
    expected = naive(*qkv, lambda q, k: (w @ np.tanh(w_q @ q + w_k @ k)).item())
    np.testing.assert_allclose(block(*qkv).detach(), expected, rtol=1e-6)


def test_general_attention(qkv):
    block: GeneralAttention = kernel("general")
    form = block.form.weight.detach().numpy()
    np.testing.assert_allclose(block(*qkv).detach(), naive(*qkv, lambda q, k: (form @ q) @ k), rtol=1e-6)


def test_multi_head_attention_is_the_heads_one_by_one(qkv):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        block = MultiHeadAttention(8, 2).double()
    x, source = torch.randn(1, N, 8, dtype=torch.float64), torch.randn(1, M, 8, dtype=torch.float64)
    weights, biases = block.qkv.weight.detach().chunk(3), block.qkv.bias.detach().chunk(3)
    projected = [y[0] @ w.t() + b for y, w, b in zip((x, source, source), weights, biases, strict=True)]
    heads = [torch.from_numpy(naive(*(y[:, 4 * h : 4 * h + 4] for y in projected), dot)) for h in range(2)]
    torch.testing.assert_close(block(x, source)[0], block.out(torch.cat(heads, dim=1)))
    mask = torch.rand(N, M, generator=torch.Generator().manual_seed(4)) > 0.3
    heads = [
        torch.from_numpy(
            naive(*(y[:, 4 * h : 4 * h + 4] for y in projected), dot, lambda i, j: bool(mask[i, j]))
        )
        for h in range(2)
    ]
    for given in (mask, mask.expand(1, N, M)):
        torch.testing.assert_close(block(x, source, mask=given)[0], block.out(torch.cat(heads, dim=1)))
    causal = block(x, causal=True)
    later = x.clone()
    later[:, 3:] = 7.0
    torch.testing.assert_close(block(later, causal=True)[:, :3], causal[:, :3])
    assert not torch.allclose(causal, block(x))


def test_masks_are_for_softmax_attention():
    x = torch.randn(1, N, 8)
    for name in ("linear", "additive", "general"):
        with pytest.raises(ValueError, match="softmax"):
            MultiHeadAttention(8, 2, name)(x, causal=True)


def test_gradients_flow_past_rows_that_attend_to_nothing(qkv):
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    mask = torch.ones(N, M, dtype=torch.bool)
    mask[2] = False
    scaled_dot_product(q, k, v, mask).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v)) and q.grad[2].eq(0).all()


def test_shared_queries_and_keys_are_one_projection(qkv):
    block = MultiHeadAttention(8, 2, shared_qk=True)
    parts = block.project(torch.randn(N, 8))
    assert parts.shape == (N, 2, 2, 4) and block.qkv.out_features == 16
    keys, queries = block.project(torch.ones(N, 8), -2)[:, 0], block.project(torch.ones(N, 8), 0, 1)[:, 0]
    torch.testing.assert_close(keys, queries)


def test_the_examples_in_the_docstrings():
    failed, tried = doctest.testmod(matcher.attention)
    assert tried > 10 and not failed


@pytest.mark.parametrize("name", NAMES)
def test_queries_permute_keys_do_not_matter_values_bound(name, qkv):
    q, k, v = qkv
    attention = kernel(name)
    out = attention(q, k, v)
    rows, columns = torch.randperm(N), torch.randperm(M)
    torch.testing.assert_close(attention(q[rows], k, v), out[rows])
    torch.testing.assert_close(attention(q, k[columns], v[columns]), out)
    assert (out <= v.amax(0) + 1e-5).all()
    assert (out >= v.amin(0) - 1e-5).all()


@pytest.mark.parametrize("name", NAMES)
def test_huge_scores_stay_finite(name, qkv):
    q, k, v = (x.float() for x in qkv)
    block = build_attention(name, D)
    assert torch.as_tensor(block(1e4 * q, k, v)).isfinite().all()
    assert torch.as_tensor(block(-1e4 * q, k, v)).isfinite().all()


def test_linear_attention_takes_linear_memory():
    """200,000 keys and queries: a matrix of weights would take 160 GB."""
    x = torch.ones(1, 200_000, D)
    torch.testing.assert_close(linear_attention(x, x, x), x, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_selects_the_score_function(name):
    layer = build_layer(ContextConfig(dim=8, heads=2, depth=1, attention=name))
    out = layer(torch.randn(9, 8), None, Layout(((4, 5),)))
    assert out.shape == (9, 8)
    assert any("score" in key for key in layer.state_dict()) == (name in ("additive", "general"))
