"""Linear maps of rows: who computes them where, in which blocks, and that the numbers stay."""

import pytest
import torch
from torch.nn import functional as F

from matcher.kernels import calls as linear

BY_ONEDNN = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch has no such map"
)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The rows of every map that oneDNN computes, as on a processor where MKL is slow."""
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)
    counted, stock = [], torch.ops.mkldnn._linear_pointwise

    def count(x, *given):
        counted.append(len(x))
        return stock(x, *given)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", count, raising=False)
    return counted


def random_map(rows: int, inputs: int = 96, outputs: int = 128) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(rows)
    return [torch.randn(*size, generator=rng) for size in ((rows, inputs), (outputs, inputs), (outputs,))]


@pytest.mark.parametrize("rows", [0, 1, 64, 700])
def test_rows_are_covered_in_blocks_of_few_lengths(rows: int) -> None:
    parts = list(linear.rows_at_once(rows, 2**12, torch.device("cpu")))
    assert sorted({i for part in parts for i in range(rows)[part]}) == list(range(rows))
    assert all(part.stop <= rows for part in parts)
    if rows >= linear.ROW_STEP:
        assert all((part.stop - part.start) % linear.ROW_STEP == 0 for part in parts)
        assert sum(part.stop - part.start for part in parts) < rows + linear.ROW_STEP


@pytest.mark.parametrize("rows", [0, 5, 64, 150])
def test_a_map_by_blocks_is_the_map(rows: int) -> None:
    x, weight, bias = (value.bfloat16() for value in random_map(rows, 16, 24))
    torch.testing.assert_close(linear.linear(x, weight, bias), F.linear(x, weight, bias))


@BY_ONEDNN
@pytest.mark.parametrize("rows", [64, 150, 1024])
@torch.no_grad()
def test_a_map_by_onednn_is_the_map(calls, rows: int) -> None:
    x, weight, bias = random_map(rows)
    for given in (x, x.t().contiguous().t(), torch.cat([x, x], dim=1)[:, : x.shape[1]]):
        for added in (bias, None):
            torch.testing.assert_close(
                linear.linear(given, weight, added), F.linear(x, weight, added), atol=1e-4, rtol=1e-4
            )
    torch.testing.assert_close(linear.linear(x, weight[:, :], bias[:]), F.linear(x, weight, bias))
    assert len(calls) >= 7 and all(count % linear.ROW_STEP == 0 for count in calls)


@BY_ONEDNN
def test_what_stays_with_pytorch(calls) -> None:
    """Gradients, autocast, few rows, few weights, and processors that MKL is made for."""
    x, weight, bias = random_map(128)
    linear.linear(x, weight, bias)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear.linear(x, weight, bias).dtype == torch.bfloat16
        linear.linear(x[:9], weight, bias)
        linear.linear(x, weight[:2], bias[:2])
        assert not calls
        linear.linear(x, weight, bias)
    assert calls == [128]


@BY_ONEDNN
@pytest.mark.parametrize(
    ("maker", "flags", "slow"),
    [
        ("AuthenticAMD", {"avx2", "avx512f"}, True),
        ("AuthenticAMD", {"avx2"}, False),
        ("GenuineIntel", {"avx2", "avx512f"}, False),
        (None, {"neon"}, False),
    ],
)
def test_mkl_is_slow_where_it_leaves_avx512_alone(monkeypatch, maker, flags, slow) -> None:
    monkeypatch.setattr(linear, "processor_maker", lambda: maker)
    monkeypatch.setattr(linear, "processor_flags", lambda: frozenset(flags))
    assert linear.mkl_is_slow.__wrapped__() is slow
