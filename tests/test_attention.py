"""Attention over packed tokens against a loop written from the equation."""

import numpy as np
import pytest
import torch

from matcher.attention import scaled_dot_product
from matcher.kernels import calls as cpu
from matcher.match import blocks as packed
from matcher.match.blocks import Layout, attend, interleave

HEADS, WIDTH = 3, 8
UNIFORM = Layout(((5, 5), (5, 5)))
RAGGED = Layout(((5, 2), (0, 3), (4, 0), (0, 0), (1, 6)))


def tokens(layout: Layout, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(layout.lengths), HEADS, WIDTH, generator=rng) for _ in range(3))
    return 3 * q, k, v


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, cross: bool) -> np.ndarray:
    """softmax(q·k / √d) v in float64, one query at a time."""
    q, k, v = (x.detach().double().numpy() for x in (q, k, v))
    owner = [picture for picture, count in enumerate(layout.lengths) for _ in range(count)]
    out = np.zeros((len(owner), HEADS, WIDTH))
    for i, picture in enumerate(owner):
        source = picture + 1 - 2 * (picture % 2) if cross else picture
        keys = [j for j, other in enumerate(owner) if other == source]
        if not keys:
            continue
        for head in range(HEADS):
            weights = np.exp([q[i, head] @ k[j, head] / np.sqrt(WIDTH) for j in keys])
            values = [v[j, head] for j in keys]
            out[i, head] = np.average(values, axis=0, weights=weights)
    return out.reshape(len(owner), HEADS * WIDTH)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("layout", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_attend_is_the_equation(layout: Layout, cross: bool) -> None:
    q, k, v = tokens(layout)
    np.testing.assert_allclose(attend(q, k, v, layout, cross=cross), naive(q, k, v, layout, cross), atol=2e-6)


@pytest.mark.parametrize("cross", [False, True])
def test_the_gradient_path_is_the_stock_kernel(cross: bool) -> None:
    q, k, v = tokens(UNIFORM)
    stock = attend(q, k, v, UNIFORM, cross=cross)
    leaf = q.clone().requires_grad_()
    own = attend(leaf, k, v, UNIFORM, cross=cross)
    torch.testing.assert_close(own.detach(), stock, atol=2e-6, rtol=0)
    assert own.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("weights", [1, 2**19], ids=["blocks", "one block"])
def test_half_precision_in_blocks_is_the_equation(
    monkeypatch, dtype: torch.dtype, cross: bool, weights: int
) -> None:
    """Blocks of two rows, the last one cut short, and everything at once."""
    monkeypatch.setattr(cpu, "BLOCK_ROWS", 2)
    monkeypatch.setattr(cpu, "BLOCK_WEIGHTS", weights)
    for layout in (UNIFORM, RAGGED):
        q, k, v = (x.to(dtype) for x in tokens(layout))
        found = attend(q, k, v, layout, cross=cross)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.float(), naive(q, k, v, layout, cross), atol=0.05)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("layout", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_the_padded_call_of_other_devices_is_the_equation(layout: Layout, cross: bool) -> None:
    q, k, v = tokens(layout)
    padded = packed._attend_padded(q, k, v, layout, cross)
    np.testing.assert_allclose(padded, naive(q, k, v, layout, cross), atol=2e-6)


def test_gradients_of_the_gradient_path() -> None:
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 4, generator=rng, dtype=torch.float64) for n in (3, 5, 5))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(scaled_dot_product, inputs)


@pytest.mark.parametrize("cross", [False, True])
def test_uniform_and_ragged_layouts_agree(cross: bool) -> None:
    q, k, v = tokens(UNIFORM)
    extra = torch.zeros(1, HEADS, WIDTH)
    ragged = Layout((*UNIFORM.counts, (1, 0)))
    assert UNIFORM.uniform == 5
    assert ragged.uniform is None
    apart = attend(*(torch.cat([x, extra]) for x in (q, k, v)), ragged, cross=cross)
    torch.testing.assert_close(apart[:-1], attend(q, k, v, UNIFORM, cross=cross), atol=2e-6, rtol=0)


def test_points_without_a_partner_image_hear_nothing() -> None:
    layout = Layout(((4, 0), (0, 3)))
    q, k, v = tokens(layout)
    assert attend(q, k, v, layout, cross=True).eq(0).all()
    assert attend(q, k, v, layout, cross=False).ne(0).all()


@pytest.mark.parametrize("layout", [Layout(()), Layout(((0, 0), (0, 0)))])
def test_no_points_at_all(layout: Layout) -> None:
    nothing = torch.zeros(0, HEADS, WIDTH)
    for cross in (False, True):
        assert attend(nothing, nothing, nothing, layout, cross=cross).shape == (0, HEADS * WIDTH)


@pytest.mark.parametrize("layout", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_permuting_points_permutes_messages(layout: Layout) -> None:
    q, k, v = tokens(layout)
    rng = torch.Generator().manual_seed(2)
    order = torch.cat(
        [
            start + torch.randperm(n, generator=rng)
            for start, n in zip(layout.starts, layout.lengths, strict=False)
        ]
    )
    for cross in (False, True):
        expected = attend(q, k, v, layout, cross=cross)[order]
        permuted = attend(q[order], k[order], v[order], layout, cross=cross)
        torch.testing.assert_close(permuted, expected, atol=2e-6, rtol=0)


def test_layout_splits_what_interleave_joins() -> None:
    first = [torch.arange(n).float() for n, _ in RAGGED.counts]
    second = [100 + torch.arange(n).float() for _, n in RAGGED.counts]
    parts = RAGGED.split(interleave(first, second))
    for (a, b), expected_a, expected_b in zip(parts, first, second, strict=True):
        assert a.equal(expected_a)
        assert b.equal(expected_b)
