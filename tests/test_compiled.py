"""The compiled attention kernel: what it computes, what it declines, and that nothing needs it."""

import shutil
import sys

import pytest
import torch
from torch.nn import functional as F

from matcher.network import compiled
from matcher.network.attention import scaled_dot_product
from matcher.types import UsageError

NEEDED = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported() or shutil.which("g++") is None, reason="needs AMX and a compiler"
)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The kernel, built in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    compiled._load.cache_clear()
    yield compiled.build()
    compiled._load.cache_clear()


def random_heads(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@NEEDED
@pytest.mark.parametrize(
    ("heads", "n", "m", "width"), [(4, 200, 333, 64), (1, 1, 1, 32), (2, 33, 31, 96), (3, 64, 32, 128)]
)
def test_the_kernel_is_the_equation(kernel, heads: int, n: int, m: int, width: int) -> None:
    # Heads lie side by side in the tokens, as a projection leaves them, with other channels between.
    q, k, v = (random_heads(2, c, heads + 1, width, seed=i)[:, :, 1:] for i, c in enumerate((n, m, m)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found = compiled.attend_compiled(q, k, v)
    assert found is not None and found.shape == q.shape
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    stock = F.scaled_dot_product_attention(q, k, v).double()
    assert (found.double() - exact).abs().max() < 2 * (stock - exact).abs().max() + 0.01 * exact.abs().max()
    with torch.inference_mode():
        assert torch.equal(scaled_dot_product(q, k, v), found)


@NEEDED
def test_rows_do_not_depend_on_each_other(kernel) -> None:
    q, k, v = (random_heads(2, 70, 64, seed=i) for i in range(3))
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    found = compiled.attend_compiled(q, k, v)
    assert torch.equal(compiled.attend_compiled(q[:, order], k, v), found[:, order])
    assert torch.equal(compiled.attend_compiled(q[:, :33], k, v), found[:, :33])


@NEEDED
def test_threads_do_not_change_a_bit(kernel) -> None:
    q, k, v = (random_heads(3, 500, 64, seed=i) for i in range(3))
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(compiled.attend_compiled(q, k, v))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@NEEDED
def test_what_the_kernel_declines(kernel, monkeypatch) -> None:
    q, k, v = (random_heads(2, 40, 64, seed=i) for i in range(3))
    assert compiled.attend_compiled(q, k, v) is not None
    assert compiled.attend_compiled(30 * q, k, v) is None  # scores beyond what needs no maximum
    assert compiled.attend_compiled(q * torch.nan, k, v) is None
    assert compiled.attend_compiled(q.float(), k.float(), v.float()) is None
    assert compiled.attend_compiled(*(x[..., :40] for x in (q, k, v))) is None
    assert compiled.attend_compiled(q, k[:, :0], v[:, :0]) is None
    with torch.inference_mode():
        large = scaled_dot_product(30 * q, k, v)
        expected = F.scaled_dot_product_attention(30 * q, k, v)
    torch.testing.assert_close(large, expected, atol=0.05, rtol=0.05)
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert compiled.attend_compiled(q, k, v) is None


def test_nothing_is_compiled_without_being_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled._load.cache_clear()
    q = random_heads(1, 8, 32)
    assert compiled.attend_compiled(q, q, q) is None
    assert list(tmp_path.iterdir()) == []
    compiled._load.cache_clear()


def test_a_library_that_does_not_load_is_left_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = compiled.library_path()
    path.parent.mkdir()
    path.write_bytes(b"no library")
    compiled._load.cache_clear()
    q = random_heads(1, 8, 32)
    assert compiled.attend_compiled(q, q, q) is None
    compiled._load.cache_clear()


def test_what_is_missing_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(UsageError, match="no AMX"):
        compiled.build()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="install g\\+\\+"):
        compiled.build()
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++")
    monkeypatch.setattr(compiled, "SOURCE", broken)
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    with pytest.raises(UsageError, match="cannot compile"):
        compiled.build()
